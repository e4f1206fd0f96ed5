"""From a request and a recipe to a job: everything that can be refused is refused here, before a weight is read.

Every rank prepares the same job from the same request; only the mesh, opened later, tells them apart.
"""

import math
import re
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from nanovgen import attention, plan, scheduler, video
from nanovgen.checkpoint import Component, build, check, locate, open_component
from nanovgen.mesh import Mesh
from nanovgen.recipe import PRESETS, Preset, Recipe, Request, negative_text, parse_size, read_json, resolve
from nanovgen.text import UMT5, PromptTokenizer, UMT5Config
from nanovgen.vae import VAE, VAEConfig
from nanovgen.wan import Wan, WanConfig

KNOWN_KERNELS = ("fa2", "fa3", "fa4")  # of recipes; installed apart from torch
HERE = Path(__file__).resolve().parent.parent / "weights"


@dataclass(frozen=True)
class Job:
    """A request that will run. `models` are on meta, by component name; `components` their files, in `folder` (a dry run
    of a known model has neither)."""

    request: Request
    recipe: Recipe
    name: str
    models: dict[str, nn.Module]
    components: dict[str, Component]
    folder: Path | None
    sigmas: torch.Tensor
    times: list[int]
    negative: str | None  # None: no pass uses it
    out: Path
    mesh: Mesh
    device: torch.device
    dtype: torch.dtype
    kernel: str
    tokenizer: PromptTokenizer | None = None  # None: latents are decoded, or a dry run without files
    stand_in: str = ""  # said where another kernel than the recipe's runs

    @property
    def latent_shape(self) -> tuple[int, int, int]:
        width, height = parse_size(self.request.size)
        return (self.request.frames - 1) // 4 + 1, height // 8, width // 8

    @property
    def work(self) -> plan.Work:
        return plan.work(self.models["transformer" if "transformer" in self.models else "transformer_2"].config,
                         self.latent_shape, self.dtype.itemsize)  # fmt: skip

    @property
    def tokens(self) -> int:
        f, y, x = self.latent_shape
        return f * (y // 2) * (x // 2)

    def expert(self, time: int) -> str:
        """Which transformer serves integer time `time`: the first above the boundary, the second below."""
        boundary = self.request.boundary
        return "transformer" if boundary is None or time >= 1000 * boundary else "transformer_2"

    def guidance(self, time: int) -> float:
        low = self.request.guidance_low
        return self.request.guidance if low is None or self.expert(time) == "transformer" else low


def find_preset(model: str) -> tuple[str, Preset, Path | None]:
    """The name, defaults and folder of what --model says. A known model's files are not touched yet."""
    for name, preset in PRESETS.items():
        if model in (name, preset.repo):
            folder = HERE / name if (HERE / name).is_dir() else None
            if name == "tiny-wan" and folder is None:
                raise ValueError(f"tiny-wan comes with the repository and is not at {HERE}; run from a clone, or give its folder")
            return name, preset, folder
    folder = locate(model)
    index = read_json(folder / "model_index.json")
    config = WanConfig.read(read_json(folder / "transformer" / "config.json"))
    experts = 2 if (folder / "transformer_2").is_dir() or "transformer_2" in index else 1
    alike = [(n, p) for n, p in PRESETS.items() if WanConfig(**p.transformer) == config and p.experts == experts]
    alike += [(n, p) for n, p in PRESETS.items() if WanConfig(**p.transformer).in_channels == config.in_channels
              and p.experts == experts and n != "tiny-wan"]  # fmt: skip
    if not alike:
        raise ValueError(f"{model} has {config.in_channels} input channels and {experts} transformers; no known model is so")
    name, preset = alike[0]
    if experts == 2 and index.get("boundary_ratio") is not None:
        preset = replace(preset, boundary=index["boundary_ratio"])
    return name, preset, folder


def own_shift(folder: Path | None) -> float | None:
    """The flow shift in the checkpoint's scheduler file. Ours may differ: the table holds the model authors' own."""
    if folder is None:
        return None
    config = read_json(folder / "scheduler" / "scheduler_config.json")
    if config.get("prediction_type", "flow_prediction") != "flow_prediction":
        raise ValueError(f"{folder}: the scheduler predicts {config['prediction_type']}; these models predict flow")
    return config.get("flow_shift")


def blueprint(preset: Preset) -> dict[str, nn.Module]:
    """A known model's parts on meta, from the table, with no file."""
    parts = ["transformer", "transformer_2"][: preset.experts]
    return {"text_encoder": build(UMT5, UMT5Config()),
            **{part: build(Wan, WanConfig(**preset.transformer)) for part in parts},
            "vae": build(VAE, VAEConfig())}  # fmt: skip


def open_models(folder: Path, parts: list[str]) -> tuple[dict[str, nn.Module], dict[str, Component]]:
    """Build the parts on meta by their config files, and hold every name and shape against their headers."""
    kinds = {"text_encoder": (UMT5, UMT5Config), "vae": (VAE, VAEConfig)}
    models, components = {}, {}
    for part in parts:
        kind, config = kinds.get(part, (Wan, WanConfig))
        components[part] = open_component(folder / part)
        models[part] = build(kind, config.read(components[part].config))
        check(models[part], components[part])
    return models, components


def prepare(request: Request, recipe: Recipe = Recipe(), dry_run: bool = False, world: int = 1, forked: bool = False) -> Job:
    """Refuse or accept, for `world` ranks, which may be forked CPU ones.

    Raises ValueError in one line: the numbers, the rule, the way out.
    """
    if not request.latents and not (request.prompt or "").strip():
        raise ValueError('the prompt is empty; say what the video shows, as in: run.py "a red circle moves right"')
    name, preset, folder = find_preset(request.model)
    request = resolve(request, preset)
    if preset.experts == 1 and request.boundary is not None:
        raise ValueError(f"boundary is {request.boundary} and {request.model} has one transformer; leave --boundary out")
    if request.solver not in scheduler.SOLVERS:
        raise ValueError(f"solver {request.solver!r} is not one of {', '.join(scheduler.SOLVERS)}")
    sigmas = scheduler.flow_sigmas(request.steps, request.shift, request.grid)
    device, dtype, kernel, stand_in = place(request, recipe, forked)
    times, out = scheduler.timesteps(sigmas), output_path(request)
    job = Job(request, recipe, name, {}, {}, None, sigmas, times, None, out, Mesh(), device, dtype, kernel, None, stand_in)
    if not request.latents and any(job.guidance(t) != 1 for t in job.times):
        job = replace(job, negative=negative_text(request))
    if not dry_run:
        check_place(job)
    if dry_run and folder is None:
        models, components = blueprint(preset), {}
    else:
        folder = folder or locate(preset.repo)
        experts = sorted({job.expert(t) for t in job.times}) if preset.experts == 2 else ["transformer"]
        models, components = open_models(folder, ["vae"] if request.latents else ["text_encoder", *experts, "vae"])
    tokenizer = None
    if components and not request.latents:
        tokenizer = PromptTokenizer(folder / "tokenizer")
        check_fit(models, tokenizer)
    job = replace(job, models=models, components=components, folder=folder, tokenizer=tokenizer)
    check_image(job)
    if request.latents:
        plan.check_world(recipe.parallel_config, world)
        plan.check_vae(recipe.parallel_config, world, job.latent_shape)
    else:
        plan.check(recipe.parallel_config, world, job.work)
    return job


def check_fit(models: dict[str, nn.Module], tokenizer: PromptTokenizer) -> None:
    """Refuse parts of two checkpoints: each may be whole and the run still die, or read wrong rows."""
    text, tokens = models["text_encoder"].config, tokenizer.tokenizer.get_vocab_size()
    for part, model in models.items():
        if isinstance(model, Wan) and model.config.text_dim != text.d_model:
            raise ValueError(f"{part} takes text of width {model.config.text_dim} and the text encoder gives {text.d_model}")
    if tokens > text.vocab_size:
        raise ValueError(f"the tokenizer has {tokens} tokens and the text encoder knows {text.vocab_size} tokens only")


def check_place(job: Job) -> None:
    """Refuse an encoder or an output folder that would fail at the end."""
    video.find_ffmpeg()
    width, height = parse_size(job.request.size)
    latents = 4 * 16 * math.prod(job.latent_shape)
    video.check_output(job.out, latents + width * height * 3 * 2)  # a clip is smaller than two of its frames, raw


def check_image(job: Job) -> None:
    wants = [m.config.in_channels > m.config.out_channels for m in job.models.values() if isinstance(m, Wan)]
    if wants and wants[0] != bool(job.request.image):
        raise ValueError(f"{job.request.model} makes video from " + ("an image and text: give --image FILE" if wants[0] else
                         "text alone: leave --image out, or take an image-to-video model"))  # fmt: skip
    if wants and job.request.image:
        video.read_image(job.request.image, *parse_size(job.request.size))


def place(request: Request, recipe: Recipe, forked: bool) -> tuple[torch.device, torch.dtype, str, str]:
    """Device, dtype, attention kernel, and what to say where it stands in for another."""
    kind = request.device if request.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    if kind not in ("cpu", "cuda") or (kind == "cuda" and not torch.cuda.is_available()):
        raise ValueError(f"device {kind} is not here; this machine has cpu" + (", cuda" if torch.cuda.is_available() else ""))
    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    dtypes["auto"] = dtypes["bfloat16" if kind == "cuda" else "float32"]
    if request.dtype not in dtypes:
        raise ValueError(f"dtype {request.dtype!r} is not one of {', '.join(dtypes)}")
    device, dtype = torch.device(kind), dtypes[request.dtype]
    kernel, default = recipe.attention_config.backend, attention.default_kernel(device, dtype)
    kernel = kernel.lower()
    if kernel in KNOWN_KERNELS and kernel not in attention.KERNELS:
        if not forked:
            raise ValueError(f"attention backend {kernel} is not installed here; auto takes {default}")
        return device, dtype, default, f" in place of {kernel}, as forked CPU ranks do"
    if kernel != "auto" and kernel not in attention.KERNELS:
        raise ValueError(f"attention backend {kernel!r} is not one of auto, {', '.join((*attention.KERNELS, *KNOWN_KERNELS))}")
    if kernel != "auto" and (kernel == "cpu") != (kind == "cpu"):
        raise ValueError(f"attention backend {kernel} does not run on {kind}; auto takes {default}")
    return device, dtype, default if kernel == "auto" else kernel, ""


def output_path(request: Request) -> Path:
    """--out, or a name made of the prompt that neither a video nor latents here have."""
    if request.out:
        return Path(request.out)
    stem = re.sub(r"[^a-z0-9]+", "-", (request.prompt or "video").lower()).strip("-")[:48].rstrip("-") or "video"
    names = (Path(f"{stem}{f'-{i}' if i else ''}.mp4") for i in range(10**6))
    return next(name for name in names if not (name.exists() or name.with_suffix(".latents.safetensors").exists()))
