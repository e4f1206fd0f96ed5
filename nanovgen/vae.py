"""Wan VAE 2.1 and 2.2: video <-> latents, causal in time and streamed (Wan, arXiv:2503.20314, section 4.1).

    2.1   video (b, 3, 1+4n, 8y, 8x) in [-1, 1]    <->  latents (b, 16, 1+n, y, x), normalised to mean 0 and std 1
    2.2   video (b, 3, 1+4n, 16y, 16x) in [-1, 1]  <->  latents (b, 48, 1+n, y, x), as Cosmos3 uses it

Every convolution in time looks back only, so a clip can be coded in chunks of any length: a layer keeps the last frames of
its input (few outputs: their products) in `Stream.cache` and puts them before the next chunk. An empty past is zeros, which
is the causal padding; so one long chunk and many short ones give the same numbers but for rounding, by one code path for
both.

The first frame stands alone: temporal upsampling does not double it and temporal downsampling passes it by, so frame
counts are 1 + 4n. In space, a 3x3 convolution needs a border of one row and column; `Stream.border` supplies it, zeros
here and the neighbours' columns where the picture is split over ranks.

2.2 ("residual") is the same network on 2x2 pixel patches, with a shortcut around each stage that has no weights: pixels
and frames move into channels and are averaged on the way down (DC-AE, arXiv:2410.10733), and are repeated on the way up.

Letters: b batch, c channels, f frames, y rows, x columns.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from functools import cache

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn


@dataclass(frozen=True)
class VAEConfig:
    """Sizes, by the names of the checkpoint's vae/config.json (temperal_downsample is spelt so there)."""

    base_dim: int = 96
    decoder_base_dim: int | None = None  # None: base_dim
    z_dim: int = 16
    is_residual: bool = False  # Wan 2.2
    patch_size: int | None = None  # 2.2: 2
    dim_mult: tuple[int, ...] = (1, 2, 4, 4)
    num_res_blocks: int = 2
    temperal_downsample: tuple[bool, ...] = (False, True, True)
    latents_mean: tuple[float, ...] = (-0.7571, -0.7089, -0.9113, 0.1075, -0.1745, 0.9653, -0.1517, 1.5508,
                                       0.4134, -0.0715, 0.5517, -0.3632, -0.1922, -0.9497, 0.2503, -0.2921)  # fmt: skip
    latents_std: tuple[float, ...] = (2.8184, 1.4541, 2.3275, 2.6558, 1.2196, 1.7708, 2.6052, 2.0743,
                                      3.2687, 2.1526, 2.8652, 1.5579, 1.6382, 1.1253, 2.8251, 1.916)  # fmt: skip

    @classmethod
    def read(cls, config: dict) -> "VAEConfig":
        """From config.json. Keys we do not know are ignored; a variant that we would compute wrongly is refused."""
        known = {f.name: config[f.name] for f in fields(cls) if f.name in config}
        ours = cls(**{k: tuple(v) if isinstance(v, list) else v for k, v in known.items()})
        fixed = {"attn_scales": [], "in_channels": 3 * ours.patch**2, "out_channels": 3 * ours.patch**2}
        for key, value in fixed.items():
            if config.get(key, value) != value:
                raise ValueError(f"vae config has {key}={config[key]!r}; this model knows {value!r} only")
        if ours.is_residual != (ours.patch == 2):
            raise ValueError(f"vae config has is_residual={ours.is_residual} with patch_size={ours.patch_size}; this model "
                             "knows false with null (Wan 2.1) and true with 2 (Wan 2.2)")  # fmt: skip
        if not ours.z_dim == len(ours.latents_mean) == len(ours.latents_std):
            raise ValueError(f"vae config has z_dim={ours.z_dim} with {len(ours.latents_mean)} latents_mean and "
                             f"{len(ours.latents_std)} latents_std; each latent channel needs one of both")  # fmt: skip
        return ours

    @property
    def patch(self) -> int:
        return self.patch_size or 1

    @property
    def scale(self) -> int:
        """Pixels, in rows and in columns, of a latent pixel."""
        return self.patch * 2 ** (len(self.dim_mult) - 1)


