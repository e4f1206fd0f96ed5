"""Who talks to whom: named axes of ranks on one DeviceMesh, and the collectives over one axis.

    world = cfg x tp x cp x ulysses, ulysses fastest                 e.g. cfg 2, ring 2, ulysses 2:

      cfg 0 | ring 0 | 0 1 |     cfg 1 | ring 0 | 4 5 |     ulysses: rows (0 1), (2 3), ..   ring: (0 2), (1 3), ..
            | ring 1 | 2 3 |           | ring 1 | 6 7 |     cfg: (0 4), (1 5), ..            seq: (0 1 2 3), (4 5 6 7)

cp is `ring`, or `kv_axis` x `q_axis` (rows x columns of Attention2D). `seq` is cp and ulysses flattened: what the tokens
are cut over. `vae` is an overlay of the first ranks of one CFG half (or of the world), chosen apart from the rest.

An axis of size 1 has no group and its collectives are the identity, so one process needs no process group and runs the
same lines as 72. Peers are always ranks within the axis, never global ones. Every collective takes and gives tensors
whose leading dim is the axis, sends contiguous buffers, and counts what this rank sends to others, by axis and kind.

Tokens: p chunks of ceil(S/p); the last may be short or empty. A collective pads a short chunk to the common size and
cuts what it gives back, so no rank ever computes with padding.
"""

import math
import os
from collections import Counter
from dataclasses import dataclass, field, replace
from datetime import timedelta

import torch
import torch.distributed as dist
from einops import rearrange
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from nanovgen import push

# torch 2.13 renamed these two.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
TIMEOUT = timedelta(seconds=300)  # of one collective: ranks load at their own pace, but a peer that late is dead


@dataclass(frozen=True)
class Axis:
    """A row of `size` ranks; `rank` is this process's place in the row. `sent` counts (axis, kind, unit) for the whole mesh."""

    name: str
    size: int = 1
    rank: int = 0
    group: dist.ProcessGroup | None = None
    sent: Counter = field(default_factory=Counter, compare=False, repr=False)
    pusher: push.Pusher | None = field(default=None, compare=False, repr=False)  # where its ranks can write to each other

    def count(self, kind: str, elements: int, itemsize: int) -> None:
        for unit, amount in (("calls", 1), ("elements", elements), ("bytes", elements * itemsize)):
            self.sent[self.name, kind, unit] += amount


NAMES = ("cfg", "tp", "ring", "kv_axis", "q_axis", "ulysses")  # the last one is the fastest


@dataclass(frozen=True)
class Mesh:
    """The axes of one run, and what they sent."""

    cfg: Axis = Axis("cfg")
    tp: Axis = Axis("tp")
    ring: Axis = Axis("ring")
    q_axis: Axis = Axis("q_axis")
    kv_axis: Axis = Axis("kv_axis")
    ulysses: Axis = Axis("ulysses")
    seq: Axis = Axis("seq")
    vae: Axis | None = Axis("vae")  # None on ranks outside the overlay
    world: Axis = Axis("world")
    sent: Counter = field(default_factory=Counter)

    def bytes_sent(self) -> dict[str, int]:
        """What this rank has sent so far, by axis."""
        total = Counter()
        for (axis, _, unit), amount in self.sent.items():
            total[axis] += amount if unit == "bytes" else 0
        return dict(total)

    def check_used(self, axes: list[str]) -> None:
        """Raises RuntimeError where an axis of several ranks carried nothing: then something ran unsharded."""
        for name in axes:
            axis = getattr(self, name)
            if axis.size > 1 and not any(n for (a, _, u), n in self.sent.items() if (a, u) == (name, "calls")):
                raise RuntimeError(f"{name} has {axis.size} ranks and exchanged nothing: the run was not spread as asked")


def open_store() -> dist.Store:
    """Where torchrun's (or launch.py's) ranks leave notes, whatever becomes of their groups; one process has its own."""
    return next(dist.rendezvous("env://"))[0] if "RANK" in os.environ else dist.HashStore()


def open_world(device: torch.device, store: dist.Store | None = None, name: str = "") -> torch.device:
    """Join the ranks that torchrun (or launch.py) started; returns this rank's own device. Not needed for one process.

    With a `store` of `open_store`, under a name: then a world that broke can be closed, and another one opened in its place.
    """
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    meet = {} if store is None else dict(store=dist.PrefixStore(name, store), rank=int(os.environ["RANK"]),
                                         world_size=int(os.environ["WORLD_SIZE"]))  # fmt: skip
    dist.init_process_group(backend, timeout=TIMEOUT, device_id=device if device.type == "cuda" else None, **meet)
    return device


def abort(mesh: Mesh) -> None:
    """Break off what this rank's groups are waiting for, from another thread: the collective raises, or gives rubbish."""
    for axis in (mesh.world, mesh.seq, mesh.vae, *(getattr(mesh, name) for name in NAMES)):
        if axis is not None and axis.group is not None:
            axis.group.abort()


