"""Cosmos3's two towers: against stored facts, against diffusers 0.42.1, and its grouped keys over ranks; -rP shows the errors.

    ids -> TextTower -> prefix -> Cosmos -> velocity       ours, the text once
    ids and latents in one packed sequence                  theirs, all of it at every step

Same weights by the hub's names, fp32, ||a - b|| / ||b|| < 1e-4; one prefix serves every time and clip, as in a run.
"""

import hashlib
import json
import re
from dataclasses import asdict, replace
from functools import cache

import diffusers
import pytest
import torch
from safetensors.torch import save_file
from test_golden import TOLERANCE, error, fill, golden, same

from nanovgen import attention, checkpoint, mesh, plan
from nanovgen.cosmos import Cosmos, CosmosConfig, TextTower
from nanovgen.mesh import Axis
from nanovgen.recipe import ParallelConfig

CPU, FP32 = torch.device("cpu"), torch.float32
TINY = CosmosConfig(hidden_size=96, intermediate_size=80, num_hidden_layers=3, num_attention_heads=6, num_key_value_heads=2,
                    head_dim=32, vocab_size=200, mrope_section=(6, 5, 5))  # fmt: skip
NANO = CosmosConfig(hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, num_attention_heads=32)
LARGE = {"cosmos3-super": CosmosConfig(), "cosmos3-nano": NANO}
MODELS = {
    "g 1/3, d 32": TINY,
    "g 1/4, d 128": replace(TINY, num_attention_heads=4, num_key_value_heads=1, head_dim=128, mrope_section=(24, 20, 20)),
    "g 1, d 32": replace(TINY, num_attention_heads=3, num_key_value_heads=3, mrope_section=(8, 4, 4), rope_theta=1e4),
}
CLIPS = {  # latent f, y, x; fps; prompt's length; frames given
    "24 fps": ((3, 4, 6), 24.0, 7, 0),
    "16 fps, odd rows": ((3, 5, 6), 16.0, 2, 0),
    "30 fps, odd columns": ((4, 4, 7), 30.0, 23, 0),
    "one frame, odd both": ((1, 5, 3), 24.0, 11, 0),
    "from an image": ((3, 4, 6), 24.0, 5, 1),
    "from an image, 16 fps, odd both": ((5, 3, 5), 16.0, 1, 1),
}


@pytest.fixture(autouse=True)
def one_thread_no_grad():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.no_grad():
        yield
    torch.set_num_threads(threads)


def hub_config(config: CosmosConfig) -> dict:
    """As transformer/config.json says it."""
    return asdict(config) | {"rope_scaling": {"mrope_interleaved": True, "mrope_section": list(config.mrope_section)}}


def filled(config: CosmosConfig, seed: str = "") -> tuple[TextTower, Cosmos]:
    towers = TextTower(config), Cosmos(config)
    for tower in towers:
        names = {name: tower.hub_name(name) for name in tower.state_dict()}
        tower.load_state_dict({name: fill(seed + names[name], *x.shape) for name, x in tower.state_dict().items()})
        tower.requires_grad_(False).eval()
    return towers


@cache
def pair(config: CosmosConfig, seed: str = "") -> tuple[TextTower, Cosmos, torch.nn.Module]:
    """Both of our towers and their one model, of the same weights."""
    known = {k: v for k, v in json.loads(json.dumps(hub_config(config))).items() if k != "mrope_section"}
    theirs = diffusers.Cosmos3OmniTransformer(**known, patch_latent_dim=4 * config.latent_channel)
    theirs.load_state_dict({name: fill(seed + name, *x.shape) for name, x in theirs.state_dict().items()})
    return *filled(config, seed), theirs.requires_grad_(False).eval()


def prompt(length: int, config: CosmosConfig = TINY) -> torch.Tensor:
    return (torch.arange(length)[None] * 37 + 3) % config.vocab_size


def ours(text: TextTower, video: Cosmos, ids, x, t: int, fps: float, given: int) -> torch.Tensor:
    return video(x, torch.tensor([t]), video.context(text(ids), *x.shape[2:], fps, given))


