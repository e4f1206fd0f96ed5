"""Stages "vae" and "decoder" of train_tiny.py, and the latents that its last stage learns on.

"vae" learns on crops that follow a shape. "decoder" freezes the encoder and learns on whole clips, an eighth as many a
step: a decoder that saw 17 frames drifts after 25.
"""

import argparse
import random
from collections.abc import Callable
from multiprocessing import Pool

import clip_world
import tiny_layout
import torch
import torch.nn.functional as F
from muon import Budget, Masters, learning_rate

from nanovgen.vae import VAE, VAEConfig

CROP, CROP_FRAMES = 64, 17


def start_vae(config: VAEConfig, device: str) -> VAE:
    """Fresh weights; residual branches begin at zero, so a new block passes its input through, and a stage with a shortcut
    is the shortcut alone."""
    vae = VAE(config)
    with torch.no_grad():
        for name, p in vae.named_parameters():
            if name.endswith(("conv2.weight", "proj.weight")):
                p.zero_()
        for stage in [*vae.encoder.stages, *vae.decoder.stages]:
            if stage.shortcut is not None and stage.resample is not None:
                stage.resample.conv.weight.zero_()
                stage.resample.conv.bias.zero_()
        vae.quant_conv.weight.copy_(torch.eye(2 * vae.config.z_dim)[:, :, None, None, None])
        vae.post_quant_conv.weight.copy_(torch.eye(vae.config.z_dim)[:, :, None, None, None])
        for conv in (vae.quant_conv, vae.post_quant_conv):
            conv.bias.zero_()
        vae.quant_conv.bias[vae.config.z_dim :] = -5  # little posterior noise at first
    return vae.to(device, torch.bfloat16)


def crops(clips: list, rng: random.Random, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Video (n, 3, 17, 64, 64) and coverage (n, 1, 17, 64, 64) of windows around a shape."""
    video, cover = clip_world.draw(clips, device)
    both = torch.cat([video, cover[:, None]], dim=1)
    x, y = clip_world.paths(clips)[:2]  # (items, f)
    windows, item = [], 0
    for n, clip in enumerate(clips):
        shape = item + rng.randrange(len(clip.shapes))
        item += len(clip.shapes)
        start = 4 * rng.randrange((clip_world.FRAMES - CROP_FRAMES) // 4 + 1)
        middle = start + CROP_FRAMES // 2
        left = int(x[shape, middle]) - CROP // 2 + rng.randint(-16, 16)
        top = int(y[shape, middle]) - CROP // 2 + rng.randint(-16, 16)
        left, top = min(max(left, 0), clip_world.WIDTH - CROP), min(max(top, 0), clip_world.HEIGHT - CROP)
        windows.append(both[n, :, start : start + CROP_FRAMES, top : top + CROP, left : left + CROP])
    return torch.stack(windows).split([3, 1], dim=1)


def reconstruction_loss(video: torch.Tensor, found: torch.Tensor, cover: torch.Tensor) -> torch.Tensor:
    """L1, squares, and L1 of the changes over f, y and x. Inside the shapes counts four times."""
    error = found.float() - video
    weight = (1 + 3 * cover) / (1 + 3 * cover.mean())
    changes = [(error.diff(dim=dim).abs() * weight.narrow(dim, 1, weight.shape[dim] - 1)).mean() for dim in (2, 3, 4)]
    return (error.abs() * weight).mean() + 2 * (error.square() * weight).mean() + 0.5 * sum(changes)


def vae_loss(vae: VAE, video: torch.Tensor, cover: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss of one batch, and its mean square error for the log."""
    mean, log_variance = (m.float() for m in vae.moments(video.bfloat16(), chunk=None))
    log_variance = log_variance.clamp(-20, 10)
    found = tiny_layout.decode_raw(vae, mean + torch.randn_like(mean) * (0.5 * log_variance).exp())
    kl = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).mean()
    return reconstruction_loss(video, found, cover) + 1e-4 * kl, (found - video).square().mean().detach()


def decoder_loss(vae: VAE, video: torch.Tensor, cover: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As vae_loss, for the decoder alone: latents are the posterior's means, as generation will see them."""
    with torch.no_grad():
        z = vae.moments(video.bfloat16(), chunk=None)[0]
    found = tiny_layout.decode_raw(vae, z)
    return reconstruction_loss(video, found, cover), (found - video).square().mean().detach()


def fit_vae(vae: VAE, args: argparse.Namespace, minutes: float, whole: bool) -> None:
    """Stage "vae" on crops, or stage "decoder" on an eighth as many whole clips a step."""
    rng, device = random.Random(args.seed + whole), args.device
    for part in (vae.encoder, vae.quant_conv):
        part.requires_grad_(not whole)
    masters = Masters(vae, matrices=lambda name, p: p.ndim > 3 and not name.startswith("decoder.conv_out"))
    if args.compile:
        vae.decoder.compile(dynamic=False)
        if not whole:
            vae.encoder.compile(dynamic=False)
    budget = Budget("decoder" if whole else "vae", minutes)
    for progress in budget:
        clips = [clip_world.sample_clip(rng, rng.choice((1, 2))) for _ in range(max(1, args.vae_batch // (8 if whole else 1)))]
        if whole:
            video, cover = clip_world.draw(clips, device)
            loss, square = decoder_loss(vae, video, cover[:, None])
        else:
            loss, square = vae_loss(vae, *crops(clips, rng, device))
        masters.clear()
        loss.backward()
        masters.step(*[args.lr_vae * learning_rate(progress)] * 2)
        budget.note(lambda squares: f"PSNR {-10 * (squares / 4).log10():.2f} dB", square)
    masters.finish()


@torch.no_grad()
def encode_clips(vae: VAE, args: argparse.Namespace, draw: Callable, *extra: object) -> tuple[torch.Tensor, torch.Tensor, list]:
    """Latents (n, z, 9, y, x) bf16 as encoded, coverage (n, 1, 9, y, x), and what is said of the clips, in their order.

    draw((seed, count, *extra)) -> clips and what is said of them; it runs in worker processes.
    """
    jobs = [(args.seed * 1000003 + i, min(256, args.clips), *extra) for i in range(-(-args.clips // 256))]
    latents, weights, said = [], [], []
    with Pool() as pool:
        for clips, texts in pool.imap(draw, jobs):
            said += texts
            for i in range(0, len(clips), 64):
                video, cover = clip_world.draw(clips[i : i + 64], args.device)
                latents.append(vae.moments(video.bfloat16(), chunk=None)[0])
                still, moving = cover[:, :1], cover[:, 1:].unflatten(1, (-1, 4)).amax(2)
                weights.append(F.max_pool2d(torch.cat([still, moving], 1), vae.config.scale)[:, None].bfloat16())
    return torch.cat(latents), torch.cat(weights), said


def statistics(latents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and standard deviation (1, z, 1, 1, 1) of the channels of latents (n, z, f, y, x)."""
    kept = dict(dim=(0, 2, 3, 4), keepdim=True)
    return latents.float().mean(**kept), latents.float().std(**kept)
