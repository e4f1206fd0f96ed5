"""How fast, how near its own kernels, and beside what peer: a denoiser of random weights, a VAE, an exchange. No checkpoint.

    python -m nanovgen.bench --model wan2.2-t2v-a14b --frames 77 --compile --peer diffusers        # one GPU
    torchrun --standalone --nproc-per-node 2 -m nanovgen.bench --model wan2.2-t2v-a14b --sweep     # every recipe of 2 ranks
    torchrun --standalone --nproc-per-node 2 -m nanovgen.bench --vae --exchange --no-denoise       # the other two parts
    python -m nanovgen.bench --ranks 2 --sweep --size 64x32 --frames 5                             # forked CPU ranks
    python -m nanovgen.bench --model wan2.2-t2v-a14b --as-rank-of nvl72    # one GPU, at the shapes of one of the rack's 72
    python -m nanovgen.bench --model wan2.2-t2v-a14b --calibrate here.json # constants for nanovgen.plan --machine here.json

A *turn* is one forward of the denoiser on every CFG half, and the exchange of what they predict; a step of two guidance
streams is 2 / cfg turns. Times are medians of `--steps` turns, on the slowest rank: by CUDA events, on a CPU by its clock.
floor.py says what a turn must cost at least, and the ratio to that is printed with every turn; on a GPU that machines.py
knows, so are the terms that cost.py predicts. As a rank of more than there are (as_rank.py), exchanges are copies in place.
"""

import argparse
import gc
import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanovgen import (
    as_rank,
    attention,
    calibrate,
    cfg,
    checkpoint,
    choose,
    compiled,
    cost,
    fp8,
    launch,
    machines,
    mesh,
    peers,
    plan,
    tp,
    ulysses,
    vae_parallel,
)
from nanovgen.cosmos import Cosmos
from nanovgen.floor import Bench, Clock, alone, floor, flops, random_vae, random_weights
from nanovgen.job import CONFIGS, find_vae_dtype, place
from nanovgen.mesh import Axis, Cut, Mesh
from nanovgen.recipe import PRESETS, AttentionConfig, ParallelConfig, Request, check_frames, parse_size, read_recipe
from nanovgen.wan import Wan, WanConfig

ARTICLE = dict(b=2, tokens=6144, heads=32, d=128)  # of its isolated exchange
PEAK = {"cuda": 8192, "cpu": 256}  # rows and columns of the matrix product that stands for the device's peak


# The denoiser


def make_model(bench: Bench, axis: Axis = Axis("tp")) -> nn.Module:
    kind = Wan if isinstance(bench.config, WanConfig) else Cosmos
    model = random_weights(tp.split(checkpoint.build(kind, bench.config), axis), bench.device, bench.dtype)
    if bench.quant == "FP8" and axis.size == 1:  # fp8.py refuses tp
        fp8.quantize_linears(model)
    return (
        compiled.compile_blocks(model, compiled.SEARCHED) if bench.compile and axis.size == 1 else model
    )  # compiled.py refuses tp


