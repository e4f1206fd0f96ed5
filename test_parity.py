"""Every way of spreading the work against one rank that does it all.

    python -m pytest test_parity.py                                    # forks its own ranks, CPU, fp32
    torchrun --standalone --nproc-per-node 4 test_parity.py            # the configurations of 4 ranks, fp32 and, on GPUs, bf16

One rank holds the truth: a small Wan, or Cosmos3 (both towers), with weights of unit gain (so that attention matters), guided
by two texts of unequal length, in fp32. Each configuration must give it on every rank to 1e-5, at a token count that divides,
one that divides nothing, and one below the rank count; where only data moves, to the bit. What was sent must be the formulas
in the schemes' headers. The negative controls are the same comparisons with one thing broken; they must fail by 100x.
"""

import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from nanovgen import attention, cfg, checkpoint, cosmos, launch, mesh, plan, ring, tp, vae_parallel
from nanovgen.cosmos import Cosmos, CosmosConfig, TextTower
from nanovgen.mesh import Cut, Mesh
from nanovgen.recipe import ParallelConfig
from nanovgen.vae import VAE, VAEConfig
from nanovgen.wan import Context, Wan, WanConfig

TOLERANCE = 1e-5
CONFIG = WanConfig(num_attention_heads=24, attention_head_dim=12, num_layers=2, ffn_dim=96, text_dim=32)
COSMOS = CosmosConfig(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=4,
                      head_dim=16, vocab_size=50, mrope_section=(4, 2, 2))  # fmt: skip
