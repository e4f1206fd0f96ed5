"""A run on many ranks of which one fails, or that is interrupted: all end soon, and nothing half is left.

test_kills.py has those of which one is killed, by rank and stage.
"""

import os
import re
import signal
import socket
import time
from collections.abc import Callable
from multiprocessing import active_children
from pathlib import Path

import pytest
from conftest import PROMPT
from serving import PATIENCE, SOON, children, wait_for
from torch.distributed import TCPStore

from nanovgen import generate, launch

FOREVER = ("--size=64x32", "--frames=5", "--steps=100000", "--out=v.mp4")
LONG_DECODE = ("--size=64x32", "--frames=1601", "--steps=1", "--chunk=1", "--out=v.mp4")


def names() -> set[str]:
    return {path.name for path in Path.cwd().iterdir()}


def here() -> list[str]:
    """Other processes that work in this folder: ranks, and encoders whose parent may be gone."""
    found = []
    for cwd in Path("/proc").glob("[0-9]*/cwd"):
        try:
            if cwd.readlink() == Path.cwd() and int(cwd.parent.name) != os.getpid():
                found.append((cwd.parent / "cmdline").read_text().replace("\0", " "))
        except OSError:
            continue
    return found


@pytest.fixture
def started(spawn, tiny_folder, recipe, tmp_path):
    """run.py on 4 ranks, VAE on 2, and the ranks' pids once `condition` holds."""
    pids = []

    def start(request: tuple, condition: Callable[[], object], **parallel: object):
        path = recipe(**({"ring_size": 2, "cfg_size": 2, "parallel_vae_size": 2} | parallel))
        process = spawn(PROMPT, "--model", tiny_folder, *request, "--ranks", 4, "--recipe", path)
        pids.append(process.pid)
        wait_for(condition)
        ranks = children(process.pid)
        pids.extend(ranks)
        assert len(ranks) == 4
        return process, ranks

    yield start
    for pid in pids:  # what a failed test leaves
        cwd = Path(f"/proc/{pid}/cwd")
        if cwd.exists() and cwd.readlink() == Path.cwd():
            os.kill(pid, signal.SIGKILL)


@pytest.fixture
def ended(finish):
    """The result of a run that was hurt just now, which must leave no process."""

    def end(process):
        start = time.time()
        wait_for(lambda: process.poll() is not None, SOON, "the parent lives on")
        result = finish(process)
        wait_for(lambda: not here(), SOON - (time.time() - start), f"left: {here()}")
        assert "Traceback" not in result.err, result.err
        return result

    return end


def denoising(tmp_path: Path) -> Callable[[], bool]:
    return lambda: "step/s" in (tmp_path / "stderr").read_text()


def decoding() -> bool:
    return any(name.endswith(".part.mp4") for name in names())


@pytest.mark.parametrize(
    "error", [RuntimeError("boom"), ValueError("boom"), MemoryError("boom"), AssertionError("boom"), SystemExit(3)]
)
@pytest.mark.parametrize("rank", [0, 2])
def test_a_rank_raises(ask, recipe, monkeypatch, deadline, error, rank):
    """In step 2: its error is shown, and no neighbour's broken connection."""
    velocity, calls = generate.velocity, []

    def broken(*given):
        calls.append(1)
        if len(calls) == 2 and os.environ["RANK"] == str(rank):
            raise error
        return velocity(*given)

    monkeypatch.setattr(generate, "velocity", broken)
    deadline(PATIENCE)
    result = ask("--ranks", 3, "--steps", 50, "--recipe", recipe(ring_size=3))
    said = f"rank {rank}: "
    assert result.code == 1 and result.err.startswith(said) and result.err.count("rank ") == 1, result.err
    assert "boom" in result.err or isinstance(error, SystemExit)
    assert result.err.count("\n") == 1 or type(error) in (MemoryError, AssertionError, SystemExit)
    assert not active_children() and names() == set()


BOOM = """
import os
from nanovgen import generate
velocity, calls = generate.velocity, []

def broken(*given):
    calls.append(1)
    if len(calls) == 2 and os.environ["RANK"] == "1":
        raise RuntimeError("boom")
    return velocity(*given)

generate.velocity = broken
"""


@pytest.fixture
def torchrun(spawn, tiny_folder, recipe):
    """run.py on torchrun's 2 ranks, without end; ended for good where the test fails."""
    started = []

    def start(code: str = "", **parallel: object):
        request = (PROMPT, "--model", tiny_folder, *FOREVER, "--recipe", recipe(**parallel))
        started.append(spawn(*request, code=code, torchrun=2))
        return started[0]

    yield start
    if started[0].poll() is None:
        started[0].terminate()  # it ends its ranks
        started[0].wait(timeout=PATIENCE)


def finished(process, start: float, tmp_path: Path) -> str:
    """What was said by a run of torchrun's that was hurt at `start`."""
    wait_for(lambda: process.poll() is not None, SOON, "torchrun lives on")
    wait_for(lambda: not here(), SOON - (time.time() - start), f"left: {here()}")
    assert time.time() - start < SOON and process.returncode == 1 and names() == set()
    return (tmp_path / "stderr").read_text().replace("\r", "\n")


