"""What is asked for: a request (the video), a recipe (how to spread it), and each model's defaults. Plain data.

A request field that is None takes the model's default; the command lines make their flags from these fields. A recipe is a YAML
file with the keys of NVIDIA's VisualGen recipes. An unknown key is an error, never ignored.
"""

import argparse
import json
import math
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

import yaml


def _option(default: object, text: str):
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True)
class Request:
    """One video. Sizes in pixels, fps in frames a second, guidance as in v = uncond + guidance (cond - uncond)."""

    prompt: str | None = _option(None, "what the video shows")
    model: str = _option("tiny-wan", "tiny-wan, tiny-cosmos, a folder in the diffusers layout, or a hub id")
    negative_prompt: str | None = _option(
        None, 'what it must not show: text, or @FILE; "" is the empty prompt; not given: our default'
    )
    image: str | None = _option(None, "first frame, for image-to-video models")
    dressing: str = _option("auto", "Cosmos3's text around the prompt: full (system prompt; sentences on length, pace and size), "
                            "chat (system prompt alone), bare, or auto (chat for a JSON prompt, else full)")  # fmt: skip
    size: str | None = _option(None, "WIDTHxHEIGHT, multiples of 16")
    frames: int | None = _option(None, "number of frames, 4k+1")
    fps: int | None = _option(None, "frames a second in the file")
    steps: int | None = _option(None, "denoising steps")
    guidance: float | None = _option(None, "guidance of the high-noise expert; 1 skips the negative prompt")
    guidance_low: float | None = _option(None, "guidance of the low-noise expert")
    shift: float | None = _option(None, "flow shift: how far the steps are bent towards noise")
    boundary: float | None = _option(None, "the high-noise expert serves t >= 1000 * boundary")
    grid: str = _option(
        "native", "sigma grid: native (Wan's own code), diffusers, or karras (Cosmos3's file as shipped; has no shift)"
    )
    solver: str = _option("unipc", "unipc or euler")
    seed: int = _option(0, "seed of the noise, which does not depend on the number of ranks")
    out: str | None = _option(None, "output .mp4 (not given: a new name made of the prompt)")
    sheet: bool = _option(False, "also write a contact sheet, OUT.png")
    latents: str | None = _option(None, "resume: decode this file of saved latents, nothing else")
    device: str = _option("auto", "cuda, cpu, or auto")
    dtype: str = _option("auto", "bfloat16, float32, or auto (bfloat16 on a GPU), of all but the VAE")
    vae_dtype: str = _option("auto", "bfloat16, float32, or auto (bfloat16 on a GPU, where float32 takes seven times as long)")
    chunk: int | None = _option(None, "latent frames decoded at a time; 0: all at once")
    check: int = _option(10, "every so many steps, and after the last, all ranks compare a checksum of their latents; 0: never")
    offload: str = _option("auto", "two experts: have only the one in use on the device, and read the other when its steps "
                           "begin: yes, no, or auto (yes where the device cannot hold both)")  # fmt: skip
    free_text_tower: str = _option("auto", "Cosmos3: drop the text tower's weights once the prompts are read: yes, no, or auto "
                                   "(yes where the device cannot hold both towers)")  # fmt: skip


@dataclass(frozen=True)
class Preset:
    """A known model: where it lives, how its parts differ from Wan 2.2 T2V-A14B's (or Cosmos3-Super's), and its defaults."""

    repo: str
    family: str = "wan"  # or cosmos
    text_dtype: str = "BF16"  # as stored
    transformer: dict = field(default_factory=dict)
    vae: dict = field(default_factory=dict)
    latent: tuple[int, int] = (16, 8)  # channels; pixels of a latent row or column
    experts: int = 2
    boundary: float | None = 0.875
    size: str = "1280x720"
    frames: int = 81
    fps: int = 16
    steps: int = 40
    guidance: float = 4.0
    guidance_low: float | None = 3.0
    shift: float = 12.0
    chunk: int = 1


T2V_A14B = Preset("Wan-AI/Wan2.2-T2V-A14B-Diffusers")
WAN21_14B = Preset("Wan-AI/Wan2.1-T2V-14B-Diffusers", text_dtype="F32", experts=1, boundary=None, steps=50, guidance=5.0,
                   guidance_low=None, shift=5.0)  # fmt: skip
