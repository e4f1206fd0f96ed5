"""The clip world: synthetic two-second clips of flat shapes, their captions and their tokenizer.

A `Clip` (one or two shapes, each with one motion, on a plain background) fully determines its pixels; `render` draws
hundreds at once on any device, anti-aliased by signed distance. Captions name the sizes half of the time and all else
always. Letters: n clips, f frames, y rows, x columns; "items" are the shapes of all clips in one flat list.
"""

import math
import random
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from torch import Tensor

HEIGHT, WIDTH, FRAMES, FPS = 96, 192, 33, 16

# (folds, outer radius, inner over outer radius, angle at rest): every kind is a star of `folds` points. With an
# inner ratio of cos(pi / folds) the star is the regular polygon, and 180 folds are a circle to 0.003 px.
KINDS = {
    "circle": (180, 1.0, math.cos(math.pi / 180), 0.0),
    "square": (4, 1.2, math.cos(math.pi / 4), math.pi / 4),
    "triangle": (3, 1.3, 0.5, 0.0),
    "star": (5, 1.35, 0.45, 0.0),
}
COLOURS = {
    "red": (225, 20, 30),
    "green": (20, 155, 50),
    "blue": (30, 90, 255),
    "yellow": (255, 230, 0),
    "orange": (255, 125, 0),
    "purple": (145, 30, 200),
    "cyan": (30, 220, 235),
    "pink": (255, 120, 200),
}
BACKGROUNDS = {"black": (0,) * 3, "white": (255,) * 3, "grey": (128,) * 3, "navy": (0, 15, 100), "beige": (225, 205, 160)}
SIZES = {"small": 12.0, "big": 20.0}  # radius in pixels
MOTIONS = {  # the phrases that say it, the canonical one first; none longer than four words
    "left": ("moves left", "slides to the left", "drifts left", "travels left"),
    "right": ("moves right", "slides to the right", "drifts right", "travels right"),
    "up": ("moves up", "slides up", "rises", "floats up"),
    "down": ("moves down", "slides down", "sinks", "falls"),
    "bounce": ("bounces", "is bouncing", "jumps up and down"),
    "spin": ("spins", "rotates", "turns around"),
    "grow": ("grows", "gets bigger", "expands"),
    "shrink": ("shrinks", "gets smaller", "contracts"),
    "orbit": ("orbits", "moves in a loop", "goes in a ring"),
    "still": ("stays still", "does not move", "rests"),
}
SIZE_WORDS = {"small": ("small", "little", "tiny"), "big": ("big", "large")}
BEHIND = ("on a {} background", "in front of {}", "over a {} backdrop", "on {}", "against {}")
SIDES = ("on the {}", "on the {} side", "at the {} side")
FUNCTION_WORDS = ["a", "an", "the", "one", "and", "while", "is", "on", "in", "of", "at", "to", "not"]
EXTRAS = list("0123456789.,;:!?-'\"()")
JITTER = 5  # per shape: x, y, phase of the orbit, angle, sense of turning


@dataclass(frozen=True)
class Shape:
    kind: str
    colour: str
    size: str
    motion: str


@dataclass(frozen=True)
class Clip:
    background: str
    shapes: tuple[Shape, ...]  # one, or left and right
    jitter: tuple[float, ...]  # JITTER numbers in [0, 1) per shape


def is_held_out(clip: Clip) -> bool:
    """One description in 16. Size is no part of it: the canonical caption of a held-out clip is never trained on."""
    return (zlib.crc32(canonical_caption(clip).encode()) >> 8) % 16 == 0


def sample_clip(rng: random.Random, shapes: int, held_out: bool = False, motions: Sequence[str] = tuple(MOTIONS)) -> Clip:
    """A random clip of 1 or 2 shapes from the training side of the split, or from the held-out side."""
    while True:
        drawn = tuple(
            Shape(rng.choice(list(KINDS)), colour, rng.choice(list(SIZES)), rng.choice(motions))
            for colour in rng.sample(list(COLOURS), shapes)
        )
        jitter = tuple(rng.random() for _ in range(JITTER * shapes))
        clip = Clip(rng.choice(list(BACKGROUNDS)), drawn, jitter)
        invisible = any((shape.kind, shape.motion) == ("circle", "spin") for shape in drawn)
        if not invisible and is_held_out(clip) == held_out:
            return clip


