"""A server for one model: HTTP on rank 0, every request on all ranks, by the path that run.py takes.

    python -m nanovgen.serve                                                  # tiny-wan, one CPU rank, http://127.0.0.1:8000
    python -m nanovgen.serve --ranks 4 --recipe 4gpu                                                # forked CPU ranks
    torchrun --standalone --nproc-per-node 8 -m nanovgen.serve --recipe 8gpu --model Wan-AI/Wan2.2-T2V-A14B-Diffusers
    python -m nanovgen.serve bench --url http://127.0.0.1:8000                                      # how fast it answers

The flags of run.py give what a request leaves out. Videos, latents and videos.sqlite lie in --folder. On rank 0 the main
thread works on one order after the other, HTTP has a thread of its own, and a third waits for the signal to end.
"""

import argparse
import fcntl
import os
import socket
import sys
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TextIO

from PIL import Image

from nanovgen import choose, client, launch, orders, summary
from nanovgen import job as jobs
from nanovgen.guard import LOOPBACK, read_token
from nanovgen.job import Job
from nanovgen.ranks import Ranks, Stages
from nanovgen.recipe import Recipe, Request, add_flags, from_flags

NOT_FLAGS = ("prompt", "image", "out", "latents")


def parse(arguments: list[str]) -> argparse.Namespace:
    p = argparse.ArgumentParser(prog="nanovgen.serve", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_flags(p, NOT_FLAGS)
    p.add_argument("--host", default="127.0.0.1", help="address to listen on; 0.0.0.0 for all (default 127.0.0.1)")
    p.add_argument("--port", type=int, default=8000, help="(default 8000)")
    p.add_argument("--folder", type=Path, default=Path("videos"), help="where the videos and their list lie (default videos)")
    p.add_argument("--token-file", type=Path, help="a file that holds the token which clients must show")
    p.add_argument("--waiting", type=int, default=8, help="orders that may wait; further ones are told 429 (default 8)")
    p.add_argument("--max-body", type=int, default=16, help="MB of a request, an image included (default 16)")
    p.add_argument("--max-megapixels", type=float, default=185, help="of all frames of a video (default 185)")
    p.add_argument("--max-steps", type=int, default=100, help="(default 100)")
    p.add_argument("--keep", default="auto", choices=["auto", "yes", "no"], 
                   help="hold the weights on the device between requests; auto: where they fit (default auto)")  # fmt: skip
    return p.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 1 a rank was lost or the warm-up failed, 2 refused before any weight was read, 130 told to end."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == ["bench"]:
        return client.main(arguments[1:])
    args = parse(arguments)
    rank, launched = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))  # torchrun's
    listener = lock = None
    try:
        request, recipe = from_flags(args, launched)
        world = args.ranks or launched
        token = read_token(args.token_file)
        if rank == 0:
            check_installed()
            listener, lock = listen(args.host, args.port), hold(args.folder)
        base = prepare(args, request, recipe, 1 if args.recipe is None else world)
        if args.recipe is None:
            base, _ = choose.choose(base, world)
    except ValueError as error:
        if rank == 0:
            print(f"nanovgen.serve: {error}", file=sys.stderr)
        return 2
    if rank == 0:
        for name, line in summary.describe(base).items():
            if name not in ("prompt", "output"):
                print(f"{name:<9} {line}", flush=True)
        if args.host not in LOOPBACK and token is None:
            print("open      anyone who reaches this port can make and read videos; --token-file asks for a token", flush=True)
    work = partial(run_rank, args, base, listener, token)
    if args.ranks is None or args.ranks == 1:
        return work()
    status = launch.run_ranks(args.ranks, work)
    orders.tidy(args.folder)  # what killed ranks left
    lock.close()
    sys.stdout.flush()
    os._exit(status)  # as the ranks end: the port is free at once


def check_installed() -> None:
    try:
        import fastapi  # noqa: F401
        import prometheus_client  # noqa: F401
        import python_multipart  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise ValueError(f"{error.name} is missing: pip install 'nanovgen[serve]'") from None


def listen(host: str, port: int) -> socket.socket:
    """The port is ours from here on, before anything is loaded."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # of connections that are over; a listener still refuses us
    try:
        listener.bind((host, port))
        listener.listen(128)
    except (OSError, OverflowError) as error:
        listener.close()
        raise ValueError(f"cannot listen on {host}, port {port}: {error}; give another --port or --host") from None
    return listener


def hold(folder: Path) -> TextIO:
    """The folder is ours from here on: two servers would take each other's orders for lost."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / ".lock").open("w")
    except OSError as error:
        raise ValueError(f"cannot write in {folder}: {error.strerror}; give another --folder") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ValueError(f"another server works in {folder}; give another --folder") from None
    orders.tidy(folder)
    return lock


def prepare(args: argparse.Namespace, request: Request, recipe: Recipe, world: int) -> Job:
    """The server's own job: what a request is filled up with, and, in as few steps as use every expert, the warm-up."""
    rank, image = int(os.environ.get("RANK", 0)), None
    if takes_image(request.model):
        image = (args.folder if rank == 0 else Path(tempfile.gettempdir())) / f"warm-up.{os.getpid()}.image.png"
        Image.new("RGB", (64, 64), (128, 128, 128)).save(image)
    request = replace(request, prompt="a grey wall", out=str(args.folder / "warm-up.mp4"), image=image and str(image))
    base = jobs.prepare(request, recipe, world=world, forked=args.ranks is not None)
    if image is not None and rank:
        image.unlink()  # the first rank's is what the warm-up uses
    kept = jobs.Kept(everything=True)
    needs, has = summary.predicted_peak(replace(base, kept=kept), summary.offloads(base)), summary.room(base.device, world)
    if args.keep == "no" or (args.keep == "auto" and needs > 0.9 * has):
        kept = jobs.Kept()
    return replace(base, kept=kept)


def takes_image(model: str) -> bool:
    return jobs.find_preset(model)[1].transformer.get("in_channels", 16) > 16


def run_rank(args: argparse.Namespace, base: Job, listener: socket.socket | None, token: str | None) -> int:
    """One rank, from joining the others to the end."""
    forked = args.ranks is not None
    if int(os.environ.get("RANK", 0)) == 0:
        from nanovgen import asked, server  # with FastAPI, which the other ranks do not need

        limits = asked.Limits(args.max_body * 10**6, int(args.max_megapixels * 1e6), args.max_steps)
        return server.Server(base, forked, orders.Orders(args.folder, args.waiting), limits).run(listener, args.host, token)
    if listener is not None:
        listener.close()  # inherited: the port must be free when rank 0 is gone
    others = Ranks(base, forked, give_up)
    while True:
        others.run(others.take(), Stages(others.base.device))


def give_up(why: str) -> None:
    print(f"nanovgen.serve: ending: {why}", file=sys.stderr, flush=True)
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
