"""Every way of spreading the work against one rank that does it all.

    python -m pytest test_parity.py                                    # forks its own ranks, CPU, fp32
    torchrun --standalone --nproc-per-node 2 test_parity.py            # the configurations of 2 ranks, on GPUs where there are

One rank holds the truth: a small Wan, or Cosmos3 (both towers), with weights of unit gain (so that attention matters), guided
by two texts of unequal length, in fp32. Each configuration must give it on every rank to 1e-5, at a token count that divides,
one that divides nothing, and one below the rank count; where only data moves, to the bit. What was sent must be the formulas
in the schemes' headers. The negative controls are the same comparisons with one thing broken; they must fail by 100x.

On GPUs every kernel that runs is tried, and the limit is 1.1 times the error of one rank with that dtype and kernel on that
GPU; in fp32 not below the CPU's 1e-5, by which two right orders of summing may differ. Errors are of a few draws together:
one draw's rounding errors alone are too few to be compared within a tenth. The bits are held against that one rank's. There
too, async Ulysses is held to sync Ulysses, while ranks are late by turns; and so is one that reads before it has waited.
"""

import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from nanovgen import attention, cfg, checkpoint, cosmos, launch, mesh, plan, push, quality, ring, tp, ulysses, vae_parallel
from nanovgen.cosmos import Cosmos, CosmosConfig, TextTower
from nanovgen.mesh import Cut, Mesh
from nanovgen.recipe import ParallelConfig
from nanovgen.vae import VAE, VAEConfig
from nanovgen.wan import Context, Wan, WanConfig

TOLERANCE = 1e-5
CONFIG = WanConfig(num_attention_heads=24, attention_head_dim=16, num_layers=2, ffn_dim=96, text_dim=32)
COSMOS = CosmosConfig(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=4,
                      head_dim=16, vocab_size=50, mrope_section=(4, 2, 2))  # fmt: skip
GRIDS = {"even": (3, 8, 12), "odd": (5, 6, 10), "few": (5, 2, 2)}  # latent f, y, x: 72, 75 and 5 tokens
GUIDANCE = 3.0
KERNELS = {
    "cpu": [(torch.float32, "cpu")],
    "cuda": [(torch.float32, "efficient"), *((torch.bfloat16, name) for name in ("cudnn", "flash", "efficient", "fa3"))],
}
DRAWS = 8  # on GPUs


def parse(name: str) -> ParallelConfig:
    """'cfg2.ulysses4.attn2d3x3+overlapped' -> degrees and ways."""
    name, *ways = name.split("+")
    found = {}
    for part in name.split("."):
        if part.startswith("attn2d"):
            found["attn2d_size"] = tuple(int(n) for n in part.removeprefix("attn2d").split("x"))
        else:
            kind = part.rstrip("0123456789")
            found[f"{kind}_size"] = int(part.removeprefix(kind))
    for way in ways:
        found |= {"async": {"async_ulysses": True}, "fused": {"fused_ulysses": True}}.get(way, {"attn2d_merge": way})
    return ParallelConfig(**found)


ULYSSES = [f"ulysses{p}{way}" for p in (2, 3, 4, 8) for way in ("", "+fused", "+async")]
RING = [f"ring{p}" for p in (2, 3, 4, 5)]
ATTN2D = [f"attn2d{grid}{way}" for grid in ("1x2", "2x1", "2x2", "2x3", "3x2", "1x4", "4x1", "3x3") for way in
          ("", "+overlapped", "+reduce_scatter")]  # fmt: skip
HYBRID = ["cfg2", "tp2", "tp4", "cfg2.ulysses2", "cfg2.ulysses2.ring2", "cfg2.ulysses2.attn2d2x2", "ulysses2.ring2+async",
          "ulysses2.attn2d2x1+async", "tp2.ulysses2", "tp2.ring2", "tp2.attn2d2x2", "cfg2.tp2.ulysses2"]  # fmt: skip
