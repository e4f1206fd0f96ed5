"""Stage "experts" of train_tiny.py: tiny-wan's text encoder and both experts learn on the latents, each expert on its range
of noise.
"""

import argparse
import random
import time

import clip_world
import tiny_layout
import torch
from muon import Budget, Masters, learning_rate
from train_vae import encode_clips, statistics

from nanovgen.text import UMT5
from nanovgen.vae import VAE
from nanovgen.wan import Wan

CAPTIONS = 6  # paraphrases kept of each clip


def draw_captions(job: tuple[int, int]) -> tuple[list, list[list[int]]]:
    """`count` clips with CAPTIONS captions each, from a seed; runs in a worker process."""
    seed, count = job
    rng, tokenizer = random.Random(seed), clip_world.build_tokenizer()
    clips = [clip_world.sample_clip(rng, 1 if rng.random() < 0.4 else 2) for _ in range(count)]
    encoded = tokenizer.encode_batch([clip_world.caption(clip, rng) for clip in clips for _ in range(CAPTIONS)])
    return clips, [e.ids for e in encoded]


def dropped_captions(count: int, rng: random.Random) -> torch.Tensor:
    """Ids (count, 32) of what stands for no prompt: mostly the empty text, else word soup."""
    tokenizer = clip_world.build_tokenizer()
    texts = ["" if rng.random() < 0.7 else clip_world.noise_caption(rng) for _ in range(count)]
    return padded([e.ids[: tiny_layout.TEXT_ROWS] for e in tokenizer.encode_batch(texts)])


def padded(ids: list[list[int]]) -> torch.Tensor:
    return torch.tensor([row + [0] * (tiny_layout.TEXT_ROWS - len(row)) for row in ids])


def start_experts(device: str) -> torch.nn.ModuleList:
    """Text encoder, high-noise and low-noise expert. The output and the modulation tables begin at zero."""
    text, experts = UMT5(tiny_layout.TEXT_CONFIG), [Wan(tiny_layout.WAN_CONFIG) for _ in range(2)]
    with torch.no_grad():
        for block in text.blocks:
            block.bias.weight.mul_(0.1)
        for expert in experts:
            torch.nn.init.zeros_(expert.proj_out.weight)
            for name, p in expert.named_parameters():
                if "scale_shift_table" in name:
                    p.zero_()
    model = torch.nn.ModuleList([text, *experts]).to(device, torch.bfloat16)
    for name, p in model.named_parameters():
        if any(part in name for part in Wan.FP32):
            p.data = p.data.float()
    return model


def noise_levels(batch: int, high: bool, device: str) -> torch.Tensor:
    """Stratified sigmas (batch,) of one expert's range, spread as the sampler's own steps are (shift 5)."""
    edge = tiny_layout.BOUNDARY / (tiny_layout.SHIFT - (tiny_layout.SHIFT - 1) * tiny_layout.BOUNDARY)
    u = (torch.arange(batch, device=device) + torch.rand(batch, device=device)) / batch
    u = edge + (1 - edge) * u if high else edge * u
    return tiny_layout.SHIFT * u / (1 + (tiny_layout.SHIFT - 1) * u)


def expert_loss(expert: Wan, text: torch.Tensor, x0: torch.Tensor, weight: torch.Tensor, high: bool) -> torch.Tensor:
    """Velocity loss of one expert on its own noise range; latent pixels that a shape passes count three times."""
    sigma = noise_levels(len(x0), high, x0.device)
    noise = torch.randn_like(x0)
    x = torch.lerp(x0, noise, sigma.view(-1, 1, 1, 1, 1))
    velocity = expert(x.bfloat16(), 1000 * sigma, expert.context(text, *x0.shape[2:])).float()
    weight = (1 + 2 * weight.float()) / (1 + 2 * weight.float().mean())
    return ((velocity - (noise - x0)).square() * weight).mean()


def fit_experts(vae: VAE, args: argparse.Namespace, minutes: float) -> torch.nn.ModuleList:
    """Train, and leave the latents' statistics in vae.config."""
    start = time.time()
    latents, weights, ids = encode_clips(vae, args, draw_captions)
    ids = padded(ids).unflatten(0, (-1, CAPTIONS)).to(args.device)  # n, CAPTIONS, 32
    mean, std = statistics(latents)
    print(f"encoded {len(latents)} clips in {time.time() - start:.0f} s", flush=True)
    vae.config = tiny_layout.with_statistics(vae.config, mean.flatten().tolist(), std.flatten().tolist())
    model = start_experts(args.device)
    masters = Masters(model, matrices=lambda name, p: p.ndim == 2 and "blocks." in name and ".bias." not in name)
    if args.compile:
        for block in [*model[1].blocks, *model[2].blocks, *model[0].blocks]:
            block.compile(dynamic=False)
    nothing = dropped_captions(4096, random.Random(args.seed + 2)).to(args.device)
    budget = Budget("experts", minutes)
    for progress in budget:
        pick = torch.randint(len(latents), (2 * args.batch,), device=args.device)
        prompt = ids[pick, torch.randint(CAPTIONS, pick.shape, device=args.device)]
        drop = torch.rand(pick.shape, device=args.device) < 0.1
        prompt = torch.where(drop[:, None], nothing[torch.randint(len(nothing), pick.shape, device=args.device)], prompt)
        text = model[0](prompt, prompt > 0) * (prompt > 0)[..., None]
        x0 = (latents[pick].float() - mean) / std
        halves = zip(*(part.split(args.batch) for part in (text, x0, weights[pick])), strict=True)
        losses = [expert_loss(model[1 + i], *half, high=i == 0) for i, half in enumerate(halves)]
        masters.clear()
        sum(losses).backward()
        rate = learning_rate(progress)
        masters.step(lr_matrices=args.lr_dit * rate, lr_rest=1e-3 * rate)
        budget.note(lambda loss: "loss high {:.4f} low {:.4f}".format(*loss.tolist()), torch.stack(losses).detach())
    masters.finish()
    return model
