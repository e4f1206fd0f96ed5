"""Train weights/tiny-wan from nothing on one GPU: a Wan 2.2 in small, whose world is clip_world.py.

    python weights/train_tiny.py --out /tmp/tiny-wan                       # one H200: see README.md for minutes, scores
    python weights/train_tiny.py --out /tmp/toy --minutes 0.3 0.3 0.3 --clips 64 --batch 4 --vae-batch 2    # CPU smoke test

Three stages. "vae": the VAE learns on crops that follow a shape. "decoder": its encoder is frozen, and the decoder learns
on whole clips (a decoder that saw 17 frames drifts after 25). "experts": the text encoder and both experts learn on the
latents, each expert on its own range of noise. The last two need only the first, so they may run at once on two cards
with one --out (`--stages decoder`, `--stages experts`): each writes the files that are its own.

All modules are nanovgen's, run in bf16 as they will be used; fp32 master weights take the gradient steps. Budgets are
minutes, and the learning rate follows the share of the budget that is spent.
"""

import argparse
import json
import random
import time
from multiprocessing import Pool
from pathlib import Path

import clip_world
import tiny_layout
import torch
import torch.nn.functional as F
from muon import Masters

from nanovgen.text import UMT5
from nanovgen.vae import VAE
from nanovgen.wan import Wan

CAPTIONS = 6  # paraphrases kept of each clip
CROP, CROP_FRAMES = 64, 17


def learning_rate(progress: float) -> float:
    """Share of the peak rate: up over the first 2 %, level, down to nothing over the last half."""
    return min(1.0, progress / 0.02, (1 - progress) / 0.5)


# Stages "vae" and "decoder"


def start_vae(device: str) -> VAE:
    """Fresh weights; residual branches begin at zero, so a new block passes its input through."""
    vae = VAE(tiny_layout.VAE_CONFIG)
    with torch.no_grad():
        for name, p in vae.named_parameters():
            if name.endswith(("conv2.weight", "proj.weight")):
                p.zero_()
        vae.quant_conv.weight.copy_(torch.eye(2 * vae.config.z_dim)[:, :, None, None, None])
        vae.post_quant_conv.weight.copy_(torch.eye(vae.config.z_dim)[:, :, None, None, None])
        for conv in (vae.quant_conv, vae.post_quant_conv):
            conv.bias.zero_()
        vae.quant_conv.bias[vae.config.z_dim :] = -5  # little posterior noise at first
    return vae.to(device, torch.bfloat16)


