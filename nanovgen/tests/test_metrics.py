"""Metrics against scikit-image, numpy's formulas and known values; and files that cannot be compared."""

import math
import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from skimage.metrics import peak_signal_noise_ratio, structural_similarity

from nanovgen import metrics, video
from nanovgen.metrics import Clip, compare, compare_latents, compare_pixels, summary


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(256, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)


def smooth(frames: int, rows: int, columns: int) -> torch.Tensor:
    """A picture with flat parts, ramps and edges, where SSIM's constants matter."""
    y, x = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    one = torch.stack([(3 * x) % 256, (2 * y + x) % 200, torch.where(x > columns // 2, 250, 3)], dim=2)
    return torch.stack([(one + 5 * f).clamp(max=255) for f in range(frames)]).to(torch.uint8)


def skimage_ssim(a: torch.Tensor, b: torch.Tensor, **options: object) -> list[float]:
    exact = dict(gaussian_weights=True, sigma=1.5, use_sample_covariance=False, data_range=255, channel_axis=2)
    return [structural_similarity(x.numpy(), y.numpy(), **exact | options) for x, y in zip(a, b, strict=True)]


PAIRS = {
    "noise": (noise(2, 24, 33, 3), noise(2, 24, 33, 3, seed=1)),
    "picture and its noise": (smooth(2, 40, 26), (smooth(2, 40, 26).int() + noise(2, 40, 26, 3) % 7).clamp(max=255).byte()),
    "brighter": (smooth(1, 16, 16), (smooth(1, 16, 16) // 2 + 100).byte()),
    "one window": (noise(3, 11, 11, 3), noise(3, 11, 11, 3, seed=2)),
    "black and white": (torch.zeros(1, 12, 14, 3, dtype=torch.uint8), torch.full((1, 12, 14, 3), 255, dtype=torch.uint8)),
}


@pytest.mark.parametrize("name", PAIRS)
def test_against_scikit_image_and_numpy(name):
    a, b = PAIRS[name]
    found = compare_pixels(a, b)
    assert found["ssim"] == pytest.approx(skimage_ssim(a, b), abs=1e-12)
    for i, (x, y) in enumerate(zip(a.numpy(), b.numpy(), strict=True)):
        x, y = x.astype(np.float64), y.astype(np.float64)
        assert metrics.psnr(found["mse"][i]) == pytest.approx(peak_signal_noise_ratio(y, x, data_range=255), abs=1e-9)
        norms = np.linalg.norm(x) * np.linalg.norm(y)
        assert found["cosine"][i] == pytest.approx((x * y).sum() / norms if norms else 0, abs=1e-12)
        assert found["differ"][i] == (x != y).sum() and found["most"][i] == np.abs(x - y).max() and found["of"][i] == x.size


def test_another_ssim_is_another_number():
    """The comparison above can tell the window, its sigma, the covariance and the range."""
    a, b = PAIRS["picture and its noise"]
    right = compare_pixels(a, b)["ssim"]
    for other in (dict(sigma=2.0), dict(gaussian_weights=False), dict(use_sample_covariance=True), dict(data_range=250)):
        assert min(abs(x - y) for x, y in zip(right, skimage_ssim(a, b, **other), strict=True)) > 1e-6, other


@pytest.mark.parametrize("offset", [1, 5, 51, 255])
def test_known_values(offset):
    a = torch.zeros(1, 16, 16, 3, dtype=torch.uint8)
    found = summary(compare_pixels(a + offset, a))
    assert found["psnr"] == pytest.approx(20 * math.log10(255 / offset)) and found["most"] == offset
    c1 = (0.01 * 255) ** 2
    assert found["ssim"] == pytest.approx(c1 / (offset**2 + c1)) and found["cosine"] == 0


def test_equal_clips():
    a = PAIRS["noise"][0]
    found = summary(compare_pixels(a, a.clone()))
    assert found == {"psnr": math.inf, "ssim": 1, "cosine": 1, "differ": 0, "of": a.numel(), "most": 0}
    black = torch.zeros_like(a)
    assert summary(compare_pixels(black, black))["cosine"] == 1
    x = torch.randn(1, 4, 2, 3, 3)
    assert summary(compare_latents(x, x)) == {"error": 0, "cosine": pytest.approx(1)}


def test_one_frame_that_differs_is_not_hidden():
    """Of four frames three are equal: the mean of dB would be infinite."""
    a = torch.zeros(4, 16, 16, 3, dtype=torch.uint8)
    b = a.clone()
    b[2] += 10
    found = compare(Clip(pixels=b), Clip(pixels=a))["pixels"]
    assert [metrics.psnr(mse) for mse in found["mse"]] == [math.inf, math.inf, pytest.approx(28.1308, abs=1e-4), math.inf]
    assert summary(found)["psnr"] == pytest.approx(20 * math.log10(255 / 10) + 10 * math.log10(4))
    assert [row == 1 for row in found["ssim"]] == [True, True, False, True]


def test_latents_against_numpy():
    a, b = (torch.randn(1, 4, 3, 5, 6, generator=torch.Generator().manual_seed(i)) for i in range(2))
    found, x, y = compare_latents(a, b), a.double().numpy(), b.double().numpy()
    assert summary(found)["error"] == pytest.approx(np.linalg.norm(x - y) / np.linalg.norm(y), rel=1e-12)
    for i in range(3):
        p, q = x[:, :, i].ravel(), y[:, :, i].ravel()
        assert found["cosine"][i] == pytest.approx(p @ q / np.linalg.norm(p) / np.linalg.norm(q), rel=1e-12)
        assert found["difference"][i] == pytest.approx(((p - q) ** 2).sum())
        assert found["reference"][i] == pytest.approx((q**2).sum())
    assert summary(compare_latents(2 * b, b))["error"] == pytest.approx(1) != summary(compare_latents(b, 2 * b))["error"]


# LPIPS: the package's documented interface, (n, 3, y, x) in [-1, 1], in a stand-in; its weights are on no registry we reach


@pytest.fixture
def install(monkeypatch, tmp_path):
    """lpips and torchvision as stand-ins, and torch's folder of weights; what the model was given."""

    def put(weights: bool = True) -> list:
        seen, package, models = [], ModuleType("lpips"), ModuleType("torchvision.models")

        class LPIPS(torch.nn.Module):
            def __init__(self, net: str, verbose: bool):
                super().__init__()
                assert net == "alex" and not verbose

            def forward(self, a, b):
                seen.append((a, b))
                return (a - b).abs().mean((1, 2, 3), keepdim=True)

        package.LPIPS = LPIPS
        models.AlexNet_Weights = SimpleNamespace(DEFAULT=SimpleNamespace(url="https://weights.example/alexnet-1234.pth"))
        for name, module in {"lpips": package, "torchvision": ModuleType("torchvision"), "torchvision.models": models}.items():
            monkeypatch.setitem(sys.modules, name, module)
        monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
        if weights:
            (tmp_path / "checkpoints").mkdir()
            (tmp_path / "checkpoints" / "alexnet-1234.pth").touch()
        return seen

    return put


def test_lpips_is_given_what_it_wants(install):
    seen = install()
    lpips = metrics.open_lpips()
    a, b = torch.zeros(2, 32, 40, 3, dtype=torch.uint8), torch.full((2, 32, 40, 3), 255, dtype=torch.uint8)
    b[1] = 0
    found = compare(Clip(pixels=a), Clip(pixels=b), lpips)["pixels"]
    assert found["lpips"] == [2, 0] and summary(found)["lpips"] == 1
    assert [x.shape for x, _ in seen] == [(1, 3, 32, 40)] * 2 and seen[0][0].dtype == torch.float32
    assert seen[0][0].unique() == -1 and seen[0][1].unique() == 1
    small = noise(1, 16, 40, 3)
    assert "lpips" not in compare_pixels(small, small, lpips)  # AlexNet cannot see it


def test_lpips_that_is_not_here_is_one_line(install, monkeypatch, tmp_path):
    install(weights=False)
    said = metrics.open_lpips()
    assert said.startswith("no LPIPS: AlexNet's weights are not at") and "alexnet-1234.pth" in said and "\n" not in said
    monkeypatch.setitem(sys.modules, "lpips", None)
    said = metrics.open_lpips()
    assert said.startswith("no LPIPS: ") and "pip install lpips" in said and "\n" not in said


def test_a_torchvision_of_another_torch(monkeypatch, tmp_path):
    (tmp_path / "lpips.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "lpips", raising=False)
    assert metrics.open_lpips().startswith("no LPIPS: operator torchvision::nms does not exist (pip install lpips")


# Files


def write_mp4(path, frames: torch.Tensor, fps: int = 8) -> None:
    with video.VideoWriter(path, frames.shape[2], frames.shape[1], fps) as writer:
        writer.write(frames.numpy())


def test_mp4(tmp_path):
    """H.264 at this quality is near, and not equal."""
    frames = smooth(9, 48, 64)
    write_mp4(tmp_path / "a.mp4", frames)
    clip = metrics.read(tmp_path / "a.mp4")
    assert clip.pixels.shape == frames.shape and clip.fps == 8 and clip.latents is None
    found = summary(compare(clip, Clip(pixels=frames))["pixels"])
    assert 25 < found["psnr"] < 60 and found["ssim"] > 0.9


def test_safetensors(tmp_path):
    pixels, latents = noise(2, 16, 16, 3), torch.randn(1, 4, 1, 2, 2)
    save_file({"latents": latents, "pixels": pixels}, tmp_path / "a.safetensors")
    clip = metrics.read(tmp_path / "a.safetensors")
    assert torch.equal(clip.pixels, pixels) and torch.equal(clip.latents, latents) and clip.fps is None


UNREADABLE = {  # file, its content, what is said
    "missing.mp4": (None, "is no file"),
    "a.gif": (b"GIF89a", "ends in neither .mp4 nor .safetensors"),
    "garbage.mp4": (b"garbage", "cannot be read as a video: "),
    "empty.mp4": (b"", "cannot be read as a video: "),
    "garbage.safetensors": (b"garbage", "cannot be read: "),
    "other.safetensors": ({"weight": torch.zeros(1)}, "has neither latents nor pixels; it has weight"),
    "nan.safetensors": ({"latents": torch.full((1, 1, 1, 1, 1), math.nan)}, "all finite: False"),
    "flat.safetensors": ({"latents": torch.zeros(4, 4)}, "latents are (4, 4)"),
    "float.safetensors": ({"pixels": torch.zeros(1, 16, 16, 3)}, "pixels are torch.float32 (1, 16, 16, 3), not uint8"),
    "first.safetensors": ({"pixels": torch.zeros(1, 3, 16, 16, dtype=torch.uint8)}, "not uint8 (f, y, x, 3)"),
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_unreadable(name, tmp_path):
    content, said = UNREADABLE[name]
    if isinstance(content, dict):
        save_file(content, tmp_path / name)
    elif content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError) as error:
        metrics.read(tmp_path / name)
    assert name in str(error.value) and said in str(error.value) and "\n" not in str(error.value)


def test_a_video_that_is_cut_off(tmp_path):
    """It plays as far as it goes, which is no clip of the length that it names."""
    write_mp4(tmp_path / "a.mp4", noise(24, 64, 64, 3))
    whole = (tmp_path / "a.mp4").read_bytes()
    (tmp_path / "a.mp4").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match="frames and says it lasts 24; it is cut off"):
        metrics.read(tmp_path / "a.mp4")


def pixels(*shape: int, fps: float | None = None) -> Clip:
    return Clip(pixels=torch.zeros(*shape, 3, dtype=torch.uint8), fps=fps)


DIFFERENT = {
    "frames": (pixels(9, 16, 32), pixels(33, 16, 32), "9 frames against 33"),
    "size": (pixels(9, 16, 32), pixels(9, 32, 16), "pixels [9, 16, 32, 3] against [9, 32, 16, 3]: another size"),
    "fps": (pixels(9, 16, 32, fps=16), pixels(9, 16, 32, fps=24), "16 frames a second against 24"),
    "kinds": (pixels(9, 16, 32), Clip(latents=torch.zeros(1, 4, 3, 2, 4)), "run.py --latents FILE"),
    "latent frames": (*(Clip(latents=torch.zeros(1, 4, f, 2, 4)) for f in (3, 2)), "3 latent frames against 2"),
    "channels": (*(Clip(latents=torch.zeros(1, c, 3, 2, 4)) for c in (4, 16)), "another model's"),
    "small": (pixels(9, 8, 32), pixels(9, 8, 32), "32x8 are smaller than SSIM's window of 11x11"),
}  # fmt: skip


@pytest.mark.parametrize("name", DIFFERENT)
def test_clips_that_are_not_alike(name):
    a, b, said = DIFFERENT[name]
    with pytest.raises(ValueError) as error:
        metrics.check(a, b)
    assert said in str(error.value) and "\n" not in str(error.value)


def test_clips_that_are_alike():
    latents = torch.zeros(1, 4, 3, 2, 4)
    metrics.check(pixels(9, 16, 32, fps=16), pixels(9, 16, 32)._replace(latents=latents))  # what one alone has is not compared
    metrics.check(Clip(latents=latents), Clip(latents=latents))
