"""Flow-matching schedules and solvers as pure functions over explicit state.

    x_sigma = (1 - sigma) x0 + sigma noise,   velocity v = noise - x0,   so  x0 = x - sigma v

A schedule is sigmas (steps + 1,) falling to 0. A solver turns the state, the sample x and the model's v at step i into
the next sample. UniPC (arXiv:2302.04867) of order 2 with B(h) = e^h - 1 ("bh2"), predicting x0, is what Wan uses; Euler
(arXiv:2210.02747) is the plain one. Nothing is kept between two runs but what the caller holds.

Letters: alpha = 1 - sigma; lambda = ln(alpha / sigma), half the log signal-to-noise ratio; h a step in lambda.
"""

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

GRIDS = ("native", "diffusers")


def flow_sigmas(steps: int, shift: float, grid: str = "native") -> Tensor:
    """Sigmas (steps + 1,) float64, last one 0: an even grid u, bent towards noise by s(u) = k u / (1 + (k-1) u).

    Two grids are called Wan's: "native" (Wan's own code) runs u from 0.999 to 0 and leaves 0 to the final step;
    "diffusers" (0.36 and later) runs u from 1 to 0.001. They differ by up to 8 of 1000 time units.
    """
    if steps < 1:
        raise ValueError(f"steps is {steps}; at least 1 is needed")
    if not 0 < shift < math.inf:
        raise ValueError(f"shift is {shift}; it must be above 0 and finite")
    if grid == "native":
        u = np.linspace(float(np.float32(0.999)), 0, steps + 1)[:-1]  # Wan's code holds 0.999 in fp32
    elif grid == "diffusers":
        u = np.linspace(1, 0.001, steps + 1)[:-1]
    else:
        raise ValueError(f"sigma grid {grid!r} is not one of {', '.join(GRIDS)}")
    sigmas = torch.from_numpy(shift * u / (1 + (shift - 1) * u))  # numpy's grid: torch's differs in the last bit
    sigmas[0] = sigmas[0].clamp(max=1 - 1e-6)  # at 1 exactly lambda is -inf
    return torch.cat([sigmas, sigmas.new_zeros(1)])


KARRAS = (0.147, 200.0)  # the ends in Cosmos3's scheduler file


def karras_sigmas(steps: int, sigma_min: float = KARRAS[0], sigma_max: float = KARRAS[1]) -> Tensor:
    """Sigmas (steps + 1,) float64, last one 0, as Cosmos3's own scheduler file asks for; they take no flow shift.

    The ramp of arXiv:2206.00364 (even in sigma^(1/7), sigma_max to sigma_min) is in its units, x = x0 + sigma noise;
    divided by 1 + sigma, x is ours: 200 and 0.147 become 0.995 and 0.128.
    """
    if steps < 1:
        raise ValueError(f"steps is {steps}; at least 1 is needed")
    if not 0 < sigma_min < sigma_max < math.inf:
        raise ValueError(f"Karras sigmas run from {sigma_max} to {sigma_min}; they must fall, and be above 0 and finite")
    start, end = sigma_max ** (1 / 7), sigma_min ** (1 / 7)
    ramp = torch.from_numpy((start + np.linspace(0, 1, steps) * (end - start)) ** 7)
    return torch.cat([ramp / (1 + ramp), ramp.new_zeros(1)])


class Stored(NamedTuple):
    """The sigmas that a checkpoint's scheduler file asks for: bent by a flow shift, or else Karras's, as (min, max)."""

    shift: float | None
    karras: tuple[float, float] | None = None

    def sigmas(self, steps: int, grid: str = "diffusers") -> Tensor:
        return karras_sigmas(steps, *self.karras) if self.karras else flow_sigmas(steps, self.shift, grid)

    def __str__(self) -> str:
        return "Karras sigmas {1:g} to {0:g}, no shift".format(*self.karras) if self.karras else f"shift {self.shift:g}"


# What our solver is, by the keys of scheduler_config.json, and what a file means that leaves the key out.
OURS = {"prediction_type": ("flow_prediction", "epsilon"), "use_flow_sigmas": (True, False), "num_train_timesteps": (1000, 1000),
        "solver_order": (2, 2), "solver_type": ("bh2", "bh2"), "predict_x0": (True, True), "lower_order_final": (True, True),
        "disable_corrector": ([], []), "solver_p": (None, None), "thresholding": (False, False),
        "final_sigmas_type": ("zero", "zero"), "use_exponential_sigmas": (False, False), "use_beta_sigmas": (False, False),
        "use_dynamic_shifting": (False, False), "shift_terminal": (None, None)}  # fmt: skip


