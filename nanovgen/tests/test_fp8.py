"""Float8 matrices: what rounding costs, which matrices it reaches, and what is refused."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import WAN

from nanovgen import fp8
from nanovgen.cosmos import Cosmos, CosmosConfig
from nanovgen.recipe import Recipe
from nanovgen.wan import Wan

COSMOS = CosmosConfig(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
                      head_dim=16, mrope_section=(4, 2, 2))  # fmt: skip


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return ((found - wanted).norm() / wanted.norm()).item()


def test_a_linear_is_its_rounded_numbers_product(one_thread):
    """Exactly the product of what was rounded, and a few per cent off the unrounded one; an outlier costs its row alone."""
    torch.manual_seed(0)
    whole, x = torch.nn.Linear(128, 48), torch.randn(2, 30, 128)
    x[0, 0, 0] = 1e4
    rounded = fp8.Fp8Linear(whole)
    x8, unit = fp8.quantize(x.flatten(0, 1), (1,))
    assert x8.dtype == torch.float8_e4m3fn and x8.float().abs().amax(1).eq(448).all()
    exact = (x8.double() * unit.double()) @ (rounded.weight.double() * rounded.unit.T.double()).T + whole.bias.double()
    found = rounded(x)
    assert found.shape == (2, 30, 48) and found.dtype == x.dtype
    assert relative(found.flatten(0, 1).double(), exact) < 1e-6
    error = relative(found.flatten(0, 1)[1:], whole(x).flatten(0, 1)[1:])
    print(f"a linear's rows without the outlier: {error:.2e}")
    assert 1e-2 < error < 5e-2


@pytest.mark.parametrize("kind", ["wan", "cosmos"])
def test_a_model_with_rounded_matrices(kind, one_thread):
    torch.manual_seed(0)
    model, x = (Wan(WAN), torch.randn(1, 16, 2, 4, 6)) if kind == "wan" else (Cosmos(COSMOS), torch.randn(1, 48, 2, 4, 6))
    text = torch.randn(1, 7, WAN.text_dim)
    prefix = [(torch.randn(1, 5, 2, 16), torch.randn(1, 5, 2, 16)) for _ in range(2)]
    context = model.context(text, 2, 4, 6) if kind == "wan" else model.context(prefix, 2, 4, 6, 16)
    blocks = model.blocks if kind == "wan" else model.layers
    with torch.inference_mode():
        wanted = model(x, torch.tensor([500]), context)
        before = sum(isinstance(m, torch.nn.Linear) for m in model.modules())
        fp8.quantize_linears(model)
        error = relative(model(x, torch.tensor([500]), context), wanted)
    rounded = sum(isinstance(m, fp8.Fp8Linear) for m in model.modules())
    print(f"{kind}: {rounded} of {before} matrices; the velocity is off by {error:.2e}")
    assert rounded == len(type(blocks[0]).FP8) * len(blocks) and 1e-3 < error < 0.1
    big = {name for name, p in blocks.named_parameters() if p.ndim == 2 and "table" not in name}
    assert all(".cross_attn.to_" in name for name in big)  # the text's keys and values: made once a prompt, not each step


def test_a_run_and_what_it_says(ask, cli, wide_folder, recipe):
    plain = ask("--model", wide_folder)
    assert plain.code == 0 and "float8" not in plain.lines["runs"]
    latents = Path("v.latents.safetensors").read_bytes()
    found = ask("--model", wide_folder, "--quant", "FP8", "--out", "r.mp4")
    assert found.code == 0 and "float8 matrices" in found.lines["runs"]
    assert Path("r.latents.safetensors").read_bytes() != latents
    assert json.loads(Path("r.json").read_text())["recipe"]["quant_config"] == {"quant_algo": "FP8"}
    refused = cli("a dog", "--model", wide_folder, "--quant", "fp4")
    assert refused.code == 2 and "quant_algo 'fp4' is not one of none, FP8" in refused.err


def test_refusals():
    cpu = torch.device("cpu")
    with pytest.raises(ValueError, match="FP8 with tp_size 2: a slice would have units of its own"):
        fp8.check("FP8", 2, cpu, torch.bfloat16)
    fp8.check("FP8", 1, cpu, torch.float32)
    fp8.check("none", 2, cpu, torch.float32)
    assert replace(Recipe()).quant_config.quant_algo == "none"
