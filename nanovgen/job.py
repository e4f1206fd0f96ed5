"""From a request and a recipe to a job: everything that can be refused is refused here, before a weight is read.

Every rank prepares the same job from the same request; only the mesh, opened later, tells them apart.
"""

import math
import re
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import nn

from nanovgen import attention, compiled, dress, fp8, plan, scheduler, video
from nanovgen.checkpoint import Component, build, check, locate, open_component
from nanovgen.cosmos import Cosmos, CosmosConfig, TextTower
from nanovgen.dress import ChatTokenizer
from nanovgen.mesh import Mesh
from nanovgen.recipe import PRESETS, Preset, Recipe, Request, negative_text, parse_size, read_json, resolve
from nanovgen.text import UMT5, PromptTokenizer, UMT5Config
from nanovgen.vae import VAE, VAEConfig
from nanovgen.wan import Wan, WanConfig

RACK_KERNELS = ("fa2", "fa3", "fa4", "fa3-fp8")  # of recipes that forked CPU ranks may try out with another kernel
CONFIGS = {"wan": WanConfig, "cosmos": CosmosConfig}
HERE = Path(__file__).resolve().parent.parent / "weights"


@dataclass
class Kept:
    """What stays on the device for the next job of the same model: nothing after a run, of a server's parts all that fit."""

    everything: bool = False
    parts: dict[str, nn.Module] = field(default_factory=dict)  # by component name
    warmed: set[tuple[str, int]] = field(default_factory=set)  # size and frames that they are compiled for


