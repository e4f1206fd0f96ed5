"""Whole runs on a tiny random checkpoint: the file that comes out, what stands beside it, and what an interruption leaves."""

import json
import shlex
import signal
import time
import weakref
from collections import Counter
from dataclasses import fields
from pathlib import Path

import imageio.v3 as iio
import imageio_ffmpeg
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from serving import wait_for

from nanovgen import generate, scheduler, video
from nanovgen import job as jobs
from nanovgen.recipe import NEGATIVE_PROMPT, PRESETS, Request, resolve
from nanovgen.text import PromptTokenizer

CPU = torch.device("cpu")


def names() -> set[str]:
    """All that lies in the working folder, hidden files too."""
    return {path.name for path in Path.cwd().iterdir()}


def latents(stem: str) -> torch.Tensor:
    return load_file(f"{stem}.latents.safetensors")["latents"]


def flags(request: dict) -> list[str]:
    """The command line that asks for the request in a report."""
    kept = {name: value for name, value in request.items() if value not in (None, False) and name != "prompt"}
    return [request["prompt"], *(f"--{n.replace('_', '-')}" + ("" if v is True else f"={v}") for n, v in kept.items())]


def prepared(folder: Path, **changes) -> jobs.Job:
    small = dict(size="64x32", frames=5, steps=2, shift=5.0, out="v.mp4") | changes
    return jobs.prepare(Request("a red circle", model=str(folder), **small))


def test_the_file_is_what_was_asked_for(ask, read_video):
    result = ask("--fps", 12, "--frames", 9, "--size", "80x48", "--sheet")
    assert result.code == 0 and names() == {"v.mp4", "v.png", "v.json", "v.latents.safetensors"}
    meta, frames = read_video(Path("v.mp4"))
    assert frames.shape == (9, 48, 80, 3) and meta["fps"] == 12 and abs(meta["duration"] - 9 / 12) < 0.01
    assert meta["codec"] == "h264" and meta["pix_fmt"].startswith("yuv420p")
    assert iio.imread("v.png").shape == (3 * 50, 4 * 82, 3)  # nine frames in rows of four, one white pixel around each
    assert latents("v").shape == (1, 16, 3, 6, 10) and latents("v").dtype == torch.float32
    assert result.lines["video"] == "v.mp4" and "seed      0" in result.out
    bars = [line.split("\r")[-1].split(":")[0] for line in result.err.split("\n") if line]
    assert bars == ["load text_encoder", "load transformer", "load transformer_2", "denoise", "load vae"]


def test_the_json_is_enough_to_make_it_again(ask, cli):
    arguments = ["--seed", 7, "--guidance", 2.5, "--guidance-low=1", "--negative-prompt", "", "--solver", "euler"]
    assert ask(*arguments, "--grid", "diffusers", "--chunk", 2, "--sheet").code == 0
    report = json.loads(Path("v.json").read_text())
    request = report["request"]
    assert set(request) == {f.name for f in fields(Request)} and request["negative_prompt"] == ""
    assert report["output"] == "v.mp4" and report["seconds"] > 0 and len(report["timesteps"]) == 2 == len(report["sigmas"]) - 1
    assert {"load", "text", "denoise", "decode", "write"} == set(report["stages"])
    assert {"model", "video", "steps", "ranks", "needs"} <= set(report["plan"])
    first, movie = latents("v"), Path("v.mp4").read_bytes()
    for path in Path.cwd().iterdir():
        path.unlink()
    request["negative_prompt"] = None  # "" is written by hand: flags() leaves out only what is not given
    assert cli(*flags(request), "--negative-prompt", "").code == 0
    assert torch.equal(first, latents("v")) and movie == Path("v.mp4").read_bytes()
    again = json.loads(Path("v.json").read_text())
    assert again["request"] == report["request"] | {"negative_prompt": ""}


def test_resume_gives_the_same_video(ask, cli):
    assert ask("--sheet").code == 0
    assert cli("--latents", "v.latents.safetensors", "--out", "w.mp4", "--sheet").code == 0
    for end in (".mp4", ".png"):
        assert Path(f"v{end}").read_bytes() == Path(f"w{end}").read_bytes()
    assert not Path("w.latents.safetensors").exists()
    assert json.loads(Path("w.json").read_text())["request"]["latents"] == "v.latents.safetensors"