def their_inputs(theirs, ids, x, t: int, fps: float, given: int) -> dict:
    """The packed sequence, by their pipeline's own helpers."""
    pipe = diffusers.Cosmos3OmniPipeline.__new__(diffusers.Cosmos3OmniPipeline)
    pipe.__dict__.update(transformer=theirs, vae_scale_factor_temporal=4)
    text = pipe._prepare_text_segment(ids[0].tolist(), "cpu")
    clip = pipe._prepare_vision_segment(x, bool(given), text["vision_start_temporal_offset"], fps, ids.shape[1], "cpu")
    positions = torch.cat([text.pop("text_mrope_ids"), clip.pop("vision_mrope_ids")], dim=1)
    noisy, _, _ = clip.pop("num_noisy_vision_tokens"), clip.pop("num_vision_tokens"), text.pop("vision_start_temporal_offset")
    return text | clip | dict(position_ids=positions, sequence_length=positions.shape[1], vision_tokens=[x],
                              vision_timesteps=torch.full((noisy,), t), return_dict=False)  # fmt: skip


def their_run(theirs, *inputs) -> torch.Tensor:
    return theirs(**their_inputs(theirs, *inputs))[0][0]


# Stored facts


@pytest.mark.parametrize("name", ["cosmos_t2v", "cosmos_i2v", "cosmos_t2i"])
def test_golden(name):
    case = golden("tiny_models")[name]
    text, video = filled(CosmosConfig.read(case["config"]))
    x, ids = fill("input:x", *case["inputs"]["input:x"]), torch.tensor([case["input_ids"]])
    out = ours(text, video, ids, x, case["timestep"], case["fps"], int(case["clean_first_frame"]))
    wanted = case["output"]
    assert list(out.shape) == wanted["shape"]
    same(out.flatten()[:: wanted["step"]], torch.tensor(wanted["values"]), f"golden {name}")
    assert abs(out.square().mean().sqrt() / wanted["rms"] - 1) < TOLERANCE


def listed(name: str) -> dict[str, list[int]]:
    """Every tensor of the real transformer folder, and its shape."""
    stored = golden("state_dicts")[f"{name}.transformer"]
    assert stored["dtype"] == "BF16" and stored["layers"] == LARGE[name].num_hidden_layers
    return {key.replace("*", str(i)): shape for key, shape in stored["tensors"].items()
            for i in range(stored["layers"] if "*" in key else 1)}  # fmt: skip


def owned(tower: torch.nn.Module) -> dict[str, list[int]]:
    assert all(x.is_meta for x in tower.state_dict().values())
    return {tower.hub_name(name): list(x.shape) for name, x in tower.state_dict().items()}


@pytest.mark.parametrize("name", LARGE)
def test_full_size_names_and_shapes(name):
    """Each of the checkpoint's tensors is the text tower's, the video tower's or, by name, nobody's; and no other is."""
    text, video = (checkpoint.build(tower, LARGE[name]) for tower in (TextTower, Cosmos))
    stored, own = listed(name), (owned(text), owned(video))
    assert len(stored) == {"cosmos3-super": 1430, "cosmos3-nano": 814}[name]
    assert own[0].items() <= stored.items() and own[1].items() <= stored.items() and not own[0].keys() & own[1].keys()
    nobody = {key for key in stored if text.foreign(key) and video.foreign(key)}
    assert own[0].keys() | own[1].keys() | nobody == stored.keys()
    for tower, mine in ((text, own[0]), (video, own[1])):
        assert {key for key in stored if not tower.foreign(key)} == mine.keys()
    last = f"layers.{LARGE[name].num_hidden_layers - 1}."
    assert nobody == {key for key in stored if key.startswith(("action_", "audio_", "lm_head.")) or key == "norm.weight"
                      or (key.startswith(last) and any(f".{part}." in key for part in (
                          "to_q", "to_out", "norm_q", "mlp", "post_attention_layernorm")))}  # fmt: skip


