"""The tail of a run: each chunk's frames go to the encoder while the next chunk is decoded."""

import threading
import time
from pathlib import Path

import imageio_ffmpeg
import numpy as np
import pytest
import torch

from nanovgen import generate, vae_parallel, video
from nanovgen import job as jobs
from nanovgen.recipe import Request

CHUNKS, PAUSE = 8, 0.05  # of one frame each; seconds to decode one and to encode one


def clip(chunks: int = CHUNKS) -> torch.Tensor:
    return 2 * torch.rand(1, 3, chunks, 32, 64, generator=torch.Generator().manual_seed(0)) - 1


@pytest.fixture
def slow(monkeypatch):
    """A decoder and an encoder that take their time; the frames as the encoder got them, and the seconds it took for each."""
    got, spent, write_frames = [], [], imageio_ffmpeg.write_frames

    def decode(*_):
        for chunk in clip().split(1, dim=2):
            time.sleep(PAUSE)
            yield chunk

    def encode(*given, **more):
        real = write_frames(*given, **more)
        real.send(None)
        try:
            while True:
                frame, start = (yield), time.perf_counter()
                time.sleep(PAUSE)
                got.append(frame.copy())
                real.send(frame)
                spent.append(time.perf_counter() - start)
        finally:
            real.close()

    monkeypatch.setattr(vae_parallel, "decode", decode)
    monkeypatch.setattr(imageio_ffmpeg, "write_frames", encode)
    return got, spent


def decoded(folder: Path) -> generate.Stages:
    """The stages of a decode, which leaves no thread."""
    job = jobs.prepare(Request("a red circle", str(folder), size="64x32", frames=5, steps=1, out="v.mp4"))
    stages = generate.Stages(job.device)
    try:
        generate.decode(job, torch.zeros(1, 16, *job.latent_shape), stages)
    finally:
        assert "video writer" not in {thread.name for thread in threading.enumerate()}
    return stages


def test_the_write_is_hidden(slow, tiny_folder, read_video):
    stages = decoded(tiny_folder)
    decode, write = (stages.rows[name][0] for name in ("decode", "write"))
    got, spent = slow
    print(f"{CHUNKS} chunks: {decode:.2f} s to decode, {sum(spent):.2f} s to encode, of which {write:.2f} s were not hidden")
    assert decode >= CHUNKS * PAUSE and write < 0.6 * sum(spent)
    assert np.array_equal(np.stack(got), video.to_pixels(clip()))  # all, and in order
    assert len(read_video(Path("v.mp4"))[1]) == CHUNKS


@pytest.mark.parametrize("frames", [1, 33])
def test_frames_are_counted_as_a_decode_counts_them(frames, tmp_path):
    path = tmp_path / "v.mp4"
    with video.VideoWriter(path, 64, 32, 8) as writer:
        writer.write(video.to_pixels(clip(frames)))
    assert video.count_frames(path) == frames == imageio_ffmpeg.count_frames_and_secs(path)[0]
    path.write_bytes(path.read_bytes()[:100])
    assert video.count_frames(path) == video.count_frames(tmp_path / "none.mp4") == 0


def test_what_ffmpeg_tells_people_is_not_read(tmp_path, monkeypatch):
    """It differs from version to version: 7.0 counts no frames aloud where 9.0 does."""
    mute = tmp_path / "ffmpeg"
    mute.write_text(f'#!/bin/sh\nexec "{imageio_ffmpeg.get_ffmpeg_exe()}" "$@" 2> /dev/null\n')
    mute.chmod(0o755)
    monkeypatch.setenv("IMAGEIO_FFMPEG_EXE", str(mute))
    with video.VideoWriter(tmp_path / "v.mp4", 64, 32, 8) as writer:
        writer.write(video.to_pixels(clip(9)))
    assert video.count_frames(tmp_path / "v.mp4") == 9


def test_what_the_encoder_holds_back(tmp_path):
    """When the last of 60 frames comes a good part is in the file; with x264's own 40 frames ahead nothing was."""
    out, noise = tmp_path / "v.mp4", np.random.default_rng(0).integers(0, 256, (60, 192, 320, 3), np.uint8)
    with video.VideoWriter(out, 320, 192, 8) as writer:
        for frame in noise:
            writer.write(frame[None])
        early = writer.part.stat().st_size
    print(f"{early} of {out.stat().st_size} bytes were there at the last frame")
    assert early > out.stat().st_size / 8  # what has left the encoder is written in large blocks: ffmpeg 7.0 a sixth, 9.0 a third


def test_frames_that_wait_are_few(slow, tmp_path):
    """A decoder that is faster than the encoder waits for it, and does not fill the memory."""
    with video.VideoWriter(tmp_path / "v.mp4", 64, 32, 8) as writer:
        for i, frame in enumerate(video.to_pixels(clip())):
            writer.write(frame[None])
            assert i + 1 - len(slow[0]) <= writer.AHEAD + 2  # in the queue, at the encoder, and the one just given
    assert len(slow[0]) == CHUNKS


@pytest.mark.parametrize("error", [KeyboardInterrupt, FloatingPointError])
def test_an_error_drops_what_waits(slow, tmp_path, error):
    start = time.perf_counter()
    with pytest.raises(error), video.VideoWriter(tmp_path / "v.mp4", 64, 32, 8) as writer:
        writer.write(np.concatenate([video.to_pixels(clip())] * 100))
        raise error
    assert time.perf_counter() - start < 100 * CHUNKS * PAUSE / 4 and len(slow[0]) < 100
    assert not writer.thread.is_alive() and not any(tmp_path.glob("*v.mp4"))


def test_the_threads_error_is_raised_here(monkeypatch, tmp_path):
    """By the next write or, where there is none, at the end; never lost, and never a wait for ever."""

    def full(*_, **__):
        yield
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(imageio_ffmpeg, "write_frames", full)
    for writes in (1, 50):
        with pytest.raises(OSError, match="No space left"), video.VideoWriter(tmp_path / "v.mp4", 64, 32, 8) as writer:
            for _ in range(writes):
                writer.write(video.to_pixels(clip()))
        assert not writer.thread.is_alive() and not any(tmp_path.glob("*v.mp4"))
