"""A job to a video: encode the prompts, denoise, decode and write.

    prompt -> text states -> context per expert          noise -> latents (saved) -> frames -> MP4

Each part of the checkpoint is on the device only while it is used. Whatever fails after the denoising costs nothing:
the latents are on disk, and the message says how to go on from them.
"""

import copy
import gc
import json
import resource
import shlex
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, fields, replace
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from tqdm import tqdm

from nanovgen import attention, cfg, checkpoint, checksum, compiled, fp8, mesh, plan, scheduler, summary, tp, vae_parallel, video
from nanovgen.cosmos import Cosmos
from nanovgen.job import Job, find_preset, warm_jobs
from nanovgen.recipe import Request, parse_size
from nanovgen.text import encode_prompt
from nanovgen.wan import Wan


class Stages:
    """Seconds and peak memory by stage, and what was compiled too late."""

    def __init__(self, device: torch.device):
        self.device, self.rows = device, {}
        self.graphs: int | None = None  # compiled in the timed steps; None: nothing was to be compiled

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        gpu = self.device.type == "cuda"
        if gpu:
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        yield
        if gpu:
            torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() if gpu else 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        seconds, before = self.rows.get(name, (0.0, 0))
        self.rows[name] = (seconds + time.perf_counter() - start, max(before, peak))

    def step(self, job: Job, i: int, x: Tensor, v: Tensor) -> None:
        """Told on every rank that step i + 1 is done: it took latents x and velocity v. For servers; a run says it by its bar."""


def load(job: Job, part: str, stages: Stages) -> nn.Module:
    """A part with its weights, on the device for as long as the caller or `job.kept` holds it; the job keeps the empty one."""
    if part in job.kept.parts:
        return job.kept.parts[part]
    component, model = job.components[part], copy.deepcopy(job.models[part])
    total = sum(component.sizes[model.hub_name(name)] for name in model.state_dict())
    model = tp.split(model, job.mesh.tp)  # of denoisers and Cosmos3's text tower; others have nothing to cut
    with stages("load"), bar(job, total=total, unit="B", unit_scale=True, desc=f"load {part}") as progress:
        dtype = job.vae_dtype if part == "vae" else job.dtype
        model = checkpoint.load(model, component, job.device, dtype, progress.update)
    if part.startswith("transformer"):
        if job.recipe.quant_config.quant_algo == "FP8":
            fp8.quantize_linears(model)
        if job.recipe.torch_compile_config.enable:
            compiled.compile_blocks(model, compiled.SEARCHED)
    if part == "vae":
        model = model.laid_out()
        if job.recipe.torch_compile_config.vae:
            compiled.compile_blocks(model)
    if job.kept.everything:
        job.kept.parts[part] = model
    return model


def bar(job: Job, **options: object) -> tqdm:
    """A progress bar, on the first rank alone."""
    return tqdm(disable=job.mesh.world.rank > 0, **options)


def check_finite(x: Tensor, stage: str) -> Tensor:
    if not x.isfinite().all():
        raise FloatingPointError(f"{stage} has values that are not finite; nothing after it can be right")
    return x


def own_streams(job: Job) -> set[int]:
    """The guidance streams that this rank ever runs: 0 is the prompt, 1 the negative prompt."""
    return {i for t in job.times for i in cfg.mine(1 if job.guidance(t) == 1 else 2, job.mesh.cfg)}


Text = Tensor | list[attention.KV]  # what the denoiser sees of a text: Wan states (1, rows, C), Cosmos3 keys and values by layer


def encode_texts(job: Job, stages: Stages) -> dict[int, Text]:
    """The texts that this rank's half uses, read once each, by stream."""
    encoder = load(job, "text_tower" if job.preset.family == "cosmos" else "text_encoder", stages)
    with stages("text"):
        found = {}
        for stream in own_streams(job):
            ids, name = job.tokenizer(job.texts[stream]), f"text encoding ({('prompt', 'negative prompt')[stream]})"
            if job.preset.family == "cosmos":
                found[stream] = encoder(torch.tensor([ids], device=job.device))
                check_finite(found[stream][-1][1], name)
            else:
                found[stream] = check_finite(encode_prompt(encoder, ids[0], job.tokenizer.limit), name)
    if job.preset.family == "cosmos" and not frees_text_tower(job):
        job.kept.parts["text_tower"] = encoder
    return found