@dataclass(frozen=True)
class Job:
    """A request that will run. `models` are on meta, by component name; `components` their files, in `folder` (a dry run
    of a known model has neither)."""

    request: Request
    recipe: Recipe
    name: str
    preset: Preset
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
    tokenizer: PromptTokenizer | ChatTokenizer | None = None  # None: latents are decoded, or a dry run without files
    stand_in: str = ""  # said where another kernel than the recipe's runs
    kept: Kept = field(default_factory=Kept, compare=False)

    @property
    def latent_shape(self) -> tuple[int, int, int]:
        (width, height), pixels = parse_size(self.request.size), self.preset.latent[1]
        return (self.request.frames - 1) // 4 + 1, height // pixels, width // pixels

    @property
    def texts(self) -> list[str]:
        """What the text side reads, by guidance stream: the prompt and, where a pass uses it, the negative prompt."""
        plain = [self.request.prompt, *([] if self.negative is None else [self.negative])]
        return plain if self.preset.family == "wan" else [dressed(self.request, text, i > 0) for i, text in enumerate(plain)]

    @property
    def vae_dtype(self) -> torch.dtype:
        return find_vae_dtype(self.request.vae_dtype, self.device)

    @property
    def work(self) -> plan.Work:
        return plan.work(self.models["transformer" if "transformer" in self.models else "transformer_2"].config,
                         self.latent_shape, self.dtype.itemsize, attention.KERNELS[self.kernel])  # fmt: skip

    @property
    def tokens(self) -> int:
        f, y, x = self.latent_shape
        return f * -(-y // 2) * -(-x // 2)

    def expert(self, time: int) -> str:
        """Which transformer serves integer time `time`: the first above the boundary, the second below."""
        boundary = self.request.boundary
        return "transformer" if boundary is None or time >= 1000 * boundary else "transformer_2"

    def guidance(self, time: int) -> float:
        low = self.request.guidance_low
        return self.request.guidance if low is None or self.expert(time) == "transformer" else low


def find_vae_dtype(name: str, device: torch.device) -> torch.dtype:
    """What --vae-dtype means there."""
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return getattr(torch, name)


def dressed(request: Request, text: str, negative: bool) -> str:
    """Cosmos3's chat around a prompt, by --dressing."""
    plain = dress.json_prompt(request.prompt) is None  # the prompt decides for the negative prompt too
    sentences = {"full": True, "chat": False, "bare": False}.get(request.dressing, plain)
    said = dress.dress(text, request.frames, request.fps, parse_size(request.size), sentences, negative)
    return dress.chat(said, request.frames, system=request.dressing != "bare")


def find_preset(model: str) -> tuple[str, Preset, Path | None]:
    """The name, defaults and folder of what --model says. A known model's files are not touched yet."""
    for name, preset in PRESETS.items():
        if model in (name, preset.repo):
            folder = HERE / name if (HERE / name).is_dir() else None
            if name.startswith("tiny-") and folder is None:
                raise ValueError(f"{name} comes with the repository and is not at {HERE}; run from a clone, or give its folder")
            return name, preset, folder
    folder = locate(model)
    index, config = read_json(folder / "model_index.json"), read_json(folder / "transformer" / "config.json")
    family = "cosmos" if str(config.get("_class_name")).startswith("Cosmos3") else "wan"
    kind, config = CONFIGS[family], CONFIGS[family].read(config)
    experts = 2 if (folder / "transformer_2").is_dir() or "transformer_2" in index else 1
    known = [(n, p) for n, p in PRESETS.items() if p.family == family and p.experts == experts]
    alike = [(n, p) for n, p in known if kind(**p.transformer) == config]
    alike += [(n, p) for n, p in known if not n.startswith("tiny-")
              and (family == "cosmos" or kind(**p.transformer).in_channels == config.in_channels)]  # fmt: skip
    if not alike:
        channels = f"{config.in_channels} input channels and " if family == "wan" else ""
        raise ValueError(f"{model} has {channels}{experts} transformers; no known model is so")
    name, preset = alike[0]
    if experts == 2 and index.get("boundary_ratio") is not None:
        preset = replace(preset, boundary=index["boundary_ratio"])
    return name, preset, folder


def stored_schedule(folder: Path | None) -> scheduler.Stored | None:
    """What the checkpoint's scheduler file asks for. Ours may differ: the table holds the model authors' own."""
    return folder and scheduler.stored_schedule(read_json(folder / "scheduler" / "scheduler_config.json"))


def blueprint(preset: Preset) -> dict[str, nn.Module]:
    """A known model's parts on meta, from the table, with no file."""
    config, vae = CONFIGS[preset.family](**preset.transformer), build(VAE, VAEConfig(**preset.vae))
    if preset.family == "cosmos":
        return {"text_tower": build(TextTower, config), "transformer": build(Cosmos, config), "vae": vae}
    parts = ["transformer", "transformer_2"][: preset.experts]
    return {"text_encoder": build(UMT5, UMT5Config()), **{part: build(Wan, config) for part in parts}, "vae": vae}


def open_models(folder: Path, parts: dict[str, tuple[str, type, type]],
                like: Job | None = None) -> tuple[dict[str, nn.Module], dict[str, Component]]:  # fmt: skip
    """Build the parts on meta by their config files, and hold every name and shape against their headers.

    Those of `like` are taken as they are.
    """
    models, components, opened = {}, {}, {}
    for part, (where, kind, config) in parts.items():
        if like is not None and part in like.models:
            models[part], components[part] = like.models[part], like.components[part]
            continue
        if where not in opened:
            opened[where] = open_component(folder / where)
        components[part] = opened[where]
        models[part] = build(kind, config.read(components[part].config))
        check(models[part], components[part])
    return models, components


def wanted_parts(job: Job) -> dict[str, tuple[str, type, type]]:
    """The parts that this job runs: folder, model and config class of each."""
    vae = {"vae": ("vae", VAE, VAEConfig)}
    if job.request.latents:
        return vae
    if job.preset.family == "cosmos":
        return {
            "text_tower": ("transformer", TextTower, CosmosConfig),
            "transformer": ("transformer", Cosmos, CosmosConfig),
        } | vae
    experts = sorted({job.expert(t) for t in job.times}) if job.preset.experts == 2 else ["transformer"]
    return {"text_encoder": ("text_encoder", UMT5, UMT5Config), **{part: (part, Wan, WanConfig) for part in experts}} | vae


def prepare(request: Request, recipe: Recipe = Recipe(), dry_run: bool = False, world: int = 1, forked: bool = False,
            like: Job | None = None) -> Job:  # fmt: skip
    """Refuse or accept, for `world` ranks, which may be forked CPU ones.

    `like`: an earlier job of the same model and recipe, on this rank's mesh. Its files are not opened again, what it kept
    is used, and only the first rank of its mesh looks at the output's place and at the image: it alone will use them.
    Raises ValueError in one line: the numbers, the rule, the way out.
    """
    if not request.latents and not (request.prompt or "").strip():
        raise ValueError('the prompt is empty; say what the video shows, as in: run.py "a red circle moves right"')
    name, preset, folder = (like.name, like.preset, like.folder) if like else find_preset(request.model)
    request = resolve(request, preset)
    if preset.experts == 1 and request.boundary is not None:
        raise ValueError(f"boundary is {request.boundary} and {request.model} has one transformer; leave --boundary out")
    if request.solver not in scheduler.SOLVERS:
        raise ValueError(f"solver {request.solver!r} is not one of {', '.join(scheduler.SOLVERS)}")
    check_dressing(request, preset)
    sigmas = (scheduler.karras_sigmas(request.steps) if request.grid == "karras" else
              scheduler.flow_sigmas(request.steps, request.shift, request.grid))  # fmt: skip
    device, dtype, kernel, stand_in = place(request, recipe, forked)
    times, out = scheduler.timesteps(sigmas), output_path(request)
    job = Job(
        request, recipe, name, preset, {}, {}, None, sigmas, times, None, out, Mesh(), device, dtype, kernel, None, stand_in
    )
    if like is not None:
        job = replace(job, device=like.device, mesh=like.mesh, kept=like.kept)
    if not dry_run and job.mesh.world.rank == 0:
        check_place(job)
    if dry_run and folder is None:
        models, components = blueprint(preset), {}
    else:
        folder = folder or locate(preset.repo)
        models, components = open_models(folder, wanted_parts(job), like)
    if not request.latents and any(job.guidance(t) != 1 for t in job.times):
        job = replace(job, negative=negative(request, preset, folder))
    job = replace(job, models=models, components=components, folder=folder)
    if components and not request.latents:
        job = replace(job, tokenizer=like.tokenizer if like else open_tokenizer(job))
    check_image(job)
    if request.latents:
        plan.check_world(recipe.parallel_config, world)
        plan.check_vae(recipe.parallel_config, world, job.latent_shape)
    else:
        plan.check(recipe.parallel_config, world, job.work)
        compiled.check(recipe.torch_compile_config.enable, recipe.parallel_config.tp_size)
        fp8.check(recipe.quant_config.quant_algo, recipe.parallel_config.tp_size, device, dtype)
        warm_jobs(job)
    return job


def warm_jobs(job: Job) -> list[Job]:
    """This job at each shape of the recipe's compilation_config, and as it is, where a compiled model has not seen it yet."""
    shapes = [(f"{width}x{height}", frames) for width, height, frames in job.recipe.compilation_config.shapes()]
    if not job.recipe.torch_compile_config.enable:
        return []
    wanted = dict.fromkeys([*shapes, (job.request.size, job.request.frames)])
    return [replace(job, request=replace(job.request, size=size, frames=frames))
            for size, frames in wanted if (size, frames) not in job.kept.warmed]  # fmt: skip


def check_dressing(request: Request, preset: Preset) -> None:
    if request.dressing not in ("auto", "full", "chat", "bare"):
        raise ValueError(f"dressing {request.dressing!r} is not one of auto, full, chat, bare")
    if request.free_text_tower not in ("auto", "yes", "no"):
        raise ValueError(f"free-text-tower {request.free_text_tower!r} is not one of auto, yes, no")
    if request.offload not in ("auto", "yes", "no"):
        raise ValueError(f"offload {request.offload!r} is not one of auto, yes, no")
    if request.offload != "auto" and preset.experts == 1:
        raise ValueError(f"--offload is for two experts, and {request.model} has one transformer; leave it out")
    if preset.family == "wan" and (request.dressing, request.free_text_tower) != ("auto", "auto"):
        raise ValueError(f"--dressing and --free-text-tower are Cosmos3's; leave them out with {request.model}")


def negative(request: Request, preset: Preset, folder: Path | None) -> str:
    """The negative prompt in use: what was given, else the checkpoint's own, else ours (for Cosmos3 the empty one)."""
    if request.negative_prompt is not None or preset.family == "wan":
        return negative_text(request)
    return (folder and dress.read_negative(folder)) or ""


def open_tokenizer(job: Job) -> PromptTokenizer | ChatTokenizer:
    """The checkpoint's. Refuses parts of two checkpoints: each may be whole and the run still die, or read wrong rows."""
    if job.preset.family == "cosmos":
        tokenizer, text, rows = (
            ChatTokenizer(job.folder / "text_tokenizer"),
            "text tower",
            job.models["text_tower"].config.vocab_size,
        )
    else:
        tokenizer, text = PromptTokenizer(job.folder / "tokenizer"), "text encoder"
        rows, width = job.models["text_encoder"].config.vocab_size, job.models["text_encoder"].config.d_model
        for part, model in job.models.items():
            if isinstance(model, Wan) and model.config.text_dim != width:
                raise ValueError(f"{part} takes text of width {model.config.text_dim} and the text encoder gives {width}")
    if (tokens := tokenizer.tokenizer.get_vocab_size()) > rows:
        raise ValueError(f"the tokenizer has {tokens} tokens and the {text} knows {rows} tokens only")
    channels, z = job.preset.latent[0], job.models["vae"].config.z_dim
    if channels != z:
        raise ValueError(f"the VAE has {z} latent channels, where {job.name} has {channels}")
    return tokenizer


def check_place(job: Job) -> None:
    """Refuse an encoder or an output folder that would fail at the end."""
    video.find_ffmpeg()
    width, height = parse_size(job.request.size)
    latents = 4 * job.preset.latent[0] * math.prod(job.latent_shape)
    video.check_output(job.out, latents + width * height * 3 * 2)  # a clip is smaller than two of its frames, raw


def check_image(job: Job) -> None:
    """Cosmos3 takes an image or none; a Wan is made for one of the two."""
    wants = [m.config.in_channels > m.config.out_channels for m in job.models.values() if isinstance(m, Wan)]
    if wants and wants[0] != bool(job.request.image):
        raise ValueError(f"{job.request.model} makes video from " + ("an image and text: give --image FILE" if wants[0] else
                         "text alone: leave --image out, or take an image-to-video model"))  # fmt: skip
    if job.request.image and not job.request.latents:
        if job.request.frames == 1 and job.preset.family == "cosmos":
            raise ValueError("one frame is the image itself; ask for 5 frames or more with --image")
        if job.mesh.world.rank == 0:
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
    if request.vae_dtype not in dtypes:
        raise ValueError(f"vae-dtype {request.vae_dtype!r} is not one of {', '.join(dtypes)}")
    device, dtype = torch.device(kind), dtypes[request.dtype]
    kernel, default = recipe.attention_config.backend.lower(), attention.default_kernel(device, dtype)
    if kernel == "auto":
        return device, dtype, default, ""
    if kernel not in attention.KERNELS:
        raise ValueError(f"attention backend {kernel!r} is not one of auto, {', '.join(attention.KERNELS)}")
    missing = attention.refusal(kernel, device, dtype)
    if missing is None:
        return device, dtype, kernel, ""
    if forked and kernel in RACK_KERNELS:
        return device, dtype, default, f" in place of {kernel}, as forked CPU ranks do"
    raise ValueError(f"attention backend {kernel} {missing}; auto takes {default}")


def output_path(request: Request) -> Path:
    """--out, or a name made of the prompt that neither a video nor latents here have."""
    if request.out:
        return Path(request.out)
    stem = re.sub(r"[^a-z0-9]+", "-", (request.prompt or "video").lower()).strip("-")[:48].rstrip("-") or "video"
    names = (Path(f"{stem}{f'-{i}' if i else ''}.mp4") for i in range(10**6))
    return next(name for name in names if not (name.exists() or name.with_suffix(".latents.safetensors").exists()))
