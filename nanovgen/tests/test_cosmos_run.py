"""Cosmos3 through run.py: a folder of random weights, on one rank and on several, and against diffusers' pipeline."""

import json
import random
import shutil
import weakref
from pathlib import Path

import clip_world
import diffusers
import imageio.v3 as iio
import numpy as np
import pytest
import tiny_bpe
import tiny_layout
import torch
from conftest import PROMPT
from PIL import Image
from safetensors.torch import load_file, save_file
from test_golden import fill, same
from transformers import PreTrainedTokenizerFast

from nanovgen import generate
from nanovgen import job as jobs
from nanovgen.cosmos import Cosmos, CosmosConfig, TextTower
from nanovgen.recipe import Request
from nanovgen.vae import VAE, VAEConfig

CONFIG = CosmosConfig(hidden_size=96, intermediate_size=80, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=4,
                      head_dim=12, vocab_size=400, mrope_section=(2, 2, 2))  # fmt: skip
VAE_CONFIG = VAEConfig(base_dim=8, decoder_base_dim=8, z_dim=48, is_residual=True, patch_size=2, dim_mult=(1, 1, 2, 2),
                       num_res_blocks=1, latents_mean=(0.1,) * 48, latents_std=(1.5,) * 48)  # fmt: skip
CHAT = ("{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")  # fmt: skip


@pytest.fixture(scope="session")
def cosmos_pristine(tmp_path_factory):
    """Weights of unit gain, in bf16, so that everything matters."""
    folder = tmp_path_factory.mktemp("cosmos") / "tiny"
    parts = [TextTower(CONFIG), Cosmos(CONFIG), VAE(VAE_CONFIG)]
    for part in parts:
        part.load_state_dict({k: fill(part.hub_name(k), *x.shape) for k, x in part.state_dict().items()})
    rng = random.Random(0)
    texts = [clip_world.caption(clip_world.sample_clip(rng, 1), rng) for _ in range(200)]
    tiny_layout.save_towers(*parts[:2], tiny_bpe.build_bpe(texts, 400), parts[2].config, folder)
    tiny_layout.save_vae(parts[2], folder)
    return folder


@pytest.fixture
def cosmos_folder(cosmos_pristine, tmp_path, monkeypatch):
    """A copy that the test may spoil; the working folder is an empty one beside it."""
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return shutil.copytree(cosmos_pristine, tmp_path / "tiny")


@pytest.fixture
def say(cli, cosmos_folder):
    """A small request to that folder."""
    base = ("--model", cosmos_folder, "--size", "96x80", "--frames", 9, "--steps", 3, "--shift", 5, "--out", "v.mp4")
    return lambda *arguments, prompt=PROMPT: cli(prompt, *base, *arguments)


def latents(path="v.latents.safetensors"):
    return load_file(path)["latents"]


@pytest.fixture
def reads(monkeypatch):
    """How often a text was read."""
    counted, forward = [], TextTower.forward
    monkeypatch.setattr(TextTower, "forward", lambda self, *given: counted.append(len(given[0][0])) or forward(self, *given))
    return counted


def test_video(say, reads, read_video):
    result = say()
    assert result.code == 0, result.err
    assert len(reads) == 2 and reads[0] != reads[1]  # each prompt once, whatever the steps; of unequal length
    meta, frames = read_video("v.mp4")
    assert meta["source_size"] == (96, 80) and len(frames) == 9 and frames.std() > 1
    assert latents().shape == (1, 48, 3, 5, 6)
    assert result.lines["tokens"] == "27 = 3 x 3 x 3"  # five latent rows need three patches
    assert "is of 24 FPS. This video is of 80x96 resolution." in result.lines["prompt"]
    assert "is not of 24 FPS" in result.lines["negative"] and "ids)" in result.lines["negative"]


def test_guidance_1_reads_the_prompt_alone(say, reads):
    assert say("--guidance", 1).lines["negative"] == "not used" and len(reads) == 1


