"""A checkpoint folder of a known model's sizes with random weights: what a whole request takes, where the real files are not.

    python weights/random_checkpoint.py wan2.2-t2v-a14b --out /dev/shm/wan         # 68.5 GB: twice 28.6, and 11.4 of UMT5
    torchrun --standalone --nproc-per-node 2 run.py "a red circle" --model /dev/shm/wan --compile

The layout is the hub's, in bf16, and run.py takes it as it is. Matrices have unit gain, so that numbers stay finite; Wan's two
experts are alike. Tokenizers are the tiny models', whose ids every vocabulary has.
"""

import argparse
from pathlib import Path

import tiny_layout
import torch
import train_cosmos
from torch import nn

from nanovgen import checkpoint
from nanovgen.cosmos import Cosmos, CosmosConfig, TextTower
from nanovgen.floor import random_weights
from nanovgen.recipe import PRESETS, Preset
from nanovgen.text import UMT5, UMT5Config
from nanovgen.vae import VAE, VAEConfig
from nanovgen.wan import Wan, WanConfig

MODELS = [name for name, p in PRESETS.items() if p.family == "cosmos" or p.experts == 2]  # the layouts of tiny_layout.py


def write(preset: Preset, out: Path, device: torch.device, text: UMT5Config = UMT5Config()) -> None:
    """All of the folder. `text` is Wan's text model; Cosmos3's has its denoiser's sizes."""

    def make(kind: type[nn.Module], config: object) -> nn.Module:
        return random_weights(checkpoint.build(kind, config), device, torch.bfloat16)

    vae = make(VAE, VAEConfig(**preset.vae))
    tiny_layout.save_vae(vae, out)
    if preset.family == "cosmos":
        towers = [make(kind, CosmosConfig(**preset.transformer)) for kind in (TextTower, Cosmos)]
        tiny_layout.save_towers(*towers, train_cosmos.build_tokenizer(), vae.config, out)
    else:
        expert = make(Wan, WanConfig(**preset.transformer))
        tiny_layout.save_experts(make(UMT5, text), expert, expert, vae.config, out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="where the numbers are drawn")
    args = parser.parse_args()
    write(PRESETS[args.model], args.out, torch.device(args.device))


if __name__ == "__main__":
    main()
