"""Many requests to one server of four CPU ranks: mixed shapes; some are deleted while made, some bad, some fail on a rank.

    python -m nanovgen.tests.soak --requests 200

Ends with status 0 where nothing hung, no file or process was left, and memory grew by at most 5 % from the moment on when
every shape had been made once and SETTLE requests had come: until then each rank touches pages that it shared with its parent.
"""

import argparse
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).resolve().parents[2])]

from conftest import WAN, write_folder  # noqa: E402
from serving import PATIENCE, SOON, Server, wait_for  # noqa: E402

RECIPE = "parallel_config: {cfg_size: 2, ring_size: 2, parallel_vae_size: 2}"
FAULT = """
import os
from nanovgen import generate
velocity, decode = generate.velocity, generate.decode

def broken(job, model, x, t, contexts):
    if job.request.prompt == f"boom {os.environ['RANK']}" and t == job.times[-1]:
        raise RuntimeError("boom on purpose")
    return velocity(job, model, x, t, contexts)

def late(job, latents, stages):
    if job.request.prompt == f"late {os.environ['RANK']}":
        raise OSError("late on purpose")
    return decode(job, latents, stages)

generate.velocity, generate.decode = broken, late
"""
SIZES, FRAMES, GROWTH = ("64x32", "48x48", "80x48", "32x64", "96x64"), (1, 5, 9, 13), 1.05
SETTLE = 60
KINDS = {"good": 70, "deleted": 10, "bad": 10, "boom": 6, "late": 4}  # a hundred requests; each kind at least once
BAD = ({"size": "853x480"}, {"num_frames": 80}, {"seed": "x"}, {"nonsense": 1}, {"num_inference_steps": 10**9}, {"prompt": ""})


def memory(server: Server) -> float:
    """MB of all its processes, shared pages once."""
    rollups = [Path(f"/proc/{pid}/smaps_rollup").read_text() for pid in server.processes()]
    return sum(int(rollup.split("\nPss:")[1].split()[0]) for rollup in rollups) / 1024


def one(server: Server, rng: random.Random, kind: str) -> None:
    """A request of this kind, to its end."""
    body = {"size": rng.choice(SIZES), "num_frames": rng.choice(FRAMES), "num_inference_steps": rng.randint(2, 4),
            "guidance_scale": rng.choice([1, 4]), "guidance_scale_2": rng.choice([1, 3]), "seed": rng.randrange(99)}  # fmt: skip
    if kind == "bad":
        answer = server.ask("/v1/videos", {"prompt": "a circle"} | body | rng.choice(BAD))
        assert answer.status == 422, answer
        return
    if kind == "deleted":
        name = server.make(**body | {"num_inference_steps": 10**4})
        if rng.random() < 0.7:
            server.reaches(name, "denoise")
        assert server.ask(f"/v1/videos/{name}", method="DELETE").json["deleted"]
        wait_for(lambda: b"nanovgen_in_progress 0.0" in server.ask("/metrics").body, SOON, "it is still being made")
        assert server.ask(f"/v1/videos/{name}").status == 404 and not any(name in file for file in server.files())
        return
    if kind in ("boom", "late"):
        rank = rng.randrange(4 if kind == "boom" else 2)  # the VAE is on two
        video = server.ended(server.make(**body | {"prompt": f"{kind} {rank}"}), PATIENCE)
        assert video["status"] == "failed" and f"rank {rank}: " in video["error"]["message"], video
        return
    name = server.make(**body)
    assert server.ended(name)["status"] == "completed", server.video(name)
    assert server.ask(f"/v1/videos/{name}/content").body[4:8] == b"ftyp"


def draw(rng: random.Random, requests: int) -> list[str]:
    """So many kinds, at least five: one of each, and others as often as KINDS says."""
    kinds = [*KINDS, *rng.choices([*KINDS], [*KINDS.values()], k=requests - len(KINDS))]
    rng.shuffle(kinds)
    return kinds


def soak(server: Server, requests: int, seed: int = 0) -> dict:
    """All of them; the counts, and the memory (MB) of all processes before, at quarters and after. Raises AssertionError."""
    rng, used, start = random.Random(seed), [memory(server)], time.monotonic()
    ranks, kinds = server.processes(), draw(rng, requests)
    for i, kind in enumerate(kinds):
        one(server, rng, kind)
        assert server.health() == 200
        if (i + 1) % max(1, requests // 4) == 0:
            used.append(memory(server))
    assert server.processes() == ranks, "a process is left or gone"
    for page in iter(lambda: server.ask("/v1/videos?limit=100").json["data"], []):
        for video in page:
            server.ask(f"/v1/videos/{video['id']}", method="DELETE")
    assert server.files() == set(), server.files()
    server.stop()
    return {"counts": dict(Counter(kinds)), "seconds": time.monotonic() - start, "memory": used, "growth": used[-1] / used[0]}


def start(folder: Path, model: Path) -> Server:
    (folder / "recipe.yaml").write_text(RECIPE)
    flags = ("--ranks", 4, "--recipe", folder / "recipe.yaml", "--max-steps", 10**4)
    return Server(folder, "--model", model, *flags, code=FAULT).ready()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as home:
        server = start(Path(home), write_folder(Path(home) / "tiny", WAN))
        try:
            for size in SIZES:
                for frames in FRAMES:
                    server.ended(server.make(size=size, num_frames=frames))
            rng = random.Random(args.seed + 1)
            for kind in draw(rng, SETTLE):
                one(server, rng, kind)
            found = soak(server, args.requests, args.seed)
        finally:
            server.kill()
        left = sorted(path.name for path in (Path(home) / "videos").iterdir())
    print(f"{args.requests} requests in {found['seconds']:.0f} s: {found['counts']}")
    print(f"MB of all processes: {', '.join(f'{used:.0f}' for used in found['memory'])}: x {found['growth']:.3f}")
    print(f"left in the folder: {', '.join(left)}; processes left: none")
    return 0 if found["growth"] <= GROWTH else 1


if __name__ == "__main__":
    sys.exit(main())