@pytest.mark.parametrize("way", ["yes", "no"])
def test_text_tower_leaves(say, monkeypatch, way):
    """It is gone from memory while denoising, or not; the latents do not tell."""
    there, load = {}, generate.load

    def watch(job, part, stages):
        model = load(job, part, stages)
        if part == "text_tower":
            there["tower"] = weakref.ref(model)
        elif part == "vae":
            there["alive"] = there["tower"]() is not None
        return model

    assert say("--free-text-tower", "yes").code == 0
    wanted = latents()
    monkeypatch.setattr(generate, "load", watch)
    result = say("--free-text-tower", way)
    assert result.code == 0 and there["alive"] == (way == "no")
    assert torch.equal(latents(), wanted)


def test_image_comes_first(say, tmp_path):
    iio.imwrite("x.png", np.random.default_rng(0).integers(0, 255, (70, 300, 3), np.uint8))
    assert say("--image", "x.png").code == 0
    job = jobs.prepare(Request(PROMPT, model=str(tmp_path / "tiny"), image="x.png", size="96x80", frames=9, steps=3, shift=5.0))
    given = generate.image_condition(job, generate.Stages(job.device))
    same(latents()[:, :, :1], given, "the given frame is still there", 1e-5)
    first = latents()
    assert say().code == 0
    assert not torch.allclose(latents()[:, :, 1:], first[:, :, 1:], atol=0.1)


def test_one_frame(say, read_video):
    result = say("--frames", 1)
    assert (
        result.code == 0 and "This image is of 80x96" in result.lines["prompt"] and "seconds long" not in result.lines["prompt"]
    )
    assert "generate images" in result.lines["prompt"] and len(read_video("v.mp4")[1]) == 1


def test_resume(say, cli):
    assert say("--sheet").code == 0
    before = Path("v.mp4").read_bytes()
    assert cli("--latents", "v.latents.safetensors", "--out", "w.mp4").code == 0
    assert Path("w.mp4").read_bytes() == before


def test_dressing(say):
    prompts = {way: say("--dry-run", "--dressing", way).lines["prompt"] for way in ("auto", "full", "chat", "bare")}
    assert prompts["auto"] == prompts["full"] and "FPS" in prompts["full"]
    assert "system" in prompts["chat"] and "FPS" not in prompts["chat"] and "system" not in prompts["bare"]
    said = say("--dry-run", prompt='{"scene":  "a cat"}').lines
    described = said["prompt"]
    assert "FPS" not in said["negative"] and "system" in said["negative"]  # the prompt decides for both
    assert '{"scene": "a cat"}<|im_end|>' in described and "FPS" not in described and "system" in described


def test_the_folder_s_own_negative(say, cosmos_folder):
    (cosmos_folder / "assets").mkdir()
    (cosmos_folder / "assets/negative_prompt.json").write_text('{"style":\n "blurry"}')
    assert '{"style": "blurry"}<|im_end|>' in say("--dry-run", prompt='{"scene": "a cat"}').lines["negative"]
    assert '{"style": "blurry"}. The video is not' in say("--dry-run").lines["negative"]
    assert "no dogs. The video is not" in say("--dry-run", "--negative-prompt", "no dogs").lines["negative"]


def test_karras(cli, cosmos_folder):
    """Named, and printed; the file's own wish is printed where it is not ours."""
    base = (PROMPT, "--model", cosmos_folder, "--steps", 35, "--dry-run")
    said = cli(*base, "--grid", "karras")
    assert "Karras sigmas 200 to 0.147, no shift" in said.lines["steps"] and said.lines["sigmas"].startswith("0.995 0.994 0.993")
    path = cosmos_folder / "scheduler/scheduler_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | dict(use_karras_sigmas=True, sigma_min=0.147, sigma_max=200.0)))
    assert "(its scheduler file says Karras sigmas" in cli(*base).lines["steps"]
    assert "its scheduler file" not in cli(*base, "--grid", "karras").lines["steps"]
    both = cli(*base, "--grid", "karras", "--shift", 3)
    assert both.code == 2 and both.err.count("\n") == 1 and "not both" in both.err
    wan = cli(PROMPT, "--grid", "karras")
    assert wan.code == 2 and "--grid native" in wan.err


