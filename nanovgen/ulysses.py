"""Ulysses: swap a token split for a head split, attend, swap back.

    rank 0 | tokens 0..s, all heads |  all-to-all   | all tokens, heads 0..h |  attend, and the same way back
    rank 1 | tokens s..S, all heads |  =========>   | all tokens, heads h..H |

In the middle every rank holds all tokens of the axis for H/p heads, so any attention runs there as on one device, a ring
or Attention2D over further ranks included (`inner`). A prefix (keys and values of a text, whole on every rank) is cut by
heads where it lies, and sends nothing.

Sends    4 (p-1)/p * b*S*C/p elements a rank and layer (q, k, v out, o back); shrinks as p grows. With fewer key heads
         (GQA, g = Hkv/H) 2 (1+g) in place of 4. Extra memory: one q, k, v, o of the same size.
         Wins inside one fast domain, up to the head count: each rank's bytes fall with p, a ring's do not.
         Beyond Hkv ranks a key head goes to p/Hkv of them: the formula then has Hkv = p.
Source   DeepSpeed-Ulysses, arXiv:2309.14509.
Refuses  H % p != 0 (a head is not split); Hkv and p of which neither divides the other; fused with GQA (q, k, v must stack).

Three ways, equal to the bit. `ulysses`: one exchange each for q, k, v. `ulysses_fused`: one exchange of the three stacked.
`ulysses_async`: v, then q, then k, each under way while the next one is computed: pushed into the peers' memory by the copy
engine where they reach it (push.py), as o is on its way back; by the backend's asynchronous all-to-all elsewhere.

A fourth, for float8 kernels with no further ranks inside, is what fused then means. `ulysses_rounded`: an all-reduce of each
head's largest q, k and v (3 H numbers), then one exchange of the three in float8, a byte an element; o comes back as it is.

A short chunk is padded to the common s for the exchange and cut after it: padding meets no softmax.
"""

from collections.abc import Callable

import torch
from einops import rearrange
from torch import Tensor

from nanovgen.attention import KV, Float8, Projection
from nanovgen.mesh import Axis, Cut, Pending, all_reduce, pad, regroup, shard, start_all_to_all, words
from nanovgen.push import Push

Inner = Callable[[Tensor, Tensor, Tensor, KV | None], Tensor]


def check(heads: int, kv_heads: int, degree: int, fused: bool = False) -> None:
    """Raises ValueError for heads that cannot be spread."""
    if not fits(heads, kv_heads, degree):
        short, count = ("heads", heads) if heads % degree else ("key heads", kv_heads)
        most = max(d for d in range(1, degree) if fits(heads, kv_heads, d))
        raise ValueError(f"{count} {short} do not split over ulysses {degree}; use {most} and ring or attn2d for the rest")
    if fused and heads != kv_heads:
        raise ValueError(f"fused ulysses stacks q, k, v, and {heads} heads are not {kv_heads}; use the unfused way")


def fits(heads: int, kv_heads: int, degree: int) -> bool:
    """Whether each rank gets whole heads: as many queries' as the next, and key heads of its own or one shared with others."""
    return heads % degree == 0 and (kv_heads % degree == 0 or degree % kv_heads == 0)


def ulysses(q: Projection, k: Projection, v: Projection, prefix: KV | None, axis: Axis, cut: Cut, inner: Inner) -> Tensor:
    """Projections of this rank's tokens, each (b, s, H, d) -> its attention output (b, s, H, d)."""
    q, k, v = (to_heads(start_to_heads(project(), axis, cut), axis, cut) for project in (q, k, v))
    return to_tokens(inner(q, k, v, own_heads(prefix, axis)), axis, cut)


def ulysses_fused(q: Projection, k: Projection, v: Projection, prefix: KV | None, axis: Axis, cut: Cut, inner: Inner) -> Tensor:
    """One exchange of the three, head by head: three times the bytes, a third of the calls."""
    parts = [by_rank(project(), axis, cut) for project in (q, k, v)]
    stacked = torch.stack([words(part) for part in parts], dim=-2).flatten(-2)  # p b s h (3 d): one copy of each
    qkv = to_heads(start_all_to_all(stacked.view(parts[0].dtype), axis), axis, cut)  # b S h (3 d)
    return to_tokens(inner(*qkv.chunk(3, dim=-1), own_heads(prefix, axis)), axis, cut)


