"""Faults at a given point of a run on 4 ranks: what is left on disk, how soon the ranks are gone, and whether it can go on.

    python -m pytest nanovgen/tests/test_kills.py                # a few of each kind
    python -m pytest nanovgen/tests/test_kills.py --full         # each rank killed in each stage, forked and under torchrun

A rank is killed (SIGKILL) or the disk filled at the point itself, by code that the run's process is given to start with. Then
the ranks are to end within 15 s, the run with status 1, and what is left is whole files. Done again, or gone on with from
its latents, it gives the bytes of a run that nothing happened to, and takes away what a killed process could not.
"""

import os
import shutil
import subprocess
import time
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import pytest
import torch
from conftest import PROMPT
from safetensors.torch import load_file
from serving import PATIENCE, SOON, wait_for
from test_faults import here

STAGES = ("load", "text", "denoise", "save", "decode", "write")
RECIPE = dict(cfg_size=2, ulysses_size=2, parallel_vae_size=4)
REQUEST = ("--size=64x32", "--frames=13", "--steps=3", "--chunk=1")
LATENTS, WHOLE = "v.latents.safetensors", {"v.mp4", "v.json", "v.png", "v.latents.safetensors"}

# Begins every hurt run. `stop` is what happens at the point: it notes the time, and is one of STOPS.
CODE = """
import os, signal, subprocess, time
from nanovgen import checkpoint, generate, vae_parallel, video

def note():
    with open({mark!r}, "w") as file:
        print(time.time(), file=file)

def at(module, name, nth=1, after=False):
    real, calls = getattr(module, name), []
    def call(*given, **named):
        calls.append(1)
        now = len(calls) == nth and os.environ["RANK"] == "{rank}"
        if now and not after:
            stop()
        found = real(*given, **named)
        if now and after:
            stop()
        return found
    setattr(module, name, call)

def in_load():
    real = checkpoint.load
    def load(*given):
        return real(*given[:4], lambda done: stop() if os.environ["RANK"] == "{rank}" else given[4](done))
    checkpoint.load = load

def in_decode():
    real = vae_parallel.decode
    def decode(*given):
        for i, chunk in enumerate(real(*given)):
            if i == 1 and os.environ["RANK"] == "{rank}":
                stop()
            yield chunk
    vae_parallel.decode = decode

def in_write():
    if {rank} == 0:
        return at(video.VideoWriter, "close")
    at(generate, "describe_run")  # it has decoded, and the first rank is closing the video meanwhile
    close = video.VideoWriter.close
    def slow(self):
        time.sleep(600)
        close(self)
    video.VideoWriter.close = slow

{stop}
{where}
"""
STOPS = {
    "killed": """
def killed():
    note()
    os.kill(os.getpid(), signal.SIGKILL)
stop = killed""",
    "disk full": """
def stop():
    note()
    with open("small/filler", "wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            pass""",
    "ffmpeg killed": """
def stop():
    note()
    with open(f"/proc/self/task/{os.getpid()}/children") as file:
        [os.kill(int(pid), signal.SIGKILL) for pid in file.read().split()]""",
}
WHERE = {
    "load": "in_load()",
    "text": 'at(generate, "encode_prompt")',
    "denoise": 'at(generate, "velocity", 2)',
    "save": 'at(generate, "save_file", after=stop.__name__ == "killed")',
    "decode": "in_decode()",
    "write": "in_write()",
    "frames": 'at(video.VideoWriter, "write", 2)',
    "sheet": 'at(generate.video, "contact_sheet")',
    "report": 'at(generate.json, "dumps", 2)',  # the first is the latents'
}


@dataclass(frozen=True)
class Fault:
    """`what` (one of STOPS) at `where`, on `rank`, of ranks that run.py forks or torchrun starts."""

    what: str
    where: str
    rank: int = 0
    launcher: str = "forked"

    def __str__(self) -> str:
        return f"{self.what}, {self.where}, rank {self.rank}, {self.launcher}"

    def left(self) -> tuple[set[str], str | None]:
        """Files that must be there, and a word of the last line where run.py has one."""
        after = {LATENTS} if self.where in ("decode", "write", "frames") else set()
        after = {"v.mp4", LATENTS} if self.where == "sheet" else {"v.mp4", "v.png", LATENTS} if self.where == "report" else after
        if self.what == "killed":
            return after, f"rank {self.rank} was killed by signal 9" if self.launcher == "forked" else None
        words = {"save": "cannot write", "frames": "the latents are safe", "sheet": "is whole", "report": "is whole"}
        return after, words[self.where]

    def code(self, mark: Path) -> str:
        found = CODE.replace("{mark!r}", repr(str(mark))).replace("{rank}", str(self.rank))
        return found.replace("{stop}", STOPS[self.what]).replace("{where}", WHERE[self.where])