def stored_schedule(config: dict) -> Stored:
    """What a UniPCMultistepScheduler's file asks for; refused where unipc_step would not be what it describes.

    With use_karras_sigmas on, its flow_shift is never read: to set a shift, Karras must be switched off too.
    """
    for key, (ours, absent) in OURS.items():
        if (said := config.get(key, absent)) != ours:
            raise ValueError(f"the scheduler file has {key}={said}; our UniPC knows {key}={ours} only")
    keys = {"sigma_min": None, "sigma_max": None} if config.get("use_karras_sigmas") else {"flow_shift": 1.0}
    numbers = [config.get(key, absent) for key, absent in keys.items()]
    if not all(type(x) in (int, float) for x in numbers):
        said = ", ".join(f"{key}={x}" for key, x in zip(keys, numbers, strict=True))
        raise ValueError(f"the scheduler file has {said}; numbers are needed there")
    return Stored(None, (numbers[0], numbers[1])) if len(keys) == 2 else Stored(float(numbers[0]))


def timesteps(sigmas: Tensor) -> list[int]:
    """The integer time 0..999 that the model is given at each step (truncated, as Wan was trained)."""
    return [int(1000 * s) for s in sigmas[:-1].tolist()]


class Memory(NamedTuple):
    """What UniPC remembers of one earlier step."""

    sigma: float
    x0: Tensor


class UniPC(NamedTuple):
    """State between steps: the corrected sample of the last step and up to two steps' x0, newest last."""

    sample: Tensor | None = None
    past: tuple[Memory, ...] = ()
    order: int = 0  # of the predictor that made the sample now coming in


def _lambda(sigma: float) -> float:
    return math.log1p(-sigma) - math.log(sigma) if sigma > 0 else math.inf


def _correct(state: UniPC, sigma: float, x0: Tensor) -> Tensor:
    """UniC: redo the last step, now that x0 at its end is known too."""
    last = state.past[-1]
    h = _lambda(sigma) - _lambda(last.sigma)
    b = math.expm1(-h)
    step = 0.5 * (x0 - last.x0)
    if state.order == 2:
        before = state.past[-2]
        r = (_lambda(before.sigma) - _lambda(last.sigma)) / h  # negative: it lies before the step
        g1 = b / -h - 1
        g2 = g1 / -h - 0.5
        rho1 = (g1 / b - 2 * g2 / b) / (1 - r)  # solves [[1, 1], [r, 1]] rho = [g1, 2 g2] / b
        step = rho1 * (before.x0 - last.x0) / r + (g1 / b - rho1) * (x0 - last.x0)
    return sigma / last.sigma * state.sample - (1 - sigma) * b * (last.x0 + step)


def _predict(past: tuple[Memory, ...], sample: Tensor, sigma_next: float, order: int) -> Tensor:
    """UniP: from the last step's x0 (and the slope to the one before) to sigma_next."""
    now = past[-1]
    if sigma_next == 0:  # lambda is infinite: all that is left is x0
        return now.x0
    h = _lambda(sigma_next) - _lambda(now.sigma)
    b = math.expm1(-h)
    step = 0.0
    if order == 2:
        r = (_lambda(past[-2].sigma) - _lambda(now.sigma)) / h
        step = 0.5 * (past[-2].x0 - now.x0) / r
    return sigma_next / now.sigma * sample - (1 - sigma_next) * b * (now.x0 + step)


def unipc_step(state: UniPC, sigmas: Tensor, i: int, x: Tensor, v: Tensor) -> tuple[UniPC, Tensor]:
    """One step of UniPC: correct x by what v says of the step before, then predict the sample at sigmas[i + 1].

    Starts from UniPC(). The order is 1 at the first and the last step, 2 between. x and v are fp32, any shape.
    """
    sigma, sigma_next = float(sigmas[i]), float(sigmas[i + 1])
    x0 = x - sigma * v
    if i > 0:
        x = _correct(state, sigma, x0)
    past = (*state.past[-1:], Memory(sigma, x0))
    order = 1 if i == 0 or i == len(sigmas) - 2 else 2
    return UniPC(x, past, order), _predict(past, x, sigma_next, order)


def euler_step(state: None, sigmas: Tensor, i: int, x: Tensor, v: Tensor) -> tuple[None, Tensor]:
    """One step of Euler along dx/dsigma = v."""
    return None, x + float(sigmas[i + 1] - sigmas[i]) * v


SOLVERS = {"unipc": (UniPC(), unipc_step), "euler": (None, euler_step)}
