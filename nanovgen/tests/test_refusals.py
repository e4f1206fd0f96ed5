"""Every refusal: status 2, one line that helps, before a weight is read, and nothing left behind."""

import json
import os
import pickle
import shutil
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import imageio_ffmpeg
import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from nanovgen import attention, generate, recipe, video
from nanovgen import job as jobs
from nanovgen.recipe import Request
from nanovgen.text import UMT5, UMT5Config

TRANSFORMER = "diffusion_pytorch_model.safetensors"


REQUESTS = {
    "frames 80": (["--frames", 80], ["80 frames", "4k+1", "20 latent frames", "decode to 77", "77 or 81"]),
    "frames 78": (["--frames", 78], ["78 frames", "20 latent frames", "decode to 77", "77 or 81"]),
    "frames 0": (["--frames", 0], ["0 frames", "4k+1", "1 or 5"]),
    "frames -3": (["--frames", -3], ["-3 frames", "1 or 5"]),
    "frames 2": (["--frames", 2], ["2 frames", "1 latent frame", "1 or 5"]),
    "size 853": (["--size", "853x480"], ["853x480", "multiple of 16", "848x480"]),
    "size 1080": (["--size", "1920x1080"], ["1920x1080", "multiple of 16", "1920x1088"]),
    "size 0": (["--size", "0x32"], ["0x32", "16x32"]),
    "size 10x": (["--size", "10x"], ["'10x'", "WIDTHxHEIGHT", "1280x720"]),
    "size abc": (["--size", "abc"], ["'abc'", "WIDTHxHEIGHT"]),
    "steps 0": (["--steps", 0], ["steps is 0", "at least 1"]),
    "fps 0": (["--fps", 0], ["fps is 0", "at least 1"]),
    "guidance": (["--guidance", -1], ["guidance is -1", "at least 0"]),
    "guidance low": (["--guidance-low", -0.5], ["guidance-low is -0.5", "at least 0"]),
    "guidance inf": (["--guidance", "inf"], ["guidance is inf"]),
    "guidance nan": (["--guidance", "nan"], ["guidance is nan", "at least 0"]),
    "shift 0": (["--shift", 0], ["shift is 0", "above 0"]),
    "shift nan": (["--shift", "nan"], ["shift is nan"]),
    "shift inf": (["--shift", "inf"], ["shift is inf"]),
    "boundary 2": (["--boundary", 2], ["boundary is 2", "0..1"]),
    "chunk -1": (["--chunk", -1], ["chunk is -1", "at least 0"]),
    "seed -1": (["--seed", -1], ["seed is -1", "at least 0"]),
    "seed 2^64": (["--seed", 2**64], ["seed is 18446744073709551616"]),
    "solver": (["--solver", "ddim"], ["'ddim'", "unipc, euler"]),
    "grid": (["--grid", "linear"], ["'linear'", "native, diffusers"]),
    "karras": (["--grid", "karras"], ["Cosmos3", "no shift"]),
    "dtype": (["--dtype", "float16"], ["'float16'", "float32, bfloat16"]),
    "VAE dtype": (["--vae-dtype", "float16"], ["vae-dtype 'float16'", "float32, bfloat16"]),
    "device": (["--device", "tpu"], ["tpu", "cpu"]),
    "attention": (["--attention", "sparse"], ["'sparse'", "auto, cpu, flash"]),
    "attention here": (["--attention", "flash", "--device", "cpu"], ["flash does not run on cpu", "cpu"]),
    "output suffix": (["--out", "v.avi"], ["v.avi", ".mp4"]),
    "output proc": (["--out", "/proc/x/y.mp4"], ["/proc/x"]),
    "output length": (["--out", "n" * 245 + ".mp4"], ["nnn", "too long"]),  # as a video it would pass, as latents not
    "output longer": (["--out", "n" * 300 + ".mp4"], ["nnn", "too long"]),
    "image": (["--image", "no.png"], ["text alone", "--image"]),
    "negative": (["--negative-prompt", "@no.txt"], ["no.txt", "cannot be read"]),
    "recipe name": (["--recipe", "9gpu"], ["recipe 9gpu", "1gpu"]),
    "recipe file": (["--recipe", "no.yaml"], ["recipe no.yaml is no file"]),
    "model length": (["--model", "m" * 300], ["mmm", "no folder"]),
    "model foo": (["--model", "foo"], ["'foo'", "no folder", "owner/name"]),
    "latents file": (["--latents", "no.safetensors"], ["no.safetensors", "no latents"]),
}  # fmt: skip