def make_context(bench: Bench, model: nn.Module, tp_size: int) -> object:
    """Of a random text: Wan reads its states, Cosmos3 the keys and values that its text tower would have left."""
    generator = torch.Generator(bench.device).manual_seed(0)
    random = partial(torch.randn, device=bench.device, dtype=bench.dtype, generator=generator)
    if isinstance(model, Wan):
        return model.context(random(1, bench.text, bench.config.text_dim), *bench.latent)
    c = bench.config
    shape = (1, bench.text, c.num_key_value_heads // tp_size, c.head_dim)
    prefix = [(random(shape), random(shape)) for _ in range(c.num_hidden_layers)]
    return model.context(prefix, *bench.latent, bench.preset.fps)


def latents(bench: Bench) -> Tensor:
    channels = bench.config.in_channels if isinstance(bench.config, WanConfig) else bench.config.latent_channel
    x = torch.randn(1, channels, *bench.latent, generator=torch.Generator().manual_seed(0))
    return x.to(bench.device, bench.dtype)


def staged(attend: plan.Attend, clock: Clock, spans: dict[str, list]) -> plan.Attend:
    """The scheme, with marks around it and around each projection that it calls."""

    def timed(name: str, f: Callable) -> Callable:
        def call(*arguments: object) -> Tensor:
            start = clock.mark()
            out = f(*arguments)
            spans[name].append((start, clock.mark()))
            return out

        return call

    return timed("attend", lambda q, k, v, *prefix: attend(*(timed("projections", x) for x in (q, k, v)), *prefix))


def scheme(bench: Bench, parallel: ParallelConfig, m: Mesh) -> plan.Attend:
    kernel = attention.find_kernel(bench.kernel, bench.compile)
    return plan.bind(parallel, m, bench.work.tokens, kernel, attention.find_merge(bench.compile))


def time_turns(bench: Bench, parallel: ParallelConfig, m: Mesh, turn: Callable[[plan.Attend], object]) -> dict:
    """Medians in seconds over this rank's timed turns, by stage; what one sent; graphs compiled in them; peak memory."""
    clock, rows = Clock(bench.device), []
    attend = scheme(bench, parallel, m)
    for _ in range(bench.warmup):
        turn(attend)
    graphs = compiled.graphs() if bench.compile else 0
    if clock.gpu:
        torch.cuda.reset_peak_memory_stats()
    for _ in range(bench.steps):
        spans = defaultdict(list)
        m.sent.clear()
        clock.sync()
        begin, start = time.perf_counter(), clock.mark()
        turn(staged(attend, clock, spans))
        end, issued = clock.mark(), time.perf_counter() - begin
        clock.sync()
        wall, row = time.perf_counter() - begin, {"turn": clock.seconds(start, end), "host issued after": issued}
        row |= {name: sum(clock.seconds(*pair) for pair in pairs) for name, pairs in spans.items()}
        row["attend"] -= row["projections"]  # exchanges and kernel
        row["rest"] = row["turn"] - row["attend"] - row["projections"]
        row["host not covered"] = max(0.0, wall - row["turn"])
        rows.append(row)
    return {
        "seconds": {name: median(row[name] for row in rows) for name in rows[0]},
        "all_turns": [row["turn"] for row in rows],
        "bytes_sent": m.bytes_sent(),
        "graphs_in_turns": compiled.graphs() - graphs if bench.compile else None,
        "peak_bytes": torch.cuda.max_memory_allocated() if clock.gpu else None,
    }


def bench_recipe(bench: Bench, parallel: ParallelConfig, model: nn.Module | None, peak: float, profile: bool = False) -> dict:
    """One recipe on the ranks there are. `model` is one that is whole; under tensor parallelism its slices are made anew."""
    m = mesh.open_mesh(bench.device, plan.degrees(parallel))
    model = make_model(bench, m.tp) if parallel.tp_size > 1 else model
    context = make_context(bench, model, parallel.tp_size)
    x, t = latents(bench), torch.tensor([500], device=bench.device)
    turn = lambda attend: cfg.run_streams(lambda _: model(x, t, context, attend, m.seq), parallel.cfg_size, m.cfg)  # noqa: E731
    found = time_turns(bench, parallel, m, turn)
    if profile and bench.device.type == "cuda":
        attend = scheme(bench, parallel, m)
        found["seconds"]["GPU idle in a profiled turn"] = idle(lambda: turn(attend))
    ranks = [found["seconds"]] if m.world.size == 1 else mesh.gather_objects(found["seconds"])
    found["seconds"] = {name: max(rank[name] for rank in ranks) for name in ranks[0]}
    each, counted = floor(bench, parallel), flops(bench)
    seconds, share = found["seconds"]["turn"], parallel.world // parallel.cfg_size
    rate = sum(counted.values()) / share / seconds / 1e12
    return found | {
        "recipe": asdict(parallel), "flops": counted, "tflops_a_rank": rate, "of_peak": rate / peak, "floor": each,
        "turn_to_floor": seconds / sum(each.values()), "step_seconds": 2 * seconds / parallel.cfg_size,
        "predicted": predicted(bench, parallel),
    }  # fmt: skip


def predicted(bench: Bench, parallel: ParallelConfig) -> dict[str, float] | None:
    """What cost.py says of a turn on this card, by term; None of a card that machines.py does not know."""
    m, stands_in = machines.of_device(bench.card, 1, 1)
    if stands_in:
        return None
    kernel = bench.kernel if bench.kernel in m.attention else next(iter(m.attention))
    terms = cost.layer(m, kernel, parallel, cost.load_of(bench.preset, bench.config, bench.latent, 1))
    return {name: bench.work.layers * seconds for name, seconds in terms.items() if seconds}


def idle(f: Callable[[], object]) -> float:
    """Seconds between the first and the last kernel of f() in which none ran, on any stream."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        f()
        torch.cuda.synchronize()
    events = (e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA)
    ranges = sorted((e.time_range.start, e.time_range.end) for e in events)
    gaps, reached = 0.0, ranges[0][0] if ranges else 0
    for start, end in ranges:
        gaps, reached = gaps + max(0.0, start - reached), max(reached, end)
    return gaps / 1e6


# The VAE, the exchange


def bench_vae(bench: Bench, chunks: list[int], world: int, peer: bool, say: Callable) -> tuple[list[dict], dict | str | None]:
    """Decoding the clip's latents, a chunk size at a time, on one rank and by strips on all of them; and diffusers' decode.

    Each is said as soon as it is known: compiling for the next one can take a minute.
    """
    vae = random_vae(bench)
    z = torch.randn(1, bench.preset.latent[0], *bench.latent, generator=torch.Generator().manual_seed(0)).to(bench.device)
    meshes, found = {1: Mesh()}, []
    theirs = peers.decoder(bench, vae, z) if peer and world == 1 else None
    if theirs:
        say(f"diffusers {theirs}")
    if bench.compile:
        compiled.compile_blocks(vae)
    if world > 1:
        meshes[world] = mesh.open_mesh(bench.device, {"ulysses": world}, vae=world)
    for degree, m in meshes.items():
        for chunk in chunks:
            if bench.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            decode = lambda chunk=chunk, m=m: sum(p.shape[2] for p in vae_parallel.decode(vae, z, chunk or None, m.vae, 4))  # noqa: E731
            seconds = alone(decode, bench.device, bench.steps)
            peak = torch.cuda.max_memory_allocated() if bench.device.type == "cuda" else None
            found.append({"ranks": degree, "chunk": chunk, "seconds": seconds, "peak_bytes": peak})
            memory, dtype = f", {peak / 1e9:.1f} GB" if peak else "", str(bench.vae_dtype)[6:]
            say(f"decode    {degree} ranks, chunk {chunk}, {dtype}: {seconds:.3f} s{memory}")
    return found, theirs


def bench_exchange(device: torch.device, dtype: torch.dtype, world: int, shape: dict, repeats: int) -> dict[str, dict]:
    """Seconds from the first projection to q, k, v by heads, in ulysses' three ways; `ready` are q, k, v that exist already."""
    axis, clock, found = mesh.open_mesh(device, {"ulysses": world}).ulysses, Clock(device), {}
    cut, width = Cut(shape["tokens"], world, axis.rank), shape["heads"] * shape["d"]
    x = torch.randn(shape["b"], cut.real(cut.rank), width, device=device, dtype=dtype)
    weights = [torch.randn(width, width, device=device, dtype=dtype) / width**0.5 for _ in range(3)]
    made = [lambda w=w: F.linear(x, w).unflatten(-1, (-1, shape["d"])) for w in weights]
    ready = [lambda y=project(): y for project in made]
    found["projections"] = {"alone": alone(lambda: [project() for project in made], device, repeats)}
    for name in ("ulysses", "ulysses_fused", "ulysses_async"):
        found[name] = {}
        for what, projections in (("projected", made), ("ready", ready)):
            marks = []

            def inner(q: Tensor, k: Tensor, v: Tensor, prefix: None, marks: list = marks) -> Tensor:
                marks[-1].append(clock.mark())
                return q

            for _ in range(repeats + 3):
                marks.append([clock.mark()])
                getattr(ulysses, name)(*projections, None, axis, cut, inner)
            clock.sync()
            seconds = median(clock.seconds(*pair) for pair in marks[3:])
            found[name][what] = max(mesh.gather_objects(seconds)) if world > 1 else seconds
    return found


# The command line


def parse(arguments: list[str] | None) -> argparse.Namespace:
    p = argparse.ArgumentParser(prog="nanovgen.bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", default="tiny-wan", choices=PRESETS, help="a known model's sizes; its files are not read")
    p.add_argument("--size", help="WIDTHxHEIGHT (the model's)")
    p.add_argument("--frames", type=int, default=77, help="4k+1; 77 are 20 latent frames, as the article's 80")
    p.add_argument("--tokens", type=int, help="so many tokens, in place of a size and frames")
    p.add_argument("--layers", type=int, help="so many of its layers, where all would take long: every time shrinks with them")
    p.add_argument("--text", type=int, help="rows of text: 512 for Wan, 1554 for Cosmos3")
    p.add_argument("--recipe", default="1gpu", help="as in run.py")
    p.add_argument("--as-rank-of", metavar="RECIPE", help="one process as the first rank of so many; what it would get from "
                   "the others is copied from its own memory")  # fmt: skip
    p.add_argument("--calibrate", type=Path, metavar="FILE", help="measure nanovgen.plan's constants; nothing else")
    p.add_argument("--attention", default="auto", help="as in run.py")
    p.add_argument("--quant", default="none", choices=["none", "FP8"], help="as in run.py")
    p.add_argument("--vae-dtype", default="auto", choices=["auto", "float32", "bfloat16"], help="of the decode, as in run.py")
    p.add_argument("--compile", action=argparse.BooleanOptionalAction, help="as in run.py")
    p.add_argument("--steps", type=int, default=3, help="timed turns")
    p.add_argument("--warmup", type=int, default=1, help="turns before them")
    p.add_argument("--denoise", action=argparse.BooleanOptionalAction, default=True, help="time the denoiser")
    p.add_argument("--sweep", nargs="*", metavar="NAME", help="in place of --recipe: every recipe that fits the ranks, or those "
                   "that its table calls so")  # fmt: skip
    p.add_argument("--peer", choices=["diffusers"], help="another implementation, on the same weights, in the same process")
    p.add_argument("--profile", action="store_true", help="one more turn under torch.profiler: how long the GPU was idle")
    p.add_argument("--noise", action="store_true", help="how far a forward is from float32's, eager, compiled and with the "
                   "keys in reverse order")  # fmt: skip
    p.add_argument("--vae", action="store_true", help="time the decode")
    p.add_argument("--chunks", type=int, nargs="+", default=[1, 2, 4], help="latent frames a chunk of the decode; 0: all")
    p.add_argument("--exchange", action="store_true", help="time the exchange of q, k, v at the article's shape")
    p.add_argument("--exchange-tokens", type=int, default=ARTICLE["tokens"], help="its tokens, over all ranks")
    p.add_argument("--ranks", type=int, default=1, help="fork so many CPU ranks")
    p.add_argument("--device", default="auto", help="as in run.py")
    p.add_argument("--out", type=Path, help="JSON of all of it")
    return p.parse_args(arguments)


def make_bench(args: argparse.Namespace) -> Bench:
    preset, recipe = PRESETS[args.model], read_recipe(args.as_rank_of or args.recipe)
    device = "cpu" if args.ranks > 1 and args.device == "auto" else args.device
    own = args.attention == "auto" and not args.as_rank_of  # a rack's kernel need not be here
    chosen = recipe if own else replace(recipe, attention_config=AttentionConfig(args.attention))
    device, dtype, kernel, _ = place(Request(device=device), chosen, args.ranks > 1)
    width, height = parse_size(args.size or preset.size)
    check_frames(args.frames)
    pixels = preset.latent[1]
    latent = ((args.frames - 1) // 4 + 1, height // pixels, width // pixels) if args.tokens is None else (1, 2, 2 * args.tokens)
    for name, least in (("steps", 1), ("warmup", 0), ("frames", 1), ("ranks", 1), ("tokens", 1), ("layers", 1)):
        if (value := getattr(args, name)) is not None and value < least:
            raise ValueError(f"{name} is {value}; it must be at least {least}")
    enable = recipe.torch_compile_config.enable if args.compile is None else args.compile
    text = args.text or (512 if preset.family == "wan" else 1554)
    config = CONFIGS[preset.family](**preset.transformer)
    if args.layers is not None:
        config = replace(config, **{"num_layers" if preset.family == "wan" else "num_hidden_layers": args.layers})
    fp8.check(args.quant, 1, device, dtype)
    if args.peer and args.quant != "none":
        raise ValueError("--peer runs on our very weights, and --quant rounds them; leave one out")
    return Bench(preset, config, latent, text, device, dtype, kernel, enable, args.steps, args.warmup, args.quant,
                 find_vae_dtype(args.vae_dtype, device))  # fmt: skip


def swept(world: int, names: list[str]) -> list[ParallelConfig]:
    """A sweep's recipes, in the order of their names where those are given."""
    found = {plan.name_of(p): p for p in choose.recipes(world)}
    if unknown := [name for name in names if name not in found]:
        raise ValueError(f"--sweep {unknown[0]} is none of {world} ranks' recipes: {', '.join(found)}")
    return [found[name] for name in names or found]


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0 done, 2 refused."""
    args, launched = parse(arguments), int(os.environ.get("WORLD_SIZE", 1))
    try:
        bench, world = make_bench(args), max(args.ranks, launched)
        sweeps = args.sweep is not None
        chosen = swept(world, args.sweep) if sweeps else [read_recipe(args.as_rank_of or args.recipe).parallel_config]
        if args.noise and (args.quant != "none" or sweeps or world > 1):
            raise ValueError("--noise is one rank's, of its own rounding; leave --quant, --sweep and ranks out")
        if args.as_rank_of:
            if world > 1 or sweeps or args.vae or args.exchange or args.calibrate:
                raise ValueError("--as-rank-of is one process with one recipe's denoiser; leave ranks and other parts out")
            world = chosen[0].world
        if args.denoise and not (sweeps or args.calibrate):
            plan.check(chosen[0], world, bench.work)
    except ValueError as error:
        print(f"nanovgen.bench: {error}", file=sys.stderr)
        return 2
    run = partial(run_rank, args, bench, chosen, world)
    if args.ranks > 1:
        return launch.run_ranks(args.ranks, run)
    run()
    mesh.close_world()
    return 0


def run_rank(args: argparse.Namespace, bench: Bench, chosen: list[ParallelConfig], world: int) -> None:
    """All that was asked for, on this rank; rank 0 prints and writes."""
    if args.as_rank_of:
        as_rank.open_world(world)
    elif world > 1:
        bench = replace(bench, device=mesh.open_world(bench.device))
    first = int(os.environ.get("RANK", 0)) == 0
    say = partial(print, flush=True) if first else lambda *_: None
    torch.backends.cudnn.allow_tf32 = False  # as generate.py decodes
    with torch.inference_mode():
        if args.calibrate:
            return calibrate.write(args.calibrate, bench, world, say)
        report = measure(args, bench, chosen, world, say)
    if first and args.out:
        args.out.write_text(json.dumps(report, indent=1) + "\n")


def measure(args: argparse.Namespace, bench: Bench, chosen: list[ParallelConfig], world: int, say: Callable) -> dict:
    n, gpu = PEAK[bench.device.type], bench.device.type == "cuda"
    a = torch.randn(n, n, device=bench.device, dtype=bench.dtype)
    cool, peak = (2 * n**3 / alone(lambda: a @ a, bench.device, 10, hot) / 1e12 for hot in (0, 1))
    card = bench.card
    report = {"torch": torch.__version__, "device": card, "world": world, "peak_tflops": peak, "cool_tflops": cool,
              "argv": sys.argv[1:], "rows": []}  # fmt: skip
    ranks = f"as one of {world} ranks" if args.as_rank_of else f"{world} ranks"
    say(f"device    {card}, {ranks}, torch {torch.__version__}; a {n}^3 product of {bench.dtype} runs at {cool:.1f} "
        f"TFLOP/s, and at {peak:.1f} after a second of it")  # fmt: skip
    if args.denoise:
        work, way = bench.work, "compiled" if bench.compile else "eager"
        say(f"model     {args.model}, {work.layers} layers, latents {bench.latent}, {work.tokens} tokens, {bench.text} rows "
            f"of text; kernel {bench.kernel}, {way}")  # fmt: skip
        attention.prove(attention.KERNELS[bench.kernel], bench.device, bench.dtype, bench.work.head_dim)
        whole = make_model(bench) if any(p.tp_size == 1 for p in chosen) else None
        if (bench.kernel, bench.quant) != (bench.kernel.removesuffix("-fp8"), "none"):
            report["fp8_error"] = fp8_error(bench, whole)
            say(f"fp8       the forward is off by {report['fp8_error']:.2e} of that without float8")
        if args.noise:
            report["noise"] = noise(bench, whole)
            for way, errors in report["noise"].items():
                say(f"noise     {way}: " + ", ".join(f"{error:.2e} from {what}" for what, error in errors.items()))
        for parallel in chosen:
            try:
                plan.check(parallel, world, bench.work)
            except ValueError as error:
                say(f"{plan.name_of(parallel)}: {error}")
                continue
            report["rows"].append(row := bench_recipe(bench, parallel, whole, peak, args.profile))
            describe(plan.name_of(parallel), row, say)
            gc.collect()
        if args.peer and world == 1:
            report["peer"] = peer = peers.denoiser(bench, whole)
            say(f"diffusers {peer if isinstance(peer, str) else ', '.join(f'{k} {v}' for k, v in peer.items())}")
        whole = None
        gc.collect()
    if args.vae:
        report["vae"], report["vae_peer"] = bench_vae(bench, args.chunks, world, bool(args.peer), say)
    if args.exchange:
        shape = ARTICLE | {"tokens": args.exchange_tokens}
        report["exchange"] = bench_exchange(bench.device, bench.dtype, world, shape, 50 if gpu else bench.steps)
        for way, times in report["exchange"].items():
            say(f"exchange  {way}: " + ", ".join(f"{what} {seconds * 1e6:.0f} us" for what, seconds in times.items()))
    return report


def fp8_error(bench: Bench, model: nn.Module) -> float:
    """Of a forward as asked for, from one with the same weights unrounded and the kernel without float8."""
    exact = replace(bench, quant="none", kernel=bench.kernel.removesuffix("-fp8"))
    return difference(forward(bench, model), forward(exact, model if bench.quant == "none" else make_model(exact)))


def noise(bench: Bench, model: nn.Module) -> dict[str, dict[str, float]]:
    """How far a forward by the same weights is from float32's, from eager's and from its own second run."""

    def run(way: Bench) -> tuple[Tensor, Tensor]:
        made = make_model(way)
        made.load_state_dict(model.state_dict())
        return forward(way, made).float(), forward(way, made).float()

    eager = replace(bench, compile=False)
    ways = {"eager": eager, "keys in reverse": replace(eager, kernel="reversed")} | ({"compiled": bench} if bench.compile else {})
    exact, _ = run(replace(eager, dtype=torch.float32, kernel=attention.default_kernel(bench.device, torch.float32)))
    found = {name: run(way) for name, way in ways.items()}
    return {name: {"float32": difference(first, exact), "eager": difference(first, found["eager"][0]),
                   "its second run": difference(first, second)} for name, (first, second) in found.items()}  # fmt: skip


def difference(found: Tensor, wanted: Tensor) -> float:
    """Relative."""
    return ((found - wanted).norm() / wanted.norm()).item()


def forward(bench: Bench, model: nn.Module) -> Tensor:
    attend = scheme(bench, ParallelConfig(), Mesh())
    return model(latents(bench), torch.tensor([500], device=bench.device), make_context(bench, model, 1), attend)


def describe(name: str, row: dict, say: Callable) -> None:
    """A recipe's figures in a few lines."""
    late = "" if row["graphs_in_turns"] is None else f"; {row['graphs_in_turns']} graphs compiled in timed turns"
    memory = f"; peak {row['peak_bytes'] / 1e9:.1f} GB" if row["peak_bytes"] else ""
    say(f"\n{name}: turn {row['seconds']['turn']:.4f} s, step of two streams {row['step_seconds']:.4f} s, "
        f"{row['tflops_a_rank']:.3g} TFLOP/s a rank ({row['of_peak']:.1%} of the product's){late}{memory}")  # fmt: skip
    say("  stages  " + ", ".join(f"{k} {v:.4f}" for k, v in row["seconds"].items() if k != "turn") + " s")
    say(f"  floor   {sum(row['floor'].values()):.4f} s: " + ", ".join(f"{k} {v:.4f}" for k, v in row["floor"].items())
        + f"; the turn is {row['turn_to_floor']:.3f} times that")  # fmt: skip
    if terms := row["predicted"]:
        say(f"  cost.py {sum(terms.values()):.4f} s: " + ", ".join(f"{k} {v:.4f}" for k, v in terms.items()))
    say("  flop    " + ", ".join(f"{k} {v:.4g}" for k, v in row["flops"].items()) + " a forward")
    say("  sent    " + (", ".join(f"{k} {v / 1e6:.3f} MB" for k, v in row["bytes_sent"].items() if v) or "nothing"))


if __name__ == "__main__":
    sys.exit(main())
