"""run.py on many ranks: what is refused before one is forked, and that runs are those of one rank."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import imageio.v3 as iio
import numpy as np
import pytest
import torch
import yaml
from conftest import PROMPT, WIDE
from safetensors.torch import load_file

from nanovgen import generate, launch, plan, video
from nanovgen import recipe as recipes
from nanovgen.recipe import ParallelConfig, read_recipe

ROOT = Path(__file__).resolve().parents[2]
NAMES = sorted(p.stem for p in (ROOT / "nanovgen" / "recipes").glob("*.y*ml"))
RACK = ["cosmos3_t2v_bf16_gb200_nvl72", "wan22_t2v_bf16_gb200_nvl72"]


@pytest.fixture
def not_started(refused, wide_folder, recipe, monkeypatch):
    """The line that refuses a recipe for the model of 8 heads: at once, and before a rank is forked."""

    def call(ranks: int | None, parallel: dict, *arguments: object) -> str:
        monkeypatch.setattr(launch, "run_ranks", lambda *_: pytest.fail("ranks were forked"))
        start, forked = time.time(), [] if ranks is None else ["--ranks", ranks]
        line = refused("--model", wide_folder, *forked, "--recipe", recipe(**parallel), *arguments)
        assert time.time() - start < 5
        return line

    return call


REFUSED = {  # ranks, degrees, what the line says
    "product": (4, dict(cfg_size=2, ulysses_size=4), ["8 ranks (cfg 2 x ulysses 4), not 4", "--ranks 8"]),
    "product, grid": (4, dict(attn2d_size=[3, 2]), ["6 ranks (kv_axis 3 x q_axis 2), not 4"]),
    "one rank": (2, {}, ["1 ranks", "not 2", "--recipe"]),
    "many for one": (None, dict(cfg_size=2), ["2 ranks (cfg 2), not 1", "--ranks 2"]),
    "ring and attn2d": (4, dict(ring_size=2, attn2d_size=[2, 1]), ["ring_size and attn2d_size", "set one of them to 1"]),
    "tp heads": (3, dict(tp_size=3), ["8 heads do not split over tp 3", "use 2"]),
    "tp mlp": (8, dict(tp_size=8), ["60 MLP features do not split over tp 8", "use 4"]),
    "vae across halves": (4, dict(cfg_size=2, ulysses_size=2, parallel_vae_size=3), ["straddle the CFG halves of 2", "4"]),
    "vae beyond": (2, dict(ulysses_size=2, parallel_vae_size=3), ["parallel_vae_size 3", "use 2"]),
    "vae columns": (9, dict(ring_size=9, parallel_vae_size=9), ["8 latent columns", "9 VAE ranks", "8 or less"]),
    "vae rows": (5, dict(ring_size=5, parallel_vae_size=5, parallel_vae_split_dim="height"), ["4 latent rows", "4 or less"]),
    "cfg 3": (3, dict(cfg_size=3), ["cfg_size is 3", "two streams", "1 or 2"]),
    "async and fused": (2, dict(ulysses_size=2, async_ulysses=True, fused_ulysses=True), ["async_ulysses", "fused_ulysses"]),
    "async alone": (2, dict(ring_size=2, async_ulysses=True), ["async_ulysses", "ulysses_size is 1"]),
    "fused alone": (2, dict(cfg_size=2, fused_ulysses=True), ["fused_ulysses", "ulysses_size is 1"]),
    "merge": (2, dict(attn2d_size=[2, 1], attn2d_merge="eager"), ["'eager'", "exchange, overlapped, reduce_scatter"]),
    "merge alone": (2, dict(ring_size=2, attn2d_merge="overlapped"), ["attn2d_merge overlapped", "attn2d_size is [1, 1]"]),
    "split dim": (2, dict(ulysses_size=2, parallel_vae_split_dim="time"), ["'time'", "height, width"]),
    "degree 0": (2, dict(ulysses_size=0), ["ulysses_size is 0", "at least 1"]),
    "grid of three": (2, dict(attn2d_size=[2, 1, 1]), ["attn2d_size is (2, 1, 1)", "(1, 1)"]),
    "yes for a degree": (2, dict(cfg_size=True), ["cfg_size is True"]),
    "unknown key": (2, dict(cp_size=2), ["unknown key cp_size"]),
    "ranks 0": (0, {}, ["--ranks 0"]),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused(not_started, name):
    ranks, parallel, said = REFUSED[name]
    line = not_started(ranks, parallel)
    assert all(piece in line for piece in said), line


@pytest.mark.parametrize("parallel", [
    dict(ulysses_size=3), dict(tp_size=2, ulysses_size=8), dict(ring_size=2, ulysses_size=16), dict(cfg_size=2, ulysses_size=6),
    dict(attn2d_size=[2, 1], ulysses_size=16), dict(attn2d_size=[1, 3], ulysses_size=3),
])  # fmt: skip
def test_the_way_out_of_heads_is_accepted(not_started, ask, wide_folder, recipe, parallel):
    world = ParallelConfig(**parallel | {"attn2d_size": tuple(parallel.get("attn2d_size", (1, 1)))}).world
    line = not_started(world, parallel)
    assert "heads" in line and f"do not split over ulysses {parallel['ulysses_size']}" in line
    way = {
        f"{name}_size": yaml.safe_load(n) for name, n in re.findall(r"(ulysses|ring|attn2d) (\d+|\[.*?\])", line.split("use")[1])
    }
    result = ask("--model", wide_folder, "--ranks", world, "--dry-run", "--recipe", recipe(**parallel | way))
    assert result.code == 0 and result.lines["ranks"].startswith(f"{world}: "), (line, result.err)


def test_vae_on_the_whole_world_is_accepted(ask, wide_folder, recipe):
    path = recipe(cfg_size=2, ulysses_size=2, parallel_vae_size=4)
    result = ask("--model", wide_folder, "--ranks", 4, "--dry-run", "--recipe", path)
    assert result.code == 0 and result.lines["ranks"] == "4: cfg 2, ulysses 2; VAE 4 by width"


def test_how_async_ulysses_is_sent_is_said(ask, wide_folder, recipe):
    path = recipe(ulysses_size=2, async_ulysses=True)
    result = ask("--model", wide_folder, "--ranks", 2, "--dry-run", "--recipe", path)
    assert "(async_ulysses by the backend's collectives: cpu ranks share no memory)" in result.lines["ranks"], result


def test_a_kernel_that_is_not_here(not_started, ask, recipe):
    assert "fa4 is not installed here; auto takes cpu" in not_started(None, dict(backend="FA4"))
    result = ask("--ranks", 2, "--dry-run", "--recipe", recipe(backend="FA4", cfg_size=2))
    assert result.code == 0 and "kernel cpu in place of fa4" in result.lines["runs"]
    assert "'fa9'" in not_started(2, dict(backend="FA9", cfg_size=2))


@pytest.mark.parametrize(
    ("name", "said"), zip(RACK, ["189 frames would be 48 latent", "80 frames would be 20 latent"], strict=True)
)
@pytest.mark.parametrize("model", ["tiny-wan", "wan2.2-t2v-a14b"])
def test_recipes_of_the_rack(cli, name, said, model):
    result = cli("two cats", "--model", model, "--dry-run", "--ranks", 72, "--recipe", name)
    assert result.code == 0 and said in result.lines["warm-up"] and "in place of fa4" in result.lines["runs"], result
    assert result.lines["ranks"] == "72: cfg 2, kv_axis 3, q_axis 3, ulysses 4 (attn2d exchange); VAE 8 by width"


@pytest.mark.parametrize("name", NAMES)
def test_recipe_by_name(name):
    world = re.search(r"(\d+)gpu$|nvl(\d+)$", name)
    assert read_recipe(name).parallel_config.world == int(world[1] or world[2])


def test_two_ranks_may_probe_the_output_at_once(tmp_path, monkeypatch):
    """Under torchrun each rank prepares for itself: another may have removed the probe first."""
    monkeypatch.setattr(Path, "touch", lambda path: None)
    video.check_output(tmp_path / "v.mp4", 1)


# Runs


def latents(stem: str) -> torch.Tensor:
    return load_file(f"{stem}.latents.safetensors")["latents"]


def formula(parallel: dict, request: dict, streams: list[int]) -> dict[str, int]:
    """Bytes by the schemes' headers, over the steps: `streams` of each; and one check of the latents."""
    (width, height), frames = recipes.parse_size(request["size"]), request["frames"]
    latent = (frames - 1) // 4 + 1, height // 8, width // 8
    work = plan.work(WIDE, latent, 4)
    config = ParallelConfig(**parallel | {"attn2d_size": tuple(parallel.get("attn2d_size", (1, 1)))})
    steps = [plan.bytes_sent(config, work, n) for n in streams]
    total = {axis: sum(step.get(axis, 0) for step in steps) for axis in {*steps[0], *steps[-1]} - {"tp"}}
    return total | {"world": 8 * (config.world - 1)}


