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
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TextIO

import torch
from PIL import Image

from nanovgen import generate, launch, orders, ranks, summary
from nanovgen import job as jobs
from nanovgen.job import Job
from nanovgen.orders import Order, Orders
from nanovgen.preview import Previewer
from nanovgen.ranks import Ranks
from nanovgen.recipe import Recipe, Request, add_flags, choose
from nanovgen.vae import VAE

LINGER, ENDING = 1.0, 2.0  # seconds: of /health's last word at least, until the end is forced
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
        from nanovgen import client

        return client.main(arguments[1:])
    args = parse(arguments)
    rank, launched = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))  # torchrun's
    listener = lock = None
    try:
        request, recipe = choose(args, launched)
        world = args.ranks or launched
        token = read_token(args.token_file)
        if rank == 0:
            check_installed()
            listener, lock = listen(args.host, args.port), hold(args.folder)
        base = prepare(args, request, recipe, world)
    except ValueError as error:
        if rank == 0:
            print(f"nanovgen.serve: {error}", file=sys.stderr)
        return 2
    if rank == 0:
        for name, line in summary.describe(base).items():
            if name not in ("prompt", "output"):
                print(f"{name:<9} {line}", flush=True)
        if args.host not in ("127.0.0.1", "localhost", "::1") and token is None:
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


def read_token(path: Path | None) -> str | None:
    if path is None:
        return None
    try:
        token = path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"token file {path} cannot be read: {error}") from None
    if not token or not token.isascii() or any(c.isspace() for c in token):
        raise ValueError(f"token file {path} must hold one word of plain ASCII")
    return token


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
    forked, out = args.ranks is not None, str(args.folder / "warm-up.mp4")
    request = replace(request, prompt="a grey wall", out=out)
    if takes_image(request.model):
        request = replace(request, image=str(args.folder / "warm-up.image.png"))
        if int(os.environ.get("RANK", 0)) == 0:
            Image.new("RGB", (64, 64), (128, 128, 128)).save(request.image)
    base = jobs.prepare(request, recipe, world=world, forked=forked)
    kept = jobs.Kept(everything=True)
    if args.keep == "no" or (args.keep == "auto" and summary.predicted_peak(replace(base, kept=kept)) > memory(base) * 0.9):
        kept = jobs.Kept()
    return replace(base, kept=kept)


def takes_image(model: str) -> bool:
    return jobs.find_preset(model)[1].transformer.get("in_channels", 16) > 16


def memory(job: Job) -> int:
    """Bytes of the device, or of this machine for each of its ranks."""
    if job.device.type == "cuda":
        return torch.cuda.get_device_properties(job.device).total_memory
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // job.recipe.parallel_config.world


def run_rank(args: argparse.Namespace, base: Job, listener: socket.socket | None, token: str | None) -> int:
    """One rank, from joining the others to the end."""
    forked = args.ranks is not None
    if int(os.environ.get("RANK", 0)) == 0:
        return Server(args, base, listener, token).run()
    if listener is not None:
        listener.close()  # inherited: the port must be free when rank 0 is gone
    others = Ranks(base, forked, give_up)
    while True:
        others.run(others.take(), ranks.Stages(others.base.device))


def give_up(why: str) -> None:
    print(f"nanovgen.serve: ending: {why}", file=sys.stderr, flush=True)
    os._exit(1)


class Watched(ranks.Stages):
    """Rank 0's: tells how far the order is, and when to stop."""

    def __init__(self, device: torch.device, order: Order, vae: VAE):
        super().__init__(device)
        self.order, self.previewer = order, Previewer(vae)

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        self.order.tell(stage=name)
        with super().__call__(name):
            yield

    def wanted(self) -> bool:
        return not self.order.unwanted

    def step(self, job: Job, i: int, x: torch.Tensor, v: torch.Tensor) -> None:
        super().step(job, i, x, v)
        self.order.preview = self.previewer.look(job, i, x, v) or self.order.preview
        self.order.tell(step=i + 1)


