"""Each scheme as a lesson: its picture, who held what, the error against one device, and what was sent against its formula.

python -m nanovgen.ring --ranks 4                                       # forks its ranks, on the CPU
torchrun --standalone --nproc-per-node 2 -m nanovgen.ulysses            # a GPU a rank
"""

import argparse
import os
import sys
from collections.abc import Callable
from functools import partial

import torch

from nanovgen import attn2d, cfg, launch, mesh, plan, ring, tp, ulysses, vae_parallel
from nanovgen.attention import KERNELS, attention, default_kernel
from nanovgen.mesh import Mesh
from nanovgen.recipe import ParallelConfig
from nanovgen.vae import VAE, VAEConfig
from nanovgen.wan import Wan, WanConfig

TOKENS, HEADS, HEAD_DIM, SEED = 48, 24, 16, 0


def square(ranks: int) -> tuple[int, int]:
    """Rows and columns of the squarest grid."""
    columns = max(n for n in range(1, ranks + 1) if ranks % n == 0 and n * n <= ranks)
    return ranks // columns, columns


def attend(parallel: ParallelConfig, device: torch.device) -> list[str]:
    """An attention scheme on random q, k, v, beside plain attention on all of them."""
    m = mesh.open_mesh(device, plan.degrees(parallel))
    kernel = KERNELS[default_kernel(device, torch.float32)]
    generator = torch.Generator().manual_seed(SEED)
    whole = [2 * torch.randn(1, TOKENS, HEADS, HEAD_DIM, generator=generator).to(device) for _ in range(3)]
    own = [mesh.shard(x, m.seq, 1) for x in whole]
    o = plan.bind(parallel, m, TOKENS, kernel)(*(partial(torch.clone, x) for x in own))
    sent = m.bytes_sent()
    out = mesh.unshard(o, m.seq, 1, TOKENS)
    wanted = attention(*whole, kernel)[0]
    work = plan.Work(TOKENS, HEADS, HEADS, HEAD_DIM, 1, 4)
    formula = {axis: amount for axis, amount in plan.bytes_sent(parallel, work, 1).items() if axis != "seq"}
    start, end = mesh.chunk_range(TOKENS, m.seq.size, m.seq.rank)
    return [f"kept tokens {start}..{end}; {held(m)}", verdict(out, wanted), f"sent {sent} bytes; the formula says {formula}"]


def held(m: Mesh) -> str:
    """What this rank had in the middle of the scheme."""
    p = m.seq.size
    if m.ulysses.size > 1:
        h = HEADS // m.ulysses.size
        return f"attended to all tokens with heads {m.ulysses.rank * h}..{(m.ulysses.rank + 1) * h}"
    if m.ring.size > 1:
        return "saw the keys of ranks " + ", ".join(str((m.ring.rank - step) % p) for step in range(p)) + " in turn"
    row = [m.kv_axis.rank * m.q_axis.size + i for i in range(m.q_axis.size)]
    column = [i * m.q_axis.size + m.q_axis.rank for i in range(m.kv_axis.size)]
    return f"one pass of the queries of ranks {row} over the keys of ranks {column}"


def verdict(found: torch.Tensor, wanted: torch.Tensor) -> str:
    error = ((found - wanted).norm() / wanted.norm()).item()
    return f"error {error:.1e} against one device, {'equal' if torch.equal(found, wanted) else 'not equal'} to the bit"


