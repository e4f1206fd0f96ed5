"""What may be asked for, drawn by hypothesis: a small checkpoint, a request, a recipe, a number of ranks (for test_drawn.py)."""

import functools
import random
import shutil
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import clip_world
import hypothesis.strategies as st
import tiny_bpe
import tiny_layout
from PIL import Image

from nanovgen import plan
from nanovgen.cosmos import Cosmos, CosmosConfig, TextTower
from nanovgen.recipe import AttentionConfig, ParallelConfig, Recipe, Request
from nanovgen.text import UMT5, UMT5Config
from nanovgen.vae import VAE, VAEConfig
from nanovgen.wan import Wan, WanConfig
from test_parity import make

MOST = 12  # ranks
HEADS = (1, 2, 3, 4, 6, 8, 12)
TEXT = UMT5Config(vocab_size=tiny_layout.TEXT_CONFIG.vocab_size, d_model=32, d_kv=16, d_ff=32, num_layers=1, num_heads=2)
VAE_WAN = VAEConfig(base_dim=4, dim_mult=(1, 1, 2, 2), num_res_blocks=1, latents_mean=(0.1,) * 16, latents_std=(1.5,) * 16)
VAE_COSMOS = replace(VAE_WAN, z_dim=48, is_residual=True, patch_size=2, latents_mean=(0.1,) * 48, latents_std=(1.5,) * 48)


@dataclass(frozen=True)
class Case:
    """`request` but for its model and image, which are files; `parallel` are a recipe's keys."""

    config: WanConfig | CosmosConfig
    experts: int
    image: bool
    request: Request
    parallel: dict
    world: int
    backend: str = "auto"

    def recipe(self) -> Recipe:
        return Recipe(AttentionConfig(self.backend), ParallelConfig(**self.parallel))


SPOILT = [  # what a case may have in place of its own: a fifth of them have one
    *(dict(size=size) for size in ("40x32", "32x100", "0x16", "-16x16", "big")),
    *(dict(frames=n) for n in (0, -3, 2, 80)), *(dict(steps=n) for n in (0, -1)),
    dict(prompt=" "), dict(guidance=-1.0), dict(guidance_low=float("nan")), dict(shift=0.0), dict(shift=float("inf")),
    dict(boundary=1.5), dict(seed=-1), dict(seed=2**64), dict(chunk=-1), dict(fps=0), dict(check=-1), dict(solver="ddim"),
    dict(grid="linear"), dict(grid="karras"), dict(dtype="float16"), dict(dressing="none"), dict(free_text_tower="yes"),
    dict(offload="x"),
    *(dict(world=n) for n in (1, 3, 5, 7, 11)), *(dict(backend=name) for name in ("FA4", "fa9", "flash")),
    *({f"{name}_size": n} for name in ("cfg", "tp", "ulysses", "ring", "parallel_vae") for n in (0, -2)), dict(cfg_size=3),
    dict(attn2d_size=(0, 2)), dict(attn2d_size=(2, 1), ring_size=2), dict(attn2d_merge="eager"), dict(parallel_vae_size=13),
    dict(parallel_vae_split_dim="time"), dict(async_ulysses=True, fused_ulysses=True), dict(image=True), dict(image=False),
]  # fmt: skip


