"""The clip world draws what it says, its captions fit its tokenizer, and its reader reads the truth and can say no."""

import math
import random
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parents[2] / "weights"))
import clip_reader
import clip_world
from clip_world import Clip, Shape

STAR = Clip("black", (Shape("star", "cyan", "big", "spin"),), (0.3, 0.5, 0.2, 0.1, 0.7))
PAIR = Clip("white", (Shape("circle", "red", "small", "up"), Shape("square", "blue", "big", "right")), (0.4,) * 10)


def draws(count, shapes, held_out=False, seed=0):
    rng = random.Random(seed)
    return [clip_world.sample_clip(rng, shapes, held_out) for _ in range(count)]


def draw(clip):
    return clip_world.render([clip], "cpu")[0]


def damaged(video):
    """A video (3, f, y, x) after a blur of 0.8 px and noise of 0.04, about what a VAE does."""
    taps = torch.exp(-(torch.arange(-3.0, 4.0) ** 2) / (2 * 0.8**2))
    taps = taps / taps.sum()
    frames = F.pad(video.flatten(0, 1).unsqueeze(1), (3,) * 4, mode="replicate")
    frames = F.conv2d(F.conv2d(frames, taps.view(1, 1, 1, 7)), taps.view(1, 1, 7, 1))
    noise = torch.randn(video.shape, generator=torch.Generator().manual_seed(0))
    return (frames.view(video.shape) + 0.04 * noise).clamp(-1, 1)


def squashed(video, amount):
    """A video (3, f, y, x) stretched sideways about its centre, by up to `amount` and back over the clip."""
    time = torch.linspace(0, 1, video.size(1))
    theta = torch.zeros(len(time), 2, 3)
    theta[:, 0, 0], theta[:, 1, 1] = 1 / (1 + amount * (2 * math.pi * time).sin()), 1
    frames = video.transpose(0, 1)
    grid = F.affine_grid(theta, list(frames.shape), align_corners=False)
    return F.grid_sample(frames, grid, padding_mode="border", align_corners=False).transpose(0, 1)


def verdict(clip, video):
    return clip_reader.score([clip], [clip_world.canonical_caption(clip)], [video])


@pytest.mark.parametrize("shapes", (1, 2))
def test_pixels_follow_from_the_clip(shapes):
    clips = draws(6, shapes)
    assert clips == draws(6, shapes)
    videos, masks = clip_world.render(clips, "cpu"), clip_world.masks(clips, "cpu")
    assert videos.shape == (6, 3, clip_world.FRAMES, clip_world.HEIGHT, clip_world.WIDTH)
    assert masks.shape == videos[:, 0].shape
    assert torch.equal(videos[2], draw(clips[2]))
    assert videos.min() >= -1 and videos.max() <= 1 and masks.min() >= 0 and masks.max() <= 1
    edge = torch.cat([masks[:, :, (0, -1)].flatten(), masks[..., (0, -1)].flatten()])
    assert edge.max() == 0
    if shapes == 2:
        assert masks[..., 95:97].max() == 0  # each shape keeps to its half


def test_shapes_have_their_area():
    radius, time = 20, 0
    area = {"circle": math.pi, "square": 2 * 1.2**2, "triangle": 0.75 * 3**0.5 * 1.3**2}
    for kind, factor in area.items():
        clip = replace(STAR, shapes=(Shape(kind, "red", "big", "still"),))
        assert clip_world.masks([clip], "cpu")[0, time].sum() == pytest.approx(factor * radius**2, rel=0.01)


def test_held_out_descriptions_are_never_trained_on():
    kept = {clip_world.canonical_caption(clip) for clip in draws(20000, 1)}
    held = {clip_world.canonical_caption(clip) for clip in draws(2000, 1, held_out=True)}
    assert not kept & held
    assert 1 / 20 < len(held) / len(kept | held) < 1 / 12
    assert all(clip_world.is_held_out(clip) for clip in draws(50, 2, held_out=True))
    assert not any(clip_world.is_held_out(clip) for clip in draws(500, 2))