def ulysses_rounded(q: Projection, k: Projection, v: Projection, prefix: KV | None, axis: Axis, cut: Cut, inner: Inner,
                    kernel: Float8) -> Tensor:  # fmt: skip
    """Fused, in float8 (b, s, H, 3 d): a head needs one unit on all ranks, so they first agree on its largest number."""
    if prefix is not None:  # it is not rounded with the rest
        return ulysses_fused(q, k, v, prefix, axis, cut, inner)
    qkv = pad(torch.stack([q(), k(), v()], dim=-2), 1, cut.chunk)  # b s H 3 d
    largest = all_reduce(kernel.largest(qkv, (1, 4)), axis, largest=True)  # b 1 H 3 1
    rounded, unit = kernel.rounded(qkv, largest)
    sent = start_to_heads(rounded.view(torch.uint8).flatten(-2), axis, cut)  # backends know bytes, not all know float8
    qkv = to_heads(sent, axis, cut).view(rounded.dtype).unflatten(-1, (3, -1))
    return to_tokens(kernel.attend(qkv, shard(unit[:, 0, :, :, 0], axis, dim=1)), axis, cut)


def ulysses_async(q: Projection, k: Projection, v: Projection, prefix: KV | None, axis: Axis, cut: Cut, inner: Inner) -> Tensor:
    """v first: it has neither norm nor rotation, so it is ready soonest, and q and k are computed while it travels."""
    v_sent, q_sent, k_sent = (start_to_heads(project(), axis, cut, pushed=True) for project in (v, q, k))
    v, q, k = (to_heads(sent, axis, cut) for sent in (v_sent, q_sent, k_sent))
    return to_tokens(inner(q, k, v, own_heads(prefix, axis)), axis, cut, pushed=True)


def own_heads(prefix: KV | None, axis: Axis) -> KV | None:
    return prefix and tuple(shard(spread(x, axis.size), axis, dim=2) for x in prefix)  # b L G d -> b L g d


def spread(x: Tensor, ranks: int) -> Tensor:
    """A head (dim 2) for each rank: fewer key heads are repeated, each for the consecutive ranks whose queries read it."""
    heads = x.shape[2]
    return x.repeat_interleave(ranks // heads, dim=2) if heads < ranks and ranks % heads == 0 else x


def start_to_heads(x: Tensor, axis: Axis, cut: Cut, pushed: bool = False) -> Pending | Push:
    return start_all_to_all(by_rank(x, axis, cut), axis, pushed)


def by_rank(x: Tensor, axis: Axis, cut: Cut) -> Tensor:
    """(b, s, H, d) -> (p, b, s, h, d): what goes to each rank; a view, but where chunks are padded or key heads repeated."""
    x = pad(spread(x, axis.size), 1, cut.chunk)
    check(x.shape[2], x.shape[2], axis.size)
    return rearrange(x, "b s (p h) d -> p b s h d", p=axis.size)  # H -> h


def to_heads(sent: Pending | Push, axis: Axis, cut: Cut) -> Tensor:
    x = regroup(sent.wait(), "p b s h d -> b (p s) h d")  # s -> S
    return x[:, : cut.real(cut.rank - axis.rank, axis.size)]


def to_tokens(o: Tensor, axis: Axis, cut: Cut, pushed: bool = False) -> Tensor:
    o = pad(o, 1, axis.size * cut.chunk)
    o = start_all_to_all(rearrange(o, "b (p s) h d -> p b s h d", p=axis.size), axis, pushed).wait()  # S -> s
    return regroup(o, "p b s h d -> b s (p h) d")[:, : cut.real(cut.rank)]  # h -> H


if __name__ == "__main__":
    from nanovgen.lesson import show

    raise SystemExit(show("ulysses"))
