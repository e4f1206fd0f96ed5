"""A picture of latents that are still being made, by one matrix and no decode.

    latents (c, y, x)  ->  y x rows of c numbers and a 1  ->  times (c + 1, 3)  ->  RGB, one pixel a latent pixel

The matrix is fitted to the VAE at hand: random fields of colour are encoded, and their latents held against their mean
colours by least squares. What is shown is x0 as the last step saw it: x - sigma v.
"""

import io

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from nanovgen.vae import VAE

LONGEST = 640  # pixels of the picture's longer side, at most


def fit(vae: VAE, device: torch.device) -> Tensor:
    """(c + 1, 3), fp32, on the CPU. The VAE is on `device`, whole."""
    generator = torch.Generator().manual_seed(0)
    coarse, fine = (F.interpolate(2 * torch.rand(1, 3, n, n, generator=generator) - 1, 24) for n in (6, 12))
    colours = (0.7 * coarse + 0.3 * fine).clamp(-1, 1)  # (1, 3, 24, 24): a latent pixel each
    clip = F.interpolate(colours, scale_factor=vae.config.scale)[:, :, None].expand(-1, -1, 5, -1, -1)  # two latent frames
    latents = vae.encode(clip.contiguous().to(device), None)[0].float().cpu()  # c 2 y x
    rows = with_one(latents.flatten(1).T)
    return torch.linalg.lstsq(rows, colours[0].flatten(1).T.repeat(2, 1)).solution


def with_one(rows: Tensor) -> Tensor:
    return torch.cat([rows, rows.new_ones(len(rows), 1)], dim=1)


def colours(latents: Tensor, matrix: Tensor) -> Tensor:
    """(c, y, x) -> RGB (y, x, 3) in 0..255, uint8."""
    rgb = with_one(latents.float().cpu().flatten(1).T) @ matrix
    return ((rgb + 1) * 127.5).round().clamp(0, 255).to(torch.uint8).view(*latents.shape[1:], 3)


def jpeg(latents: Tensor, matrix: Tensor, scale: int) -> bytes:
    """A JPEG of one latent frame (c, y, x), `scale` pixels a latent pixel but not above LONGEST."""
    picture = Image.fromarray(colours(latents, matrix).numpy())
    grow = min(scale, LONGEST / max(picture.size))
    buffer = io.BytesIO()
    picture.resize([max(1, round(grow * n)) for n in picture.size], Image.Resampling.BICUBIC).save(buffer, "JPEG", quality=85)
    return buffer.getvalue()