def test_wan_has_no_dressing(cli):
    for flag, value in (("--dressing", "chat"), ("--free-text-tower", "yes"), ("--dressing", "x"), ("--free-text-tower", "x")):
        result = cli(PROMPT, flag, value)
        assert result.code == 2 and result.err.count("\n") == 1 and flag.strip("-") in result.err


def tensors(folder):
    return folder / "transformer/diffusion_pytorch_model.safetensors"


def test_loader_knows_what_is_not_read(say, cosmos_folder):
    """Text-only, sound and action weights, and the last text layer's, are passed over; the root index is not looked at."""
    assert say().code == 0
    wanted, stored = latents(), load_file(tensors(cosmos_folder))
    unused = ["lm_head.weight", "norm.weight", "action_modality_embed", "audio_modality_embed", "audio_proj_in.weight",
              "audio_proj_out.bias", "action_proj_in.fc.weight", "action_proj_out.bias.weight",
              *(f"layers.1.{x}.weight" for x in ("self_attn.to_q", "self_attn.to_out", "self_attn.norm_q", "mlp.up_proj",
                                                 "mlp.gate_proj", "mlp.down_proj", "post_attention_layernorm"))]  # fmt: skip
    save_file(stored | {name: torch.full((3, 3), torch.nan) for name in unused}, tensors(cosmos_folder), {"format": "pt"})
    (cosmos_folder / "model.safetensors.index.json").write_text("{}")
    assert say().code == 0 and torch.equal(latents(), wanted)


@pytest.mark.parametrize("name", ["layers.0.self_attn.add_q_proj.scale", "layers.2.self_attn.add_q_proj.weight", "lm_head.bias",
                                  "layers.2.self_attn.to_k.weight", "model.layers.0.self_attn.to_q.weight", "norm.bias",
                                  "action2llm.weight", "layers.0.post_attention_layernorm_moe.weight"])  # fmt: skip
def test_loader_refuses_all_else(say, cosmos_folder, name):
    save_file(load_file(tensors(cosmos_folder)) | {name: torch.zeros(3)}, tensors(cosmos_folder), {"format": "pt"})
    result = say()
    assert result.code == 2 and result.err.count("\n") == 1 and name in result.err


@pytest.mark.parametrize("name", ["layers.1.self_attn.to_k.weight", "layers.0.self_attn.norm_added_k.weight",
                                  "embed_tokens.weight", "time_embedder.linear_1.bias"])  # fmt: skip
def test_loader_misses(say, cosmos_folder, name):
    stored = load_file(tensors(cosmos_folder))
    del stored[name]
    save_file(stored, tensors(cosmos_folder), {"format": "pt"})
    result = say()
    assert result.code == 2 and "missing" in result.err and name in result.err


def test_old_keys_are_refused(say, cosmos_folder):
    """The branch of the hub that another library's names are in."""
    stored = {name.replace("layers.", "model.layers."): x for name, x in load_file(tensors(cosmos_folder)).items()}
    save_file(stored, tensors(cosmos_folder), {"format": "pt"})
    result = say()
    assert result.code == 2 and "missing" in result.err and "model.layers.0" in result.err


RANKS = {  # ranks, degrees
    "cfg, ulysses, ring": (8, dict(cfg_size=2, ulysses_size=2, ring_size=2, async_ulysses=True)),
    "attn2d, VAE": (4, dict(attn2d_size=[2, 2], attn2d_merge="overlapped", parallel_vae_size=4)),
    "tp, VAE by height": (4, dict(tp_size=2, ulysses_size=2, parallel_vae_size=4, parallel_vae_split_dim="height")),
    "more ranks than key heads": (8, dict(ulysses_size=8, async_ulysses=True, parallel_vae_size=5)),
    "reduce-scatter": (4, dict(cfg_size=2, attn2d_size=[1, 2], attn2d_merge="reduce_scatter")),
}


