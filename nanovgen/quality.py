"""How good: two files frame by frame, or every recipe's clips against one rank's, beside the noise floor.

    python -m nanovgen.quality a.mp4 b.mp4                                   # b is the reference; or .safetensors, see metrics.py
    python -m nanovgen.quality --model tiny-wan --recipes 2gpu 4gpu nvl72    # forked CPU ranks, as many as each recipe has
    python -m nanovgen.quality --model tiny-wan --ranks 2 4                  # every recipe of 2 ranks, and of 4
    torchrun --standalone --nproc-per-node 2 -m nanovgen.quality --dtypes bfloat16 --size 832x480 \\
        --model Wan-AI/Wan2.1-T2V-1.3B-Diffusers --prompts "two cats box on a stage"        # every recipe of 2 GPUs

A clip is compared as latents, and as pixels before H.264. The truth is one rank in float32 (where it is not among --dtypes, one
rank). The noise floor comes first: one rank, the same again, and two that add in another order (clips.py's FLOOR). A clip's floor
is the distance of the farthest of them from the truth: by less, nothing that is right can be told from it. How much a prompt
magnifies rounding differs tenfold, so a recipe's errors are counted in floors, clip by clip; their geometric mean may be 1.1,
in latents and in pixels (of two equally right ways one is as often twice as far off as half as far: a plain mean would say 1.25).
In float32 1e-5, by which right orders may differ, is right in any case, and pixels are held to one level of 255 (where a value
lies on the edge between two) or to what the floor's are off by: too few are off for a mean.
"""

import argparse
import json
import math
import os
import statistics
import sys
import tempfile
from pathlib import Path

import torch

from nanovgen import clips, metrics
from nanovgen.clips import FLOOR, REFERENCE, Jobs, Variant
from nanovgen.metrics import Perceptual, summary
from nanovgen.recipe import ParallelConfig, Request

ORDERS = 1e-5  # relative, float32: by which two right orders of summing may differ
SLACK = 1.1
PROMPTS = (  # of the tiny models' world
    "a red circle moves right on a black background", "a big blue star spins on a white background",
    "a green square bounces on a navy background", "a small yellow triangle grows on a grey background",
    "a pink circle orbits on a beige background",
    "on the left a cyan square moves up and on the right an orange star stays still on a black background",
)  # fmt: skip


# The table


Kind = tuple[Variant, str]  # how, and in which dtype


def measure(a: Kind, b: Kind, folder: Path, count: int, lpips: Perceptual | None) -> dict:
    """a's clips against b's: of all frames together and, under `each`, by clip the latents' error and the pixels', in levels."""
    found, each = {}, []
    for i in range(count):
        pair = [metrics.read(clips.clip_path(folder, *which, i)) for which in (a, b)]
        one = metrics.compare(*pair, lpips)
        each.append([summary(one["latents"])["error"], statistics.mean(one["pixels"]["mse"]) ** 0.5])
        for kind, frames in one.items():
            for name, values in frames.items():
                found.setdefault(kind, {}).setdefault(name, []).extend(values)
    return {kind: summary(frames) for kind, frames in found.items()} | {"each": each}


def ratio(error: float, floor: float) -> float:
    return error / floor if floor else math.inf if error else 0.0


def typical(ratios: tuple[float, ...]) -> float:
    """Their geometric mean. Less than a quarter counts as one: a clip that comes out to the bit does not excuse another."""
    return statistics.geometric_mean(max(r, 0.25) for r in ratios) if any(ratios) else 0.0


def judge(rows: list[dict], dtype: str) -> dict:
    """Adds to each row its errors in floors, latents' and pixels', and whether they are within the limits; returns the floors."""
    ones, exact = [row["truth"] for row in rows if row["floor"]], dtype == "float32"
    floors = [[max(errors) for errors in zip(*clip, strict=True)] for clip in zip(*(one["each"] for one in ones), strict=True)]
    most = max(1, *(one["pixels"]["most"] for one in ones))
    for row in rows:
        each = row["truth"]["each"]
        ratios = [[ratio(*pair) for pair in zip(*clip, strict=True)] for clip in zip(each, floors, strict=True)]
        latents, pixels = row["of_floor"] = [typical(column) for column in zip(*ratios, strict=True)]
        right = exact and max(error for error, _ in each) <= ORDERS
        row["within"] = (right or latents <= SLACK) and (row["truth"]["pixels"]["most"] <= most if exact else pixels <= SLACK)
    return {"dtype": dtype, "floors": floors, "rows": rows}


def why(parallel: ParallelConfig) -> str:
    """What may make the bits of a recipe's latents differ from one rank's."""
    if parallel.tp_size > 1:
        return "partial sums of a matrix product are rounded, then added"
    if parallel.ring_size > 1 or parallel.attn2d_size[1] > 1 or parallel.attn2d_merge == "overlapped":
        return "partial results are merged"
    return "fewer rows a rank: the matrix library may sum in another order"


