"""FP8: numbers in float8 (e4m3) with a scale, for attention and for a block's matrices. Faster, a few per cent off, opt-in.

    unit = largest of a group / 448          448 is e4m3's largest; a number keeps 3 bits behind its leading one
    x8   = x / unit, rounded                 x is about x8 * unit

    matrices    y = (x8 @ w8^T) * unit of the token * unit of the output feature + bias        groups: rows of x, rows of w
    attention   q, k, v by head, after RoPE (attention.py, "fa3-fp8")                          groups: heads

Weights are rounded once, tokens each time they pass. A matrix' product runs at about twice bf16's rate, and its weights take
half the memory. A product of two numbers that are each off by up to 2^-4 of themselves is off by about 3 %, at random.

Source   FP8 Formats for Deep Learning, arXiv:2209.05433; a scale a row as in torch's own scaled product.
Refuses  tensor parallelism (its slices would each have their own units); cards without float8 products.
"""

import math

import torch
from torch import Tensor, nn

E4M3 = torch.float8_e4m3fn


def quantize(x: Tensor, dims: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """x in float8, and the unit (fp32, `dims` kept as 1) that each group along `dims`, the last one with them, is in."""
    return rounded(x, largest(x, dims))


def largest(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    """Sought along the last dim first, where numbers lie side by side."""
    return torch.linalg.vector_norm(x, math.inf, dim=-1, keepdim=True).amax(dims, keepdim=True).float()


def rounded(x: Tensor, largest: Tensor) -> tuple[Tensor, Tensor]:
    """x, whose groups have no number beyond `largest`, in float8; and the unit of each group."""
    unit = largest.clamp(min=torch.finfo(torch.float32).tiny) / torch.finfo(E4M3).max
    return (x.float() / unit).to(E4M3), unit


class Fp8Linear(nn.Module):
    """A linear's weight, rounded for good; x (..., in) -> (..., out) in x's dtype."""

    def __init__(self, whole: nn.Linear):
        super().__init__()
        weight, unit = quantize(whole.weight.detach(), (1,))
        self.register_buffer("weight", weight)  # out, in
        self.register_buffer("unit", unit.T.contiguous())  # 1, out
        self.bias = whole.bias

    def forward(self, x: Tensor) -> Tensor:
        return self.product(*quantize(x.flatten(0, -2), (1,)), x.dtype).unflatten(0, x.shape[:-1])

    def product(self, x8: Tensor, unit: Tensor, dtype: torch.dtype) -> Tensor:
        """Rounded tokens (n, in) in units (n, 1) -> (n, out)."""
        return torch._scaled_mm(x8, self.weight.T, unit, self.unit, self.bias, out_dtype=dtype, use_fast_accum=True)


def quantize_linears(model: nn.Module) -> nn.Module:
    """Replace what its blocks name in FP8, one by one, so that never more than one of them is there twice."""
    for module in list(model.modules()):
        for name in getattr(module, "FP8", ()):
            module.set_submodule(name, Fp8Linear(module.get_submodule(name)))
    return model


def check(algorithm: str, tp_size: int, device: torch.device, dtype: torch.dtype) -> None:
    """Raises ValueError where float8 matrices cannot run."""
    if algorithm not in ("none", "FP8"):
        raise ValueError(f"quant_algo {algorithm!r} is not one of none, FP8")
    if algorithm == "none":
        return
    if tp_size > 1:
        raise ValueError(
            f"quant_algo FP8 with tp_size {tp_size}: a slice would have units of its own; set one of them to none, 1"
        )
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        raise ValueError("quant_algo FP8 needs a card of capability 8.9 or more; set it to none")
    if device.type == "cuda" and dtype != torch.bfloat16:
        raise ValueError(f"quant_algo FP8 gives bfloat16, not {str(dtype)[6:]}; set it to none, or --dtype bfloat16")
