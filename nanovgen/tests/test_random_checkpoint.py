"""Folders of random weights: run.py takes them for what they stand for, and makes a video."""

from dataclasses import replace

import pytest
import random_checkpoint
import tiny_layout
import torch

from nanovgen.recipe import PRESETS

VAES = {
    "tiny-wan": dict(base_dim=8),
    "tiny-cosmos": dict(base_dim=8, decoder_base_dim=12, z_dim=48, is_residual=True, patch_size=2, latents_mean=(0.0,) * 48,
                        latents_std=(1.0,) * 48),
}  # fmt: skip


@pytest.mark.parametrize("name", VAES)
def test_a_video_of_random_weights(name, cli, tmp_path, read_video):
    preset, folder = replace(PRESETS[name], vae=VAES[name]), tmp_path / "random"
    random_checkpoint.write(preset, folder, torch.device("cpu"), tiny_layout.TEXT_CONFIG)
    out = tmp_path / "v.mp4"
    result = cli("a red circle", "--model", folder, "--steps", 2, "--size", "32x32", "--frames", 5, "--out", out)
    print(result.err)
    assert result.code == 0 and f"{folder} ({name}): " in result.lines["model"]
    assert len(read_video(out)[1]) == 5


def test_only_what_can_be_laid_out():
    assert [name for name in PRESETS if not name.startswith("wan2.1")] == random_checkpoint.MODELS
