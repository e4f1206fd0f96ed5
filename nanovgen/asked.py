"""What a client may ask for: the fields of a video request, in the shapes of OpenAI's videos API and NVIDIA's VisualGen.

Everything a client sends ends here: in a Request whose paths are the server's own, or in one line that says why not.
"""

import base64
import binascii
import io
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from PIL import Image
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator

from nanovgen.recipe import Request, parse_size

IMAGE_PIXELS, FORMATS = 2**25, ("PNG", "JPEG", "WEBP")  # of an uploaded image


@dataclass(frozen=True)
class Limits:
    """What one request may take."""

    body: int = 2**24  # bytes
    pixels: int = 1280 * 720 * 200  # of all frames together
    steps: int = 100


def no_bool(value: object) -> object:
    if isinstance(value, bool):
        raise ValueError("true and false are no numbers")
    return value


Whole = Annotated[int, BeforeValidator(no_bool)]
Real = Annotated[float, BeforeValidator(no_bool), Field(allow_inf_nan=False)]


class Reference(BaseModel):
    """An image inside the request. Nothing is fetched: the URL holds the image itself."""

    model_config = ConfigDict(extra="forbid")
    image_url: str


class Asked(BaseModel):
    """The body of POST /v1/videos, as JSON or as a form. What is not given is the server's default."""

    model_config = ConfigDict(extra="forbid")
    prompt: str = Field(min_length=1, max_length=8192)
    model: str | None = Field(None, max_length=256, description="the one that is served, if given")
    size: str | None = Field(None, pattern=r"^[0-9]{1,5}x[0-9]{1,5}$", description="WIDTHxHEIGHT, multiples of 16")
    seconds: Real | None = Field(None, gt=0, le=3600, description="rounded up to whole latent frames, of 4 frames each")
    num_frames: Whole | None = Field(None, ge=1, le=10**6, description="4k+1; in place of seconds")
    fps: Whole | None = Field(None, ge=1, le=240)
    num_inference_steps: Whole | None = Field(None, ge=1)
    guidance_scale: Real | None = Field(None, ge=0, le=1000)
    guidance_scale_2: Real | None = Field(None, ge=0, le=1000, description="of the low-noise expert")
    negative_prompt: str | None = Field(None, max_length=8192)
    seed: Whole | None = Field(None, ge=0, lt=2**64)
    input_reference: str | Reference | None = Field(None, description="first frame: base64, or a data: URL")

    @field_validator("prompt", "negative_prompt")
    @classmethod
    def plain(cls, text: str | None) -> str | None:
        if text is not None and any(0xD800 <= ord(c) < 0xE000 or c == "\0" for c in text):
            raise ValueError("the text has characters that no text has: lone surrogates or zeros")
        return text

    @field_validator("negative_prompt")
    @classmethod
    def no_file(cls, text: str | None) -> str | None:
        if text is not None and text.startswith("@"):
            raise ValueError("a negative prompt that begins with @ names a file on the command line; here it may not")
        return text


def to_request(asked: Asked, base: Request, limits: Limits, out: Path) -> Request:
    """`base` is the server's own request, with every default filled in. Raises ValueError."""
    if asked.model not in (None, base.model):
        raise ValueError(f"this server has {base.model}, not {asked.model!r}; leave model out")
    if asked.seconds is not None and asked.num_frames is not None:
        raise ValueError("seconds and num_frames say the same; give one of them")
    own = {"size": asked.size, "frames": asked.num_frames, "fps": asked.fps, "steps": asked.num_inference_steps,
           "guidance": asked.guidance_scale, "guidance_low": asked.guidance_scale_2, "negative_prompt": asked.negative_prompt,
           "seed": asked.seed}  # fmt: skip
    request = replace(base, prompt=asked.prompt, out=str(out), image=None, **{k: v for k, v in own.items() if v is not None})
    if asked.seconds is not None:
        request = replace(request, frames=4 * max(0, math.ceil((asked.seconds * request.fps - 1) / 4)) + 1)
    if request.guidance_low is not None and base.guidance_low is None:
        raise ValueError(f"{base.model} has one transformer; leave guidance_scale_2 out")
    width, height = parse_size(request.size)
    if width * height * request.frames > limits.pixels:
        raise ValueError(f"{request.size} in {request.frames} frames is {width * height * request.frames / 1e6:.1f} megapixels; "
                         f"this server makes up to {limits.pixels / 1e6:.1f}")  # fmt: skip
    if request.steps > limits.steps:
        raise ValueError(f"num_inference_steps is {request.steps}; this server makes up to {limits.steps}")
    return request


def decode_reference(given: str | Reference) -> bytes:
    """The bytes inside the JSON. Raises ValueError."""
    text = given.image_url if isinstance(given, Reference) else given
    if text.startswith("data:"):
        head, comma, text = text.partition(",")
        if not comma or not head.endswith(";base64"):
            raise ValueError("input_reference: a data: URL must end its head in ;base64 and a comma")
    elif isinstance(given, Reference):
        raise ValueError("input_reference: only data: URLs are taken; nothing is fetched")
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise ValueError("input_reference is not base64") from None


def save_image(data: bytes, path: Path) -> None:
    """Decode an upload and keep its pixels as a PNG of our own. Raises ValueError, or OSError where it cannot be written."""
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            if image.width * image.height > IMAGE_PIXELS:
                raise ValueError(f"it has {image.width}x{image.height} pixels; {IMAGE_PIXELS} are the most")
            pixels = image.convert("RGB")
    except Exception as error:  # Pillow's decoders raise many kinds
        raise ValueError(f"input_reference is no PNG, JPEG or WebP that can be read: {error}") from None
    pixels.save(path, "PNG", compress_level=1)
