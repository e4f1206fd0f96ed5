"""Ring attention: queries stay, keys and values travel once around, partial results merge as they come.

    step 0   rank 0: q0 with k0 v0     rank 1: q1 with k1 v1     rank 2: q2 with k2 v2      while k, v move on:
    step 1   rank 0: q0 with k2 v2     rank 1: q1 with k0 v0     rank 2: q2 with k1 v1      0 -> 1 -> 2 -> 0
    step 2   rank 0: q0 with k1 v1     rank 1: q1 with k2 v2     rank 2: q2 with k0 v0

A prefix (keys and values of a text, whole on every rank) stands before the rank's own block and never travels.

The next keys and values are posted before the kernel of the present ones starts, so they travel under it.

Sends    2 (p-1) * b*S*C/p elements a rank and layer (GQA: times Hkv/H); flat in p. Hidden while one step computes longer
         than it sends. Extra memory: one k, v in flight and one fp32 output.
         Wins over slow links and any head count, while chunks are long.
Source   Ring Attention, arXiv:2310.01889; merge of (out, LSE) as in FlashAttention, arXiv:2205.14135.
Refuses  nothing: any p, odd or even, and any length; a short block travels in a full-size buffer and is cut on arrival.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from nanovgen.attention import KV, Kernel, Merge, after, attention, merge
from nanovgen.mesh import Axis, Cut, pad, start_shift


def ring(q: Tensor, k: Tensor, v: Tensor, prefix: KV | None, axis: Axis, cut: Cut, kernel: Kernel,
         merge: Merge = merge) -> Tensor:  # fmt: skip
    """q, k, v (b, n, H, d) of this rank's block of tokens -> o (b, n, H, d)."""
    found = None
    for k_block, v_block in blocks(k, v, axis, cut):
        partial = attention(q, *after(prefix if found is None else None, k_block, v_block), kernel)  # once: beside its own block
        found = partial if found is None else merge([found, partial], torch.float32)
    return found[0].to(q.dtype)


def blocks(k: Tensor, v: Tensor, axis: Axis, cut: Cut) -> Iterator[tuple[Tensor, Tensor]]:
    """This rank's k, v, then those of the rank before, and so on around; the next ones are always under way."""
    width = cut.ranks // axis.size  # chunks in a block: ulysses inside the ring's ranks makes it more than one
    kv = pad(torch.stack([k, v]), 2, width * cut.chunk)  # 2 b n H d
    for step in range(axis.size):
        owner = (axis.rank - step) % axis.size
        arriving = start_shift(kv, axis) if step < axis.size - 1 else None
        yield tuple(kv[:, :, : cut.real(owner * width, width)])
        if arriving is not None:
            kv = arriving.wait()


if __name__ == "__main__":
    from nanovgen.lesson import show

    raise SystemExit(show("ring"))
