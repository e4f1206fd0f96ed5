"""Look at a clip of the clip world and say what it shows; score many clips against what they should show.

The reader is told only whether one or two shapes are expected. It measures the background from the border, takes
as mask whatever differs from it, and compares that mask in every second frame with a bank of ideal shapes at all
angles. The ideal takes its radius from a line fitted over time: a shape that pulses or bends in between loses IoU,
and one whose kind is not the same all along has none. Letters: f frames read, y rows, x columns, k ideal shapes.
"""

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from clip_world import BACKGROUNDS, COLOURS, KINDS, Clip, distance, mentions_size
from torch import Tensor

STEP = 2  # frames between two looks
GRID, SPAN = 48, 3.4  # an ideal shape is GRID pixels wide, which are SPAN times the radius of a disc of its area
ANGLES = 24


@dataclass(frozen=True)
class ShapeReading:
    kind: str | None = None
    colour: str | None = None
    size: str | None = None
    motion: str | None = None
    iou: float = 0.0


@dataclass(frozen=True)
class Reading:
    background: str | None
    shapes: tuple[ShapeReading, ...]  # one, or left half and right half


@torch.no_grad()
def read_clip(video: Tensor, shapes: int) -> Reading:
    """Read a video (3, f, y, x) in [-1, 1] that should show 1 or 2 shapes."""
    video = video[:, ::STEP].float().cpu()
    border = torch.cat(
        [video[..., :3, :].flatten(1), video[..., -3:, :].flatten(1), video[..., :3].flatten(1), video[..., -3:].flatten(1)],
        dim=1,
    )
    behind = border.median(dim=1).values
    ideals = ideal_shapes()
    return Reading(nearest(behind, BACKGROUNDS), tuple(read_shape(half, behind, ideals) for half in video.chunk(shapes, dim=3)))


def nearest(colour: Tensor, names: dict[str, tuple[int, int, int]]) -> str | None:
    """The name of the colour closest to an rgb (3,) in [-1, 1], if any is near."""
    gaps = (torch.tensor(list(names.values())) / 127.5 - 1 - colour).norm(dim=1)
    return list(names)[gaps.argmin()] if gaps.min() < 0.5 else None


def read_shape(video: Tensor, behind: Tensor, ideals: dict[str, tuple[float, Tensor]]) -> ShapeReading:
    """Read the one shape of a video (3, f, y, x) before a background (3,)."""
    contrast = (video - behind[:, None, None, None]).norm(dim=0)
    seen = contrast > 0.35
    if seen.flatten(1).sum(dim=1).min() < 40:  # missing in some frame
        return ShapeReading()
    colour = video[:, seen].median(dim=1).values
    name = nearest(colour, COLOURS) if one_colour(video[:, seen], behind, colour) else None
    mask = contrast / (colour - behind).norm().clamp(min=0.3)  # exact at a blended edge; other colours count too
    mask = torch.where(mask < 0.3, 0.0, mask.clamp(max=1))
    x, y, radius = track(mask)
    smooth = line(radius)
    if smooth.min() < 2 or smooth.max() > 40:  # a speck or a flood; the largest true shape has 28
        return ShapeReading(colour=name)
    patches = cut_out(mask, x, y, smooth)
    fits = {kind: overlap(patches, bank) for kind, (_, bank) in ideals.items()}  # each (f, k)
    best = torch.stack([fit.max(dim=1).values for fit in fits.values()])  # (kinds, f)
    winner = best.mean(dim=1).argmax().item()
    kind, iou = list(fits)[winner], best[winner].mean().item()
    if iou < 0.6 or (best.argmax(dim=0) == winner).float().mean() < 0.85:  # no shape, or not one shape all along
        return ShapeReading(colour=name, motion=read_motion(x, y, smooth, torch.zeros_like(x)))
    own_radius, bank = ideals[kind]
    turned = unwrap(fits[kind].argmax(dim=1), len(bank)) * (2 * math.pi / KINDS[kind][0] / len(bank))
    size = "big" if radius.mean() / own_radius > 16 else "small"
    return ShapeReading(kind, name, size, read_motion(x, y, smooth, turned), iou)


def one_colour(pixels: Tensor, behind: Tensor, colour: Tensor) -> bool:
    """Whether pixels (3, n) blend the background (3,) with this one colour (3,), but for a fifth of them."""
    pixels, contrast = pixels - behind[:, None], (colour - behind)[:, None]
    share = ((pixels * contrast).sum(dim=0) / (contrast * contrast).sum().clamp(min=0.1)).clamp(0, 1)
    return ((pixels - share * contrast).norm(dim=0) < 0.4).float().mean().item() > 0.8


