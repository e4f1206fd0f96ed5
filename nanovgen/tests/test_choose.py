"""The planner: the model against what was published, its terms one by one, what it chooses, and what it refuses."""

import copy
import json
from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from nanovgen import article, checkpoint, choose, cost, machines, plan, summary, tp
from nanovgen.article import DECODE, FITTED, PREDICTED, RACK, RING_TO_GRID, Row, denoise, recipe
from nanovgen.checkpoint import final_dtype
from nanovgen.machines import GB200, H200
from nanovgen.mesh import Axis
from nanovgen.recipe import PRESETS, ParallelConfig
from nanovgen.vae import VAE, VAEConfig

WAN = article.load("wan2.2-t2v-a14b")


def off(row: Row, machine: machines.Machine = GB200) -> float:
    return abs(denoise(row, machine) / row.seconds - 1)


@pytest.fixture(scope="module")
def ranked():
    """A ranking by model and flags, once each."""
    known = {}

    def call(*arguments: object) -> choose.Ranking:
        arguments = tuple(map(str, arguments))
        if arguments not in known:
            known[arguments] = choose.asked(choose.parse([*arguments]))[1]
        return known[arguments]

    return call


@pytest.fixture
def plan_says(capsys):
    def call(*arguments: object) -> tuple[int, str, str]:
        code = choose.main([str(a) for a in arguments])
        return code, *capsys.readouterr()

    return call


# The published times


def test_published_times():
    print(article.table())
    assert len(FITTED) == 15 and len(PREDICTED) == 8
    assert all(off(row) < 0.15 for row in FITTED + PREDICTED)
    assert sum(off(row) < 0.10 for row in FITTED) >= 12
    assert all(abs(article.end_to_end(row) / row.seconds - 1) < 0.10 for row in article.END_TO_END)


@pytest.mark.parametrize("lost", [{"ring_step": 0.0}, {"sms": 1}, {"link": 1e11}, {"attention": {"fa4": 1e15}}, {"stream": 1e12}])
def test_each_constant_is_needed(lost):
    """Negative controls: without least ring step, waves of tiles, the link's limit ... the times come out otherwise."""
    broken = replace(GB200, **lost)
    assert max(off(row, broken) for row in FITTED) > 0.15 or sum(off(row, broken) < 0.10 for row in FITTED) < 12


def test_held_back_half():
    """Each row from constants that never saw it. The ring of 9 alone shows the least ring step: it is in both halves."""
    for i, (row, found) in enumerate(zip(FITTED, article.held_back(), strict=True)):
        if i != article.ANCHOR:
            assert abs(found / row.seconds - 1) < 0.20, row


def test_the_table_of_constants_is_the_fit():
    found, decode = article.fit(FITTED), article.fit_decode()
    assert found.attention["fa4"] == pytest.approx(GB200.attention["fa4"], rel=0.01)
    assert (found.link, found.ring_step) == pytest.approx((GB200.link, GB200.ring_step), rel=0.02)
    assert decode.decode["wan"] == pytest.approx(GB200.decode["wan"], rel=0.01)
    assert (decode.vae_exchange, decode.vae_hop) == pytest.approx((GB200.vae_exchange, GB200.vae_hop), rel=0.02)


def test_published_orders():
    assert denoise(Row("", RACK, 1)) < denoise(Row("", recipe(1, 8, (3, 3)), 1))  # CFG before Ulysses
    ratios = {cp: denoise(Row("", ring, 1)) / denoise(Row("", grid, 1)) for cp, (ring, grid, _) in RING_TO_GRID.items()}
    assert 1 < ratios[2] < ratios[4] < ratios[9]
    assert all(abs(ratios[cp] - wanted) < 0.06 for cp, (*_, wanted) in RING_TO_GRID.items()), ratios
    decode = {n: cost.decode_seconds(GB200, WAN, n) for n in DECODE}
    assert min(decode, key=decode.get) == 8 and decode[1] > decode[2] > decode[4] > decode[8] < decode[16], decode
    assert all(abs(decode[n] / DECODE[n] - 1) < 0.10 for n in DECODE), decode


def test_our_own_block():
    """Wan A14B's on one H200, 72,000 tokens, compiled, FA3: 226.9 ms, of which 156.3 and 64.0 alone (`bench`, 40 layers)."""
    found = cost.layer(H200, "fa3", ParallelConfig(), WAN)
    assert found["attention"] == pytest.approx(156.3e-3, rel=0.02) and found["linears"] == pytest.approx(64.0e-3, rel=0.02)
    assert sum(found.values()) == pytest.approx(226.9e-3, rel=0.02)


