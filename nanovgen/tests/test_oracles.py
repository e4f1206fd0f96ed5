"""Every part held against the reference implementations, in fp32 on the CPU; -rP shows the errors.

    ours  -- hub_name -->  diffusers 0.42.1, transformers 5.24        ||a - b|| / ||b|| < 1e-4

Weights are pseudo-random and of unit gain, so that attention and every branch weigh in the result. The negative controls
at the end break one thing each, and must be seen at 100 times the tolerance.
"""

import copy
import json
import math
import re
from dataclasses import asdict, replace
from functools import cache

import diffusers
import pytest
import tiny_layout
import torch
import transformers
from diffusers.pipelines.wan.pipeline_wan import prompt_clean
from PIL import Image
from safetensors.torch import load_file
from test_golden import TOLERANCE, error, fill, same, walk
from torch import nn

from nanovgen import attention, checkpoint, generate
from nanovgen import job as jobs
from nanovgen.recipe import Request
from nanovgen.scheduler import flow_sigmas, timesteps
from nanovgen.text import UMT5, UMT5Config, clean, encode_prompt
from nanovgen.vae import VAE, CausalConv3d, Stream, Upsample, VAEConfig
from nanovgen.wan import Wan, WanConfig, rope_table, rotate

T2V = WanConfig(num_attention_heads=3, attention_head_dim=20, num_layers=3, ffn_dim=100, text_dim=48)  # RoPE takes 8 + 6 + 6
TEXT = UMT5Config(vocab_size=300, d_model=48, d_kv=16, d_ff=96, num_layers=3, num_heads=3)
MEAN, STD = (tuple((i + start) / 8 for i in range(16)) for start in (-6, 4))
CLIPS = VAEConfig(base_dim=8, decoder_base_dim=12, latents_mean=MEAN, latents_std=STD)
RESIDUAL = replace(CLIPS, is_residual=True, patch_size=2)
VAES = {f"{kind}, {n}": replace(config, decoder_base_dim=n) for kind, config in (("2.1", CLIPS), ("2.2", RESIDUAL))
        for n in (None, 8, 12)}  # fmt: skip
GRAIN = dict(patch_size=(1, 2, 2), cross_attn_norm=True, qk_norm="rms_norm_across_heads")
channels = lambda c: 3 * (c["patch_size"] or 1) ** 2  # noqa: E731
KINDS = {
    WanConfig: (Wan, lambda c: diffusers.WanTransformer3DModel(**GRAIN, **c)),
    VAEConfig: (VAE, lambda c: diffusers.AutoencoderKLWan(in_channels=channels(c), out_channels=channels(c), **c)),
    UMT5Config: (UMT5, lambda c: transformers.UMT5EncoderModel(transformers.UMT5Config(feed_forward_proj="gated-gelu", **c))),
}


@pytest.fixture(autouse=True)
def one_thread_no_grad():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # threads that spin for tiny tensors made this ten times slower on a busy machine
    with torch.no_grad():
        yield
    torch.set_num_threads(threads)


@cache
def pair(config, seed=""):
    """Our model and theirs of this config with the same weights, by the hub's names: strictly all of ours, all of theirs."""
    kind, build = KINDS[type(config)]
    ours, theirs = kind(config), build(json.loads(json.dumps(asdict(config))))
    weights = {ours.hub_name(name): fill(seed + ours.hub_name(name), *x.shape) for name, x in ours.state_dict().items()}
    ours.load_state_dict({name: weights[ours.hub_name(name)] for name in ours.state_dict()})
    alias = {"encoder.embed_tokens.weight": weights["shared.weight"]} if kind is UMT5 else {}
    theirs.load_state_dict(weights | alias, strict=True)
    return ours.requires_grad_(False).eval(), theirs.requires_grad_(False).eval()


def wan_inputs(in_channels=16, grid=(3, 6, 10), seed=""):
    """Two clips and prompts at two times; the grid is latent frames, rows, columns."""
    x, states = fill(f"input:x{seed}", 2, in_channels, *grid), fill(f"input:text{seed}", 2, 11, T2V.text_dim)
    return 1.7 * x, torch.tensor([999, 137]), 1.7 * states


def run(model, x, t, states, **changes):
    if not isinstance(model, Wan):
        return model(x, t, states, return_dict=False)[0]
    return model(x, t, model.context(states, *x.shape[2:])._replace(**changes))


