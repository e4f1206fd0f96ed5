"""One attention over many kernels: attention(q, k, v) -> (o, lse).

    q (b, s, H, d), k and v (b, t, Hkv, d)  ->  o (b, s, H, d), lse (b, s, H)

o = softmax(q k^T / sqrt(d)) v, full (no mask), and lse = ln sum exp(q k^T / sqrt(d)), fp32. With the LSE, partial
results over disjoint keys can be merged exactly (FlashAttention, arXiv:2205.14135), which ring and Attention2D live on.
GQA: query head j reads key head j // (H / Hkv). Only this file transposes q, k, v: kernels disagree about the layout of
their tensors and of their LSE, so each is wrapped once here, and `prove` checks a kernel's LSE against a plain softmax
before it is used.

    cpu, efficient     torch's own, any dtype          fa2    flash-attn               capability 8.0 and up
    flash, cudnn       torch's own, half precision     fa3    fa3-fwd, flash-attn-3    9.0     arXiv:2407.08608
                                                       fa4    flash-attn-4             9.0 and 10.0
    fa3-fp8            fa3 on q, k, v rounded to float8: faster, and a few per cent off, so never chosen unasked
    reversed           the default one on keys in reverse order: what another order of summing changes (quality.py's floor)
"""

import importlib
import math
from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from nanovgen import fp8

aten = torch.ops.aten
Kernel = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
Partial = tuple[Tensor, Tensor]  # o and lse over some of the keys
Merge = Callable[[list[Partial], torch.dtype], Partial]
Projection = Callable[[], Tensor]  # what a model hands a scheme: gives q, k or v of this rank's tokens, when called
KV = tuple[Tensor, Tensor]  # keys and values, each (b, n, Hkv, d)


