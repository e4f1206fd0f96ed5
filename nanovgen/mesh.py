"""Who talks to whom: an axis is a named row of ranks, and everything that is split is split over one axis.

    rank 0 | tokens 0..s |   shard  <--  tokens 0..S  -->  unshard   | tokens 0..S | on every rank
    rank 1 | tokens s..S |

An axis of size 1 has no process group, and shard and unshard over it are the identity, so one process runs the same
lines as many. Models receive an axis and never ask torch.distributed anything; this file is the only one that may.
This version has the size-1 axes of one process. The axes of many ranks, and their collectives, come with the schemes.
"""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Axis:
    """A row of `size` ranks; `rank` is this process's place in the row, not its global rank."""

    name: str
    size: int = 1
    rank: int = 0


@dataclass(frozen=True)
class Mesh:
    """The axes of one run. `seq` is what the tokens are cut over: cp (ring, or q_axis x kv_axis) times ulysses."""

    cfg: Axis = Axis("cfg")
    tp: Axis = Axis("tp")
    ring: Axis = Axis("ring")
    q_axis: Axis = Axis("q_axis")
    kv_axis: Axis = Axis("kv_axis")
    ulysses: Axis = Axis("ulysses")
    seq: Axis = Axis("seq")
    vae: Axis = Axis("vae")

    def degrees(self) -> dict[str, int]:
        return {axis.name: axis.size for axis in vars(self).values()}


def shard(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """This rank's contiguous chunk of `dim`: ceil(S/p) entries, fewer (or none) on the last ranks."""
    chunk = -(-x.shape[dim] // axis.size)
    start = min(axis.rank * chunk, x.shape[dim])
    return x.narrow(dim, start, min(chunk, x.shape[dim] - start))


def unshard(x: Tensor, axis: Axis, dim: int, size: int) -> Tensor:
    """The whole of `dim` (`size` entries) on every rank, from each rank's chunk."""
    assert axis.size == 1 and x.shape[dim] == size, f"axis {axis.name} of {axis.size} ranks has no collectives yet"
    return x
