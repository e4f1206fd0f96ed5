"""What a run says before it starts: the model, the video, the steps, the ranks, what they send, what it all needs."""

import os
from dataclasses import replace

import torch

from nanovgen import plan, push, scheduler, tp
from nanovgen.checkpoint import final_dtype
from nanovgen.job import Job, Kept, stored_schedule, warm_jobs
from nanovgen.recipe import latent_frames

RESERVED = 3e9  # bytes of a card, for what is no tensor: its context, NCCL's buffers


def describe(job: Job) -> dict[str, str]:
    """The plan, line by line, as it is printed and stored."""
    r, millions = job.request, {part: sum(p.numel() for p in model.parameters()) / 1e6 for part, model in job.models.items()}
    stored = sum(c.stored_bytes for c in {c.folder: c for c in job.components.values()}.values())
    if not job.components:
        width = {part: 4 if job.preset.family == "wan" else 2 for part in job.models}
        width |= {"text_encoder": 4 if job.preset.text_dtype == "F32" else 2}
        stored = sum(width[part] * count * 1e6 for part, count in millions.items())
    return {
        "model": f"{r.model} ({job.name}): " + ", ".join(f"{part} {count:,.1f} M" for part, count in millions.items()),
        "video": f"{r.size}, {r.frames} frames at {r.fps} fps, {r.frames / r.fps:.2f} s, seed {r.seed}",
        **({"latents": r.latents} if r.latents else describe_denoising(job)),
        "ranks": describe_ranks(job),
        "runs on": f"{job.device.type}, {job.dtype} (VAE {str(job.vae_dtype)[6:]}), attention kernel {job.kernel}{job.stand_in}"
        + (", float8 matrices" if job.recipe.quant_config.quant_algo == "FP8" else ""),
        "needs": f"about {describe_peak(job)}; {stored / 1e9:.2f} GB of weight files",
        "output": str(job.out),
    }


def describe_denoising(job: Job) -> dict[str, str]:
    r, (f, y, x) = job.request, job.latent_shape
    experts = [job.expert(t) for t in job.times]
    switch = f"{experts.count('transformer')} high-noise, {experts.count('transformer_2')} low-noise (boundary {r.boundary})"
    sigmas, stored = job.sigmas.tolist(), stored_schedule(job.folder)
    asked = scheduler.Stored(r.shift, scheduler.KARRAS if r.grid == "karras" else None)
    file_says = f" (its scheduler file says {stored})" if stored not in (None, asked) else ""
    served = f"; {switch}" if r.boundary is not None else "; one expert" if job.preset.family == "wan" else ""
    grid = "" if r.grid == "karras" else f", {r.grid} grid"
    ours = " (ours)" if r.negative_prompt is None and job.preset.family == "wan" else ""
    cosmos = job.preset.family == "cosmos"
    return {
        "tokens": f"{job.tokens} = {f} x {-(-y // 2)} x {-(-x // 2)}",
        "steps": f"{r.steps} of {r.solver}, {asked}{file_says}{grid}{served}",
        "sigmas": " ".join(f"{s:.3f}" for s in (sigmas if len(sigmas) < 12 else [*sigmas[:5], *sigmas[-5:]])),
        "guidance": f"{r.guidance:g}" + ("" if r.guidance_low is None else f" high, {r.guidance_low:g} low"),
        "prompt": said_text(job, 0) if cosmos else r.prompt + said_cut(job, r.prompt),
        "negative": "not used" if job.negative is None else said_text(job, 1) if cosmos else
                    repr(job.negative) + ours + said_cut(job, job.negative),
        "sends": describe_sends(job),
        "warm-up": warm_up(job),
    }  # fmt: skip


def said_text(job: Job, stream: int) -> str:
    """A text as Cosmos3 reads it, chat and sentences included, and its ids' number where the tokenizer is there."""
    text = job.texts[stream]
    count = f" ({len(job.tokenizer(text))} ids)" if job.tokenizer else ""
    return repr(text if len(text) < 400 else f"{text[:200]} ... {text[-190:]}") + count


def said_cut(job: Job, text: str | None) -> str:
    """What the plan says of a prompt that the text encoder will not see whole."""
    if job.tokenizer is None or not text:
        return ""
    cut = job.tokenizer(text)[1]
    return f" ({cut} tokens too long: {job.tokenizer.limit} are used)" if cut else ""


def describe_ranks(job: Job) -> str:
    parallel = job.recipe.parallel_config
    spread = ", ".join(f"{name} {size}" for name, size in plan.degrees(parallel).items() if size > 1) or "every degree 1"
    ways = [f"async_ulysses {push.way(job.device, parallel.ulysses_size)}"] if parallel.async_ulysses else []
    ways += ["fused_ulysses"] if parallel.fused_ulysses else []
    ways += [f"attn2d {parallel.attn2d_merge}"] if parallel.attn2d_size != (1, 1) else []
    vae = f"; VAE {parallel.parallel_vae_size} by {parallel.parallel_vae_split_dim}" if parallel.parallel_vae_size > 1 else ""
    return f"{parallel.world}: {spread}{' (' + ', '.join(ways) + ')' if ways else ''}{vae}"


