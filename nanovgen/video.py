"""Frames to an MP4 that appears under its name only when whole, a contact sheet, and an image to start from."""

import glob
import math
import os
import queue
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import imageio.v3 as iio
import imageio_ffmpeg
import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

BESIDE = (".json", ".png", ".latents.safetensors")  # suffixes of what may stand beside a video


def find_ffmpeg() -> str:
    """The encoder's path; ValueError where there is none."""
    try:
        exe = imageio_ffmpeg.get_ffmpeg_exe()  # IMAGEIO_FFMPEG_EXE, where set, is taken unseen
        encoders = subprocess.run([exe, "-v", "error", "-encoders"], capture_output=True, text=True).stdout
    except (RuntimeError, OSError) as error:
        raise ValueError(f"no ffmpeg ({error}): `pip install imageio-ffmpeg` brings one") from None
    if "libx264" not in encoders:
        raise ValueError(f"{exe} has no libx264: `pip install imageio-ffmpeg` brings one that has")
    return exe


def check_output(path: Path, needed: int) -> None:
    """Refuse a place where the files cannot be written: `needed` bytes, found out by writing one."""
    if path.suffix != ".mp4":
        raise ValueError(f"output {path} must end in .mp4")
    for beside in (path, *(path.with_suffix(end) for end in BESIDE)):
        if os.path.isdir(beside):  # not Path's: that raises on a name that is too long
            raise ValueError(f"output {beside} is a folder; name a file")
    probe = part_name(path.with_suffix(".latents.safetensors"))  # the longest name that will be needed
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink(missing_ok=True)  # a rank on another machine may have this process's number
        free = shutil.disk_usage(path.parent).free
    except OSError as error:
        raise ValueError(f"cannot write {path}: {error.strerror}") from None
    if free < needed:
        raise ValueError(f"{path.parent} has {free / 1e6:.1f} MB free and the files may need {needed / 1e6:.1f} MB")


def to_pixels(video: Tensor) -> np.ndarray:
    """(1, 3, f, y, x) in [-1, 1] -> uint8 (f, y, x, 3) on the host: made on the device, so that a quarter of fp32 travels."""
    pixels = ((video[0].float() + 1) * 127.5).round().clamp(0, 255).to(torch.uint8).permute(1, 2, 3, 0).contiguous()
    if pixels.is_cuda:
        pixels = torch.empty_like(pixels, device="cpu", pin_memory=True).copy_(pixels)
    return pixels.numpy()


def part_name(path: Path, process: object = None) -> Path:
    """Where `path` is written by a process (by default this one) until it is whole: beside it, hidden."""
    return path.with_name(f".{path.stem}.{process or os.getpid()}.part{path.suffix}")


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """A place to write `path` to: it appears under its name if the `with` ends well, and nothing is left if not."""
    part = part_name(path)
    try:
        yield part
        part.chmod(0o644)  # safetensors writes for the owner alone
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def remove_parts(out: Path) -> None:
    """Remove what a writer of `out`, or of a file beside it, left when it was killed: parts whose process is gone."""
    for path in (out, *(out.with_suffix(end) for end in BESIDE)):
        for part in path.parent.glob(part_name(Path(glob.escape(path.name)), "*").name):
            pid = part.name.removesuffix(f".part{path.suffix}").rpartition(".")[2]
            if not pid.isdecimal() or part != part_name(path, pid):
                continue  # of a longer name
            try:
                os.kill(int(pid), 0)
            except ProcessLookupError:
                part.unlink(missing_ok=True)


def count_frames(path: Path) -> int:
    """Frames that a file holds, without decoding them (imageio_ffmpeg's own count decodes)."""
    # A line for each frame, made for programs to read; what ffmpeg tells people differs from version to version.
    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-i", path, "-map", "0:v:0", "-c", "copy", "-f", "framecrc", "-"]
    said = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace").stdout
    return sum(not line.startswith("#") for line in said.splitlines())