def attention(q: Tensor, k: Tensor, v: Tensor, kernel: Kernel | None = None) -> tuple[Tensor, Tensor]:
    """Attend locally. Shapes as in the file's header; without a kernel, the default of q's device and dtype."""
    if not q.shape[1] or not k.shape[1]:  # nothing to see: weight 0 in any merge
        return torch.zeros_like(q), q.new_full(q.shape[:3], -math.inf, dtype=torch.float32)
    grad = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    kernel = kernel or KERNELS[default_kernel(q.device, q.dtype, grad)]
    if k.shape[2] != q.shape[2] and (grad or kernel not in GROUPED):
        k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], dim=2) for x in (k, v))
    o, lse = kernel(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
    return o.transpose(1, 2), lse.transpose(1, 2)


def after(prefix: KV | None, k: Tensor, v: Tensor) -> KV:
    """Keys and values (b, n, Hkv, d) behind those of a prefix that every query sees too; None: there is no prefix."""
    return (k, v) if prefix is None else (torch.cat([prefix[0], k], dim=1), torch.cat([prefix[1], v], dim=1))


def merge(partials: list[Partial], dtype: torch.dtype) -> Partial:
    """Attention over a union of disjoint key sets from (o, lse) over each; fp32 inside, o in `dtype` out.

    Each partial is o_i = sum_i / z_i with z_i = e^lse_i. The whole is sum_i z_i o_i / sum_i z_i. Dividing both by
    e^m, m = max_i lse_i, keeps every factor in 0..1. A partial over no keys has lse -inf and weight 0.
    """
    o, lse = (torch.stack(x) for x in zip(*((o.float(), lse) for o, lse in partials), strict=True))  # i b s h (d)
    top = lse.amax(0)
    weight = torch.exp(lse - top.nan_to_num(neginf=0.0))  # (i, b, s, h)
    total = weight.sum(0)
    out = (o * weight[..., None]).sum(0) / total.clamp(min=torch.finfo(torch.float32).tiny)[..., None]
    return out.to(dtype), top + total.log()


# The kernels: (b, H, s, d) in; o (b, H, s, d) and lse (b, H, s) out.


def _cpu(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    o, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v)
    return o, lse.float()


def _flash(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return aten._scaled_dot_product_flash_attention(q, k, v)[:2]


def _cudnn(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    o, lse = aten._scaled_dot_product_cudnn_attention(q, k, v, None, True)[:2]
    return o, lse.reshape(o.shape[:3])


def _efficient(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    o, lse = aten._scaled_dot_product_efficient_attention(q, k, v, None, True)[:2]
    return o, lse[:, :, : q.shape[2]]  # it pads the rows of the LSE to a multiple of 32


def _fa2(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """All of FlashAttention's own kernels want (b, s, H, d), and give the LSE as (b, H, s)."""
    o, lse = installed("fa2").flash_attn_func(*tokens_first(q, k, v), return_attn_probs=True)[:2]
    return o.transpose(1, 2), lse


def _fa3(q: Tensor, k: Tensor, v: Tensor, **descale: Tensor) -> tuple[Tensor, Tensor]:
    o, lse = installed("fa3").flash_attn_func(*tokens_first(q, k, v), return_attn_probs=True, **descale)[:2]
    return o.transpose(1, 2), lse


def _fa3_fp8(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return _fa3_rounded(by_heads, q, k, v)


def _fa3_fp8_compiled(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """In one pass over q, k and v each where eager torch needs three."""
    return _fa3_rounded(_compiled(by_heads), q, k, v)


def _compiled(f: Callable) -> Callable:
    return lambda *given: torch.compile(f, dynamic=False)(*given)


def _fa3_rounded(rounding: Callable, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    (q, q_descale), (k, k_descale), (v, v_descale) = (rounding(x, k.shape[1]) for x in (q, k, v))
    return _fa3(q, k, v, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)


def _fa4(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    o, lse = installed("fa4").flash_attn_func(*tokens_first(q, k, v), return_lse=True)[:2]
    return o.transpose(1, 2), lse


def _reversed(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return KERNELS[default_kernel(q.device, q.dtype)](q, k.flip(2), v.flip(2))


def tokens_first(*tensors: Tensor) -> list[Tensor]:
    return [x.transpose(1, 2) for x in tensors]


def by_heads(x: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """x (b, H, s, d) in float8, and its units (b, groups) fp32: one for each key head's group of heads."""
    rounded, unit = fp8.quantize(x.unflatten(1, (groups, -1)), (2, 3, 4))
    return rounded.flatten(1, 2), unit.flatten(1)


def fa3_of_rounded(qkv: Tensor, unit: Tensor) -> Tensor:
    """q, k, v (b, s, H, 3, d) in float8 already, heads in `unit` (b, H, 3) -> o (b, s, H, d)."""
    descales = {f"{name}_descale": u.contiguous() for name, u in zip("qkv", unit.unbind(-1), strict=True)}
    return installed("fa3").flash_attn_func(*qkv.unbind(-2), return_attn_probs=True, **descales)[0]


class Float8(NamedTuple):
    """The steps of a float8 kernel, for a scheme that rounds before it sends (fused Ulysses)."""

    largest: Callable[[Tensor, tuple[int, ...]], Tensor]
    rounded: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
    attend: Callable[[Tensor, Tensor], Tensor] = fa3_of_rounded


def find_kernel(name: str, compiled: bool = False) -> Kernel:
    """A kernel by its name; `compiled`: with what it does in torch compiled."""
    return _fa3_fp8_compiled if (name, compiled) == ("fa3-fp8", True) else KERNELS[name]


def find_merge(compiled: bool = False) -> Merge:
    """`compiled`: in one pass over the partials, where eager torch writes and reads each of its steps in fp32."""
    return _compiled(merge) if compiled else merge


KERNELS: dict[str, Kernel] = {"cpu": _cpu, "flash": _flash, "cudnn": _cudnn, "efficient": _efficient, "fa2": _fa2, "fa3": _fa3,
                              "fa4": _fa4, "fa3-fp8": _fa3_fp8, "reversed": _reversed}  # fmt: skip
FLOAT8 = {_fa3_fp8: Float8(fp8.largest, fp8.rounded),
          _fa3_fp8_compiled: Float8(_compiled(fp8.largest), _compiled(fp8.rounded))}  # fmt: skip
# These take fewer key heads than query heads; for the others they are repeated.
GROUPED = {_cpu, _fa2, _fa3, _fa3_fp8, _fa3_fp8_compiled, _fa4}
# Kernels that are installed apart from torch: their modules, the first that is there; the cards' capabilities.
MODULES = {"fa2": ("flash_attn",), "fa3": ("fa3_fwd_interface", "flash_attn_interface"), "fa4": ("flash_attn.cute",)}
CARDS = {"fa2": range(8, 13), "fa3": (9,), "fa4": (9, 10)}
BEST = {9: "fa3", 10: "fa4"}  # by capability, where it is installed


@cache
def installed(name: str) -> ModuleType | None:
    """The module with that kernel's flash_attn_func; None where there is none, or it does not fit this torch."""
    for module in MODULES[name]:
        try:
            found = importlib.import_module(module)
        except ImportError:
            continue
        if hasattr(found, "flash_attn_func"):
            return found
    return None


def refusal(name: str, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why a kernel cannot run there, as what follows its name; None: it can."""
    if name == "reversed":  # it is whichever runs
        return None
    base = name.removesuffix("-fp8")
    if base in MODULES and installed(base) is None:
        return "is not installed here"
    if (name == "cpu") != (device.type == "cpu"):
        return f"does not run on {device.type}"
    if base in MODULES and torch.cuda.get_device_capability(device)[0] not in CARDS[base]:
        major, minor = torch.cuda.get_device_capability(device)
        return f"is for cards of capability {', '.join(f'{n}.x' for n in CARDS[base])}, and this one's is {major}.{minor}"
    if name not in ("cpu", "efficient") and dtype == torch.float32:
        return "takes bfloat16, not float32"
    return None


def default_kernel(device: torch.device, dtype: torch.dtype, grad: bool = False) -> str:
    """CPU has one; on a GPU the best that is there for half precision, and the one that takes fp32 for the rest.

    With `grad` one of torch's own: of those installed apart some have no backward pass.
    """
    if device.type == "cpu":
        return "cpu"
    if dtype not in (torch.bfloat16, torch.float16):
        return "efficient"
    best = BEST.get(torch.cuda.get_device_capability(device)[0])
    return best if best and dtype == torch.bfloat16 and not grad and refusal(best, device, dtype) is None else "cudnn"


def prove(kernel: Kernel, device: torch.device, dtype: torch.dtype, head_dim: int) -> None:
    """Compare a kernel with a plain softmax: 7 queries, 5 keys, two query heads to a key head.

    Raises RuntimeError where o or LSE is off.
    """
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, n, h, head_dim, generator=generator).to(device, dtype) for n, h in ((7, 4), (5, 2), (5, 2)))
    whole_k, whole_v = (x.double().repeat_interleave(2, dim=2) for x in (k, v))
    scores = torch.einsum("bshd,bthd->bsht", q.double(), whole_k) / math.sqrt(head_dim)
    truth = torch.einsum("bsht,bthd->bshd", scores.softmax(-1), whole_v), scores.logsumexp(-1)
    found = attention(q, k, v, kernel)
    limit = 1e-4 if dtype == torch.float32 else 1e-1 if kernel is _fa3_fp8 else 2e-2
    for what, a, b in zip(("output", "LSE"), found, truth, strict=True):
        error = (a.double() - b).norm() / b.norm()
        if not error < limit:
            raise RuntimeError(f"attention kernel {kernel.__name__}: {what} is off by {error:.1e} of a plain softmax's")
