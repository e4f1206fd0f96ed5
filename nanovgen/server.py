"""Rank 0 of a server: the main thread works on one order after the other, beside it HTTP, and a thread that waits for the end.

loading -> warming up -> ok (/health 200) -> why it ends (503, for a moment) -> gone
"""

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import NoReturn

import torch
import uvicorn
from fastapi import FastAPI

from nanovgen import generate, ranks
from nanovgen.api import Desk, make_app
from nanovgen.asked import Limits
from nanovgen.gauges import Metrics
from nanovgen.job import Job
from nanovgen.orders import Order, Orders, tidy, way_on
from nanovgen.preview import Previewer
from nanovgen.ranks import Ranks
from nanovgen.vae import VAE

LINGER, ENDING = 1.0, 2.0  # seconds: of /health's last word at least, until the end is forced


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

    def __init__(self, base: Job, forked: bool, orders: Orders, limits: Limits):
        self.base, self.forked, self.orders = base, forked, orders
        self.metrics = Metrics(orders, lambda: self.desk.health == "ok")
        self.desk = Desk(orders, None, self.metrics, limits)
        self.over = threading.Event()  # the main thread has let go
        self.ending = threading.Lock()
        self.main = threading.get_ident()

    def run(self, listener: socket.socket, host: str, token: str | None) -> NoReturn:
        """Serve until the end, which `end` brings. For the main thread."""
        signal.signal(signal.SIGUSR2, interrupt)
        endings = {n for n in (signal.SIGTERM, signal.SIGINT) if signal.getsignal(n) != signal.SIG_IGN}  # a fork ignores Ctrl-C
        signal.pthread_sigmask(signal.SIG_BLOCK, endings)  # in all threads started from here on
        threading.Thread(target=self.wait_for_end, args=(endings,), name="signals", daemon=True).start()
        http = start_http(make_app(self.desk, host, token), listener)
        try:
            self.desk.ranks = Ranks(self.base, self.forked, lambda why: self.end(why, 1))
            vae = self.warm_up()
            self.desk.health = "ok"
            print(f"serving   http://{':'.join(map(str, listener.getsockname()[:2]))}", flush=True)
            while http.is_alive():
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
        tidy(self.orders.folder)
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
            self.fail(order, f"the server ended ({self.desk.health})" + (f": {word}" if str(word) else ""))
            raise
        if report is None:
            self.fail(order, error)
            return
        self.orders.end(order, report)
        self.metrics.ended(order)

    def fail(self, order: Order, why: str) -> None:
        self.orders.end(order, error=why if "python run.py" in why else f"{why}; {way_on(order.request)}")
        self.metrics.ended(order)

    def wait_for_end(self, endings: set[signal.Signals]) -> None:
        """The thread for signals: it runs even where the main thread waits for a lost rank inside a collective."""
        signal.sigwait(endings)
        alone = self.base.recipe.parallel_config.world == 1
        self.end("told to end" + ("" if alone else ", as when another rank is lost"), 130)

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
            self.fail(order, f"the server ended ({why})" + (f": {known}" if known else ""))
        self.orders.close()
        time.sleep(max(0.0, LINGER - (time.monotonic() - start)))
        os._exit(status)


def interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


def start_http(app: FastAPI, listener: socket.socket) -> threading.Thread:
    config = uvicorn.Config(app, log_level="warning", access_log=False, lifespan="off", limit_concurrency=512, ws="none")
    thread = threading.Thread(target=uvicorn.Server(config).run, args=([listener],), name="http", daemon=True)
    thread.start()
    return thread
