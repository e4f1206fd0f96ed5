"""Tensor parallelism: each rank holds a slice of every large matrix, and partial sums are added twice a block and half.

    column-parallel          row-parallel
    x ----> [W0] -> h0 ----> [V0] -> y0 \\
    x ----> [W1] -> h1 ----> [V1] -> y1 / all-reduce -> y = y0 + y1

q, k, v and the MLP's first matrix split their outputs (whole heads a rank), the output projections and the MLP's second
split their inputs. In between everything is local, so Ulysses, ring and Attention2D run inside on H/p heads as they are.

Wan normalises q and k over the whole width, before the heads are cut: a rank knows only its part of the sum of squares, so
that sum (one number a token) is all-reduced too. Cosmos3 normalises each head, which is local.

Sends    Wan: 3 all-reduces of b*s*C and 4 of b*s numbers (or of the text's rows) a block; Cosmos3: 2 of b*s*C a layer, and as
         many of the text's rows once a prompt; each 2 (p-1)/p elements an element.
         Costs more than any sequence split; it is for memory: weights per rank fall with p.
Source   Megatron-LM, arXiv:1909.08053.
Refuses  heads, key heads or the MLP's width not divisible by p.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanovgen.mesh import Axis, all_reduce, shard


class ColumnLinear(nn.Linear):
    """This rank's output features."""

    SLICED = {"weight": 0, "bias": 0}  # parameter: the dim that is cut, for the loader

    def __init__(self, whole: nn.Linear, axis: Axis):
        super().__init__(whole.in_features, whole.out_features // axis.size, whole.bias is not None)
        self.axis = axis


class RowLinear(nn.Linear):
    """This rank's input features; the sum over ranks, and the bias once."""

    SLICED = {"weight": 1}

    def __init__(self, whole: nn.Linear, axis: Axis):
        super().__init__(whole.in_features // axis.size, whole.out_features, whole.bias is not None)
        self.axis = axis

    def forward(self, x: Tensor) -> Tensor:
        y = all_reduce(F.linear(x, self.weight), self.axis)
        return y if self.bias is None else y + self.bias


class SplitRMSNorm(nn.Module):
    """RMSNorm over a width of which this rank holds a part."""

    SLICED = {"weight": 0}

    def __init__(self, whole: nn.RMSNorm, axis: Axis):
        super().__init__()
        self.axis, self.eps, self.width = axis, whole.eps, whole.normalized_shape[0]
        self.weight = nn.Parameter(torch.ones(self.width // axis.size))

    def forward(self, x: Tensor) -> Tensor:
        squares = all_reduce(x.float().square().sum(-1, keepdim=True), self.axis)
        return (x.float() * torch.rsqrt(squares / self.width + self.eps)).to(x.dtype) * self.weight


KINDS = ((ColumnLinear, "COLUMN"), (RowLinear, "ROW"), (SplitRMSNorm, "WIDE_NORM"))  # and where a class names its matrices


def own_slice(model: nn.Module, name: str, whole: Tensor) -> Tensor:
    """This rank's part of a parameter, for weights that are in memory; the loader reads parts from files."""
    where, _, leaf = name.rpartition(".")
    module = model.get_submodule(where)
    dim = getattr(module, "SLICED", {}).get(leaf)
    return whole if dim is None else shard(whole, module.axis, dim)


def check(heads: int, kv_heads: int, ffn: int, degree: int) -> None:
    """Raises ValueError for widths that cannot be cut."""
    widths = {"heads": heads, "key heads": kv_heads, "MLP features": ffn}
    for what, count in widths.items():
        if count % degree:
            fits = max(d for d in range(1, degree) if not any(n % d for n in widths.values()))
            raise ValueError(f"{count} {what} do not split over tp {degree}; use {fits}")


def split(model: nn.Module, axis: Axis) -> nn.Module:
    """Replace the matrices of a model on meta by this rank's slices; the loader reads only those.

    Each module class says what splits: COLUMN and ROW matrices, and WIDE_NORM where a norm spans the split width.
    """
    if axis.size == 1:
        return model
    with torch.device("meta"):
        for module in list(model.modules()):
            for kind, names in KINDS:
                for name in getattr(module, names, ()):
                    setattr(module, name, kind(getattr(module, name), axis))
    return model


def cut(model: nn.Module) -> set[str]:
    """Names of the parameters that `split` cuts."""
    found = set()
    for where, module in model.named_modules():
        for kind, names in KINDS:
            leaves = [f"{name}.{leaf}" for name in getattr(type(module), names, ()) for leaf in kind.SLICED]
            found |= {f"{where}.{leaf}" if where else leaf for leaf in leaves}
    return found


if __name__ == "__main__":
    from nanovgen.lesson import show

    raise SystemExit(show("tp"))
