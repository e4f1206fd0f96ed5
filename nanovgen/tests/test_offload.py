"""One expert at a time on the device: the same latents, and never two experts; chosen where both do not fit."""

import gc
import math
import weakref
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from nanovgen import choose, generate, summary
from nanovgen import job as jobs
from nanovgen.recipe import Recipe, Request, TorchCompileConfig
from nanovgen.wan import Wan

EXPERTS = ["transformer", "transformer_2"]


@pytest.fixture
def make(pristine, tmp_path, one_thread):
    def call(offload: str, **more: object) -> jobs.Job:
        given = dict(size="64x32", frames=5, steps=4, shift=5.0, offload=offload, out=str(tmp_path / f"{offload}.mp4"))
        return jobs.prepare(Request("a red circle", str(pristine), **given), **more)

    return call


@pytest.fixture
def alive(monkeypatch):
    """Each part that is loaded, with how many experts were there then, itself counted."""
    real, seen, experts = generate.load, [], weakref.WeakSet()

    def load(job, part, stages):
        model = real(job, part, stages)
        if isinstance(model, Wan):
            experts.add(model)
        gc.collect()
        seen.append((part, len(experts)))
        return model

    monkeypatch.setattr(generate, "load", load)
    return seen


def latents(job: jobs.Job) -> torch.Tensor:
    return load_file(job.out.with_suffix(".latents.safetensors"))["latents"]


@pytest.mark.parametrize("compile", [False, True])
def test_one_at_a_time_and_the_same_latents(make, alive, compile):
    recipe, reports = Recipe(torch_compile_config=TorchCompileConfig(compile)), []
    for offload in ("no", "yes"):
        alive.clear()
        reports.append(generate.generate(make(offload, recipe=recipe)))
        experts = [seen for seen in alive if seen[0] in EXPERTS]
        assert experts == list(zip(EXPERTS, [1, 1] if offload == "yes" else [1, 2], strict=True)), experts
    assert torch.equal(latents(make("no")), latents(make("yes")))
    assert [report["graphs_in_steps"] for report in reports] == ([0, 0] if compile else [None, None])


def test_a_server_keeps_one_of_them(make, alive):
    base = replace(make("yes"), kept=jobs.Kept(everything=True))
    found = []
    for _ in range(2):
        generate.generate(make("yes", like=base))
        found.append(latents(base))
        assert EXPERTS[0] not in base.kept.parts and {EXPERTS[1], "text_encoder", "vae"} == {*base.kept.parts}
    assert torch.equal(*found) and {count for part, count in alive if part in EXPERTS} == {1}


def test_auto_goes_by_memory(make):
    request = Request("x", "wan2.2-t2v-a14b", dtype="bfloat16")
    job, no, yes = (jobs.prepare(replace(request, offload=way), dry_run=True) for way in ("auto", "no", "yes"))
    both, one = summary.predicted_peak(job), summary.predicted_peak(job, offload=True)
    assert both - one == summary.weight_bytes(job, EXPERTS[0]) > 28e9
    assert [summary.offloads(job, memory) for memory in (math.inf, both, both - 1, 0)] == [False, False, True, True]
    assert not summary.offloads(no, 0) and summary.offloads(yes, math.inf)
    assert f"{both / 1e9:.2f} GB on a device, or {one / 1e9:.2f} GB with one expert" in summary.describe(job)["needs"]
    served = replace(job, kept=jobs.Kept(everything=True))  # which holds more, and is not asked whether it all fits
    assert summary.predicted_peak(served) > both and not summary.offloads(served, both)
    assert not summary.offloads(make("auto"), 0)  # there the text encoder is the largest: it would save nothing


def test_the_planner_says_so_to_the_run(monkeypatch):
    job = jobs.prepare(Request("x", "wan2.2-t2v-a14b", dtype="bfloat16"), dry_run=True)
    for room, wanted in ((100e9, "auto"), (45e9, "yes")):
        monkeypatch.setattr(summary, "room", lambda *_, room=room: room)
        found, line = choose.choose(job, 1)
        assert found.request.offload == wanted and (".offload" in line) == (wanted == "yes")
    with pytest.raises(ValueError, match="the least needs"):
        choose.choose(replace(job, request=replace(job.request, offload="no")), 1)


def test_refusals():
    for model, offload, said in (("tiny-wan", "x", "not one of auto, yes, no"), ("tiny-cosmos", "yes", "has one transformer"),
                                 ("wan2.1-t2v-1.3b", "no", "has one transformer")):  # fmt: skip
        with pytest.raises(ValueError, match=said):
            jobs.prepare(Request("x", model, offload=offload), dry_run=True)
