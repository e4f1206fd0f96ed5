"""From a recipe to who computes what: the refusals, the attention scheme, and what each axis will send.

    attend = ulysses( ring | attn2d ( kernel ) )          Ulysses outside, ring or Attention2D inside, kernel innermost

`check` refuses degrees before anything is opened; `bind` composes the scheme; `bytes_sent` adds up the formulas in the
schemes' headers, and a run's counters are held against it. Which degrees are best is choose.py's to say (by cost.py's
formulas and machines.py's constants), and this is its command line:

    python -m nanovgen.plan --model wan2.2-t2v-a14b --gpus 72 --machine gb200-nvl72 --picture plan.png
    python -m nanovgen.plan --article                                # the model against what was published, and its fit
    python -m nanovgen.plan --report plan.html --measured one.json   # a page; JSON files are bench's
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from nanovgen import attn2d, cfg, tp, ulysses, vae_parallel
from nanovgen.attention import FLOAT8, KV, Kernel, Merge, after, attention, merge
from nanovgen.cosmos import CosmosConfig
from nanovgen.mesh import Cut, Mesh
from nanovgen.recipe import ParallelConfig
from nanovgen.ring import ring
from nanovgen.wan import WanConfig

Attend = Callable[..., Tensor]  # (q, k, v) as projections and, where the model has one, a prefix's keys and values
ATTN2D = {"exchange": attn2d.attn2d, "overlapped": attn2d.attn2d_overlapped, "reduce_scatter": attn2d.attn2d_reduce_scatter}


@dataclass(frozen=True)
class Work:
    """What one forward computes, as far as communication cares. Widths and heads are the whole model's."""

    tokens: int
    heads: int
    kv_heads: int
    head_dim: int
    layers: int
    itemsize: int
    width: int = 0
    ffn: int = 0
    latent: tuple[int, int, int] = (1, 1, 1)  # f, y, x
    channels: int = 0  # of the latents
    sums: tuple[int, int] = (0, 0)  # a layer's all-reduces under tensor parallelism: of the width, of one fp32 number
    float8: bool = False  # a float8 kernel, and no prefix, which would not be rounded with the rest


