"""What a forward must cost: its multiplications, counted, and its matrices and attention passes, each timed alone.

    linears     2 x in x out a token, over every matrix of a block and the two at the ends
    attention   4 x queries x keys x H d a layer, self and (Wan) cross; norms, rotation and softmax are not counted
    floor       this rank's matrices and attention passes, each timed alone on its own shape, and added up

Nothing that is made of these kernels can be faster; what a forward takes beyond its floor are norms, rotation, gating,
exchanges and the host. A GPU under load lowers its clocks to stay within its power limit (an H200's matrix product falls from
787 to 679 TFLOP/s within a second): so a kernel alone is timed only after it has run for HOT seconds, as warm as in a forward.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median
from time import perf_counter

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanovgen import attention, checkpoint, fp8, plan
from nanovgen.cosmos import CosmosConfig
from nanovgen.recipe import ParallelConfig, Preset
from nanovgen.vae import VAE, VAEConfig
from nanovgen.wan import WanConfig

Config = WanConfig | CosmosConfig
HOT = 0.4  # seconds


@dataclass(frozen=True)
class Bench:
    """What is timed, on what."""

    preset: Preset
    config: Config
    latent: tuple[int, int, int]  # f, y, x
    text: int  # rows
    device: torch.device
    dtype: torch.dtype
    kernel: str
    compile: bool
    steps: int
    warmup: int
    quant: str = "none"  # or FP8: of the blocks' matrices
    vae_dtype: torch.dtype = torch.float32

    @property
    def work(self) -> plan.Work:
        return plan.work(self.config, self.latent, self.dtype.itemsize, attention.KERNELS[self.kernel])

    @property
    def card(self) -> str:
        return torch.cuda.get_device_name() if self.device.type == "cuda" else "cpu"


def random_weights(model: nn.Module, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """Fill a model on meta where it will run: matrices of unit gain, norms of 1, biases of 0."""
    generator, state = torch.Generator(device).manual_seed(0), {}
    for name, p in model.state_dict().items():
        kind = dict(device=device, dtype=checkpoint.final_dtype(model, name, dtype))
        if p.ndim == 1 or name.endswith("gamma"):
            state[name] = torch.zeros(p.shape, **kind) if name.endswith("bias") else torch.ones(p.shape, **kind)
        else:
            state[name] = torch.randn(p.shape, generator=generator, **kind).div_(p[0].numel() ** 0.5)
    model.load_state_dict(state, assign=True)
    return model.eval()


def random_vae(bench: Bench) -> VAE:
    """The bench's VAE of random weights, as a run would hold it."""
    return random_weights(checkpoint.build(VAE, VAEConfig(**bench.preset.vae)), bench.device, bench.vae_dtype).laid_out()


class Clock:
    """Marks in a device's own time."""

    def __init__(self, device: torch.device):
        self.gpu = device.type == "cuda"

    def mark(self) -> "torch.cuda.Event | float":
        if not self.gpu:
            return perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def sync(self) -> None:
        if self.gpu:
            torch.cuda.synchronize()

    def seconds(self, start: object, end: object) -> float:
        """Between two marks, after a sync."""
        return start.elapsed_time(end) / 1e3 if self.gpu else end - start


def alone(f: Callable[[], object], device: torch.device, repeats: int = 3, hot: float = 0.0) -> float:
    """Median seconds of f() by itself, once it has run, on a GPU for `hot` seconds."""
    clock, marks, began = Clock(device), [], perf_counter()
    f()
    while clock.gpu and perf_counter() - began < hot:
        f()
        clock.sync()
    for _ in range(repeats):
        clock.sync()
        start = clock.mark()
        f()
        marks.append((start, clock.mark()))
    clock.sync()
    return median(clock.seconds(*pair) for pair in marks)


def matrices(c: Config, tp_size: int = 1) -> list[tuple[int, int, int]]:
    """(in, out, how many) of a forward's matrices over the clip's tokens, as a rank of tensor parallelism holds them."""
    p = tp_size
    if isinstance(c, WanConfig):
        C, ffn, L, ends = c.width, c.ffn_dim, c.num_layers, (4 * c.in_channels, 4 * c.out_channels)
        block = [(C, C // p, 4 * L), (C // p, C, 2 * L), (C, ffn // p, L), (ffn // p, C, L)]  # q k v, cross q; o, cross o
    else:
        C, ffn, L, ends = c.hidden_size, c.intermediate_size, c.num_hidden_layers, (4 * c.latent_channel,) * 2
        q, kv = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
        block = [(C, q // p, L), (C, kv // p, 2 * L), (q // p, C, L), (C, ffn // p, 2 * L), (ffn // p, C, L)]
    return [*block, (ends[0], C, 1), (C, ends[1], 1)]


def flops(bench: Bench) -> dict[str, int]:
    """Of one forward on one device."""
    work, wan = bench.work, isinstance(bench.config, WanConfig)
    a_key = 4 * work.tokens * work.heads * work.head_dim * work.layers
    return {
        "linears": sum(2 * work.tokens * i * o * n for i, o, n in matrices(bench.config)),
        "attention": a_key * (work.tokens + (0 if wan else bench.text)),
    } | ({"cross-attention": a_key * bench.text} if wan else {})


def product_of(layer: nn.Linear, x: Tensor) -> Callable[[], Tensor]:
    """The float8 product of a layer alone: what it takes is rounded already."""
    rounded = fp8.Fp8Linear(layer)
    x8, unit = fp8.quantize(x, (1,))
    return lambda: rounded.product(x8, unit, x.dtype)


def floor(bench: Bench, parallel: ParallelConfig) -> dict[str, float]:
    """Seconds of this recipe's matrices and attention passes on one rank of full chunks, each alone."""
    work, p, (rows, columns) = bench.work, parallel, parallel.attn2d_size
    cp = p.ring_size * rows * columns
    block, random = -(-work.tokens // cp), partial(torch.randn, device=bench.device, dtype=bench.dtype)
    s, spread = -(-block // p.ulysses_size), p.tp_size * p.ulysses_size
    found = {"linears": 0.0}
    for i, o, count in matrices(bench.config, p.tp_size):
        x, w = random(s, i), random(o, i)
        layer = nn.Linear(i, o, bias=False, device="meta")
        layer.weight = nn.Parameter(w, requires_grad=False)
        product = product_of(layer, x) if bench.quant == "FP8" and count > 1 else partial(F.linear, x, w)
        found["linears"] += count * alone(product, bench.device, hot=HOT if count > 1 else 0)
    wan, kernel = isinstance(bench.config, WanConfig), attention.find_kernel(bench.kernel, bench.compile)
    keys = block * rows + (0 if wan else bench.text // (columns * p.ring_size))  # every query sees the prefix once
    q = random(1, block * columns, work.heads // spread, work.head_dim)
    k = random(1, keys, work.kv_heads // spread, work.head_dim)
    found["attention"] = work.layers * p.ring_size * alone(lambda: attention.attention(q, k, k, kernel), bench.device, hot=HOT)
    if wan:
        q = random(1, s, work.heads // p.tp_size, work.head_dim)
        k = random(1, bench.text, work.heads // p.tp_size, work.head_dim)
        found["cross-attention"] = work.layers * alone(lambda: attention.attention(q, k, k), bench.device)
    return found