def frees_text_tower(job: Job) -> bool:
    """By --free-text-tower; auto keeps it only where half the device's memory would hold both towers."""
    if job.request.free_text_tower != "auto":
        return job.request.free_text_tower == "yes"
    towers = 2 * summary.weight_bytes(job, "text_tower")
    return 2 * towers > summary.room(job.device, job.recipe.parallel_config.world)


def image_condition(job: Job, stages: Stages) -> Tensor:
    """What image-to-video is given. Cosmos3: the image's latents (1, 48, 1, y, x), which are the clip's first.

    Wan: a mask (1, 4, f, y, x), 1 on frame 0, and the latents of a clip whose first frame is the image and whose others
    are mid-grey, to stand beside the noise.
    """
    (f, y, x), (width, height), cosmos = job.latent_shape, parse_size(job.request.size), job.preset.family == "cosmos"
    latents = torch.empty(1, job.preset.latent[0], 1 if cosmos else f, y, x, device=job.device)
    if job.mesh.vae is not None:  # the ranks of the parallel VAE, of which the first has the file; the others are told
        vae = load(job, "vae", stages)
        with stages("image"):
            clip = torch.empty(1, 3, 1, height, width)
            if job.mesh.world.rank == 0:
                clip = video.read_image(job.request.image, width, height, cover=cosmos)
            clip = mesh.broadcast(clip.to(job.device), job.mesh.vae)
            if not cosmos:  # the VAE is causal: Cosmos3's first latent frame depends on the first picture alone
                clip = torch.cat([clip, clip.new_zeros(1, 3, job.request.frames - 1, height, width)], dim=2)
            latents = vae_parallel.encode(vae, clip, job.request.chunk or None, job.mesh.vae, split_dim(job))
    latents = check_finite(mesh.broadcast(latents, job.mesh.world), "image encoding")
    if cosmos:
        return latents
    mask = torch.zeros_like(latents[:, :4])
    mask[:, :, 0] = 1
    return torch.cat([mask, latents], dim=1)


def split_dim(job: Job) -> int:
    return vae_parallel.DIMS[job.recipe.parallel_config.parallel_vae_split_dim]


def velocity(job: Job, model: nn.Module, x: Tensor, t: int, contexts: dict[int, NamedTuple]) -> Tensor:
    """Guided velocity, fp32, the same on every rank; guidance 1 runs the prompt alone."""
    compiling = job.recipe.torch_compile_config.enable
    attend = plan.bind(job.recipe.parallel_config, job.mesh, job.tokens, attention.find_kernel(job.kernel, compiling),
                       attention.find_merge(compiling))  # fmt: skip
    x, time, guidance = x.to(job.dtype), torch.tensor([t], device=x.device), job.guidance(t)
    streams = 1 if guidance == 1 else 2
    found = cfg.run_streams(lambda i: model(x, time, contexts[i], attend, job.mesh.seq), streams, job.mesh.cfg)
    return cfg.guide(found, guidance)


def make_context(job: Job, model: Wan | Cosmos, text: Text) -> NamedTuple:
    """The model's own Context: what one text and this clip's shape fix for all steps."""
    if isinstance(model, Cosmos):
        return model.context(text, *job.latent_shape, job.request.fps, given=int(job.request.image is not None))
    return model.context(text, *job.latent_shape)