def work(config: WanConfig | CosmosConfig, latent: tuple[int, int, int], itemsize: int, kernel: Kernel | None = None) -> Work:
    """Of a model at a size, with an attention kernel where it matters which."""
    f, y, x = latent
    if isinstance(config, WanConfig):
        heads = (config.num_attention_heads, config.num_attention_heads, config.attention_head_dim)
        return Work(f * (y // 2) * (x // 2), *heads, config.num_layers, itemsize, config.width, config.ffn_dim, latent,
                    config.out_channels, (3, 3), kernel in FLOAT8)  # fmt: skip
    heads = (config.num_attention_heads, config.num_key_value_heads, config.head_dim)
    return Work(f * -(-y // 2) * -(-x // 2), *heads, config.num_hidden_layers, itemsize, config.hidden_size,
                config.intermediate_size, latent, config.latent_channel, (2, 0))  # fmt: skip


def degrees(parallel: ParallelConfig) -> dict[str, int]:
    rows, columns = parallel.attn2d_size
    return {"cfg": parallel.cfg_size, "tp": parallel.tp_size, "ring": parallel.ring_size, "kv_axis": rows, "q_axis": columns,
            "ulysses": parallel.ulysses_size}  # fmt: skip


def name_of(parallel: ParallelConfig) -> str:
    """In a few letters, as the article writes them: cfg2.ul4.3x3, with the ways that are not the plain ones."""
    p, (rows, columns) = parallel, parallel.attn2d_size
    letters = {"cfg": p.cfg_size, "tp": p.tp_size, "ul": p.ulysses_size, "ring": p.ring_size}
    found = [f"{letter}{size}" for letter, size in letters.items() if size > 1]
    found += [f"{rows}x{columns}"] if rows * columns > 1 else []
    found += [way for way, on in (("async", p.async_ulysses), ("fused", p.fused_ulysses)) if on]
    found += [p.attn2d_merge] if p.attn2d_merge != "exchange" else []
    return ".".join(found) or "1 rank"


def check_world(parallel: ParallelConfig, world: int) -> None:
    """Raises ValueError where the degrees do not multiply to the ranks there are."""
    if parallel.world != world:
        product = " x ".join(f"{name} {size}" for name, size in degrees(parallel).items() if size > 1) or "every degree 1"
        way_out = (
            f"use --ranks {parallel.world}, or another recipe" if parallel.world > 1 else "give --recipe one of so many ranks"
        )
        raise ValueError(f"the recipe is for {parallel.world} ranks ({product}), not {world}; {way_out}")


def check(parallel: ParallelConfig, world: int, work: Work) -> None:
    """Raises ValueError, in one line, for degrees that cannot work on this many ranks or this model."""
    check_world(parallel, world)
    cfg.check(parallel.cfg_size)
    if parallel.ring_size > 1 and parallel.attn2d_size != (1, 1):
        raise ValueError("ring_size and attn2d_size are two ways to cut the same axis; set one of them to 1")
    tp.check(work.heads, work.kv_heads, work.ffn, parallel.tp_size)
    check_heads(work.heads, work.kv_heads, parallel)
    if parallel.fused_ulysses:
        ulysses.check(work.heads, work.kv_heads, 1, fused=True)
    if parallel.async_ulysses and parallel.fused_ulysses:
        raise ValueError("async_ulysses sends q, k and v one by one and fused_ulysses all at once; set one of them to false")
    if (parallel.async_ulysses or parallel.fused_ulysses) and parallel.ulysses_size == 1:
        raise ValueError("async_ulysses and fused_ulysses are ways of ulysses, and ulysses_size is 1")
    if parallel.attn2d_merge not in ATTN2D:
        raise ValueError(f"attn2d_merge {parallel.attn2d_merge!r} is not one of {', '.join(ATTN2D)}")
    if parallel.attn2d_merge != "exchange" and parallel.attn2d_size == (1, 1):
        raise ValueError(f"attn2d_merge {parallel.attn2d_merge} is a way of attn2d, and attn2d_size is [1, 1]")
    check_vae(parallel, world, work.latent)


def check_heads(heads: int, kv_heads: int, parallel: ParallelConfig) -> None:
    """Refuse with the nearest recipe that works: the rest of the ulysses degree goes to the ring, or to attn2d's rows."""
    local, degree = (heads // parallel.tp_size, kv_heads // parallel.tp_size), parallel.ulysses_size
    if ulysses.fits(*local, degree):
        return
    most = max(d for d in range(1, degree) if degree % d == 0 and ulysses.fits(*local, d))
    short, count, whole = ("heads", local[0], heads) if local[0] % degree else ("key heads", local[1], kv_heads)
    with_tp = f" of {whole} over tp {parallel.tp_size}" if parallel.tp_size > 1 else ""
    (rows, columns), rest = parallel.attn2d_size, degree // most
    way = f"ring {rest * parallel.ring_size}" if rows * columns == 1 else f"attn2d [{rest * rows}, {columns}]"
    raise ValueError(f"{count} {short}{with_tp} do not split over ulysses {degree}; use ulysses {most} and {way}")


def check_vae(parallel: ParallelConfig, world: int, latent: tuple[int, int, int]) -> None:
    degree, half = parallel.parallel_vae_size, world // parallel.cfg_size
    if degree > world:
        raise ValueError(f"parallel_vae_size {degree} needs as many ranks; this run has {world}: use {world} or less")
    if degree > half and degree != world:
        raise ValueError(
            f"parallel_vae_size {degree} would straddle the CFG halves of {half} ranks; use up to {half}, or {world}"
        )
    if parallel.parallel_vae_split_dim not in vae_parallel.DIMS:
        raise ValueError(
            f"parallel_vae_split_dim {parallel.parallel_vae_split_dim!r} is not one of {', '.join(vae_parallel.DIMS)}"
        )
    rows = parallel.parallel_vae_split_dim == "height"
    vae_parallel.check(latent[1 if rows else 2], degree, "rows" if rows else "columns")


def bind(parallel: ParallelConfig, mesh: Mesh, tokens: int, kernel: Kernel, merge: Merge = merge) -> Attend:
    """The scheme that a model's self-attention is handed."""
    cut = Cut(tokens, mesh.seq.size, mesh.seq.rank)
    if mesh.ring.size > 1:
        inner = partial(ring, axis=mesh.ring, cut=cut, kernel=kernel, merge=merge)
    elif mesh.q_axis.size * mesh.kv_axis.size > 1:
        inner = partial(ATTN2D[parallel.attn2d_merge], axes=(mesh.q_axis, mesh.kv_axis), cut=cut, kernel=kernel)
        inner = inner if parallel.attn2d_merge == "reduce_scatter" else partial(inner, merge=merge)  # that one sums instead
    else:
        inner = partial(local, kernel=kernel)
    if mesh.ulysses.size == 1:
        return lambda q, k, v, prefix=None: inner(q(), k(), v(), prefix)
    way = ulysses.ulysses_async if parallel.async_ulysses else ulysses.ulysses
    if parallel.fused_ulysses:
        rounds = kernel in FLOAT8 and rounds_first(parallel)
        way = partial(ulysses.ulysses_rounded, kernel=FLOAT8[kernel]) if rounds else ulysses.ulysses_fused
    return lambda q, k, v, prefix=None: way(q, k, v, prefix, mesh.ulysses, cut, inner)


def rounds_first(parallel: ParallelConfig) -> bool:
    """Whether fused Ulysses rounds for a float8 kernel before the exchange: where the kernel is all there is inside."""
    return parallel.fused_ulysses and parallel.ring_size == 1 and parallel.attn2d_size == (1, 1)


def local(q: Tensor, k: Tensor, v: Tensor, prefix: KV | None, kernel: Kernel) -> Tensor:
    return attention(q, *after(prefix, k, v), kernel)[0]


def attention_pass(parallel: ParallelConfig, work: Work, prefix: int = 0) -> tuple[int, int, int, int, int]:
    """Queries, keys, heads and key heads of a full rank's self-attention pass, and how many passes a layer takes.

    Of a prefix of so many keys that every query sees, each column, or each step of a ring, has a share.
    """
    p, (rows, columns) = parallel, parallel.attn2d_size
    block, spread = -(-work.tokens // (p.ring_size * rows * columns)), p.tp_size * p.ulysses_size
    keys = block * rows + prefix // (columns * p.ring_size)
    return block * columns, keys, work.heads // spread, max(1, work.kv_heads // spread), p.ring_size


def reduced(elements: int, ranks: int) -> int:
    """What an all-reduce sends: as a reduce-scatter and an all-gather."""
    return 2 * elements * (ranks - 1) // ranks


def bytes_sent(parallel: ParallelConfig, work: Work, streams: int) -> dict[str, int]:
    """What a rank sends in one denoising step with `streams` guidance streams, by axis."""
    p, d = parallel, degrees(parallel)
    ranks = p.world // (p.cfg_size * p.tp_size)
    s, size = -(-work.tokens // ranks), work.itemsize
    heads, kv_heads = s * work.heads // p.tp_size, s * max(work.kv_heads // p.tp_size, p.ulysses_size)  # each rank has one
    q, kv = heads * work.head_dim, kv_heads * work.head_dim
    n, m = p.attn2d_size
    wide, single = work.sums
    layer = {
        "ulysses": 2 * (q + kv) * (d["ulysses"] - 1) // d["ulysses"] * size,
        "ring": 2 * (p.ring_size - 1) * kv * size,
        "kv_axis": 2 * (n - 1) * kv * size,
        "q_axis": (m - 1) * (2 * q * size + 4 * heads),
        "tp": wide * reduced(s * work.width, p.tp_size) * size + single * reduced(s, p.tp_size) * 4,
    }
    if work.float8 and rounds_first(p):  # q, k, v by the byte, o as it is; and the agreement on a unit a head of each
        units = 4 * reduced(3 * work.heads // p.tp_size, d["ulysses"])
        layer["ulysses"] = q * (3 + size) * (d["ulysses"] - 1) // d["ulysses"] + units
    if p.attn2d_merge == "reduce_scatter":
        layer["q_axis"] = (m - 1) * (q * size + 4 * (q + heads) + 4 * 2 * heads)
    forwards = 1 if streams == 1 else -(-streams // p.cfg_size)
    total = {axis: forwards * work.layers * amount for axis, amount in layer.items()}
    total["seq"] = forwards * (ranks - 1) * s * 4 * work.channels * size
    f, y, x = work.latent
    total["cfg"] = 0 if streams == 1 else forwards * (p.cfg_size - 1) * work.channels * f * y * x * size
    return {axis: amount for axis, amount in total.items() if amount}


if __name__ == "__main__":
    from nanovgen.choose import main

    raise SystemExit(main())
