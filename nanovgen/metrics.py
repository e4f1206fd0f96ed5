"""How alike two clips are, frame by frame.

    PSNR     10 log10(255^2 / mean square error) in dB; infinite where every value is equal
    SSIM     Wang et al. 2004, doi:10.1109/TIP.2003.819861: an 11x11 Gaussian window of sigma 1.5, K 0.01 and 0.03; the mean
             over the places where the window fits, and over R, G, B
    cosine   of two frames as vectors of their values (pixels: 0..255, so two dark clips are not alike by being dark)
    LPIPS    Zhang et al. 2018, arXiv:1801.03924, with AlexNet; 0 is alike. By the package lpips, where it and its weights are
    error    |a - b| / |b| of latents

`compare` gives sums and means by frame, which can be put behind those of further clips; `summary` makes figures of them. Its
PSNR is that of the mean square error of all frames: a mean of dB would be infinite as soon as one frame is equal.
"""

import importlib
import math
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from nanovgen import video

WINDOW, SIGMA = 11, 1.5  # of SSIM; pixels
LPIPS_LEAST = 31  # pixels: fewer leave AlexNet's last pooling nothing

Frames = dict[str, list[float]]  # by name, one number a frame
Perceptual = Callable[[Tensor, Tensor], Tensor]  # two (f, 3, y, x) in [-1, 1] -> distances (f,)


class Clip(NamedTuple):
    """Pixels uint8 (f, y, x, 3), latents (1, c, f, y, x), frames a second: what a file has of them."""

    pixels: Tensor | None = None
    latents: Tensor | None = None
    fps: float | None = None


def read(path: str | Path) -> Clip:
    """An MP4, or a safetensors file with `latents` (run.py's), `pixels`, or both; ValueError in one line for any other."""
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"{path} is no file")
    if path.suffix == ".mp4":
        pixels, fps = video.read_video(path)
        return Clip(torch.from_numpy(pixels), fps=fps)
    if path.suffix != ".safetensors":
        raise ValueError(f"{path} ends in neither .mp4 nor .safetensors")
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    clip = Clip(tensors.get("pixels"), tensors.get("latents"))
    if clip == Clip():
        raise ValueError(f"{path} has neither latents nor pixels; it has {', '.join(sorted(tensors)[:5]) or 'nothing'}")
    if clip.latents is not None and (clip.latents.ndim != 5 or not clip.latents.isfinite().all()):
        raise ValueError(f"{path}: latents are {tuple(clip.latents.shape)}, and all finite: "
                         f"{bool(clip.latents.isfinite().all())}; wanted are finite ones (1, c, f, y, x)")  # fmt: skip
    if clip.pixels is not None and (clip.pixels.dtype != torch.uint8 or clip.pixels.ndim != 4 or clip.pixels.shape[3] != 3):
        raise ValueError(f"{path}: pixels are {clip.pixels.dtype} {tuple(clip.pixels.shape)}, not uint8 (f, y, x, 3)")
    return clip


def check(a: Clip, b: Clip) -> None:
    """Raises ValueError, in one line, for clips that are not of one request."""
    both = [name for name in ("latents", "pixels") if None not in (getattr(a, name), getattr(b, name))]
    if not both:
        raise ValueError("one has latents alone and the other pixels alone; decode the first: run.py --latents FILE --out a.mp4")
    if None not in (a.fps, b.fps) and abs(a.fps - b.fps) > 1e-3:
        raise ValueError(f"{a.fps:g} frames a second against {b.fps:g}; frame by frame they show different times")
    for name in both:
        x, y = (list(getattr(clip, name).shape) for clip in (a, b))
        frames = 2 if name == "latents" else 0
        if x[frames] != y[frames]:
            raise ValueError(f"{x[frames]} {'latent ' * (name == 'latents')}frames against {y[frames]}; cut them to one length")
        if x != y:
            raise ValueError(f"{name} {x} against {y}: another size, or another model's")
    if "pixels" in both and min(a.pixels.shape[1:3]) < WINDOW:
        raise ValueError(f"frames of {a.pixels.shape[2]}x{a.pixels.shape[1]} are smaller than SSIM's window of {WINDOW}x{WINDOW}")


def compare(a: Clip, b: Clip, lpips: Perceptual | None = None) -> dict[str, Frames]:
    """Of clips that `check` accepted, by frame; b is the reference."""
    found = {}
    if None not in (a.latents, b.latents):
        found["latents"] = compare_latents(a.latents, b.latents)
    if None not in (a.pixels, b.pixels):
        pairs = list(zip(a.pixels, b.pixels, strict=True))  # one at a time: a frame in double is 24 bytes a pixel
        each = [compare_pixels(x[None], y[None], lpips) for x, y in pairs]
        found["pixels"] = {name: [value for frame in each for value in frame[name]] for name in each[0]}
    return found