OURS = {  # seconds of a step of two streams on two H200s, 8 of 40 layers, FA3, compiled but for tp, 2026-11-30: README.md
    "one rank": (3.6122, {}),
    "ulysses 2": (1.9170, dict(ulysses_size=2)),
    "ulysses 2 async": (1.9026, dict(ulysses_size=2, async_ulysses=True)),
    "ulysses 2 fused": (1.9119, dict(ulysses_size=2, fused_ulysses=True)),
    "ring 2": (1.8928, dict(ring_size=2)),
    "1x2": (1.9324, dict(attn2d_size=(1, 2))),
    "2x1": (1.8787, dict(attn2d_size=(2, 1))),
    "2x1 overlapped": (1.8944, dict(attn2d_size=(2, 1), attn2d_merge="overlapped")),
    "cfg 2": (1.8482, dict(cfg_size=2)),
    "1x2 reduce_scatter": (1.9815, dict(attn2d_size=(1, 2), attn2d_merge="reduce_scatter")),
    "tp 2, eager": (2.5584, dict(tp_size=2)),
}


@pytest.mark.parametrize("name", OURS)
def test_our_own_steps(name):
    measured, degrees = OURS[name]
    found = sum(cost.step(H200, "fa3", ParallelConfig(**degrees), WAN).values()) / 5  # 8 of 40 layers
    print(f"{name}: measured {measured:.3f} s, predicted {found:.3f} s, {found / measured - 1:+.1%}")
    assert found == pytest.approx(measured, rel=0.07)


def test_our_own_rank_of_the_rack():
    """One H200 as one of nvl72's ranks, 40 layers (`bench --as-rank-of nvl72 --compile`, README.md): all but the links."""
    found = cost.step(H200, "fa3", RACK, WAN)
    computed = sum(seconds for name, seconds in found.items() if name not in ("ulysses", "kv_axis", "q_axis"))
    print(f"measured 0.2874 s, predicted {computed:.4f} s, {computed / 0.2874 - 1:+.1%}")
    assert computed == pytest.approx(0.2874, rel=0.07)


# The terms


def test_kernels_run_in_waves():
    full = cost.attention_seconds(GB200, 1e15, 256 * 152, 1000, 1, 128)
    assert full == pytest.approx(4 * 256 * 152 * 1000 * 128 / 1e15)
    assert cost.attention_seconds(GB200, 1e15, 256 * 152 + 1, 1000, 1, 128) == 2 * full
    assert cost.attention_seconds(GB200, 1e15, 256 * 76, 1000, 2, 128) == full
    assert cost.linear_seconds(GB200, 128 * 152, 5120, 256) == pytest.approx(2 * 128 * 152 * 5120 * 256 / GB200.linear)
    assert cost.linear_seconds(GB200, 1, 5120, 30720) == pytest.approx(2 * 5120 * 30720 / GB200.stream)  # the matrix is read


def test_bytes_are_the_schemes_own():
    """An infinitely fast link leaves latencies; what it took besides is bytes_sent over the link."""
    free = replace(GB200, link=1e30)
    for parallel, calls in ((RACK, {"ulysses": 4, "kv_axis": 1, "q_axis": 3}), (recipe(2, 4), {"ulysses": 4}),
                            (ParallelConfig(tp_size=4), {"tp": 6})):  # fmt: skip
        with_link, without = (cost.layer(m, "fa4", parallel, WAN) for m in (GB200, free))
        sent = plan.bytes_sent(parallel, WAN.work, 1)
        for axis, count in calls.items():
            assert without[axis] == pytest.approx(count * GB200.latency)
            assert with_link[axis] - without[axis] == pytest.approx(sent[axis] / 40 / GB200.link), axis


def test_what_is_hidden():
    ways = [replace(RACK, **way) for way in ({}, {"fused_ulysses": True}, {"async_ulysses": True})]
    plain, fused, ahead = (cost.layer(GB200, "fa4", p, WAN) for p in ways)
    assert plain["ulysses"] - fused["ulysses"] == pytest.approx(2 * GB200.latency)
    assert ahead["ulysses"] == pytest.approx(plain["ulysses"] / 2)  # v and q are hidden behind q and k, which take longer
    slow = cost.layer(replace(GB200, push=1e9), "fa4", ways[2], WAN)
    assert slow["ulysses"] > 2 * plain["ulysses"]  # and if they do not, nothing is hidden for free
    overlapped = cost.layer(GB200, "fa4", replace(RACK, attn2d_merge="overlapped"), WAN)
    assert overlapped["kv_axis"] == 0 < plain["kv_axis"] and overlapped["merges"] > plain["merges"]
    ring = cost.layer(GB200, "fa4", recipe(2, 4, ring=3), WAN)
    assert ring["ring"] == pytest.approx(2 * GB200.latency)  # a pass is longer than its keys' travel
    assert cost.layer(replace(GB200, shift=1e9), "fa4", recipe(2, 4, ring=3), WAN)["ring"] > 0.1


