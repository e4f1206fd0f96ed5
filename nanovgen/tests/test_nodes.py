"""Two nodes: network namespaces that a pair of virtual Ethernet devices joins. torchrun and the SLURM template on them.

Each has its own loopback and its own address, so what passes between their ranks goes over the pair, and is counted there.
SLURM's two commands that the template calls are stood in for by scripts that enter the namespaces.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from conftest import PROMPT, ROOT
from safetensors.torch import load_file
from serving import PATIENCE, SOON, children, wait_for
from test_faults import here

SBATCH = ROOT / "nanovgen" / "recipes" / "nvl72.sbatch"
RECIPE = dict(cfg_size=2, ulysses_size=2, parallel_vae_size=2)
HEAD, OTHER, PORT = "10.77.0.1", "10.77.0.2", "29511"
SCRIPTS = {  # SLURM's, for the two nodes
    "scontrol": f"#!/bin/sh\nprintf '%s\\n' {HEAD} {OTHER}\n",
    "srun": """#!/usr/bin/env bash
# One task a node; the first that fails ends the other.
shift 2
pids=()
trap 'kill "${pids[@]}" 2>/dev/null' TERM
for node in 0 1; do
    SLURM_NODEID=$node ip netns exec "$NODES-$node" "$@" &
    pids+=($!)
done
status=0
for _ in 0 1; do
    wait -n || { status=$?; kill "${pids[@]}" 2>/dev/null; }
done
exit $status
""",
}


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@pytest.fixture(scope="module")
def nodes():
    """The two namespaces' common name: NAME-0 and NAME-1."""
    name = f"nanovgen{os.getpid()}"
    if not shutil.which("ip"):
        pytest.skip("there is no `ip` here to make network namespaces with")
    try:
        for node in "01":
            ip("netns", "add", f"{name}-{node}")
        ip("link", "add", "pair", "netns", f"{name}-0", "type", "veth", "peer", "name", "pair", "netns", f"{name}-1")
        for node, address in (("0", HEAD), ("1", OTHER)):
            ip("-n", f"{name}-{node}", "addr", "add", f"{address}/24", "dev", "pair")
            for device in ("lo", "pair"):
                ip("-n", f"{name}-{node}", "link", "set", device, "up")
    except subprocess.CalledProcessError as error:
        remove(name)
        pytest.skip(f"no network namespaces can be made here: {error.stderr.strip()}")
    yield name
    remove(name)


def remove(name: str) -> None:
    for node in "01":
        subprocess.run(["ip", "netns", "del", f"{name}-{node}"], capture_output=True)


def sent(nodes: str) -> int:
    """Bytes that node 1 has sent to node 0."""
    read = ["ip", "netns", "exec", f"{nodes}-1", "cat", "/sys/class/net/pair/statistics/tx_bytes"]
    return int(subprocess.run(read, check=True, capture_output=True, text=True).stdout)


@pytest.fixture
def start(nodes, tmp_path):
    """A command in node 0, or another; gloo is told the device, for this machine's name is of no address there."""
    started = []

    def call(*command: object, node: int = 0, **env: str) -> subprocess.Popen:
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        env = os.environ | {"GLOO_SOCKET_IFNAME": "pair", "OMP_NUM_THREADS": "1", "PATH": path, "NODES": nodes} | env
        with (tmp_path / f"stdout{node}").open("w") as out, (tmp_path / f"stderr{node}").open("w") as err:
            words = ["ip", "netns", "exec", f"{nodes}-{node}", *map(str, command)]
            started.append(subprocess.Popen(words, stdout=out, stderr=err, stdin=subprocess.DEVNULL, env=env))
        return started[-1]

    yield call
    for process in started:
        if process.poll() is None:
            process.terminate()
            process.wait(timeout=PATIENCE)


@pytest.fixture
def torchrun(start):
    """run.py on two ranks of each node, by the two commands that a user types."""

    def call(*request: object) -> list[subprocess.Popen]:
        common = ("--nnodes", 2, "--nproc-per-node", 2, "--master-addr", HEAD, "--master-port", PORT)
        return [start("torchrun", *common, "--node-rank", node, ROOT / "run.py", *request, node=node) for node in (0, 1)]

    return call


def latents(stem: str) -> torch.Tensor:
    return load_file(f"{stem}.latents.safetensors")["latents"]


def request(folder: Path, out: str, **more: object) -> list[object]:
    given = {"size": "64x32", "frames": 9, "steps": 3, "shift": 5, "check": 1} | more
    return [PROMPT, "--model", folder, "--out", out, *(x for name, value in given.items() for x in (f"--{name}", value))]


def alike(one: str, many: str) -> None:
    """cfg and Ulysses move data alone, the VAE's strips add in another order."""
    a, b = latents(one), latents(many)
    assert (a - b).norm() <= 1e-5 * a.norm()