def canonical_caption(clip: Clip) -> str:
    """The plain form, without sizes: a red circle moves right on a black background."""
    sides = [" on the left", " on the right"] if len(clip.shapes) == 2 else [""]
    parts = [
        f"{with_article('a', f'{shape.colour} {shape.kind}')}{side} {MOTIONS[shape.motion][0]}"
        for shape, side in zip(clip.shapes, sides, strict=False)
    ]
    return f"{' and '.join(parts)} {BEHIND[0].format(clip.background)}"


def caption(clip: Clip, rng: random.Random) -> str:
    """A random paraphrase of at most 31 tokens; two shapes come in either order, always with their sides."""
    named, side_form, side_first = rng.random() < 0.5, rng.choice(SIDES), rng.random() < 0.3
    parts = []
    for shape, side in zip(clip.shapes, ("left", "right"), strict=False):
        size = rng.choice(SIZE_WORDS[shape.size]) + " " if named and shape.motion not in ("grow", "shrink") else ""
        noun = with_article(rng.choice(("a", "a", "a", "one", "the")), f"{size}{shape.colour} {shape.kind}")
        if len(clip.shapes) == 2:
            where = side_form.format(side)
            noun = f"{where} {noun}" if side_first else f"{noun} {where}"
        parts.append(f"{noun} {rng.choice(MOTIONS[shape.motion])}")
    text = rng.choice((" and ", " while ")).join(rng.sample(parts, len(parts)))
    behind = rng.choice(BEHIND).format(clip.background)
    return f"{behind}, {text}" if rng.random() < 0.15 else f"{text} {behind}"


def with_article(article: str, noun: str) -> str:
    return f"an {noun}" if article == "a" and noun[0] in "aeiou" else f"{article} {noun}"


def mentions_size(text: str) -> bool:
    """Whether a caption names sizes; it then names those of all shapes that do not grow or shrink."""
    return any(word in text.lower().split() for words in SIZE_WORDS.values() for word in words)


def noise_caption(rng: random.Random) -> str:
    """1 to 25 words of soup, mostly unknown to the tokenizer: stands for a prompt that is not of this world."""
    share = rng.uniform(0.4, 1.0)
    return " ".join(
        "".join(rng.choices("bdfgklmnprstvwz", k=7))
        if rng.random() < share  # no such word: unknown
        else rng.choice([*FUNCTION_WORDS, ",", "."])
        for _ in range(rng.randint(1, 25))
    )


def word_list() -> list[str]:
    """All words of the grammar, with digits and punctuation, sorted: the id of a word is its place here + 3."""
    phrases = [phrase for group in (*MOTIONS.values(), *SIZE_WORDS.values()) for phrase in group]
    phrases += [form.format("") for form in BEHIND + SIDES]
    return sorted({*" ".join(phrases).split(), *FUNCTION_WORDS, *KINDS, *COLOURS, *BACKGROUNDS, *EXTRAS})


def build_tokenizer() -> Tokenizer:
    """One id per word, lower-cased, split at spaces and punctuation; <pad> 0, </s> 1 (always appended), <unk> 2."""
    words = ["<pad>", "</s>", "<unk>", *word_list()]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.add_special_tokens(words[:3])
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Punctuation()])
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return tokenizer


def render(clips: list[Clip], device: torch.device | str, dtype: torch.dtype = torch.float32) -> Tensor:
    """Draw clips: (n, 3, f, y, x) in [-1, 1]."""
    return draw(clips, device)[0].to(dtype)


def masks(clips: list[Clip], device: torch.device | str) -> Tensor:
    """How much of each pixel a shape covers: (n, f, y, x) in [0, 1]."""
    return draw(clips, device)[1]


def draw(clips: list[Clip], device: torch.device | str) -> tuple[Tensor, Tensor]:
    """Both."""
    owner, cover = coverage(clips, device)
    behind = torch.tensor([BACKGROUNDS[clip.background] for clip in clips], device=device) / 127.5 - 1
    colour = torch.tensor([COLOURS[shape.colour] for clip in clips for shape in clip.shapes], device=device) / 127.5 - 1
    contrast = (colour - behind[owner])[:, :, None, None, None]
    video = behind[:, :, None, None, None].repeat(1, 1, FRAMES, HEIGHT, WIDTH)
    video.index_add_(0, owner, contrast * cover[:, None]).clamp_(-1, 1)
    return video, cover.new_zeros(len(clips), FRAMES, HEIGHT, WIDTH).index_add_(0, owner, cover)