def test_who_is_near():
    """On hosts of 8: the innermost axes inside one, the outer ones across; on a rack all are near."""
    m, p = machines.find("h200-infiniband"), recipe(2, 4, (2, 2))  # 32 ranks: cfg's neighbours are 16 apart
    spans = [cost.span(p, axis) for axis in ("ulysses", "q_axis", "kv_axis", "cfg", "seq")]
    assert spans == [(4, 1), (2, 4), (2, 8), (2, 16), (16, 1)]
    near = [cost.near(8, 32, *cost.span(p, axis)) for axis in ("ulysses", "q_axis", "kv_axis", "cfg", "seq")]
    assert near == [4, 2, 1, 1, 8] and cost.near(72, 32, 2, 16) == 2
    assert cost.near(8, 12, 12, 1) == 4 and cost.near(8, 12, 3, 1) == 1  # ranks 8 to 11; rank 8 beside 6 and 7
    assert cost.exchange_seconds(m, p, "kv_axis", 45e9, 0) == pytest.approx(1)
    assert cost.exchange_seconds(m, p, "ulysses", 249e9, 0) == pytest.approx(1)


@pytest.mark.parametrize("model", ["wan2.2-t2v-a14b", "cosmos3-super"])
def test_counted_decode(model):
    """Flop a pixel by torch's counter, and the halos a chunk exchanges by counting them."""
    vae, load = checkpoint.build(VAE, VAEConfig(**PRESETS[model].vae)), article.load(model)
    f, y, x = load.work.latent
    frame, stream, flops = torch.empty(1, vae.config.z_dim, 1, y, x, device="meta"), Counting(), []
    with torch.inference_mode():
        for _ in range(2):  # the first frame is one, each later one four
            stream.borders, counter = 0, FlopCounterMode(display=False)
            with counter:
                vae.decoder(frame, stream)
            flops.append(counter.get_total_flops())
    assert (flops[0] + (f - 1) * flops[1]) / load.pixels == pytest.approx(cost.DECODE_FLOP[load.family], rel=0.01)
    assert cost.decoder_halos(load.vae, y)[0] == stream.borders + 2


class Counting(cost.vae_parallel.Ledger):
    def __init__(self):
        super().__init__(4)
        self.borders = 0

    def border(self, x, act):
        self.borders += 1
        return super().border(x, act)


# What is chosen


@pytest.mark.parametrize("world", [1, 6, 8, 72])
def test_candidates(world):
    found = list(choose.candidates(world))
    assert len(set(found)) == len(found) and {p.world for p in found} == {world}
    assert set(choose.recipes(world)) <= set(found)


def test_wan_on_a_rack(ranked):
    found = ranked("--frames", 77)
    best, named = found.choices[0], choose.find(found, replace(RACK, parallel_vae_size=8))
    assert (best.parallel.cfg_size, best.parallel.ulysses_size, best.parallel.attn2d_size) == (2, 4, (3, 3))
    assert best.step <= named.step and best.parallel.parallel_vae_size == 8
    assert "faster a step than the named recipe, cfg2.ul4.3x3" in choose.reasons(found)[0]
    assert best.total == pytest.approx(sum(best.parts.values())) and best.parts["denoise"] == pytest.approx(40 * best.step)


def test_cosmos_likes_tall_grids(ranked):
    """Eight queries' heads read one key head: keys are cheap to send, queries and results are not."""
    found = ranked("--model", "cosmos3-super")
    tall, named = found.choices[0], choose.find(found, replace(RACK, parallel_vae_size=8))
    rows, columns = tall.parallel.attn2d_size
    assert rows > columns and tall.step < named.step
    said = f"{1 - tall.step / named.step:.1%} faster a step than the named recipe, cfg2.ul4.3x3"
    assert said in choose.reasons(found)[0], choose.reasons(found)
    column = choose.find(found, replace(named.parallel, attn2d_size=(9, 1)))
    ours = {axis: column.sent.get(axis, 0) / named.sent[axis] for axis in ("kv_axis", "q_axis")}
    assert ours == {"kv_axis": pytest.approx(4), "q_axis": 0}
    assert sum(column.sent.values()) < 0.6 * sum(named.sent.values())


