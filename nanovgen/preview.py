"""A picture of the video while it is being made: x0 = x - sigma v, as the last step saw it, decoded by its VAE.

The VAE is causal, so the first latent frame alone decodes to the video's first frame, and nothing else need be decoded.
Where the first frame is given (image-to-video), it is the fifth frame, of two latent frames. One rank decodes and the
others wait, so previews take at most SHARE of the time.
"""

import io
import time

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from nanovgen import video
from nanovgen.job import Job
from nanovgen.vae import VAE

SHARE, PAUSE, LONGEST = 0.02, 0.5, 640  # of the time; seconds between two at least; pixels of the longer side at most


class Previewer:
    """Makes the previews of one order on one rank: `look` after each step."""

    def __init__(self, vae: VAE):
        self.vae, self.next = vae, 0.0

    def look(self, job: Job, i: int, x: Tensor, v: Tensor) -> bytes | None:
        """A JPEG, where it is time for one: x (1, c, f, y, x) is the sample before step i, v its velocity."""
        start = time.monotonic()
        if start < self.next:
            return None
        frames = 1 if job.request.image is None else 2
        try:
            pixels = video.to_pixels(list(self.vae.decode((x - float(job.sigmas[i]) * v)[:, :, :frames], None))[-1])
        except torch.cuda.OutOfMemoryError:  # a picture is not worth the video
            self.next = float("inf")
            return None
        now = time.monotonic()
        self.next = now + max(PAUSE, (now - start) / SHARE)
        return jpeg(pixels[-1])


def jpeg(pixels: np.ndarray) -> bytes:
    """uint8 (y, x, 3), shrunk where it is larger than a preview need be."""
    picture, buffer = Image.fromarray(pixels), io.BytesIO()
    picture.thumbnail((LONGEST, LONGEST))
    picture.save(buffer, "JPEG", quality=85)
    return buffer.getvalue()