Act = Callable[[Tensor], Tensor]  # pixel by pixel


def same(x: Tensor) -> Tensor:
    return x


class Stream:
    """What one pass over a clip remembers from chunk to chunk, and how it sees beyond its own columns."""

    dim = 4  # along which the picture may be cut: 3 rows, 4 columns

    def __init__(self):
        self.cache: dict[nn.Module, Tensor] = {}

    def swap(self, layer: nn.Module, x: Tensor, keep: int) -> Tensor | None:
        """The frames that `layer` kept from its last chunk (None on its first); keeps the last `keep` of x."""
        past = self.cache.get(layer)
        self.cache[layer] = x[:, :, x.shape[2] - keep :].clone()  # a view would keep the whole chunk in memory
        return past

    def border(self, x: Tensor, act: Act) -> tuple[list[Tensor], tuple[int, int]]:
        """act(x), (b, c, f, y, x), between what lies beside it along `dim`, for a 3x3 convolution; and how many zero rows
        and columns a side are still to add."""
        return [act(x)], (1, 1)

    def border_after(self, x: Tensor) -> Tensor:
        """x with one more row at the bottom and one more column at the right, for the stride-2 convolutions."""
        return F.pad(x, (0, 1, 0, 1))

    def all_keys(self, kv: Tensor) -> Tensor:
        """Keys and values (b f, 2, y, x, c) of the whole frame."""
        return kv


def channels_last(x: Tensor) -> Tensor:
    """The layout in which all of it runs: else each convolution would turn its input around and back."""
    return x.contiguous(memory_format=torch.channels_last_3d)


def frames_first(x: Tensor) -> Tensor:
    """b c f y x -> (b f) c y x. One clip is not reshaped: a single frame's strides would no longer say channels last."""
    return x[0].transpose(0, 1) if x.shape[0] == 1 else x.transpose(1, 2).flatten(0, 1)


def frames_last(h: Tensor, b: int) -> Tensor:
    """(b f) c y x -> b c f y x."""
    return (h[None] if b == 1 else h.unflatten(0, (b, -1))).transpose(1, 2)


def joined(parts: list[Tensor], dim: int) -> Tensor:
    """What Stream.border gives, in one piece; not copied where it is one."""
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=dim)


