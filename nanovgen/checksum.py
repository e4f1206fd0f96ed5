"""Do all ranks hold the same latents? A checksum on each, one number sent, and the odd rank named.

    rank 0 | x -> 9f3a.. |              | 9f3a.. 9f3a.. 01c4.. 9f3a.. |
    rank 2 | x -> 01c4.. |  all-gather  |              rank 2, on every rank: all stop, and say the same

After each step every rank has combined the same velocities into its own copy of the latents, to the bit, and the next step
reads that copy: one that went wrong (a flipped bit, a rank that took another path) would spoil everybody's video unseen.

Sends    8 (p-1) bytes a check over the world; on a device also one pass over the latents, and nothing of them leaves it.
"""

import torch
from torch import Tensor

from nanovgen.mesh import Axis, all_gather

PRIME = 0x9E3779B1  # odd: see checksum


def checksum(x: Tensor) -> Tensor:
    """Sum of x's 32-bit patterns, each times an odd number of its place, mod 2^64: (1,) int64 on x's device.

    Whole numbers, so the order of the sum is free. One changed value is always seen: its difference is below 2^32, and an
    odd factor makes no multiple of 2^64 of it.
    """
    assert x.element_size() == 4
    bits = x.contiguous().view(torch.int32).flatten().long()
    place = torch.arange(len(bits), device=x.device)
    return (bits * ((place * PRIME) | 1)).sum(0, keepdim=True)


def check_alike(x: Tensor, axis: Axis, what: str) -> None:
    """Raises RuntimeError on every rank of the axis where one has another `what` x than most: the first such rank's name."""
    if axis.size == 1:
        return
    found = all_gather(checksum(x), axis).flatten().tolist()
    common = max(found, key=found.count)  # of two that are as frequent, the one of the lower rank
    odd = [rank for rank, one in enumerate(found) if one != common]
    if not odd:
        return
    others = f"rank {found.index(common)}" if found.count(common) == 1 else f"{found.count(common)} ranks"
    unsure = "; one of the two is wrong" if found.count(found[odd[0]]) == found.count(common) else ""
    raise RuntimeError(f"{what} of rank {odd[0]} are not those of {others} (checksum {found[odd[0]] % 2**64:016x}, not "
                       f"{common % 2**64:016x}){unsure}; nothing after it can be right")  # fmt: skip
