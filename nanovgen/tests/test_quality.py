"""The table by its own command on forked ranks, a broken scheme in it, the limits, and two files."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import PROMPT
from safetensors.torch import save_file

from nanovgen import attention, clips, metrics, quality, video
from nanovgen.recipe import ParallelConfig, Recipe, TorchCompileConfig

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["--size", "64x32", "--frames", "5", "--steps", "2"]


@pytest.fixture
def table(tmp_path):
    """quality.py as a process of its own, and its JSON; `code` runs before it."""

    def call(*arguments: object, code: str = "", status: int = 0) -> tuple[dict, str]:
        program = f"import sys\nsys.path.insert(0, {str(ROOT)!r})\n{code}\nfrom nanovgen import quality\nsys.exit(quality.main())"
        out = tmp_path / "quality.json"
        done = subprocess.run([sys.executable, "-c", program, *SMALL, *map(str, arguments), "--out", str(out)], text=True,
                              capture_output=True, timeout=500, env=os.environ | {"OMP_NUM_THREADS": "1"})  # fmt: skip
        assert done.returncode == status, done.stderr[-2000:]
        return json.loads(out.read_text()), done.stdout

    return call


def rows_of(report: dict, dtype: str) -> dict[str, dict]:
    return {row["name"]: row for t in report["tables"] if t["dtype"] == dtype for row in t["rows"]}


def test_every_recipe_of_two_ranks(table, wide_folder, tmp_path):
    """What only moves data has one rank's pixels to the bit, and no recipe is beyond the limit."""
    keep = tmp_path / "kept"
    report, said = table("--model", wide_folder, "--ranks", 2, "--dtypes", "float32", "--prompts", PROMPT, "--keep", keep)
    rows = rows_of(report, "float32")
    first = ["one rank", "one rank again", "one rank, keys in reverse", "one rank, two threads"]
    swept = ["ring2", "1x2", "1x2.reduce_scatter", "2x1", "2x1.overlapped", "ul2", "ul2.async", "ul2.fused", "tp2", "cfg2"]
    assert list(rows) == [*first, *swept, "ring2, VAE 2 by width", "ring2, VAE 2 by height"]
    for name in ("one rank again", "ul2", "ul2.async", "ul2.fused", "2x1", "cfg2"):
        assert rows[name]["alone"]["latents"]["error"] == 0 and rows[name]["alone"]["pixels"]["psnr"] is None, name  # infinite
        assert rows[name]["why"] == ""
    for name in ("one rank, keys in reverse", "tp2", "ring2", "1x2"):
        assert 0 < rows[name]["alone"]["latents"]["error"] < 1e-5 and rows[name]["why"], name
    assert "partial results are merged" in rows["ring2"]["why"] and "partial sums" in rows["tp2"]["why"]
    assert all(row["within"] for row in rows.values()) and said.count("| ring2 | 2 |") == 1 and "BEYOND" not in said
    assert "no LPIPS" in said and len([*keep.iterdir()]) == len(rows)
    paths = [clips.clip_path(keep, clips.Variant(name), "float32", 0) for name in ("ring2", "one rank")]
    pair = {kind: metrics.summary(frames) for kind, frames in metrics.compare(*map(metrics.read, paths)).items()}
    each = [[pair["latents"]["error"], pytest.approx((255**2 / 10 ** (pair["pixels"]["psnr"] / 10)) ** 0.5)]]
    assert quality.plain(pair) | {"each": each} == rows["ring2"]["alone"] and pair["pixels"]["of"] == 5 * 64 * 32 * 3


def test_bfloat16_is_held_against_float32(table, wide_folder, recipe):
    """In whatever order the dtypes are given."""
    path = recipe(tp_size=2)
    request = ["--model", wide_folder, "--prompts", PROMPT]
    report, said = table(*request, "--recipes", path, "--dtypes", "bfloat16", "float32")
    rows = rows_of(report, "bfloat16")
    assert [t["truth"] for t in report["tables"]] == ["float32"] * 2 and "from float32" in said
    assert rows["one rank"]["alone"]["latents"]["error"] == 0 and 1e-3 < rows["one rank"]["truth"]["latents"]["error"] < 0.1
    assert 0 < rows[f"{path}: tp2"]["alone"]["latents"]["error"] < 0.1 and all(row["within"] for row in rows.values())


