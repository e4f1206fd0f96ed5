"""Make a video from text (or an image and text) with Wan 2.1, Wan 2.2 or the tiny checkpoint in this repository.

    python run.py "a red circle moves right on a black background"                       # seconds, on a laptop
    python run.py "a red circle moves right on a black background" --ranks 72 --recipe nvl72    # the rack's recipe, forked
    python run.py "two cats box on a stage" --model Wan-AI/Wan2.2-T2V-A14B-Diffusers            # one GPU
    torchrun --standalone --nproc-per-node 8 run.py "two cats box on a stage" --recipe 8gpu \\
        --model Wan-AI/Wan2.2-T2V-A14B-Diffusers                                                # one GPU a rank
    python run.py --model Wan-AI/Wan2.2-T2V-A14B-Diffusers --dry-run "two cats"           # the plan and its needs only
    python run.py --latents clip.latents.safetensors --out clip.mp4                       # decode saved latents again

Beside the video stand its latents and a JSON with the plan, the timings and the whole request.
"""

import argparse
import os
import sys
from dataclasses import fields, replace
from functools import partial

from nanovgen import choose, generate, launch, mesh, plan, summary, video
from nanovgen import job as jobs
from nanovgen.recipe import AttentionConfig, QuantConfig, Recipe, Request, TorchCompileConfig, read_recipe


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Flags are the fields of Request."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = {"int": int, "float": float, "str": str, "bool": bool}
    for f in fields(Request):
        kind = kinds[str(getattr(f.type, "__name__", f.type)).split(" |")[0]]
        text = f.metadata["help"].replace("%", "%%") + (f" (default {f.default})" if f.default not in (None, False) else "")
        if f.name == "prompt":
            parser.add_argument("prompt", nargs="?", help=text)
        elif kind is bool:
            parser.add_argument(f"--{f.name}", action="store_true", help=text)
        else:
            parser.add_argument(f"--{f.name.replace('_', '-')}", type=kind, default=f.default, help=text, metavar=f.name.upper())
    parser.add_argument("--recipe", help="a YAML file, or the name of one in nanovgen/recipes (not given: the planner's choice "
                        "for the ranks and the memory there are)")  # fmt: skip
    parser.add_argument("--attention", help="attention kernel, over the recipe's: auto or one of attention.py's")
    parser.add_argument(
        "--compile", action=argparse.BooleanOptionalAction, help="torch.compile, over the recipe's: block by block"
    )
    parser.add_argument("--quant", help="the blocks' matrices, over the recipe's: none, or FP8 (faster, and a few per cent off)")
    parser.add_argument("--ranks", type=int, help="fork so many CPU ranks here (torchrun's own ranks need no flag)")
    parser.add_argument("--dry-run", action="store_true", help="print the plan and stop; known models need no files for it")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0 done, 1 failed while running, 2 refused before any weight was read, 130 interrupted."""
    args = parse(arguments)
    rank, launched = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))  # torchrun's
    try:
        recipe = Recipe() if args.recipe is None else read_recipe(args.recipe)
        if args.attention:
            recipe = replace(recipe, attention_config=AttentionConfig(args.attention))
        if args.compile is not None:
            recipe = replace(recipe, torch_compile_config=TorchCompileConfig(args.compile))
        if args.quant:
            recipe = replace(recipe, quant_config=QuantConfig(args.quant))
        if args.ranks is not None and (args.ranks < 1 or launched > 1):
            raise ValueError(f"--ranks {args.ranks} forks ranks of its own: give 1 or more, and not under torchrun")
        request = Request(**{f.name: getattr(args, f.name) for f in fields(Request)})
        if args.ranks is not None and request.device == "auto":
            request = replace(request, device="cpu")
        if request.latents:
            request = generate.resume(request)
        chosen = args.recipe is None and not request.latents  # a decode alone takes one rank, or the recipe's
        world = args.ranks or (recipe.parallel_config.world if args.dry_run and args.recipe else launched)
        job = jobs.prepare(request, recipe, args.dry_run, 1 if chosen else world, forked=args.ranks is not None)
        job, choice = choose.choose(job, world, args.dry_run) if chosen else (job, None)
        lines = summary.describe(job) | ({"chosen": choice} if choice else {})
    except ValueError as error:
        if rank == 0:
            print(f"run.py: {error}", file=sys.stderr)
        return 2
    if rank == 0:
        for name, line in lines.items():
            print(f"{name:<9} {line}", flush=True)
    if args.dry_run:
        return 0
    if args.ranks is not None and args.ranks > 1:
        status = launch.run_ranks(args.ranks, partial(run_rank, job, args.ranks))
        if status:
            video.remove_parts(job.out)
        return status
    try:
        run_rank(job, launched)
    except (RuntimeError, FloatingPointError, OSError) as error:
        print(f"run.py: {f'rank {rank}: ' if launched > 1 else ''}{error}", file=sys.stderr, flush=True)
        if launched > 1:
            os._exit(1)  # at once: leaving the world in order would wait for peers that wait for us
        return 1
    except KeyboardInterrupt as error:
        print(f"run.py: {str(error) or 'interrupted before the latents were made; nothing was written'}", file=sys.stderr)
        return 130
    mesh.close_world()
    return 0


def run_rank(job: "jobs.Job", world: int) -> None:
    """One rank's part, from joining the others to the table that rank 0 prints."""
    if world > 1:
        parallel = job.recipe.parallel_config
        device = mesh.open_world(job.device)
        job = replace(job, device=device, mesh=mesh.open_mesh(device, plan.degrees(parallel), parallel.parallel_vae_size))
    report = generate.generate(job)
    if job.mesh.world.rank > 0:
        return
    print(f"\n{'stage':<9} {'seconds':>8} {'peak GB':>8}")
    for name, row in report["stages"].items():
        print(f"{name:<9} {row['seconds']:8.2f} {row['peak_bytes'] / 1e9:8.2f}")
    if report["graphs_in_steps"] is not None:
        print(f"compiled  {report['graphs_in_steps']} graphs in the timed steps")
    sent = ", ".join(f"{axis} {amount / 1e6:.3f} MB" for axis, amount in report["bytes_sent"].items())
    print(f"{'total':<9} {report['seconds']:8.2f}\nsent      {sent or 'nothing: one rank'}")
    print(f"seed      {job.request.seed}\nvideo     {report['output']}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