@pytest.mark.parametrize("name", LARGE)
def test_no_other_name_is_accepted(name):
    """A folder is accepted where both towers accept each name: misspelt, of older layouts, or of a layer too many, none is."""
    text, video = (checkpoint.build(tower, LARGE[name]) for tower in (TextTower, Cosmos))
    own = (owned(text), owned(video))

    def accepted(key: str) -> bool:
        return all(key in mine or tower.foreign(key) for tower, mine in ((text, own[0]), (video, own[1])))

    stored, layers = listed(name), LARGE[name].num_hidden_layers
    assert all(accepted(key) for key in stored)
    strange = {f"layers.{layers}.{key[9:]}" for key in stored if key.startswith("layers.0.")}
    strange |= {changed for key in stored for changed in (f"model.{key}", f"{key}.weight", f"{key}_scale", key.upper())}
    short = [key for key in stored if not key.startswith("layers.") or key.startswith(("layers.0.", f"layers.{layers - 1}."))]
    for key in short:
        cuts = range(len(key))
        strange |= {key[:i] + key[i + 1 :] for i in cuts} | {key[:i] + key[i] + key[i:] for i in cuts}
        strange |= {key[:i] + "x" + key[i + 1 :] for i in cuts}
    strange |= {
        "action2llm.weight",
        "layers.0.self_attn.to_out.0.weight",
        "layers.0.self_attn.to_q.bias",
        "layers.-1.mlp.up_proj",
    }
    wrong = [key for key in strange - stored.keys() if accepted(key)]
    assert wrong == [] and len(strange) > 5000


def test_both_towers_read_one_folder_and_no_name_too_many(tmp_path):
    theirs, x = pair(TINY)[2], fill("input:x", 1, 48, 3, 5, 6)
    theirs.save_pretrained(tmp_path)
    component = checkpoint.open_component(tmp_path)
    towers = [checkpoint.load(checkpoint.build(tower, TINY), component, CPU, FP32) for tower in (TextTower, Cosmos)]
    inputs = prompt(9), x, 637, 24.0, 0
    assert torch.equal(ours(*towers, *inputs), ours(*pair(TINY)[:2], *inputs))
    for tower, name in ((TextTower, "layers.3.self_attn.to_q.weight"), (Cosmos, "layers.3.self_attn.add_q_proj.weight")):
        save_file(theirs.state_dict() | {name: torch.zeros(192, 96)}, tmp_path / "diffusion_pytorch_model.safetensors")
        with pytest.raises(ValueError, match=f"1 unknown: {re.escape(name)}"):
            checkpoint.check(checkpoint.build(tower, TINY), checkpoint.open_component(tmp_path))


# Against diffusers


@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("model", MODELS)
def test_transformer(model, clip):
    text, video, theirs = pair(MODELS[model])
    grid, fps, length, given = CLIPS[clip]
    ids = prompt(length)
    x, prefix = 1.7 * fill("input:x", 1, 48, *grid), text(ids)
    context = video.context(prefix, *grid, fps, given)
    for t in (637, 12):
        wanted = their_run(theirs, ids, x, t, fps, given)
        assert wanted[:, :, given:].square().mean() > 0.1
        same(video(x, torch.tensor([t]), context), wanted, f"Cosmos {model}, {clip}, t {t}")


def digest(prefix: list) -> str:
    return hashlib.sha256(b"".join(x.contiguous().numpy().tobytes() for kv in prefix for x in kv)).hexdigest()


def test_the_prefix_depends_on_the_ids_alone():
    """One prefix, made first, serves other times, clips and paces; they leave it as it was, and theirs agrees each time."""
    text, video, theirs = pair(TINY)
    ids = prompt(9)
    prefix = text(ids)
    made = digest(prefix)
    assert made != digest(text(ids.flip(1)))
    for grid, fps, _, given in CLIPS.values():
        for t in (999, 3):
            x = fill(f"input:x{t}", 1, 48, *grid)
            out = video(x, torch.tensor([t]), video.context(prefix, *grid, fps, given))
            same(out, their_run(theirs, ids, x, t, fps, given), f"one prefix, {grid}, {fps} fps, t {t}")
            assert digest(prefix) == digest(text(ids)) == made


def test_text_is_causal():
    """What stands behind a token changes nothing of it: so prompts padded at their end may be trained on without a mask."""
    text, ids = pair(TINY)[0], prompt(11)
    for whole, part in zip(text(ids), text(ids[:, :6]), strict=True):
        for a, b in zip(whole, part, strict=True):
            same(a[:, :6], b, "keys and values of the first 6 of 11", 1e-5)
            assert error(a[:, 5:11].flip(1), b) > 100 * TOLERANCE