@pytest.mark.parametrize("model", ["wan2.2-t2v-a14b", "cosmos3-super"])
def test_replicated_work_on_72(ranked, model):
    found = ranked("--frames", 77) if model.startswith("wan") else ranked("--model", model)
    parts = cost.replicated(GB200, found.load, 1)
    print(choose.replicated(found, found.choices[0]))
    assert sum(parts.values()) == found.choices[0].terms["replicated"] <= 0.03 * found.choices[0].step
    assert all(part in choose.replicated(found, found.choices[0]) for part, seconds in parts.items() if seconds)


def test_memory_decides(ranked, plan_says):
    """80 GB hold one rank's two experts; 48 hold one, and the other is read anew; 30 hold half of one; and 20 get a line."""
    at = ("--machine", "h200-nvlink", "--memory")
    whole, one = (ranked("--gpus", 1, *at, memory).choices[0] for memory in (80, 48))
    assert 60e9 < whole.memory < 77e9 and not whole.offload and whole.name == "1 rank"
    assert one.offload and one.memory < 45e9 and one.name == "1 rank.offload" and one.step == whole.step
    assert one.total - whole.total == pytest.approx(one.parts["read"]) and one.parts["read"] == pytest.approx(57.2 / 5, rel=0.01)
    split = ranked("--gpus", 2, *at, 30)
    assert split.choices[0].parallel.tp_size == 2 and split.choices[0].offload and split.choices[0].memory < 27e9
    assert any(words.startswith("needs 3") and words.endswith("a card has 30") for _, _, words in split.refused.values())
    code, _, error = plan_says("--gpus", 1, *at, 30)
    assert code == 2 and error.count("\n") == 1 and "the least needs" in error and "there are 30; use more ranks" in error
    _, _, error = plan_says("--gpus", 2, *at, 20)
    assert f"the least needs {(split.choices[0].memory + 3e9) / 1e9:.3g} GB a card and there are 20" in error  # tp 2, not ring 2


def test_what_it_prints(plan_says):
    code, out, error = plan_says("--model", "wan2.1-t2v-1.3b", "--gpus", 8, "--machine", "h200-nvlink", "--top", 2)
    lines = out.splitlines()
    assert code == 0 and error == "" and lines[0].startswith("machine   h200-nvlink: attention fa3 676 TFLOP/s")
    assert [line.split()[0] for line in lines[2:5]] == ["rank", "1", "2"] and "32760 tokens" in lines[1]
    assert [line for line in lines if line.startswith("refused") and "12 heads do not split over ulysses 8" in line]
    kinds = [line.split(" such as ")[1].partition(": ")[2].partition(";")[0] for line in lines if line.startswith("refused")]
    assert len(kinds) == len(set(kinds)) and any(line.startswith("whole") and "% of a step" in line for line in lines)


@pytest.mark.parametrize(("arguments", "said"), [
    (["--machine", "h300"], "machine h300 is no file; by name there are: gb200-nvl72"),
    (["--gpus", "0"], "gpus is 0"),
    (["--frames", "80"], "80 frames is not 4k+1"),
    (["--attention", "fa2"], "gb200-nvl72 has no rate of attention kernel fa2; it has fa4"),
])  # fmt: skip
def test_refusals(plan_says, arguments, said):
    code, out, error = plan_says(*arguments)
    assert code == 2 and out == "" and error.startswith("nanovgen.plan: ") and said in error and error.count("\n") == 1


def test_measured_constants(tmp_path):
    """A file's constants go over those of its base; what it does not know of it keeps; what nobody knows is refused."""
    path = tmp_path / "ours.json"
    path.write_text(json.dumps({"base": "h200-nvlink", "link": 3e11, "attention": {"cudnn": 6e14}, "sources": {"link": "ours"}}))
    found = machines.find(str(path))
    assert found.link == 3e11 and found.attention == H200.attention | {"cudnn": 6e14} and found.shift == H200.shift
    assert found.sources["link"] == "ours" and found.sources["linear"] == H200.sources["linear"]
    path.write_text(json.dumps({"base": "h200-nvlink", "lnik": 3e11}))
    with pytest.raises(ValueError, match="unknown constant lnik"):
        machines.find(str(path))
    path.write_text("[]")
    with pytest.raises(ValueError, match="is not JSON with the base"):
        machines.find(str(path))


