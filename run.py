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
from dataclasses import replace
from functools import partial

from nanovgen import choose, generate, launch, mesh, plan, summary, video
from nanovgen import job as jobs
from nanovgen.recipe import add_flags, from_flags


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Flags are the fields of Request."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_flags(parser)
    parser.add_argument("--dry-run", action="store_true", help="print the plan and stop; known models need no files for it")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0 done, 1 failed while running, 2 refused before any weight was read, 130 interrupted."""
    args = parse(arguments)
    rank, launched = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))  # torchrun's
    try:
        request, recipe = from_flags(args, launched)
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
