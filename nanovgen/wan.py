"""Wan 2.1 and 2.2 video diffusion transformer (arXiv:2503.20314), T2V and I2V-A14B, forward and backward.

    latents (b, c, f, y, x), timestep (b,), text states (b, n, text_dim)  ->  velocity (b, 16, f, y, x)

Letters: b batch; S tokens of the clip, s this rank's part; H heads of d, width C = H d; f y x latent frames, rows and
columns; q r the patch's rows and columns. Tokens run (f, y, x), x fastest.

One block: self-attention over the clip, cross-attention to the text, MLP. Time enters as six fp32 vectors a block that
shift, scale and gate (adaLN). The text's keys and values do not depend on time or on the clip, so `context` makes them
once a prompt. The model imports no parallel scheme: self-attention hands `attend` three projections (functions that
return q, k, v of this rank's tokens), so a scheme may send one while the next is computed.

Wan 2.2 A14B is two of these with equal shapes: one for t >= boundary (high noise), one for the rest.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from nanovgen.attention import Projection, attention
from nanovgen.compiled import linear_gelu
from nanovgen.mesh import Axis, shard, unshard

Attend = Callable[[Projection, Projection, Projection], Tensor]


@dataclass(frozen=True)
class WanConfig:
    """Sizes, by the names of the checkpoint's transformer/config.json. The defaults are Wan 2.2 T2V-A14B's."""

    num_attention_heads: int = 40
    attention_head_dim: int = 128
    num_layers: int = 40
    ffn_dim: int = 13824
    in_channels: int = 16
    out_channels: int = 16
    text_dim: int = 4096
    freq_dim: int = 256
    eps: float = 1e-6

    @property
    def width(self) -> int:
        return self.num_attention_heads * self.attention_head_dim

    @classmethod
    def read(cls, config: dict) -> "WanConfig":
        """From config.json. Keys we do not know are ignored; a variant that we would compute wrongly is refused."""
        known = {"patch_size": [1, 2, 2], "cross_attn_norm": True, "qk_norm": "rms_norm_across_heads",
                 "added_kv_proj_dim": None, "image_dim": None, "pos_embed_seq_len": None}  # fmt: skip
        for key, value in known.items():
            if config.get(key, value) != value:
                raise ValueError(f"transformer config has {key}={config[key]!r}; this model knows {value!r} only")
        return cls(**{f.name: config[f.name] for f in fields(cls) if f.name in config})


class Context(NamedTuple):
    """What one prompt and one clip shape fix for all steps."""

    text_kv: list[tuple[Tensor, Tensor]]  # by block: k and v of the text, each (b, n, H, d)
    rope: Tensor  # (2, S, d/2): cos and sin of the whole clip, fp32


def local_attend(q: Projection, k: Projection, v: Projection) -> Tensor:
    """The scheme of one rank: this rank's tokens are all there are."""
    return attention(q(), k(), v())[0]