def test_gradients_reach_every_weight_of_both_towers():
    text, video, theirs = pair(TINY)
    x, ids = 1.7 * fill("input:x", 1, 48, 3, 5, 6), prompt(9)
    models = [tower.requires_grad_(True) for tower in (text, video, theirs)]
    with torch.enable_grad():
        (ours(text, video, ids, x, 637, 16.0, 1) * x).sum().backward()
        (their_run(theirs, ids, x, 637, 16.0, 1) * x).sum().backward()
    found = {tower.hub_name(name): p.grad for tower in (text, video) for name, p in tower.named_parameters()}
    wanted = {name: p.grad for name, p in theirs.named_parameters() if p.grad is not None}
    for model in models:
        model.zero_grad(set_to_none=True)
        model.requires_grad_(False)
    assert all(g is not None and g.isfinite().all() and g.norm() > 0 for g in found.values())
    assert {name for name, g in wanted.items() if g.norm() > 0} == found.keys()
    worst = max(found, key=lambda name: error(found[name], wanted[name]))
    same(found[worst], wanted[worst], f"gradients, the worst of {len(found)} ({worst})")


def test_bf16_is_as_near_to_fp32_as_theirs(tmp_path):
    errors = []
    for seed in "abcdefgh":
        pair(TINY, f"{seed}.")[2].save_pretrained(tmp_path / seed)
        component = checkpoint.open_component(tmp_path / seed)
        exact, half = ([checkpoint.load(checkpoint.build(tower, CosmosConfig.read(component.config)), component, CPU, dtype)
                        for tower in (TextTower, Cosmos)] for dtype in (FP32, torch.bfloat16))  # fmt: skip
        theirs = diffusers.Cosmos3OmniTransformer.from_pretrained(tmp_path / seed, torch_dtype=torch.bfloat16)
        x = (1.7 * fill(f"input:x{seed}", 1, 48, 3, 5, 6)).bfloat16()
        inputs = (637, 24.0, 0)
        truth = ours(*exact, prompt(9), x.float(), *inputs)
        found = ours(*half, prompt(9), x, *inputs), their_run(theirs, prompt(9), x, *inputs)
        errors.append([error(out, truth) for out in found])
    mine, other = torch.tensor(errors).mean(0).tolist()
    print(f"bf16 from fp32: ours {mine:.2e}, theirs {other:.2e}, ratio {mine / other:.3f}")
    assert mine <= 1.1 * other
    stored = {tower.hub_name(name): p.dtype for tower in half for name, p in tower.named_parameters()}
    assert stored.items() <= {name: p.dtype for name, p in theirs.named_parameters()}.items()
    assert {name for name, dtype in stored.items() if dtype == FP32} == {name for name in stored if "time_embedder" in name}


def broken(how: str) -> torch.Tensor:
    """Our velocity with one thing wrong."""
    text, video, _ = pair(TINY)
    ids, x = prompt(9), 1.7 * fill("input:x", 1, 48, 3, 5, 6)
    prefix = text(ids)
    context = video.context(prefix, 3, 5, 6, 16.0, 1)
    if how == "no text":
        context = context._replace(prefix=[(k[:, :0], v[:, :0]) for k, v in prefix])
    elif how == "the clip starts where the text does":
        context = context._replace(rope=video.context(text(ids[:, :1]), 3, 5, 6, 16.0).rope)
    elif how == "24 fps for 16":
        context = video.context(prefix, 3, 5, 6, 24.0, 1)
    elif how == "rows and columns swapped in RoPE":
        rope = video.context(prefix, 3, 6, 5, 16.0).rope
        context = context._replace(rope=rope.unflatten(1, (3, 3, 3)).transpose(2, 3).flatten(1, 3))
    elif how == "the first frame is noisy":
        context = context._replace(given=0)
    elif how == "query heads grouped across":
        context = context._replace(prefix=[(k.flip(2), v.flip(2)) for k, v in prefix])
    return video(x, torch.tensor([637]), context)


@pytest.mark.parametrize("how", ["no text", "the clip starts where the text does", "24 fps for 16",
                                 "rows and columns swapped in RoPE", "the first frame is noisy",
                                 "query heads grouped across"])  # fmt: skip
def test_negative_control(how):
    wanted = their_run(pair(TINY)[2], prompt(9), 1.7 * fill("input:x", 1, 48, 3, 5, 6), 637, 16.0, 1)
    same(broken("nothing"), wanted, "unbroken")
    off = error(broken(how), wanted)
    print(f"control, {how}: {off:.1e}")
    assert off > 100 * TOLERANCE


# Grouped keys over ranks