RACK = ["cfg2.ulysses4.attn2d3x3", "cfg2.ulysses4.ring9"]
# Cosmos3's, in the same ranks as Wan's. It has fewer key heads: fused Ulysses is refused, and 8 ranks share them in pairs.
GROUPED = ["ulysses2", "ulysses2+async", "ulysses4", "ulysses4+async", "ulysses8", "ulysses8+async", "ring2", "ring3",
           *(f"attn2d{grid}{way}" for grid in ("1x2", "2x1", "2x2", "3x3") for way in ("", "+overlapped", "+reduce_scatter")),
           "tp2", "tp2.ulysses2", "cfg2", "cfg2.ulysses2", "cfg2.ulysses2.ring2", "cfg2.ulysses2.attn2d2x2", "tp2.attn2d2x2",
           "cfg2.ulysses4.attn2d3x3"]  # fmt: skip
# Only data moves in these: the same kernel sees the same keys in the same order. Elsewhere partial results are merged, or
# partial sums added, in another order of rounding.
EXACT = ["cfg2", *ULYSSES, "cfg2.ulysses2", *(f"attn2d{n}x1{way}" for n in (2, 4) for way in ("", "+reduce_scatter"))]


def gain(shape: torch.Size, name: str, generator: torch.Generator) -> Tensor:
    """Weights of unit gain: matrices by their input width, norms about 1, tables and biases large enough to be seen."""
    x = torch.randn(shape, generator=generator)
    if x.ndim == 1:
        return 1 + 0.2 * x if "norm" in name and name.endswith("weight") else 0.2 * x
    return 0.5 * x if "table" in name else 1.5 * x / (x.numel() / shape[0]) ** 0.5


def make(model: torch.nn.Module, seed: int) -> torch.nn.Module:
    generator = torch.Generator().manual_seed(seed)
    model.load_state_dict({name: gain(p.shape, name, generator) for name, p in model.state_dict().items()})
    return model.requires_grad_(False).eval()


def wan_texts(grid: str, generator: torch.Generator) -> list[Tensor]:
    """Of 16 rows, real ones in front."""
    texts = [torch.randn(1, 16, CONFIG.text_dim, generator=generator) for _ in range(2)]
    texts[0][:, 9:], texts[1][:, 5:] = 0, 0
    return texts


def wan_context(models: list, text: Tensor, grid: str) -> Context:
    return models[0].context(text, *FAMILIES["wan"].grids[grid])


def wan_text_bytes(parallel: ParallelConfig, text: Tensor, itemsize: int) -> int:
    """Tensor parallelism's norm of the text keys, once a prompt: one fp32 number a row and layer."""
    return plan.reduced(text.shape[1], parallel.tp_size) * 4 * CONFIG.num_layers


def cosmos_texts(grid: str, generator: torch.Generator) -> list[Tensor]:
    """Ids. Of the few, one: a prefix of one key leaves all columns of Attention2D but the first without any."""
    return [torch.randint(COSMOS.vocab_size, (1, n), generator=generator) for n in (9, 1 if grid == "few" else 5)]


def cosmos_context(models: list, text: Tensor, grid: str) -> cosmos.Context:
    """16 fps; at the odd count the first frame is given."""
    return models[0].context(models[1](text), *FAMILIES["cosmos"].grids[grid], 16, int(grid == "odd"))


def cosmos_text_bytes(parallel: ParallelConfig, text: Tensor, itemsize: int) -> int:
    """The text tower's two all-reduces a layer under tensor parallelism; of its last layer only keys and values are made."""
    return 2 * plan.reduced(text.shape[1] * COSMOS.hidden_size, parallel.tp_size) * itemsize * (COSMOS.num_hidden_layers - 1)


@dataclass(frozen=True)
class Family:
    """What differs between the models."""

    name: str
    config: WanConfig | CosmosConfig
    kinds: tuple[type, ...]  # the denoiser, and what it needs beside it; all of one folder
    grids: dict[str, tuple[int, int, int]]  # latent f, y, x
    channels: int
    texts: Callable
    context: Callable  # (models, text, grid) -> what the denoiser is handed
    text_bytes: Callable


FAMILIES = {
    "wan": Family("wan", CONFIG, (Wan,), GRIDS, 16, wan_texts, wan_context, wan_text_bytes),
    "cosmos": Family("cosmos", COSMOS, (Cosmos, TextTower), {"even": (3, 8, 12), "odd": (5, 9, 9), "few": (3, 1, 2)}, 48,
                     cosmos_texts, cosmos_context, cosmos_text_bytes),  # 72, 125 and 3 tokens; odd rows and columns
}  # fmt: skip