def rope_table(frames: int, rows: int, columns: int, head_dim: int) -> Tensor:
    """Rotary angles' cos and sin, (2, S, d/2) fp32, made in float64 (RoFormer, arXiv:2104.09864, over three axes).

    The d/2 pairs are shared out to f, y, x as d/2 - 2(d//6), d//6, d//6: 22, 21, 21 of 64.
    """
    space = 2 * (head_dim // 6)
    angles = []
    for count, size in ((frames, head_dim - 2 * space), (rows, space), (columns, space)):
        frequency = 10000.0 ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
        angles.append(torch.outer(torch.arange(count, dtype=torch.float64), frequency))
    f, y, x = angles
    grid = [f[:, None, None], y[None, :, None], x[None, None, :]]
    table = torch.cat([a.expand(frames, rows, columns, -1) for a in grid], dim=-1).flatten(0, 2)
    return torch.stack([table.cos(), table.sin()]).float()


def rotate(x: Tensor, rope: Tensor) -> Tensor:
    """Rotate the pairs (2j, 2j+1) of x (b, s, h, d) by rope (2, s, d/2), in fp32."""
    cos, sin = rope[:, None, :, None, :]  # each (1, s, 1, d/2)
    cos, sin = torch.stack([cos, cos], dim=-1).flatten(-2), torch.stack([-sin, sin], dim=-1).flatten(-2)
    other = x.float().unflatten(-1, (-1, 2)).flip(-1).flatten(-2)  # of a pair (a, b): (b, a)
    return (x.float() * cos + other * sin).to(x.dtype)  # (a cos - b sin, b cos + a sin)


def modulate(x: Tensor, scale: Tensor, shift: Tensor, eps: float) -> Tensor:
    """LayerNorm without weights, then scale and shift (b, 1, C); fp32 inside, x's dtype out."""
    return (F.layer_norm(x.float(), x.shape[-1:], eps=eps) * (1 + scale) + shift).to(x.dtype)


class Attention(nn.Module):
    """The projections of one attention. q and k are RMS-normalised over the whole width, before the split in heads."""

    COLUMN, ROW, WIDE_NORM = ("to_q", "to_k", "to_v"), ("to_out",), ("norm_q", "norm_k")  # what tensor parallelism cuts

    def __init__(self, config: WanConfig):
        super().__init__()
        self.head_dim = config.attention_head_dim
        self.to_q, self.to_k, self.to_v, self.to_out = (nn.Linear(config.width, config.width) for _ in range(4))
        self.norm_q, self.norm_k = (nn.RMSNorm(config.width, eps=config.eps) for _ in range(2))

    def q(self, x: Tensor) -> Tensor:
        return self.norm_q(self.to_q(x)).unflatten(-1, (-1, self.head_dim))  # b s C -> b s H d

    def k(self, x: Tensor) -> Tensor:
        return self.norm_k(self.to_k(x)).unflatten(-1, (-1, self.head_dim))

    def v(self, x: Tensor) -> Tensor:
        return self.to_v(x).unflatten(-1, (-1, self.head_dim))

    def out(self, o: Tensor) -> Tensor:
        return self.to_out(o.flatten(-2))  # b s H d -> b s C


class Block(nn.Module):
    """What lies between two attentions is one method each: no rank talks to another in them."""

    COLUMN, ROW = ("mlp_up",), ("mlp_down",)
    LOCAL = ("before", "q", "k", "v", "between", "last")  # what torch.compile takes (compiled.py)
    FP8 = ("self_attn.to_q", "self_attn.to_k", "self_attn.to_v", "self_attn.to_out", "cross_attn.to_q", "cross_attn.to_out",
           "mlp_up", "mlp_down")  # what the clip's tokens pass, for fp8.py  # fmt: skip

    def __init__(self, config: WanConfig):
        super().__init__()
        self.eps = config.eps
        self.self_attn, self.cross_attn = Attention(config), Attention(config)
        self.cross_norm = nn.LayerNorm(config.width, eps=config.eps)  # the only LayerNorm with weights
        self.mlp_up = nn.Linear(config.width, config.ffn_dim)
        self.mlp_down = nn.Linear(config.ffn_dim, config.width)
        self.scale_shift_table = nn.Parameter(torch.randn(1, 6, config.width) / config.width**0.5)

    def forward(self, x: Tensor, time: Tensor, text_kv: tuple, rope: Tensor, attend: Attend) -> Tensor:
        """x (b, s, C), time (b, 6, C) -> (b, s, C). Residuals add up in fp32 and round once."""
        mod = self.scale_shift_table.float() + time.float()  # (b, 6, C): shift, scale, gate of attention, then of the MLP
        h = self.before(x, mod)
        o = attend(lambda: self.q(h, rope), lambda: self.k(h, rope), lambda: self.v(h))
        x, q = self.between(x, o, mod)
        o = attention(q, *text_kv)[0]  # the text is whole on every rank
        return self.last(x, o, mod)

    def before(self, x: Tensor, mod: Tensor) -> Tensor:
        return modulate(x, mod[:, 1:2], mod[:, 0:1], self.eps)

    def q(self, h: Tensor, rope: Tensor) -> Tensor:
        return rotate(self.self_attn.q(h), rope)

    def k(self, h: Tensor, rope: Tensor) -> Tensor:
        return rotate(self.self_attn.k(h), rope)

    def v(self, h: Tensor) -> Tensor:
        return self.self_attn.v(h)

    def between(self, x: Tensor, o: Tensor, mod: Tensor) -> tuple[Tensor, Tensor]:
        """x after self-attention, and the queries of cross-attention."""
        x = (x.float() + self.self_attn.out(o) * mod[:, 2:3]).to(x.dtype)
        h = F.layer_norm(x.float(), x.shape[-1:], self.cross_norm.weight, self.cross_norm.bias, self.eps).to(x.dtype)
        return x, self.cross_attn.q(h)

    def last(self, x: Tensor, o: Tensor, mod: Tensor) -> Tensor:
        x = x + self.cross_attn.out(o)
        h = modulate(x, mod[:, 4:5], mod[:, 3:4], self.eps)
        h = self.mlp_down(linear_gelu(self.mlp_up, h))
        return (x.float() + h.float() * mod[:, 5:6]).to(x.dtype)


class Wan(nn.Module):
    # (our name, the checkpoint's), replaced in this order; every other name is the checkpoint's own.
    HUB_NAMES = ((".self_attn.", ".attn1."), (".cross_attn.", ".attn2."), (".to_out.", ".to_out.0."),
                 (".cross_norm.", ".norm2."), (".mlp_up.", ".ffn.net.0.proj."), (".mlp_down.", ".ffn.net.2."),
                 ("time_linear_", "condition_embedder.time_embedder.linear_"),
                 ("text_linear_", "condition_embedder.text_embedder.linear_"),
                 ("time_proj", "condition_embedder.time_proj"))  # fmt: skip
    # Weights that stay fp32 in a bf16 model, as in the reference: small, and bf16 would be seen in the result.
    FP32 = ("time_linear_", "scale_shift_table", "cross_norm")
    LOCAL = ("head",)  # compiled.py

    def __init__(self, config: WanConfig):
        super().__init__()
        self.config, C = config, config.width
        self.patch_embedding = nn.Conv3d(config.in_channels, C, (1, 2, 2), (1, 2, 2))
        self.time_linear_1, self.time_linear_2 = nn.Linear(config.freq_dim, C), nn.Linear(C, C)
        self.time_proj = nn.Linear(C, 6 * C)
        self.text_linear_1, self.text_linear_2 = nn.Linear(config.text_dim, C), nn.Linear(C, C)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.scale_shift_table = nn.Parameter(torch.randn(1, 2, C) / C**0.5)
        self.proj_out = nn.Linear(C, config.out_channels * 4)

    def hub_name(self, name: str) -> str:
        for ours, theirs in self.HUB_NAMES:
            name = name.replace(ours, theirs)
        return name

    def context(self, text: Tensor, frames: int, rows: int, columns: int) -> Context:
        """Text states (b, n, text_dim) and a latent shape -> what all steps share."""
        text = self.text_linear_2(F.gelu(self.text_linear_1(text), approximate="tanh"))
        text_kv = [(block.cross_attn.k(text), block.cross_attn.v(text)) for block in self.blocks]
        return Context(text_kv, rope_table(frames, rows // 2, columns // 2, self.config.attention_head_dim).to(text.device))

    def embed_time(self, timestep: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """(b,) in 0..1000 -> the final layer's vector (b, C) and the blocks' six (b, 6, C)."""
        half = self.config.freq_dim // 2
        frequency = 10000.0 ** (-torch.arange(half, dtype=torch.float32, device=timestep.device) / half)
        angle = timestep.float()[:, None] * frequency
        e = torch.cat([angle.cos(), angle.sin()], dim=-1).to(self.time_linear_1.weight.dtype)
        e = self.time_linear_2(F.silu(self.time_linear_1(e))).to(dtype)
        return e, self.time_proj(F.silu(e)).unflatten(-1, (6, -1))

    def head(self, h: Tensor, e: Tensor) -> Tensor:
        """Tokens (b, s, C) and the time's vector (b, C) -> (b, s, 4 out_channels), (q r c): c fastest, unlike the input."""
        shift, scale = (self.scale_shift_table.float() + e.float()[:, None]).chunk(2, dim=1)
        return self.proj_out(modulate(h, scale, shift, self.config.eps))

    def forward(self, latents: Tensor, timestep: Tensor, context: Context,
                attend: Attend = local_attend, axis: Axis = Axis("seq")) -> Tensor:  # fmt: skip
        """Velocity (b, out_channels, f, y, x) of latents (b, in_channels, f, y, x) at timestep (b,).

        The tokens, and the rotary table beside them, are cut over `axis`; `attend` is the scheme that lets this
        rank's queries see the other ranks' keys. The output projection comes before the gather: 64 numbers a token.
        """
        f, y = latents.shape[2:4]
        tokens = rearrange(latents, "b c f (y q) (x r) -> b (f y x) (c q r)", q=2, r=2)
        S, rope = tokens.shape[1], shard(context.rope, axis, dim=1)
        # A convolution whose stride is its kernel is a matrix product over patches.
        h = F.linear(shard(tokens, axis, dim=1), self.patch_embedding.weight.flatten(1), self.patch_embedding.bias)
        e, time = self.embed_time(timestep, h.dtype)

        for block, text_kv in zip(self.blocks, context.text_kv, strict=True):
            h = block(h, time, text_kv, rope, attend)  # b s C

        out = unshard(self.head(h, e), axis, dim=1, size=S)
        return rearrange(out, "b (f y x) (q r c) -> b c f (y q) (x r)", f=f, y=y // 2, q=2, r=2)