STRIPS = "a narrower strip: the convolution's library may sum in another order"  # the same of pixels, and of a parallel VAE


def explain(variant: Variant, alone: dict, same_kernel: bool = True) -> str:
    """Why bits are not one rank's; empty where all are."""
    if not alone["latents"]["error"] and not alone["pixels"]["differ"]:
        return ""
    if variant in FLOOR:
        return "sums in another order"
    if not same_kernel or variant.recipe.torch_compile_config.enable:
        return "compiled blocks" if same_kernel else "another attention kernel"
    return why(variant.recipe.parallel_config) if alone["latents"]["error"] else STRIPS


def tables(found: Jobs, folder: Path, count: int, lpips: Perceptual | None) -> list[dict]:
    """One a dtype."""
    made = []
    for dtype in dict.fromkeys(dtype for _, dtype in found):
        rows, alone_is = [], (REFERENCE, dtype)
        truth_is = (REFERENCE, "float32") if (REFERENCE, "float32") in found else alone_is
        for v in [v for v, d in found if d == dtype]:
            alone = measure((v, dtype), alone_is, folder, count, lpips)
            truth = alone if truth_is == alone_is else measure((v, dtype), truth_is, folder, count, None)
            reason = explain(v, alone, found[v, dtype].kernel == found[alone_is].kernel)
            rows.append({"name": v.name, "ranks": v.world, "floor": v in (REFERENCE, *FLOOR), "alone": alone, "truth": truth,
                         "why": reason})  # fmt: skip
        made.append(judge(rows, dtype) | {"truth": truth_is[1]})
    return made


def show_table(table: dict) -> None:
    """As Markdown."""
    far, perceptual = table["truth"] != table["dtype"], "lpips" in table["rows"][0]["alone"]["pixels"]
    exact = table["dtype"] == "float32"  # whose pixels are not held to floors
    floors, levels = zip(*table["floors"], strict=True)
    print(f"\n{table['dtype']}: floors {min(floors):.1e} .. {max(floors):.1e} in latents, "
          f"{min(levels):.1e} .. {max(levels):.1e} levels in pixels, by clip\n")  # fmt: skip
    head = ["recipe", "ranks", "latents off by", *([f"from {table['truth']}", "PSNR from there"] if far else []),
            "floors" if exact else "floors: latents, pixels", "PSNR", "SSIM", "cosine", *(["LPIPS"] if perceptual else []),
            "values that differ", "why"]  # fmt: skip
    print(f"| {' | '.join(head)} |\n|{'---|' * len(head)}")
    for row in table["rows"]:
        latents, p, truth = row["alone"]["latents"], row["alone"]["pixels"], row["truth"]
        there = [f"{truth['latents']['error']:.2e}", f"{truth['pixels']['psnr']:.2f}"] if far else []
        differ = f"{p['differ']} of {p['of']}, by {p['most']:.0f} at most" if p["differ"] else "none"
        in_floors = ", ".join(f"{times:.2f}" for times in row["of_floor"][: 1 if exact else 2])
        cells = [row["name"], str(row["ranks"]), f"{latents['error']:.2e}", *there, in_floors, f"{p['psnr']:.2f}",
                 f"{p['ssim']:.6f}", f"{p['cosine']:.7f}", *([f"{p['lpips']:.6f}"] if perceptual else []), differ,
                 ("" if row["within"] else "BEYOND THE LIMIT; ") + row["why"]]  # fmt: skip
        print(f"| {' | '.join(cells)} |")


def report_table(args: argparse.Namespace, found: Jobs, refused: dict[str, str], folder: Path) -> dict:
    job, lpips = next(iter(found.values())), metrics.open_lpips()
    card = torch.cuda.get_device_name() if job.device.type == "cuda" else "CPU"
    head = (f"{args.model}, {job.request.size}, {args.frames} frames, {args.steps} steps, {len(args.prompts)} prompts, seed "
            f"{args.seed}; {card}, torch {torch.__version__}")  # fmt: skip
    print(head)
    made = tables(found, folder, len(args.prompts), None if isinstance(lpips, str) else lpips)
    for table in made:
        show_table(table)
    print("", *[f"{name}: {reason}" for name, reason in refused.items()], *([lpips] if isinstance(lpips, str) else []), sep="\n")
    return {"head": head, "prompts": args.prompts, "tables": made, "refused": refused}


# Two files


