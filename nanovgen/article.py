"""What was measured on a GB200 rack and published, and how well cost.py says it again from one set of constants.

    article   NVIDIA's TensorRT-LLM team, "Scaling Video Generation Across NVL72 rack with TensorRT-LLM", 2026
    PR 13821  github.com/NVIDIA/TensorRT-LLM/pull/13821, the table of its description; its column is "40-step (s)"

Wan 2.2 T2V-A14B makes 1280x720 in 20 latent frames and 40 steps, Cosmos3-Super in 48 and 35, both in bf16 with
FlashAttention-4. Each row names its degrees as the sources do. `fit` finds the constants again: three of them from 15 denoise
times, three from five decode times, by least squares over the relative errors.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import torch

from nanovgen import cost, plan
from nanovgen.job import CONFIGS
from nanovgen.machines import B200, GB200, Machine
from nanovgen.recipe import PRESETS, ParallelConfig

SHAPES = {"wan2.2-t2v-a14b": ((20, 90, 160), 40), "cosmos3-super": ((48, 45, 80), 35)}


@dataclass(frozen=True)
class Row:
    source: str
    parallel: ParallelConfig
    seconds: float
    model: str = "wan2.2-t2v-a14b"
    machine: str = "gb200-nvl72"
    note: str = ""


def recipe(cfg: int = 1, ulysses: int = 1, grid: tuple[int, int] = (1, 1), ring: int = 1, **rest: object) -> ParallelConfig:
    return ParallelConfig(cfg_size=cfg, ulysses_size=ulysses, attn2d_size=grid, ring_size=ring, **rest)


RACK, COSMOS = recipe(2, 4, (3, 3)), "cosmos3-super"
FITTED = [  # denoise
    Row("article", recipe(), 342.04),
    Row("article", recipe(2), 179.96),
    Row("article", RACK, 7.04),
    Row("article", recipe(1, 8, (3, 3)), 7.57),
    Row("article", recipe(2, 4, ring=9), 1.83 * 7.04, note="83 % slower than 3x3"),
    Row("PR 13821", recipe(), 348.40),
    Row("PR 13821", recipe(2), 174.00),
    Row("PR 13821", recipe(2, 2), 95.89),
    Row("PR 13821", recipe(2, 4), 48.06),
    Row("PR 13821", recipe(2, 4, ring=2), 25.60),
    Row("PR 13821", recipe(2, 4, ring=3), 18.46),
    Row("PR 13821", recipe(2, 8, ring=2), 14.12),
    Row("PR 13821", recipe(2, 8, ring=4), 8.48),
    Row("article", recipe(), 49 * 6.79, COSMOS, note="figure 8: about 49x on 72"),
    Row("article", RACK, 6.79, COSMOS),
]
PREDICTED = [  # denoise, on a card whose constants are the GB200's by the data sheets' ratio
    Row("article", recipe(), 370.8, machine="b200-nvlink"),
    Row("article", recipe(), 373.1, COSMOS, "b200-nvlink"),
    *(Row("article", recipe(cfg, ulysses, async_ulysses=ahead), seconds, machine="b200-nvlink", note="NVFP4, as if bf16")
      for cfg, ulysses, *both in ((1, 2, 203.31, 194.89), (2, 2, 100.46, 97.93), (2, 4, 53.28, 51.95))
      for ahead, seconds in zip((False, True), both, strict=True)),
]  # fmt: skip
ANCHOR = 4  # the ring of 9: the one row in which a ring's step is shorter than its least time, so no half can do without it
END_TO_END = [
    Row("article", recipe(), 346.16),
    Row("article", recipe(2, parallel_vae_size=2), 183.01, note="VAE degree not said; on one node it is the world's"),
    Row("article", RACK, 11.08),
    Row("article", replace(RACK, parallel_vae_size=8), 9.20),
    Row("article", replace(RACK, parallel_vae_size=8), 11.78, COSMOS),
    Row("article", recipe(), 373.35, machine="b200-nvlink"),
    Row("article", recipe(), 383.1, COSMOS, "b200-nvlink"),
]
DECODE = {1: 2.72, 2: 1.72, 4: 1.04, 8: 0.83, 16: 0.85}  # seconds by VAE ranks
RING_TO_GRID = {2: (recipe(2, 8, ring=2), recipe(2, 8, (2, 1)), 1.03),  # denoise; the article does not say which grid of two
                4: (recipe(2, 8, ring=4), recipe(2, 8, (2, 2)), 1.13),
                9: (recipe(2, 4, ring=9), RACK, 1.83)}  # fmt: skip


@cache
def load(model: str) -> cost.Load:
    preset, (latent, steps) = PRESETS[model], SHAPES[model]
    return cost.load_of(preset, CONFIGS[preset.family](**preset.transformer), latent, steps)


def denoise(row: Row, gb200: Machine = GB200) -> float:
    m = gb200 if row.machine == GB200.name else B200
    return load(row.model).steps * sum(cost.step(m, "fa4", row.parallel, load(row.model)).values())


def end_to_end(row: Row) -> float:
    asked = load(row.model)
    parts = cost.request(GB200 if row.machine == GB200.name else B200, asked, denoise(row) / asked.steps,
                         row.parallel.parallel_vae_size)  # fmt: skip
    return sum(parts.values())


# The fit


def of_steps(values: list[float]) -> Machine:
    attention, link, ring_step = values
    return replace(GB200, attention={"fa4": attention}, link=link, shift=link, push=link, ring_step=ring_step)


def of_decode(values: list[float]) -> Machine:
    rate, exchange, hop = values
    return replace(GB200, decode=GB200.decode | {"wan": rate}, vae_exchange=exchange, vae_hop=hop)


def least_squares(start: list[float], errors: Callable[[list[float]], list[float]], rounds: int = 40) -> list[float]:
    """Positive numbers that make the sum of squared errors least: Levenberg's method on their logarithms."""
    x, damping = torch.tensor(start, dtype=torch.float64).log(), 1e-3
    residual = lambda x: torch.tensor(errors(x.exp().tolist()), dtype=torch.float64)  # noqa: E731
    now = residual(x)
    for _ in range(rounds):
        slopes = torch.stack([(residual(x + 0.01 * unit) - now) / 0.01 for unit in torch.eye(len(x), dtype=torch.float64)], dim=1)
        normal = slopes.T @ slopes
        move = torch.linalg.solve(normal + damping * torch.eye(len(x)), -slopes.T @ now)
        after = residual(x + move)
        better = after.square().sum() < now.square().sum()
        x, now, damping = (x + move, after, damping / 3) if better else (x, now, damping * 5)
    return x.exp().tolist()