# Also keeps the frames as they are before H.264, which magnifies a last bit.
RAW = """
from nanovgen import video
write = video.VideoWriter.write
def keep(self, frames):
    self.path.with_suffix(".raw").open("ab").write(frames.tobytes())
    write(self, frames)
video.VideoWriter.write = keep
"""


@pytest.fixture
def raw(monkeypatch):
    monkeypatch.setattr(video.VideoWriter, "write", video.VideoWriter.write)  # to be put back
    exec(RAW, {})


def check_frames(one: str, many: str) -> None:
    """Within one grey, and few: a strip's convolutions add in another order, and 1e-6 may round to the next grey."""
    frames = [np.frombuffer(Path(f"{stem}.raw").read_bytes(), np.uint8).astype(int) for stem in (one, many)]
    apart = np.abs(frames[0] - frames[1])
    assert apart.max() <= 1 and apart.mean() <= 1e-3


def check_alike(one: str, many: str) -> None:
    torch.testing.assert_close(latents(many), latents(one), atol=1e-5, rtol=0)
    check_frames(one, many)


RUNS = {
    "cfg2.ulysses2": (dict(cfg_size=2, ulysses_size=2, parallel_vae_size=2), ("64x32", 5)),
    "attn2d": (dict(attn2d_size=[2, 1], attn2d_merge="overlapped", parallel_vae_size=2, parallel_vae_split_dim="height"),
               ("64x64", 5)),
    "tp2.ring2": (dict(tp_size=2, ring_size=2), ("64x32", 5)),
    "5 tokens on 8": (dict(ulysses_size=4, ring_size=2, parallel_vae_size=2), ("16x16", 17)),
    "2 tokens on 4": (dict(cfg_size=2, attn2d_size=[2, 2], attn2d_merge="reduce_scatter"), ("32x16", 1)),
}  # fmt: skip


