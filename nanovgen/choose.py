"""Which degrees? Every way to spend the ranks that the model and the memory allow, ranked by cost.py's seconds.

run.py asks `choose` where no recipe is given; `python -m nanovgen.plan` prints the whole ranking, and says of what was left
out why. Memory is summary.py's prediction. Where a model's two experts do not fit at once, each is read when its steps begin
(--offload), which costs the reading of both in every request; tensor parallelism is the other way out.
"""

import argparse
import math
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch

from nanovgen import compiled, cost, machines, plan, summary
from nanovgen import job as jobs
from nanovgen.job import Job
from nanovgen.machines import Machine
from nanovgen.recipe import PRESETS, ParallelConfig, Recipe, Request, check_frames, read_recipe

VAE_RANKS = (1, 2, 4, 8, 16)  # and all of them: beyond these, halos cost more than strips save


@dataclass(frozen=True)
class Choice:
    """A recipe that works, and what it is predicted to take: seconds of a step by term and of a request by part, bytes that
    a rank sends in a step by axis, bytes on a device; and whether one expert at a time is there."""

    parallel: ParallelConfig
    terms: dict[str, float]
    parts: dict[str, float]
    sent: dict[str, int]
    memory: int
    offload: bool

    @property
    def name(self) -> str:
        return plan.name_of(self.parallel) + (".offload" if self.offload else "")

    @property
    def step(self) -> float:
        return sum(self.terms.values())

    @property
    def total(self) -> float:
        return sum(self.parts.values())


@dataclass(frozen=True)
class Ranking:
    """The best first; of the others, for each reason how many, and the first one's name and words. `memory` is a card's (None:
    no limit), `least` what the smallest of those that are too large for it would hold."""

    machine: Machine
    kernel: str
    load: cost.Load
    choices: list[Choice]
    refused: dict[str, tuple[int, str, str]]
    memory: float | None
    least: int | None


def divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def candidates(world: int) -> Iterator[ParallelConfig]:
    """Every way to spend so many ranks, without regard to a model; VAE ranks are chosen apart."""
    for streams in [n for n in (1, 2) if world % n == 0]:
        for tp in divisors(world // streams):
            for u in divisors(world // streams // tp):
                cp = world // streams // tp // u
                ways = [{}, {"async_ulysses": True}, {"fused_ulysses": True}] if u > 1 else [{}]
                for inner in inners(cp):
                    for way in ways:
                        yield ParallelConfig(cfg_size=streams, tp_size=tp, ulysses_size=u, **inner, **way)


def recipes(world: int) -> list[ParallelConfig]:
    """Of all ways to spend `world` ranks those that a sweep tries: tp alone, and beside a ring or a grid the plain ulysses."""

    def alone(p: ParallelConfig) -> bool:
        ranks, plain = world // p.cfg_size, not (p.async_ulysses or p.fused_ulysses)
        return p.tp_size in (1, ranks) and (plain or p.ulysses_size == ranks)

    return [p for p in candidates(world) if alone(p)]


def inners(cp: int) -> Iterator[dict]:
    """Ring, or grids in their three ways."""
    if cp == 1:
        yield {}
        return
    yield {"ring_size": cp}
    for rows in divisors(cp):
        grid = {"attn2d_size": (rows, cp // rows)}
        yield grid
        if rows > 1:
            yield grid | {"attn2d_merge": "overlapped"}
        if rows < cp:
            yield grid | {"attn2d_merge": "reduce_scatter"}


def vae_ranks(m: Machine, load: cost.Load, world: int, half: int) -> int:
    """The fastest degree of the decode that check_vae takes."""
    degrees = [n for n in VAE_RANKS if n <= half] + [world]
    return min((n for n in degrees if n <= load.work.latent[2]), key=lambda n: cost.decode_seconds(m, load, n))


def rank(job: Job, world: int, m: Machine, kernel: str, memory: float | None) -> Ranking:
    """All recipes for `world` ranks by predicted time; `memory` bytes of a card, or None where it does not matter."""
    load, found, refused, too_large = load_of(job), [], {}, []
    room = None if memory is None else memory - summary.RESERVED
    vae, needs = cache(lambda half: vae_ranks(m, load, world, half)), cache(lambda p: needed(with_(job, p), room))
    for parallel in candidates(world):
        parallel = replace(parallel, parallel_vae_size=vae(world // parallel.cfg_size))
        same = replace(parallel, ulysses_size=world // parallel.cfg_size // parallel.tp_size, ring_size=1, attn2d_size=(1, 1),
                       async_ulysses=False, fused_ulysses=False, attn2d_merge="exchange")  # as far as memory goes  # fmt: skip
        try:
            plan.check(parallel, world, job.work)
            if parallel.cfg_size > load.streams:
                raise ValueError("without guidance there is one stream, and half of the ranks would do what the others do")
            compiled.check(job.recipe.torch_compile_config.enable, parallel.tp_size)
            peak, offload, experts = needs(same)
            if room is not None and peak > room:
                too_large.append(peak)
                raise ValueError(f"needs {gigabytes(peak + summary.RESERVED)} GB and a card has {gigabytes(memory)}")
        except ValueError as error:
            kind = re.sub(r"[\d.]+", "N", str(error).partition(";")[0])
            count, *first = refused.get(kind, (0, plan.name_of(parallel), str(error)))
            refused[kind] = (count + 1, *first)
            continue
        terms, sent = cost.step(m, kernel, parallel, load), plan.bytes_sent(parallel, job.work, load.streams)
        parts = cost.request(m, load, sum(terms.values()), parallel.parallel_vae_size)
        if offload:
            parts["read"] = experts / m.read
        found.append(Choice(parallel, terms, parts, sent, peak, offload))
    return Ranking(m, kernel, load, sorted(found, key=lambda c: c.total), refused, memory, min(too_large, default=None))


def needed(job: Job, room: float | None) -> tuple[int, bool, int]:
    """Bytes of tensors on a device, whether it takes one expert at a time to be so few, and the bytes of all experts."""
    offload = summary.offloads(job, math.inf if room is None else room)
    experts = sum(summary.weight_bytes(job, part) for part in summary.experts_of(job))
    return summary.predicted_peak(job, offload), offload, experts


def with_(job: Job, parallel: ParallelConfig) -> Job:
    return replace(job, recipe=replace(job.recipe, parallel_config=parallel))


def load_of(job: Job) -> cost.Load:
    part = next(part for part in job.models if part.startswith("transformer"))
    return replace(cost.load_of(job.preset, job.models[part].config, job.latent_shape, job.request.steps,
                                1 if job.negative is None else 2),
                   work=job.work, vae=job.models["vae"].config, chunk=job.request.chunk or job.latent_shape[0])  # fmt: skip


# For run.py


def place(job: Job, world: int) -> tuple[Machine, str, float]:
    """The constants to go by, what to say of them, and a card's memory; CPU ranks share the host's."""
    memory = summary.room(job.device, world) + summary.RESERVED
    if job.device.type == "cpu":
        return machines.H200, ", ranked as H200s would be", memory
    local = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    return *machines.of_device(torch.cuda.get_device_name(job.device), world, local), memory


def choose(job: Job, world: int, dry_run: bool = False) -> tuple[Job, str]:
    """The job with the fastest recipe for the ranks and the memory there are, and a line on it.

    Raises ValueError where none fits. In a dry run memory is no limit: the plan is for another place.
    """
    m, note, memory = place(job, world)
    kernel = job.kernel if job.kernel in m.attention else next(iter(m.attention))
    found = rank(job, world, m, kernel, None if dry_run else memory)
    if not found.choices:
        raise ValueError(none_fits(found, world) + "; --recipe tries one all the same")
    best = found.choices[0]
    why = f"the fastest of {len(found.choices)} that fit, {best.step:.3g} s a step predicted{note}" if world > 1 else "one rank"
    if best.offload:
        job = replace(job, request=replace(job.request, offload="yes"))
    return with_(job, best.parallel), f"{best.name}: {why}; --recipe takes another"


def none_fits(found: Ranking, world: int) -> str:
    """One line: the numbers, the rule, the way out."""
    if found.least is None:
        return f"no recipe of {world} ranks works: {next(words for _, _, words in found.refused.values())}"
    needs, has = gigabytes(found.least + summary.RESERVED), gigabytes(found.memory)
    return (f"no recipe of {world} ranks fits: the least needs {needs} GB a card and there are {has}; use more ranks (tensor "
            "parallelism splits the weights), fewer frames, or a smaller size")  # fmt: skip


def gigabytes(count: float) -> str:
    return f"{count / 1e9:.3g}"


# The command line


def parse(arguments: list[str] | None) -> argparse.Namespace:
    p = argparse.ArgumentParser(
        prog="nanovgen.plan", description=plan.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--model", default="wan2.2-t2v-a14b", choices=PRESETS, help="a known model; its files are not read")
    p.add_argument("--gpus", type=int, default=72, help="ranks")
    p.add_argument("--machine", default="gb200-nvl72", help=f"{', '.join(machines.MACHINES)}, or a file of measured constants")
    p.add_argument("--attention", help="attention kernel (the machine's best)")
    p.add_argument("--memory", type=float, help="GB of a card (the machine's)")
    p.add_argument("--size", help="WIDTHxHEIGHT (the model's)")
    p.add_argument("--frames", type=int, help="4k+1 (the model's); 77 are 20 latent frames, as the article's 80")
    p.add_argument("--steps", type=int, help="denoising steps (the model's)")
    p.add_argument("--top", type=int, default=12, help="rows of the ranking")
    p.add_argument("--picture", type=Path, help="a PNG: scaling, and the parts of a step")
    p.add_argument("--report", type=Path, help="an HTML page of all of it, the published times and the measured ones included")
    p.add_argument("--measured", type=Path, nargs="+", default=[], help="JSON files of nanovgen.bench --out, for the report")
    p.add_argument("--article", action="store_true", help="the model against what was published, and its fit; nothing else")
    return p.parse_args(arguments)


def asked(args: argparse.Namespace) -> tuple[Job, Ranking]:
    """A job and its ranking, as a command line asks for them. Raises ValueError."""
    if args.frames is not None:
        check_frames(args.frames)
    if args.gpus < 1 or args.top < 1:
        raise ValueError(f"gpus is {args.gpus} and top {args.top}; both must be at least 1")
    m = machines.find(args.machine)
    kernel = args.attention or next(iter(m.attention))
    if kernel not in m.attention:
        raise ValueError(f"{m.name} has no rate of attention kernel {kernel}; it has {', '.join(m.attention)}")
    request = Request("a", args.model, size=args.size, frames=args.frames, steps=args.steps, device="cpu", dtype="bfloat16")
    job = jobs.prepare(request, Recipe(), dry_run=True)
    found = rank(job, args.gpus, m, kernel, args.memory * 1e9 if args.memory else m.memory)
    if not found.choices:
        raise ValueError(none_fits(found, args.gpus))
    return job, found


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0 done, 2 refused."""
    args = parse(arguments)
    if args.article:
        from nanovgen.article import table

        print(table())
        return 0
    try:
        job, found = asked(args)
        print("\n".join(describe(found, args.model, args.top)))
        if args.picture or args.report:
            from nanovgen import report

            report.write(args, job, found)
    except (ValueError, OSError) as error:
        print(f"nanovgen.plan: {error}", file=sys.stderr)
        return 2
    return 0


def describe(found: Ranking, model: str, top: int) -> list[str]:
    """The ranking in words, for a terminal."""
    m, load, best = found.machine, found.load, found.choices[0]
    f, y, x = load.work.latent
    lines = [f"machine   {m.name}: attention {found.kernel} {m.attention[found.kernel] / 1e12:.0f} TFLOP/s, matrices "
             f"{m.linear / 1e12:.0f}, {m.link / 1e9:.0f} GB/s inside {m.domain} GPUs, {m.across / 1e9:.0f} across",
             f"request   {model}, {load.work.tokens} tokens of latents {f} x {y} x {x}, {load.steps} steps of {load.streams} "
             "streams; weights loaded and code compiled before",
             f"{'rank':>4} {'recipe':36} {'ms/step':>8} {'denoise':>8} {'decode':>7} {'total s':>8} {'GB':>5}  "
             "MB sent a rank and step"]  # fmt: skip
    for i, c in enumerate(found.choices[:top]):
        sent = ", ".join(f"{axis} {amount / 1e6:.0f}" for axis, amount in c.sent.items() if amount > 5e5)
        name = f"{c.name} vae{c.parallel.parallel_vae_size}"
        lines.append(f"{i + 1:4} {name:36} {1e3 * c.step:8.1f} {c.parts['denoise']:8.2f} {c.parts['decode']:7.2f} {c.total:8.2f} "
                     f"{c.memory / 1e9:5.0f}  {sent}")  # fmt: skip
    lines += [f"terms     {best.name}, ms: " + ", ".join(f"{k} {1e3 * v:.1f}" for k, v in best.terms.items() if v > 5e-5)]
    lines += [f"whole     on every rank: {replicated(found, best)}"]
    lines += [f"why       {text}" for text in reasons(found)]
    lines += [f"refused   {count} such as {name}: {words}" for count, name, words in found.refused.values()]
    return lines


def replicated(found: Ranking, choice: Choice) -> str:
    """What no degree shrinks, by part, and its share of a step."""
    turns = 1 if found.load.streams == 1 else -(-found.load.streams // choice.parallel.cfg_size)
    parts = cost.replicated(found.machine, found.load, turns)
    listed = ", ".join(f"{what} {1e3 * seconds:.2f} ms" for what, seconds in parts.items() if seconds)
    return f"{listed}; {sum(parts.values()) / choice.step:.1%} of a step"


def reasons(found: Ranking) -> list[str]:
    """The best against the recipe that this repository names for so many ranks; grids against each other."""
    best, lines = found.choices[0], []
    named = {r.world: r for r in (read_recipe(n).parallel_config for n in ("2gpu", "4gpu", "8gpu", "nvl72"))}.get(
        best.parallel.world
    )
    theirs = named and find(found, replace(named, parallel_vae_size=best.parallel.parallel_vae_size))
    if theirs and theirs is not best:
        lines.append(against(best, theirs, "the named recipe"))
    elif theirs:
        lines.append(f"{best.name} is the named recipe of {best.parallel.world} ranks")
        lines += [against(best, other, "the next") for other in found.choices[1:2]]
    grids = [c for c in found.choices if c.parallel.attn2d_size != (1, 1)]
    tall = next((c for c in grids if c.parallel.attn2d_size[0] > c.parallel.attn2d_size[1]), None)
    square = next((c for c in grids if c.parallel.attn2d_size[0] == c.parallel.attn2d_size[1]), None)
    if tall and square:
        lines.append(against(tall, square, "the best square grid"))
        n = square.parallel.attn2d_size[0]
        column = find(found, replace(square.parallel, attn2d_size=(n * n, 1)))
        if column and column is not tall:
            lines.append(against(column, square, "the square of the same degrees"))
    return lines


def find(found: Ranking, parallel: ParallelConfig) -> Choice | None:
    return next((c for c in found.choices if c.parallel == parallel), None)


def against(a: Choice, b: Choice, what: str) -> str:
    """How much a is faster than b, by which terms, and what both send."""
    moved = {k: 1e3 * (a.terms[k] - b.terms[k]) for k in a.terms}
    most = sorted((k for k in moved if abs(moved[k]) >= 0.05), key=lambda k: -abs(moved[k]))[:4]
    sent = f"; it sends {sum(a.sent.values()) / sum(b.sent.values()):.2f} of the bytes" if sum(b.sent.values()) else ""
    way = "faster" if a.step < b.step else "slower"
    return (f"{a.name} is {abs(1 - a.step / b.step):.1%} {way} a step than {what}, {b.name}: "
            + (", ".join(f"{k} {moved[k]:+.1f} ms" for k in most) or "by nothing a step shows") + sent)  # fmt: skip