class Server:
    """Rank 0."""

    def __init__(self, args: argparse.Namespace, base: Job, listener: socket.socket, token: str | None):
        from nanovgen import api, asked, metrics  # the other ranks need no HTTP

        limits = asked.Limits(args.max_body * 10**6, int(args.max_megapixels * 1e6), args.max_steps)
        self.orders = Orders(args.folder, args.waiting)
        self.metrics = metrics.Metrics(self.orders, lambda: self.desk.health == "ok")
        self.desk = api.Desk(self.orders, None, self.metrics, limits)
        self.base, self.forked, self.listener = base, args.ranks is not None, listener
        self.http = self.make_http(api.make_app(self.desk, args.host, token))
        self.over = threading.Event()  # the main thread has let go
        self.ending = threading.Lock()
        self.main = threading.get_ident()

    def make_http(self, app: object) -> threading.Thread:
        import uvicorn

        config = uvicorn.Config(app, log_level="warning", access_log=False, lifespan="off", limit_concurrency=512, ws="none")
        return threading.Thread(target=uvicorn.Server(config).run, args=([self.listener],), name="http", daemon=True)

    def run(self) -> int:
        """Serve until the end, which `end` brings; returns only where the warm-up failed."""
        signal.signal(signal.SIGUSR2, interrupt)
        endings = {signal.SIGTERM} if self.forked else {signal.SIGTERM, signal.SIGINT}  # forked: Ctrl-C is the parent's
        signal.pthread_sigmask(signal.SIG_BLOCK, endings)  # in all threads started from here on
        threading.Thread(target=self.wait_for_end, args=(endings,), name="signals", daemon=True).start()
        self.http.start()
        try:
            self.desk.ranks = Ranks(self.base, self.forked, lambda why: self.end(why, 1))
            vae = self.warm_up()
            self.desk.health = "ok"
            print(f"serving   http://{':'.join(map(str, self.listener.getsockname()[:2]))}", flush=True)
            while self.http.is_alive():
                order = self.orders.take(0.5)
                if order is not None:
                    self.make(order, vae)
            why = "the HTTP thread has ended"
        except KeyboardInterrupt:
            why = None  # `end` knows
        except (RuntimeError, ValueError, OSError) as error:
            why = " ".join(str(error).split())
        self.over.set()
        if why:
            self.end(why, 1)
        while True:  # `end` ends the process
            time.sleep(1)

    def warm_up(self) -> VAE:
        """A short video, thrown away: every weight, compiled shape and the encoder are used once. The VAE, for previews."""
        self.desk.health = "warming up"
        others, request = self.desk.ranks, self.base.request
        wanted = {self.base.expert(t) for t in self.base.times}
        short = (others.prepare(replace(request, steps=steps)) for steps in range(1, request.steps + 1))
        request = next(job.request for job in short if {job.expert(t) for t in job.times} == wanted)
        others.post(request)
        _, failed = others.run(request, ranks.Stages(others.base.device))
        orders.tidy(self.orders.folder)
        if failed:
            raise RuntimeError(f"the warm-up failed: {failed}")
        return generate.load(others.base, "vae", generate.Stages(others.base.device))

    def make(self, order: Order, vae: VAE) -> None:
        """One order, to its end."""
        others, own = self.desk.ranks, self.base.request
        report = None
        try:
            if order.request.model != own.model:
                raise ValueError(f"it was asked of {order.request.model}, and this server has {own.model}")
            request = replace(order.request, device=own.device, dtype=own.dtype, vae_dtype=own.vae_dtype)
            others.prepare(request)
            others.post(request)
            self.metrics.started.inc()
            report, error = others.run(request, Watched(others.base.device, order, vae))
        except ValueError as refusal:  # before any rank heard of it
            error = str(refusal)
        except KeyboardInterrupt as word:
            self.fail(order, str(word) or "the server was told to end")
            raise
        if report is None:
            self.fail(order, error)
            return
        self.orders.end(order, report)
        self.metrics.ended(order)

    def fail(self, order: Order, why: str) -> None:
        self.orders.end(order, error=why if "python run.py" in why else f"{why}; {orders.way_on(order.request)}")
        self.metrics.ended(order)

    def wait_for_end(self, endings: set[signal.Signals]) -> None:
        """The thread for signals: it runs even where the main thread waits for a lost rank inside a collective."""
        signal.sigwait(endings)
        self.end("told to end", 130)

    def end(self, why: str, status: int) -> None:
        """Say so on /health for a moment, let the main thread write down what is lost, and end. From any thread, once."""
        if not self.ending.acquire(blocking=False):
            return
        self.desk.health = why
        print(f"nanovgen.serve: ending: {why}", file=sys.stderr, flush=True)
        threading.Thread(target=self.leave, args=(why, status), name="end", daemon=True).start()

    def leave(self, why: str, status: int) -> None:
        start = time.monotonic()
        if not self.over.is_set():
            signal.pthread_kill(self.main, signal.SIGUSR2)
        self.over.wait(ENDING)
        if (order := self.orders.current) is not None:  # the main thread is still stuck
            known = self.desk.ranks.failure if self.desk.ranks else None
            self.fail(order, f"{why}; {known}" if known else why)
        self.orders.close()
        time.sleep(max(0.0, LINGER - (time.monotonic() - start)))
        os._exit(status)


def interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