@st.composite
def configs(draw) -> tuple[WanConfig | CosmosConfig, int]:
    """A denoiser's sizes, and how many of them the checkpoint has. Few, since each is a folder; heads are what matters."""
    family, heads = draw(st.sampled_from(["wan", "wan and image", "wan 2.1", "cosmos", "cosmos"])), draw(st.sampled_from(HEADS))
    layers, mlp = 1 + heads % 2, 12 * heads if heads > 2 else 40  # 12 * heads splits as the heads do
    if family != "cosmos":
        sizes = dict(attention_head_dim=6 + 2 * (heads % 2), ffn_dim=mlp, in_channels=36 if "image" in family else 16)
        return WanConfig(heads, **sizes, num_layers=layers, text_dim=32), 1 if "2.1" in family else 2
    keys = draw(st.sampled_from(sorted({n for n in (1, 2, heads // 2, heads) if n and heads % n == 0})))
    section = (2, 1, 1) if heads % 3 else (2, 2, 2)
    sizes = dict(num_attention_heads=heads, num_key_value_heads=keys, head_dim=2 * sum(section), mrope_section=section)
    return CosmosConfig(hidden_size=32 + 16 * layers, intermediate_size=mlp, num_hidden_layers=layers, vocab_size=400, **sizes), 1


@st.composite
def recipes(draw, heads: int) -> dict:
    """A recipe's keys, for up to MOST ranks; most divide the heads that there are."""
    pick = lambda *values: draw(st.sampled_from(values))  # noqa: E731
    found, left = {}, pick(2, 4, 6, 8, MOST)
    fitting = lambda limit: pick(*(n for n in (1, 2, 3, 4, 5, 8) if n <= limit))  # noqa: E731
    dividing = lambda limit: pick(1, *[n for n in (2, 3, 4, 6, 8, 12) if n <= limit and heads % n == 0] * 2, min(2, limit))  # noqa: E731
    for name in draw(st.permutations(["cfg", "tp", "ulysses", pick("ring", "attn2d", "attn2d", "")])):
        if name == "attn2d":
            rows = fitting(left)
            found["attn2d_size"] = rows, fitting(left // rows)
            left //= rows * found["attn2d_size"][1]
        elif name:
            size = pick(1, min(2, left)) if name == "cfg" else fitting(left) if name == "ring" else dividing(left)
            found[f"{name}_size"], left = size, left // size
    if found.get("attn2d_size", (1, 1)) != (1, 1):
        found["attn2d_merge"] = pick(*plan.ATTN2D)
    if found["ulysses_size"] > 1 and (way := pick("", "async_ulysses", "fused_ulysses")):
        found[way] = True
    found["parallel_vae_size"] = pick(1, 1, 2, 3, ParallelConfig(**found).world)
    return found | {"parallel_vae_split_dim": pick("width", "height")}


@st.composite
def requests(draw, cosmos: bool) -> Request:
    pick = lambda *values: draw(st.sampled_from(values))  # noqa: E731
    prompt = pick("a", "a red circle", "a red circle moves right on a black background " * 4)
    shape = dict(size=f"{pick(16, 32, 48, 64, 80)}x{pick(16, 32, 48, 64)}", frames=pick(1, 5, 9, 13), fps=pick(16, 1))
    guidance = dict(guidance=pick(0.0, 1.0, 1.0, 3.0, 5.0), guidance_low=pick(None, 1.0, 3.0), negative_prompt=pick(None, ""))
    steps = dict(steps=pick(1, 2, 3), shift=pick(None, 1.0, 5.0), solver=pick("unipc", "euler"), grid=pick("native", "diffusers"))
    said = dict(dressing=pick("auto", "bare", "bare", "chat")) if cosmos else dict(offload=pick("auto", "auto", "auto", "yes"))
    return Request(prompt, **shape, **guidance, **steps, **said, seed=pick(0, 1, 2**63), chunk=pick(None, 0, 1, 2), check=1,
                   device="cpu")  # fmt: skip


@st.composite
def cases(draw) -> Case:
    config, experts = draw(configs())
    cosmos, parallel = isinstance(config, CosmosConfig), draw(recipes(config.num_attention_heads))
    image = draw(st.booleans()) if cosmos else config.in_channels == 36
    boundary = {"boundary": draw(st.sampled_from([None, None, 0.0, 0.5, 1.0]))} if experts == 2 else {}
    request = replace(draw(requests(cosmos)), **boundary)
    case = Case(config, experts, image, request, parallel, ParallelConfig(**parallel).world)
    spoilt = draw(st.sampled_from([None] * 4 * len(SPOILT) + SPOILT)) or {}
    for name, value in spoilt.items():
        if name in ("world", "backend", "image"):
            case = replace(case, **{name: value})
        elif hasattr(case.request, name):
            case = replace(case, request=replace(case.request, **{name: value}))
        else:
            case = replace(case, parallel=case.parallel | {name: value})
    return case


class Folders:
    """Checkpoints of drawn sizes, each written when first asked for, with the same VAE and text encoder."""

    def __init__(self, home: Path):
        self.home, self.image = home, home / "image.png"
        Image.effect_noise((40, 24), 90).convert("RGB").save(self.image)
        rng = random.Random(0)
        texts = [clip_world.caption(clip_world.sample_clip(rng, 1), rng) for _ in range(200)]
        self.bpe, self.text = tiny_bpe.build_bpe(texts, 400), make(UMT5(TEXT), 1)
        self.vaes = {kind: make(VAE(config), 3) for kind, config in ((WanConfig, VAE_WAN), (CosmosConfig, VAE_COSMOS))}
        self.find = functools.lru_cache(None)(self.write)

    def write(self, config: WanConfig | CosmosConfig, experts: int) -> Path:
        out, vae = Path(tempfile.mkdtemp(dir=self.home)), self.vaes[type(config)]
        tiny_layout.save_vae(vae, out)
        if isinstance(config, CosmosConfig):
            tiny_layout.save_towers(make(TextTower(config), 1), make(Cosmos(config), 2), self.bpe, vae.config, out)
            return out
        tiny_layout.save_experts(self.text, make(Wan(config), 2), make(Wan(config), 4), vae.config, out)
        if experts == 1:
            shutil.rmtree(out / "transformer_2")
            index = out / "model_index.json"
            index.write_text(index.read_text().replace('"transformer_2"', '"once"').replace('"boundary_ratio"', '"was"'))
        return out