class CausalConv3d(nn.Conv3d):
    """A convolution over (f, y, x) whose window ends at the present frame.

    The frames under the window are laid side by side as channels, and a 2D convolution does the rest: with channels last,
    libraries' 2D kernels are faster than their 3D ones, but for IN_3D. They pick their kernel by the number of frames in a
    chunk, so other chunks give the same numbers to rounding, not to the bit. The bias is apart: compiled, it costs no pass.
    """

    LOCAL = ("beside", "kept", "window", "behind", "summed", "biased")  # what torch.compile takes (compiled.py)
    IN_3D = ((192, 192),)  # channels in, out. H200, 360x640, 4 frames: 3.2 ms; 2D 3.4, and 0.6 for the window of three frames

    @property
    def few(self) -> bool:
        """Few numbers come out: products with each frame are made apart, and the sums take the past's, not its frames."""
        return self.kernel_size[0] * self.out_channels <= self.in_channels

    @property
    def in_3d(self) -> bool:
        return self.kernel_size == (3, 3, 3) and not self.few and (self.in_channels, self.out_channels) in self.IN_3D

    def forward(self, x: Tensor, stream: Stream, act: Act = same) -> Tensor:
        return self.biased(self.product(x, stream, act))

    def biased(self, h: Tensor) -> Tensor:
        return h + self.bias[:, None, None, None]

    def product(self, x: Tensor, stream: Stream, act: Act = same) -> Tensor:
        """Of act(x): where x is a strip, borders travel while act runs."""
        parts, zeros = stream.border(x, act) if self.kernel_size[1] == 3 else ([act(x)], (0, 0))
        if self.in_3d:
            return F.conv3d(self.behind(self.past(parts, stream), parts, stream.dim), self.weight, padding=(0, *zeros))
        x = parts[0] if len(parts) == 1 else self.beside(parts, stream.dim)
        if self.kernel_size[0] == 1:
            return self.flat(x, zeros)
        if self.few:
            h = self.flat(x, zeros)
            return self.summed(self.past([h], stream), h)
        return self.flat(self.window(self.past(parts, stream), x), zeros)

    def beside(self, parts: list[Tensor], dim: int) -> Tensor:
        """Apart from `window`: compiled as one, past frames would be copied with these before the window reads both."""
        return torch.cat(parts, dim=dim)

    def past(self, parts: list[Tensor], stream: Stream) -> Tensor:
        """The frames before these, (b, c, reach, y, x), zeros at the start; keeps the last of these for the next chunk."""
        if (past := stream.cache.get(self)) is None:
            b, c, _, *size = parts[0].shape
            size[stream.dim - 3] = sum(part.shape[stream.dim] for part in parts)
            past = parts[0].new_zeros(b, self.kernel_size[0] - 1, *size, c).permute(0, 4, 1, 2, 3)
        stream.cache[self] = self.kept(past, parts, stream.dim)
        return past

    def kept(self, past: Tensor, parts: list[Tensor], dim: int) -> Tensor:
        """The last `reach` of those frames and these; a copy: a view would keep the whole chunk in memory."""
        reach, frames = past.shape[2], parts[0].shape[2]
        last = torch.cat([part[:, :, -reach:] for part in parts], dim=dim)
        return last if frames >= reach else torch.cat([past[:, :, frames:], last], dim=2)

    def flat(self, x: Tensor, zeros: tuple[int, int]) -> Tensor:
        """As a 2D convolution, frame by frame."""
        weight = self.weight.movedim(2, 0).flatten(0, 1) if self.few else self.weight.movedim(2, 1).flatten(1, 2)
        return frames_last(F.conv2d(frames_first(x), weight, padding=zeros), x.shape[0])

    def window(self, past: Tensor, x: Tensor) -> Tensor:
        """(b, c, reach, y, x) and (b, c, f, y, x) -> (b, (1 + reach) c, f, y, x): each frame's past before it."""
        both = torch.cat([past, x], dim=2)
        return torch.cat([both[:, :, i : i + x.shape[2]] for i in range(past.shape[2] + 1)], dim=1)

    def behind(self, past: Tensor, parts: list[Tensor], dim: int) -> Tensor:
        """(b, c, reach, y, x) and (b, c, f, y, x), in parts -> (b, c, reach + f, y, x)."""
        return torch.cat([past, joined(parts, dim)], dim=2)

    def summed(self, past: Tensor, h: Tensor) -> Tensor:
        """Products (b, (1 + reach) c, ., y, x) of past frames and of these f -> (b, c, f, y, x): each with its own past's."""
        taps = torch.cat([past, h], dim=2).float().unflatten(1, (-1, self.out_channels))
        return sum(taps[:, i, :, i : i + h.shape[2]] for i in range(taps.shape[1])).to(h.dtype)


class Norm(nn.Module):
    """Scale each pixel's channel vector to length sqrt(c), times gamma; fp32 inside."""

    LOCAL = ("silu",)

    def __init__(self, c: int, trailing: int):
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(c, *[1] * trailing))

    def forward(self, x: Tensor) -> Tensor:
        gain = self.gamma.float() * x.shape[1] ** 0.5
        length = torch.linalg.vector_norm(x, dim=1, keepdim=True, dtype=torch.float32).clamp_min(1e-12)
        return (x / length * gain).to(x.dtype)

    def silu(self, x: Tensor) -> Tensor:
        return F.silu(self(x))