def close_world() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def open_mesh(device: torch.device, degrees: dict[str, int], vae: int = 1) -> Mesh:
    """Axes of the given degrees (missing ones are 1) over all ranks; raises ValueError where the product is not the world."""
    sizes = [degrees.get(name, 1) for name in NAMES]
    world, sent = dist.get_world_size() if dist.is_initialized() else 1, Counter()
    if (product := math.prod(sizes)) != world:
        named = " x ".join(f"{name} {size}" for name, size in zip(NAMES, sizes, strict=True) if size > 1) or "1"
        raise ValueError(f"{named} = {product} ranks, and there are {world}")
    axes = {name: Axis(name, sent=sent) for name in (*NAMES, "seq", "vae", "world")}
    if world == 1:
        return Mesh(**axes, sent=sent)
    axes["world"] = _axis("world", dist.group.WORLD, sent)
    dims = {name: size for name, size in zip(NAMES, sizes, strict=True) if size > 1}
    mesh = init_device_mesh(device.type, tuple(dims.values()), mesh_dim_names=tuple(dims))
    for name in dims:
        axes[name] = _axis(name, mesh[name].get_group(), sent)
    if "ulysses" in dims and push.refusal(device, dims["ulysses"]) is None:
        axes["ulysses"] = replace(axes["ulysses"], pusher=push.Pusher(axes["ulysses"].group, device))
    tokens = tuple(name for name in ("ring", "kv_axis", "q_axis", "ulysses") if name in dims)
    if tokens:
        axes["seq"] = _axis("seq", (mesh[tokens]._flatten("seq") if len(tokens) > 1 else mesh[tokens[0]]).get_group(), sent)
    if vae > 1:
        group = dist.new_group(list(range(vae)), timeout=TIMEOUT)
        axes["vae"] = _axis("vae", group, sent) if dist.get_rank() < vae else None
    elif dist.get_rank():
        axes["vae"] = None
    return Mesh(**axes, sent=sent)


def _axis(name: str, group: dist.ProcessGroup, sent: Counter) -> Axis:
    return Axis(name, group.size(), dist.get_rank(group), group, sent)


# Tokens over an axis: p contiguous chunks of ceil(S/p), the last ones short or empty.