def inputs(family: Family, grid: str, draw: int = 0) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Latents, time, and two texts of unequal length."""
    generator = torch.Generator().manual_seed(7 + draw)
    texts = family.texts(grid, generator)
    return torch.randn(1, family.channels, *family.grids[grid], generator=generator), torch.tensor([637]), texts


def guided(family: Family, models: list, grid: str, parallel: ParallelConfig, m: Mesh, place: tuple, context=None, attend=None,
           draw: int = 0) -> Tensor:  # fmt: skip
    """The guided velocity as generate.py makes it. `place` is device, dtype and kernel."""
    x, time, texts = inputs(family, grid, draw)
    device, dtype, kernel = place
    attend = attend or plan.bind(parallel, m, plan.work(family.config, family.grids[grid], 4).tokens, kernel)
    texts = [text.to(device, dtype if text.is_floating_point() else None) for text in texts]
    own = {i: (context or family.context)(models, texts[i], grid) for i in cfg.mine(2, m.cfg)}
    x, time = x.to(device, dtype), time.to(device)
    return cfg.guide(cfg.run_streams(lambda i: models[0](x, time, own[i], attend, m.seq), 2, m.cfg), GUIDANCE)


def velocities(family: Family, models: list, place: tuple, draws: int = 1) -> dict[str, Tensor]:
    """Of one rank, at every token count, on the CPU; the leading dim is the draw."""
    return {grid: torch.stack([guided(family, models, grid, ParallelConfig(), Mesh(), place, draw=i).cpu() for i in range(draws)])
            for grid in family.grids}  # fmt: skip


def error(found: Tensor, truth: Tensor) -> float:
    return ((found.double() - truth.double()).norm() / truth.double().norm()).item()


@dataclass
class Row:
    """One line of the table: the worst rank's error, and whether every rank has the bits of one rank."""

    name: str
    ranks: int
    error: float
    equal: bool
    sent: float
    formula: float
    place: str = "float32 cpu"
    limit: float = TOLERANCE

    @property
    def right(self) -> bool:
        return self.error <= self.limit and self.sent == self.formula

    def __str__(self) -> str:
        ratio, bits = f"{self.sent / self.formula:.4f}" if self.formula else "-", "yes" if self.equal else "no"
        config = self.name.split()[0]
        why = "" if self.equal else quality.STRIPS if config.startswith("vae") else quality.why(parse(config))
        return (f"{self.name:<42} {self.place:<18} {self.ranks:>5} {self.error:>10.2e} {self.limit:>8.1e} {bits:>5} "
                f"{self.sent:>12.0f} {ratio:>8}  {why}")  # fmt: skip


HEADER = (f"{'configuration':<42} {'dtype, kernel':<18} {'ranks':>5} {'error':>10} {'limit':>8} {'bits':>5} "
          f"{'bytes sent':>12} {'/formula':>8}  where bits may differ")  # fmt: skip


def worst(*values: float) -> list[float]:
    """The largest of each over all ranks."""
    return [max(column) for column in zip(*mesh.gather_objects(values), strict=True)]


class Truth:
    """What one rank computes, and the weights as a file for the loader."""

    def __init__(self, folder: Path, family: Family, draws: int = 1):
        self.family, self.models = family, [make(kind(family.config), seed) for seed, kind in enumerate(family.kinds)]
        weights = {model.hub_name(k): v.contiguous() for model in self.models for k, v in model.state_dict().items()}
        save_file(weights, folder / "m.safetensors")
        self.component = checkpoint.open_component(folder)
        self.place = (torch.device("cpu"), torch.float32, attention.KERNELS["cpu"])
        with torch.inference_mode():
            self.velocity = velocities(family, self.models, self.place, draws)

    def load(self, axis: mesh.Axis, device: torch.device, dtype: torch.dtype) -> list[torch.nn.Module]:
        """Cut over tensor parallelism's axis, from the file."""
        return [checkpoint.load(tp.split(checkpoint.build(kind, self.family.config), axis), self.component, device, dtype)
                for kind in self.family.kinds]  # fmt: skip


