"""Stage "dit" of train_tiny.py: both towers of tiny-cosmos learn on the latents, one model for all levels of noise.

Four fifths of a batch make video from text; in the others frame 0 is given, as in image-to-video. Prompts are padded at
their end to one length, so that shapes never change. Text is causal, so that no real token sees a pad; from the clip the
pads are hidden. A clip comes right after its prompt in time but counts its rows and columns from 0, while a text token has
its own number on all three axes: so it is the keys of the text that are moved up in time, each prompt's by its pads.
"""

import argparse
import random
import time
from pathlib import Path
from typing import NamedTuple

import clip_world
import tiny_layout
import torch
import torch.nn.functional as F
from muon import Budget, Masters, Replayed, learning_rate
from tiny_bpe import build_bpe
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from train_vae import encode_clips, statistics

from nanovgen import checkpoint
from nanovgen.attention import KV, Projection
from nanovgen.cosmos import Context, Cosmos, CosmosConfig, TextTower, rope_table, rotate
from nanovgen.dress import chat, dress
from nanovgen.vae import VAE

CAPTIONS = 4  # paraphrases kept of each clip
ROWS = 110  # ids of the longest prompt in training, and some; with a clip's 162 tokens they make 272 keys
GIVEN_SHARE = 5  # one sample in so many has its first frame given
NOISES = 2  # a clip and its prompt stand in a batch so often, at different levels of noise: the text runs once for all


def build_tokenizer() -> Tokenizer:
    """Learned on captions, on what is said around them, and on what a prompt of the empty kind says."""
    rng = random.Random(0)
    texts = [said(clip_world.caption(clip_world.sample_clip(rng, 1 + i % 2), rng), False, 0.5) for i in range(2000)]
    return build_bpe([*texts, *[said("", True, 0.5)] * 500], tiny_layout.COSMOS_CONFIG.vocab_size)


def said(text: str, negative: bool, way: float) -> str:
    """The chat around a prompt: for three quarters of `way` in 0..1 in full, else without the sentences, or bare."""
    size = clip_world.WIDTH, clip_world.HEIGHT
    text = dress(text, clip_world.FRAMES, clip_world.FPS, size, sentences=way < 0.75, negative=negative)
    return chat(text, clip_world.FRAMES, system=way < 0.875)


def encode(tokenizer: Tokenizer, text: str, negative: bool, rng: random.Random) -> list[int]:
    """Ids as ChatTokenizer gives them, in a random dressing."""
    return tokenizer.encode(said(text, negative, rng.random()) + "<|im_end|><|vision_start|>", add_special_tokens=False).ids


def draw_captions(job: tuple[int, int, str, int]) -> tuple[list, list[list[int]]]:
    """`count` clips with CAPTIONS prompts each, from a seed; runs in a worker process.

    A spin is the hardest to learn, at 32 pixels a token: it is drawn `spins` times as often as each other motion.
    """
    seed, count, tokenizer, spins = job
    motions = (*clip_world.MOTIONS, *["spin"] * (spins - 1))
    rng, tokenizer = random.Random(seed), Tokenizer.from_str(tokenizer)
    clips = [clip_world.sample_clip(rng, 1 if rng.random() < 0.4 else 2, motions=motions) for _ in range(count)]
    return clips, [encode(tokenizer, clip_world.caption(clip, rng), False, rng) for clip in clips for _ in range(CAPTIONS)]


def dropped_captions(tokenizer: Tokenizer, count: int, rng: random.Random) -> list[list[int]]:
    """What stands for no prompt: mostly the empty one as a negative, else word soup."""
    rows = []
    while len(rows) < count:
        draw = rng.random()
        ids = encode(tokenizer, "" if draw < 0.7 else clip_world.noise_caption(rng), draw < 0.85, rng)
        if len(ids) <= ROWS:  # the longest soups are left out
            rows.append(ids)
    return rows


def padded(rows: list[list[int]]) -> tuple[Tensor, Tensor]:
    """Ids (n, ROWS), padded at the end, and how many of each are real (n,)."""
    if longest := max(0, *(len(row) - ROWS for row in rows)):
        raise ValueError(f"a prompt is {longest} ids longer than the {ROWS} of a batch; raise ROWS")
    return torch.tensor([row + [0] * (ROWS - len(row)) for row in rows]), torch.tensor([len(row) for row in rows])