@pytest.mark.parametrize("grid", [(3, 6, 10), (2, 14, 2), (1, 2, 6)])
@pytest.mark.parametrize("channels", [16, 36])
def test_transformer(channels, grid):
    inputs = wan_inputs(channels, grid)
    same(*(run(model, *inputs) for model in pair(replace(T2V, in_channels=channels))), f"Wan {channels} in, {grid}")


def test_gradients_reach_every_weight_and_the_text():
    (x, t, states), found = wan_inputs(), []
    for model in copy.deepcopy(pair(T2V)):
        leaf = states.clone().requires_grad_(True)
        with torch.enable_grad():
            (run(model.requires_grad_(True), x, t, leaf) * x).sum().backward()
        rename = getattr(model, "hub_name", str)
        found.append({rename(name): p.grad for name, p in model.named_parameters()} | {"text": leaf.grad})
    assert all(g.isfinite().all() and g.norm() > 0 for g in found[0].values())
    worst = max(found[1], key=lambda name: error(found[0][name], found[1][name]))
    same(found[0][worst], found[1][worst], f"gradients, the worst ({worst})")


def test_bf16_is_as_near_to_fp32_as_theirs(tmp_path):
    errors = []
    for seed in "abcdefgh":
        pair(T2V, f"{seed}.")[1].save_pretrained(tmp_path / seed)
        component = checkpoint.open_component(tmp_path / seed)
        exact, ours = (checkpoint.load(checkpoint.build(Wan, WanConfig.read(component.config)), component, torch.device("cpu"),
                                       dtype) for dtype in (torch.float32, torch.bfloat16))  # fmt: skip
        theirs = diffusers.WanTransformer3DModel.from_pretrained(tmp_path / seed, torch_dtype=torch.bfloat16)
        x, t, states = (v.bfloat16() if v.is_floating_point() else v for v in wan_inputs(seed=seed))
        truth = run(exact, x.float(), t, states.float())
        errors.append([error(run(model, x, t, states), truth) for model in (ours, theirs)])
    mine, other = torch.tensor(errors).mean(0).tolist()
    print(f"bf16 from fp32: ours {mine:.2e}, theirs {other:.2e}, ratio {mine / other:.3f}")
    assert mine <= 1.1 * other
    dtypes = {ours.hub_name(name): p.dtype for name, p in ours.named_parameters()}
    assert dtypes == {name: p.dtype for name, p in theirs.named_parameters()}
    islands = re.compile(r"scale_shift_table|time_embedder|\.norm2\.")
    assert dtypes == {name: torch.float32 if islands.search(name) else torch.bfloat16 for name in dtypes}


def test_rope_under_autocast():
    x, table = fill("input:x", 1, 180, 3, 20), rope_table(3, 6, 10, 20)
    rotated = rotate(x, table)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(rope_table(3, 6, 10, 20), table) and table.dtype == torch.float32
        assert torch.equal(rotate(x, table), rotated) and rotated.dtype == torch.float32
        assert torch.equal(rotate(x.bfloat16(), table), rotate(x.bfloat16().float(), table).bfloat16())


