"""Cosmos3 (Super 64B, Nano 15B): a Mixture-of-Transformers for text- and image-to-video (NVIDIA, huggingface.co/nvidia).

    ids (b, L)  -> TextTower ->  keys and values of every layer, the *prefix*          once a prompt
    latents (b, 48, f, y, x), timestep (b,), prefix  -> Cosmos ->  velocity (b, 48, f, y, x)       every step

Two towers of equal depth with no weight in common. Text attends to text alone, causally (Qwen3's layers); the video's
tokens attend to all text and all video. So the text tower never sees time or video: what it leaves behind is a constant of
the prompt, and its half of the weights is not needed while denoising.

Letters: b batch; L text tokens; S tokens of the clip, s this rank's part; H query heads and G key heads of d (GQA: query
head j reads key head j // (H/G)), C the hidden width, which need not be H d; f y x latent frames, rows, columns.

One layer: x + attention(norm(x)), then x + SwiGLU(norm(x)). Time enters once, as a vector added to the tokens of noisy
frames. Rotary positions count text and frames on one time line: L tokens, a gap of 15000, then the frames at the pace of
24 fps; rows and columns count from 0. Hence the clip's rotary table depends on the prompt's length.

The model imports no parallel scheme: each layer hands `attend` three projections of this rank's video tokens and the
prefix, which every rank holds whole and every query must count exactly once.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from nanovgen.attention import KV, Projection, after, attention
from nanovgen.mesh import Axis, shard, unshard

Attend = Callable[[Projection, Projection, Projection, KV], Tensor]


@dataclass(frozen=True)
class CosmosConfig:
    """Sizes, by the names of the checkpoint's transformer/config.json. The defaults are Cosmos3-Super's."""

    hidden_size: int = 5120
    intermediate_size: int = 25600
    num_hidden_layers: int = 64
    num_attention_heads: int = 64
    num_key_value_heads: int = 8
    head_dim: int = 128
    vocab_size: int = 151936
    latent_channel: int = 48
    rms_norm_eps: float = 1e-6
    rope_theta: float = 5e6
    mrope_section: tuple[int, int, int] = (24, 20, 20)  # frequencies of time, rows, columns
    unified_3d_mrope_temporal_modality_margin: int = 15000
    base_fps: float = 24
    timestep_scale: float = 0.001

    @classmethod
    def read(cls, config: dict) -> "CosmosConfig":
        """From config.json. Keys we do not know are ignored; a variant that we would compute wrongly is refused."""
        known = {"attention_bias": False, "hidden_act": "silu", "enable_fps_modulation": True, "latent_patch_size": 2,
                 "qk_norm_for_text": True, "use_und_k_norm_for_gen": False, "video_temporal_causal": False,
                 "unified_3d_mrope_reset_spatial_ids": True, "joint_attn_implementation": "two_way"}  # fmt: skip
        for key, value in known.items():
            if config.get(key, value) != value:
                raise ValueError(f"transformer config has {key}={config[key]!r}; this model knows {value!r} only")
        values = {f.name: config[f.name] for f in fields(cls) if f.name in config}
        section = tuple((config.get("rope_scaling") or {}).get("mrope_section", cls.mrope_section))
        if sum(section) != values.get("head_dim", cls.head_dim) // 2:
            raise ValueError(f"transformer config has mrope_section={section}; their sum must be head_dim / 2")
        return cls(**values | {"mrope_section": section})


class Context(NamedTuple):
    """What one prompt and one clip shape fix for all steps."""

    prefix: list[KV]  # by layer: keys and values of the text
    rope: Tensor  # (2, S, d/2): cos and sin of the whole clip, fp32
    given: int = 0  # the first so many latent frames are known, not noisy (image-to-video: 1)


def local_attend(q: Projection, k: Projection, v: Projection, prefix: KV) -> Tensor:
    """The scheme of one rank: the prefix and this rank's tokens are all there are."""
    return attention(q(), *after(prefix, k(), v()))[0]


