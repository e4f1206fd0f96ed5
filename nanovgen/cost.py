"""How long a recipe takes on a machine: each term a formula of a few lines, all in seconds on the slowest rank.

    step    = streams / cfg x layers x (linears + attention + cross-attention + rest + merges + copies + exchanges) + replicated
    request = steps x step + decode + tail

    linears      2 x rows x in x out / rate, in whole waves of tiles: rows are this rank's tokens
    attention    4 x queries x keys x heads x d / rate, likewise, once, or as often as a ring has steps
    rest         norms, rotation, gating: REST reads and writes of tokens x width; compiled, but with tensor parallelism
    merges       of partial results, in fp32; copies: the rearranging around Ulysses' all-to-alls
    exchanges    by axis: plan.bytes_sent, the schemes' own formulas, over the slowest link in the axis, and a latency a call;
                 less what async Ulysses, a ring or overlapped Attention2D hide behind the kernels beside them
    replicated   what every rank does whole: the embedding of time, noise to tokens and back, guidance, the solver
    decode       the VAE's strips, their halos, and the waiting for neighbours that grows with the ranks

A machine's constants are in machines.py. In no term is what ranks lose to each other's jitter, to the host where a step is
short, to clocks that fall with the power drawn, and to the SMs that NCCL takes from a kernel it hides behind: it is in the
constants, as far as they were fitted.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from math import ceil

import torch
from torch import nn

from nanovgen import plan, vae_parallel
from nanovgen.checkpoint import build
from nanovgen.floor import Config, matrices
from nanovgen.machines import Machine
from nanovgen.mesh import Axis
from nanovgen.plan import Work
from nanovgen.recipe import ParallelConfig, Preset
from nanovgen.vae import VAE, VAEConfig
from nanovgen.wan import WanConfig

GEMM_ROWS, GEMM_COLUMNS = 128, (256, 192, 128)  # tiles of a matrix product; a library takes the best of them
REST = 31  # measured on H200s, compiled: a block's 228.4 ms (the mean of two cards) less 157.4, 63.9 and 1.1 are 6.0 ms
EAGER_REST = 222  # with tp, which compiled.py refuses: 293.9 ms a block, eager, less 184.9 (cuDNN's), 63.9, 1.4; and a GELU's 1.0
KERNEL = 3e-6  # seconds: the shortest kernel
COPY = 8  # bytes an element of bf16: read and written before an all-to-all, and after it
TEXT_ROWS = {"wan": 512, "cosmos": 1554}  # padded; a usual chat with our default negative prompt
DECODE_FLOP = {"wan": 8.56e6, "cosmos": 18.4e6}  # a pixel, by torch's counter over whole decodes (the test counts again)


@dataclass(frozen=True)
class Load:
    """One request, as far as its time is concerned."""

    family: str
    config: Config
    vae: VAEConfig
    work: Work
    text: int  # rows that every query sees besides
    streams: int  # of guidance
    steps: int
    chunk: int  # latent frames decoded at a time

    @property
    def pixels(self) -> int:
        """Of the whole clip."""
        f, y, x = self.work.latent
        return (4 * f - 3) * y * x * self.vae.scale**2


def load_of(preset: Preset, config: Config, latent: tuple[int, int, int], steps: int, streams: int = 2) -> Load:
    work = plan.work(config, latent, 2)
    return Load(preset.family, config, VAEConfig(**preset.vae), work, TEXT_ROWS[preset.family], streams, steps,
                preset.chunk or latent[0])  # fmt: skip


# Kernels


def linear_seconds(m: Machine, rows: int, i: int, o: int) -> float:
    """A (rows, i) x (i, o) product: waves of tiles, one an SM; or the reading of its matrix, where rows are few."""
    per_tile = 2 * GEMM_ROWS * i * m.sms / m.linear
    waves = (ceil(ceil(rows / GEMM_ROWS) * ceil(o / columns) / m.sms) * columns for columns in GEMM_COLUMNS)
    return max(min(waves) * per_tile, 2 * i * o / m.stream)


def attention_seconds(m: Machine, rate: float, queries: int, keys: int, heads: int, head_dim: int) -> float:
    """One pass: waves of tiles of queries, each against all keys."""
    waves = ceil(ceil(queries / m.tile) * heads / m.sms)
    return waves * m.sms * m.tile * 4 * keys * head_dim / rate


def merge_bytes(partials: int) -> int:
    """Read and written by attention.merge for one element of the result: each partial is made fp32 and stacked (14), weighted
    (8) and summed (4), the sum divided (8) and rounded (4)."""
    return 26 * partials + 12


# Exchanges


def span(parallel: ParallelConfig, axis: str) -> tuple[int, int]:
    """Ranks of an axis, and how far apart two neighbours of it are in the world."""
    sizes = plan.degrees(parallel)
    if axis == "seq":
        return parallel.world // (parallel.cfg_size * parallel.tp_size), 1
    stride, names = 1, list(sizes)
    for faster in names[names.index(axis) + 1 :]:
        stride *= sizes[faster]
    return sizes[axis], stride


@cache
def near(domain: int, world: int, size: int, stride: int) -> int:
    """How many of an axis' ranks share an NVLink domain with a rank that has the fewest such, itself counted."""
    if world <= domain:
        return size
    rows = [[r % stride + r // (stride * size) * stride * size + i * stride for i in range(size)] for r in range(world)]
    return min(sum(peer // domain == r // domain for peer in row) for r, row in enumerate(rows))


def exchange_seconds(
    m: Machine, parallel: ParallelConfig, axis: str, sent: float, calls: int, rate: float | None = None
) -> float:
    """Of `sent` bytes in `calls` exchanges; those for other domains take the network, beside the rest."""
    size, stride = span(parallel, axis)
    if size == 1:
        return 0.0
    far = (size - near(m.domain, parallel.world, size, stride)) / (size - 1)
    return calls * (m.latency_across if far else m.latency) + max(sent * (1 - far) / (rate or m.link), sent * far / m.across)


def ulysses_exposed(m: Machine, parallel: ParallelConfig, work: Work, sent: float, projections: float) -> float:
    """A layer's exchanges that the compute stream waits for. Async: v and q travel while q and k are computed."""
    q, kv = work.heads // parallel.tp_size, max(work.kv_heads // parallel.tp_size, parallel.ulysses_size)
    if not parallel.async_ulysses:
        return exchange_seconds(m, parallel, "ulysses", sent, 2 if parallel.fused_ulysses else 4)
    rate, share = m.push if parallel.ulysses_size <= m.host else m.link, sent / (2 * (q + kv))
    v, q, k, o = (exchange_seconds(m, parallel, "ulysses", share * n, 1, rate) for n in (kv, q, kv, q))
    return max(k, v + q + k - projections) + o


# A step


def step(m: Machine, kernel: str, parallel: ParallelConfig, load: Load) -> dict[str, float]:
    """Seconds of one denoising step by term; they add up to the step."""
    turns = 1 if load.streams == 1 else ceil(load.streams / parallel.cfg_size)
    times = {name: turns * load.work.layers * seconds for name, seconds in layer(m, kernel, parallel, load).items()}
    sent, ends = plan.bytes_sent(parallel, load.work, load.streams), {"seq": turns, "cfg": turns}
    times |= {axis: exchange_seconds(m, parallel, axis, sent.get(axis, 0), calls) for axis, calls in ends.items()}
    times["replicated"] = sum(replicated(m, load, turns).values())
    return times


def layer(m: Machine, kernel: str, parallel: ParallelConfig, load: Load) -> dict[str, float]:
    """Seconds of one layer of one forward by term, on a rank of full chunks."""
    p, work, wan, rate = parallel, load.work, isinstance(load.config, WanConfig), m.attention[kernel]
    s = ceil(work.tokens / (p.world // (p.cfg_size * p.tp_size)))
    queries, keys, heads, _, passes = plan.attention_pass(p, work, 0 if wan else load.text)
    *block, first, last = matrices(load.config, p.tp_size)
    products = [count / work.layers * linear_seconds(m, s, i, o) for i, o, count in [*block, first, last]]
    one_pass = attention_seconds(m, rate, queries, keys, heads, work.head_dim)
    times = {"linears": sum(products), "attention": passes * one_pass, "cross-attention": 0.0}
    if wan:
        times["cross-attention"] = attention_seconds(m, rate, s, load.text, work.heads // p.tp_size, work.head_dim)
    times["rest"] = (REST if p.tp_size == 1 else EAGER_REST) * s * work.width * work.itemsize / m.stream
    times["merges"] = sum(merges(m, p, queries * heads * work.head_dim))
    ulysses = s * 2 * (work.heads + max(work.kv_heads, p.ulysses_size)) // p.tp_size * work.head_dim
    times["copies"] = COPY * ulysses / m.stream if p.ulysses_size > 1 else 0.0
    q_and_k = 2 * linear_seconds(m, s, work.width, work.heads // p.tp_size * work.head_dim)
    return times | exchanges(m, p, work, one_pass, q_and_k)


def merges(m: Machine, parallel: ParallelConfig, elements: int) -> Iterator[float]:
    """Seconds of each merge of a layer, of partial results of so many elements."""
    rows, columns = parallel.attn2d_size
    if parallel.ring_size > 1:
        yield merge_bytes(1) * elements / m.stream
        yield from [merge_bytes(2) * elements / m.stream] * (parallel.ring_size - 1)
    if parallel.attn2d_merge == "overlapped" and rows > 1:
        yield merge_bytes(2) * elements / m.stream
    if columns > 1:  # a part of each column's, for this rank's own queries; or fp32 sums of them all, scaled and packed
        per_part = 30 if parallel.attn2d_merge == "reduce_scatter" else merge_bytes(columns) / columns + 4
        yield per_part * elements / m.stream


def exchanges(m: Machine, parallel: ParallelConfig, work: Work, one_pass: float, projections: float) -> dict[str, float]:
    """Seconds of one layer's exchanges that nothing hides, by axis."""
    p, (rows, _) = parallel, parallel.attn2d_size
    sent = {axis: total / work.layers for axis, total in plan.bytes_sent(p, work, 1).items()}
    found = {"ulysses": ulysses_exposed(m, p, work, sent.get("ulysses", 0), projections), "ring": 0.0}
    if p.ring_size > 1:
        hops = p.ring_size - 1
        travel = exchange_seconds(m, p, "ring", sent["ring"] / hops, 0, m.shift)
        *_, merge = merges(m, p, plan.attention_pass(p, work)[0] * work.heads // (p.tp_size * p.ulysses_size) * work.head_dim)
        start = exchange_seconds(m, p, "ring", 0, 1)
        found["ring"] = hops * (start + max(0.0, max(travel, m.ring_step) - one_pass - merge))
    keys = exchange_seconds(m, p, "kv_axis", sent.get("kv_axis", 0), 1)
    hidden = one_pass / rows if p.attn2d_merge == "overlapped" else 0.0  # the pass over the rank's own keys
    found["kv_axis"] = max(0.0, keys - hidden)
    found["q_axis"] = exchange_seconds(m, p, "q_axis", sent.get("q_axis", 0), 3)
    return found | {"tp": exchange_seconds(m, p, "tp", sent.get("tp", 0), sum(work.sums))}


def replicated(m: Machine, load: Load, turns: int) -> dict[str, float]:
    """Seconds a step of what every rank does whole and no degree shrinks, by part."""
    c, (f, y, x), wan = load.config, load.work.latent, isinstance(load.config, WanConfig)
    latent, width = load.work.channels * f * y * x, load.work.width
    time_bytes = 4 * (c.freq_dim * width + width**2) + 2 * 6 * width**2 if wan else 4 * (256 * width + width**2)
    ops = lambda kernels, moved: kernels * KERNEL + moved / m.stream  # noqa: E731
    return {
        "embedding of time": turns * ops(14, time_bytes),
        "each block's six vectors": turns * load.work.layers * ops(1, 3 * 4 * 6 * width) if wan else 0.0,
        "latents to tokens and back": turns * ops(6, 12 * latent),
        "guidance": ops(5, 22 * latent) if load.streams > 1 else 0.0,
        "solver": ops(25, 25 * 12 * latent),  # UniPC, order 2, all in fp32
    }


# The rest of a request


@cache
def decoder_halos(config: VAEConfig, rows: int) -> tuple[int, vae_parallel.Ledger]:
    """Exchanges a chunk takes, and what strips of columns send for one latent frame of so many rows."""
    vae, frame = build(VAE, config), torch.empty(1, config.z_dim, 1, rows, 1, device="meta")
    borders = sum(isinstance(k, nn.Conv2d | nn.Conv3d) and k.kernel_size[-1] == 3 for k in vae.decoder.modules())
    first, ledger = vae_parallel.Ledger(4), vae_parallel.Ledger(4)
    with torch.inference_mode():
        vae.decoder(frame, first)
        ledger.cache = first.cache
        vae.decoder(frame, ledger)  # from the second frame on, time doubles
    return borders + 2, ledger  # the middle attention's keys, and the joining


def decode_seconds(m: Machine, load: Load, ranks: int) -> float:
    """Of the whole clip on so many ranks."""
    f, y, x = load.work.latent
    work = DECODE_FLOP[load.family] * load.pixels / m.decode[load.family] * ceil(x / ranks) / x
    if ranks == 1:
        return work
    calls, ledger = decoder_halos(load.vae, y)
    middle = Axis("vae", ranks, min(1, ranks - 1))
    sent = 4 * vae_parallel.elements_sent(ledger, middle, x, 3 * 4 * y * load.vae.scale**2)  # fp32
    return work + ceil(f / load.chunk) * calls * (m.vae_exchange + (ranks - 1) * m.vae_hop) + f * sent / m.link


def request(m: Machine, load: Load, step_seconds: float, vae_ranks: int) -> dict[str, float]:
    """Seconds of a request's parts, weights loaded and code compiled before."""
    decode, tail = decode_seconds(m, load, vae_ranks), load.pixels / m.tail
    return {"denoise": load.steps * step_seconds, "decode": decode, "tail": tail}
