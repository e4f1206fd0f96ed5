"""The bench: counted work against torch's own counter, figures that agree with each other, every recipe on forked ranks."""

import json
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch.utils.flop_counter import FlopCounterMode

from nanovgen import as_rank, attention, bench, choose, cost, floor, machines, mesh, peers, plan
from nanovgen.recipe import PRESETS, ParallelConfig, read_recipe
from nanovgen.wan import WanConfig

SMALL = ["--size", "64x32", "--frames", "5", "--text", "7", "--steps", "2"]


@pytest.fixture
def run(tmp_path, capsys, one_thread, deadline):
    """main's JSON and what it printed; forked ranks print past capsys."""

    def call(*arguments: object) -> tuple[dict, str]:
        out = tmp_path / "bench.json"
        deadline(400)
        code = bench.main([*SMALL, *map(str, arguments), "--out", str(out)])
        deadline(0)
        assert code == 0, code
        return json.loads(out.read_text()), capsys.readouterr().out

    return call


@pytest.mark.parametrize("model", ["tiny-wan", "tiny-cosmos"])
def test_counted_work_is_torchs(model):
    """Linears: equal to the multiplication, less the embedding of time, which is not a token's."""
    made = bench.make_bench(bench.parse([*SMALL, "--model", model]))
    with torch.inference_mode():
        denoiser = bench.make_model(made)
        context = bench.make_context(made, denoiser, 1)
        channels = made.preset.latent[0]
        counter = FlopCounterMode(display=False)
        with counter:
            denoiser(torch.randn(1, channels, *made.latent), torch.tensor([500]), context)
    by_op = counter.get_flop_counts()["Global"]
    linears = sum(n for op, n in by_op.items() if "mm" in str(op))
    time = 2 * sum(p.numel() for name, p in denoiser.named_parameters() if name.startswith("time_") and p.ndim == 2)
    found = floor.flops(made)
    print(f"{model}: {linears} by torch's counter, of which {time} of time; {found}")
    assert found["linears"] == linears - time
    keys = made.work.tokens + (0 if model == "tiny-wan" else 7)
    assert found["attention"] == 4 * made.work.tokens * keys * made.work.heads * made.work.head_dim * made.work.layers


def test_figures_agree(run):
    report, said = run("--layers", 2, "--peer", "diffusers")
    (row,) = report["rows"]
    seconds = row["seconds"]
    assert abs(seconds["attend"] + seconds["projections"] + seconds["rest"] - seconds["turn"]) < 0.5 * seconds["turn"]  # medians
    assert row["tflops_a_rank"] == pytest.approx(sum(row["flops"].values()) / seconds["turn"] / 1e12)
    assert row["of_peak"] == pytest.approx(row["tflops_a_rank"] / report["peak_tflops"])
    assert row["turn_to_floor"] == pytest.approx(seconds["turn"] / sum(row["floor"].values())) and min(row["floor"].values()) > 0
    assert len(row["all_turns"]) == 2 and row["step_seconds"] == 2 * seconds["turn"] and row["graphs_in_turns"] is None
    assert "1 rank: turn" in said and "sent    nothing" in said and "2 layers" in said and "kernel cpu, eager" in said
    print(report["peer"])
    assert report["peer"]["difference"] < 1e-4 and report["peer"]["eager"] > 0 and "compiled" not in report["peer"]


def test_noise(run):
    """In float32 eager is the truth itself, and the others are off by rounding."""
    noise = run("--layers", 2, "--noise", "--compile")[0]["noise"]
    print(noise)
    assert noise["eager"] == {"float32": 0, "eager": 0, "its second run": 0}
    assert all(0 < noise[way]["float32"] == noise[way]["eager"] < 1e-5 for way in ("keys in reverse", "compiled"))


def of_a_vae(base_dim: int) -> floor.Bench:
    preset = replace(PRESETS["tiny-wan"], vae=dict(base_dim=base_dim))
    return floor.Bench(preset, WanConfig(), (2, 2, 2), 1, torch.device("cpu"), torch.float32, "cpu", False, 1, 0)


def test_a_peers_decode_has_its_own_layout(monkeypatch):
    """Its weights lie as files give them: in the order that ours are read in, its decode was 5 % faster on an H200."""
    import diffusers

    made, real = [], diffusers.AutoencoderKLWan.decode
    monkeypatch.setattr(diffusers.AutoencoderKLWan, "decode", lambda self, *a, **k: (made.append(self), real(self, *a, **k))[1])
    asked = of_a_vae(96)
    ours = floor.random_vae(asked)
    with torch.inference_mode():
        found = peers.decoder(asked, ours, torch.randn(1, 16, *asked.latent))
    assert found["difference"] < 1e-4 and all(p.is_contiguous() for p in made[0].parameters())
    assert not all(p.is_contiguous() for p in ours.parameters())


