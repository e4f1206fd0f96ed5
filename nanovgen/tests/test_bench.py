"""The bench: counted work against torch's own counter, figures that agree with each other, every recipe on forked ranks."""

import json

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from nanovgen import bench, floor, plan
from nanovgen.recipe import ParallelConfig

SMALL = ["--size", "64x32", "--frames", "5", "--text", "7", "--steps", "2"]


@pytest.fixture
def run(tmp_path, capsys, one_thread, deadline):
    """main's JSON and what it printed; forked ranks print past capsys."""

    def call(*arguments: object) -> tuple[dict, str]:
        out = tmp_path / "bench.json"
        deadline(150)
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
    assert "one rank: turn" in said and "sent    nothing" in said and "2 layers" in said and "kernel cpu, eager" in said
    print(report["peer"])
    assert report["peer"]["difference"] < 1e-4 and report["peer"]["eager"] > 0 and "compiled" not in report["peer"]


def test_a_peer_that_is_not_here(run, monkeypatch):
    def absent(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(bench.importlib, "import_module", absent)
    assert run("--layers", 1, "--peer", "diffusers")[1].splitlines()[-1] == "diffusers diffusers is not installed"


def test_sweep_of_two_ranks(run):
    """Every recipe, one process group; each sends what its header's formula says."""
    report, _ = run("--ranks", 2, "--sweep", "--layers", 2, "--steps", 1)
    made = bench.make_bench(bench.parse([*SMALL, "--layers", "2"]))
    names = []
    for row in report["rows"]:
        parallel = ParallelConfig(**row["recipe"] | {"attn2d_size": tuple(row["recipe"]["attn2d_size"])})
        names.append(bench.name_of(parallel))
        assert row["bytes_sent"] == plan.bytes_sent(parallel, made.work, parallel.cfg_size), names[-1]
        assert row["step_seconds"] == 2 * row["seconds"]["turn"] / parallel.cfg_size
    assert names == ["tp2", "ulysses2", "ulysses2 async", "ulysses2 fused", "ring2", "q_axis2", "q_axis2 reduce_scatter",
                     "kv_axis2", "kv_axis2 overlapped", "cfg2"]  # fmt: skip


@pytest.mark.parametrize("world", [1, 2, 6, 8, 72])
def test_recipes_spend_the_ranks(world):
    found = list(bench.recipes(world))
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


@pytest.mark.parametrize(("arguments", "said"), [
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