def coverage(clips: list[Clip], device: torch.device | str) -> tuple[Tensor, Tensor]:
    """The clip that every item belongs to, (items,), and the item's mask, (items, f, y, x)."""
    x, y, radius, angle = (path.to(device)[:, :, None, None] for path in paths(clips))
    right = torch.arange(WIDTH, device=device) + 0.5 - x
    down = (torch.arange(HEIGHT, device=device) + 0.5).unsqueeze(1) - y
    outside = distance([shape.kind for clip in clips for shape in clip.shapes], right, down, radius, angle)
    owner = torch.tensor([i for i, clip in enumerate(clips) for _ in clip.shapes], device=device)
    return owner, outside.neg_().add_(0.5).clamp_(0, 1)


def distance(kinds: list[str], right: Tensor, down: Tensor, radius: Tensor, angle: Tensor) -> Tensor:
    """Signed distance from outlines, negative inside: (items, f, y, x); kind, radius and angle are given per item.

    Directions are folded into one half of one point of the star, where the outline is a single edge, from the tip to
    the inner corner: a line whose normal has the angle `tilt`, at `reach` radii from the centre.
    """
    rows = []
    for folds, outer, ratio, rest in map(KINDS.get, kinds):
        tilt = math.atan2(1 - ratio * math.cos(math.pi / folds), ratio * math.sin(math.pi / folds))
        rows.append((2 * math.pi / folds, tilt, outer * math.cos(tilt), rest))
    point, tilt, reach, rest = torch.tensor(rows, device=right.device).T[:, :, None, None, None]
    direction = torch.atan2(down, right) + (math.pi / 2 + point / 2 - rest - angle)  # from the tip, which is up
    folded = (direction.remainder_(point) - point / 2).abs_()
    return torch.hypot(right, down) * folded.sub_(tilt).cos_() - reach * radius


def paths(clips: list[Clip]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Centre x, centre y, radius (pixels) and angle (radians) of every item at every frame, each (items, f), on CPU."""
    rows = [
        (
            list(MOTIONS).index(shape.motion),
            SIZES[shape.size],
            KINDS[shape.kind][1],
            len(clip.shapes),
            i,
            *clip.jitter[JITTER * i : JITTER * (i + 1)],
        )
        for clip in clips
        for i, shape in enumerate(clip.shapes)
    ]
    motion, size, outer, count, side, jitter_x, jitter_y, phase, tilt, sense = torch.tensor(rows).T.unsqueeze(-1)
    left, right, up, down, bounce, spin, grow, shrink, orbit, _ = (motion == torch.arange(10)).float().T.unsqueeze(-1)
    time = torch.linspace(0, 1, FRAMES)
    sweep = 2 * time - 1
    turn = torch.where(sense < 0.5, -1.0, 1.0)
    short = torch.where(size < 16, 20.0, 16.0)  # fits a square of the frame's height; a lone shape has more width
    travel_x = torch.where(count == 1, 35.0, short) * (left + right) + short * orbit
    travel_y = short * (up + down + bounce + orbit)
    room = size * outer * (1 + 0.4 * (grow + shrink)) + 1.5
    spare_x = (WIDTH / 2 / count - room - travel_x).clamp(0, 20)
    spare_y = (HEIGHT / 2 - room - travel_y).clamp(0, 12)
    around = 2 * math.pi * (phase + turn * time)
    hop = 1 - 2 * (2 * math.pi * time).sin().abs()  # from the ground up and back, twice
    x = travel_x * ((right - left) * sweep + orbit * around.cos()) + spare_x * (2 * jitter_x - 1)
    y = travel_y * ((down - up) * sweep + orbit * around.sin() + bounce * hop) + spare_y * (2 * jitter_y - 1)
    radius = size * (1 + 0.4 * (grow - shrink) * sweep)
    angle = spin * (2 * math.pi * tilt + turn * math.pi * time) + (1 - spin) * 0.3 * (tilt - 0.5)
    return x + WIDTH * (side + 0.5) / count, y + HEIGHT / 2, radius, angle