def track(mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Centre x, centre y and radius of the disc of equal area, each (f,), of a mask (f, y, x)."""
    area = mask.sum(dim=(1, 2)).clamp(min=1)
    x = (mask.sum(dim=1) @ (torch.arange(mask.size(2)) + 0.5)) / area
    y = (mask.sum(dim=2) @ (torch.arange(mask.size(1)) + 0.5)) / area
    return x, y, (area / math.pi).sqrt()


def line(values: Tensor) -> Tensor:
    """The straight line through values (f,) by least squares: (f,)."""
    time = torch.linspace(-1, 1, len(values))
    return values.mean() + time * (time @ values) / (time @ time)


def cut_out(mask: Tensor, x: Tensor, y: Tensor, radius: Tensor) -> Tensor:
    """The mask (f, y, x) resampled around its centre, SPAN radii wide: (f, GRID, GRID)."""
    steps = (torch.arange(GRID) + 0.5) / GRID * SPAN - SPAN / 2
    across = 2 * (x[:, None] + radius[:, None] * steps) / mask.size(2) - 1
    along = 2 * (y[:, None] + radius[:, None] * steps) / mask.size(1) - 1
    grid = torch.stack([across[:, None, :].expand(-1, GRID, -1), along[:, :, None].expand(-1, -1, GRID)], dim=-1)
    return F.grid_sample(mask[:, None], grid, align_corners=False)[:, 0]


def ideal_shapes() -> dict[str, tuple[float, Tensor]]:
    """Per kind: the radius of the disc of its area (where its own is 1) and its masks over angles (k, GRID, GRID)."""
    steps = ((torch.arange(GRID) + 0.5) / GRID - 0.5) * SPAN
    ideals = {}
    for kind, (folds, outer, ratio, _) in KINDS.items():
        radius = outer * math.sqrt(folds * ratio * math.sin(math.pi / folds) / math.pi)
        count = 1 if kind == "circle" else ANGLES
        angle = torch.arange(count)[:, None, None, None] / count * 2 * math.pi / folds
        nominal = torch.full_like(angle, 1 / radius)
        outside = distance([kind] * count, steps, steps[:, None], nominal, angle)
        ideals[kind] = radius, (outside[:, 0] < 0).float()
    return ideals


def overlap(patches: Tensor, bank: Tensor) -> Tensor:
    """Intersection over union of patches (f, GRID, GRID), cut at one half, with ideals (k, GRID, GRID): (f, k)."""
    patches, bank = (patches > 0.5).float().flatten(1), bank.flatten(1)
    common = patches @ bank.T
    return common / (patches.sum(dim=1, keepdim=True) + bank.sum(dim=1) - common)


def unwrap(steps: Tensor, period: int) -> Tensor:
    """Angles (f,) on a circle of `period` steps as a track that never jumps by more than half of it."""
    jumps = (steps.diff() + period / 2).remainder(period) - period / 2
    return F.pad(jumps.cumsum(0), (1, 0)).float()


def read_motion(x: Tensor, y: Tensor, radius: Tensor, angle: Tensor) -> str | None:
    """The one thing that happens along a track of centre, radius (pixels) and angle (radians), each (f,)."""
    found = []
    place = read_path(x, y)
    if place != "still":
        found.append(place)
    ratio = (radius[-1] / radius[0]).item()
    if not 1 / 1.25 < ratio < 1.25:
        found.append("grow" if ratio > 1.5 else "shrink" if ratio < 1 / 1.5 else None)
    turn = abs(line(angle)[-1] - line(angle)[0]).item()
    if turn > math.pi / 6:
        found.append("spin" if 0.6 * math.pi < turn < 1.4 * math.pi else None)
    return "still" if not found else found[0] if len(found) == 1 else None


def read_path(x: Tensor, y: Tensor) -> str | None:
    """left, right, up, down, bounce, orbit or still from a track of centres (f,), (f,) in pixels."""
    span_x, span_y = (x.max() - x.min()).item(), (y.max() - y.min()).item()
    net_x, net_y = (x[-1] - x[0]).item(), (y[-1] - y[0]).item()
    if max(span_x, span_y) < 7:
        return "still"
    if min(span_x, span_y) > 14:
        path = torch.atan2(y - (y.max() + y.min()) / 2, x - (x.max() + x.min()) / 2)
        whole = unwrap(path, 2 * math.pi)[-1].abs() / (2 * math.pi)
        return "orbit" if 0.75 < whole < 1.25 else None
    if max(span_x, span_y) < 14 or min(span_x, span_y) > 7:
        return None
    if span_x > span_y:
        return None if abs(net_x) < 0.8 * span_x else "right" if net_x > 0 else "left"
    if abs(net_y) > 0.8 * span_y:
        return "down" if net_y > 0 else "up"
    hops = (2 * math.pi * torch.linspace(0, 1, len(y))).sin().abs()
    return "bounce" if torch.corrcoef(torch.stack([-y, hops]))[0, 1] > 0.85 else None


def score(clips: list[Clip], captions: list[str], videos: Iterable[Tensor]) -> dict[str, float]:
    """Rates of what the videos (3, f, y, x) show as their clips and captions say; what never occurs has no rate.

    Colour, kind, motion and size (where named) are counted per shape and on its side; all_right wants everything.
    """
    counts = defaultdict(list)
    for clip, text, video in zip(clips, captions, videos, strict=True):
        reading = read_clip(video, len(clip.shapes))
        every = [reading.background == clip.background]
        counts["background"] += every
        for shape, read in zip(clip.shapes, reading.shapes, strict=False):
            named = mentions_size(text) and shape.motion not in ("grow", "shrink")
            for name in ["colour", "kind", "motion"] + ["size"] * named:
                every.append(getattr(read, name) == getattr(shape, name))
                counts[name].append(every[-1])
            if shape.motion == "spin":
                counts["spin_rigid"].append(read.kind == shape.kind and read.iou >= 0.85)
        counts["all_right"].append(all(every))
        if len(clip.shapes) == 2:
            colours = {shape.colour for shape in clip.shapes}
            counts["both_colours_present"].append(colours == {read.colour for read in reading.shapes})
            counts["all_right_with_sides"].append(all(every))
    return {name: sum(values) / len(values) for name, values in counts.items()}
