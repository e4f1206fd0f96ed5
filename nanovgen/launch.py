"""Start N ranks on this machine: forked from one parent that has imported torch, so 72 of them are up in seconds.

A rank that raises ends all of them: the first error is shown with its rank, the rest are killed, and the status is 1. So
does a rank that is killed. torchrun does the same for GPUs; this is for CPU ranks (gloo), and for the tests.
"""

import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import wait

import torch

from nanovgen import mesh


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run_ranks(ranks: int, work: Callable[[], object], patience: float = 10.0) -> int:
    """Run work() on `ranks` forked gloo ranks of one world; returns an exit status, 0 if all ranks returned.

    work() finds the world joined. After the first failure the others get `patience` seconds before they are killed.
    """
    context, port = get_context("fork"), free_port()
    errors = context.SimpleQueue()
    processes = [context.Process(target=_rank, args=(rank, ranks, port, work, errors)) for rank in range(ranks)]
    for process in processes:
        process.start()
    try:
        failed = _watch(processes)
    except KeyboardInterrupt:
        failed = "interrupted"
    _end(processes)
    if failed is None:
        return 0
    rank, text = errors.get() if not errors.empty() else (None, failed)
    print(text if rank is None else f"rank {rank}: {text}", file=sys.stderr)
    return 1


def _watch(processes: list) -> str | None:
    """Wait for all to end well (None), or for the first that does not."""
    alive = {process.sentinel: rank for rank, process in enumerate(processes)}
    while alive:
        for sentinel in wait(list(alive)):
            rank = alive.pop(sentinel)
            processes[rank].join()
            code = processes[rank].exitcode
            if code:
                return f"rank {rank} " + (f"was killed by signal {-code}" if code < 0 else f"ended with status {code}")
    return None


def _end(processes: list) -> None:
    for process in processes:
        if process.is_alive():
            os.kill(process.pid, signal.SIGKILL)
    for process in processes:
        process.join()


def _rank(rank: int, ranks: int, port: int, work: Callable[[], object], errors: object) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends us
    try:
        mesh.open_world(torch.device("cpu"))
        work()
        mesh.close_world()
    except BaseException as error:
        errors.put((rank, "".join(traceback.format_exception(error)) if not isinstance(error, ValueError) else str(error)))
        sys.stdout.flush()
        time.sleep(0.1)  # let the queue's pipe take it before we are gone
        os._exit(1)