def compare_latents(a: Tensor, b: Tensor) -> Frames:
    a, b = (x.double().transpose(1, 2).flatten(2)[0] for x in (a, b))  # f, c y x
    return {"difference": (a - b).square().sum(1).tolist(), "reference": b.square().sum(1).tolist(),
            "cosine": cosine(a, b).tolist()}  # fmt: skip


def compare_pixels(a: Tensor, b: Tensor, lpips: Perceptual | None = None) -> Frames:
    """uint8 (f, y, x, 3). `differ` counts values, `most` is the largest difference in levels of 255."""
    x, y = (p.permute(0, 3, 1, 2).double() for p in (a, b))
    apart = (x - y).flatten(1)
    found = {"mse": apart.square().mean(1), "ssim": ssim(x, y), "cosine": cosine(x.flatten(1), y.flatten(1)),
             "differ": (apart != 0).sum(1), "most": apart.abs().amax(1)}  # fmt: skip
    found["of"] = torch.full_like(found["differ"], apart.shape[1])
    if lpips is not None and min(x.shape[2:]) >= LPIPS_LEAST:
        found["lpips"] = lpips(*((p / 127.5 - 1).float() for p in (x, y)))
    return {name: value.tolist() for name, value in found.items()}


def psnr(mse: float) -> float:
    """Of a mean square error in levels of 255."""
    return 10 * math.log10(255**2 / mse) if mse else math.inf


def ssim(x: Tensor, y: Tensor) -> Tensor:
    """(f, c, y, x) in 0..255 -> (f,). Means, variances and the covariance are the window's, weighted (not n / (n - 1))."""
    weights = [math.exp(-((i - WINDOW // 2) ** 2) / (2 * SIGMA**2)) for i in range(WINDOW)]

    def mean(z: Tensor) -> Tensor:
        for dim in (2, 3):
            places = z.shape[dim] - WINDOW + 1
            z = sum(w / sum(weights) * z.narrow(dim, i, places) for i, w in enumerate(weights))
        return z

    c1, c2 = (0.01 * 255) ** 2, (0.03 * 255) ** 2
    mx, my = mean(x), mean(y)
    vx, vy, cov = mean(x * x) - mx * mx, mean(y * y) - my * my, mean(x * y) - mx * my
    alike = (2 * mx * my + c1) * (2 * cov + c2) / ((mx * mx + my * my + c1) * (vx + vy + c2))
    return alike.mean((1, 2, 3))


def cosine(a: Tensor, b: Tensor) -> Tensor:
    """(f, n) -> (f,). Of two empty pictures 1, of one 0; equal ones give 1 to the bit."""
    dot, squares = (a * b).sum(1), (a * a).sum(1) * (b * b).sum(1)
    both_empty = (a == 0).all(1) & (b == 0).all(1)
    return torch.where(both_empty, 1.0, dot / squares.sqrt().clamp(min=torch.finfo(a.dtype).tiny))


def summary(frames: Frames) -> dict[str, float]:
    """Of the frames of one clip or several."""
    mean = lambda name: sum(frames[name]) / len(frames[name])  # noqa: E731
    if "reference" in frames:
        difference, reference = sum(frames["difference"]), sum(frames["reference"])
        error = math.sqrt(difference / reference) if reference else math.inf if difference else 0.0
        return {"error": error, "cosine": mean("cosine")}
    return {"psnr": psnr(mean("mse")), **{name: mean(name) for name in ("ssim", "cosine", "lpips") if name in frames},
            "differ": sum(frames["differ"]), "of": sum(frames["of"]), "most": max(frames["most"])}  # fmt: skip


def open_lpips() -> Perceptual | str:
    """LPIPS with AlexNet, or one line on what is missing. Nothing is downloaded."""
    try:
        package, models = importlib.import_module("lpips"), importlib.import_module("torchvision.models")
    except (ImportError, RuntimeError) as error:  # a torchvision that was built for another torch raises the latter
        return f"no LPIPS: {' '.join(str(error).split())} (pip install lpips, with the torchvision of this torch)"
    weights = Path(torch.hub.get_dir(), "checkpoints", Path(models.AlexNet_Weights.DEFAULT.url).name)
    if not weights.is_file():
        return f'no LPIPS: AlexNet\'s weights are not at {weights}; fetch them once: python -c "import lpips; lpips.LPIPS()"'
    model = package.LPIPS(net="alex", verbose=False).requires_grad_(False).eval()
    return lambda a, b: model(a, b).flatten()