def test_clips_of_all_prompts_count_together(tmp_path):
    """The first off by 1 in 10, the second, four times as large, not at all."""
    one = torch.ones(1, 4, 1, 2, 2)
    for variant, latents in ((clips.REFERENCE, [one, 4 * one]), (clips.AGAIN, [1.1 * one, 4 * one])):
        for i, x in enumerate(latents):
            pixels = torch.full((1, 16, 16, 3), 10 * i, dtype=torch.uint8)
            save_file({"latents": x, "pixels": pixels}, clips.clip_path(tmp_path, variant, "float32", i))
    found = quality.measure((clips.AGAIN, "float32"), (clips.REFERENCE, "float32"), tmp_path, 2, None)
    assert found["each"] == [[pytest.approx(0.1), 0], [0, 0]]
    assert found["latents"]["error"] == pytest.approx(0.1 / 17**0.5) and found["pixels"]["of"] == 2 * 16 * 16 * 3


def test_ranks_of_torchrun(wide_folder, recipe, tmp_path):
    """The first of them alone writes and prints."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "nanovgen.quality"]
    request = ["--model", wide_folder, "--recipes", recipe(ring_size=2), "--dtypes", "float32", "--prompts", PROMPT]
    out, env = tmp_path / "quality.json", {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, *map(str, [*launcher, *SMALL, *request, "--out", out])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, env=os.environ | env)
    assert done.returncode == 0, done.stderr[-2000:]
    (row,) = [row for name, row in rows_of(json.loads(out.read_text()), "float32").items() if name.endswith("ring2")]
    assert 0 < row["alone"]["latents"]["error"] < 1e-5 and row["within"] and done.stdout.count("ring2 | 2 |") == 1


BROKEN = """
from nanovgen import attention, vae_parallel
attention.merge = lambda parts, _: (sum(o for o, _ in parts) / len(parts), parts[0][1])
vae_parallel.StripStream.border = lambda self, x, act: ([act(x)], (1, 1))
"""


def test_broken_recipes_are_beyond_the_limit(table, wide_folder, recipe):
    """A ring that averages, a VAE whose strips borrow nothing; and one beside them in which nothing is broken."""
    ring, strips, right = recipe(ring_size=2), recipe(cfg_size=2, parallel_vae_size=2), recipe(ulysses_size=2)
    request = ["--model", wide_folder, "--dtypes", "float32", "--prompts", PROMPT]
    report, said = table(*request, "--recipes", ring, strips, right, code=BROKEN, status=1)
    beyond = [name for name, row in rows_of(report, "float32").items() if not row["within"]]
    assert beyond == [f"{ring}: ring2", f"{strips}: cfg2, VAE 2 by width"] and said.count("BEYOND THE LIMIT") == 2


def test_swept_recipes_that_cannot_work_are_said(wide_folder, tmp_path):
    request = quality.Request(prompt=PROMPT, model=str(wide_folder), size="64x32", frames=5, out=str(tmp_path / "v.mp4"))
    found, refused = clips.prepare(request, ["float32"], clips.choose([], [3]), 1)
    assert "8 heads do not split over ulysses 3" in refused["ul3"] and "tp 3" in refused["tp3"]
    assert {"ring3", "1x3", "3x1", "ring3, VAE 3 by width"} <= {variant.name for variant, _ in found}
    with pytest.raises(ValueError, match="8 heads do not split over ulysses 3"):
        clips.prepare(request, ["float32"], [clips.Variant("mine", Recipe(parallel_config=ParallelConfig(ulysses_size=3)))], 1)


def test_a_recipe_is_there_once():
    names = [v.name for v in clips.choose(["1gpu", "2gpu", "2gpu"], [1, 2])]
    assert names.count("2gpu: cfg2") == 1 and "cfg2" not in names and not any("1 rank" in name for name in names)


def test_why_bits_differ():
    def alone(error: float, differ: int) -> dict:
        return {"latents": {"error": error}, "pixels": {"differ": differ}}

    strips = clips.Variant("strips", Recipe(parallel_config=ParallelConfig(cfg_size=2, parallel_vae_size=2)))
    ring = clips.Variant("ring", Recipe(parallel_config=ParallelConfig(ring_size=2, parallel_vae_size=2)))
    assert quality.explain(ring, alone(0, 0)) == quality.explain(clips.TWO_THREADS, alone(0, 0)) == ""
    assert "narrower strip" in quality.explain(strips, alone(0, 1)) and "merged" in quality.explain(ring, alone(1e-6, 1))
    assert "fewer rows" in quality.explain(strips, alone(1e-6, 0))
    assert quality.explain(ring, alone(1e-2, 1), same_kernel=False) == "another attention kernel"
    compiled = clips.Variant("compiled", Recipe(torch_compile_config=TorchCompileConfig(True)))
    assert quality.explain(compiled, alone(1e-6, 0)) == "compiled blocks"
    assert {quality.explain(clips.TWO_THREADS, alone(*off)) for off in ((0, 1), (1e-6, 0))} == {"sums in another order"}


def row(latents: list[float], levels: list[float], most: int = 1, floor: bool = False) -> dict:
    """Errors by clip."""
    return {"floor": floor, "truth": {"each": [*zip(latents, levels, strict=True)], "pixels": {"most": most}}}


LIMITS = {  # the floor's rows; another row; within
    "float32, 1e-5": ("float32", [row([1e-6, 2e-6], [0, 0])], row([9.9e-6, 9.9e-6], [9, 9]), True),
    "float32, above": ("float32", [row([1e-6, 2e-6], [0, 0])], row([0, 1.1e-5], [0, 0]), False),
    "float32, floor": ("float32", [row([1e-4, 3e-4], [1, 1]), row([2e-4, 1e-4], [1, 1])], row([2e-4, 3.5e-4], [1, 1]), True),
    "float32, too far": ("float32", [row([1e-4, 3e-4], [1, 1]), row([2e-4, 1e-4], [1, 1])], row([2e-4, 3.7e-4], [1, 1]), False),
    "float32, two levels": ("float32", [row([1e-6], [0.1])], row([1e-6], [0.1], most=2), False),
    "float32, as the floor": ("float32", [row([1e-6], [0.1], most=2)], row([1e-6], [0.1], most=2), True),
    "bfloat16": ("bfloat16", [row([0.01, 0.1], [2, 4])], row([0.015, 0.06], [2.18, 4.36], most=90), True),
    "bfloat16, twice and half": ("bfloat16", [row([0.01, 0.1], [2, 4])], row([0.005, 0.2], [8, 1]), True),
    "bfloat16, latents": ("bfloat16", [row([0.01, 0.1], [2, 4])], row([0.015, 0.09], [2, 4]), False),
    "bfloat16, pixels": ("bfloat16", [row([0.01, 0.1], [2, 4])], row([0.01, 0.1], [2, 7]), False),
    "bfloat16, one to the bit": ("bfloat16", [row([0.01, 0.1], [2, 4])], row([0, 0.5], [2, 4]), False),
    "bfloat16, none": ("bfloat16", [row([0, 0], [0, 0])], row([0, 1e-9], [0, 0]), False),
}


@pytest.mark.parametrize("name", LIMITS)
def test_limits(name):
    """The geometric mean over clips of an error by the largest of the floor's for it, 1.1; and what float32 allows beside."""
    dtype, ones, other, within = LIMITS[name]
    table = quality.judge([*(one | {"floor": True} for one in ones), dict(other)], dtype)
    assert [r["within"] for r in table["rows"]] == [True] * len(ones) + [within]
    assert table["floors"] == [[max(errors) for errors in zip(*clip, strict=True)] for clip in zip(*(
        one["truth"]["each"] for one in ones), strict=True)]  # fmt: skip
    if name == "bfloat16":
        assert table["rows"][1]["of_floor"] == pytest.approx([0.9**0.5, 1.09])