def show_files(paths: list[str]) -> dict:
    """Frame by frame, and all together. Raises ValueError for files that cannot be compared."""
    a, b = (metrics.read(path) for path in paths)
    metrics.check(a, b)
    lpips = metrics.open_lpips() if None not in (a.pixels, b.pixels) else None
    found = metrics.compare(a, b, None if isinstance(lpips, str) else lpips)
    for kind, frames in found.items():
        columns = [name for name in ("error", "psnr", "ssim", "cosine", "lpips", "differ", "most") if name in summary(frames)]
        print(f"{kind:<8}" + "".join(f"{name:>14}" for name in columns))
        count = len(frames["cosine"])
        each = [summary({name: values[i : i + 1] for name, values in frames.items()}) for i in range(count)]
        for label, row in [*enumerate(each), ("all", summary(frames))]:
            print(f"{label:<8}" + "".join(f"{row[name]:>14.7g}" for name in columns))
    if isinstance(lpips, str):
        print(lpips)
    return {kind: {"frames": frames, "all": summary(frames)} for kind, frames in found.items()}


# The command line


def plain(x: object) -> object:
    """For JSON, which has no infinity: a PSNR that is infinite is null."""
    if isinstance(x, dict):
        return {name: plain(value) for name, value in x.items()}
    if isinstance(x, list):
        return [plain(value) for value in x]
    return None if x == math.inf else x


def parse(arguments: list[str] | None) -> argparse.Namespace:
    raw = argparse.RawDescriptionHelpFormatter
    p = argparse.ArgumentParser(prog="nanovgen.quality", description=__doc__, formatter_class=raw)
    p.add_argument("files", nargs="*", help="two files to compare, the second the reference; none: the table")
    p.add_argument("--model", default="tiny-wan", help="as in run.py")
    p.add_argument("--recipes", nargs="+", default=[], help="as in run.py, several")
    p.add_argument("--ranks", type=int, nargs="+", default=[], help="fork so many CPU ranks: every recipe of each number")
    p.add_argument("--prompts", nargs="+", default=list(PROMPTS), help="what the clips show (six of the tiny models' world)")
    p.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"], choices=["float32", "bfloat16"])
    p.add_argument("--size", help="WIDTHxHEIGHT (the model's)")
    p.add_argument("--frames", type=int, default=9, help="4k+1")
    p.add_argument("--steps", type=int, default=8, help="denoising steps")
    p.add_argument("--seed", type=int, default=42, help="of the noise of every clip")
    p.add_argument("--device", default="auto", help="as in run.py")
    p.add_argument("--keep", type=Path, help="a folder for the clips: latents and pixels, one safetensors file each")
    p.add_argument("--out", type=Path, help="JSON of all of it (a PSNR that is infinite is null)")
    return p.parse_args(arguments)


def check(args: argparse.Namespace, launched: int) -> None:
    """Raises ValueError for flags that do not go together."""
    if len(args.files) not in (0, 2):
        raise ValueError(f"files given: {len(args.files)}; two are compared")
    asked = [name for name, value in vars(parse([])).items() if name not in ("files", "out") and getattr(args, name) != value]
    if args.files and asked:
        raise ValueError(f"two files are compared as they are; leave --{' --'.join(asked)} out")
    if launched > 1 and args.ranks:
        raise ValueError(f"--ranks forks ranks of its own, and torchrun has started {launched}; leave it out")
    if low := [n for n in args.ranks if n < 1]:
        raise ValueError(f"--ranks {low[0]}: give 1 or more")
    if not all(prompt.strip() for prompt in args.prompts):
        raise ValueError("a prompt is empty; say what each clip shows")


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0 all within the limit, 1 not so (or failed while running), 2 refused."""
    args, launched, rank = parse(arguments), int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    try:
        check(args, launched)
        if args.files:
            report = show_files(args.files)
        else:
            chosen = clips.choose(args.recipes, args.ranks or ([] if args.recipes else [launched]))
            asked = {name: getattr(args, name) for name in ("model", "size", "frames", "steps", "seed", "device")}
            out = Path(tempfile.gettempdir()) / "quality.mp4"  # checked as any, and not written
            request = Request(prompt=args.prompts[0], out=str(out), **asked)
            found, refused = clips.prepare(request, args.dtypes, chosen, launched)
    except ValueError as error:
        if rank == 0:
            print(f"nanovgen.quality: {error}", file=sys.stderr)
        return 2
    status = 0
    if not args.files:
        with tempfile.TemporaryDirectory() as temporary:
            folder = args.keep or Path(temporary)
            folder.mkdir(parents=True, exist_ok=True)
            status = clips.make_all(found, args.prompts, folder, launched)
            if status or rank:
                return status
            report = report_table(args, found, refused, folder)
        status = int(not all(row["within"] for table in report["tables"] for row in table["rows"]))
    if args.out:
        args.out.write_text(json.dumps(plain(report), indent=1, allow_nan=False) + "\n")
    return status


if __name__ == "__main__":
    sys.exit(main())