@pytest.mark.parametrize("image", [False, True])
@pytest.mark.parametrize("name", RANKS)
def test_ranks(say, recipe, name, image):
    ranks, degrees = RANKS[name]
    more = ["--image", "x.png"] if image else []
    iio.imwrite("x.png", np.random.default_rng(0).integers(0, 255, (80, 96, 3), np.uint8))
    assert say(*more).code == 0
    wanted, video = latents(), iio.imread("v.mp4").astype(int)
    result = say(*more, "--ranks", ranks, "--recipe", recipe(**degrees))
    assert result.code == 0, result.err
    same(latents(), wanted, f"{name}, image {image}", 1e-5)
    assert abs(iio.imread("v.mp4").astype(int) - video).mean() < 2  # a rare pixel rounds otherwise, and H.264 spreads it


@pytest.mark.parametrize(("degrees", "ranks", "words"), [
    (dict(ulysses_size=16), 16, "8 heads do not split over ulysses 16; use ulysses 8 and ring 2"),
    (dict(ulysses_size=2, fused_ulysses=True), 2, "fused ulysses stacks q, k, v"),
    (dict(tp_size=8), 8, "4 key heads do not split over tp 8; use 4"),
])  # fmt: skip
def test_refused(say, recipe, degrees, ranks, words):
    result = say("--ranks", ranks, "--recipe", recipe(**degrees))
    assert result.code == 2 and result.err.count("\n") == 1 and words in result.err


@pytest.mark.parametrize("image", [False, True])
def test_whole_pipeline(cosmos_folder, image):
    """Same seed, same folder, same settings: latents and frames against diffusers' pipeline."""
    folder, kind = cosmos_folder, diffusers.Cosmos3OmniTransformer
    transformer = kind.from_config(kind.load_config(folder / "transformer")).eval()
    rest = transformer.load_state_dict({k: x.float() for k, x in load_file(tensors(folder)).items()}, strict=False)
    assert rest.unexpected_keys == [] and all(TextTower(CONFIG).foreign(name) for name in rest.missing_keys)  # what is never read
    vae = diffusers.AutoencoderKLWan.from_pretrained(folder / "vae", torch_dtype=torch.float32)
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "text_tokenizer/tokenizer.json"), eos_token="<|im_end|>",
                                        chat_template=CHAT)  # fmt: skip
    scheduler = diffusers.UniPCMultistepScheduler.from_pretrained(folder / "scheduler")
    pipe = diffusers.Cosmos3OmniPipeline(transformer, tokenizer, vae, scheduler, enable_safety_checker=False)
    picture, no = Image.fromarray((127.5 * (1 + fill("input:image", 37, 61, 3))).byte().numpy()), "nothing. At all.."
    picture.save("x.png")
    request = Request(PROMPT, model=str(folder), negative_prompt=no, size="96x80", frames=9, fps=16, steps=6, guidance=4.0,
                      shift=5.0, grid="diffusers", seed=7, out="v.mp4", image="x.png" if image else None)  # fmt: skip
    job = jobs.prepare(request)
    found = load_file(generate.generate(job)["latents"])["latents"]
    frames = torch.cat([*generate.load(job, "vae", generate.Stages(job.device)).decode(found)], dim=2)
    path = []
    wanted = pipe(
        PROMPT, negative_prompt=no, image=picture if image else None, num_frames=9, height=80, width=96, fps=16.0,
        num_inference_steps=6, guidance_scale=4.0, generator=torch.Generator().manual_seed(7), output_type="pt",
        callback_on_step_end=lambda pipe, i, t, got: path.append(got["latents"]) or got, enable_safety_check=False)  # fmt: skip
    same(found, path[-1].reshape(found.shape), f"whole pipeline, image {image}, latents")
    same(frames, 2 * torch.as_tensor(wanted.video).reshape(-1, 3, *frames.shape[3:]).transpose(0, 1)[None] - 1, "frames")
