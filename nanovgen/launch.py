"""Start N ranks on this machine: forked from one parent that has imported torch, so 72 of them are up in seconds.

A rank that raises ends all of them: the first error is shown with its rank, the rest are killed, and the status is 1. So
does a rank that is killed. torchrun does the same for GPUs; this is for CPU ranks (gloo), and for the tests.
"""

import gc
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing import get_context, parent_process
from multiprocessing.connection import wait

import torch

from nanovgen import mesh

ENDINGS = (signal.SIGINT, signal.SIGTERM)


def reserve_port() -> socket.socket:
    """A socket whose port nobody else is given while it is open: bound, and left to the first rank's store to listen on."""
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # the store's has it too: then both may bind, and one listen
    held.bind(("127.0.0.1", 0))
    return held


def run_ranks(ranks: int, work: Callable[[], object]) -> int:
    """Run work() on `ranks` forked ranks; the exit status: 0 if all returned, 1 if one failed, 130 if interrupted.

    The ranks find torchrun's environment and join the world themselves (mesh.open_world).
    """
    context, held = get_context("fork"), reserve_port()
    errors, words = context.SimpleQueue(), context.SimpleQueue()
    given = ranks, held.getsockname()[1], work, errors, words
    processes = [context.Process(target=_rank, args=(rank, *given), daemon=True) for rank in range(ranks)]
    before = signal.signal(signal.SIGTERM, _interrupt)  # else `kill` and `timeout` would leave the ranks running
    try:
        signal.pthread_sigmask(signal.SIG_BLOCK, ENDINGS)  # until each rank has its own handlers
        gc.freeze()  # else a rank's first collection would write to, and so copy, every page that it shares with us
        for process in processes:
            process.start()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDINGS)
        failed = _watch(processes)
    except KeyboardInterrupt:
        _end(processes)
        left = "" if words.empty() else f"; {words.get()}"
        print(f"interrupted; all ranks have ended{left}", file=sys.stderr)
        return 130
    finally:
        held.close()
        gc.unfreeze()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDINGS)  # also where a fork failed
        signal.signal(signal.SIGTERM, before)
    if failed is None:
        return 0
    killed, text = failed
    if not killed and not errors.empty():
        text = errors.get()  # the first one that was reported, not a neighbour's broken connection
    _end(processes)
    print(text, file=sys.stderr)
    return 1


def _watch(processes: list) -> tuple[bool, str] | None:
    """Wait for all to end well (None), or for the first that does not: whether by a signal, and what to say."""
    alive = {process.sentinel: rank for rank, process in enumerate(processes)}
    while alive:
        ended = [alive.pop(sentinel) for sentinel in wait(list(alive))]
        for rank in ended:
            processes[rank].join()
        codes = {rank: processes[rank].exitcode for rank in ended if processes[rank].exitcode}
        for rank, code in codes.items():
            if code < 0:
                return True, f"rank {rank} was killed by signal {-code}"
        for rank, code in codes.items():
            return False, f"rank {rank} ended with status {code}"
    return None


def _end(processes: list, patience: float = 3.0) -> None:
    """Ask all to end, so that a half-written file is removed; then insist."""
    for process in processes:
        process.terminate()
    deadline = time.monotonic() + patience
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
    for process in processes:
        process.kill()
        process.join()


def _interrupt(number: int, frame: object) -> None:
    signal.signal(number, signal.SIG_IGN)  # once: a second one would break off the tidying
    raise KeyboardInterrupt


def _interrupt_again(lost: object) -> None:
    """Python drops what a destructor raises, and an interruption may come in one: it comes again soon, outside."""
    if isinstance(lost.exc_value, KeyboardInterrupt):
        signal.signal(signal.SIGALRM, _interrupt)
        signal.setitimer(signal.ITIMER_REAL, 0.01)
    else:
        sys.__unraisablehook__(lost)


def _die_with_parent() -> None:
    """A parent that was killed can end nobody, and a rank that waits for its peers would never notice."""
    wait([parent_process().sentinel])
    os._exit(1)


def _rank(rank: int, ranks: int, port: int, work: Callable[[], object], errors: object, words: object) -> None:
    """A rank's life. What failed goes to `errors`; where it was interrupted, what is safe goes to `words`."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    # Never more than the parent's: a pool of threads that it has started is not in the fork, and using it would hang.
    torch.set_num_threads(min(torch.get_num_threads(), max(1, (os.cpu_count() or 1) // ranks)))
    threading.Thread(target=_die_with_parent, daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal sends it to all; the parent decides
    signal.signal(signal.SIGTERM, _interrupt)
    sys.unraisablehook = _interrupt_again
    try:
        try:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDINGS)
            work()
            mesh.close_world()
            return
        except (ValueError, RuntimeError, FloatingPointError, OSError) as error:
            text = f"rank {rank}: {error}"
        except (Exception, SystemExit):
            text = f"rank {rank}: {traceback.format_exc()}"
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # or the parent, which saw another end, would interrupt the report
        errors.put(text)
        os._exit(1)  # at once: tidying up would wait for peers that wait for us
    except KeyboardInterrupt as error:
        if str(error):
            words.put(f"rank {rank}: {error}")
        os._exit(130)
