"""One process as one rank of many: a world of any size whose collectives are copies within this device's own memory.

    open_world(72) -> rank 0 of 72; the mesh, the schemes and the counters run as they are on the rack

      all-to-all, shift     what was to be sent comes back          reduce-scatter  the entries are summed as if they had come
      all-gather            p copies of one's own                   all-reduce, broadcast  nothing moves

So the kernels see the very shapes of a rank of the rack, and memory moves as many bytes as a rank receives: what is left to
add is the time of the links. The numbers are no video's: every peer is taken to have this rank's own. For nanovgen.bench.
"""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _create_work_from_future

BACKEND = "alone"


class Alone(dist.ProcessGroup):
    """A group of which only this rank exists. It has the methods that torch calls for mesh.py's collectives."""

    def __init__(self, rank: int, size: int):
        super().__init__(rank, size)
        self.ranks, self.under_way = size, None

    def size(self) -> int:
        return self.ranks

    @property
    def group_name(self) -> str:
        return dist.distributed_c10d._world.pg_names[self]

    def alltoall_base(self, out: Tensor, x: Tensor, out_sizes: list, sizes: list, options: object) -> dist.Work:
        out.copy_(x)
        return done()

    def _allgather_base(self, out: Tensor, x: Tensor, options: object) -> dist.Work:
        out.view(self.ranks, -1).copy_(x.view(1, -1))
        return done()

    all_gather_single = _allgather_base  # torch 2.13's name

    def allgather(self, outs: list[list[Tensor]], tensors: list[Tensor], options: object) -> dist.Work:
        """What all_gather_object is made of."""
        for copies, x in zip(outs, tensors, strict=True):
            for out in copies:
                out.copy_(x)
        return done()

    def _reduce_scatter_base(self, out: Tensor, x: Tensor, options: object) -> dist.Work:
        torch.sum(x.view(self.ranks, -1), 0, out=out)
        return done()

    reduce_scatter_single = _reduce_scatter_base

    def allreduce(self, tensors: list[Tensor], options: object) -> dist.Work:
        return done()

    def broadcast(self, tensors: list[Tensor], options: object) -> dist.Work:
        return done()

    def send(self, tensors: list[Tensor], to: int, tag: int) -> dist.Work:
        self.under_way = tensors[0]
        return done()

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> dist.Work:
        """What was sent last: mesh.py's rank 0 sends before it receives."""
        tensors[0].copy_(self.under_way)
        return done()


def done() -> dist.Work:
    future = torch.futures.Future()
    future.set_result(None)
    return _create_work_from_future(future)


def open_world(size: int) -> None:
    """Be rank 0 of `size`, of which the others are not there."""
    if BACKEND.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(BACKEND, lambda store, rank, ranks, timeout: Alone(rank, ranks), devices=["cpu", "cuda"])
    dist.init_process_group(BACKEND, store=dist.HashStore(), rank=0, world_size=size, timeout=timedelta(seconds=60))