@pytest.mark.parametrize("kv_heads", [6, 2])
def test_attention(kv_heads):
    """Six tokens of six heads: a wrong broadcast would be legal here."""
    q, k, v = (3 * fill(f"input:{name}", 2, 6, heads, 8) for name, heads in (("q", 6), ("k", kv_heads), ("v", kv_heads)))
    o, lse = attention.attention(q, k, v, attention.KERNELS["cpu"])
    for j in range(6):
        keys, values = (x[:, :, j // (6 // kv_heads)].double() for x in (k, v))
        scores = q[:, :, j].double() @ keys.mT / math.sqrt(8)
        same(o[:, :, j], scores.softmax(-1) @ values, f"attention, head {j} of 6 over {kv_heads}")
        same(lse[:, :, j], scores.exp().sum(-1).log(), f"its LSE, head {j} of 6 over {kv_heads}")
    attention.prove(attention.KERNELS["cpu"], torch.device("cpu"), torch.float32, 8)


def test_prove_refuses_base_two():
    def base_two(q, k, v):
        o, lse = attention.KERNELS["cpu"](q, k, v)
        return o, lse / math.log(2)

    with pytest.raises(RuntimeError, match="base_two: LSE is off"):
        attention.prove(base_two, torch.device("cpu"), torch.float32, 8)


def test_umt5():
    ours, theirs = pair(TEXT)
    ids, mask = torch.arange(400).view(2, 200) * 37 % 298 + 2, torch.ones(2, 200, dtype=torch.bool)
    mask[0, 150:] = False
    wanted = theirs(ids.masked_fill(~mask, 0), mask.long()).last_hidden_state
    same(ours(ids, mask)[mask], wanted[mask], "UMT5, masked")
    rows = encode_prompt(ours, ids[0, :150].tolist(), 160)
    same(rows[:, :150], wanted[:1, :150], "UMT5, the real tokens alone")
    assert rows.shape == (1, 160, 48) and not rows[:, 150:].any()


@pytest.mark.parametrize("frames", [1, 5, 9, 13])
@pytest.mark.parametrize("name", VAES)
def test_vae(name, frames):
    ours, theirs = pair(VAES[name])
    scale = ours.config.scale
    video, z = fill("input:video", 2, 3, frames, 3 * scale, 5 * scale), fill("input:z", 2, 16, (frames + 3) // 4, 3, 5)
    mean, std = (torch.tensor(x).view(1, 16, 1, 1, 1) for x in (MEAN, STD))
    chunks = (1, 2, 4, None)
    encoded, decoded = [ours.encode(video, c) for c in chunks], [torch.cat([*ours.decode(z, c)], dim=2) for c in chunks]
    same(encoded[0], (theirs.encode(video).latent_dist.mode() - mean) / std, f"VAE {name}, encode, {frames} frames")
    same(decoded[0], theirs.decode(z * std + mean, return_dict=False)[0], f"VAE {name}, decode, {frames} frames")
    assert (decoded[0].abs() == 1).float().mean() < 0.1  # or the clamp would hide errors
    for one, *others in (encoded, decoded):  # not to the bit: libraries pick a convolution's kernel by its shape
        assert all(error(other, one) < 2e-6 for other in others), [error(other, one) for other in others]


@pytest.mark.parametrize("config", [CLIPS, RESIDUAL], ids=["2.1", "2.2"])
def test_vae_gradients(config):
    """Of both halves, in one chunk by ours, frame by frame by theirs; to every weight, the video and the latents."""
    scale, found = config.scale, []
    mean, std = (torch.tensor(x).view(1, 16, 1, 1, 1) for x in (MEAN, STD))
    for model in copy.deepcopy(pair(config)):
        video, z = fill("input:video", 1, 3, 9, 2 * scale, scale), fill("input:z", 1, 16, 3, 2, 1)
        with torch.enable_grad():
            for x in (model, video, z):
                x.requires_grad_(True)
            if isinstance(model, VAE):
                mode, clip = model.moments(video, None)[0], torch.cat([*model.decode(z, None)], dim=2)
            else:
                mode, clip = model.encode(video).latent_dist.mode(), model.decode(z * std + mean, return_dict=False)[0]
            (mode.square().sum() + clip.square().sum()).backward()
        rename = getattr(model, "hub_name", str)
        found.append({rename(name): p.grad for name, p in model.named_parameters()} | {"video": video.grad, "z": z.grad})
    assert found[0].keys() == found[1].keys() and all(g.isfinite().all() and g.norm() > 0 for g in found[0].values())
    worst = max(found[1], key=lambda name: error(found[0][name], found[1][name]))
    same(found[0][worst], found[1][worst], f"VAE gradients, the worst ({worst})")


def their_unipc(steps=None, shift=1.0, sigmas=None, **more):
    theirs = diffusers.UniPCMultistepScheduler(use_flow_sigmas=True, prediction_type="flow_prediction", flow_shift=shift, **more)
    theirs.set_timesteps(steps, sigmas=sigmas)
    theirs.set_begin_index(0)  # it looks the index up by the time otherwise, and two times may be equal
    return theirs


@pytest.mark.parametrize("shift", [1.0, 3.0, 5.0, 12.0])
@pytest.mark.parametrize("grid", ["diffusers", "native"])
def test_unipc(grid, shift):
    worst = 0.0
    for steps in range(1, 51):
        sigmas = flow_sigmas(steps, shift, grid)
        theirs = their_unipc(steps, shift) if grid == "diffusers" else their_unipc(sigmas=sigmas[:-1].numpy())
        assert timesteps(sigmas) == theirs.timesteps.tolist(), f"{steps} steps"
        assert error(sigmas, theirs.sigmas) < 1e-6 and walk(sigmas).isfinite().all()
        worst = max(worst, error(walk(sigmas), walk(sigmas, theirs)))
    print(f"UniPC, {grid} grid, shift {shift}, the worst of 1 to 50 steps: {worst:.1e}")
    assert worst < TOLERANCE


def test_euler_and_no_memory_between_runs():
    sigmas, theirs = flow_sigmas(20, 5.0), diffusers.FlowMatchEulerDiscreteScheduler()
    theirs.set_timesteps(sigmas=sigmas[:-1].tolist())
    same(walk(sigmas, solver="euler"), walk(sigmas, theirs), "Euler")
    before = walk(sigmas)
    walk(flow_sigmas(7, 3.0, "diffusers"))
    assert torch.equal(before, walk(sigmas))


@pytest.mark.parametrize("in_channels", [16, 36])
def test_whole_pipeline(in_channels, tmp_path):
    encoder = pair(replace(TEXT, vocab_size=tiny_layout.TEXT_CONFIG.vocab_size))[0]
    high, low = (pair(replace(T2V, in_channels=in_channels), seed)[0] for seed in ("high.", "low."))
    tiny_layout.save_experts(encoder, high, low, CLIPS, tmp_path)
    tiny_layout.save_vae(pair(CLIPS)[0], tmp_path)
    prompt, negative = "a  big red circle moves left &amp; spins on a navy background", "blue " * 40  # 41 ids; 32 are used
    request = Request(prompt, str(tmp_path), negative, size="48x32", frames=9, fps=16, steps=6, guidance=4.0, guidance_low=2.5,
                      shift=tiny_layout.SHIFT, boundary=tiny_layout.BOUNDARY, grid="diffusers", seed=7, chunk=1, device="cpu",
                      out=str(tmp_path / "clip.mp4"))  # fmt: skip
    kind, extra, path = diffusers.WanPipeline, {}, []
    if in_channels == 36:
        kind, request = diffusers.WanImageToVideoPipeline, replace(request, image=str(tmp_path / "image.png"))
        extra["image"] = Image.fromarray((127.5 * (1 + fill("input:image", 37, 61, 3))).byte().numpy())
        extra["image"].save(request.image)
    job = jobs.prepare(request)
    assert [job.expert(t) for t in job.times] == ["transformer"] * 3 + ["transformer_2"] * 3
    latents = load_file(generate.generate(job)["latents"])["latents"]
    frames = torch.cat([*generate.load(job, "vae", generate.Stages(job.device)).decode(latents)], dim=2)
    wanted = kind.from_pretrained(tmp_path, torch_dtype=torch.float32)(
        prompt=prompt, negative_prompt=negative, height=32, width=48, num_frames=9, num_inference_steps=6, guidance_scale=4.0,
        guidance_scale_2=2.5, generator=torch.Generator().manual_seed(7), max_sequence_length=tiny_layout.TEXT_ROWS,
        callback_on_step_end=lambda pipe, i, t, got: path.append(got["latents"]) or got, output_type="pt", **extra)  # fmt: skip
    same(latents, path[-1], f"pipeline, {in_channels} in, latents")
    same(frames, 2 * wanted.frames.transpose(1, 2) - 1, f"pipeline, {in_channels} in, frames")


@pytest.mark.parametrize("prompt", ["“odd” ‘quotes’ â€œbrokenâ€\x9d", "a &amp;lt;b&amp;gt; &quot;c&quot;", " a  b\t\n c\u3000d ",
                                    "ＦＵＬＬ width！ ﬁ ½", "&nbsp;x&nbsp;", "色调艳丽，过曝"])  # fmt: skip
def test_clean(prompt):
    assert clean(prompt) == prompt_clean(prompt)


class PerHead(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.weight = norm.weight

    def forward(self, x):
        return nn.functional.rms_norm(x.unflatten(-1, (-1, 20)), (20,), eps=1e-6).flatten(-2) * self.weight


class FirstFrameAsPast(Stream):  # of the second, in temporal upsampling; the reference has zeros there
    def swap(self, layer, x, keep):
        if isinstance(layer, Upsample) and layer not in self.cache:
            self.cache[layer.time_conv] = torch.cat([torch.zeros_like(x), x], dim=2)
        return super().swap(layer, x, keep)


def broken_wan(how):
    ours, theirs = copy.deepcopy(pair(T2V))
    f, y, x = rope_table(3, 3, 5, 20).unflatten(1, (3, 3, 5)).split([4, 3, 3], dim=-1)
    if how == "rows and columns swapped in RoPE":
        f, y, x = f, x, y
    elif how == "rows out of place in RoPE":
        y = y.roll(1, dims=2)
    elif how == "q and k normalised by head":
        for a in (a for block in ours.blocks for a in (block.self_attn, block.cross_attn)):
            a.norm_q, a.norm_k = PerHead(a.norm_q), PerHead(a.norm_k)
    elif how == "shift and scale swapped in the output":
        ours.scale_shift_table.copy_(ours.scale_shift_table.flip(1))
    elif how == "no norm before cross-attention":
        for block in theirs.blocks:
            block.norm2 = nn.Identity()
    inputs = wan_inputs()
    return run(ours, *inputs, rope=torch.cat([f, y, x], dim=-1).flatten(1, 3)), run(theirs, *inputs)


def broken_vae(how):
    (ours, theirs), z, parts = pair(CLIPS), fill("input:z", 1, 16, 3, 3, 5), []
    stream = FirstFrameAsPast() if how == "first frame as the second's past" else Stream()
    for part in ours.post_quant_conv(z, stream).split(1, dim=2):
        parts.append(ours.decoder(part, stream).clamp(-1, 1))
        if how == "chunks forget":
            stream.cache = {layer: x for layer, x in stream.cache.items() if not isinstance(layer, CausalConv3d)}
    return torch.cat(parts, dim=2), theirs.decode(z, return_dict=False)[0]


class Otherwise(nn.Module):  # a shortcut, given something else
    def __init__(self, shortcut, change):
        super().__init__()
        self.shortcut, self.change = shortcut, change

    def forward(self, x, stream):
        return self.shortcut(self.change(x, self.shortcut), stream)


def broken_unfold(how):
    ours, theirs = copy.deepcopy(pair(RESIDUAL))
    if how == "rows and columns of a patch swapped":
        for p in ours.decoder.conv_out.parameters():
            p.copy_(p.unflatten(0, (3, 2, 2)).transpose(1, 2).flatten(0, 2))
    for stage in ours.decoder.stages[:-1]:
        if how == "the channels that a shortcut unfolds in another order":
            stage.shortcut = Otherwise(
                stage.shortcut, lambda x, to: x.unflatten(1, (-1, to.repeats)).transpose(1, 2).flatten(1, 2)
            )
        elif how == "no shortcut":
            stage.shortcut = None
    mean, std = (torch.tensor(x).view(1, 16, 1, 1, 1) for x in (MEAN, STD))
    z = fill("input:z", 1, 16, 3, 3, 5)
    return torch.cat([*ours.decode(z)], dim=2), theirs.decode(z * std + mean, return_dict=False)[0]


def broken_fold(how):
    ours, theirs = copy.deepcopy(pair(RESIDUAL))
    for stage in ours.encoder.stages if how == "the first frame folded with itself" else ():  # not with zeros
        stage.shortcut = Otherwise(stage.shortcut, lambda x, to: torch.cat([x[:, :, : -x.shape[2] % to.t], x], dim=2))
    video = fill("input:video", 1, 3, 9, 48, 80)
    return ours.moments(video)[0], theirs.encode(video).latent_dist.mode()


def broken_umt5(how):
    ours, theirs = copy.deepcopy(pair(TEXT))
    for block in ours.blocks if how == "one bias for all layers" else ():
        block.bias = ours.blocks[0].bias
    ids = torch.arange(200)[None] * 37 % 300
    return ours(ids), theirs(ids).last_hidden_state


def broken_unipc(how):
    sigmas = flow_sigmas(4, 1.0, "diffusers")
    theirs = their_unipc(4, disable_corrector=list(range(4)) if how == "no corrector" else [])
    return walk(sigmas, theirs), walk(sigmas)


@pytest.mark.parametrize(("part", "how"), [
    (broken_wan, "rows and columns swapped in RoPE"), (broken_wan, "rows out of place in RoPE"),
    (broken_wan, "no norm before cross-attention"), (broken_wan, "q and k normalised by head"),
    (broken_wan, "shift and scale swapped in the output"), (broken_vae, "chunks forget"),
    (broken_vae, "first frame as the second's past"), (broken_unfold, "rows and columns of a patch swapped"),
    (broken_unfold, "the channels that a shortcut unfolds in another order"), (broken_unfold, "no shortcut"),
    (broken_fold, "the first frame folded with itself"), (broken_umt5, "one bias for all layers"),
    (broken_unipc, "no corrector"),
])  # fmt: skip
def test_negative_control(part, how):
    same(*part(None), "unbroken")
    off = error(*part(how))
    print(f"control, {how}: {off:.1e}")
    assert off > 100 * TOLERANCE