def warm_up(job: Job) -> str:
    floored = [f"{n} frames would be {latent_frames(n)} latent frames" for n in job.recipe.compilation_config.num_frames]
    named = f"; the recipe names shapes: {', '.join(floored)}" if floored else ""
    shapes = ", ".join(f"{warm.request.size} in {warm.latent_shape[0]} latent frames" for warm in warm_jobs(job))
    return (f"one step each of {shapes}, before the timed steps" if shapes else "nothing is compiled") + named


def describe_sends(job: Job) -> str:
    """Bytes a rank and step in the busiest kind of step, by axis."""
    streams = 1 if job.negative is None else 2
    sent = plan.bytes_sent(job.recipe.parallel_config, job.work, streams)
    return ", ".join(f"{axis} {amount / 1e6:.3f} MB" for axis, amount in sent.items()) + " a rank and step" if sent else "nothing"


def weight_bytes(job: Job, part: str) -> int:
    """On one rank's device."""
    dtype, model, ranks = job.vae_dtype if part == "vae" else job.dtype, job.models[part], job.recipe.parallel_config.tp_size
    cut = tp.cut(model) if ranks > 1 else ()
    return sum(p.numel() * final_dtype(model, name, dtype).itemsize // (ranks if name in cut else 1)
               for name, p in model.state_dict().items())  # fmt: skip


def predicted_peak(job: Job, offload: bool = False) -> int:
    """Bytes on a device at the fullest moment: the text stage, denoising or the decode, by their largest tensors."""
    size = {part: weight_bytes(job, part) for part in job.models}
    experts = [size[part] for part in experts_of(job)] or [0]
    denoiser = max(experts) if offload else sum(experts)
    texts, denoise, decode = size.get("text_encoder", size.get("text_tower", 0)), denoise_bytes(job), decode_bytes(job)
    if job.kept.everything:
        return texts + denoiser + size["vae"] + max(denoise, decode)
    beside = size.get("text_tower", 0) if job.request.free_text_tower == "no" else 0
    return max(texts, denoiser + denoise + beside, size["vae"] + decode)


def describe_peak(job: Job) -> str:
    both, one = (f"{predicted_peak(job, offload) / 1e9:.2f} GB" for offload in (False, True))
    if len(experts_of(job)) < 2 or job.request.offload == "no":
        return f"{both} on a device"
    alone = "with one expert at a time"
    return f"{one} on a device, {alone}" if job.request.offload == "yes" else f"{both} on a device, or {one} {alone}"


def experts_of(job: Job) -> list[str]:
    return [part for part in job.models if part.startswith("transformer")]


def room(device: torch.device, world: int) -> float:
    """Bytes of tensors that a rank's device takes; CPU ranks share this machine's memory."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory - RESERVED
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / world


def offloads(job: Job, memory: float | None = None) -> bool:
    """Whether one expert at a time is on the device, by --offload; `memory` bytes of tensors (None: what this device takes)."""
    if len(experts_of(job)) < 2 or job.request.offload != "auto":
        return job.request.offload == "yes"
    memory = room(job.device, job.recipe.parallel_config.world) if memory is None else memory
    both, one = (predicted_peak(replace(job, kept=Kept()), offload) for offload in (False, True))
    return one < both > memory


def denoise_bytes(job: Job) -> int:
    """Of the denoiser's largest tensors, without its weights; 0 where latents are decoded."""
    if not (experts := len(experts_of(job))):
        return 0
    parallel, w, streams = job.recipe.parallel_config, job.work, 2 if job.negative is not None else 1
    tokens = -(-job.tokens // (parallel.world // parallel.cfg_size // parallel.tp_size))
    rows = 512 if job.preset.family == "wan" else max(map(len, job.texts))  # of text; a character is at least a token
    texts = experts * streams * w.layers * 2 * rows * w.kv_heads * w.head_dim * w.itemsize
    wide = w.heads * w.head_dim  # x, h, q, k, v, o in the model's dtype and two in fp32; the MLP's are not there with them
    return texts + tokens * ((2 * w.width + 2 * wide + 2 * w.kv_heads * w.head_dim) * w.itemsize + 2 * 4 * w.width)


def decode_bytes(job: Job) -> int:
    (f, y, x), parts = job.latent_shape, job.recipe.parallel_config.parallel_vae_size
    strip = (y, -(-x // parts))  # rows and columns give as much
    return job.models["vae"].decode_bytes(f, *strip, job.request.chunk or f, job.vae_dtype.itemsize)
