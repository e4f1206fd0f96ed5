"""Parallel VAE: the picture is cut into strips, one a rank; each convolution borrows one line from each neighbour.

    latent columns   0 1 2 | 3 4 5 | 6 7          (uneven strips are fine; one column a rank is the least)
    rank 1's input       2 [3 4 5] 6              a 3x3 convolution needs one column more on each side: the halo
    picture's edge     . [0 1 2] 3                outside there are zeros, as in one piece

The causal caches hold frames with their halo (or sums over it), so each column is sent once. Stride-2 convolutions reach one
column to the right only. The middle attention keeps its own queries and gathers the keys and values of the frame. Nothing is
blended: the strips are the serial decode's own numbers, and joining them is a concatenation.

Sends    per 3x3 convolution and neighbour one column, before it is doubled where the picture is: rows * frames * channels (to
         the previous one only where the stride is 2); per middle attention (p-1) * its strip's k, v; and the finished strip,
         (p-1) times. Time falls with p until strips are so narrow that halos and launches dominate.
Source   halo exchange; the scheme of Mochi's context-parallel VAE, in space.
Refuses  more ranks than latent columns (rows).
"""

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovgen.mesh import Axis, Pending, pad, start_all_gather, start_edges
from nanovgen.vae import VAE, Act, Stream

DIMS = {"height": 3, "width": 4}


class StripStream(Stream):
    """A pass over one rank's strip: borders come from the neighbours along `dim` (3 rows, 4 columns)."""

    def __init__(self, axis: Axis, dim: int, size: int):
        super().__init__()
        self.axis, self.dim, self.size = axis, dim, size  # size: latent columns (rows) of the whole picture

    def lend(self, first: Tensor, last: Tensor | None) -> Callable[[], list[Tensor]]:
        """Send the neighbours these lines; what is returned waits for theirs. As all else they lie channels last."""
        lying = (None if line is None else line.permute(0, 2, 3, 4, 1) for line in (first, last))
        sent = start_edges(*lying, self.axis)
        return lambda: [line.permute(0, 4, 1, 2, 3) for line in sent.wait() if line is not None]

    def border(self, x: Tensor, act: Act) -> tuple[list[Tensor], tuple[int, int]]:
        wait = self.lend(act(x.narrow(self.dim, 0, 1)), act(x.narrow(self.dim, -1, 1)))
        own = act(x)  # while they travel
        before, after = wait()
        return [before, own, after], (0, 1) if self.dim == 3 else (1, 0)

    def border_after(self, x: Tensor) -> Tensor:
        (after,) = self.lend(x.narrow(self.dim, 0, 1), None)()
        return F.pad(torch.cat([x, after], dim=self.dim), (0, 1, 0, 0) if self.dim == 3 else (0, 0, 0, 1))

    def all_keys(self, kv: Tensor) -> Tensor:
        """(n, 2, y, x, c) of the strip -> of the frame. The middle works at latent size, where rows and columns are cut."""
        return join(start_join(kv, self.axis, self.dim - 1, self.size), self.axis, self.dim - 1, self.size)


class Ledger(Stream):
    """A pass in one piece that notes what strips would send: numbers in one line at each border, and in the keys."""

    def __init__(self, dim: int):
        super().__init__()
        self.dim, self.both, self.one, self.keys = dim, 0, 0, 0

    def border(self, x: Tensor, act: Act) -> tuple[list[Tensor], tuple[int, int]]:
        self.both += x.numel() // x.shape[self.dim]
        return super().border(x, act)

    def border_after(self, x: Tensor) -> Tensor:
        self.one += x.numel() // x.shape[self.dim]
        return super().border_after(x)

    def all_keys(self, kv: Tensor) -> Tensor:
        self.keys += kv.numel() // kv.shape[self.dim - 1]
        return kv


def elements_sent(ledger: Ledger, axis: Axis, size: int, result: int) -> int:
    """The header's formula for this rank: `size` latent columns, `result` numbers in the joined result's latent column."""
    before, after = axis.rank > 0, axis.rank < axis.size - 1
    return (before + after) * ledger.both + before * ledger.one + (axis.size - 1) * -(-size // axis.size) * (ledger.keys + result)


def strip_range(size: int, ranks: int, rank: int) -> tuple[int, int]:
    """First and end latent column of a rank's strip: as even as can be, so that every rank has one if p <= size."""
    return size * rank // ranks, size * (rank + 1) // ranks


def start_join(strip: Tensor, axis: Axis, dim: int, size: int, scale: int = 1) -> Pending:
    """Gather strips, padded to the widest; `scale` pixels a latent column."""
    return start_all_gather(pad(strip, dim, scale * -(-size // axis.size)), axis)


def join(sent: Pending, axis: Axis, dim: int, size: int, scale: int = 1) -> Tensor:
    """The whole picture from the gathered strips."""
    ranges = [strip_range(size, axis.size, rank) for rank in range(axis.size)]
    parts = [part.narrow(dim, 0, scale * (end - start)) for part, (start, end) in zip(sent.wait(), ranges, strict=True)]
    return torch.cat(parts, dim=dim)


def cut_strip(x: Tensor, axis: Axis, dim: int, scale: int = 1) -> Tensor:
    start, end = strip_range(x.shape[dim] // scale, axis.size, axis.rank)
    return x.narrow(dim, scale * start, scale * (end - start))


def check(size: int, degree: int, what: str) -> None:
    """Raises ValueError where a rank would have no latent column (row)."""
    if degree > size:
        raise ValueError(f"{size} latent {what} do not give {degree} VAE ranks one each; use parallel_vae_size {size} or less")


def decode(vae: VAE, latents: Tensor, chunk: int | None, axis: Axis, dim: int) -> Iterator[Tensor]:
    """As VAE.decode, on every rank of the axis: yields whole frames. A chunk's strips travel while the next is decoded."""
    if axis.size == 1:
        yield from vae.decode(latents, chunk)
        return
    size, scale, waiting = latents.shape[dim], vae.config.scale, None
    for part in vae.decode(cut_strip(latents, axis, dim), chunk, StripStream(axis, dim, size)):
        sent = start_join(part, axis, dim, size, scale)
        if waiting is not None:
            yield join(waiting, axis, dim, size, scale)
        waiting = sent
    yield join(waiting, axis, dim, size, scale)


def encode(vae: VAE, video: Tensor, chunk: int | None, axis: Axis, dim: int) -> Tensor:
    """As VAE.encode, whole latents on every rank of the axis."""
    if axis.size == 1:
        return vae.encode(video, chunk)
    size, scale = video.shape[dim] // vae.config.scale, vae.config.scale
    strip = vae.encode(cut_strip(video, axis, dim, scale), chunk, StripStream(axis, dim, size))
    return join(start_join(strip, axis, dim, size), axis, dim, size)


if __name__ == "__main__":
    from nanovgen.lesson import show

    raise SystemExit(show("vae_parallel"))