def tiny_wan(device: torch.device) -> tuple[Wan, torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """A random model, latents, time and two texts, the same on every rank."""
    torch.manual_seed(SEED)
    config = WanConfig(num_attention_heads=8, attention_head_dim=12, num_layers=2, ffn_dim=96, text_dim=16)
    texts = list(torch.randn(2, 1, 6, 16).to(device))
    return Wan(config).to(device).eval(), torch.randn(1, 16, 2, 8, 8).to(device), torch.tensor([500], device=device), texts


def guide(ranks: int, device: torch.device) -> list[str]:
    """CFG: two streams on the halves."""
    m = mesh.open_mesh(device, {"cfg": ranks})
    model, x, t, texts = tiny_wan(device)
    run = lambda i: model(x, t, model.context(texts[i], *x.shape[2:]))  # noqa: E731
    found = cfg.guide(cfg.run_streams(run, 2, m.cfg), 3.0)
    streams = ["the prompt", "the negative prompt"]
    return [f"ran {' and '.join(streams[i] for i in cfg.mine(2, m.cfg))}", verdict(found, cfg.guide([run(0), run(1)], 3.0)),
            f"sent {m.bytes_sent()} bytes; the formula says {(ranks - 1) * x.numel() * 4}"]  # fmt: skip


def slices(ranks: int, device: torch.device) -> list[str]:
    """TP: one whole forward, and one with this rank's slices of the same weights."""
    m = mesh.open_mesh(device, {"tp": ranks})
    model, x, t, texts = tiny_wan(device)
    tp.check(model.config.num_attention_heads, model.config.num_attention_heads, model.config.ffn_dim, ranks)
    wanted = model(x, t, model.context(texts[0], *x.shape[2:]))
    part, _, _, _ = tiny_wan(device)
    tp.split(part, m.tp)
    whole = model.state_dict()
    weights = {name: tp.own_slice(part, name, value) for name, value in whole.items()}
    part.load_state_dict(weights, assign=True)
    found = part(x, t, part.context(texts[0], *x.shape[2:]))
    config, f, y, x_ = model.config, *x.shape[2:]
    formula = plan.bytes_sent(ParallelConfig(tp_size=ranks), plan.work(config, (f, y, x_), 4), 1)["tp"]
    formula += 2 * (ranks - 1) * texts[0].shape[1] * 4 * config.num_layers // ranks  # the text keys' norm, once a prompt
    kept, all_of = (sum(w.numel() for w in state.values()) for state in (weights, whole))
    return [f"kept {kept} of {all_of} weights", verdict(found, wanted),
            f"sent {m.bytes_sent()} bytes; the formula says {formula}"]  # fmt: skip


def strips(ranks: int, device: torch.device) -> list[str]:
    """Parallel VAE: a decode in one piece, and one by strips."""
    m = mesh.open_mesh(device, {"ulysses": ranks}, vae=ranks)
    torch.manual_seed(SEED)
    vae, z = VAE(VAEConfig(base_dim=8)).to(device).eval(), torch.randn(1, 16, 2, 6, 2 * ranks + 1).to(device)
    found = torch.cat(list(vae_parallel.decode(vae, z, 1, m.vae, 4)), dim=2)
    start, end = vae_parallel.strip_range(z.shape[4], ranks, m.vae.rank)
    ledger, size = vae_parallel.Ledger(4), z.shape[4]
    wanted = torch.cat(list(vae.decode(z, 1, ledger)), dim=2)
    formula = 4 * vae_parallel.elements_sent(ledger, m.vae, size, wanted.numel() // size)
    return [f"decoded latent columns {start}..{end}", verdict(found, wanted),
            f"sent {m.bytes_sent()} bytes; the formula says {formula}"]  # fmt: skip


LESSONS: dict[str, tuple[object, int, Callable]] = {
    "ulysses": (ulysses, 4, lambda ranks: partial(attend, ParallelConfig(ulysses_size=ranks))),
    "ring": (ring, 4, lambda ranks: partial(attend, ParallelConfig(ring_size=ranks))),
    "attn2d": (attn2d, 4, lambda ranks: partial(attend, ParallelConfig(attn2d_size=square(ranks)))),
    "cfg": (cfg, 2, lambda ranks: partial(guide, ranks)),
    "tp": (tp, 2, lambda ranks: partial(slices, ranks)),
    "vae_parallel": (vae_parallel, 4, lambda ranks: partial(strips, ranks)),
}


def show(name: str) -> int:
    """Run a lesson from its module's command line; rank 0 prints what each rank has to say."""
    module, ranks, lesson = LESSONS[name]
    parser = argparse.ArgumentParser(prog=f"python -m nanovgen.{name}", description=__doc__)
    parser.add_argument("--ranks", type=int, default=ranks, help=f"CPU ranks to fork (default {ranks})")
    launched = int(os.environ.get("WORLD_SIZE", 1))
    ranks = launched if launched > 1 else parser.parse_args().ranks
    if os.environ.get("RANK", "0") == "0":
        print(module.__doc__)
    part = partial(_tell, lesson(ranks), "cuda" if launched > 1 and torch.cuda.is_available() else "cpu")
    if launched > 1:
        part()
        mesh.close_world()
        return 0
    return launch.run_ranks(ranks, part)


def _tell(lesson: Callable, device: str) -> None:
    device = mesh.open_world(torch.device(device))
    with torch.inference_mode():
        lines = mesh.gather_objects("; ".join(lesson(device=device)))
    if os.environ["RANK"] == "0":
        for rank, line in enumerate(lines):
            print(f"rank {rank}: {line}")
        sys.stdout.flush()
