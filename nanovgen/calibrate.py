"""This machine's constants, measured: a file that stands for a machine in `python -m nanovgen.plan --machine FILE`.

    python -m nanovgen.bench --model wan2.2-t2v-a14b --compile --calibrate here.json                  # kernels, of one GPU
    torchrun --standalone --nproc-per-node 8 -m nanovgen.bench --model ... --calibrate here.json      # and the links between 8

Each rate is the one at which cost.py's own formula gives the seconds measured, at the shapes of the model and size asked for;
so the planner says of what was measured here what it took. What was not measured stays as in the file's "base".
"""

import json
from collections.abc import Callable
from dataclasses import replace
from datetime import date
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F

from nanovgen import attention, compiled, cost, machines, mesh
from nanovgen.floor import HOT, Bench, alone, matrices, random_vae
from nanovgen.machines import Machine
from nanovgen.mesh import Axis

PAYLOAD, FRAMES = {"cuda": 2**28, "cpu": 2**22}, 3  # bytes that a rank sends at once; latent frames decoded


def write(path: Path, bench: Bench, world: int, say: Callable[[str], None]) -> None:
    """Measure on every rank, say and write on the first."""
    base, stands_in = machines.of_device(bench.card, 1, 1)
    found, axis = kernels(bench, base), mesh.open_mesh(bench.device, {"ulysses": world}).ulysses
    found |= links(bench, axis) if world > 1 else {}
    where = f"measured on {world} of {bench.card}, torch {torch.__version__}, {date.today()}, {bench.work.tokens} tokens"
    said = {"base": base.name, **found, "sources": {", ".join(found): where}}
    for name, value in found.items():
        rates = value.items() if isinstance(value, dict) else [("", value)]
        for kind, rate in rates:
            was = getattr(base, name)
            was = was.get(kind) if isinstance(was, dict) else was
            say(f"{name:<10} {kind:<9} {rate:.4g}" + (f" ({base.name}: {was:.4g})" if was else ""))
    if axis.rank == 0:
        path.write_text(json.dumps(said, indent=1) + "\n")
        say(f"written to {path}, on top of {base.name}{' for want of a nearer one' if stands_in else ''}")


def kernels(bench: Bench, base: Machine) -> dict:
    """Rates of one device, the others at rest or doing the same."""
    work, random = bench.work, partial(torch.randn, device=bench.device, dtype=bench.dtype)
    found = {}
    if bench.device.type == "cuda":
        card = torch.cuda.get_device_properties(bench.device)
        found |= {"sms": card.multi_processor_count, "memory": card.total_memory}
    unit, (*block, _, _) = replace(base, **found, linear=1.0, stream=1e30), matrices(bench.config)
    x = random(min(work.tokens * work.width, 2**28))
    found["stream"] = 2 * x.nbytes / alone(lambda: x + 1, bench.device, hot=HOT)
    taken = flop_time = 0.0
    for i, o, count in block:
        x, w = random(work.tokens, i), random(o, i)
        taken += count * alone(partial(F.linear, x, w), bench.device, hot=HOT)
        flop_time += count * cost.linear_seconds(unit, work.tokens, i, o)
    found["linear"] = flop_time / taken
    q, k = (random(1, work.tokens, heads, work.head_dim) for heads in (work.heads, work.kv_heads))
    one_pass = cost.attention_seconds(unit, 1.0, work.tokens, work.tokens, work.heads, work.head_dim)
    here = [name for name in attention.KERNELS if attention.refusal(name, bench.device, bench.dtype) is None]
    seconds = {}
    for name in [name for name in here if name in base.attention] or [bench.kernel]:
        kernel = attention.find_kernel(name, bench.compile)
        seconds[name] = alone(lambda kernel=kernel: attention.attention(q, k, k, kernel), bench.device, hot=HOT)
    found["attention"] = {name: one_pass / seconds[name] for name in sorted(seconds, key=seconds.get)}
    return found | {"decode": {bench.preset.family: decode(bench, unit)}}


def decode(bench: Bench, unit: Machine) -> float:
    """The VAE's rate, by a few latent frames after the first."""
    vae = random_vae(bench)
    if bench.compile:
        compiled.compile_blocks(vae)
    latent = (FRAMES, *bench.latent[1:])
    z = torch.randn(1, bench.preset.latent[0], *latent, device=bench.device)
    seconds = alone(lambda: [part.shape for part in vae.decode(z, 1)], bench.device)
    load = cost.load_of(bench.preset, bench.config, latent, 1)
    return cost.decode_seconds(replace(unit, decode={bench.preset.family: 1.0}), load, 1) / seconds


def links(bench: Bench, axis: Axis) -> dict:
    """Between the ranks there are, each sending PAYLOAD bytes: the slowest one's median. All call each exchange as often."""
    p, kind = axis.size, bench.device.type
    x = torch.ones(p, PAYLOAD[kind] // (p - 1) // 4, device=bench.device)  # fp32; a share of p stays
    small = torch.ones(p, 1, device=bench.device)
    slowest = lambda f: max(mesh.gather_objects(alone(f, bench.device, 10)))  # noqa: E731
    sent = x.nbytes * (p - 1) / p
    latency = slowest(lambda: mesh.all_to_all(small, axis))
    rate = lambda f: sent / max(slowest(f) - latency, 1e-9)  # noqa: E731
    found = {"latency": latency, "link": rate(lambda: mesh.all_to_all(x, axis)),
             "shift": rate(lambda: mesh.start_shift(x[1:], axis).wait())}  # fmt: skip
    if axis.pusher is not None:
        found["push"] = rate(lambda: mesh.start_all_to_all(x, axis, pushed=True).wait())
    return found