@pytest.mark.parametrize("name", RUNS)
def test_run(name, ask, spawn, finish, wide_folder, recipe, raw):
    """By its own process; one plan, one set of bars, and what was sent is the formulas'."""
    parallel, (size, frames) = RUNS[name]
    request = ["--model", wide_folder, "--size", size, "--frames", frames, "--steps", 2, "--shift", 5]
    assert ask(*request, "--out", "one.mp4").code == 0
    world = ParallelConfig(**parallel | {"attn2d_size": tuple(parallel.get("attn2d_size", (1, 1)))}).world
    recipe_file = recipe(**parallel)
    many = finish(spawn(PROMPT, *request, "--ranks", world, "--recipe", recipe_file, "--out", "many.mp4", code=RAW))
    assert many.code == 0, many.err
    check_alike("one", "many")
    report = json.loads(Path("many.json").read_text())
    sent = {axis: n for axis, n in report["bytes_sent"].items() if axis not in ("vae", "tp") and n}
    assert sent == formula(parallel, report["request"], [2, 2])
    first_words = [line.split()[0] for line in many.out.splitlines() if line]
    assert all(first_words.count(word) == 1 for word in ("model", "ranks", "total", "seed")), many.out
    bars = re.findall(r"([\w ]+): +0%\|[^|]*\| 0(?:\.00)?/", many.err)  # as each begins
    assert bars == ["load text_encoder", "load transformer", "load transformer_2", "denoise", "load vae"]


def test_run_by_torchrun(ask, tiny_folder):
    assert ask("--out", "one.mp4").code == 0
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", ROOT / "run.py"]
    request = [PROMPT, "--model", tiny_folder, "--size=64x32", "--frames=5", "--steps=2", "--shift=5", "--out=many.mp4"]
    done = subprocess.run([*map(str, launcher), *map(str, request), "--recipe=2gpu"], capture_output=True, text=True, timeout=300,
                          env=os.environ | {"OMP_NUM_THREADS": "1"})  # fmt: skip
    assert done.returncode == 0 and done.stdout.count("ranks     2: cfg 2") == 1, done.stderr
    assert torch.equal(latents("one"), latents("many")) and Path("one.mp4").read_bytes() == Path("many.mp4").read_bytes()