GRIDS = {"even": (3, 8, 12), "odd": (5, 6, 10), "few": (5, 2, 2)}  # latent f, y, x: 72, 75 and 5 tokens
GUIDANCE = 3.0


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
# Cosmos3's, in the same ranks as Wan's. It has fewer key heads: fused Ulysses is refused, and ulysses and tp divide them.
GROUPED = ["ulysses2", "ulysses2+async", "ulysses4", "ulysses4+async", "ring2", "ring3",
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


def wan_text_bytes(parallel: ParallelConfig, text: Tensor) -> int:
    """Tensor parallelism's norm of the text keys, once a prompt: one fp32 number a row and layer."""
    return plan.reduced(text.shape[1], parallel.tp_size) * 4 * CONFIG.num_layers


def cosmos_texts(grid: str, generator: torch.Generator) -> list[Tensor]:
    """Ids. Of the few, one: a prefix of one key leaves all columns of Attention2D but the first without any."""
    return [torch.randint(COSMOS.vocab_size, (1, n), generator=generator) for n in (9, 1 if grid == "few" else 5)]


def cosmos_context(models: list, text: Tensor, grid: str) -> cosmos.Context:
    """16 fps; at the odd count the first frame is given."""
    return models[0].context(models[1](text), *FAMILIES["cosmos"].grids[grid], 16, int(grid == "odd"))


def cosmos_text_bytes(parallel: ParallelConfig, text: Tensor) -> int:
    """The text tower's two all-reduces a layer under tensor parallelism; of its last layer only keys and values are made."""
    return 2 * plan.reduced(text.shape[1] * COSMOS.hidden_size, parallel.tp_size) * 4 * (COSMOS.num_hidden_layers - 1)


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


def inputs(family: Family, grid: str) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Latents, time, and two texts of unequal length."""
    generator = torch.Generator().manual_seed(7)
    texts = family.texts(grid, generator)
    return torch.randn(1, family.channels, *family.grids[grid], generator=generator), torch.tensor([637]), texts


def guided(family: Family, models: list, grid: str, parallel: ParallelConfig, m: Mesh, place: tuple, context=None,
           attend=None) -> Tensor:  # fmt: skip
    """The guided velocity as generate.py makes it. `place` is device, dtype and kernel."""
    x, time, texts = inputs(family, grid)
    device, dtype, kernel = place
    attend = attend or plan.bind(parallel, m, plan.work(family.config, family.grids[grid], 4).tokens, kernel)
    texts = [text.to(device, dtype if text.is_floating_point() else None) for text in texts]
    own = {i: (context or family.context)(models, texts[i], grid) for i in cfg.mine(2, m.cfg)}
    x, time = x.to(device, dtype), time.to(device)
    return cfg.guide(cfg.run_streams(lambda i: models[0](x, time, own[i], attend, m.seq), 2, m.cfg), GUIDANCE)


def error(found: Tensor, truth: Tensor) -> float:
    return ((found.double() - truth.double()).norm() / truth.double().norm()).item()


@dataclass
class Row:
    """One line of the table: the worst rank's error."""

    name: str
    ranks: int
    error: float
    equal: bool
    sent: float
    formula: float

    def __str__(self) -> str:
        ratio = f"{self.sent / self.formula:.4f}" if self.formula else "-"
        bits = "yes" if self.equal else "no"
        return f"{self.name:<42} {self.ranks:>5} {self.error:>10.2e} {bits:>5} {self.sent:>12.0f} {ratio:>8}"


HEADER = f"{'configuration':<42} {'ranks':>5} {'error':>10} {'bits':>5} {'bytes sent':>12} {'/formula':>8}"


def worst(m: Mesh, *values: float) -> list[float]:
    """The largest of each over all ranks."""
    return mesh.all_reduce(
        torch.tensor(values, dtype=torch.float64), replace(m.world, sent=mesh.Counter()), largest=True
    ).tolist()


class Truth:
    """What one rank computes, and the weights as a file for the loader."""

    def __init__(self, folder: Path, family: Family = FAMILIES["wan"]):
        self.family, self.models = family, [make(kind(family.config), seed) for seed, kind in enumerate(family.kinds)]
        weights = {model.hub_name(k): v.contiguous() for model in self.models for k, v in model.state_dict().items()}
        save_file(weights, folder / "m.safetensors")
        self.component = checkpoint.open_component(folder)
        self.alone = ParallelConfig()
        self.place = (torch.device("cpu"), torch.float32, attention.KERNELS["cpu"])
        with torch.inference_mode():
            self.velocity = {grid: guided(family, self.models, grid, self.alone, Mesh(), self.place) for grid in family.grids}

    def load(self, axis: mesh.Axis, device: torch.device, dtype: torch.dtype) -> list[torch.nn.Module]:
        """Cut over tensor parallelism's axis, from the file."""
        return [checkpoint.load(tp.split(checkpoint.build(kind, self.family.config), axis), self.component, device, dtype)
                for kind in self.family.kinds]  # fmt: skip


def measure(name: str, truths: list[Truth], place: tuple) -> list[Row]:
    """Inside a rank: this configuration of each model at every token count, against the truth.

    The formula is of a rank with a full chunk: tensor parallelism sums no padding, so one with a short chunk sends less.
    """
    parallel, (device, dtype, _), rows = parse(name), place, []
    with torch.inference_mode():
        m = mesh.open_mesh(device, plan.degrees(parallel))
        for truth in truths:
            models = truth.load(m.tp, device, dtype)
            for grid, wanted in truth.velocity.items():
                m.sent.clear()
                out = guided(truth.family, models, grid, parallel, m, place).cpu()
                sent, formula = sum(m.bytes_sent().values()), bytes_sent(truth.family, grid, parallel, m, dtype.itemsize)
                assert sent <= formula and (sent == formula or parallel.tp_size > 1), (name, grid, sent, formula)
                far, differs, sent, formula = worst(m, error(out, wanted), float(not torch.equal(out, wanted)), sent, formula)
                rows.append(Row(f"{truth.family.name} {name} {grid}", parallel.world, far, not differs, sent, formula))
    return rows


def bytes_sent(family: Family, grid: str, parallel: ParallelConfig, m: Mesh, itemsize: int) -> int:
    """A step's, and what the texts of this rank's CFG half take once."""
    texts = [inputs(family, grid)[2][i] for i in cfg.mine(2, m.cfg)]
    step = plan.bytes_sent(parallel, plan.work(family.config, family.grids[grid], itemsize), 2)
    return sum(step.values()) + sum(family.text_bytes(parallel, text) for text in texts)


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
    truths = [truth["wan"], truth["cosmos"]] if name in GROUPED else [truth["wan"]]
    rows = forked(parse(name).world, partial(measure, name, truths, truths[0].place))
    assert len(rows) == 3 * len(truths)
    table += rows
    for row in rows:
        assert row.error <= TOLERANCE, row
        assert row.sent == row.formula, row
        assert row.equal or name not in EXACT or row.name.endswith("few"), row


# The VAE, by strips

VAE_CONFIG = VAEConfig(base_dim=8, decoder_base_dim=8, dim_mult=(1, 1, 2, 2), num_res_blocks=1)
LATENT = (3, 9, 11)  # frames, rows, columns: nothing divides
VAE_DEGREES = [(p, dim) for p in (2, 3, 4, 5, 8) for dim in ("width", "height")]


def vae_inputs() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    f, y, x = LATENT
    return torch.randn(1, 16, f, y, x, generator=generator), torch.rand(
        1, 3, 4 * f - 3, 8 * y, 8 * x, generator=generator
    ) * 2 - 1


def coded(vae: VAE, axis: mesh.Axis, dim: int) -> tuple[Tensor, Tensor]:
    """Decoded video and encoded latents, whole, in chunks of 1 and 2 latent frames."""
    z, video = vae_inputs()
    return torch.cat(list(vae_parallel.decode(vae, z, 1, axis, dim)), dim=2), vae_parallel.encode(vae, video, 2, axis, dim)


def vae_bytes(vae: VAE, axis: mesh.Axis, dim: int) -> int:
    """What coded() should send, from a pass in one piece."""
    (z, video), ledgers = vae_inputs(), [vae_parallel.Ledger(dim) for _ in range(2)]
    results = [torch.cat(list(vae.decode(z, 1, ledgers[0])), dim=2), vae.encode(video, 2, ledgers[1])]
    size = z.shape[dim]
    return 4 * sum(vae_parallel.elements_sent(n, axis, size, r.numel() // size) for n, r in zip(ledgers, results, strict=True))


def measure_vae(split: str, degree: int, vae: VAE, wanted: tuple) -> list[Row]:
    m = mesh.open_mesh(torch.device("cpu"), {"ulysses": degree}, vae=degree)
    with torch.inference_mode():
        found = coded(vae, m.vae, vae_parallel.DIMS[split])
        sent, formula = m.bytes_sent()["vae"], vae_bytes(vae, m.vae, vae_parallel.DIMS[split])
    assert sent == formula, (sent, formula)
    rows = []
    for what, a, b in zip(("decode", "encode"), found, wanted, strict=True):
        far, differs = worst(m, error(a, b), float(not torch.equal(a, b)))
        rows.append(Row(f"vae{degree} {split} {what}", degree, far, not differs, sent, formula))
    return rows


@pytest.fixture(scope="session")
def vae_truth():
    torch.set_num_threads(1)
    vae = make(VAE(VAE_CONFIG), 1)
    with torch.inference_mode():
        return vae, coded(vae, mesh.Axis("vae"), 4)


@pytest.mark.parametrize(("degree", "split"), VAE_DEGREES)
def test_vae_matches_one_rank(degree, split, vae_truth, table):
    rows = forked(degree, partial(measure_vae, split, degree, *vae_truth))
    table += rows
    for row in rows:
        assert row.error <= TOLERANCE, row


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
    return worst(m, error(out, truth.velocity["odd"]))[0]


@pytest.mark.parametrize("name", BROKEN)
def test_broken_is_seen(name, truth, table):
    family, config, *_ = BROKEN[name]
    found = forked(parse(config).world, partial(measure_broken, name, truth[family]))
    table.append(f"broken: {name:<34} {parse(config).world:>5} {found:>10.2e}")
    assert found >= 100 * TOLERANCE


class NoHalo(vae_parallel.StripStream):
    def border(self, x):
        return x, (1, 1)


class StaleCache(vae_parallel.StripStream):
    def swap(self, layer, x, keep):
        past = self.cache.get(layer)
        if past is None:
            super().swap(layer, x, keep)
        return past


def measure_broken_vae(stream: type, vae: VAE, wanted: tuple) -> float:
    m = mesh.open_mesh(torch.device("cpu"), {"ulysses": 2}, vae=2)
    z = vae_parallel.cut_strip(vae_inputs()[0], m.vae, 4)
    with torch.inference_mode():
        strip = torch.cat(list(vae.decode(z, 1, stream(m.vae, 4, LATENT[2]))), dim=2)
    return worst(m, error(strip, vae_parallel.cut_strip(wanted[0], m.vae, 4, scale=8)))[0]


@pytest.mark.parametrize(("name", "stream"), [("halo zeroed", NoHalo), ("stale causal cache", StaleCache)])
def test_broken_vae_is_seen(name, stream, vae_truth, table):
    assert forked(2, partial(measure_broken_vae, vae_parallel.StripStream, *vae_truth)) <= TOLERANCE
    found = forked(2, partial(measure_broken_vae, stream, *vae_truth))
    table.append(f"broken: {name:<34} {2:>5} {found:>10.2e}")
    assert found >= 100 * TOLERANCE


def main() -> int:
    """Under torchrun: the configurations of this world, fp32 and, on GPUs, bf16 against the fp32 truth."""
    world = int(os.environ["WORLD_SIZE"])
    device = mesh.open_world(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    status, first = 0, os.environ["RANK"] == "0"
    with tempfile.TemporaryDirectory() as folder:
        truth = Truth(Path(folder))
        dtypes = [torch.float32, torch.bfloat16] if device.type == "cuda" else [torch.float32]
        for dtype in dtypes:
            kernel = attention.KERNELS[attention.default_kernel(device, dtype)]
            place = (device, dtype, kernel)
            with torch.inference_mode():
                models = truth.load(mesh.Axis("tp"), device, dtype)
                alone = {grid: guided(truth.family, models, grid, truth.alone, Mesh(), place).cpu() for grid in GRIDS}
            for name in [n for n in [*ULYSSES, *RING, *ATTN2D, *HYBRID, *RACK] if parse(n).world == world]:
                for row, grid in zip(measure(name, [truth], place), GRIDS, strict=True):
                    limit = TOLERANCE if device.type == "cpu" else 1.1 * error(alone[grid], truth.velocity[grid])
                    status |= row.error > limit or row.sent != row.formula
                    if first:
                        print(row, f"{dtype} limit {limit:.1e}", "" if row.error <= limit else "FAILED", flush=True)
    mesh.close_world()
    return int(status)


if __name__ == "__main__":
    sys.exit(main())
