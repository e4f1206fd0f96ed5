"""Pushes: an all-to-all whose ranks write into each other's memory by their copy engines, beside the compute stream.

    compute stream | v | q ------ | k ------ | wait: v, q, k | attend | wait: o |    entry j of v lands in rank j's slot,
    side stream    |   | push v   | push q   | push k        |        | push o  |    then rank j's signal is raised

A `Pusher` belongs to one row of ranks and keeps, for each shape, 2 x AHEAD receive slots that all its ranks can address
(torch's symmetric memory). Exchange n uses slot n mod (2 AHEAD) on every rank. No second signal says that a slot has been
read; the first one does:

    rank j writes over exchange n in its exchange n + 2 AHEAD, before which it has waited for exchange n + AHEAD,
    which rank i signals after all that rank i issued before it started exchange n + AHEAD.

So what `wait` gives may be read by all work issued before AHEAD more exchanges have been started, and at most AHEAD may be
under way, waited for in their order. v, q and k of a layer are AHEAD exchanges; o's, the next, starts after the attention
that reads them has been issued.

Needs    one host, CUDA and peer access both ways; else `refusal` says what is missing, and the backend's collective is used.
         Extra memory: 2 AHEAD buffers of a shape, in place of the 3 that come and go.
Source   the copy-engine all-to-all of NVIDIA's VisualGen; PyTorch's symmetric memory.
"""

import os

import torch
import torch.distributed._symmetric_memory as symmetric_memory
from torch import Tensor
from torch.distributed import ProcessGroup

AHEAD = 3  # exchanges under way at once: v, q, k


def refusal(device: torch.device, degree: int) -> str | None:
    """Why the `degree` consecutive ranks of a row cannot push, by what this host has; None: they can.

    The facts are the host's (torchrun's count of its ranks, its devices), so all ranks of a row decide alike.
    """
    if device.type != "cuda":
        return f"{device.type} ranks share no memory"
    local = int(os.environ.get("LOCAL_WORLD_SIZE", 0))
    if not local:
        return "no ranks were launched here"
    if local % degree:
        return f"{degree} ranks of a row, {local} on a host"
    if torch.cuda.device_count() < local:
        return f"a rank sees {torch.cuda.device_count()} of {local} devices"
    for a in range(local):
        for b in range(local):
            if a != b and not torch.cuda.can_device_access_peer(a, b):
                return f"no peer access from device {a} to {b}"
    return None


class Slots:
    """The receive slots of one shape: (slot, p, ...) on every rank of the row, as seen from this one."""

    def __init__(self, like: Tensor, group: ProcessGroup):
        shape = (2 * AHEAD, *like.shape)
        # Not symmetric_memory.empty: its pool may put two shapes into one block, and then they share their signals.
        own = symmetric_memory._SymmetricMemory.empty_strided_p2p(
            shape, torch.empty(shape, device="meta").stride(), like.dtype, like.device
        )
        self.own, self.handle = own, symmetric_memory.rendezvous(own, group)
        self.of_rank = [self.handle.get_buffer(rank, shape, like.dtype) for rank in range(group.size())]
        self.started = self.waited = 0


class Pusher:
    """All-to-alls over one row of ranks of one host."""

    def __init__(self, group: ProcessGroup, device: torch.device):
        self.group, self.rank, self.size = group, group.rank(), group.size()
        self.stream = torch.cuda.Stream(device, priority=-1)  # signals are tiny kernels; let them in before large ones
        self.slots: dict[tuple, Slots] = {}

    def start(self, x: Tensor) -> "Push":
        """x (p, ...), contiguous and the same shape on every rank: entry j is on its way to rank j."""
        key = (x.shape, x.dtype)
        if key not in self.slots:
            with torch.inference_mode(False):  # the slots outlive the mode in which they are first used
                self.slots[key] = Slots(x, self.group)
        slots = self.slots[key]
        n, slots.started = slots.started, slots.started + 1
        assert n - slots.waited < AHEAD, "too many pushes under way"
        slot = n % (2 * AHEAD)
        self.stream.wait_stream(torch.cuda.current_stream())  # x is made, and all earlier results have been read
        with torch.cuda.stream(self.stream), torch.no_grad():
            for step in range(1, self.size + 1):  # to the next rank first, to itself last: no rank is written to by all at once
                peer = (self.rank + step) % self.size
                slots.of_rank[peer][slot, self.rank].copy_(x[peer], non_blocking=True)
                if peer != self.rank:
                    slots.handle.put_signal(peer, channel=slot)
        x.record_stream(self.stream)  # its memory is not given to another tensor before the copies are through
        return Push(self, slots, n)


class Push:
    """An exchange under way: `wait()` returns what has come, (p, ...), entry i from rank i."""

    def __init__(self, pusher: Pusher, slots: Slots, n: int):
        self.pusher, self.slots, self.n = pusher, slots, n
        self.slot = n % (2 * AHEAD)
        self.result = slots.own[self.slot]

    def wait(self) -> Tensor:
        assert self.n == self.slots.waited, "pushes are waited for in their order, once"
        self.slots.waited += 1
        with torch.cuda.stream(self.pusher.stream):
            for step in range(1, self.pusher.size):
                self.slots.handle.wait_signal((self.pusher.rank - step) % self.pusher.size, channel=self.slot)
        torch.cuda.current_stream().wait_stream(self.pusher.stream)
        return self.result


def way(device: torch.device, degree: int) -> str:
    """How a row of ranks exchanges, in words for the plan."""
    missing = refusal(device, degree)
    return "pushed into peers' memory" if missing is None else f"by the backend's collectives: {missing}"
