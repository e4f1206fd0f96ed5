"""Attention2D: ranks form a grid; rows share queries, columns share keys; one pass; a merge along the row.

    grid of kv_axis x q_axis (rows x columns), here 2 x 2, chunk i on rank i:

      rank 0: q0 k0 | rank 1: q1 k1      gather q along    rank 0: q01, k02 | rank 1: q01, k13
      --------------+--------------      the row, k, v     -----------------+-----------------
      rank 2: q2 k2 | rank 3: q3 k3      down the column   rank 2: q23, k02 | rank 3: q23, k13

    then each row exchanges (out, LSE): rank 0 gets q0's part from rank 1, rank 1 gets q1's from rank 0, and they merge.

The columns of a row together hold all keys, so the merge is complete. A prefix (keys and values of a text, whole on every
rank) is shared out over the columns too: each attends to its own slice of it, so that the row counts it once.
m = q_axis (columns), n = kv_axis (rows), p = m n.

Sends    [2 (m-1) + 2 (n-1)] * b*S*C/p elements a rank and layer (q out, o back; k, v out), and (m-1) * b*S*H/p of LSE:
         about 4/sqrt(p) of b*S*C on a square, against a ring's 2. Extra memory: q, o m-fold, k, v n-fold.
         GQA shrinks the k, v term by g = Hkv/H, so then tall grids (m = 1) win, and m = 1 needs no merge at all.
Source   Attention2D, arXiv:2503.15758.
Refuses  nothing: any head count, any length. Full (not causal) attention only.

Three ways, all exact. `attn2d`: as drawn. `attn2d_overlapped`: attends to the rank's own keys while the others' travel, and
merges the two passes; sends the same. `attn2d_reduce_scatter`: instead of exchanging parts, agree on the largest LSE, scale
by it, and reduce-scatter the sums in fp32: [(m-1) * (C + H) + 2 (m-1) * H] * b*S/p in place of the parts.
"""

import torch
from einops import rearrange
from torch import Tensor

from nanovgen.attention import KV, Kernel, Merge, after, attention, merge
from nanovgen.mesh import Axis, Cut, Pending, all_reduce, all_to_all, pad, reduce_scatter, regroup, shard, start_all_gather

Axes = tuple[Axis, Axis]  # (q_axis, kv_axis)


def attn2d(q: Tensor, k: Tensor, v: Tensor, prefix: KV | None, axes: Axes, cut: Cut, kernel: Kernel,
           merge: Merge = merge) -> Tensor:  # fmt: skip
    """q, k, v (b, n, H, d) of this rank's block -> o (b, n, H, d). `axes` are (q_axis, kv_axis)."""
    q_sent, kv_sent = start_gathers(q, k, v, axes, cut)
    q_row = whole(q_sent, axes, cut, of_row=True)
    k_col, v_col = whole(kv_sent, axes, cut, of_row=False).chunk(2, dim=0)
    part = attention(q_row, *after(own_slice(prefix, axes[0]), k_col, v_col), kernel)
    return exchange(*part, axes[0], block_size(axes, cut), merge)[:, : q.shape[1]].to(q.dtype)


def attn2d_overlapped(q: Tensor, k: Tensor, v: Tensor, prefix: KV | None, axes: Axes, cut: Cut, kernel: Kernel,
                      merge: Merge = merge) -> Tensor:  # fmt: skip
    """The rank's own keys need no waiting: a first pass over them hides the travel of the rest."""
    q_sent, kv_sent = start_gathers(q, k, v, axes, cut)
    q_row = whole(q_sent, axes, cut, of_row=True)
    first = attention(q_row, *after(own_slice(prefix, axes[0]), k, v), kernel)
    k_col, v_col = whole(kv_sent, axes, cut, of_row=False).chunk(2, dim=0)
    start, block = axes[1].rank * block_size(axes, cut), k.shape[1]
    others = [torch.cat([x[:, :start], x[:, start + block :]], dim=1) for x in (k_col, v_col)]
    part = merge([first, attention(q_row, *others, kernel)], torch.float32)
    return exchange(part[0].to(q.dtype), part[1], axes[0], block_size(axes, cut), merge)[:, : q.shape[1]].to(q.dtype)


