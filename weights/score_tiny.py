"""Score a tiny checkpoint through the real pipeline: does each clip show what its caption says?

    python weights/score_tiny.py weights/tiny-wan --clips 96 --dtype float32 --workers 2
    python weights/score_tiny.py weights/tiny-cosmos --from-image           # each clip from its own first frame and caption

Captions are held out (clip_world keeps one description in 16 from training); clip_reader looks at the clips and is told
only how many shapes to expect. The VAE's round trip is scored on held-out clips too: PSNR of whole clips and inside
the shapes, each the mean over clips.
"""

import argparse
import json
import random
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory

import clip_reader
import clip_world
import torch
from PIL import Image
from torch import Tensor

from nanovgen import generate
from nanovgen import job as jobs
from nanovgen.recipe import Request


def make_clip(request: Request) -> Tensor:
    """One caption through the real pipeline, to uint8 pixels (3, f, y, x); no file is written."""
    torch.set_num_threads(1)
    ready = jobs.prepare(request)
    stages = generate.Stages(ready.device)
    with torch.inference_mode():
        texts = generate.encode_texts(ready, stages)
        condition = generate.image_condition(ready, stages) if request.image else None
        latents = generate.denoise(ready, texts, condition, stages)
        vae = generate.load(ready, "vae", stages)
        video = torch.cat(list(vae.decode(latents, None)), dim=2)[0]
    return ((video + 1) * 127.5).round().to(torch.uint8).cpu()


def make_clips(clips: list[clip_world.Clip], captions: list[str], args: argparse.Namespace) -> list[Tensor]:
    common = dict(model=str(args.folder), dtype=args.dtype, device=args.device, out="/tmp/unused.mp4")
    with TemporaryDirectory() as folder:
        images = [first_frame(clip, Path(folder) / f"{i}.png") if args.from_image else None for i, clip in enumerate(clips)]
        requests = [Request(prompt=caption, image=image, seed=i, **common)
                    for i, (caption, image) in enumerate(zip(captions, images, strict=True))]  # fmt: skip
        if args.workers == 1:
            return [make_clip(request) for request in requests]
        with get_context("spawn").Pool(args.workers) as pool:
            return pool.map(make_clip, requests, chunksize=4)


def first_frame(clip: clip_world.Clip, path: Path) -> str:
    """Draw frame 0 of a clip into a file."""
    frame = (clip_world.render([clip], "cpu")[0, :, 0] + 1) * 127.5
    Image.fromarray(frame.round().to(torch.uint8).permute(1, 2, 0).contiguous().numpy()).save(path)
    return str(path)


def psnr(error: Tensor) -> float:
    return -10 * error.double().mean().log10().item()


def round_trip(args: argparse.Namespace, count: int = 32) -> dict[str, float]:
    """PSNR in dB of held-out clips through encoder and decoder; signals run from -1 to 1, so errors are halved."""
    ready = jobs.prepare(Request(prompt="-", model=str(args.folder), device=args.device, out="/tmp/unused.mp4"))
    vae, rng, whole, inside = generate.load(ready, "vae", generate.Stages(ready.device)), random.Random(7), [], []
    with torch.inference_mode():
        for i in range(count):
            clips = [clip_world.sample_clip(rng, 1 + i % 2, held_out=True)]
            video, cover = clip_world.render(clips, ready.device), clip_world.masks(clips, ready.device) > 0.5
            found = torch.cat(list(vae.decode(vae.encode(video, None), None)), dim=2)
            error = ((found - video) / 2).square().mean(1)
            whole.append(psnr(error))
            inside.append(psnr(error[cover]))
    return {"vae_psnr": sum(whole) / count, "vae_psnr_worst": min(whole), "vae_psnr_inside": sum(inside) / count}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--clips", type=int, default=96, help="captions of one shape, and as many of two")
    parser.add_argument("--dtype", default="auto", help="of all but the VAE")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--from-image", action="store_true", help="give each clip's first frame too (image-to-video)")
    parser.add_argument("--seed", type=int, default=11, help="of the captions")
    parser.add_argument("--workers", type=int, default=1, help="processes, on the CPU")
    parser.add_argument("--save", type=Path, help="keep clips and captions here, for a look at the failures")
    args = parser.parse_args()
    results = {"folder": args.folder.name, "dtype": args.dtype, "from_image": args.from_image, **round_trip(args)}
    for shapes in (1, 2):
        rng = random.Random(args.seed + shapes)
        clips = [clip_world.sample_clip(rng, shapes, held_out=True) for _ in range(args.clips)]
        captions = [clip_world.caption(clip, rng) for clip in clips]
        videos = make_clips(clips, captions, args)
        results[f"{shapes}_shapes"] = clip_reader.score(clips, captions, (v.float() / 127.5 - 1 for v in videos))
        if args.save:
            torch.save((clips, captions, videos), args.save / f"{shapes}.pt")
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