def test_two_nodes_equal_one_rank(cli, torchrun, nodes, tiny_folder, recipe, tmp_path):
    assert cli(*request(tiny_folder, "one.mp4")).code == 0
    before = sent(nodes)
    runs = torchrun(*request(tiny_folder, "many.mp4"), "--recipe", recipe(**RECIPE))
    assert [run.wait(timeout=400) for run in runs] == [0, 0], (tmp_path / "stderr0").read_text()
    alike("one", "many")
    # A step sends half of the guidance each way: ranks 2 and 3, of the other node, one velocity each.
    assert sent(nodes) - before > 3 * 2 * latents("one").nbytes
    assert "ranks     4: cfg 2, ulysses 2" in (tmp_path / "stdout0").read_text() and not (tmp_path / "stdout1").read_text()


@pytest.mark.parametrize("node", [0, 1])
def test_a_rank_of_one_node_is_killed(torchrun, tiny_folder, recipe, tmp_path, node):
    """Both nodes end."""
    runs = torchrun(*request(tiny_folder, "v.mp4", steps=100000), "--recipe", recipe(**RECIPE))
    wait_for(lambda: "step/s" in (tmp_path / "stderr0").read_text(), 300)
    begin = time.time()
    os.kill(children(runs[node].pid)[1], signal.SIGKILL)  # `ip netns exec` has become torchrun
    wait_for(lambda: all(run.poll() is not None for run in runs) and not here(), SOON, f"left: {here()}")
    assert [run.returncode for run in runs] == [1, 1] and not [*Path.cwd().iterdir()]
    print(f"node {node}: all gone after {time.time() - begin:.1f} s")


def test_the_template_is_sound():
    subprocess.run(["bash", "-n", str(SBATCH)], check=True)
    shellcheck = shutil.which("shellcheck") or str(Path(sys.executable).parent / "shellcheck")
    done = subprocess.run([shellcheck, str(SBATCH)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    text = SBATCH.read_text()
    nodes, gpus = (int(re.search(rf"#SBATCH --{name}=(\d+)", text)[1]) for name in ("nodes", "gpus-per-node"))
    assert nodes * gpus == 72 and "--recipe nvl72" in text and "--ntasks-per-node=1\n" in text


@pytest.fixture
def sbatch(start, nodes, tmp_path):
    """The template as SLURM would start it on the first of two nodes, each of two ranks."""

    def call(*arguments: object) -> subprocess.Popen:
        scripts = tmp_path / "bin"
        scripts.mkdir()
        for name, text in SCRIPTS.items():
            (scripts / name).write_text(text)
            (scripts / name).chmod(0o755)
        job = {"SLURM_JOB_NODELIST": "node[0-1]", "SLURM_NNODES": "2", "SLURM_JOB_ID": str(os.getpid()), "NODES": nodes}
        path = f"{scripts}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        return start("bash", SBATCH, *arguments, **job, SLURM_SUBMIT_DIR=str(ROOT), SLURM_GPUS_ON_NODE="2", PATH=path)

    return call


def test_the_template_makes_a_video(cli, sbatch, tiny_folder, recipe, tmp_path):
    assert cli(*request(tiny_folder, "one.mp4")).code == 0
    run = sbatch(*request(tiny_folder, Path("many.mp4").resolve()), "--recipe", recipe(**RECIPE))
    assert run.wait(timeout=400) == 0, (tmp_path / "stderr0").read_text()
    alike("one", "many")


def test_the_template_serves(sbatch, tiny_folder, recipe, tmp_path):
    """The server on both nodes, and its client beside rank 0, which waits for /health; at the client's end all ends."""
    pytest.importorskip("nanovgen.serve", reason="nanovgen.serve is not here")
    warm = ("--size", "64x32", "--frames", 5, "--steps", 2, "--shift", 5, "--recipe", recipe(**RECIPE))
    ask = ("--requests", 2, "--out", tmp_path / "bench.json")
    run = sbatch("serve", "--model", tiny_folder, *warm, "--folder", tmp_path / "videos", "--", *ask)
    assert run.wait(timeout=400) == 0, (tmp_path / "stderr0").read_text()
    assert '"requests": 2' in (tmp_path / "bench.json").read_text() and len([*(tmp_path / "videos").rglob("*.mp4")]) == 2
    wait_for(lambda: not here(), SOON, f"left: {here()}")


def test_a_server_that_cannot_start_ends_the_template(sbatch, tiny_folder, tmp_path):
    """A recipe of another number of ranks: the client must not wait for it."""
    pytest.importorskip("nanovgen.serve", reason="nanovgen.serve is not here")
    run = sbatch("serve", "--model", tiny_folder, "--recipe", "8gpu", "--folder", tmp_path / "videos")
    assert run.wait(timeout=300) == 1 and "the server ended before its client" in (tmp_path / "stderr0").read_text()
