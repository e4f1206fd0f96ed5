"""CFG parallelism: the guidance streams of a step run on different halves of the ranks.

    half 0 | v_cond   = model(x, t, prompt)   |  all-gather  | v_cond, v_uncond |  both halves combine and step alike
    half 1 | v_uncond = model(x, t, negative) |  =========>  | v_cond, v_uncond |

Every rank holds the same latents before and after; a half encodes and keeps only its own texts. More streams than halves
(a perturbed third one, say) take turns: stream i runs on half i mod p, one exchange a turn. A single stream (guidance 1)
runs everywhere and exchanges nothing.

Sends    (p-1) predicted latents a turn and step, nothing per layer. Degree 2, or none.
Source   classifier-free guidance, arXiv:2207.12598.
Refuses  a degree above 2: guidance has two streams.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from nanovgen.mesh import Axis, all_gather


def check(degree: int) -> None:
    """Raises ValueError for more halves than guidance has streams."""
    if degree > 2:
        raise ValueError(f"cfg_size is {degree}; guidance has two streams, so it is 1 or 2")


def mine(streams: int, axis: Axis) -> list[int]:
    """The streams that this rank's half runs, and so the texts that it keeps."""
    return list(range(streams)) if streams == 1 else list(range(axis.rank, streams, axis.size))


def run_streams(forward: Callable[[int], Tensor], streams: int, axis: Axis) -> list[Tensor]:
    """forward(i) is stream i's velocity; returns all of them, in order, on every rank."""
    if streams == 1 or axis.size == 1:
        return [forward(i) for i in range(streams)]
    found = []
    for first in range(0, streams, axis.size):
        own = first + axis.rank
        v = forward(own) if own < streams else torch.zeros_like(found[0])  # idle in the last turn, but not absent
        found += all_gather(v, axis)[: streams - first].unbind(0)
    return found


def guide(velocities: list[Tensor], guidance: float) -> Tensor:
    """uncond + guidance (cond - uncond), fp32; cond first."""
    cond, *uncond = (v.float() for v in velocities)
    return uncond[0] + guidance * (cond - uncond[0]) if uncond else cond


if __name__ == "__main__":
    from nanovgen.lesson import show

    raise SystemExit(show("cfg"))