def clip_positions(frames: int, rows: int, columns: int, text: int, fps: float, config: CosmosConfig) -> Tensor:
    """Time, row and column of each video token, (3, S) fp32, after `text` tokens. Time runs at base_fps' pace."""
    start = text + config.unified_3d_mrope_temporal_modality_margin
    pace = torch.arange(frames, dtype=torch.float32) / (fps / 4) * (config.base_fps / 4) if frames > 1 else torch.zeros(1)
    axes = (pace + start, torch.arange(rows).float(), torch.arange(columns).float())
    return torch.stack(torch.meshgrid(*axes, indexing="ij")).flatten(1)


def rope_table(positions: Tensor, config: CosmosConfig) -> Tensor:
    """Positions (3, n) of time, row, column -> cos and sin (2, n, d/2): the three axes' frequencies interleave.

    fp32, not more: positions exceed 15000, where fp32 angles are 1e-3 off, and the checkpoints have learned with those.
    """
    frequency = 1 / config.rope_theta ** (torch.arange(0, config.head_dim, 2, device=positions.device).float() / config.head_dim)
    axis = torch.zeros(len(frequency), dtype=torch.long, device=positions.device)
    for i in (1, 2):  # of every three frequencies one turns with the row, one with the column, as far as the section goes
        axis[i : 3 * config.mrope_section[i] : 3] = i
    angles = positions[axis].T * frequency
    return torch.stack([angles.cos(), angles.sin()])


def rotate(x: Tensor, rope: Tensor) -> Tensor:
    """Rotate the pairs (j, j + d/2) of x (b, s, h, d) by rope (2, s, d/2), in fp32."""
    cos, sin = rope[:, None, :, None, :]  # each (1, s, 1, d/2)
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)


class KeyValue(nn.Module):
    """Keys, RMS-normalised per head, and values."""

    COLUMN = ("to_k", "to_v")  # what tensor parallelism cuts

    def __init__(self, c: CosmosConfig):
        super().__init__()
        self.head_dim, width = c.head_dim, c.num_key_value_heads * c.head_dim
        self.to_k, self.to_v = (nn.Linear(c.hidden_size, width, bias=False) for _ in range(2))
        self.norm_k = nn.RMSNorm(c.head_dim, eps=c.rms_norm_eps)

    def k(self, x: Tensor) -> Tensor:
        return self.norm_k(self.to_k(x).unflatten(-1, (-1, self.head_dim)))  # b s C -> b s G d

    def v(self, x: Tensor) -> Tensor:
        return self.to_v(x).unflatten(-1, (-1, self.head_dim))


class Attention(KeyValue):
    COLUMN, ROW = ("to_q", "to_k", "to_v"), ("to_out",)

    def __init__(self, c: CosmosConfig):
        super().__init__(c)
        width = c.num_attention_heads * c.head_dim
        self.to_q, self.to_out = nn.Linear(c.hidden_size, width, bias=False), nn.Linear(width, c.hidden_size, bias=False)
        self.norm_q = nn.RMSNorm(c.head_dim, eps=c.rms_norm_eps)

    def q(self, x: Tensor) -> Tensor:
        return self.norm_q(self.to_q(x).unflatten(-1, (-1, self.head_dim)))  # b s C -> b s H d

    def out(self, o: Tensor) -> Tensor:
        return self.to_out(o.flatten(-2))  # b s H d -> b s C