COSMOS3_SUPER = Preset(
    "nvidia/Cosmos3-Super", family="cosmos", experts=1, boundary=None, frames=189, fps=24, steps=35, guidance=6.0,
    guidance_low=None, shift=10.0, latent=(48, 16),
    vae=dict(base_dim=160, decoder_base_dim=256, z_dim=48, is_residual=True, patch_size=2, latents_mean=(0.0,) * 48,
             latents_std=(1.0,) * 48),  # the file brings its own
)  # fmt: skip
TINY_COSMOS = dict(hidden_size=384, intermediate_size=384, num_hidden_layers=6, num_attention_heads=8, num_key_value_heads=2,
                   head_dim=32, vocab_size=512, mrope_section=(6, 5, 5))  # fmt: skip
PRESETS = {
    "tiny-wan": Preset("weights/tiny-wan", transformer=dict(num_attention_heads=8, attention_head_dim=32, num_layers=5,
                       ffn_dim=768, text_dim=128), size="192x96", frames=33, steps=20, guidance=5.0, shift=5.0, chunk=0),
    "wan2.2-t2v-a14b": T2V_A14B,
    "wan2.2-i2v-a14b": replace(T2V_A14B, repo="Wan-AI/Wan2.2-I2V-A14B-Diffusers", transformer=dict(in_channels=36),
                               boundary=0.9, guidance=3.5, guidance_low=3.5, shift=5.0),
    "wan2.1-t2v-14b": WAN21_14B,
    "wan2.1-t2v-1.3b": replace(WAN21_14B, repo="Wan-AI/Wan2.1-T2V-1.3B-Diffusers", size="832x480", shift=3.0,
                               transformer=dict(num_attention_heads=12, num_layers=30, ffn_dim=8960)),
    "cosmos3-super": COSMOS3_SUPER,
    "cosmos3-nano": replace(COSMOS3_SUPER, repo="nvidia/Cosmos3-Nano", transformer=dict(hidden_size=4096,
                            intermediate_size=12288, num_hidden_layers=36, num_attention_heads=32)),
    "tiny-cosmos": replace(COSMOS3_SUPER, repo="weights/tiny-cosmos", transformer=TINY_COSMOS, size="192x96", frames=33, fps=16,
                           steps=20, guidance=2.0, shift=5.0, chunk=0),
}  # fmt: skip

# Given when no negative prompt is: faults of a video in general, no subject.
NEGATIVE_PROMPT = (
    "blurry, low quality, compression artifacts, washed out, overexposed, frozen picture, watermark, subtitles, deformed anatomy"
)