@pytest.fixture
def spied(monkeypatch):
    """What each rank of in-process runs did: lines of (rank, first latents' bits) and of (rank, forwards so far)."""
    velocity = generate.velocity

    def watched(job, model, x, t, contexts):
        rank, count = os.environ.get("RANK", "0"), []
        handle = model.register_forward_hook(lambda *_: count.append(1))
        v = velocity(job, model, x, t, contexts)
        handle.remove()
        with Path(f"seen.{rank}").open("a") as file:
            print(hash(x.numpy().tobytes()), len(count), *sorted(contexts), file=file)
        return v

    def seen() -> dict[int, list[list[int]]]:
        found = {
            int(p.suffix[1:]): [[*map(int, row.split())] for row in p.read_text().splitlines()] for p in Path().glob("seen.*")
        }
        for path in Path().glob("seen.*"):
            path.unlink()
        return found

    monkeypatch.setattr(generate, "velocity", watched)
    return seen


def test_noise_is_the_same_on_any_ranks(ask, spied, recipe):
    found = set()
    for ranks in (1, 2, 3, 4):
        assert ask("--ranks", ranks, "--recipe", recipe(ring_size=ranks)).code == 0
        seen = spied()
        assert len(seen) == ranks
        found |= {rows[0][0] for rows in seen.values()}
    assert len(found) == 1


@pytest.mark.parametrize(("high", "low"), [(1, 1), (1, 3), (3, 1), (2, 3)])
def test_guidance_of_one_on_halves(ask, spied, recipe, raw, high, low):
    """A lone stream runs on both halves, two on one each: a forward a step either way, and only the texts that it needs."""
    guidance = ["--guidance", high, "--guidance-low", low]
    assert ask(*guidance, "--out", "one.mp4").code == 0
    assert [row[1] for row in spied()[0]] == [1 + (high != 1), 1 + (low != 1)]
    assert ask(*guidance, "--ranks", 2, "--recipe", recipe(cfg_size=2), "--out", "many.mp4").code == 0
    check_alike("one", "many")
    seen, kept = spied(), {0: {0}, 1: ({0} if 1 in (high, low) else set()) | ({1} if {high, low} != {1} else set())}
    for rank in (0, 1):
        assert [row[1] for row in seen[rank]] == [1, 1] and {*seen[rank][0][2:]} == kept[rank]
    report = json.loads(Path("many.json").read_text())
    sent = {axis: n for axis, n in report["bytes_sent"].items() if n}
    assert sent.get("cfg", 0) == formula(dict(cfg_size=2), report["request"], [1 + (high != 1), 1 + (low != 1)]).get("cfg", 0)


@pytest.mark.parametrize("parallel", [
    dict(cfg_size=2, ulysses_size=2, parallel_vae_size=2), dict(cfg_size=2, parallel_vae_size=2), dict(tp_size=2),
    dict(ulysses_size=2, async_ulysses=True, parallel_vae_size=2, parallel_vae_split_dim="height"),
])  # fmt: skip
def test_image_to_video(ask, i2v_folder, recipe, raw, parallel):
    """The image is encoded on the ranks of the parallel VAE, or on one that tells the others."""
    iio.imwrite("red.png", np.full((20, 30, 3), (255, 0, 0), np.uint8))
    request = ["--model", i2v_folder, "--image", "red.png"]
    assert ask(*request, "--out", "one.mp4").code == 0
    world = ParallelConfig(**parallel).world
    assert ask(*request, "--ranks", world, "--recipe", recipe(**parallel), "--out", "many.mp4").code == 0
    check_alike("one", "many")


@pytest.mark.parametrize("dim", ["width", "height"])
def test_resume_on_many(ask, cli, recipe, raw, monkeypatch, dim):
    """And one rank alone opens the output."""
    assert ask("--frames", 9, "--chunk", 1).code == 0
    opened, begin = Path("opened"), video.VideoWriter.__init__

    def spy(self, *given):
        with opened.open("a") as file:
            print(os.environ["RANK"], file=file)
        begin(self, *given)

    monkeypatch.setattr(video.VideoWriter, "__init__", spy)
    path = recipe(ring_size=4, parallel_vae_size=3, parallel_vae_split_dim=dim)
    assert cli("--latents", "v.latents.safetensors", "--ranks", 4, "--recipe", path, "--out", "w.mp4", "--chunk", 1).code == 0
    check_frames("v", "w")
    assert opened.read_text() == "0\n"
    bad = recipe(ring_size=4, parallel_vae_size=4, parallel_vae_split_dim="time")
    refused = cli("--latents", "v.latents.safetensors", "--ranks", 4, "--recipe", bad, "--out", "x.mp4")
    assert refused.code == 2 and "'time'" in refused.err and refused.err.count("\n") == 1