class ResBlock(nn.Module):
    LOCAL = ("between", "last")

    def __init__(self, c_in: int, c_out: int):
        super().__init__()
        self.norm1, self.norm2 = Norm(c_in, 3), Norm(c_out, 3)
        self.conv1, self.conv2 = CausalConv3d(c_in, c_out, 3), CausalConv3d(c_out, c_out, 3)
        self.conv_shortcut = CausalConv3d(c_in, c_out, 1) if c_in != c_out else None

    def forward(self, x: Tensor, stream: Stream) -> Tensor:
        h = self.conv1.product(x, stream, self.norm1.silu)
        h = self.conv2.product(h, stream, self.between)
        return self.last(h, x if self.conv_shortcut is None else self.conv_shortcut(x, stream))

    def between(self, h: Tensor) -> Tensor:
        return self.norm2.silu(self.conv1.biased(h))

    def last(self, h: Tensor, x: Tensor) -> Tensor:
        return self.conv2.biased(h) + x


class FrameAttention(nn.Module):
    """One head over the pixels of each frame."""

    def __init__(self, c: int):
        super().__init__()
        self.norm = Norm(c, 2)
        self.to_qkv, self.proj = nn.Conv2d(c, 3 * c, 1), nn.Conv2d(c, c, 1)

    def forward(self, x: Tensor, stream: Stream) -> Tensor:
        b, y = x.shape[0], x.shape[3]
        h = frames_first(x)
        qkv = rearrange(self.to_qkv(self.norm(h)), "n (three c) y x -> n three y x c", three=3)
        q, kv = qkv[:, :1].flatten(2, 3), stream.all_keys(qkv[:, 1:]).flatten(2, 3)  # n . (y x) c
        h = F.scaled_dot_product_attention(q, kv[:, :1], kv[:, 1:])
        h = self.proj(rearrange(h, "n 1 (y x) c -> n c y x", y=y))
        return x + frames_last(h, b)


class Mid(nn.Module):
    def __init__(self, c: int):
        super().__init__()
        self.resnets = nn.ModuleList([ResBlock(c, c), ResBlock(c, c)])
        self.attentions = nn.ModuleList([FrameAttention(c)])

    def forward(self, x: Tensor, stream: Stream) -> Tensor:
        x = self.attentions[0](self.resnets[0](x, stream), stream)
        return self.resnets[1](x, stream)


class Downsample(nn.Module):
    """Half the rows and columns and, with `temporal`, half the frames after the first."""

    def __init__(self, c: int, temporal: bool):
        super().__init__()
        self.conv = nn.Conv2d(c, c, 3, stride=2)
        self.time_conv = CausalConv3d(c, c, (3, 1, 1), stride=(2, 1, 1)) if temporal else None

    def forward(self, x: Tensor, stream: Stream) -> Tensor:
        x = frames_last(self.conv(frames_first(stream.border_after(x))), x.shape[0])
        if self.time_conv is None:
            return x
        past = stream.swap(self, x, 1)
        head, x = (x[:, :, :1], x) if past is None else (x[:, :, :0], torch.cat([past, x], dim=2))
        if x.shape[2] < 3:  # the first frame alone
            return head
        x = F.conv3d(x, self.time_conv.weight, self.time_conv.bias, (2, 1, 1))
        return channels_last(torch.cat([head, x], dim=2))