def denoise(job: Job, texts: dict[int, Text], condition: Tensor | None, stages: Stages) -> Tensor:
    """Latents (1, c, f, y, x), fp32 on the device. Each expert has its steps in a row; offloading, it is here for them alone."""
    offload, compiling = summary.offloads(job), job.recipe.torch_compile_config.enable
    experts = {} if offload else {part: load(job, part, stages) for part in summary.experts_of(job)}
    generator = torch.Generator().manual_seed(job.request.seed)  # on the CPU: the same on every machine
    x = torch.randn(1, job.preset.latent[0], *job.latent_shape, generator=generator).to(job.device)
    if job.preset.family == "cosmos" and condition is not None:
        x[:, :, :1], condition = condition, None  # known, and the model moves it nowhere
    (state, step), every, stages.graphs = scheduler.SOLVERS[job.request.solver], job.request.check, 0 if compiling else None
    with bar(job, total=len(job.times), desc="denoise", unit="step") as progress:
        for part, steps in groupby(enumerate(job.times), lambda numbered: job.expert(numbered[1])):
            if offload:
                experts = {part: load_alone(job, part, experts, stages)}
            if job.preset.experts > 1:
                progress.set_postfix(expert="high" if part == "transformer" else "low", refresh=False)
            if compiling and part == job.expert(job.times[0]):
                with stages("warm-up"):
                    warm_up(job, part, experts[part], texts, condition)
            before = compiled.graphs() if compiling else 0
            with stages("denoise"):
                contexts = {i: make_context(job, experts[part], text) for i, text in texts.items()}
                for i, t in steps:
                    given = x if condition is None else torch.cat([x, condition], dim=1)
                    v = velocity(job, experts[part], given, t, contexts)
                    old, (state, x) = x, step(state, job.sigmas, i, x, v)
                    check_finite(x, f"denoising, step {i + 1}")
                    if every and ((i + 1) % every == 0 or i + 1 == len(job.times)):
                        checksum.check_alike(x, job.mesh.world, f"denoising, step {i + 1}: the latents")
                    progress.update()
                    stages.step(job, i, old, v)
            if compiling:
                stages.graphs += compiled.graphs() - before
    job.mesh.check_used(["tp", "ring", "kv_axis", "q_axis", "ulysses", "seq", *(["cfg"] if job.negative is not None else [])])
    return x


def load_alone(job: Job, part: str, experts: dict[str, nn.Module], stages: Stages) -> nn.Module:
    """An expert, once the other has left the device."""
    for other in set(summary.experts_of(job)) - {part}:
        experts.pop(other, None)
        job.kept.parts.pop(other, None)
    collect(job)
    return load(job, part, stages)


def collect(job: Job) -> None:
    """A compiled model refers to itself, and would be on the device still when the next one comes."""
    if job.recipe.torch_compile_config.enable:
        gc.collect()


def warm_up(job: Job, part: str, model: nn.Module, texts: dict[int, Text], condition: Tensor | None) -> None:
    """One step at every shape of the warm-up, by one expert: the other has the same code. What it sends is not counted."""
    time, before = next(t for t in job.times if job.expert(t) == part), dict(job.mesh.sent)
    channels = job.preset.latent[0] + (condition.shape[1] if isinstance(model, Wan) and condition is not None else 0)
    for shape in warm_jobs(job):
        contexts = {i: make_context(shape, model, text) for i, text in texts.items()}
        velocity(shape, model, torch.zeros(1, channels, *shape.latent_shape, device=job.device), time, contexts)
        if job.kept.everything:
            job.kept.warmed.add((shape.request.size, shape.request.frames))
    job.mesh.sent.clear()
    job.mesh.sent.update(before)


def latents_path(out: Path) -> Path:
    return out.with_suffix(".latents.safetensors")


def save_latents(latents: Tensor, job: Job) -> Path:
    """Under its name only when whole, with the request inside."""
    path = latents_path(job.out)
    request = replace(job.request, out=str(job.out))  # also where the name was made of the prompt
    try:
        with video.whole(path) as part:
            save_file({"latents": latents.cpu()}, part, metadata={"request": json.dumps(asdict(request))})
    except SafetensorError as error:
        raise OSError(f"cannot write {path}: {error}") from None
    return path


