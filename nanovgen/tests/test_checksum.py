"""Ranks whose latents differ are seen, and named; and the same request gives the same bytes again."""

import os
from pathlib import Path

import pytest
import torch
from conftest import PROMPT

from nanovgen import checksum, mesh, scheduler


def flip(x: torch.Tensor, place: int, bit: int) -> torch.Tensor:
    """x with one bit of one value turned over."""
    bits = x.clone().view(torch.int32)
    bits.flatten()[place] ^= -(2**31) if bit == 31 else 2**bit
    return bits.view(torch.float32)


def test_checksum():
    """Of every bit, of places, and whatever the memory's order."""
    x = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(0))
    sums = [checksum.checksum(flip(x, place, bit)).item() for place in range(x.numel()) for bit in range(32)]
    sums += [checksum.checksum(x).item(), checksum.checksum(x.flip(1)).item(), checksum.checksum(x + 0.0 * x.abs()).item()]
    assert len({*sums}) == len(sums) - 1 and sums[-1] == sums[-3]
    assert checksum.checksum(x.transpose(0, 2).contiguous().transpose(0, 2)).item() == sums[-1]
    nan = torch.full((4,), float("nan"))
    assert checksum.checksum(nan).item() == checksum.checksum(nan.clone()).item()


ODD = {  # who holds what, by rank; what is said
    "aaaa": None,
    "aaba": "rank 2 are not those of 3 ranks",
    "baaa": "rank 0 are not those of 3 ranks",
    "abca": "rank 1 are not those of 2 ranks (",
    "ab": "rank 1 are not those of rank 0 (",
    "aabb": "rank 2 are not those of 2 ranks (",
}


@pytest.mark.parametrize("held", ODD)
def test_the_odd_rank_is_named_on_all(on_ranks, held):
    def work() -> str:
        axis = mesh.open_mesh(torch.device("cpu"), {"ring": len(held)}).world
        try:
            checksum.check_alike(torch.full((7,), float(ord(held[axis.rank]))), axis, "step 3: the latents")
        except RuntimeError as error:
            return str(error)
        assert axis.sent["world", "all_gather", "bytes"] == 8 * (len(held) - 1)
        return ""

    said = {*on_ranks(len(held), work)}
    assert len(said) == 1
    (line,) = said
    assert line == "" if ODD[held] is None else line.startswith("step 3: the latents of " + ODD[held]) and "\n" not in line
    assert ("one of the two is wrong" in line) == (held in ("ab", "aabb"))


@pytest.fixture
def flipped(monkeypatch):
    """After step `when` (from 1) one rank's copy of the latents has one wrong bit: the lowest, of one value."""
    state, step = scheduler.SOLVERS["unipc"]

    def set_up(rank: int, when: int) -> None:
        def wrong(state, sigmas, i, x, v):
            state, x = step(state, sigmas, i, x, v)
            return state, flip(x, 5, 0) if (i + 1, os.environ["RANK"]) == (when, str(rank)) else x

        monkeypatch.setitem(scheduler.SOLVERS, "unipc", (state, wrong))

    return set_up


@pytest.mark.parametrize(("rank", "when", "every", "seen"), [(2, 1, 1, 1), (0, 2, 2, 2), (3, 4, 10, 4)])
def test_a_flipped_bit_stops_the_run(ask, recipe, flipped, rank, when, every, seen):
    """At the next check, of which the last step has one."""
    flipped(rank, when)
    path = recipe(cfg_size=2, ulysses_size=2)
    result = ask("--ranks", 4, "--recipe", path, "--steps", 4, "--check", every)
    line = result.err.splitlines()[-1]
    assert result.code == 1 and result.err.count("\n") == 1, result.err
    assert f"denoising, step {seen}: the latents of rank {rank} are not those of 3 ranks" in line and not [*Path.cwd().iterdir()]


def test_without_checks_nobody_sees_it(ask, recipe, flipped):
    """What the check is for: the run would end well."""
    flipped(2, 1)
    assert ask("--ranks", 4, "--recipe", recipe(cfg_size=2, ulysses_size=2), "--steps", 4, "--check", 0).code == 0


@pytest.mark.parametrize("parallel", [dict(cfg_size=2, ulysses_size=2), dict(tp_size=2, attn2d_size=[1, 2])])
def test_the_same_bytes_after_a_restart(ask, spawn, finish, recipe, tiny_folder, parallel):
    """Forked from this process, then from one of its own: latents and video are the first ones, byte for byte."""
    shape = ("--model", tiny_folder, "--size", "64x32", "--frames", 5, "--shift", 5, "--out", "v.mp4")
    request = (*shape, "--steps", 3, "--seed", 5, "--ranks", 4, "--recipe", recipe(**parallel, parallel_vae_size=2))
    files, found = [Path(f"v{end}") for end in (".latents.safetensors", ".mp4")], []
    for run in (lambda: ask(*request), lambda: finish(spawn(PROMPT, *request))):
        done = run()
        assert done.code == 0, done.err
        found.append([path.read_bytes() for path in files])
        for path in files:
            path.unlink()
    assert found[0] == found[1]