class Upsample(nn.Module):
    """Twice the rows and columns and, with `temporal`, twice the frames after the first."""

    LOCAL = ("spread", "double", "biased")

    def __init__(self, c: int, c_out: int, temporal: bool):
        super().__init__()
        self.conv = nn.Conv2d(c, c_out, 3)
        self.time_conv = CausalConv3d(c, 2 * c, (3, 1, 1)) if temporal else None

    def forward(self, x: Tensor, stream: Stream) -> Tensor:
        b = x.shape[0]
        if self.time_conv is not None:
            first = stream.swap(self, x, 0) is None  # keeps no frame: it only marks that the first has passed
            later = x[:, :, 1:] if first else x
            if later.shape[2]:
                later = self.spread(self.time_conv(later, stream))
                x = torch.cat([x[:, :, :1], later], dim=2) if first else later
        parts, zeros = stream.border(x, same)
        return self.biased(frames_last(F.conv2d(self.double(parts, stream.dim), self.conv.weight, padding=zeros), b))

    def spread(self, h: Tensor) -> Tensor:
        return channels_last(rearrange(h, "b (two c) f y x -> b c (f two) y x", two=2))

    def double(self, parts: list[Tensor], dim: int) -> Tensor:
        """-> ((b f), c, 2y, 2x), and a neighbour's line at both ends, which is doubled along itself only."""
        line = (2, 1) if dim == 4 else (1, 2)
        scales = [(2, 2)] if len(parts) == 1 else [line, (2, 2), line]
        pairs = zip(parts, scales, strict=True)
        return joined([F.interpolate(frames_first(x), scale_factor=s, mode="nearest-exact") for x, s in pairs], dim - 1)

    def biased(self, h: Tensor) -> Tensor:
        return h + self.conv.bias[:, None, None, None]


class Fold(nn.Module):
    """2.2's shortcut down: t x s x s frames, rows and columns become channels, averaged in groups down to c_out."""

    def __init__(self, c_out: int, t: int, s: int):
        super().__init__()
        self.c_out, self.t, self.s = c_out, t, s

    def forward(self, x: Tensor, stream: Stream) -> Tensor:
        x = F.pad(x, (0, 0, 0, 0, -x.shape[2] % self.t, 0))  # the first frame has no partner: zeros before it
        x = rearrange(x, "b c (f t) (y p) (x r) -> b (c t p r) f y x", t=self.t, p=self.s, r=self.s)
        return x.unflatten(1, (self.c_out, -1)).mean(2)


class Unfold(nn.Module):
    """2.2's shortcut up: channels, repeated as often as needed, become t x s x s frames, rows and columns."""

    def __init__(self, c_in: int, c_out: int, t: int, s: int):
        super().__init__()
        self.repeats, self.t, self.s = c_out * t * s * s // c_in, t, s

    def forward(self, x: Tensor, stream: Stream) -> Tensor:
        first = stream.swap(self, x, 0) is None  # only marks that the first chunk has passed, as in Upsample
        x = x.repeat_interleave(self.repeats, dim=1)
        x = rearrange(x, "b (c t p r) f y x -> b c (f t) (y p) (x r)", t=self.t, p=self.s, r=self.s)
        return x[:, :, self.t - 1 :] if first else x  # the first frame is not doubled


class Stage(nn.Module):
    """Residual blocks at one resolution, then the way to the next (none at the last); 2.2 adds a shortcut around both."""

    def __init__(self, c_in: int, c_out: int, blocks: int, resample: nn.Module | None, shortcut: nn.Module | None = None):
        super().__init__()
        self.resnets = nn.ModuleList(ResBlock(c_in if i == 0 else c_out, c_out) for i in range(blocks))
        self.resample, self.shortcut = resample, shortcut

    def forward(self, x: Tensor, stream: Stream) -> Tensor:
        h = x
        for resnet in self.resnets:
            h = resnet(h, stream)
        h = h if self.resample is None else self.resample(h, stream)
        return h if self.shortcut is None else h + self.shortcut(x, stream)


