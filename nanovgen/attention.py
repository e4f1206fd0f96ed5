"""One attention over many kernels: attention(q, k, v) -> (o, lse).

    q (b, s, H, d), k and v (b, t, Hkv, d)  ->  o (b, s, H, d), lse (b, s, H)

o = softmax(q k^T / sqrt(d)) v, full (no mask), and lse = ln sum exp(q k^T / sqrt(d)), fp32. With the LSE, partial
results over disjoint keys can be merged exactly (FlashAttention, arXiv:2205.14135), which ring and Attention2D live on.
GQA: query head j reads key head j // (H / Hkv). Only this file transposes q, k, v: kernels disagree about the layout of
their tensors and of their LSE, so each is wrapped once here, and `prove` checks a kernel's LSE against a plain softmax
before it is used.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

aten = torch.ops.aten
Kernel = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def attention(q: Tensor, k: Tensor, v: Tensor, kernel: Kernel | None = None) -> tuple[Tensor, Tensor]:
    """Attend locally. Shapes as in the file's header; without a kernel, the default of q's device and dtype."""
    if not q.shape[1] or not k.shape[1]:  # nothing to see: weight 0 in any merge
        return torch.zeros_like(q), q.new_full(q.shape[:3], -math.inf, dtype=torch.float32)
    kernel = kernel or KERNELS[default_kernel(q.device, q.dtype)]
    if k.shape[2] != q.shape[2]:
        k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], dim=2) for x in (k, v))
    o, lse = kernel(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
    return o.transpose(1, 2), lse.transpose(1, 2)


def after(prefix: tuple[Tensor, Tensor] | None, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values (b, n, Hkv, d) behind those of a prefix that every query sees too; None: there is no prefix."""
    return (k, v) if prefix is None else (torch.cat([prefix[0], k], dim=1), torch.cat([prefix[1], v], dim=1))


def merge(partials: list[tuple[Tensor, Tensor]], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
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


KERNELS: dict[str, Kernel] = {"cpu": _cpu, "flash": _flash, "cudnn": _cudnn, "efficient": _efficient}


def default_kernel(device: torch.device, dtype: torch.dtype) -> str:
    """CPU has one; on a GPU, cuDNN for half precision, and the one that takes fp32 for the rest."""
    if device.type == "cpu":
        return "cpu"
    return "cudnn" if dtype in (torch.bfloat16, torch.float16) else "efficient"


def prove(kernel: Kernel, device: torch.device, dtype: torch.dtype, head_dim: int) -> None:
    """Compare a kernel with a plain softmax on 7 queries and 5 keys; raises RuntimeError where o or LSE is off."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, n, 2, head_dim, generator=generator).to(device, dtype) for n in (7, 5, 5))
    scores = torch.einsum("bshd,bthd->bsht", q.double(), k.double()) / math.sqrt(head_dim)
    truth = torch.einsum("bsht,bthd->bshd", scores.softmax(-1), v.double()), scores.logsumexp(-1)
    found = attention(q, k, v, kernel)
    for what, a, b in zip(("output", "LSE"), found, truth, strict=True):
        error = (a.double() - b).norm() / b.norm()
        if not error < (1e-4 if dtype == torch.float32 else 2e-2):
            raise RuntimeError(f"attention kernel {kernel.__name__}: {what} is off by {error:.1e} of a plain softmax's")