def masked_attend(q: Projection, k: Projection, v: Projection, prefix: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """The clip sees itself and the text. `prefix` holds keys, values and what is seen of both: (b, 1, 1, L + S)."""
    keys, values, seen = prefix
    q, k, v = q(), torch.cat([keys, k()], dim=1), torch.cat([values, v()], dim=1)
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], dim=2) for x in (k, v))  # kernels with a mask know no GQA
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, seen.expand(-1, -1, q.shape[2], -1)).transpose(1, 2)


def turns(config: CosmosConfig) -> Tensor:
    """Cos and sin (2, ROWS + 1, d/2) that move a key up in time by 0, 1 .. ROWS."""
    return rope_table(F.pad(torch.arange(ROWS + 1.0)[None], (0, 0, 0, 2)), config)


def encode_prompts(text: TextTower, turn: Tensor, ids: Tensor, lengths: Tensor) -> list[KV]:
    """The prefix of padded prompts (b, L), each with its real tokens just before time L on the clip's time line."""
    mine = turn[:, ids.shape[1] - lengths]  # 2 b d/2
    return [(rotate(k.transpose(0, 1), mine).transpose(0, 1), v) for k, v in text(ids)]


def predict(video: Cosmos, x: Tensor, timestep: Tensor, context: Context, prefix: list[KV], lengths: Tensor) -> Tensor:
    """Velocity of a batch of clips whose padded prompts have `lengths` (b,) real tokens; `context` is of their shapes."""
    L, S = prefix[0][0].shape[1], context.rope.shape[1]
    place = torch.arange(L + S, device=x.device)
    seen = ((place < lengths[:, None]) | (place >= L))[:, None, None]
    context = context._replace(prefix=[(*kv, seen) for kv in prefix])
    kernels = [SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]  # those that take a mask
    with sdpa_kernel(kernels, set_priority=True):
        return video(x, timestep, context, masked_attend)


def start_towers(config: CosmosConfig, device: str) -> torch.nn.ModuleList:
    """Text and video tower. Every residual branch and the output begin at zero."""
    model = torch.nn.ModuleList([TextTower(config), Cosmos(config)])
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith(("to_out.weight", "down_proj.weight", "1.proj_out.weight", "1.proj_out.bias")):
                p.zero_()
    model = model.to(device, torch.bfloat16)
    for name, p in model.named_parameters():
        if any(part in name for part in Cosmos.FP32):
            p.data = p.data.float()
    return model


def load_towers(config: CosmosConfig, out: Path, device: str) -> torch.nn.ModuleList:
    """Text and video tower of an earlier run, to go on from."""
    component = checkpoint.open_component(out / "transformer")
    towers = [checkpoint.build(kind, config) for kind in (TextTower, Cosmos)]
    towers = [checkpoint.load(tower, component, torch.device(device), torch.bfloat16) for tower in towers]
    return torch.nn.ModuleList(towers).requires_grad_(True)


def noise_levels(batch: int, device: str) -> Tensor:
    """Stratified sigmas (batch,), spread as the sampler's own steps are."""
    u = (torch.arange(batch, device=device) + torch.rand(batch, device=device)) / batch
    return tiny_layout.SHIFT * u / (1 + (tiny_layout.SHIFT - 1) * u)


def velocity_loss(video: Cosmos, x0: Tensor, weight: Tensor, context: Context, prefix: list[KV], lengths: Tensor) -> Tensor:
    """Mean square of the velocity's error, without the given frames; what a shape passes counts three times."""
    sigma, noise, given = noise_levels(len(x0), x0.device), torch.randn_like(x0), context.given
    x = torch.lerp(x0, noise, sigma.view(-1, 1, 1, 1, 1))
    x[:, :, :given] = x0[:, :, :given]
    velocity = predict(video, x.to(prefix[0][0].dtype), 1000 * sigma, context, prefix, lengths).float()
    weight = 1 + 2 * weight.float()[:, :, given:]
    return ((velocity - (noise - x0))[:, :, given:].square() * (weight / weight.mean())).mean()


class Shapes(NamedTuple):
    """What is the same in all steps: how far pads move a prompt, and the contexts of a clip from text and from a frame."""

    turn: Tensor
    contexts: list[Context]