@pytest.mark.parametrize("name", REQUESTS)
def test_request(refused, name):
    arguments, said = REQUESTS[name]
    line = refused(*arguments)
    assert all(part in line for part in said), line


@pytest.mark.parametrize("prompt", ["", " \t\n "])
def test_empty_prompt(refused, prompt):
    assert "the prompt is empty" in refused(prompt=prompt)


RECIPES = {
    "top key": ("attention_confg: {backend: auto}", ["attention_confg", "attention_config, parallel_config"]),
    "nested key": ("parallel_config: {ulyses_size: 2}", ["parallel_config", "ulyses_size", "ulysses_size"]),
    "type": ("parallel_config: {ulysses_size: two}", ["ulysses_size is 'two'", "look like 1"]),
    "bool": ("parallel_config: {cfg_size: true}", ["cfg_size is True", "look like 1"]),
    "pair": ("parallel_config: {attn2d_size: [2]}", ["attn2d_size is (2,)", "(1, 1)"]),
    "no keys": ("parallel_config:", ["parallel_config: None is not a set of keys"]),
    "zero": ("parallel_config: {cfg_size: 0}", ["cfg_size is 0"]),
    "minus": ("parallel_config: {cfg_size: -1, ulysses_size: -1}", ["cfg_size is -1"]),
    "text": ("plain", ["'plain' is not a set of keys"]),
    "not YAML": ("a: [1, 2", ["is not YAML"]),
    "8 ranks": ("parallel_config: {cfg_size: 2, ulysses_size: 4}", ["8 ranks (cfg 2 x ulysses 4)", "not 1", "--ranks 8"]),
    "VAE ranks": ("parallel_config: {parallel_vae_size: 4}", ["parallel_vae_size 4", "use 1"]),
}


@pytest.mark.parametrize("name", RECIPES)
def test_recipe(refused, tmp_path, name):
    content, said = RECIPES[name]
    path = tmp_path / "r.yaml"
    path.write_text(content)
    line = refused("--recipe", path)
    assert all(part in line for part in said), line
    if name not in ("8 ranks", "VAE ranks", "zero", "minus"):  # these are no matter of the file
        assert str(path) in line


def test_one_expert_is_enough_where_the_boundary_says_so(ask, tiny_folder):
    shutil.rmtree(tiny_folder / "transformer_2")
    assert ask("--boundary", 0).code == 0
    assert ask("--boundary", 1).code == 2


def test_without_the_first_expert(ask, tiny_folder):
    (tiny_folder / "transformer" / TRANSFORMER).unlink()  # its config stays: it says what model this is
    assert ask("--boundary", 1).code == 0
    shutil.rmtree(tiny_folder / "transformer")
    result = ask("--boundary", 1)
    assert result.code == 2 and "transformer/config.json is missing" in result.err


def test_boundary_of_a_model_with_one_transformer(ask, refused, tiny_folder):
    shutil.rmtree(tiny_folder / "transformer_2")
    index = json.loads((tiny_folder / "model_index.json").read_text())
    index.pop("transformer_2")
    (tiny_folder / "model_index.json").write_text(json.dumps(index))
    assert ask().code == 0  # boundary_ratio is still in the index
    assert "one transformer; leave --boundary out" in refused("--boundary", 0.9)