OTHERS = [*(Fault("disk full", where) for where in ("save", "frames", "sheet", "report")), Fault("ffmpeg killed", "frames")]
FULL = [Fault("killed", stage, rank, launcher) for launcher, stage, rank in product(("forked", "torchrun"), STAGES, range(4))
        if stage != "save" or rank == 0]  # fmt: skip
FULL += [fault if launcher == "forked" else Fault(fault.what, fault.where, 0, launcher)
         for launcher in ("forked", "torchrun") for fault in OTHERS]  # fmt: skip
FEW = [Fault("killed", "load", 1), Fault("killed", "denoise", 3), Fault("killed", "save"), Fault("killed", "decode", 2),
       Fault("killed", "write", 1, "torchrun"), OTHERS[1], OTHERS[4]]  # fmt: skip


def pytest_generate_tests(metafunc):
    if "fault" in metafunc.fixturenames:
        metafunc.parametrize("fault", FULL if metafunc.config.getoption("full") else FEW, ids=str)


@pytest.fixture(scope="module")
def rows(request):
    """The table, printed at the end."""
    rows = []
    yield rows
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        print(f"\n{'what, where, rank':<44} {'status':>6} {'gone':>8}  left, then again or on from it", *rows, sep="\n")


@pytest.fixture
def place(request, tiny_folder):
    """The folder of the output: the working folder or, for full disks, one of 4 MB."""
    folder = Path("small") if request.getfixturevalue("fault").what == "disk full" else Path()
    if folder == Path():
        yield folder
        return
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder.resolve())]
    if not shutil.which("mount") or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("no tmpfs can be mounted here")
    yield folder
    subprocess.run(["umount", "-l", str(folder.resolve())], check=True)


@pytest.fixture(scope="module")
def untouched():
    """What a run gives that nothing happens to: made once."""
    return {}


def content(folder: Path) -> dict[str, object]:
    return {name: (folder / name).read_bytes() for name in ("v.mp4", "v.png")} | load_file(folder / LATENTS)


def same(one: dict, other: dict) -> bool:
    return all(torch.equal(a, other[name]) if name == "latents" else a == other[name] for name, a in one.items())


def ranks(launcher: int) -> list[str]:
    """Processes of the run in this folder, without the launcher: ranks, and the encoder."""
    found = []
    for cwd in Path("/proc").glob("[0-9]*/cwd"):
        try:
            if cwd.readlink() == Path.cwd() and int(cwd.parent.name) not in (os.getpid(), launcher):
                found.append(cwd.parent.name)
        except OSError:
            continue
    return found


def gone(process, mark: Path) -> float:
    """Seconds from the fault until no rank is left. The launcher then ends by itself: it has torch to take apart."""
    wait_for(mark.exists, 300, "the point was not reached")
    wait_for(lambda: not ranks(process.pid), PATIENCE, f"left: {ranks(process.pid)}")
    seconds = time.time() - float(mark.read_text())
    process.wait(timeout=PATIENCE)
    assert seconds < SOON and not here(), seconds
    return seconds


def test_fault(fault, place, untouched, rows, cli, spawn, tiny_folder, recipe, tmp_path):
    spread, mark = ("--recipe", recipe(**RECIPE), "--sheet", "--out", place / "v.mp4"), tmp_path / "mark"
    ask, ranks, torchrun = (PROMPT, "--model", tiny_folder, *REQUEST, *spread), ("--ranks", 4), fault.launcher == "torchrun"
    if not untouched:
        assert cli(*ask, *ranks).code == 0
        untouched.update(content(place))
        for name in WHOLE:
            (place / name).unlink()
    process = spawn(*ask, *(() if torchrun else ranks), code=fault.code(mark), torchrun=4 if torchrun else 0)
    seconds, said, (left, word) = gone(process, mark), (tmp_path / "stderr").read_text(), fault.left()
    files = {path.name for path in place.iterdir()} - {"filler"}
    hidden = {name for name in files if name.startswith(".")}
    assert process.returncode == 1 and files - hidden == left and (word or "") in said, (process.returncode, files, said)
    assert not hidden or (torchrun and fault.what == "killed"), hidden  # torchrun ends the writer at once, too
    (place / "filler").unlink(missing_ok=True)
    result = cli(*(("--latents", place / LATENTS, *spread) if left else ask), *ranks)
    assert result.code == 0, result.err
    assert {path.name for path in place.iterdir()} == WHOLE and same(content(place), untouched)
    shown = " ".join(sorted(left)) + (" and a hidden part" if hidden else "") or "nothing"
    rows.append(f"{fault!s:<44} {process.returncode:>6} {seconds:>6.1f} s  {shown}; {'on' if left else 'again'}: the same bytes")