def test_keys_in_reverse_are_right_and_add_in_another_order():
    q, k, v = (torch.randn(1, n, h, 16, generator=torch.Generator().manual_seed(n)) for n, h in ((9, 4), (75, 2), (75, 2)))
    attention.prove(attention.KERNELS["reversed"], torch.device("cpu"), torch.float32, 16)
    found, wanted = (attention.attention(q, k, v, attention.KERNELS[name]) for name in ("reversed", "cpu"))
    assert not torch.equal(found[0], wanted[0])
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


# Two files


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    frames = torch.full((3, 32, 48, 3), 100, dtype=torch.uint8)
    latents = torch.ones(1, 4, 1, 4, 6)
    save_file({"pixels": frames, "latents": latents}, "b.safetensors")
    off = frames.clone()
    off[1, 0, 0] += 100
    save_file({"pixels": off, "latents": 1.01 * latents}, "a.safetensors")
    for name, count, fps in (("a.mp4", 3, 8), ("b.mp4", 3, 16), ("c.mp4", 2, 8)):
        with video.VideoWriter(Path(name), 48, 32, fps) as writer:
            writer.write(frames[:count].numpy())


def test_two_files(files, capsys):
    assert quality.main(["a.safetensors", "b.safetensors", "--out", "q.json"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == ["latents", "error", "cosine"] and float(lines[2][1]) == pytest.approx(0.01, rel=1e-4)
    assert lines[3] == ["pixels", "psnr", "ssim", "cosine", "differ", "most"] and lines[8][:2] == ["no", "LPIPS:"]
    assert [line[0] for line in lines[4:8]] == ["0", "1", "2", "all"] and [line[1] for line in lines[4:7:2]] == ["inf", "inf"]
    assert lines[5][4:] == lines[7][4:] == ["3", "100"]
    whole = 10 * math.log10(255**2 / (3 * 100**2 / (3 * 32 * 48 * 3)))
    assert float(lines[7][1]) == pytest.approx(whole, abs=1e-3)
    assert json.loads(Path("q.json").read_text())["pixels"]["all"]["psnr"] == pytest.approx(whole)
    assert quality.main(["a.mp4", "a.mp4"]) == 0
    assert capsys.readouterr().out.splitlines()[-2].split()[:3] == ["all", "inf", "1"]


@pytest.mark.parametrize(("arguments", "said"), [
    (["a.mp4"], "files given: 1; two are compared"),
    (["a.mp4", "b.mp4"], "8 frames a second against 16"),
    (["a.mp4", "c.mp4"], "3 frames against 2"),
    (["a.mp4", "nowhere.mp4"], "nowhere.mp4 is no file"),
    (["a.mp4", "a.mp4", "--frames", "5", "--ranks", "2"], "leave --ranks --frames out"),
    (["--ranks", "0"], "--ranks 0: give 1 or more"),
    (["--prompts", " "], "a prompt is empty"),
    (["--recipes", "9gpu"], "recipe 9gpu is no file; by name there are"),
    (["--frames", "8"], "8 frames is not 4k+1"),
    (["--model", "tiny-wan", "--recipes", "2gpu", "--device", "cuda"], "device cuda is not here"),
])  # fmt: skip
def test_refusals(files, capsys, arguments, said):
    assert quality.main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("nanovgen.quality: ") and said in error and error.count("\n") == 1


def test_ranks_under_torchrun(monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert quality.main(["--ranks", "2"]) == 2
    assert "torchrun has started 2; leave it out" in capsys.readouterr().err