class Encoder(nn.Module):
    def __init__(self, config: VAEConfig):
        super().__init__()
        widths = [config.base_dim * m for m in (1, *config.dim_mult)]
        last, down = len(config.dim_mult) - 1, config.temperal_downsample
        self.conv_in, self.stages = CausalConv3d(3 * config.patch**2, widths[0], 3), nn.ModuleList()
        for i, c in enumerate(widths[1:]):
            resample = Downsample(c, down[i]) if i < last else None
            factors = (1 + down[i], 2) if i < last else (1, 1)
            shortcut = Fold(c, *factors) if config.is_residual else None
            self.stages.append(Stage(widths[i], c, config.num_res_blocks, resample, shortcut))
        self.mid, self.norm_out = Mid(widths[-1]), Norm(widths[-1], 3)
        self.conv_out = CausalConv3d(widths[-1], 2 * config.z_dim, 3)

    def forward(self, x: Tensor, stream: Stream) -> Tensor:
        x = self.conv_in(x, stream)  # b c f y x, full size
        for stage in self.stages:
            x = stage(x, stream)
        x = self.mid(x, stream)  # 1/4 of the frames, 1/8 of rows and columns
        return self.conv_out(x, stream, self.norm_out.silu)


class Decoder(nn.Module):
    def __init__(self, config: VAEConfig):
        super().__init__()
        widths = [(config.decoder_base_dim or config.base_dim) * m for m in reversed((*config.dim_mult, config.dim_mult[-1]))]
        up, last = config.temperal_downsample[::-1], len(config.dim_mult) - 1
        self.conv_in, self.mid = CausalConv3d(config.z_dim, widths[0], 3), Mid(widths[0])
        self.stages, c_in = nn.ModuleList(), widths[0]
        for i, c in enumerate(widths[1:]):
            c_out = c if config.is_residual or i == last else c // 2  # 2.1 halves the width on the way up
            resample = Upsample(c, c_out, up[i]) if i < last else None
            shortcut = Unfold(c_in, c, 1 + up[i], 2) if config.is_residual and i < last else None
            self.stages.append(Stage(c_in, c, config.num_res_blocks + 1, resample, shortcut))
            c_in = c_out
        self.norm_out, self.conv_out = Norm(widths[-1], 3), CausalConv3d(widths[-1], 3 * config.patch**2, 3)

    def forward(self, z: Tensor, stream: Stream) -> Tensor:
        x = self.mid(self.conv_in(z, stream), stream)
        for stage in self.stages:
            x = stage(x, stream)
        return self.conv_out(x, stream, self.norm_out.silu)


@cache
def kept_elements(config: VAEConfig, frames: int) -> int:
    """What a decode of so many latent frames (the second one doubles) keeps in its caches for each latent row and column."""
    stream = Stream()
    with torch.device("meta"):
        Decoder(config)(torch.empty(1, config.z_dim, frames, 1, 1), stream)
    return sum(past.numel() for past in stream.cache.values())