def resume(request: Request) -> Request:
    """The request stored in --latents, with what was given anew: where it goes, on what, how it is decoded, by whose VAE."""
    try:
        with safe_open(request.latents, framework="pt") as file:
            stored = Request(**json.loads(file.metadata()["request"]))
            shape, (width, height) = file.get_slice("latents").get_shape(), parse_size(stored.size)
            channels, pixels = find_preset(stored.model)[1].latent
            wanted = [1, channels, (stored.frames - 1) // 4 + 1, height // pixels, width // pixels]
            if shape != wanted:
                raise ValueError(f"they are {shape} and its request gives {wanted}")
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{request.latents} holds no latents that we saved: {error}") from None
    anew = {f.name: getattr(request, f.name) for f in fields(Request) if getattr(request, f.name) != f.default}
    free = ("latents", "out", "sheet", "device", "dtype", "vae_dtype", "chunk", "fps", "model")
    if fixed := [name for name, value in anew.items() if name not in free and value != getattr(stored, name)]:
        raise ValueError(f"--latents decodes what was made; leave {', '.join(fixed)} out, or make it anew without --latents")
    return replace(stored, **({"sheet": False, "device": "auto", "dtype": "auto", "vae_dtype": "auto"} | anew))


def decode_again(saved: Path, out: Path) -> str:
    """The command that goes on from saved latents."""
    return shlex.join(["python", "run.py", "--latents", str(saved), "--out", str(out)])


def read_latents(job: Job) -> Tensor:
    with safe_open(job.request.latents, framework="pt") as file:
        return file.get_tensor("latents").to(job.device)


def decode(job: Job, latents: Tensor, stages: Stages) -> list[np.ndarray]:
    """Decode on the ranks of the parallel VAE; the first of them, rank 0, writes the MP4. Frames for the contact sheet."""
    vae = load(job, "vae", stages)
    chunks = vae_parallel.decode(vae, latents, job.request.chunk or None, job.mesh.vae, split_dim(job))
    if job.mesh.world.rank > 0:
        with stages("decode"):
            for chunk in chunks:
                check_finite(chunk, "decoding")
        return []
    frames = []
    with video.VideoWriter(job.out, *parse_size(job.request.size), job.request.fps) as writer:
        while True:
            with stages("decode"):
                chunk = next(chunks, None)
                pixels = None if chunk is None else video.to_pixels(check_finite(chunk, "decoding"))
            if pixels is None:
                break
            with stages("write"):  # what is not hidden behind the next chunk's decode
                writer.write(pixels)
            if job.request.sheet:
                frames.extend(pixels)
        with stages("write"):
            writer.close()
    return frames


def write_beside(job: Job, frames: list[np.ndarray], report: dict) -> None:
    """The contact sheet, where it is asked for, and the report. The video is whole by now, and what fails here says so."""
    try:
        if frames:
            video.contact_sheet(np.stack(frames), job.out.with_suffix(".png"))
        with video.whole(job.out.with_suffix(".json")) as part:
            part.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n")
    except OSError as error:
        raise OSError(f"{job.out} is whole, but not what belongs beside it: {error.strerror or error}") from None


def generate(job: Job, stages: Stages | None = None) -> dict:
    """Run a job that `job.prepare` accepted, on this rank of its mesh; returns what rank 0 also writes as JSON."""
    stages, start = stages or Stages(job.device), time.perf_counter()
    first = job.mesh.world.rank == 0
    torch.backends.cudnn.allow_tf32 = False  # else the inputs of an fp32 VAE's convolutions are rounded to 10 bits: 1e-3 off
    with torch.inference_mode():
        if job.request.latents:
            latents, saved = read_latents(job), Path(job.request.latents)
        else:
            attention.prove(attention.KERNELS[job.kernel], job.device, job.dtype, job.work.head_dim)
            texts = encode_texts(job, stages)
            condition = image_condition(job, stages) if job.request.image else None
            latents = denoise(job, texts, condition, stages)
            collect(job)
            saved = save_latents(latents, job) if first else latents_path(job.out)
        try:
            frames = decode(job, latents, stages) if job.mesh.vae is not None else []
        except (Exception, KeyboardInterrupt) as error:
            what = " ".join(f"{type(error).__name__}: {error}".split()).rstrip(": ")
            kind = KeyboardInterrupt if isinstance(error, KeyboardInterrupt) else RuntimeError
            again = decode_again(saved, job.out)
            raise kind(f"no video, but the latents are safe ({what}); go on from them with: {again}") from error
    report = describe_run(job, stages, saved, time.perf_counter() - start)
    if first:
        write_beside(job, frames, report)
    return report


def describe_run(job: Job, stages: Stages, saved: Path, seconds: float) -> dict:
    """All of the request, the plan and the figures of rank 0."""
    return {
        "request": asdict(replace(job.request, out=str(job.out))),
        "recipe": asdict(job.recipe),
        "plan": summary.describe(job),
        "sigmas": job.sigmas.tolist(),
        "timesteps": job.times,
        "stages": {name: {"seconds": s, "peak_bytes": peak} for name, (s, peak) in stages.rows.items()},
        "graphs_in_steps": stages.graphs,
        "seconds": seconds,
        "bytes_sent": job.mesh.bytes_sent(),
        "latents": str(saved),
        "output": str(job.out),
        "torch": torch.__version__,
    }