def measure(name: str, truths: list[Truth], place: tuple, alone: list[dict[str, Tensor]]) -> list[Row]:
    """Inside a rank: this configuration of each model at every token count, against the truth; its bits against `alone`, one
    rank's there.

    The formula is of a rank with a full chunk: tensor parallelism sums no padding, so one with a short chunk sends less.
    """
    parallel, (device, dtype, _), rows = parse(name), place, []
    with torch.inference_mode():
        m = mesh.open_mesh(device, plan.degrees(parallel))
        for truth, near in zip(truths, alone, strict=True):
            family, models = truth.family, truth.load(m.tp, device, dtype)
            for grid, wanted in truth.velocity.items():
                m.sent.clear()
                out = torch.stack([guided(family, models, grid, parallel, m, place, draw=i).cpu() for i in range(len(wanted))])
                sent, formula = sum(m.bytes_sent().values()) / len(wanted), bytes_sent(family, grid, parallel, m, dtype.itemsize)
                assert sent <= formula and (sent == formula or parallel.tp_size > 1), (name, grid, sent, formula)
                far, differs, sent, formula = worst(error(out, wanted), float(not torch.equal(out, near[grid])), sent, formula)
                rows.append(Row(f"{name} {family.name} {grid}", parallel.world, far, not differs, sent, formula))
    return rows


def bytes_sent(family: Family, grid: str, parallel: ParallelConfig, m: Mesh, itemsize: int) -> int:
    """A step's, and what the texts of this rank's CFG half take once."""
    texts = [inputs(family, grid)[2][i] for i in cfg.mine(2, m.cfg)]
    step = plan.bytes_sent(parallel, plan.work(family.config, family.grids[grid], itemsize), 2)
    return sum(step.values()) + sum(family.text_bytes(parallel, text, itemsize) for text in texts)


def families(name: str) -> list[str]:
    return ["wan", "cosmos"] if name in GROUPED else ["wan"]


@pytest.fixture(scope="session")
def truth(tmp_path_factory):
    torch.set_num_threads(1)  # a forked child of a process whose thread pool has started must not use it
    return {name: Truth(tmp_path_factory.mktemp(name), family) for name, family in FAMILIES.items()}


@pytest.fixture(scope="session")
def table(request):
    """Rows of all tests, printed at the end."""
    rows = []
    yield rows
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        print("", HEADER, *rows, sep="\n")


def forked(ranks: int, work) -> object:
    """Run work() -> result on forked ranks; rank 0's result."""
    results = get_context("fork").SimpleQueue()

    def part() -> None:
        mesh.open_world(torch.device("cpu"))
        result = work()
        if os.environ["RANK"] == "0":
            results.put(result)

    assert launch.run_ranks(ranks, part) == 0
    return results.get()


@pytest.mark.parametrize("name", [*ULYSSES, *RING, *ATTN2D, *HYBRID, *RACK])
def test_matches_one_rank(name, truth, table):
    truths = [truth[family] for family in families(name)]
    rows = forked(parse(name).world, partial(measure, name, truths, truths[0].place, [t.velocity for t in truths]))
    assert len(rows) == 3 * len(truths)
    table += rows
    for row in rows:
        assert row.right, row
        assert row.equal or name not in EXACT or row.name.endswith("few"), row


# The VAE, by strips

VAE_CONFIG = VAEConfig(base_dim=8, decoder_base_dim=8, dim_mult=(1, 1, 2, 2), num_res_blocks=1)
VAES = {"2.1": VAE_CONFIG, "2.2": replace(VAE_CONFIG, is_residual=True, patch_size=2)}
LATENT = (3, 9, 11)  # frames, rows, columns: nothing divides
VAE_DEGREES = [(p, dim) for p in (2, 3, 4, 5, 8) for dim in ("width", "height")]


def vae_inputs(vae: VAE) -> tuple[Tensor, Tensor]:
    """Latents, and a video in -1..1, where the VAE is."""
    generator, (f, y, x), device = torch.Generator().manual_seed(3), LATENT, next(vae.parameters()).device
    z, scale = torch.randn(1, vae.config.z_dim, f, y, x, generator=generator), vae.config.scale
    video = torch.rand(1, 3, 4 * f - 3, scale * y, scale * x, generator=generator)
    return z.to(device), (2 * video - 1).to(device)


