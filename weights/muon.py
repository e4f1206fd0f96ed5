"""fp32 master weights for a bf16 model, stepped by Muon for its matrices and AdamW for the rest, with an average.

Muon (https://kellerjordan.github.io/posts/muon, scaled as in arXiv:2502.16982): the momentum of a matrix is replaced by
the nearest matrix with all singular values 1, found by five Newton-Schulz steps. A convolution kernel counts as the
matrix (out, in * window). Matrices of one shape are stepped as one batch.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn


def orthogonalize(m: Tensor) -> Tensor:
    """(n, rows, columns) -> about U V^T of each, by the quintic iteration whose slope at 0 is steepest; in bf16."""
    x = m.bfloat16()
    wide = x if m.shape[-2] <= m.shape[-1] else x.mT
    wide = wide / (wide.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        a = wide @ wide.mT
        wide = 3.4445 * wide + (-4.7750 * a + 2.0315 * a @ a) @ wide
    return (wide if m.shape[-2] <= m.shape[-1] else wide.mT).to(m.dtype)


class Masters:
    """Holds the model's weights in fp32. `step` reads .grad of the model, moves the masters and copies them back; `clear`
    forgets the gradients."""

    def __init__(self, model: nn.Module, matrices: Callable[[str, Tensor], bool], average: float = 0.999):
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        self.live = [p for _, p in named]
        self.master = [p.detach().float().clone() for p in self.live]
        self.mean = [p.clone() for p in self.master]
        self.average, self.steps = average, 0
        chosen = [matrices(name, p) for name, p in named]
        by_shape = defaultdict(list)
        for i, p in enumerate(self.live):
            if chosen[i]:
                by_shape[p.flatten(1).shape].append(i)
        self.groups = [(index, torch.zeros(len(index), *shape, device=self.live[index[0]].device))
                       for shape, index in by_shape.items()]  # fmt: skip
        self.rest = [i for i, c in enumerate(chosen) if not c]
        self.adam = torch.optim.AdamW([self.master[i] for i in self.rest], betas=(0.9, 0.98), weight_decay=0.0,
                                      fused=self.live[0].is_cuda)  # fmt: skip

    @torch.no_grad()
    def step(self, lr_matrices: float, lr_rest: float) -> None:
        for index, momentum in self.groups:
            grad = torch.stack([self.live[i].grad.flatten(1) for i in index]).float()
            momentum.lerp_(grad, 0.05)
            update = orthogonalize(grad.lerp(momentum, 0.95))  # Nesterov
            scale = lr_matrices * 0.2 * max(update.shape[1:]) ** 0.5  # as large as AdamW's steps are
            weights = [self.master[i] for i in index]
            torch._foreach_mul_(weights, 1 - 0.01 * lr_matrices)
            torch._foreach_add_(weights, [u.view_as(w) for u, w in zip(update, weights, strict=True)], alpha=-scale)
        for i in self.rest:
            self.master[i].grad = self.live[i].grad.float()
        for group in self.adam.param_groups:
            group["lr"] = lr_rest
        self.adam.step()
        torch._foreach_copy_(self.live, self.master)
        self.steps += 1
        torch._foreach_lerp_(self.mean, self.master, max(1 - self.average, 1 / self.steps))

    def clear(self) -> None:
        for p in self.live:
            p.grad = None

    @torch.no_grad()
    def finish(self) -> None:
        """Leave the average in the model."""
        torch._foreach_copy_(self.live, self.mean)


class Replayed:
    """f() as one CUDA graph: kernels this small run for less time than their launches take. On a CPU, f itself.

    f draws its own numbers on the device, clears the gradients, ends in backward() and returns a tensor. The first calls
    run it as it is, so that what is to be compiled is.
    """

    def __init__(self, f: Callable[[], Tensor], device: str, eager_calls: int = 3):
        self.f, self.gpu, self.left = f, torch.device(device).type == "cuda", eager_calls
        self.graph = self.out = None

    def __call__(self) -> Tensor:
        """What f returned; the next call overwrites it on a GPU."""
        if not self.gpu:
            return self.f()
        if self.left:
            self.left -= 1
            return self.aside()
        if self.graph is None:
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.out = self.f()
        self.graph.replay()
        return self.out

    def aside(self) -> Tensor:
        """f() on another stream than the default one, which no graph can be taken of."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            out = self.f()
        torch.cuda.current_stream().wait_stream(stream)
        return out


def learning_rate(progress: float) -> float:
    """Share of the peak rate: up over the first 2 %, level, down to nothing over the last half."""
    return min(1.0, progress / 0.02, (1 - progress) / 0.5)


class Budget:
    """So many minutes of steps: iterating gives the share that is spent. The first step, which compiles, is not counted; at
    share 0 it moves nothing. Says every ten seconds how it goes."""

    def __init__(self, name: str, minutes: float):
        self.name, self.seconds, self.step, self.notes = name, 60 * minutes, 1, []
        self.start = self.said = time.time()

    def __iter__(self) -> Iterator[float]:
        yield 0.0
        print(f"{self.name}: first step in {time.time() - self.start:.0f} s", flush=True)
        self.start = self.said = time.time()
        while (progress := (time.time() - self.start) / self.seconds) < 1:
            self.step += 1
            yield progress

    def note(self, words: Callable[[Tensor], str], value: Tensor) -> None:
        """Keep one step's figures; say the mean of those since the last line."""
        self.notes.append(value)
        if (now := time.time()) - self.said > 10:
            print(f"{self.name} step {self.step}, {now - self.start:.0f} s, {words(torch.stack(self.notes).mean(0))}", flush=True)
            self.said = now
            self.notes.clear()
