"""Clips of the same prompts by many recipes, and by one rank in ways that should make no difference: quality.py's material.

Each is a file VARIANT.DTYPE.NUMBER.safetensors, latents and pixels as they are before H.264. CPU ranks are forked, one number
of ranks after another, with one thread each: another number of threads is another order of sums.
"""

import gc
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from nanovgen import attention, generate, launch, mesh, plan, vae_parallel, video
from nanovgen import job as jobs
from nanovgen.choose import recipes
from nanovgen.job import Job
from nanovgen.mesh import Axis, Mesh
from nanovgen.metrics import Clip
from nanovgen.recipe import AttentionConfig, ParallelConfig, Recipe, Request, read_recipe


@dataclass(frozen=True)
class Variant:
    """How a set of clips is made."""

    name: str
    recipe: Recipe = field(default_factory=Recipe)
    threads: int = 1  # of a CPU rank
    swept: bool = False  # asked for with all others of so many ranks: where it cannot work, that is said and no more

    @property
    def world(self) -> int:
        return self.recipe.parallel_config.world


REFERENCE = Variant("one rank")
AGAIN = Variant("one rank again")
IN_REVERSE = Variant("one rank, keys in reverse", Recipe(attention_config=AttentionConfig("reversed")))
TWO_THREADS = Variant("one rank, two threads", threads=2)
FLOOR = (AGAIN, IN_REVERSE, TWO_THREADS)
Jobs = dict[tuple[Variant, str], Job]  # by how, and in which dtype


def label(parallel: ParallelConfig) -> str:
    vae = f", VAE {parallel.parallel_vae_size} by {parallel.parallel_vae_split_dim}" if parallel.parallel_vae_size > 1 else ""
    return plan.name_of(parallel) + vae


def sweep(world: int) -> Iterator[Variant]:
    """Every recipe of so many ranks, and the VAE on all of them, both ways."""
    if world == 1:
        return
    strips = [ParallelConfig(ring_size=world, parallel_vae_size=world, parallel_vae_split_dim=dim) for dim in ("width", "height")]
    for parallel in [*recipes(world), *strips]:
        yield Variant(label(parallel), Recipe(parallel_config=parallel), swept=True)


def choose(names: list[str], worlds: list[int]) -> list[Variant]:
    """Recipes by name and by number of ranks; one that is there already, or is one rank, is left out."""
    named = [(name, read_recipe(name)) for name in names]
    labelled = [Variant(f"{name}: {label(recipe.parallel_config)}", recipe) for name, recipe in named]
    found = []
    for variant in [*labelled, *(v for world in worlds for v in sweep(world))]:
        if variant.recipe not in [Recipe(), *(v.recipe for v in found)]:
            found.append(variant)
    return found


def prepare(request: Request, dtypes: list[str], chosen: list[Variant], launched: int) -> tuple[Jobs, dict[str, str]]:
    """Jobs, the reference's and the floor's first, and why swept recipes are not among them. No weight is read.

    Raises ValueError, in one line, for what was asked for by name and cannot work.
    """
    forked = launched == 1 and any(v.world > 1 for v in chosen)
    if forked and request.device == "auto":
        request = replace(request, device="cpu")
    device = jobs.place(request, Recipe(), forked)[0]
    if forked and device.type == "cuda":
        raise ValueError("recipes of several GPUs are started by torchrun, one rank a GPU; forked ranks are --device cpu")
    found, refused, floor = {}, {}, [v for v in FLOOR if v.threads == 1 or device.type == "cpu"]
    for variant in [REFERENCE, *floor, *chosen]:
        for dtype in dtypes:
            world = launched if variant in chosen and launched > 1 else variant.world
            try:
                found[variant, dtype] = jobs.prepare(replace(request, dtype=dtype), variant.recipe, world=world, forked=forked)
            except ValueError as error:
                if not variant.swept:
                    raise
                refused[variant.name] = str(error)
    return found, refused


def make_clip(job: Job) -> Clip:
    """Latents and, on the VAE's ranks, pixels."""
    stages = generate.Stages(job.device)
    torch.backends.cudnn.allow_tf32 = False  # as generate.py decodes
    with torch.inference_mode():
        attention.prove(attention.KERNELS[job.kernel], job.device, job.dtype, job.work.head_dim)
        latents = generate.denoise(job, generate.encode_texts(job, stages), None, stages)
        gc.collect()  # as generate.py does before the VAE comes
        if job.mesh.vae is None:
            return Clip(latents=latents.cpu())
        vae, chunk = generate.load(job, "vae", stages), job.request.chunk or None
        chunks = vae_parallel.decode(vae, latents, chunk, job.mesh.vae, generate.split_dim(job))
        pixels = np.concatenate([video.to_pixels(generate.check_finite(chunk, "decoding")) for chunk in chunks])
    return Clip(torch.from_numpy(pixels), latents.cpu())


def clip_path(folder: Path, variant: Variant, dtype: str, i: int) -> Path:
    name = "".join(c if c.isalnum() else "-" for c in variant.name)
    return folder / f"{name}.{dtype}.{i}.safetensors"


def make_clips(found: Jobs, prompts: list[str], folder: Path, world: int) -> None:
    """On one of `world` ranks: the clips of these jobs, written by the first. A job of one rank is run by each of them."""
    device, rank = next(iter(found.values())).device, int(os.environ.get("RANK", 0))
    if world > 1:
        device = mesh.open_world(device)
    for (variant, dtype), job in found.items():
        if device.type == "cpu":
            torch.set_num_threads(variant.threads)
        m, parallel = Mesh(world=Axis("world", rank=rank)), variant.recipe.parallel_config
        if variant.world > 1:
            m = mesh.open_mesh(device, plan.degrees(parallel), parallel.parallel_vae_size)
        for i, prompt in enumerate(prompts):
            start = time.perf_counter()
            request = replace(job.request, prompt=prompt)
            clip = make_clip(replace(job, device=device, mesh=m, request=request, kept=jobs.Kept()))  # what stays is this clip's
            if rank == 0:
                save_file({"latents": clip.latents, "pixels": clip.pixels}, clip_path(folder, variant, dtype, i))
                print(f"{variant.name}, {dtype}, clip {i}: {time.perf_counter() - start:.1f} s", file=sys.stderr, flush=True)


def make_all(found: Jobs, prompts: list[str], folder: Path, launched: int) -> int:
    """Here, on a GPU or as one of torchrun's ranks; else on forked CPU ranks. The exit status."""
    if launched > 1 or next(iter(found.values())).device.type == "cuda":
        make_clips(found, prompts, folder, launched)
        mesh.close_world()
        return 0
    for world in sorted({variant.world for variant, _ in found}):
        part = {key: job for key, job in found.items() if key[0].world == world}
        if status := launch.run_ranks(world, partial(make_clips, part, prompts, folder, world)):
            return status
    return 0