@pytest.mark.parametrize(("change", "said"), [(dict(d_model=96), ["96", "64"]), (dict(vocab_size=20), ["20 tokens"])])
def test_parts_of_two_checkpoints(refused, tiny_folder, change, said):
    config = UMT5Config(**dict(vocab_size=500, d_model=64, d_kv=32, d_ff=64, num_layers=1, num_heads=2) | change)
    model = UMT5(config)
    tensors = {model.hub_name(name): p for name, p in model.state_dict().items()}
    save_file(tensors, tiny_folder / "text_encoder/model.safetensors")
    (tiny_folder / "text_encoder/config.json").write_text(json.dumps(asdict(config)))
    line = refused()
    assert all(part in line for part in ["text encoder", *said]), line


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth", "model.ckpt"])
def test_pickles_are_never_opened(refused, tiny_folder, tmp_path, name):
    class Malice:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "owned"),)

    (tiny_folder / "transformer" / TRANSFORMER).unlink()
    (tiny_folder / "transformer" / name).write_bytes(pickle.dumps(Malice()))
    line = refused()
    assert name in line and "pickle" in line and "safetensors" in line
    assert not (tmp_path / "owned").exists()


def test_output_places(refused, tmp_path):
    Path("file").write_text("")
    Path("folder.mp4").mkdir()
    assert "cannot write" in refused("--out", "file/v.mp4")
    assert "is a folder" in refused("--out", "folder.mp4")
    for end in (".json", ".latents.safetensors", ".png"):
        Path(f"beside{end}").mkdir()
        assert f"beside{end} is a folder" in refused("--out", "beside.mp4", "--sheet")
        Path(f"beside{end}").rmdir()
    with pytest.raises(ValueError, match=r"MB free and the files may need 1000000000\.0 MB"):
        video.check_output(tmp_path / "v.mp4", 10**15)


def test_no_space(refused, tiny_folder, tmp_path):
    (tmp_path / "small").mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(tmp_path / "small")]
    if not shutil.which("mount") or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("no tmpfs can be mounted here")
    try:
        line = refused("--out", tmp_path / "small/v.mp4", "--size", "320x192")
        assert "0.1 MB free" in line and "may need 0.5 MB" in line
        job = jobs.prepare(Request("x", model=str(tiny_folder), size="64x32", frames=5, steps=2))
        with pytest.raises(OSError, match=r"cannot write .*v\.latents\.safetensors"):
            generate.save_latents(torch.zeros(1, 16, 100, 16, 16), replace(job, out=tmp_path / "small/v.mp4"))
        assert list((tmp_path / "small").iterdir()) == []
    finally:
        subprocess.run(["umount", str(tmp_path / "small")], check=True)


@pytest.mark.parametrize("encoder", ["/nowhere/ffmpeg", "/bin/false", None])
def test_ffmpeg_missing(refused, monkeypatch, encoder):
    def absent():
        raise RuntimeError("No ffmpeg exe could be found")

    if encoder:
        monkeypatch.setenv("IMAGEIO_FFMPEG_EXE", encoder)
    else:
        monkeypatch.setattr(imageio_ffmpeg, "get_ffmpeg_exe", absent)
    line = refused()
    assert "ffmpeg" in line and (encoder or "pip install imageio-ffmpeg") in line