def fit(rows: list[Row]) -> Machine:
    """GB200's attention rate, link and least ring step, from these rows alone.

    The ring step starts longer than any row's pass: below one, it changes no time, and nothing would move it.
    """
    start = [1000e12, 450e9, 2e-3]  # 0.4 of the data sheet's peak; half of NVLink's
    errors = lambda values: [math.log(denoise(row, of_steps(values)) / row.seconds) for row in rows]  # noqa: E731
    return of_steps(least_squares(start, errors))


def fit_decode() -> Machine:
    wan = load("wan2.2-t2v-a14b")
    errors = lambda values: [math.log(cost.decode_seconds(of_decode(values), wan, n) / DECODE[n]) for n in DECODE]  # noqa: E731
    return of_decode(least_squares([100e12, 1e-3, 1e-5], errors))


def held_back() -> list[float]:
    """Each fitted row's time, from constants that were fitted without it: to the other half of the rows."""
    halves = [fit([row for i, row in enumerate(FITTED) if i % 2 == half or i == ANCHOR]) for half in (0, 1)]
    return [denoise(row, halves[1 - i % 2]) for i, row in enumerate(FITTED)]


# The table


def line(row: Row, found: float, held: str = "") -> str:
    model, machine = ("Wan" if "wan" in row.model else "Cosmos3"), row.machine.split("-")[0]
    name = f"{model} {plan.name_of(row.parallel)}" + (f" vae{n}" if (n := row.parallel.parallel_vae_size) > 1 else "")
    off, source = f"{found / row.seconds - 1:+.1%}", f"{row.source}{', ' if row.note else ''}{row.note}"
    return f"{machine:6} {row.parallel.world:3} {name:24} {row.seconds:8.2f} {found:8.2f} {off:>7} {held:>15}  {source}"


def table() -> str:
    """All rows: published, as the model says, and as it says without having seen the row."""
    apart = held_back()
    lines = ["denoise: seconds published and of the model; of a fit to the other half of the rows"]
    lines += [line(row, denoise(row), "(in both)" if i == ANCHOR else f"{held:.2f} {held / row.seconds - 1:+.1%}")
              for i, (row, held) in enumerate(zip(FITTED, apart, strict=True))]  # fmt: skip
    lines += ["", "denoise, from no row of its own"] + [line(row, denoise(row)) for row in PREDICTED]
    lines += ["", "end to end"] + [line(row, end_to_end(row)) for row in END_TO_END]
    decode = {n: cost.decode_seconds(GB200, load("wan2.2-t2v-a14b"), n) for n in DECODE}
    lines += ["", "decode   " + ", ".join(f"{n}: {DECODE[n]:.2f} s and {decode[n]:.2f}" for n in DECODE)]
    ratios = [f"cp {n}: {wanted:.2f} and {denoise(Row('', ring, 1)) / denoise(Row('', grid, 1)):.2f}"
              for n, (ring, grid, wanted) in RING_TO_GRID.items()]  # fmt: skip
    lines += ["ring over Attention2D, " + ", ".join(ratios)]
    m, v = fit(FITTED), fit_decode()
    lines += ["", f"fitted   attention {m.attention['fa4'] / 1e12:.0f} TFLOP/s, link {m.link / 1e9:.0f} GB/s, ring step "
              f"{m.ring_step * 1e6:.0f} us; decode {v.decode['wan'] / 1e12:.0f} TFLOP/s, halo {v.vae_exchange * 1e6:.0f} us, "
              f"{v.vae_hop * 1e6:.1f} us more a rank (machines.py has these)"]  # fmt: skip
    return "\n".join(lines)