def coded(vae: VAE, axis: mesh.Axis, dim: int) -> tuple[Tensor, Tensor]:
    """Decoded video and encoded latents, whole, in chunks of 1 and 2 latent frames."""
    z, video = vae_inputs(vae)
    return torch.cat(list(vae_parallel.decode(vae, z, 1, axis, dim)), dim=2), vae_parallel.encode(vae, video, 2, axis, dim)


def vae_bytes(vae: VAE, axis: mesh.Axis, dim: int) -> int:
    """What coded() should send, from a pass in one piece."""
    (z, video), ledgers = vae_inputs(vae), [vae_parallel.Ledger(dim) for _ in range(2)]
    results = [torch.cat(list(vae.decode(z, 1, ledgers[0])), dim=2), vae.encode(video, 2, ledgers[1])]
    size = z.shape[dim]
    return 4 * sum(vae_parallel.elements_sent(n, axis, size, r.numel() // size) for n, r in zip(ledgers, results, strict=True))


def measure_vae(split: str, degree: int, kind: str, vae: VAE, wanted: tuple, alone: tuple) -> list[Row]:
    """Inside a rank: strips against `wanted`, their bits against `alone`, one rank's on the same device."""
    m = mesh.open_mesh(next(vae.parameters()).device, {"ulysses": degree}, vae=degree)
    with torch.inference_mode():
        found = coded(vae, m.vae, vae_parallel.DIMS[split])
        counts = mesh.gather_objects((m.bytes_sent()["vae"], vae_bytes(vae, m.vae, vae_parallel.DIMS[split])))
    sent, formula = max(counts, key=lambda n: abs(n[0] - n[1]))  # of the rank where they differ most
    rows = []
    for what, a, b, c in zip(("decode", "encode"), found, wanted, alone, strict=True):
        far, differs = worst(error(a.cpu(), b), float(not torch.equal(a, c)))
        rows.append(Row(f"vae{degree} {kind} {split} {what}", degree, far, not differs, sent, formula))
    return rows


@pytest.fixture(scope="session", params=VAES)
def vae_truth(request):
    """A VAE's name, itself, and what one rank computes."""
    torch.set_num_threads(1)
    vae = make(VAE(VAES[request.param]), 1)
    with torch.inference_mode():
        return request.param, vae, coded(vae, mesh.Axis("vae"), 4)


@pytest.mark.parametrize(("degree", "split"), VAE_DEGREES)
def test_vae_matches_one_rank(degree, split, vae_truth, table):
    rows = forked(degree, partial(measure_vae, split, degree, *vae_truth, vae_truth[-1]))
    table += rows
    assert all(row.right for row in rows), rows


# Negative controls: one thing broken, and the comparison must see it


def drop_partial(parallel: ParallelConfig, m: Mesh, cut: Cut, kernel, times: int = 0) -> object:
    """A ring whose second block counts `times` times."""

    def attend(q, k, v):
        q, parts = q(), []
        for i, (k_block, v_block) in enumerate(ring.blocks(k(), v(), m.ring, cut)):
            parts += [attention.attention(q, k_block, v_block, kernel)] * (times if i == 1 else 1)
        return attention.merge(parts, q.dtype)[0]

    return attend


def keep_padding(parallel: ParallelConfig, m: Mesh, cut: Cut, kernel) -> object:
    """Ulysses that takes the padding of short chunks for tokens."""
    whole = plan.bind(parallel, m, cut.chunk * cut.ranks, kernel)
    padded = lambda project: lambda: mesh.pad(project(), 1, cut.chunk)  # noqa: E731
    return lambda q, k, v: whole(padded(q), padded(k), padded(v))[:, : cut.real(cut.rank)]


def base_two(parallel: ParallelConfig, m: Mesh, cut: Cut, kernel) -> object:
    """A kernel whose LSE is a power of two's."""

    def wrong(q, k, v):
        o, lse = kernel(q, k, v)
        return o, lse / 0.6931471805599453

    return plan.bind(parallel, m, cut.tokens, wrong)


def swapped_order(parallel: ParallelConfig, m: Mesh, cut: Cut, kernel) -> object:
    """Ulysses whose two chunks come back in the wrong order: each rank gets the other's tokens."""
    right = plan.bind(parallel, m, cut.tokens, kernel)

    def attend(q, k, v):
        o = mesh.pad(right(q, k, v), 1, cut.chunk)
        quiet = replace(m.ulysses, sent=mesh.Counter())
        return mesh.all_gather(o, quiet)[1 - m.ulysses.rank][:, : cut.real(cut.rank)]

    return attend


def local_positions(models: list, text: Tensor, grid: str) -> Context:
    """Every rank counts its tokens from 0."""
    context = wan_context(models, text, grid)
    half = -(-context.rope.shape[1] // 2)
    return context._replace(rope=torch.cat([context.rope[:, :half]] * 2, dim=1)[:, : context.rope.shape[1]])


def swapped_texts(family: str, models: list, text: Tensor, grid: str) -> Context:
    """Each half is given the other's text."""
    texts = inputs(FAMILIES[family], grid)[2]
    return FAMILIES[family].context(models, texts[1] if torch.equal(text, texts[0]) else texts[0], grid)


def other_prefix(change: Callable) -> Callable:
    """A scheme that is handed another prefix: change(prefix, mesh)."""

    def breaks(parallel: ParallelConfig, m: Mesh, cut: Cut, kernel) -> object:
        right = plan.bind(parallel, m, cut.tokens, kernel)
        return lambda q, k, v, prefix: right(q, k, v, change(prefix, m))

    return breaks


# Sharing this out over the row's columns gives each column the whole text.
prefix_per_column = other_prefix(lambda kv, m: tuple(torch.cat([x] * m.q_axis.size, dim=1) for x in kv))
no_prefix = other_prefix(lambda kv, m: None)
zero_filler = other_prefix(lambda kv, m: tuple(mesh.pad(x, 1, 9) for x in kv))  # to the longer text's length


def clip_without_text(models: list, text: Tensor, grid: str) -> cosmos.Context:
    """The clip's positions do not count the text."""
    context, (f, y, x) = cosmos_context(models, text, grid), FAMILIES["cosmos"].grids[grid]
    return context._replace(rope=cosmos.rope_table(cosmos.clip_positions(f, -(-y // 2), -(-x // 2), 0, 16, COSMOS), COSMOS))


def text_from_one(models: list, text: Tensor, grid: str) -> cosmos.Context:
    """The text's positions begin at 1."""
    context = cosmos_context(models, text, grid)
    turn = cosmos.rope_table(torch.ones(3, text.shape[1]), COSMOS)
    return context._replace(prefix=[(cosmos.rotate(k, turn), v) for k, v in context.prefix])


BROKEN = {  # family, configuration, how the scheme breaks, how the context does
    "a dropped partial": ("wan", "ring3", drop_partial, None),
    "a partial counted twice": ("wan", "ring3", partial(drop_partial, times=2), None),
    "pad keys attended": ("wan", "ulysses4", keep_padding, None),
    "LSE in base 2": ("wan", "ring2", base_two, None),
    "swapped chunk order": ("wan", "ulysses2", swapped_order, None),
    "local RoPE positions": ("wan", "ulysses2", None, local_positions),
    "cond and uncond swapped": ("wan", "cfg2", None, partial(swapped_texts, "wan")),
    "prefix counted once a column": ("cosmos", "attn2d2x2", prefix_per_column, None),
    "prefix dropped": ("cosmos", "ring2", no_prefix, None),
    "zero keys fill the shorter prefix": ("cosmos", "ulysses2", zero_filler, None),
    "clip's positions without the text": ("cosmos", "ulysses2", None, clip_without_text),
    "text's positions from 1": ("cosmos", "attn2d2x1", None, text_from_one),
    "LSE in base 2, with a prefix": ("cosmos", "attn2d1x2", base_two, None),
    "cond and uncond prefixes swapped": ("cosmos", "cfg2.ulysses2", None, partial(swapped_texts, "cosmos")),
}


def measure_broken(name: str, truth: Truth) -> float:
    _, config, breaks, context = BROKEN[name]
    parallel, (device, _, kernel) = parse(config), truth.place
    m = mesh.open_mesh(device, plan.degrees(parallel))
    cut = Cut(plan.work(truth.family.config, truth.family.grids["odd"], 4).tokens, m.seq.size, m.seq.rank)
    attend = breaks and breaks(parallel, m, cut, kernel)
    with torch.inference_mode():
        out = guided(truth.family, truth.models, "odd", parallel, m, truth.place, context, attend)
    return worst(error(out, truth.velocity["odd"][0]))[0]


@pytest.mark.parametrize("name", BROKEN)
def test_broken_is_seen(name, truth, table):
    family, config, *_ = BROKEN[name]
    found = forked(parse(config).world, partial(measure_broken, name, truth[family]))
    table.append(f"broken: {name:<34} {parse(config).world:>5} {found:>10.2e}")
    assert found >= 100 * TOLERANCE


class NoHalo(vae_parallel.StripStream):
    def border(self, x, act):
        return [act(x)], (1, 1)


class Stale(dict):
    def __setitem__(self, layer, x):
        self.setdefault(layer, x)


class StaleCache(vae_parallel.StripStream):
    def __init__(self, *given):
        super().__init__(*given)
        self.cache = Stale()


def measure_broken_vae(stream: type, vae: VAE, wanted: tuple) -> float:
    m = mesh.open_mesh(torch.device("cpu"), {"ulysses": 2}, vae=2)
    z = vae_parallel.cut_strip(vae_inputs(vae)[0], m.vae, 4)
    with torch.inference_mode():
        strip = torch.cat(list(vae.decode(z, 1, stream(m.vae, 4, LATENT[2]))), dim=2)
    return worst(error(strip, vae_parallel.cut_strip(wanted[0], m.vae, 4, vae.config.scale)))[0]


@pytest.mark.parametrize(("name", "stream"), [("halo zeroed", NoHalo), ("stale causal cache", StaleCache)])
def test_broken_vae_is_seen(name, stream, vae_truth, table):
    kind, *rest = vae_truth
    assert forked(2, partial(measure_broken_vae, vae_parallel.StripStream, *rest)) <= TOLERANCE
    found = forked(2, partial(measure_broken_vae, stream, *rest))
    table.append(f"broken: {f'{name}, VAE {kind}':<34} {2:>5} {found:>10.2e}")
    assert found >= 100 * TOLERANCE


# Async Ulysses by pushes against sync Ulysses, on GPUs

RACES = [(1, 4096, 8, 64), (2, 2049, 16, 128), (1, 77, 24, 16), (1, 1, 4, 64)]  # b, tokens, heads, head dim
REPEATS = 100
LATE = 2_000_000  # clock cycles, about 1 ms


class EarlyPush(push.Push):
    """Reads before it has waited."""

    def wait(self):
        result = self.result.clone()
        super().wait()
        return result


class EarlyPusher(push.Pusher):
    def start(self, x):
        sent = super().start(x)
        return EarlyPush(sent.pusher, sent.slots, sent.n)


def race(shape: tuple[int, int, int, int], axis: mesh.Axis, device: torch.device) -> list[int]:
    """Of REPEATS results from new inputs, how many differ from the sync way's: waited for, and read too early.

    The host runs far ahead. By turns a rank is late to send, or late to read what it was lent.
    """
    (b, tokens, heads, d), kernel = shape, attention.KERNELS["cudnn"]
    cut = Cut(tokens, axis.size, axis.rank)
    generator = torch.Generator(device).manual_seed(axis.rank)
    random = lambda *size: torch.randn(*size, generator=generator, device=device, dtype=torch.bfloat16)  # noqa: E731
    weights = [random(heads * d, heads * d) / (heads * d) ** 0.5 for _ in range(3)]
    early = replace(axis, pusher=EarlyPusher(axis.group, device))
    differ = torch.zeros(2, dtype=torch.int64, device=device)
    for i in range(REPEATS):
        x = random(b, cut.real(cut.rank), heads * d)
        q, k, v = (lambda x=x, w=w: (x @ w).unflatten(-1, (heads, d)) for w in weights)

        def inner(q, k, v, prefix, late=i % 4 == 2 + axis.rank % 2):
            if late:
                torch.cuda._sleep(LATE)
            return attention.attention(q, k, v, kernel)[0]

        wanted = ulysses.ulysses(q, k, v, None, axis, cut, inner)
        for j, own in enumerate((axis, early)):
            if i % 4 == axis.rank % 2:
                torch.cuda._sleep(LATE)
            differ[j] += (ulysses.ulysses_async(q, k, v, None, own, cut, inner) != wanted).any()
    return differ.tolist()


def try_races(world: int, device: torch.device) -> bool:
    """Prints a line a shape; whether pushes equal the sync way on every rank, and reading early is seen on some."""
    missing, right = push.refusal(device, world), True
    if missing is not None:
        if os.environ["RANK"] == "0":
            print(f"async ulysses by pushes was not tried: {missing}")
        return True
    for shape in RACES:
        with torch.inference_mode():
            waited, early = worst(*race(shape, mesh.open_mesh(device, {"ulysses": world}).ulysses, device))
        right &= waited == 0 and early > 0
        if os.environ["RANK"] == "0":
            print(f"async ulysses by pushes, (b, S, H, d) = {shape}, {REPEATS} repeats: {waited} differ from sync; "
                  f"read before the wait: {early} differ", flush=True)  # fmt: skip
    return right


def compare(world: int, device: torch.device, folder: Path) -> Iterator[Row]:
    """Every configuration of this world with every kernel of the device, then the VAEs."""
    draws = DRAWS if device.type == "cuda" else 1
    for name in FAMILIES:
        (folder / name).mkdir()
    truths = {name: Truth(folder / name, family, draws) for name, family in FAMILIES.items()}
    for dtype, kernel in [(d, k) for d, k in KERNELS[device.type] if attention.refusal(k, device, d) is None]:
        place = (device, dtype, attention.KERNELS[kernel])
        with torch.inference_mode():
            alone = {n: velocities(t.family, t.load(mesh.Axis("tp"), device, dtype), place, draws) for n, t in truths.items()}
        for name in [n for n in [*ULYSSES, *RING, *ATTN2D, *HYBRID, *RACK] if parse(n).world == world]:
            chosen = families(name)
            for row in measure(name, [truths[n] for n in chosen], place, [alone[n] for n in chosen]):
                _, family, grid = row.name.split()
                limit = 1.1 * error(alone[family][grid], truths[family].velocity[grid]) if device.type == "cuda" else 0
                floor = TOLERANCE if dtype == torch.float32 else 0
                yield replace(row, place=f"{str(dtype).removeprefix('torch.')} {kernel}", limit=max(floor, limit))
    for kind, config in VAES.items():
        yield from compare_vae(world, device, kind, make(VAE(config), 1))


def compare_vae(world: int, device: torch.device, kind: str, vae: VAE) -> Iterator[Row]:
    with torch.inference_mode():
        wanted = coded(vae, mesh.Axis("vae"), 4)
        alone = coded(vae.to(device), mesh.Axis("vae"), 4)
    limits = [max(TOLERANCE, 1.1 * error(a.cpu(), b)) for a, b in zip(alone, wanted, strict=True)]
    for degree, split in [n for n in VAE_DEGREES if n[0] == world]:
        for row, limit in zip(measure_vae(split, degree, kind, vae, wanted, alone), limits, strict=True):
            yield replace(row, place=f"float32 {device.type}", limit=limit)


def main() -> int:
    """Under torchrun: the configurations of this world; on GPUs in fp32 and bf16, by every kernel, and the pushes' races."""
    world = int(os.environ["WORLD_SIZE"])
    device = mesh.open_world(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    torch.backends.cudnn.allow_tf32 = False  # else the VAE's convolutions round their fp32 inputs to 10 bits
    rows, say = [], print if os.environ["RANK"] == "0" else lambda *_, **__: None
    say(HEADER)
    with tempfile.TemporaryDirectory() as folder:
        for row in compare(world, device, Path(folder)):
            rows.append(row)
            say(row, "" if row.right else "WRONG", flush=True)
    wrong = sum(not row.right for row in rows)
    say(f"{len(rows)} rows, {wrong} wrong", flush=True)
    right = (device.type == "cpu" or world == 1 or try_races(world, device)) and not wrong
    mesh.close_world()
    return int(not right)


if __name__ == "__main__":
    sys.exit(main())