def test_captions_tokenise():
    tokenizer, rng = clip_world.build_tokenizer(), random.Random(0)
    assert [tokenizer.token_to_id(word) for word in ("<pad>", "</s>", "<unk>")] == [0, 1, 2]
    assert tokenizer.get_vocab_size() == len(clip_world.word_list()) + 3
    named = 0
    for clip in draws(2000, 1) + draws(2000, 2):
        text = clip_world.caption(clip, rng)
        named += clip_world.mentions_size(text)
        for ids in (tokenizer.encode(text).ids, tokenizer.encode(clip_world.canonical_caption(clip)).ids):
            assert 2 not in ids and len(ids) <= 31 and ids[-1] == 1
    assert 0.35 < named / 4000 < 0.65
    assert tokenizer.encode("A Red circle, straße!").tokens == ["a", "red", "circle", ",", "<unk>", "!", "</s>"]
    assert all(1 <= len(clip_world.noise_caption(rng).split()) <= 25 for _ in range(200))


def test_canonical_captions():
    clip = Clip("black", (Shape("circle", "orange", "big", "right"),), (0.5,) * 5)
    assert clip_world.canonical_caption(clip) == "an orange circle moves right on a black background"
    rng = random.Random(0)
    assert clip_world.canonical_caption(clip) in {clip_world.caption(clip, rng) for _ in range(2000)}
    assert clip_world.canonical_caption(PAIR) == (
        "a red circle on the left moves up and a blue square on the right moves right on a white background"
    )


@pytest.mark.parametrize("shapes", (1, 2))
@pytest.mark.parametrize("view", (lambda video: video, damaged), ids=("truth", "damaged"))
def test_reader_reads_the_truth(shapes, view):
    clips = draws(25, shapes, seed=3)
    captions = [clip_world.canonical_caption(clip) + ", big or small" for clip in clips]  # so that sizes count
    rates = clip_reader.score(clips, captions, (view(draw(clip)) for clip in clips))
    assert set(rates.values()) == {1.0}, rates


@pytest.mark.parametrize(
    "field, value",
    (("kind", "square"), ("colour", "blue"), ("motion", "still"), ("motion", "orbit"), ("motion", "left"), ("size", "small")),
)
def test_reader_catches_another_shape(field, value):
    shown = replace(STAR, shapes=(replace(STAR.shapes[0], **{field: value}),))
    rates = clip_reader.score([STAR], ["a big cyan star spins on a black background"], [draw(shown)])
    wrong = {name for name, rate in rates.items() if rate == 0}
    assert {field, "all_right"} <= wrong <= {field, "all_right", "spin_rigid"}


def test_reader_catches_a_circle_for_a_square_and_another_background():
    square, circle = (replace(STAR, shapes=(Shape(kind, "red", "small", "left"),)) for kind in ("square", "circle"))
    assert verdict(square, draw(circle))["kind"] == 0
    assert verdict(square, draw(replace(square, background="navy")))["background"] == 0


def test_reader_catches_a_change_of_colour():
    other = replace(STAR, shapes=(replace(STAR.shapes[0], colour="red"),))
    assert verdict(STAR, torch.cat([draw(STAR)[:, :22], draw(other)[:, 22:]], dim=1))["colour"] == 0


def test_reader_catches_swapped_sides():
    rates = verdict(PAIR, draw(PAIR).flip(-1))
    assert rates["both_colours_present"] == 1 and rates["all_right_with_sides"] == 0 and rates["kind"] == 0


@pytest.mark.parametrize("kind", ("square", "triangle", "star"))
def test_reader_catches_a_spin_that_deforms(kind):
    clip = replace(STAR, shapes=(Shape(kind, "cyan", "big", "spin"),), jitter=(0.5, 0.5, 0.2, 0.1, 0.7))
    rigid, circle = draw(clip), draw(replace(clip, shapes=(Shape("circle", "cyan", "big", "still"),)))
    assert verdict(clip, rigid)["spin_rigid"] == 1
    assert verdict(clip, squashed(rigid, 0.4))["spin_rigid"] == 0
    melting = torch.cat([rigid[:, :25], circle[:, 25:]], dim=1)
    assert verdict(clip, melting)["spin_rigid"] == 0 and verdict(clip, melting)["kind"] == 0


def test_reader_survives_nonsense():
    empty = torch.full((3, clip_world.FRAMES, clip_world.HEIGHT, clip_world.WIDTH), -1.0)
    noise = torch.rand(empty.shape, generator=torch.Generator().manual_seed(0)) * 2 - 1
    gone = torch.cat([draw(STAR)[:, :20], empty[:, 20:]], dim=1)
    for video in (empty, noise, gone, empty * math.nan):
        for shapes in (1, 2):
            assert all(shape.kind is None and shape.iou == 0 for shape in clip_reader.read_clip(video, shapes).shapes)