class SwiGLU(nn.Module):
    """arXiv:2002.05202."""

    COLUMN, ROW = ("gate_proj", "up_proj"), ("down_proj",)

    def __init__(self, c: CosmosConfig):
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(c.hidden_size, c.intermediate_size, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(c.intermediate_size, c.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """The same in both towers; they differ in what `attend` lets a token see."""

    FP8 = ("self_attn.to_q", "self_attn.to_k", "self_attn.to_v", "self_attn.to_out", "mlp.gate_proj", "mlp.up_proj",
           "mlp.down_proj")  # for fp8.py  # fmt: skip
    LOCAL = ("before", "q", "k", "v", "last")  # what torch.compile takes (compiled.py): no rank talks to another in them

    def __init__(self, c: CosmosConfig):
        super().__init__()
        self.self_attn, self.mlp = Attention(c), SwiGLU(c)
        self.input_layernorm, self.post_attention_layernorm = (nn.RMSNorm(c.hidden_size, eps=c.rms_norm_eps) for _ in range(2))

    def forward(self, x: Tensor, rope: Tensor, attend: Attend, prefix: KV | None = None) -> Tensor:
        h = self.before(x)
        return self.last(x, attend(lambda: self.q(h, rope), lambda: self.k(h, rope), lambda: self.v(h), prefix))

    def before(self, x: Tensor) -> Tensor:
        return self.input_layernorm(x)

    def q(self, h: Tensor, rope: Tensor) -> Tensor:
        return rotate(self.self_attn.q(h), rope)

    def k(self, h: Tensor, rope: Tensor) -> Tensor:
        return rotate(self.self_attn.k(h), rope)

    def v(self, h: Tensor) -> Tensor:
        return self.self_attn.v(h)

    def last(self, x: Tensor, o: Tensor) -> Tensor:
        x = x + self.self_attn.out(o)
        return x + self.mlp(self.post_attention_layernorm(x))


class LastTextLayer(nn.Module):
    """Of the last text layer only keys and values are ever read."""

    def __init__(self, c: CosmosConfig):
        super().__init__()
        self.input_layernorm, self.self_attn = nn.RMSNorm(c.hidden_size, eps=c.rms_norm_eps), KeyValue(c)

    def forward(self, x: Tensor, rope: Tensor) -> KV:
        h = self.input_layernorm(x)
        return rotate(self.self_attn.k(h), rope), self.self_attn.v(h)


# What stands in one transformer folder, by the checkpoint's names.
TEXT_NAMES = re.compile(r"embed_tokens\.weight|layers\.\d+\.(self_attn\.(to_[qkv]|to_out|norm_[qk])|mlp\.(gate|up|down)_proj"
                        r"|input_layernorm|post_attention_layernorm)\.weight")  # fmt: skip
VIDEO_NAMES = re.compile(r"layers\.\d+\.(self_attn\.(add_[qkv]_proj|to_add_out|norm_added_[qk])|mlp_moe_gen\.(gate|up|down)_proj"
                         r"|input_layernorm_moe_gen|post_attention_layernorm_moe_gen)\.weight|norm_moe_gen\.weight"
                         r"|(proj_in|proj_out|time_embedder\.linear_[12])\.(weight|bias)")  # fmt: skip
UNUSED_NAMES = re.compile(r"lm_head\.weight|norm\.weight|(action|audio)_modality_embed|audio_proj_(in|out)\.(weight|bias)"
                          r"|action_proj_(in|out)\.(fc|bias)\.weight")  # text-only, sound and action  # fmt: skip


class TextTower(nn.Module):
    """Ids to the prefix."""

    FP32 = ()

    def __init__(self, config: CosmosConfig):
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList([*(Layer(config) for _ in range(config.num_hidden_layers - 1)), LastTextLayer(config)])

    def hub_name(self, name: str) -> str:
        return name

    def foreign(self, name: str) -> bool:
        """Names in the same files that are not this tower's."""
        last = rf"layers\.{self.config.num_hidden_layers - 1}\.(self_attn\.(to_q|to_out|norm_q)|mlp\..*|post_attention_layernorm)"
        return bool(VIDEO_NAMES.fullmatch(name) or UNUSED_NAMES.fullmatch(name) or re.fullmatch(last + r"\.weight", name))

    def forward(self, ids: Tensor) -> list[KV]:
        """ids (b, L) -> by layer the keys and values (b, L, G, d). Causal: what is behind a token never changes it."""
        kept, rope = [], rope_table(torch.arange(ids.shape[1], device=ids.device).expand(3, -1).float(), self.config)

        def attend(q: Projection, k: Projection, v: Projection, _: None) -> Tensor:
            kept.append((k(), v()))
            q, k, v = (x.transpose(1, 2) for x in (q(), *kept[-1]))
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)

        x = self.embed_tokens(ids)
        for layer in self.layers[:-1]:
            x = layer(x, rope, attend)  # b L C
        return [*kept, self.layers[-1](x, rope)]


class Cosmos(nn.Module):
    """The video tower: the denoiser."""

    # (our name, the checkpoint's), replaced in this order; every other name is the checkpoint's own.
    HUB_NAMES = ((".to_q.", ".add_q_proj."), (".to_k.", ".add_k_proj."), (".to_v.", ".add_v_proj."), (".to_out.", ".to_add_out."),
                 (".norm_q.", ".norm_added_q."), (".norm_k.", ".norm_added_k."), (".mlp.", ".mlp_moe_gen."),
                 ("layernorm.", "layernorm_moe_gen."), ("time_linear_", "time_embedder.linear_"),
                 ("norm_out.", "norm_moe_gen."))  # fmt: skip
    FP32 = ("time_linear_",)

    def __init__(self, config: CosmosConfig):
        super().__init__()
        self.config, C = config, config.hidden_size
        self.proj_in, self.proj_out = nn.Linear(4 * config.latent_channel, C), nn.Linear(C, 4 * config.latent_channel)
        self.time_linear_1, self.time_linear_2 = nn.Linear(256, C), nn.Linear(C, C)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.norm_out = nn.RMSNorm(C, eps=config.rms_norm_eps)

    def hub_name(self, name: str) -> str:
        for ours, theirs in self.HUB_NAMES:
            name = name.replace(ours, theirs)
        return name

    def foreign(self, name: str) -> bool:
        """Names in the same files that are not this tower's."""
        return bool(TEXT_NAMES.fullmatch(name) or UNUSED_NAMES.fullmatch(name))

    def context(self, prefix: list[KV], frames: int, rows: int, columns: int, fps: float, given: int = 0) -> Context:
        """The text tower's keys and values and a latent shape -> what all steps share."""
        positions = clip_positions(frames, -(-rows // 2), -(-columns // 2), prefix[0][0].shape[1], fps, self.config)
        return Context(prefix, rope_table(positions, self.config).to(prefix[0][0].device), given)

    def embed_time(self, timestep: Tensor) -> Tensor:
        """(b,) in 0..1000 -> (b, 1, C) fp32."""
        frequency = 10000.0 ** (-torch.arange(128, dtype=torch.float32, device=timestep.device) / 128)
        angle = timestep.float()[:, None, None] * self.config.timestep_scale * frequency
        e = torch.cat([angle.cos(), angle.sin()], dim=-1)
        return self.time_linear_2(F.silu(self.time_linear_1(e.to(self.time_linear_1.weight.dtype))))

    def forward(self, latents: Tensor, timestep: Tensor, context: Context,
                attend: Attend = local_attend, axis: Axis = Axis("seq")) -> Tensor:  # fmt: skip
        """Velocity (b, 48, f, y, x) of latents of that shape at timestep (b,); 0 in the frames that are given.

        The tokens, and the rotary table beside them, are cut over `axis`; `attend` is the scheme that lets this
        rank's queries see the other ranks' keys. The output projection comes before the gather: 192 numbers a token.
        """
        f, y, x = latents.shape[2:]
        padded = F.pad(latents, (0, x % 2, 0, y % 2))  # 720 rows are 45 latent rows: the patches need 46
        tokens = rearrange(padded, "b c f (y q) (x r) -> b (f y x) (q r c)", q=2, r=2)
        S, rope = tokens.shape[1], shard(context.rope, axis, dim=1)
        noisy = torch.arange(S, device=latents.device) >= context.given * S // f
        h = self.proj_in(shard(tokens, axis, dim=1))
        time = self.embed_time(timestep).to(h.dtype)
        h = torch.where(shard(noisy, axis, dim=0)[None, :, None], h + time, h)

        for layer, prefix in zip(self.layers, context.prefix, strict=True):
            h = layer(h, rope, attend, prefix)  # b s C

        out = unshard(self.proj_out(self.norm_out(h)), axis, dim=1, size=S)
        out = torch.where(noisy[None, :, None], out, 0)
        out = rearrange(out, "b (f y x) (q r c) -> b c f (y q) (x r)", f=f, y=-(-y // 2), q=2, r=2)
        return out[..., :y, :x]
