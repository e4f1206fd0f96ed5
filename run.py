"""Make a video from text (or an image and text) with Wan 2.1, Wan 2.2 or the tiny checkpoint in this repository.

    python run.py "a red circle moves right on a black background"                       # seconds, on a laptop
    python run.py "two cats box on a stage" --model Wan-AI/Wan2.2-T2V-A14B-Diffusers      # one GPU of 80 GB or more
    python run.py --model Wan-AI/Wan2.2-T2V-A14B-Diffusers --dry-run "two cats"           # the plan and its needs only
    python run.py --latents clip.latents.safetensors --out clip.mp4                       # decode saved latents again

Beside the video stand its latents and a JSON with the plan, the timings and the whole request.
"""

import argparse
import sys
from dataclasses import fields, replace

from nanovgen.recipe import AttentionConfig, Recipe, Request, read_recipe


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
    parser.add_argument("--recipe", default="1gpu", help="a YAML file, or the name of one in nanovgen/recipes (default 1gpu)")
    parser.add_argument("--attention", help="attention kernel, over the recipe's: auto, cpu, flash, cudnn, efficient")
    parser.add_argument("--dry-run", action="store_true", help="print the plan and stop; known models need no files for it")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0 done, 1 failed while running, 2 refused before any weight was read, 130 interrupted."""
    args = parse(arguments)
    try:
        recipe: Recipe = read_recipe(args.recipe)
        if args.attention:
            recipe = replace(recipe, attention_config=AttentionConfig(args.attention))
        request = Request(**{f.name: getattr(args, f.name) for f in fields(Request)})
        from nanovgen import generate, plan  # torch takes two seconds to import; a misspelt recipe need not wait

        if request.latents:
            request = generate.resume(request)
        job = plan.prepare(request, recipe, args.dry_run)
        lines = plan.describe(job)
    except ValueError as error:
        print(f"run.py: {error}", file=sys.stderr)
        return 2
    for name, line in lines.items():
        print(f"{name:<9} {line}")
    if args.dry_run:
        return 0
    try:
        report = generate.generate(job)
    except (RuntimeError, FloatingPointError, OSError) as error:
        print(f"run.py: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt as error:
        print(f"run.py: {str(error) or 'interrupted before the latents were made; nothing was written'}", file=sys.stderr)
        return 130
    print(f"\n{'stage':<9} {'seconds':>8} {'peak GB':>8}")
    for name, row in report["stages"].items():
        print(f"{name:<9} {row['seconds']:8.2f} {row['peak_bytes'] / 1e9:8.2f}")
    print(f"{'total':<9} {report['seconds']:8.2f}\nsent      nothing: one rank")
    print(f"seed      {request.seed}\nvideo     {report['output']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
