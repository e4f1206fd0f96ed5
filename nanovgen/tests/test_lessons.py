"""Each scheme's lesson from the command line, and the loader of tensor parallelism's slices."""

import ast
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from nanovgen import checkpoint, tp
from nanovgen.mesh import Axis
from nanovgen.wan import Wan, WanConfig

CPU = torch.device("cpu")
ROOT = Path(__file__).resolve().parents[2]
CONFIG = WanConfig(num_attention_heads=4, attention_head_dim=12, num_layers=1, ffn_dim=96, text_dim=16)


def test_a_rank_reads_its_slices(tmp_path, monkeypatch):
    whole, halves, read = Wan(CONFIG).state_dict(), [], []
    save_file({Wan.hub_name(Wan, name): w for name, w in whole.items()}, tmp_path / "m.safetensors")
    component, read_slice = checkpoint.open_component(tmp_path), checkpoint.read_slice
    monkeypatch.setattr(checkpoint, "read_slice", lambda *given: (read.append(x := read_slice(*given)), x)[1])
    for rank in range(2):
        model = tp.split(checkpoint.build(Wan, CONFIG), Axis("tp", 2, rank))
        cut, read[:], counted = checkpoint.sliced(model), [], []
        checkpoint.load(model, component, CPU, torch.float32, counted.append)
        assert sum(x.nbytes for x in read) == sum(whole[name].nbytes for name in cut) / 2 and len(read) == len(cut) == 21
        assert sum(counted) == sum(w.nbytes for w in model.state_dict().values())
        assert all(w.untyped_storage().nbytes() == w.nbytes for w in model.state_dict().values())
        halves.append(model.state_dict())
    for name, w in whole.items():
        joined = torch.cat([half[name] for half in halves], dim=cut[name][0]) if name in cut else halves[1][name]
        assert torch.equal(joined, w), name


@pytest.mark.parametrize("name", ["blocks.0.mlp_down.weight", "blocks.0.self_attn.to_q.weight", "time_proj.bias"])
def test_wrong_shapes_are_refused_sliced_too(tmp_path, name):
    """A file that holds a rank's half, say."""
    tensors = {Wan.hub_name(Wan, n): w for n, w in Wan(CONFIG).state_dict().items()}
    theirs = Wan.hub_name(Wan, name)
    tensors[theirs] = tensors[theirs].narrow(-1, 0, tensors[theirs].shape[-1] // 2).clone()
    save_file(tensors, tmp_path / "m.safetensors")
    model = tp.split(checkpoint.build(Wan, CONFIG), Axis("tp", 2, 1))
    with pytest.raises(ValueError, match=f"1 tensors differ in shape, first {re.escape(theirs)}"):
        checkpoint.load(model, checkpoint.open_component(tmp_path), CPU, torch.float32)


LINE = re.compile(r"rank (\d+): .*error (\S+) against one device.*; sent (\{.*\}) bytes; the formula says (.+)")


def check_lesson(said: str, ranks: int) -> None:
    lines = [LINE.fullmatch(line) for line in said.splitlines() if line.startswith("rank ") and ": " in line and "sent" in line]
    assert all(lines) and [int(line[1]) for line in lines] == [*range(ranks)], said
    for line in lines:
        sent, formula = ast.literal_eval(line[3]), ast.literal_eval(line[4])
        assert (sent if isinstance(formula, dict) else sum(sent.values())) == formula, line[0]
        assert float(line[2]) < 1e-5 and (ranks == 1 or sent), line[0]


LESSONS = [("ulysses", 1), ("ulysses", 4), ("ring", 3), ("attn2d", 4), ("attn2d", 6), ("cfg", 2), ("tp", 2), ("tp", 4),
           ("vae_parallel", 3)]  # fmt: skip


@pytest.mark.parametrize(("name", "ranks"), LESSONS)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_lesson(name, ranks, monkeypatch, capfd, one_thread, deadline):
    """As python -m, without importing torch anew."""
    monkeypatch.setattr(sys, "argv", [name, "--ranks", str(ranks)])
    deadline(120)
    with pytest.raises(SystemExit) as stop:
        runpy.run_module(f"nanovgen.{name}", run_name="__main__")
    deadline(0)
    said, wrong = capfd.readouterr()
    assert stop.value.code == 0 and not wrong, wrong
    check_lesson(said, ranks)


@pytest.mark.parametrize(("launcher", "arguments", "ranks"), [
    (["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"], [], 2), ([], ["--ranks", "3"], 3),
])  # fmt: skip
def test_lesson_by_itself(launcher, arguments, ranks):
    name = "ulysses"
    command = [sys.executable, *launcher, "-m", f"nanovgen.{name}", *arguments]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=300, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Ulysses: swap a token split") == 1
    check_lesson(done.stdout, ranks)
