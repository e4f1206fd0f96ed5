"""torch.compile, block by block: the local math between attentions is compiled, everything that ranks exchange is not.

    before | q, k, v | attend: the scheme, its kernel and its collectives | between | cross-attention | last
    ^^^^^^   ^^^^^^^                    as they are                         ^^^^^^^                     ^^^^    compiled

A class names these methods in LOCAL: blocks, the VAE's parts, and Wan for its last norm. All blocks of a model share the code
of a method and the shapes that go through it, so each is compiled once a shape, in the first block, and the rest of the model
finds it ready. Shapes are fixed (dynamic=False): a shape never seen before costs a compilation, hence the warm-up, and
`graphs` counts them.

A compiler leaves matrix products to cuBLAS and would run a GELU after one as a pass of its own; `linear_gelu` lets cuBLAS
apply it before it writes the product.

Refuses  tensor parallelism: its all-reduces lie inside these methods.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SHAPES = 128  # of a method, where torch would give up beyond 8: a VAE's norm meets 68 in strips
SEARCHED = {"coordinate_descent_tuning": True}  # tile sizes are searched: norms over 5120 channels get a quarter faster


def check(enable: bool, tp_size: int) -> None:
    """Raises ValueError where the local math of a block is not local."""
    if enable and tp_size > 1:
        raise ValueError(f"torch_compile_config.enable with tp_size {tp_size}: its all-reduces lie inside what is compiled; "
                         "set enable to false, or tp_size to 1")  # fmt: skip


def compile_blocks(model: nn.Module, options: dict | None = None) -> nn.Module:
    """Put the compiled methods in the place of each block's own; nothing is compiled before it is first called.

    SEARCHED pays for a denoiser, which has few shapes and many steps; a VAE has dozens, and would search for minutes.
    """
    torch._dynamo.config.recompile_limit = SHAPES
    for module in model.modules():
        for name in getattr(module, "LOCAL", ()):
            setattr(module, name, torch.compile(getattr(module, name), dynamic=False, options=options))
    return model


def graphs() -> int:
    """How many graphs this process has compiled so far; a step that needs no new one leaves it as it is."""
    from torch._dynamo.utils import counters  # its import takes a second, which runs without torch.compile need not spend

    return counters["stats"]["unique_graphs"]


@torch.library.custom_op("nanovgen::linear_gelu", mutates_args=())
def _linear_gelu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """An operator of its own, which the compiler calls as it is: torch's it would take apart."""
    return torch._addmm_activation(bias, x.flatten(0, -2), weight.T, use_gelu=True).unflatten(0, x.shape[:-1])


@_linear_gelu.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-1], len(weight))


def linear_gelu(linear: nn.Module, x: Tensor) -> Tensor:
    """GELU, by its tanh formula, of linear(x). cuBLAS' is the tanh one and has no gradient; a CPU's is another."""
    if isinstance(linear, nn.Linear) and x.is_cuda and x.dtype == torch.bfloat16 and not torch.is_grad_enabled():
        return _linear_gelu(x, linear.weight, linear.bias)
    return F.gelu(linear(x), approximate="tanh")
