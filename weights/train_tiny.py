"""Train weights/tiny-wan or weights/tiny-cosmos from nothing on one GPU: a Wan 2.2 or a Cosmos3 in small, whose world is
clip_world.py.

    python weights/train_tiny.py --out /tmp/tiny-wan                       # one H200: see README.md for minutes, scores
    python weights/train_tiny.py --model tiny-cosmos --out /tmp/tiny-cosmos
    python weights/train_tiny.py --out /tmp/toy --minutes 0.3 0.3 0.3 --clips 64 --batch 4 --vae-batch 2    # CPU smoke test

Three stages, each in its file. "vae": the VAE learns on crops that follow a shape. "decoder": its encoder is frozen, and the
decoder learns on whole clips (train_vae.py). "dit": the text model and the denoiser learn on the latents (train_wan.py,
train_cosmos.py). The last two need only the first, so they may run at once on two cards with one --out (`--stages decoder`,
`--stages dit`): each writes the files that are its own.

All modules are nanovgen's, run in bf16 as they will be used; fp32 master weights take the gradient steps. Budgets are
minutes, and the learning rate follows the share of the budget that is spent.
"""

import argparse
import json
import time
from pathlib import Path

import tiny_layout
import torch
import train_cosmos
import train_vae
import train_wan

from nanovgen.vae import VAE

STAGES = ("vae", "decoder", "dit")
DEFAULTS = {  # minutes of the stages; clips a step of the last (of tiny-wan: and expert), and how many it learns on
    "tiny-wan": dict(minutes=(5.5, 6.5, 11.5), batch=160, clips=20480),
    "tiny-cosmos": dict(minutes=(5.5, 4.0, 8.3), batch=512, clips=81920),
}


def fit_dit(vae: VAE, args: argparse.Namespace, minutes: float) -> None:
    if args.model == "tiny-wan":
        text, high, low = train_wan.fit_experts(vae, args, minutes)
        tiny_layout.save_experts(text, high, low, vae.config, args.out)
    else:
        (text, video), tokenizer = train_cosmos.fit_towers(vae, args, minutes)
        tiny_layout.save_towers(text, video, tokenizer, vae.config, args.out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny-wan", choices=list(DEFAULTS))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--stages", nargs="+", default=list(STAGES), choices=STAGES)
    parser.add_argument("--minutes", nargs=3, type=float, help=f"of {', '.join(STAGES)}; {DEFAULTS}")
    parser.add_argument("--clips", type=int, help="clips encoded once and kept on the device")
    parser.add_argument("--batch", type=int, help="clips a step of the last stage (tiny-wan: and expert)")
    parser.add_argument("--vae-batch", type=int, default=32, help="crops a step")
    parser.add_argument("--lr-vae", type=float, default=2e-3)
    parser.add_argument("--lr-dit", type=float, default=2e-3)
    parser.add_argument("--spins", type=int, default=3, help="tiny-cosmos: spins for one of each other motion")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=torch.cuda.is_available())
    parser.add_argument("--resume", action="store_true", help="tiny-cosmos: stage dit goes on from the towers in --out")
    args = parser.parse_args()
    if args.resume and (args.model, args.stages) != ("tiny-cosmos", ["dit"]):
        parser.error("--resume goes with --model tiny-cosmos --stages dit")
    for name, value in DEFAULTS[args.model].items():
        setattr(args, name, getattr(args, name) or value)
    torch.manual_seed(args.seed)
    began, minutes = time.time(), dict(zip(STAGES, args.minutes, strict=True))
    if "vae" in args.stages:
        config = tiny_layout.VAE_CONFIG if args.model == "tiny-wan" else tiny_layout.COSMOS_VAE_CONFIG
        vae = train_vae.start_vae(config, args.device)
        train_vae.fit_vae(vae, args, minutes["vae"], whole=False)
        tiny_layout.save_vae(vae, args.out)
    if "decoder" in args.stages:
        vae = tiny_layout.load_vae(args.out, args.device)
        train_vae.fit_vae(vae, args, minutes["decoder"], whole=True)
        tiny_layout.save_weights(args.out / "vae" / "diffusion_pytorch_model.safetensors", vae)
    if "dit" in args.stages:
        vae = tiny_layout.load_vae(args.out, args.device)
        fit_dit(vae, args, minutes["dit"])
    print(json.dumps(dict(vars(args), out=args.out.name, took_minutes=(time.time() - began) / 60)))


if __name__ == "__main__":
    main()