def chunk_range(size: int, ranks: int, rank: int) -> tuple[int, int]:
    """First and end entry of rank's chunk of `size` entries."""
    chunk = -(-size // ranks)
    return min(rank * chunk, size), min((rank + 1) * chunk, size)


@dataclass(frozen=True)
class Cut:
    """How `tokens` lie over the `ranks` of seq, for schemes: who has how many."""

    tokens: int
    ranks: int = 1
    rank: int = 0

    @property
    def chunk(self) -> int:
        return -(-self.tokens // self.ranks)

    def real(self, first: int, count: int = 1) -> int:
        """Tokens in `count` consecutive chunks from chunk `first` on."""
        return min(max(self.tokens - first * self.chunk, 0), count * self.chunk)


def shard(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """This rank's chunk of `dim`."""
    start, end = chunk_range(x.shape[dim], axis.size, axis.rank)
    return x.narrow(dim, start, end - start)


def pad(x: Tensor, dim: int, size: int) -> Tensor:
    """x with zeros after it along `dim`, up to `size` entries; for buffers, never for softmax."""
    if x.shape[dim] == size:
        return x
    zeros = x.new_zeros(*x.shape[:dim], size - x.shape[dim], *x.shape[dim + 1 :])
    return torch.cat([x, zeros], dim=dim)


def unshard(x: Tensor, axis: Axis, dim: int, size: int) -> Tensor:
    """The whole of `dim` (`size` entries) on every rank, from each rank's chunk."""
    if axis.size == 1:
        return x
    parts = all_gather(pad(x, dim, -(-size // axis.size)), axis)  # p ...
    return torch.cat(parts.unbind(0), dim=dim).narrow(dim, 0, size)


# Copies


def words(x: Tensor) -> Tensor:
    """The same memory in words of 16 bytes, where it divides into them; else x.

    A strided copy goes number by number: bfloat16 so at 1.6 TB/s on an H200, these words at 4. torch's only number as wide
    is complex128; it is moved, never computed with.
    """
    n = 16 // x.itemsize
    divides = x.ndim and x.stride(-1) == 1 and not any(i % n for i in (x.shape[-1], x.storage_offset(), *x.stride()[:-1]))
    return x.view(torch.complex128) if divides else x


def packed(x: Tensor) -> Tensor:
    """x, contiguous: what collectives send."""
    return x if x.is_contiguous() else words(x).contiguous().view(x.dtype)


def regroup(x: Tensor, pattern: str) -> Tensor:
    """einops' rearrange with the last dim in its place; what it copies, it copies in words."""
    return rearrange(words(x), pattern).view(x.dtype)


# Collectives. The leading dim is the axis; `wait` of the asynchronous ones gives the result.


class Pending:
    """A collective under way: `wait()` returns its result once it may be read."""

    def __init__(self, result: Tensor, works: list = (), keep: object = None):
        self.result, self.works, self.keep = result, works, keep  # the send buffer must live until the end

    def wait(self) -> Tensor:
        for work in self.works:
            work.wait()
        return self.result


def all_to_all(x: Tensor, axis: Axis) -> Tensor:
    """(p, ...) -> (p, ...): entry j goes to rank j, entry i comes from rank i."""
    return start_all_to_all(x, axis).wait()


def start_all_to_all(x: Tensor, axis: Axis, pushed: bool = False) -> "Pending | push.Push":
    """`pushed`: where the axis has a pusher, by it: what it gives is lent for the next few exchanges only."""
    assert x.shape[0] == axis.size
    if axis.size == 1:
        return Pending(x)
    x = packed(x)
    axis.count("all_to_all", x.numel() // axis.size * (axis.size - 1), x.itemsize)
    if pushed and axis.pusher is not None:
        return axis.pusher.start(x)
    out = torch.empty_like(x)
    return Pending(out, [dist.all_to_all_single(out, x, group=axis.group, async_op=True)], x)


def all_gather(x: Tensor, axis: Axis) -> Tensor:
    """(...) -> (p, ...): every rank's x."""
    return start_all_gather(x, axis).wait()


def start_all_gather(x: Tensor, axis: Axis) -> Pending:
    if axis.size == 1:
        return Pending(x[None])
    x = packed(x)
    out = x.new_empty(axis.size, *x.shape)
    axis.count("all_gather", x.numel() * (axis.size - 1), x.itemsize)
    return Pending(out, [_all_gather(out.view(-1), x.view(-1), group=axis.group, async_op=True)], x)


def reduce_scatter(x: Tensor, axis: Axis) -> Tensor:
    """(p, ...) -> (...): the sum over ranks of their entry for this rank."""
    assert x.shape[0] == axis.size
    if axis.size == 1:
        return x[0]
    x = packed(x)
    out = torch.empty_like(x[0])
    axis.count("reduce_scatter", x.numel() // axis.size * (axis.size - 1), x.itemsize)
    _reduce_scatter(out.view(-1), x.view(-1), group=axis.group)
    return out


def all_reduce(x: Tensor, axis: Axis, largest: bool = False) -> Tensor:
    """The sum (or the maximum) over ranks; counted as a reduce-scatter and an all-gather."""
    if axis.size == 1:
        return x
    x = x.clone(memory_format=torch.contiguous_format)
    axis.count("all_reduce", 2 * x.numel() * (axis.size - 1) // axis.size, x.itemsize)
    dist.all_reduce(x, dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM, group=axis.group)
    return x


def broadcast(x: Tensor, axis: Axis) -> Tensor:
    """Rank 0's x on every rank; the others give a tensor of its shape."""
    if axis.size == 1:
        return x
    x = packed(x)
    axis.count("broadcast", x.numel() * (axis.size - 1) if axis.rank == 0 else 0, x.itemsize)
    dist.broadcast(x, group=axis.group, group_src=0)
    return x


def gather_objects(one: object) -> list:
    """Every rank's small object, for words and tables; not counted."""
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, one)
    return found


def start_shift(x: Tensor, axis: Axis) -> Pending:
    """Send x to the next rank of the ring and receive the previous one's, of the same shape."""
    if axis.size == 1:
        return Pending(x)
    x = packed(x)
    out = torch.empty_like(x)
    axis.count("shift", x.numel(), x.itemsize)
    ops = [
        dist.P2POp(dist.isend, x, group=axis.group, group_peer=(axis.rank + 1) % axis.size),
        dist.P2POp(dist.irecv, out, group=axis.group, group_peer=(axis.rank - 1) % axis.size),
    ]
    return Pending(out, dist.batch_isend_irecv(ops if axis.rank % 2 == 0 else ops[::-1]), x)


def start_edges(first: Tensor, last: Tensor | None, axis: Axis) -> Pending:
    """Borrow lines from the neighbours: the result is the previous rank's `last` (None: borrows none) and the next one's `first`.

    This rank's own go the other way. At the two ends of the axis there is no neighbour, and zeros come back: the picture's
    edge.
    """
    found, ops, kept = [], [], []
    for mine, to, source in ((last, axis.rank + 1, axis.rank - 1), (first, axis.rank - 1, axis.rank + 1)):
        if mine is None:
            found.append(None)
            continue
        comes = 0 <= source < axis.size
        found.append(mine.new_empty(mine.shape) if comes else mine.new_zeros(mine.shape))
        if 0 <= to < axis.size:
            kept.append(mine := packed(mine))
            axis.count("halo", mine.numel(), mine.itemsize)
            ops.append(dist.P2POp(dist.isend, mine, group=axis.group, group_peer=to))
        if comes:
            ops.append(dist.P2POp(dist.irecv, found[-1], group=axis.group, group_peer=source))
    return Pending(found, dist.batch_isend_irecv(ops) if ops else [], kept)