class VideoWriter:
    """H.264, yuv420p, exact size. Written beside `path` under a hidden name and renamed at the end, or removed.

    A thread of its own feeds ffmpeg, so that the next frames are made meanwhile. What fails there is raised by the next
    write or at the close; the thread has ended when the `with` is left, however it is.
    """

    AHEAD = 2  # writes that may wait for the thread, before one waits for it
    LOOKAHEAD = 10  # frames that the encoder holds back; its own 40 would all be left to do when the last frame comes

    def __init__(self, path: Path, width: int, height: int, fps: int):
        self.path, self.part, self.count = path, part_name(path), 0
        self.waiting, self.error, self.whole = queue.Queue(self.AHEAD), None, False
        remove_parts(path)
        self.thread = threading.Thread(target=self._feed, name="video writer", daemon=True)
        self.encoder = imageio_ffmpeg.write_frames(
            str(self.part), (width, height), fps=fps, codec="libx264", pix_fmt_in="rgb24", pix_fmt_out="yuv420p",
            quality=None, macro_block_size=1,
            output_params=["-crf", "16", "-x264-params", f"rc-lookahead={self.LOOKAHEAD}", "-movflags", "+faststart"],
        )  # fmt: skip

    def __enter__(self) -> "VideoWriter":
        self.encoder.send(None)
        self.thread.start()
        return self

    def write(self, frames: np.ndarray) -> None:
        """uint8 (f, y, x, 3), not to be changed afterwards."""
        self.waiting.put(frames)
        if self.error is not None:
            raise self.error

    def _feed(self) -> None:
        """The thread: frames until None. After an error the rest is dropped, so that no write waits for ever."""
        while (frames := self.waiting.get()) is not None:
            try:
                for frame in frames:
                    if self.error is None:
                        self.encoder.send(np.ascontiguousarray(frame))
                        self.count += 1
            except Exception as error:
                self.error = error

    def _end(self, error: BaseException | None) -> None:
        """The thread and ffmpeg end: after all frames or, with an error, without the rest of them."""
        self.error = self.error or error
        if self.thread.is_alive():
            self.waiting.put(None)
            self.thread.join()
        self.encoder.close()

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> None:
        try:
            if kind is None and not self.whole:
                self.close()
        finally:
            self._end(error or InterruptedError("the video was not finished"))  # also where Ctrl-C broke off the close
            self.part.unlink(missing_ok=True)

    def close(self) -> None:
        """Wait for all frames. An encoder that died may leave a short file that plays: count before naming it."""
        self._end(None)
        if self.error is not None:
            raise self.error
        if (written := count_frames(self.part)) != self.count:
            raise OSError(f"ffmpeg wrote {written} of {self.count} frames")
        os.replace(self.part, self.path)
        self.whole = True


def contact_sheet(frames: np.ndarray, path: Path, columns: int = 4, rows: int = 3) -> None:
    """A PNG of columns x rows frames, evenly spaced, the first and the last among them; white lines between."""
    pick = np.linspace(0, len(frames) - 1, min(columns * rows, len(frames))).round().astype(int)
    cells = np.pad(frames[pick], ((0, -len(pick) % columns), (1, 1), (1, 1), (0, 0)), constant_values=255)
    n, y, x, c = cells.shape
    sheet = cells.reshape(n // columns, columns, y, x, c).swapaxes(1, 2).reshape(n // columns * y, columns * x, c)
    with whole(path) as part:
        iio.imwrite(part, sheet)


def read_image(path: str, width: int, height: int, cover: bool = False) -> Tensor:
    """An image file as (1, 3, 1, y, x) in [-1, 1], stretched to width x height (Lanczos), as Wan's code does.

    With `cover`, as Cosmos3's: scaled until it covers the frame (bilinear, antialiased), cut about its middle.
    """
    try:
        with Image.open(path) as image:
            pixels = image.convert("RGB")
            pixels = np.asarray(pixels if cover else pixels.resize((width, height), Image.Resampling.LANCZOS))
    except (OSError, Image.DecompressionBombError) as error:  # Pillow's "cannot identify image file" is one too
        raise ValueError(f"image {path} cannot be read: {error}") from None
    x = torch.from_numpy(pixels.copy()).permute(2, 0, 1)[None].float()
    if cover:
        scale = max(width / x.shape[3], height / x.shape[2])
        rows, columns = (math.ceil(scale * n) for n in x.shape[2:])
        x = F.interpolate(x, size=(rows, columns), mode="bilinear", antialias=True)
        top, left = round((rows - height) / 2), round((columns - width) / 2)
        x = x[:, :, top : top + height, left : left + width].round().clamp(0, 255)
    return x[:, :, None] / 127.5 - 1


def read_video(path: Path) -> tuple[np.ndarray, float]:
    """Frames, uint8 (f, y, x, 3), and frames a second, of a file that ffmpeg can read; ValueError in one line for another."""
    try:
        frames = imageio_ffmpeg.read_frames(str(path))
        meta = next(frames)
        (width, height), found = meta["source_size"], [np.frombuffer(frame, np.uint8) for frame in frames]
    except (OSError, RuntimeError) as error:
        raise ValueError(f"{path} cannot be read as a video: {str(error).strip().splitlines()[-1]}") from None
    expected = round(meta["duration"] * meta["fps"])
    if len(found) < max(1, expected - 1):  # a file whose end is missing plays as far as it goes
        raise ValueError(f"{path} has {len(found)} frames and says it lasts {expected}; it is cut off")
    return np.stack(found).reshape(-1, height, width, 3), meta["fps"]