class VAE(nn.Module):
    """The pair, with the latent normalisation inside: latents outside this file are always normalised."""

    FP32 = ()

    def __init__(self, config: VAEConfig):
        super().__init__()
        self.config = config
        self.encoder, self.decoder = Encoder(config), Decoder(config)
        self.quant_conv = CausalConv3d(2 * config.z_dim, 2 * config.z_dim, 1)
        self.post_quant_conv = CausalConv3d(config.z_dim, config.z_dim, 1)

    def hub_name(self, name: str) -> str:
        """2.1 lists the encoder's blocks flat: stage i's two resnets, its downsampler, stage i+1's ...; 2.2 by stage."""
        side, part, *rest = name.split(".")
        resamples, residual = part == "stages" and rest[1] == "resample", self.config.is_residual
        if part == "stages" and side == "encoder" and not residual:
            stage, kind, *rest = rest
            index = int(stage) * (self.config.num_res_blocks + 1)
            index += int(rest.pop(0)) if kind == "resnets" else self.config.num_res_blocks
            name = ".".join([side, "down_blocks", str(index), *rest])
        down, up = ("downsampler", "upsampler") if residual else ("", "upsamplers.0")
        name = name.replace("encoder.stages.", "encoder.down_blocks.").replace("decoder.stages.", "decoder.up_blocks.")
        name = name.replace(".resample.", f".{down if side == 'encoder' else up}.")
        return (name.replace(".conv.", ".resample.1.") if resamples else name).replace(".mid.", ".mid_block.")

    def laid_out(self) -> "VAE":
        """Itself, each convolution's weight as the library reads it, channels last: else every call would turn it around."""
        for layer in self.modules():
            if isinstance(layer, CausalConv3d):
                order = (2, 0, 3, 4, 1) if layer.few else (0, 2, 3, 4, 1) if layer.in_3d else (0, 3, 4, 2, 1)
                back = [order.index(i) for i in range(5)]
                layer.weight.data = layer.weight.data.permute(order).contiguous().permute(back)
            elif isinstance(layer, nn.Conv2d):
                layer.weight.data = layer.weight.data.contiguous(memory_format=torch.channels_last)
        return self

    def _statistics(self, like: Tensor) -> tuple[Tensor, Tensor]:
        mean, std = like.new_tensor(self.config.latents_mean), like.new_tensor(self.config.latents_std)
        return mean.view(1, -1, 1, 1, 1), std.view(1, -1, 1, 1, 1)

    def moments(self, video: Tensor, chunk: int | None = 1, stream: Stream | None = None) -> tuple[Tensor, Tensor]:
        """Mean and log-variance (b, z, 1+n, y, x) of the posterior, not normalised; `chunk` latent frames at a time."""
        stream, chunk, p = stream or Stream(), chunk or video.shape[2], self.config.patch
        video = rearrange(video, "b c f (y q) (x r) -> b (c r q) f y x", q=p, r=p)
        video = channels_last(video)
        sizes = [min(4 * chunk - 3, video.shape[2])]
        while rest := video.shape[2] - sum(sizes):
            sizes.append(min(4 * chunk, rest))
        x = torch.cat([self.encoder(part, stream) for part in video.split(sizes, dim=2)], dim=2)
        return self.quant_conv(x, stream).chunk(2, dim=1)

    def encode(self, video: Tensor, chunk: int | None = 1, stream: Stream | None = None) -> Tensor:
        """Video in [-1, 1] -> normalised latents: the posterior's mode, as image conditioning wants it."""
        mean, std = self._statistics(video.float())
        return (self.moments(video.to(self.quant_conv.weight.dtype), chunk, stream)[0].float() - mean) / std

    def decode(self, latents: Tensor, chunk: int | None = 1, stream: Stream | None = None) -> Iterator[Tensor]:
        """Yield the video (b, 3, frames, rows, columns) in [-1, 1], `chunk` latent frames at a time (None: all at once).

        Latents are cast to the weights' dtype here and nowhere else, after their scale is undone in fp32.
        """
        mean, std = self._statistics(latents.float())
        stream = stream or Stream()
        z = self.post_quant_conv((latents.float() * std + mean).to(self.post_quant_conv.weight.dtype), stream)
        for part in channels_last(z).split(chunk or z.shape[2], dim=2):
            yield self.unpatch(self.decoder(part, stream)).clamp(-1, 1)

    def decode_bytes(self, f: int, y: int, x: int, chunk: int, itemsize: int) -> int:
        """What a decode of latents (1, z, f, y, x) holds at its fullest, beside the weights; for a model on meta.

        The caches are counted. In the last stage's blocks a chunk lies some 9.5 times (2.2, whose last stage is entered with
        twice the channels: 16.5): what came into the stage, into the block and into the convolution, that with its past, three
        frames side by side, what comes out. The test counts the same tensor by tensor.
        """
        scale, times = self.config.scale // self.config.patch, 16.5 if self.config.is_residual else 9.5
        held = self.decoder.norm_out.gamma.numel() * min(4 * chunk, 4 * f - 3) * scale * y * scale * x
        return itemsize * (kept_elements(self.config, min(f, 2)) * y * x + round(times * held))

    def unpatch(self, x: Tensor) -> Tensor:
        """What the decoder gives, (b, 3 p p, f, y, x), to pixels (b, 3, f, p y, p x)."""
        return rearrange(x, "b (c r q) f y x -> b c f (y q) (x r)", q=self.config.patch, r=self.config.patch)