def crops(clips: list, rng: random.Random, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Video (n, 3, 17, 64, 64) and coverage (n, 1, 17, 64, 64) of windows around a shape."""
    video, cover = clip_world.render(clips, device), clip_world.masks(clips, device)[:, None]
    both = torch.cat([video, cover], dim=1)
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
    masters = Masters(vae, matrices=lambda name, p: p.ndim > 3 and p.shape[0] > 3)
    if args.compile:
        vae.decoder.compile(dynamic=False)
        if not whole:
            vae.encoder.compile(dynamic=False)
    start, step, log = time.time(), 0, []
    while (progress := (time.time() - start) / (60 * minutes)) < 1:
        clips = [clip_world.sample_clip(rng, rng.choice((1, 2))) for _ in range(max(1, args.vae_batch // (8 if whole else 1)))]
        if whole:
            loss, square = decoder_loss(vae, clip_world.render(clips, device), clip_world.masks(clips, device)[:, None])
        else:
            loss, square = vae_loss(vae, *crops(clips, rng, device))
        loss.backward()
        masters.step(*[args.lr_vae * learning_rate(progress)] * 2)
        log.append(square)
        if step % 100 == 0 and step:
            psnr = -10 * torch.stack(log).mean().div(4).log10()
            print(f"{'decoder' if whole else 'vae'} step {step}, {time.time() - start:.0f} s, PSNR {psnr:.2f} dB", flush=True)
            log.clear()
        step += 1
    masters.finish()


# Stage "experts"


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


@torch.no_grad()
def encode_clips(vae: VAE, args: argparse.Namespace) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Latents (n, 16, 9, 12, 24) bf16 as encoded, caption ids (n, CAPTIONS, 32), coverage (n, 1, 9, 12, 24)."""
    jobs = [(args.seed * 1000003 + i, min(256, args.clips)) for i in range(-(-args.clips // 256))]
    with Pool() as pool:
        drawn = pool.map(draw_captions, jobs)
    latents, weights = [], []
    for clips, _ in drawn:
        for i in range(0, len(clips), 64):
            part = clips[i : i + 64]
            latents.append(vae.moments(clip_world.render(part, args.device).bfloat16(), chunk=None)[0])
            cover = clip_world.masks(part, args.device)
            still, moving = cover[:, :1], cover[:, 1:].unflatten(1, (-1, 4)).amax(2)
            weights.append(F.max_pool2d(torch.cat([still, moving], 1), 8)[:, None].bfloat16())
    ids = torch.cat([padded(ids) for _, ids in drawn]).unflatten(0, (-1, CAPTIONS)).to(args.device)
    return torch.cat(latents), ids, torch.cat(weights)


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
    latents, ids, weights = encode_clips(vae, args)
    mean = latents.float().mean((0, 2, 3, 4))
    std = latents.float().std((0, 2, 3, 4))
    print(f"encoded {len(latents)} clips in {time.time() - start:.0f} s", flush=True)
    vae.config = tiny_layout.with_statistics(vae.config, mean.tolist(), std.tolist())
    mean, std = mean.view(1, -1, 1, 1, 1), std.view(1, -1, 1, 1, 1)
    model = start_experts(args.device)
    masters = Masters(model, matrices=lambda name, p: p.ndim == 2 and "blocks." in name and ".bias." not in name)
    if args.compile:
        for block in [*model[1].blocks, *model[2].blocks, *model[0].blocks]:
            block.compile(dynamic=False)
    nothing = dropped_captions(4096, random.Random(args.seed + 2)).to(args.device)
    start, step, log = time.time(), 0, []
    while (progress := (time.time() - start) / (60 * minutes)) < 1:
        pick = torch.randint(len(latents), (2 * args.batch,), device=args.device)
        prompt = ids[pick, torch.randint(CAPTIONS, pick.shape, device=args.device)]
        drop = torch.rand(pick.shape, device=args.device) < 0.1
        prompt = torch.where(drop[:, None], nothing[torch.randint(len(nothing), pick.shape, device=args.device)], prompt)
        text = model[0](prompt, prompt > 0) * (prompt > 0)[..., None]
        x0 = (latents[pick].float() - mean) / std
        halves = zip(*(part.split(args.batch) for part in (text, x0, weights[pick])), strict=True)
        losses = [expert_loss(model[1 + i], *half, high=i == 0) for i, half in enumerate(halves)]
        sum(losses).backward()
        rate = learning_rate(progress)
        masters.step(lr_matrices=args.lr_dit * rate, lr_rest=1e-3 * rate)
        log.append(torch.stack(losses).detach())
        if step % 200 == 0 and step:
            high, low = torch.stack(log).mean(0).tolist()
            print(f"experts step {step}, {time.time() - start:.0f} s, loss high {high:.4f} low {low:.4f}", flush=True)
            log.clear()
        step += 1
    masters.finish()
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--stages", nargs="+", default=["vae", "decoder", "experts"], choices=["vae", "decoder", "experts"])
    parser.add_argument("--minutes", nargs=3, type=float, default=[5.5, 6.5, 11.5], help="of vae, decoder, experts")
    parser.add_argument("--clips", type=int, default=20480, help="clips encoded once and kept on the device")
    parser.add_argument("--batch", type=int, default=160, help="clips a step and expert")
    parser.add_argument("--vae-batch", type=int, default=32, help="crops a step")
    parser.add_argument("--lr-vae", type=float, default=2e-3)
    parser.add_argument("--lr-dit", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=torch.cuda.is_available())
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    began, minutes = time.time(), dict(zip(("vae", "decoder", "experts"), args.minutes, strict=True))
    vae = start_vae(args.device) if "vae" in args.stages else tiny_layout.load_vae(args.out, args.device)
    if "vae" in args.stages:
        fit_vae(vae, args, minutes["vae"], whole=False)
        tiny_layout.save_vae(vae, args.out)
    if "decoder" in args.stages:
        vae = tiny_layout.load_vae(args.out, args.device)
        fit_vae(vae, args, minutes["decoder"], whole=True)
        tiny_layout.save_weights(vae, args.out / "vae" / "diffusion_pytorch_model.safetensors")
    if "experts" in args.stages:
        vae = tiny_layout.load_vae(args.out, args.device)
        text, high, low = fit_experts(vae, args, minutes["experts"])
        tiny_layout.save_experts(text, high, low, vae.config, args.out)
    print(json.dumps(dict(vars(args), out=args.out.name, took_minutes=(time.time() - began) / 60)))


if __name__ == "__main__":
    main()