def parse_size(size: str) -> tuple[int, int]:
    """'1280x720' -> (1280, 720): width, height, each a multiple of 16."""
    try:
        width, height = (int(n) for n in size.lower().split("x"))
    except ValueError:
        raise ValueError(f"size {size!r} is not WIDTHxHEIGHT, such as 1280x720") from None
    near = [max(16, (n + 8) // 16 * 16) for n in (width, height)]
    if near != [width, height]:
        raise ValueError(f"size {width}x{height} is not a multiple of 16 both ways; the nearest is {near[0]}x{near[1]}")
    return width, height


def check_frames(frames: int) -> None:
    """Frames must be 4k+1: the first stands alone, and each later latent frame is four."""
    if frames < 1 or (frames - 1) % 4:
        low = max(1, (frames - 1) // 4 * 4 + 1)
        raise ValueError(f"{frames} frames is not 4k+1: {(low - 1) // 4 + 1} latent frames would decode to {low}; "
                         f"ask for {low} or {low + 4}")  # fmt: skip


def resolve(request: Request, preset: Preset) -> Request:
    """Fill in the model's defaults and refuse values that no model takes. Nothing is rounded silently."""
    own = {f.name for f in fields(preset)}
    own_shift, preset = request.shift, at_size(request, preset)
    filled = replace(request, **{f.name: getattr(preset, f.name) for f in fields(request)
                                 if f.name in own and getattr(request, f.name) is None})  # fmt: skip
    if request.grid == "karras":
        if preset.family != "cosmos" or own_shift is not None:
            raise ValueError("grid karras is what Cosmos3's scheduler file says as shipped, and it has no shift; give "
                             + ("--shift or --grid karras, not both" if own_shift is not None else "--grid native"))  # fmt: skip
        filled = replace(filled, shift=None)
    parse_size(filled.size)
    check_frames(filled.frames)
    for name, least in (("steps", 1), ("fps", 1), ("chunk", 0), ("check", 0), ("guidance", 0), ("guidance_low", 0), ("seed", 0)):
        value, end = getattr(filled, name), 2**64 if name == "seed" else math.inf
        if value is not None and not least <= value < end:
            raise ValueError(f"{name.replace('_', '-')} is {value}; it must be at least {least} and below {end}")
    if filled.boundary is not None and not 0 <= filled.boundary <= 1:
        raise ValueError(f"boundary is {filled.boundary}; it must lie in 0..1")
    return filled


SHIFTS = {1280 * 720: 10.0, 832 * 480: 5.0, 320 * 192: 3.0}  # Cosmos3's, by the pixels of a frame


def at_size(request: Request, preset: Preset) -> Preset:
    """Cosmos3's shift is that of its authors' size nearest in pixels; one frame has its own shift, steps and guidance."""
    if preset.repo not in (PRESETS["cosmos3-super"].repo, PRESETS["cosmos3-nano"].repo):
        return preset
    if request.frames == 1:
        return replace(preset, shift=3.0, steps=50, guidance=4.0)
    width, height = parse_size(request.size or preset.size)
    return replace(preset, shift=SHIFTS[min(SHIFTS, key=lambda pixels: abs(math.log(width * height / pixels)))])


def negative_text(request: Request) -> str:
    """The negative prompt in use: ours when none was given, the empty one for ""; @FILE is read."""
    text = request.negative_prompt
    if text is None:
        return NEGATIVE_PROMPT
    if not text.startswith("@"):
        return text
    try:
        return Path(text[1:]).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"negative prompt file {text[1:]} cannot be read: {error}") from None


def read_json(path: Path) -> dict:
    """A config file's object; ValueError where there is none."""
    try:
        content = json.loads(path.read_text())
    except (FileNotFoundError, NotADirectoryError):
        raise ValueError(f"{path} is missing") from None
    except (OSError, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} is not a JSON object")
    return content


@dataclass(frozen=True)
class AttentionConfig:
    backend: str = "auto"


@dataclass(frozen=True)
class ParallelConfig:
    """Degrees; world = cfg x tp x cp x ulysses, where cp is ring_size or attn2d_size (rows x columns)."""

    cfg_size: int = 1
    tp_size: int = 1
    ulysses_size: int = 1
    async_ulysses: bool = False
    fused_ulysses: bool = False
    ring_size: int = 1
    attn2d_size: tuple[int, int] = (1, 1)
    attn2d_merge: str = "exchange"  # or overlapped, reduce_scatter
    parallel_vae_size: int = 1
    parallel_vae_split_dim: str = "width"  # or height

    def __post_init__(self):
        sizes = {name: size for name, size in vars(self).items() if name.endswith("_size")}
        for name, size in sizes.items():
            if min(size if isinstance(size, tuple) else (size,)) < 1:
                raise ValueError(f"{name} is {size}; a degree is at least 1")

    @property
    def world(self) -> int:
        rows, columns = self.attn2d_size
        return self.cfg_size * self.tp_size * self.ring_size * rows * columns * self.ulysses_size


@dataclass(frozen=True)
class CompilationConfig:
    """Shapes to warm up for, [height, width] each; frames are floored to whole latent frames, as the article's runtime does."""

    resolutions: tuple = ()
    num_frames: tuple = ()

    def shapes(self) -> list[tuple[int, int, int]]:
        """Width, height and frames (4k+1, those of the latent frames) of every resolution with every length."""
        for size in self.resolutions:
            if not (
                isinstance(size, list | tuple) and len(size) == 2 and all(type(n) is int and n > 0 and n % 16 == 0 for n in size)
            ):
                raise ValueError(f"resolutions has {size!r}; each is [height, width], multiples of 16, such as [720, 1280]")
        if bad := [n for n in self.num_frames if type(n) is not int or n < 1]:
            raise ValueError(f"num_frames has {bad[0]!r}; each is a number of frames")
        return [(width, height, 4 * latent_frames(n) - 3) for height, width in self.resolutions for n in self.num_frames]


def latent_frames(frames: int) -> int:
    """Floored, as the article's runtime does: 80 frames would be 20 latent ones, 81 are 21."""
    return frames // 4 if frames % 4 == 0 else (frames - 1) // 4 + 1


@dataclass(frozen=True)
class TorchCompileConfig:
    """The local math of each block through torch.compile (compiled.py); of the VAE too, which pays from the second video on."""

    enable: bool = False
    vae: bool = False


@dataclass(frozen=True)
class QuantConfig:
    """The blocks' matrices in float8 (fp8.py), or as they are."""

    quant_algo: str = "none"  # or FP8


@dataclass(frozen=True)
class Recipe:
    attention_config: AttentionConfig = AttentionConfig()
    parallel_config: ParallelConfig = ParallelConfig()
    compilation_config: CompilationConfig = CompilationConfig()
    torch_compile_config: TorchCompileConfig = TorchCompileConfig()
    quant_config: QuantConfig = QuantConfig()


def read_recipe(name: str) -> Recipe:
    """A recipe by file, or by the name of one of nanovgen/recipes."""
    ours = {p.stem: p for p in (Path(__file__).parent / "recipes").glob("*.y*ml")}
    path = ours.get(name, Path(name))
    if not path.is_file():
        known = ", ".join(sorted(ours))
        raise ValueError(f"recipe {name} is no file; by name there are: {known}")
    try:
        content = yaml.safe_load(path.read_text())
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not YAML: {' '.join(str(error).split())}") from None
    return fill(Recipe, content or {}, str(path))


def add_flags(parser: argparse.ArgumentParser, without: tuple[str, ...] = ()) -> None:
    """A flag for each field of Request, and those that choose the recipe: `from_flags` reads them."""
    kinds = {"int": int, "float": float, "str": str, "bool": bool}
    for f in (f for f in fields(Request) if f.name not in without):
        kind = kinds[str(getattr(f.type, "__name__", f.type)).split(" |")[0]]
        text = f.metadata["help"].replace("%", "%%") + (f" (default {f.default})" if f.default not in (None, False) else "")
        if f.name == "prompt":
            parser.add_argument("prompt", nargs="?", help=text)
        elif kind is bool:
            parser.add_argument(f"--{f.name}", action="store_true", help=text)
        else:
            parser.add_argument(f"--{f.name.replace('_', '-')}", type=kind, default=f.default, help=text, metavar=f.name.upper())
    parser.add_argument("--recipe", help="a YAML file, or the name of one in nanovgen/recipes (not given: the planner's choice "
                        "for the ranks and the memory there are)")  # fmt: skip
    parser.add_argument("--attention", help="attention kernel, over the recipe's: auto or one of attention.py's")
    parser.add_argument(
        "--compile", action=argparse.BooleanOptionalAction, help="torch.compile, over the recipe's: block by block"
    )
    parser.add_argument("--quant", help="the blocks' matrices, over the recipe's: none, or FP8 (faster, and a few per cent off)")
    parser.add_argument("--ranks", type=int, help="fork so many CPU ranks here (torchrun's own ranks need no flag)")


def from_flags(args: argparse.Namespace, launched: int) -> tuple[Request, "Recipe"]:
    """What the flags of `add_flags` say, under a launcher that started `launched` ranks (1: none did)."""
    recipe = Recipe() if args.recipe is None else read_recipe(args.recipe)
    if args.attention:
        recipe = replace(recipe, attention_config=AttentionConfig(args.attention))
    if args.compile is not None:
        recipe = replace(recipe, torch_compile_config=TorchCompileConfig(args.compile))
    if args.quant:
        recipe = replace(recipe, quant_config=QuantConfig(args.quant))
    if args.ranks is not None and (args.ranks < 1 or launched > 1):
        raise ValueError(f"--ranks {args.ranks} forks ranks of its own: give 1 or more, and not under torchrun")
    request = Request(**{f.name: getattr(args, f.name) for f in fields(Request) if hasattr(args, f.name)})
    return (replace(request, device="cpu") if args.ranks is not None and request.device == "auto" else request), recipe


def fill(kind: type, content: object, where: str) -> object:
    """A dataclass from nested dicts, strictly."""
    if not isinstance(content, dict):
        raise ValueError(f"{where}: {content!r} is not a set of keys")
    known = {f.name: f for f in fields(kind)}
    if unknown := sorted(set(map(str, content)) - set(known)):
        raise ValueError(f"{where}: unknown key {unknown[0]}; known here: {', '.join(known)}")
    values = {}
    for key, value in content.items():
        default = getattr(kind(), key)
        if hasattr(default, "__dataclass_fields__"):
            values[key] = fill(type(default), value, f"{where}: {key}")
            continue
        value = tuple(value) if isinstance(value, list) else value
        if type(value) is not type(default) or (
            default and isinstance(default, tuple) and [*map(type, value)] != [*map(type, default)]
        ):
            raise ValueError(f"{where}: {key} is {value!r}; it should look like {default!r}")
        values[key] = value
    return kind(**values)