def test_images(refused, i2v_folder):
    model = ("--model", i2v_folder, "--image")
    assert "give --image FILE" in refused("--model", i2v_folder)
    Path("text.png").write_text("no image")
    assert "text.png cannot be read" in refused(*model, "text.png")
    assert "gone.png cannot be read" in refused(*model, "gone.png")
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8)).save("good.png")
    whole = Path("good.png").read_bytes()
    Path("cut.png").write_bytes(whole[: len(whole) // 2])
    assert "cut.png cannot be read" in refused(*model, "cut.png")
    Path("crc.png").write_bytes(whole[:60] + b"\xff\xff\xff" + whole[63:])
    assert "crc.png cannot be read" in refused(*model, "crc.png")
    Image.new("1", (20000, 10000)).save("bomb.png")
    assert "bomb.png cannot be read" in refused(*model, "bomb.png")


def test_latents_files(refused, tiny_folder, ask, monkeypatch):
    assert ask("--out", "ok.mp4").code == 0
    request = {"request": json.dumps({**json.loads(Path("ok.json").read_text())["request"], "out": None})}
    ours = load_file("ok.latents.safetensors")["latents"]
    save_file({"latents": ours[..., 1:].contiguous()}, "shape.st", metadata=request)
    save_file({"other": ours}, "name.st", metadata=request)
    save_file({"latents": ours}, "key.st", metadata={"request": '{"promt": "x"}'})
    save_file({"latents": ours}, "json.st", metadata={"request": "{"})
    whole = Path("ok.latents.safetensors").read_bytes()
    Path("short.st").write_bytes(whole[:-8])
    for path in ("ok.mp4", "ok.json", tiny_folder / "vae" / TRANSFORMER, "shape.st", "name.st", "key.st", "json.st", "short.st"):
        line = refused("--latents", path, "--out", "w.mp4", bare=True)
        assert str(path) in line, line


def test_hub_id_without_a_network(refused, monkeypatch):
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    start = time.perf_counter()
    assert "nobody/nothing" in (line := refused("--model", "nobody/nothing")) and "weights/README.md" in line
    assert time.perf_counter() - start < 2


def test_a_wrong_kernel_stops_the_run_before_the_weights(ask, monkeypatch):
    """Not a refusal: the kernel has to run to be seen."""
    right = attention.KERNELS["cpu"]
    monkeypatch.setitem(attention.KERNELS, "cpu", lambda q, k, v: (right(q, k, v)[0], right(q, k, v)[1] * 1.4427))
    result = ask()
    assert result.code == 1 and "LSE is off by 4" in result.err and result.err.count("\n") == 1


def test_values_that_are_not_finite_stop_the_run(ask, tiny_folder, edit_weights):
    """Not a refusal: seen only once it runs. Status 1, and the line names the stage."""

    def spoil(part, name):
        edit_weights(tiny_folder / part, lambda t: t[name].fill_(float("nan")))

    spoil("transformer_2", "proj_out.bias")
    result = ask()
    assert result.code == 1 and "denoising, step 2 has values that are not finite" in result.err.splitlines()[-1]
    spoil("text_encoder", "encoder.final_layer_norm.weight")
    result = ask()
    assert result.code == 1 and "text encoding (prompt) has values that are not finite" in result.err.splitlines()[-1]
    assert list(Path.cwd().iterdir()) == []


@pytest.mark.parametrize("arguments", [["--frames", "80"], ["--model", "nobody/nothing"], ["--out", "v.avi"]], ids=" ".join)
def test_refusals_are_fast(spawn, finish, tiny_folder, arguments):
    """As the user meets them: process start, imports and all. This machine may be busy: beside torch's own import, and again."""
    for _ in range(3):
        start = time.perf_counter()
        subprocess.run([sys.executable, "-c", "import torch"], check=True)
        torch_alone = time.perf_counter() - start
        result = finish(spawn("x", "--model", tiny_folder, *arguments, HF_HUB_OFFLINE="1"))
        seconds = time.perf_counter() - start - torch_alone
        assert result.code == 2 and result.out == "" and result.err.count("\n") == 1, result
        if seconds < max(3, 1.5 * torch_alone):
            break
    print(f"{' '.join(arguments):<28} {seconds:.2f} s, import torch {torch_alone:.2f} s")
    assert seconds < max(3, 1.5 * torch_alone)


def test_request_types(cli):
    """argparse's own refusals: status 2 as well."""
    for arguments in (["--frames", "many"], ["--steps", "1.5"], ["--nonsense"]):
        with pytest.raises(SystemExit) as stop:
            cli("x", *arguments)
        assert stop.value.code == 2


def test_all_presets_have_names_that_are_hub_ids():
    assert all(preset.repo.count("/") == 1 for preset in recipe.PRESETS.values())