def test_decodes_are_said_as_they_come(monkeypatch):
    """Not after the last one, for which a GPU may compile longer than one waits."""
    said = []
    monkeypatch.setattr(bench, "alone", lambda *_: said.append("timed") or 1.0)
    bench.bench_vae(of_a_vae(8), [1, 2], 1, False, said.append)
    assert [line.split()[0] for line in said] == ["timed", "decode"] * 2


def test_a_peer_that_is_not_here(run, monkeypatch):
    def absent(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(peers.importlib, "import_module", absent)
    assert run("--layers", 1, "--peer", "diffusers")[1].splitlines()[-1] == "diffusers diffusers is not installed"


def test_sweep_of_two_ranks(run):
    """Every recipe, one process group; each sends what its header's formula says."""
    report, _ = run("--ranks", 2, "--sweep", "--layers", 2, "--steps", 1)
    made = bench.make_bench(bench.parse([*SMALL, "--layers", "2"]))
    names = []
    for row in report["rows"]:
        parallel = ParallelConfig(**row["recipe"] | {"attn2d_size": tuple(row["recipe"]["attn2d_size"])})
        names.append(plan.name_of(parallel))
        assert row["bytes_sent"] == plan.bytes_sent(parallel, made.work, parallel.cfg_size), names[-1]
        assert row["step_seconds"] == 2 * row["seconds"]["turn"] / parallel.cfg_size
    wanted = "ring2 1x2 1x2.reduce_scatter 2x1 2x1.overlapped ul2 ul2.async ul2.fused tp2 cfg2"
    assert names == wanted.split()


def test_sweep_of_some(run):
    report, _ = run("--ranks", 2, "--sweep", "cfg2", "2x1", "--layers", 1, "--steps", 1)
    assert [(row["recipe"]["cfg_size"], row["recipe"]["attn2d_size"]) for row in report["rows"]] == [(2, [1, 1]), (1, [2, 1])]


@pytest.mark.parametrize("world", [1, 2, 6, 8, 72])
def test_recipes_spend_the_ranks(world):
    found = list(choose.recipes(world))
    assert {p.world for p in found} == {world} and len(set(found)) == len(found)
    squares = {p.attn2d_size for p in found if p.cfg_size == 2 and p.ulysses_size == 4}
    assert world != 72 or (3, 3) in squares


def test_decode_and_exchange_on_two_ranks(run):
    report, _ = run("--ranks", 2, "--no-denoise", "--vae", "--exchange", "--exchange-tokens", 6, "--size", "32x16",
                    "--chunks", 1, 0, "--steps", 1)  # fmt: skip
    assert report["rows"] == [] and [(row["ranks"], row["chunk"]) for row in report["vae"]] == [(1, 1), (1, 0), (2, 1), (2, 0)]
    assert all(row["seconds"] > 0 for row in report["vae"])
    assert set(report["exchange"]) == {"projections", "ulysses", "ulysses_fused", "ulysses_async"}
    for way in ("ulysses", "ulysses_fused", "ulysses_async"):
        assert 0 < report["exchange"][way]["ready"] < report["exchange"][way]["projected"]


def test_as_a_rank_of_the_rack(run, monkeypatch):
    """One process as the first of 72: what it sends is the formulas', and its kernel sees the shapes of a rank of the rack."""
    seen, real = set(), attention.KERNELS["cpu"]

    def spied(q, k, v):
        seen.add((q.shape[2], k.shape[2], q.shape[1]))
        return real(q, k, v)

    monkeypatch.setitem(attention.KERNELS, "cpu", spied)
    monkeypatch.setattr(attention, "GROUPED", attention.GROUPED | {spied})
    report, said = run("--as-rank-of", "nvl72", "--no-compile", "--layers", 2, "--size", "96x48", "--steps", 1)
    (row,), parallel = report["rows"], read_recipe("nvl72").parallel_config
    made = bench.make_bench(bench.parse([*SMALL, "--layers", "2", "--size", "96x48"]))
    assert row["bytes_sent"] == plan.bytes_sent(parallel, made.work, 2) and set(row["bytes_sent"]) >= {"kv_axis", "q_axis", "cfg"}
    queries, keys, heads, _, passes = plan.attention_pass(parallel, made.work)
    assert (passes, made.work.tokens, queries, heads) == (1, 36, 12, 2) and (queries, keys, heads) in seen, seen
    assert (36, 36, 8) not in seen and "as one of 72 ranks" in said and "cfg2.ul4.3x3" in said and not dist.is_initialized()
    assert sum(row["flops"].values()) / row["seconds"]["turn"] == pytest.approx(36e12 * row["tflops_a_rank"])


def test_what_a_lone_rank_receives():
    """Of each collective, in size and in value: as if every peer had this rank's own."""
    as_rank.open_world(6)
    try:
        m = mesh.open_mesh(torch.device("cpu"), {"ring": 2, "ulysses": 3})
        x = torch.arange(6.0).view(3, 2)
        assert (m.world.size, m.ulysses.size, m.ring.size, m.world.rank) == (6, 3, 2, 0)
        assert torch.equal(mesh.all_to_all(x, m.ulysses), x) and torch.equal(mesh.start_shift(x, m.ring).wait(), x)
        assert torch.equal(mesh.all_gather(x, m.ulysses), x.expand(3, 3, 2))
        assert torch.equal(mesh.reduce_scatter(x, m.ulysses), x.sum(0)) and torch.equal(mesh.all_reduce(x, m.ulysses), x)
        assert mesh.gather_objects("here") == ["here"] * 6 and torch.equal(mesh.broadcast(x, m.world), x)
        counted = {key: n for key, n in m.sent.items() if key[2] == "elements"}
        assert counted == {("ulysses", "all_to_all", "elements"): 4, ("ring", "shift", "elements"): 6,
                           ("ulysses", "all_gather", "elements"): 12, ("ulysses", "reduce_scatter", "elements"): 4,
                           ("ulysses", "all_reduce", "elements"): 8, ("world", "broadcast", "elements"): 30}  # fmt: skip
    finally:
        mesh.close_world()


@pytest.mark.parametrize("world", [1, 2])
def test_calibrate(tmp_path, capfd, one_thread, deadline, world):
    """The planner takes the file, and by its constants the formulas give the seconds that were measured."""
    out, ranks = tmp_path / "here.json", ["--ranks", "2"] if world == 2 else []
    deadline(400)
    assert bench.main([*SMALL, "--size", "96x48", "--layers", "1", "--calibrate", str(out), *ranks]) == 0
    deadline(0)
    said, stored, here = capfd.readouterr().out, json.loads(out.read_text()), machines.find(str(out))
    measured = {"stream", "linear", "attention", "decode"} | ({"latency", "link", "shift"} if world == 2 else set())
    assert set(stored) == {"base", "sources", *measured} and stored["base"] == "h200-nvlink"
    assert all(f"\n{name} " in f"\n{said}" for name in measured) and "for want of a nearer one" in said
    assert next(iter(here.attention)) == "cpu" and here.tail == machines.H200.tail and here.decode["wan"] < 1e12
    made = bench.make_bench(bench.parse([*SMALL, "--size", "96x48", "--layers", "1"]))
    taken = floor.floor(made, ParallelConfig())
    terms = cost.layer(here, "cpu", ParallelConfig(), cost.load_of(made.preset, made.config, made.latent, 1))
    print(f"measured alone {taken}; by the constants {terms}")
    assert 0.3 < terms["attention"] / taken["attention"] < 3 and 0.2 < terms["linears"] / taken["linears"] < 5  # microseconds
    assert choose.main(["--model", "tiny-wan", "--gpus", "2", "--machine", str(out), "--size", "96x48", "--frames", "5"]) == 0
    assert "here.json: attention cpu" in capfd.readouterr().out


@pytest.mark.parametrize(("arguments", "said"), [
    (["--as-rank-of", "nvl72", "--ranks", "2"], "--as-rank-of is one process"),
    (["--as-rank-of", "no"], "recipe no is no file"),
    (["--noise", "--quant", "FP8"], "leave --quant, --sweep and ranks out"),
    (["--noise", "--ranks", "2", "--recipe", "2gpu"], "leave --quant, --sweep and ranks out"),
    (["--ranks", "2", "--sweep", "cfg2", "3x1"], "--sweep 3x1 is none of 2 ranks' recipes: ring2, 1x2, "),
    (["--steps", "0"], "steps is 0; it must be at least 1"),
    (["--recipe", "2gpu"], "the recipe is for 2 ranks (cfg 2), not 1"),
    (["--size", "70x32"], "the nearest is 64x32"),
    (["--frames", "80"], "80 frames is not 4k+1"),
    (["--attention", "fa3"], "attention backend fa3 is not installed here"),
])  # fmt: skip
def test_refusals(arguments, said, capsys):
    assert bench.main([*SMALL, *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("nanovgen.bench: ") and said in error and error.count("\n") == 1