def attn2d_reduce_scatter(q: Tensor, k: Tensor, v: Tensor, prefix: KV | None, axes: Axes, cut: Cut, kernel: Kernel) -> Tensor:
    """With M the row's largest LSE: o = sum_i e^(lse_i - M) o_i / sum_i e^(lse_i - M), both sums by one reduce-scatter."""
    q_sent, kv_sent = start_gathers(q, k, v, axes, cut)
    q_row = whole(q_sent, axes, cut, of_row=True)
    k_col, v_col = whole(kv_sent, axes, cut, of_row=False).chunk(2, dim=0)
    o, lse = attention(q_row, *after(own_slice(prefix, axes[0]), k_col, v_col), kernel)
    row, block = axes[0], block_size(axes, cut)
    lse = pad_lse(lse, row.size * block)
    weight = torch.exp(lse - all_reduce(lse, row, largest=True).nan_to_num(neginf=0.0))[..., None]
    sums = torch.cat([pad(o, 1, row.size * block).float() * weight, weight], dim=-1)  # b (m n) H d+1
    total = reduce_scatter(rearrange(sums, "b (m n) h d -> m b n h d", m=row.size), row)[:, : q.shape[1]]
    return (total[..., :-1] / total[..., -1:]).to(q.dtype)


def block_size(axes: Axes, cut: Cut) -> int:
    """Tokens in a rank's full block: several chunks where ulysses runs outside."""
    return cut.ranks // (axes[0].size * axes[1].size) * cut.chunk


def start_gathers(q: Tensor, k: Tensor, v: Tensor, axes: Axes, cut: Cut) -> tuple[Pending, Pending]:
    """Queries first: no pass can start without them. Keys and values travel as one."""
    size = block_size(axes, cut)
    return (start_all_gather(pad(q, 1, size), axes[0]),
            start_all_gather(pad(torch.cat([k, v], dim=0), 1, size), axes[1]))  # fmt: skip


def whole(sent: Pending, axes: Axes, cut: Cut, of_row: bool) -> Tensor:
    """The gathered blocks of my row (consecutive) or my column (every m-th), cut to their real tokens."""
    (q_axis, kv_axis), width = axes, cut.ranks // (axes[0].size * axes[1].size)
    if of_row:
        owners = [kv_axis.rank * q_axis.size + i for i in range(q_axis.size)]
    else:
        owners = [i * q_axis.size + q_axis.rank for i in range(kv_axis.size)]
    real = sum(cut.real(owner * width, width) for owner in owners)  # short blocks come last in any ascending set
    return regroup(sent.wait(), "p b n h d -> b (p n) h d")[:, :real]


def own_slice(prefix: KV | None, row: Axis) -> KV | None:
    """The prefix (b, L, G, d) cut in as many parts as the row has columns; a part may be empty."""
    return prefix and tuple(shard(x, row, dim=1) for x in prefix)


def pad_lse(lse: Tensor, size: int) -> Tensor:
    return torch.cat([lse, lse.new_full((lse.shape[0], size - lse.shape[1], lse.shape[2]), -torch.inf)], dim=1)


def exchange(o: Tensor, lse: Tensor, row: Axis, size: int, merge: Merge) -> Tensor:
    """(b, m n, H, d) and its LSE -> (b, n, H, d): each rank of the row gets all parts of its own block, and merges them."""
    if row.size == 1:
        return o
    o = all_to_all(rearrange(pad(o, 1, row.size * size), "b (m n) h d -> m b n h d", m=row.size), row)
    lse = all_to_all(rearrange(pad_lse(lse, row.size * size), "b (m n) h -> m b n h", m=row.size), row)
    return merge(list(zip(o, lse, strict=True)), torch.float32)[0]


if __name__ == "__main__":
    from nanovgen.lesson import show

    raise SystemExit(show("attn2d"))