def test_chunks_do_not_show(ask, cli, monkeypatch):
    """Before H.264, which magnifies the last bits."""
    assert ask("--frames", 17).code == 0
    clips, counts, to_pixels = [], [], video.to_pixels
    for chunk in (1, 2, 0):
        pieces = []
        monkeypatch.setattr(video, "to_pixels", lambda x, pieces=pieces: (pieces.append(x), to_pixels(x))[1])
        assert cli("--latents", "v.latents.safetensors", "--out", "w.mp4", "--chunk", chunk).code == 0
        counts.append([piece.shape[2] for piece in pieces])
        clips.append(torch.cat(pieces, dim=2))
    assert counts == [[1, 4, 4, 4, 4], [5, 8, 4], [17]]
    for clip in clips[1:]:
        torch.testing.assert_close(clip, clips[0], atol=1e-4, rtol=0)


def test_seed_and_no_state(ask):
    """Same seed, same latents; another seed, others; and a request leaves nothing behind for the next."""
    for name, arguments in {"a": [], "b": ["--shift", 3, "--seed", 1], "c": [], "d": ["--seed", 1], "e": ["--shift", 3]}.items():
        assert ask(*arguments, "--out", f"{name}.mp4").code == 0
    assert torch.equal(latents("a"), latents("c")) and Path("a.mp4").read_bytes() == Path("c.mp4").read_bytes()
    assert not torch.equal(latents("a"), latents("d")) and not torch.equal(latents("a"), latents("e"))
    plans = [json.loads(Path(f"{name}.json").read_text()) for name in "ac"]
    assert plans[0]["sigmas"] == plans[1]["sigmas"]


def test_name_of_the_output(ask, cli, tiny_folder):
    arguments = ("A red, RED circle!", "--model", tiny_folder, "--size", "64x32", "--frames", 1, "--steps", 1)
    assert [cli(*arguments).lines["output"] for _ in range(2)] == ["a-red-red-circle.mp4", "a-red-red-circle-1.mp4"]
    assert ask("--frames", 1, "--out", "new/folder/v.mp4").code == 0 and Path("new/folder/v.mp4").exists()
    Path("a-red-red-circle-1.mp4").unlink()  # as after a run that could not decode: its latents are not to be lost
    assert cli(*arguments).lines["output"] == "a-red-red-circle-2.mp4"
    assert cli("--latents", "a-red-red-circle-1.latents.safetensors").lines["output"] == "a-red-red-circle-1.mp4"


def test_negative_prompts(ask, tiny_folder):
    Path("no.txt").write_text("a blue square\n")
    wanted = {None: NEGATIVE_PROMPT, "": "", "blurry": "blurry", "@no.txt": "a blue square\n"}
    tokenizer, said, ids = PromptTokenizer(tiny_folder / "tokenizer"), [], []
    for given, text in wanted.items():
        arguments = [] if given is None else [f"--negative-prompt={given}"]
        line = ask("--dry-run", *arguments).lines["negative"]
        assert line == repr(text) + (" (ours)" if given is None else "")
        assert prepared(tiny_folder, negative_prompt=given).negative == text
        said.append(line)
        ids.append(tuple(tokenizer(text)[0]))
    assert len(set(said)) == len(set(ids)) == 4 and ids[1] == (1,)
    assert ask("--dry-run", "--guidance", 1, "--guidance-low", 1).lines["negative"] == "not used"


def test_a_cut_prompt_is_said(ask):
    result = ask(prompt="a red circle " * 20)
    assert result.code == 0 and "(29 tokens too long: 32 are used)" in result.out
    assert "too long" not in ask(prompt="a red circle").out


def test_guidance_is_affine(tiny_folder, one_thread):
    """v(s) = u + s (c - u); guidance 1 runs the prompt alone, once."""
    calls = []
    for s in (0, 1, 3, 5):
        job = prepared(tiny_folder, guidance=float(s))
        stages = generate.Stages(CPU)
        with torch.inference_mode():
            texts = generate.encode_texts(job, stages)
            model = generate.load(job, "transformer", stages)
            contexts = {i: model.context(text, *job.latent_shape) for i, text in texts.items()}
            x = torch.randn(1, 16, *job.latent_shape, generator=torch.Generator().manual_seed(0))
            count = Counter()
            model.register_forward_hook(lambda *_, count=count: count.update("f"))
            calls.append((generate.velocity(job, model, x, job.times[0], contexts), count["f"]))
    (u, _), (c, once), (v3, twice), (v5, _) = calls
    assert (once, twice) == (1, 2) and not torch.allclose(u, c)
    torch.testing.assert_close(v3, u + 3 * (c - u))
    torch.testing.assert_close(v5, u + 5 * (c - u))