def test_every_constant_has_a_source():
    said = {name for m in machines.MACHINES.values() for name in m.attention}
    for m in machines.MACHINES.values():
        named = {name for names in m.sources for name in names.split(", ")}
        wanted = set(vars(m)) - {"name", "domain", "host", "sources"}
        assert wanted <= named | said, (m.name, wanted - named)


@pytest.mark.parametrize(("card", "name"), [
    ("NVIDIA H200", "h200-nvlink"), ("NVIDIA B200", "b200-nvlink"), ("NVIDIA GB200", "gb200-nvl72"),
    ("NVIDIA A100-SXM4-80GB", "h200-nvlink"),
])  # fmt: skip
def test_cards(card, name):
    m, note = machines.of_device(card, 8, 8)
    assert m.name == name and ("there are none of NVIDIA A100" in note) == ("A100" in card)
    assert machines.of_device("NVIDIA H200", 16, 8)[0].name == "h200-infiniband"


# run.py without --recipe


def test_run_takes_the_best(ask, wide_folder):
    """Six ranks of eight heads: no recipe file of ours is for six."""
    result = ask("--model", wide_folder, "--ranks", 6)
    assert result.code == 0, result
    assert result.lines["ranks"].startswith("6: cfg 2") and "the fastest of" in result.lines["chosen"]
    assert "--recipe takes another" in result.lines["chosen"]


def test_run_honours_a_recipe_and_says_so_of_one_rank(ask, recipe_file="2gpu"):
    given = ask("--ranks", 2, "--recipe", recipe_file, "--dry-run")
    assert given.lines["ranks"].startswith("2: cfg 2") and "chosen" not in given.lines
    assert "one rank" in ask("--dry-run").lines["chosen"]


def test_run_without_guidance_splits_no_streams(ask):
    lines = ask("--ranks", 2, "--dry-run", "--guidance", 1, "--guidance-low", 1).lines
    assert "cfg" not in lines["ranks"] and lines["negative"] == "not used"


def test_run_refuses_what_does_not_fit(refused, monkeypatch):
    monkeypatch.setattr(choose, "place", lambda job, world: (H200, "", 3e9 + 1e6))
    line = refused()
    assert "no recipe of 1 ranks fits" in line and "--recipe tries one all the same" in line


@pytest.mark.parametrize("model", ["tiny-wan", "tiny-cosmos"])
def test_weights_of_a_tensor_parallel_rank(model):
    """Counted as the loader cuts them, both of Cosmos3's towers too."""
    job, _ = choose.asked(choose.parse(["--model", model, "--gpus", "2"]))
    two = choose.with_(job, ParallelConfig(tp_size=2))
    for part, whole in job.models.items():
        cut = tp.split(copy.deepcopy(whole), Axis("tp", 2))
        held = sum(p.numel() * final_dtype(cut, name, job.vae_dtype if part == "vae" else job.dtype).itemsize
                   for name, p in cut.state_dict().items())  # fmt: skip
        alone, found = (summary.weight_bytes(j, part) for j in (job, two))
        assert found == held and (found < 0.7 * alone) == (part not in ("vae", "text_encoder")), part


def test_two_towers_are_cut(ranked):
    """Cosmos3-Super needs 66 GB on a rank, for one of its towers at a time, and half of that on each of two."""
    found = ranked("--model", "cosmos3-super", "--gpus", 4, "--machine", "h200-nvlink", "--memory", 40)
    assert {c.parallel.tp_size for c in found.choices} == {2, 4} and 33e9 < found.choices[0].memory < 37e9


def test_weights_are_counted_once_a_layout(monkeypatch):
    """Of the ranked recipes, most with one expert at a time, many hold the same weights; counting them is the slow part."""
    calls, real = [], summary.weight_bytes
    monkeypatch.setattr(summary, "weight_bytes", lambda *given: calls.append(given) or real(*given))
    _, found = choose.asked(choose.parse(["--model", "wan2.2-t2v-a14b", "--gpus", "16", "--memory", "48"]))
    assert sum(c.offload for c in found.choices) > 100 and len(calls) < len(found.choices) / 2


def test_memory_is_summarys():
    """Not decided twice: the ranking's figure is what a run with that recipe would print."""
    job, found = choose.asked(choose.parse(["--model", "tiny-wan", "--gpus", "4"]))
    for c in found.choices[::7]:
        assert c.memory == summary.predicted_peak(choose.with_(job, c.parallel), c.offload), c.name
