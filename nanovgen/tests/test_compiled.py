"""torch.compile of what lies between two attentions: the same numbers, no compilation in a later step, on ranks too."""

import gc
import json
import weakref
from pathlib import Path

import pytest
import torch
import yaml
from conftest import PROMPT, WAN
from safetensors.torch import load_file

from nanovgen import attention, compiled
from nanovgen.cosmos import Cosmos, CosmosConfig, Layer
from nanovgen.recipe import CompilationConfig
from nanovgen.wan import Block, Wan


@pytest.fixture
def write(tmp_path):
    def call(**content) -> Path:
        path = tmp_path / "compiled.yaml"
        path.write_text(yaml.safe_dump(content))
        return path

    return call


def make(kind: str) -> tuple[torch.nn.Module, object]:
    torch.manual_seed(0)
    if kind == "wan":
        model = Wan(WAN)
        return model, model.context(torch.randn(1, 7, WAN.text_dim), 2, 4, 6)
    config = CosmosConfig(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
                          head_dim=16, mrope_section=(4, 2, 2))  # fmt: skip
    model = Cosmos(config)
    prefix = [(torch.randn(1, 5, 2, 16), torch.randn(1, 5, 2, 16)) for _ in range(2)]
    return model, model.context(prefix, 2, 4, 6, 16)


@pytest.mark.parametrize("kind", ["wan", "cosmos"])
def test_compiled_equals_eager(kind, one_thread):
    with torch.inference_mode():
        model, context = make(kind)
        x = torch.randn(1, 16 if kind == "wan" else 48, 2, 4, 6)
        wanted = [model(x + i, torch.tensor([900 - i]), context) for i in range(2)]
        compiled.compile_blocks(model)
        before = compiled.graphs()
        found, made = [], []
        for i in range(2):
            found.append(model(x + i, torch.tensor([900 - i]), context))
            made.append(compiled.graphs() - before)
        errors = [((a - b).norm() / b.norm()).item() for a, b in zip(found, wanted, strict=True)]
        print(f"{kind}: {made[0]} graphs in the first step, {made[1] - made[0]} in the second; errors {errors}")
        assert max(errors) <= 1e-5
        methods = len(Wan.LOCAL + Block.LOCAL if kind == "wan" else Layer.LOCAL)
        assert made == [methods, methods]  # not one a block, and none later
        seen = weakref.ref(model)
        del model
        gc.collect()
        assert seen() is None, "a compiled model must be gone before the VAE comes"


def test_compiled_merge(one_thread):
    """Also where a partial is over no keys, and where it is of another dtype than the one before."""
    o, lse = torch.randn(3, 1, 5, 2, 4), torch.randn(3, 1, 5, 2)
    lse[1, :, :2] = -torch.inf
    for dtype in (torch.float32, torch.bfloat16):
        partials = [(o[0], lse[0]), (o[1].to(dtype), lse[1]), (o[2].to(dtype), lse[2])]
        wanted, found = (attention.find_merge(way)(partials, torch.float32) for way in (False, True))
        assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("degrees", [{"ulysses_size": 2}, {"ring_size": 2}], ids=str)
def test_two_ranks(ask, wide_folder, recipe, spawn, finish, degrees):
    """The scheme and its collectives are outside: the latents are the eager one-rank ones within the tolerance.

    As a process of its own: ranks that are forked from one that has compiled may wait for its compiler's threads.
    """
    assert ask("--model", wide_folder, "--out", "one.mp4").code == 0
    result = finish(spawn(PROMPT, "--model", wide_folder, "--size", "64x32", "--frames", 5, "--steps", 2, "--shift", 5, "--out",
                          "two.mp4", "--ranks", 2, "--recipe", recipe(**degrees), "--compile"))  # fmt: skip
    assert result.code == 0, result
    one, two = (load_file(f"{name}.latents.safetensors")["latents"] for name in ("one", "two"))
    error = ((two - one).norm() / one.norm()).item()
    print(f"compiled, two ranks: {error:.1e}")
    assert error <= 1e-5
    reports = [json.loads(Path(f"{name}.json").read_text()) for name in ("one", "two")]
    assert [r["graphs_in_steps"] for r in reports] == [None, 0] and reports[1]["recipe"]["torch_compile_config"]["enable"]
    assert "warm-up" in reports[1]["stages"] and "warm-up" not in reports[0]["stages"]
    steps, layers, tokens, width = 2, 1, 16, 96
    sent = steps * 2 * layers * tokens * width * 4  # fp32, two streams: of q, k, v, o a quarter each; or a ring's k, v, half each
    (axis,) = (name.removesuffix("_size") for name in degrees)
    assert reports[1]["bytes_sent"][axis] == sent, "the warm-up's bytes are not the request's"


def test_what_is_warmed_up_is_said(ask, write):
    shapes = {"resolutions": [[48, 64]], "num_frames": [80]}
    off = ask("--dry-run", "--recipe", write(compilation_config=shapes)).lines["warm-up"]
    named = "the recipe names shapes: 80 frames would be 20 latent frames"
    assert off == f"nothing is compiled; {named}"
    path = write(compilation_config=shapes, torch_compile_config={"enable": True})
    on = ask("--dry-run", "--recipe", path).lines["warm-up"]
    assert on == f"one step each of 64x48 in 20 latent frames, 64x32 in 2 latent frames, before the timed steps; {named}"
    assert ask("--dry-run", "--recipe", path, "--no-compile").lines["warm-up"] == off
    assert "nothing is compiled" in ask("--dry-run").lines["warm-up"]


def test_refusals(refused, write, recipe):
    assert "enable is 1; it should look like False" in refused("--recipe", write(torch_compile_config={"enable": 1}))
    assert "unknown key enabled" in refused("--recipe", write(torch_compile_config={"enabled": True}))
    line = refused("--recipe", recipe(tp_size=2), "--ranks", 2, "--compile")
    assert "torch_compile_config.enable with tp_size 2" in line and "set enable to false, or tp_size to 1" in line
    bad = write(compilation_config={"resolutions": [[720, 1281]], "num_frames": [80]})
    assert "resolutions has [720, 1281]" in refused("--recipe", bad)
    bad = write(compilation_config={"resolutions": [[720, 1280]], "num_frames": ["80"]})
    assert "num_frames has '80'" in refused("--recipe", bad)


def test_shapes_are_the_latent_frames():
    found = CompilationConfig(resolutions=([720, 1280],), num_frames=(80, 81)).shapes()
    assert found == [(1280, 720, 77), (1280, 720, 81)]


def test_a_gelu_inside_the_product(one_thread):
    """The operator as torch checks one; on a CPU it is the GELU of erf, and not used there, nor where gradients are wanted."""
    torch.manual_seed(0)
    linear, x = torch.nn.Linear(24, 40), torch.randn(2, 7, 24)
    with torch.no_grad():
        torch.library.opcheck(compiled._linear_gelu, (x, linear.weight.detach(), linear.bias.detach()))
        found = compiled._linear_gelu(x, linear.weight, linear.bias)
        torch.testing.assert_close(found, torch.nn.functional.gelu(linear(x)))
        tanh = torch.nn.functional.gelu(linear(x), approximate="tanh")
        assert torch.equal(compiled.linear_gelu(linear, x), tanh) and not torch.allclose(found, tanh, atol=1e-5)
    compiled.linear_gelu(linear, x).sum().backward()
    assert linear.weight.grad.abs().sum() > 0