def test_resume_takes_what_decoding_can_honour(ask, cli, read_video):
    assert ask().code == 0
    again = cli("--latents", "v.latents.safetensors", "--out", "slow.mp4", "--fps", 8)
    assert again.code == 0 and read_video(Path("slow.mp4"))[0]["fps"] == 8
    made = cli("--latents", "v.latents.safetensors", "--out", "x.mp4", "--steps", 9)
    assert made.code == 2 and "leave steps out" in made.err and not Path("x.mp4").exists()


def test_image_to_video(ask, i2v_folder, read_video):
    made = {}
    for name, colour in (("red", (255, 0, 0)), ("blue", (0, 0, 255))):
        iio.imwrite(f"{name}.png", np.full((20, 30, 3), colour, np.uint8))
        result = ask("--model", i2v_folder, "--image", f"{name}.png", "--out", f"{name}.mp4")
        assert result.code == 0 and "wan2.2-i2v-a14b" in result.lines["model"], result
        made[name] = latents(name)
    assert read_video(Path("red.mp4"))[1].shape == (5, 32, 64, 3) and not torch.equal(made["red"], made["blue"])
    Path("red.png").unlink()  # the latents are all that a resume needs
    assert ask("--latents", "red.latents.safetensors", "--out", "w.mp4").code == 0
    assert Path("w.mp4").read_bytes() == Path("red.mp4").read_bytes()


DEFAULTS = {  # size, frames, fps, steps, guidance, guidance_low, shift, boundary: the model authors' own
    "wan2.2-t2v-a14b": ("1280x720", 81, 16, 40, 4.0, 3.0, 12.0, 0.875),
    "wan2.2-i2v-a14b": ("1280x720", 81, 16, 40, 3.5, 3.5, 5.0, 0.9),
    "wan2.1-t2v-14b": ("1280x720", 81, 16, 50, 5.0, None, 5.0, None),
    "wan2.1-t2v-1.3b": ("832x480", 81, 16, 50, 5.0, None, 3.0, None),
    "tiny-wan": ("192x96", 33, 16, 20, 5.0, 3.0, 5.0, 0.875),
    "cosmos3-super": ("1280x720", 189, 24, 35, 6.0, None, 10.0, None),
    "cosmos3-nano": ("1280x720", 189, 24, 35, 6.0, None, 10.0, None),
    "tiny-cosmos": ("192x96", 33, 16, 20, 2.0, None, 5.0, None),
}


@pytest.mark.parametrize("name", PRESETS)
def test_defaults(name):
    r = resolve(Request("x"), PRESETS[name])
    assert (r.size, r.frames, r.fps, r.steps, r.guidance, r.guidance_low, r.shift, r.boundary) == DEFAULTS[name]
    assert (r.solver, r.grid) == ("unipc", "native")


@pytest.mark.parametrize(("grid", "shift", "boundary", "high"), [
    ("diffusers", 3, 0.875, 13), ("diffusers", 5, 0.875, 17), ("diffusers", 12, 0.875, 26), ("diffusers", 5, 0.9, 15),
    ("native", 3, 0.875, 12), ("native", 5, 0.875, 17), ("native", 12, 0.875, 26), ("native", 5, 0.9, 15),
    ("native", 5, 0.0, 40), ("native", 5, 1.0, 0), ("native", 1, 0.9, 4),
])  # fmt: skip
def test_switch_of_experts(cli, grid, shift, boundary, high):
    """Steps of 40 with t >= 1000 boundary, by arithmetic: u >= b / (k - (k - 1) b) on the even grid; and it is printed."""
    start, end = (0.999, 0) if grid == "native" else (1, 0.001)
    edge = boundary / (shift - (shift - 1) * boundary)
    assert high == sum(start + (end - start) * i / 40 >= edge for i in range(40))
    times = scheduler.timesteps(scheduler.flow_sigmas(40, shift, grid))
    assert high == sum(t >= 1000 * boundary for t in times)
    result = cli("x", "--model", "wan2.2-t2v-a14b", "--dry-run", "--grid", grid, "--shift", shift, "--boundary", boundary)
    assert f"{high} high-noise, {40 - high} low-noise (boundary {float(boundary)})" in result.lines["steps"]


@pytest.mark.parametrize("name", [n for n in PRESETS if n != "tiny-wan"])
def test_dry_run_needs_no_files(cli, tiny_folder, monkeypatch, name):
    monkeypatch.setattr(jobs, "locate", lambda model: pytest.fail(f"{model} was looked for"))
    image = ["--image", "x.png"] if "i2v" in name else []
    iio.imwrite("x.png", np.zeros((16, 16, 3), np.uint8))
    result = cli("two cats", "--model", PRESETS[name].repo, "--dry-run", *image)
    assert result.code == 0 and " GB on a device" in result.lines["needs"] and result.err == ""
    assert names() == {"x.png"}