def count(parallel: ParallelConfig, heads: int, kv_heads: int, tokens: int) -> tuple[dict, float]:
    """Inside a rank: elements sent by one attention, by axis, and the error against one rank's."""
    m = mesh.open_mesh(CPU, plan.degrees(parallel))
    q, k, v = (fill(f"input:{name}", 1, tokens, n, 16) for name, n in (("q", heads), ("k", kv_heads), ("v", kv_heads)))
    prefix = tuple(fill(f"input:text {name}", 1, 5, kv_heads, 16) for name in "kv")
    kernel, own = attention.KERNELS["cpu"], [mesh.shard(x, m.seq, 1) for x in (q, k, v)]
    o = plan.bind(parallel, m, tokens, kernel)(*((lambda x=x: x) for x in own), prefix)
    wanted = plan.bind(ParallelConfig(), mesh.Mesh(), tokens, kernel)(lambda: q, lambda: k, lambda: v, prefix)
    sent = {name: sum(n for (axis, _, unit), n in m.sent.items() if (axis, unit) == (name, "elements"))
            for name in ("q_axis", "kv_axis")}  # fmt: skip
    return sent, error(o, mesh.shard(wanted, m.seq, 1))


GRIDS = [((3, 3), 8, 1), ((9, 1), 8, 1), ((1, 9), 8, 1), ((3, 3), 8, 8), ((9, 1), 8, 8)]


def test_grouped_keys_make_tall_grids_cheap(on_ranks):
    """Counted on 9 ranks: [2 (m-1) + 2 g (n-1)] S C / p, and (m-1) S H / p of LSE; g = 1/8: 9x1 under half of 3x3."""
    tokens, total = 36, {}

    def work() -> list:
        return [count(ParallelConfig(attn2d_size=grid), heads, kv, tokens) for grid, heads, kv in GRIDS]

    for found in on_ranks(9, work):
        for ((n, m), heads, kv), (sent, off) in zip(GRIDS, found, strict=True):
            share = tokens * heads * 16 // 9  # S C / p
            assert sent["kv_axis"] == 2 * (n - 1) * share * kv // heads
            assert sent["q_axis"] == 2 * (m - 1) * share + (m - 1) * tokens * heads // 9
            assert off < 1e-5
            total[n, m, kv] = sum(sent.values())
    print(f"elements a rank and layer, by rows, columns, key heads of 8: {total}")
    assert total[9, 1, 1] < total[3, 3, 1] / 2 and total[9, 1, 8] > total[3, 3, 8]


REFUSED = {  # degrees of Cosmos3-Super: 64 heads, 8 key heads
    "ulysses": (dict(ulysses_size=24), "64 heads do not split over ulysses 24; use ulysses 8 and ring 3",
                dict(ulysses_size=8, ring_size=3)),
    "ulysses, grid": (dict(ulysses_size=24, attn2d_size=(2, 1)),
                      "64 heads do not split over ulysses 24; use ulysses 8 and attn2d [6, 1]",
                      dict(ulysses_size=8, attn2d_size=(6, 1))),
    "ulysses, tp": (dict(tp_size=2, ulysses_size=12), "32 heads of 64 over tp 2 do not split over ulysses 12; use ulysses 4 "
                    "and ring 3", dict(tp_size=2, ulysses_size=4, ring_size=3)),
    "fused": (dict(ulysses_size=4, fused_ulysses=True), "fused ulysses stacks q, k, v, and 64 heads are not 8; use the unfused "
              "way", dict(ulysses_size=4)),
    "tp": (dict(tp_size=16), "8 key heads do not split over tp 16; use 8", dict(tp_size=8)),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refused_with_a_way_out(case):
    given, said, way_out = REFUSED[case]
    asked, work = ParallelConfig(**given), plan.work(CosmosConfig(), (48, 45, 80), 2)
    with pytest.raises(ValueError) as caught:
        plan.check(asked, asked.world, work)
    assert str(caught.value) == said
    instead = ParallelConfig(**way_out)
    plan.check(instead, instead.world, work)


def test_one_rank_needs_no_mesh():
    """The model's own default and the bound scheme of one rank are the same bits."""
    text, video, _ = pair(TINY)
    x = fill("input:x", 1, 48, 3, 5, 6)
    context = video.context(text(prompt(5)), 3, 5, 6, 24.0)
    attend = plan.bind(ParallelConfig(), mesh.Mesh(), 27, attention.KERNELS["cpu"])
    assert torch.equal(video(x, torch.tensor([9]), context), video(x, torch.tensor([9]), context, attend, Axis("seq")))
