"""A server that loses a rank: it says so, ends at once, and knows after a restart what became of each video.

python -m nanovgen.tests.test_serve_faults        kills each of 4 ranks in each stage, and prints the table
"""

import base64
import io
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).resolve().parents[2])]

import pytest  # noqa: E402
from conftest import WAN, write_folder  # noqa: E402
from PIL import Image  # noqa: E402
from serving import SOON, Server, children, wait_for  # noqa: E402

STAGES = ("load", "text", "denoise", "decode", "write")
SLOW = """
import time
from contextlib import contextmanager
from pathlib import Path
from nanovgen import generate
call = generate.Stages.__call__

@contextmanager
def slow(self, name):
    with call(self, name):
        yield
        if Path("slow").exists() and Path("slow").read_text() == name:
            time.sleep(600)

generate.Stages.__call__ = slow
"""
RECIPE = "parallel_config: {cfg_size: 2, ring_size: 2, parallel_vae_size: 2}"


def start(folder: Path, model: Path) -> Server:
    """Four forked ranks that read their weights anew for each video, and stay in the stage that the file `slow` names."""
    folder.mkdir(exist_ok=True)
    (folder / "slow").unlink(missing_ok=True)
    (folder / "recipe.yaml").write_text(RECIPE)
    return Server(folder, "--model", model, "--ranks", 4, "--recipe", folder / "recipe.yaml", "--keep", "no", code=SLOW).ready()


def lose(server: Server, stage: str, rank: int) -> tuple[str, list[int], float]:
    """Kill a rank in a stage of a new video: its id, what /health said from then on, and seconds to the last process's end."""
    (server.folder / "slow").write_text(stage)
    name = server.make()
    server.reaches(name, stage)
    time.sleep(0.3)
    begun, said = time.monotonic(), [200]
    os.kill(server.ranks(4)[rank], signal.SIGKILL)
    while said[-1] and time.monotonic() - begun < SOON:
        if (now := server.health()) != said[-1]:
            said.append(now)
    server.gone(SOON - (time.monotonic() - begun))
    return name, said, time.monotonic() - begun


def check_lost(server: Server, name: str, stage: str) -> str:
    """What the restarted server says of it. Raises AssertionError where something was lost that need not be."""
    video = server.video(name)
    message, files = video["error"]["message"], {file for file in server.files() if name in file}
    safe = stage in ("decode", "write")
    assert video["status"] == "failed" and files == ({f"{name}.latents.safetensors"} if safe else set()), (video, files)
    assert ("its latents are safe" in message or "the latents are safe" in message) == safe, message
    assert f"python run.py {'--latents ' if safe else '--model='}" in message, message
    return message


def test_a_rank_is_killed(pristine, tmp_path):
    """One of many, and rank 0: what is finished is there again, what was lost says how to go on."""
    server = start(tmp_path / "s", pristine)
    done = server.make(seed=1)
    assert server.ended(done)["status"] == "completed"
    movie = server.ask(f"/v1/videos/{done}/content").body
    for stage, rank in (("denoise", 2), ("decode", 0)):
        name, said, seconds = lose(server, stage, rank)
        print(f"rank {rank} in {stage}: /health {said}, all gone after {seconds:.1f} s, status {server.process.returncode}")
        assert server.process.returncode == 1 and f"rank {rank} was killed by signal 9" in server.log
        assert said == ([200, 503, 0] if rank else [200, 0]), said
        server = start(tmp_path / "s", pristine)
        check_lost(server, name, stage)
        assert server.ask(f"/v1/videos/{done}/content").body == movie
    assert server.ask("/v1/videos/sync", {"prompt": "a red circle moves right", "seed": 1}).body == movie
    assert server.stop() == 130


@pytest.fixture
def torchrun(pristine_i2v, tmp_path):
    (tmp_path / "recipe.yaml").write_text("parallel_config: {ulysses_size: 2, parallel_vae_size: 2}")
    running = Server(tmp_path / "t", "--model", pristine_i2v, "--recipe", tmp_path / "recipe.yaml", torchrun=2)
    yield running.ready()
    running.kill()


def test_a_rank_of_torchrun_goes_silent(torchrun):
    """It is not dead, so nobody else notices; its beat stops. An idle server ends as well."""
    image = base64.b64encode(b"P6 1 1 255 abc").decode()
    assert "no PNG" in torchrun.ask("/v1/videos", {"prompt": "x", "input_reference": image}).error
    buffer = io.BytesIO()
    Image.new("RGB", (64, 32), (9, 200, 9)).save(buffer, "PNG")
    image = base64.b64encode(buffer.getvalue()).decode()
    assert torchrun.ended(torchrun.make(input_reference=image))["status"] == "completed"
    first, second = sorted(children(torchrun.process.pid))
    os.kill(second, signal.SIGSTOP)
    begun = time.monotonic()
    wait_for(lambda: torchrun.health() == 503, SOON, "it never notices")
    wait_for(lambda: torchrun.health() == 0, SOON - (time.monotonic() - begun))
    assert "ending: rank 1 has not been heard of for 10 s" in torchrun.log
    os.kill(second, signal.SIGCONT)
    torchrun.gone()
    assert torchrun.process.returncode == 1 and first != second


def full_disk(home: Path, model: Path) -> str:
    """The disk fills up while the video is made: it fails, and when there is room again the next one is served."""
    (home / "videos").mkdir(parents=True)
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(home / "videos")]
    if not shutil.which("mount") or subprocess.run(mount, capture_output=True).returncode:
        return "not tried: no tmpfs can be mounted here"
    server = start(home, model)
    try:
        (home / "slow").write_text("denoise")
        name = server.make(num_frames=401, num_inference_steps=1)
        server.reaches(name, "denoise")
        with pytest.raises(OSError), (home / "videos/filler").open("wb", buffering=0) as filler:
            while filler.write(b"x" * 1024):
                pass
        (home / "slow").unlink()
        message = server.ended(name, 120)["error"]["message"]
        (home / "videos/filler").unlink()
        assert server.ask("/v1/videos/sync", {"prompt": "a circle"}).status == 200
        return message
    finally:
        server.kill()
        subprocess.run(["umount", "-l", str(home / "videos")], check=True)


def main() -> int:
    with tempfile.TemporaryDirectory() as home:
        model = write_folder(Path(home) / "tiny", WAN)
        print(f"{'stage':<8} {'rank':>4} {'status':>6} {'seconds':>7}  {'/health':<12} after the restart")
        server = start(Path(home) / "s", model)
        try:
            for stage in STAGES:
                for rank in range(4):
                    name, said, seconds = lose(server, stage, rank)
                    status, server = server.process.returncode, start(Path(home) / "s", model)
                    message = check_lost(server, name, stage).split(" python run.py")[0].replace(str(home), "")
                    said = "-".join(map(str, said))
                    print(f"{stage:<8} {rank:>4} {status:>6} {seconds:7.1f}  {said:<12} {message}", flush=True)
        finally:
            server.kill()
        print(f"disk full: {full_disk(Path(home) / 'full', model)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