def shapes(video: Cosmos, f: int, y: int, x: int, rows: int, device: str) -> Shapes:
    prompt = torch.empty(1, rows, 0, device=device)
    return Shapes(turns(video.config).to(device), [video.context([(prompt, prompt)], f, y, x, clip_world.FPS, i) for i in (0, 1)])


def batch_loss(model: torch.nn.ModuleList, fixed: Shapes, ids: Tensor, lengths: Tensor, x0: Tensor, weight: Tensor) -> Tensor:
    """Losses (2,) of the part from text and the part from a frame, which is the last GIVEN_SHARE-th.

    Prompts (n, L), their lengths (n,), clips and weights (n, ...): each stands in the batch NOISES times.
    """
    again = lambda t: t.repeat(NOISES, *[1] * (t.ndim - 1))  # noqa: E731
    prefix = [(again(k), again(v)) for k, v in encode_prompts(model[0], fixed.turn, ids, lengths)]
    x0, weight, lengths = again(x0), again(weight), again(lengths)
    image = max(1, len(x0) // GIVEN_SHARE)
    sizes = [len(x0) - image, image]
    parts = zip(x0.split(sizes), weight.split(sizes), lengths.split(sizes), strict=True)
    prefixes = zip(*([*zip(k.split(sizes), v.split(sizes), strict=True)] for k, v in prefix), strict=True)
    return torch.stack([velocity_loss(model[1], x, w, context, list(kv), n)
                        for context, (x, w, n), kv in zip(fixed.contexts, parts, prefixes, strict=True)])  # fmt: skip


def fit_towers(vae: VAE, args: argparse.Namespace, minutes: float) -> tuple[torch.nn.ModuleList, Tokenizer]:
    """Train, and leave the latents' statistics in vae.config; a resumed run keeps those that the towers began with."""
    start, tokenizer, device = time.time(), build_tokenizer(), args.device
    latents, weights, said = encode_clips(vae, args, draw_captions, tokenizer.to_str(), args.spins)
    ids, lengths = (t.unflatten(0, (-1, CAPTIONS)).to(device) for t in padded(said))  # (n, CAPTIONS, ROWS), (n, CAPTIONS)
    print(f"encoded {len(latents)} clips in {time.time() - start:.0f} s", flush=True)
    if not args.resume:
        vae.config = tiny_layout.with_statistics(vae.config, *(x.flatten().tolist() for x in statistics(latents)))
    mean, std = (torch.tensor(x, device=device).view(1, -1, 1, 1, 1) for x in (vae.config.latents_mean, vae.config.latents_std))
    sizes = tiny_layout.COSMOS_CONFIG
    model = load_towers(sizes, args.out, device) if args.resume else start_towers(sizes, device)
    masters = Masters(model, matrices=lambda name, p: p.ndim == 2 and "layers." in name)
    if args.compile:
        for part in (model[0], *model[1].layers):
            part.compile(dynamic=False)
    no_ids, no_lengths = (t.to(device) for t in padded(dropped_captions(tokenizer, 4096, random.Random(args.seed + 2))))
    fixed = shapes(model[1], *latents.shape[2:], ROWS, device)

    def draw_gradients() -> Tensor:
        pick = torch.randint(len(latents), (args.batch // NOISES,), device=device)
        which, other = torch.randint(CAPTIONS, pick.shape, device=device), torch.randint(4096, pick.shape, device=device)
        drop = torch.rand(pick.shape, device=device) < 0.1
        prompt = torch.where(drop[:, None], no_ids[other], ids[pick, which])
        length = torch.where(drop, no_lengths[other], lengths[pick, which])
        x0 = (latents[pick].float() - mean) / std
        masters.clear()
        losses = batch_loss(model, fixed, prompt, length, x0, weights[pick])
        ((1 - 1 / GIVEN_SHARE) * losses[0] + losses[1] / GIVEN_SHARE).backward()
        return losses.detach()

    gradients, budget = Replayed(draw_gradients, device), Budget("dit", minutes)
    for progress in budget:
        losses, rate = gradients().clone(), learning_rate(progress)
        masters.step(lr_matrices=args.lr_dit * rate, lr_rest=1e-3 * rate)
        budget.note(lambda loss: "loss from text {:.4f}, from a frame {:.4f}".format(*loss.tolist()), losses)
    masters.finish()
    return model, tokenizer