def test_help(run_py, capsys):
    with pytest.raises(SystemExit) as stop:
        run_py.main(["--help"])
    said = capsys.readouterr().out
    assert stop.value.code == 0
    wanted = {f.name.replace("_", "-") for f in fields(Request)} - {"prompt"} | {"recipe", "attention", "dry-run"}
    assert all(f"--{name}" in said for name in wanted) and "\n  prompt " in said


def test_odd_sizes(tmp_path, read_video):
    """4:2:0 needs even sizes: 102x58 is written exactly, 101x57 is an error that leaves no file. Requests are 16n anyway."""
    with video.VideoWriter(tmp_path / "even.mp4", 102, 58, 24) as writer:
        writer.write(np.random.default_rng(0).integers(0, 255, (6, 58, 102, 3), np.uint8))
    meta, frames = read_video(tmp_path / "even.mp4")
    assert frames.shape == (6, 58, 102, 3) and meta["fps"] == 24
    with pytest.raises(OSError, match=r"ffmpeg|pipe"), video.VideoWriter(tmp_path / "odd.mp4", 101, 57, 24) as writer:
        writer.write(np.zeros((6, 57, 101, 3), np.uint8))
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["even.mp4"]


DYING = """#!/bin/sh
case "$*" in *rawvideo*) head -c 9000 >/dev/null; exit 1;; *) exec {} "$@";; esac
"""


def test_a_failed_encoder_costs_nothing(ask, cli, tmp_path, monkeypatch):
    encoder = tmp_path / "ffmpeg"
    encoder.write_text(DYING.format(imageio_ffmpeg.get_ffmpeg_exe()))
    encoder.chmod(0o755)
    with monkeypatch.context() as patch:
        patch.setenv("IMAGEIO_FFMPEG_EXE", str(encoder))
        result = ask("--frames", 17, "--out", "my v.mp4")
    last = result.err.splitlines()[-1]
    assert result.code == 1 and "the latents are safe" in last and names() == {"my v.latents.safetensors"}
    command = shlex.split(last.split("run.py ")[-1])  # as it is printed
    assert cli(*command).code == 0 and names() == {"my v.mp4", "my v.json", "my v.latents.safetensors"}


def test_a_failed_decoder_costs_nothing(ask, tiny_folder, edit_weights):
    edit_weights(tiny_folder / "vae", lambda t: t["decoder.conv_out.bias"].fill_(float("nan")))
    result = ask()
    last = result.err.splitlines()[-1]
    assert result.code == 1 and "decoding has values that are not finite" in last and "--latents v.latents.safetensors" in last
    assert names() == {"v.latents.safetensors"}


def test_interrupted_while_denoising(spawn, finish, tiny_folder, tmp_path):
    process = spawn("a circle", "--model", tiny_folder, "--size=64x32", "--frames=5", "--steps=100000", "--out=v.mp4")
    wait_for(lambda: "step/s" in (tmp_path / "stderr").read_text())
    process.send_signal(signal.SIGINT)
    start, result = time.time(), finish(process)
    assert result.code == 130 and time.time() - start < 5 and names() == set()
    assert "interrupted" in result.err.splitlines()[-1] and "Traceback" not in result.err


def test_interrupted_while_decoding(spawn, finish, tiny_folder, cli, read_video):
    request = ("--size=64x32", "--frames=801", "--steps=1", "--out=v.mp4")
    process = spawn("a circle", "--model", tiny_folder, *request)
    wait_for(lambda: any(name.endswith("part.mp4") for name in names()))
    process.send_signal(signal.SIGINT)
    start, result = time.time(), finish(process)
    last = result.err.splitlines()[-1]
    assert result.code == 130 and time.time() - start < 5 and names() == {"v.latents.safetensors"}, result
    assert "the latents are safe" in last and "--latents v.latents.safetensors" in last and "Traceback" not in result.err


def test_parts_leave(ask, monkeypatch):
    """The text encoder is gone while the experts are there, and those while the VAE is."""
    there, load = {}, generate.load

    def watch(job, part, stages):
        gone = [name for name, model in there.items() if model() is None]
        if part.startswith("transformer"):
            assert "text_encoder" in gone
        elif part == "vae":
            assert gone == ["text_encoder", "transformer", "transformer_2"]
        model = load(job, part, stages)
        there[part] = weakref.ref(model)
        return model

    monkeypatch.setattr(generate, "load", watch)
    assert ask().code == 0
    assert [*there] == ["text_encoder", "transformer", "transformer_2", "vae"]