@pytest.mark.parametrize("parallel", [{"ring_size": 2}, {"ulysses_size": 2, "async_ulysses": True}])
def test_a_rank_of_torchrun_raises(torchrun, tmp_path, parallel):
    """In step 2: the first words are its error and its rank."""
    process = torchrun(BOOM, **parallel)
    wait_for(lambda: "boom" in (tmp_path / "stderr").read_text())
    said = finished(process, time.time(), tmp_path)
    assert said[said.index("run.py: ") :].startswith("run.py: rank 1: boom\n"), said  # it may stand behind a bar


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_of_torchrun_is_killed(torchrun, tmp_path, rank):
    """torchrun says which: the other may have time to say that it lost its neighbour."""
    process = torchrun(ring_size=2)
    wait_for(denoising(tmp_path))
    start = time.time()
    os.kill(children(process.pid)[rank], signal.SIGKILL)
    said = finished(process, start, tmp_path)
    assert re.search(rf"rank +: {rank} .*\n *exitcode +: -9 ", said), said


@pytest.mark.parametrize("whom", ["all", "parent"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_in_denoising(started, ended, tmp_path, whom, number):
    """Ctrl-C reaches every process of a terminal; `kill` and `timeout` the parent alone."""
    process, ranks = started(FOREVER, denoising(tmp_path))
    for pid in [process.pid, *(ranks if whom == "all" else [])]:
        os.kill(pid, number)
    result = ended(process)
    assert names() == set()
    if (whom, number) != ("all", signal.SIGTERM):  # where ranks are told first, one may be seen to end before the parent is told
        assert result.code == 130 and result.err.splitlines()[-1] == "interrupted; all ranks have ended"
    assert result.code


def test_interrupted_in_decoding(started, ended):
    """The word on the saved latents reaches the user."""
    process, _ = started(LONG_DECODE, decoding, ring_size=4, cfg_size=1, parallel_vae_size=4)
    process.send_signal(signal.SIGINT)
    result = ended(process)
    last = result.err.splitlines()[-1]
    assert result.code == 130 and names() == {"v.latents.safetensors"}
    assert "interrupted; all ranks have ended" in last and "the latents are safe" in last
    assert "python run.py --latents v.latents.safetensors" in last


IN_A_DESTRUCTOR = """
import time
from pathlib import Path
from nanovgen import video

class Slow:
    def __del__(self):
        Path("here").touch()
        end = time.time() + 600
        while time.time() < end:
            pass

write = video.VideoWriter.write

def slow(self, frames):
    write(self, frames)
    Slow()

video.VideoWriter.write = slow
"""


def test_interrupted_in_a_destructor(spawn, ended, tiny_folder, recipe):
    """Python drops the exception; the interruption is not lost."""
    request = (PROMPT, "--model", tiny_folder, *LONG_DECODE, "--ranks", 2, "--recipe", recipe(ring_size=2, parallel_vae_size=2))
    process = spawn(*request, code=IN_A_DESTRUCTOR)
    wait_for(Path("here").exists)
    process.send_signal(signal.SIGTERM)
    result = ended(process)
    assert result.code == 130 and names() == {"here", "v.latents.safetensors"}
    assert "the latents are safe" in result.err.splitlines()[-1] and "ignored" not in result.err


def test_interrupted_while_starting(spawn, ended, tiny_folder, recipe):
    """Before all of 40 ranks are forked."""
    request = (PROMPT, "--model", tiny_folder, *FOREVER, "--ranks", 40, "--recipe", recipe(ring_size=40))
    process = spawn(*request)
    wait_for(lambda: len(children(process.pid)) > 3)
    process.send_signal(signal.SIGINT)
    result = ended(process)
    assert result.code == 130 and names() == set() and "interrupted" in result.err.splitlines()[-1]


def test_a_failed_decode_of_many(ask, recipe, edit_weights, tiny_folder):
    edit_weights(tiny_folder / "vae", lambda t: t["decoder.conv_out.bias"].fill_(float("nan")))
    result = ask("--ranks", 2, "--recipe", recipe(cfg_size=1, ring_size=2, parallel_vae_size=2))
    last = result.err.splitlines()[-1]
    assert result.code == 1 and last.startswith("rank ") and "decoding has values that are not finite" in last
    assert "--latents v.latents.safetensors" in last and names() == {"v.latents.safetensors"}


def test_a_port_is_nobody_elses_before_the_ranks_listen():
    with launch.reserve_port() as held, socket.socket() as other:
        with pytest.raises(OSError, match="in use"):
            other.bind(held.getsockname())
        store = TCPStore(*held.getsockname(), is_master=True, wait_for_workers=False)
        assert store.port == held.getsockname()[1]


def test_two_runs_at_once(spawn, tiny_folder, recipe):
    path = recipe(ring_size=2, parallel_vae_size=2)
    small = ("--size=64x32", "--frames=5", "--steps=20", "--ranks", 2, "--recipe", path)
    runs = [spawn(PROMPT, "--model", tiny_folder, *small, f"--out={name}.mp4") for name in "ab"]
    assert [run.wait(timeout=300) for run in runs] == [0, 0]
    assert Path("a.mp4").read_bytes() == Path("b.mp4").read_bytes() and len(names()) == 6


def test_the_parent_is_killed(started, ended, tmp_path):
    """It can end nobody any more: its ranks see it gone, and end by themselves."""
    process, _ = started(FOREVER, denoising(tmp_path))
    process.kill()
    assert ended(process).code == -signal.SIGKILL
