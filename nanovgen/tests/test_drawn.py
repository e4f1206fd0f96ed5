"""Whatever is asked for, of however many ranks: it equals one rank, or is refused in one line before a weight is read.

    python -m pytest nanovgen/tests/test_drawn.py                    # CASES drawn cases, the same ones every time
    python -m nanovgen.tests.test_drawn --cases 5000 --seed 1        # more of them, or others

A case is a small random checkpoint (Wan with one or two experts, from text or from an image too, or Cosmos3), a request, a
recipe and a number of ranks. What job.prepare takes is made by one rank, and by forked ranks that stay for all cases, joined
anew for each. Equal: latents on every rank within 1e-5 of one rank's, in fp32, and frames on every rank of the parallel VAE
likewise of what one rank decodes of the same latents (of rounding in latents, a random VAE may make twenty times as much).
A refusal must be one of RULES: an error that merely happens to be a ValueError is none.
"""

import argparse
import contextlib
import functools
import io
import os
import pickle
import re
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, given, seed, settings
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "weights"), str(Path(__file__).parent)]  # as conftest.py does; here for the command line

from cases import MOST, Case, Folders, cases  # noqa: E402

from nanovgen import attention, cfg, checkpoint, generate, launch, mesh, plan, ring, vae_parallel  # noqa: E402
from nanovgen import job as jobs  # noqa: E402
from nanovgen.recipe import Recipe, Request  # noqa: E402
from nanovgen.wan import WanConfig  # noqa: E402
from test_parity import error  # noqa: E402

CASES, TOLERANCE, PATIENCE = 300, 1e-5, 180.0  # drawn; relative error; seconds a case may take
RULES = {  # name: what the line says; the first that fits
    "empty prompt": "the prompt is empty",
    "size": "is not a multiple of 16|is not WIDTHxHEIGHT",
    "frames": r"is not 4k\+1",
    "range": "must (be at least|lie in|be above) ",
    "kernel": r"attention backend '?\w+'? (is not|does)",
    "choice": "is not one of|are Cosmos3's; leave them out",
    "grid": "grid karras",
    "boundary": "has one transformer; leave --boundary out",
    "offload": "--offload is for two experts",
    "image": "makes video from|one frame is the image itself",
    "model": "no known model is so",
    "degree": "a degree is at least 1",
    "ranks": r"the recipe is for \d+ ranks",
    "cfg": "guidance has two streams",
    "ring and attn2d": "two ways to cut the same axis",
    "tp": "do not split over tp",
    "ulysses": "do not split over ulysses",
    "fused": "fused ulysses stacks q, k, v",
    "ways": "is a way of attn2d|are ways of ulysses|sends q, k and v one by one",
    "VAE ranks": r"parallel_vae_size \d+ needs as many",
    "VAE halves": "would straddle",
    "VAE strips": r"do not give \d+ VAE ranks one each",
}  # fmt: skip


# What ranks make of them


def make_latents(job: jobs.Job) -> Tensor:
    """As generate.generate does, without files."""
    stages = generate.Stages(job.device)
    with torch.inference_mode():
        texts = generate.encode_texts(job, stages)
        condition = generate.image_condition(job, stages) if job.request.image else None
        return generate.denoise(job, texts, condition, stages)


def make_frames(job: jobs.Job, latents: Tensor) -> Tensor:
    with torch.inference_mode():
        model, chunk = generate.load(job, "vae", generate.Stages(job.device)), job.request.chunk or None
        return torch.cat([*vae_parallel.decode(model, latents, chunk, job.mesh.vae, generate.split_dim(job))], dim=2)


def prepare(request: Request, recipe: Recipe, world: int) -> jobs.Job:
    """As run.py does, but for looking for ffmpeg and a place for the output; a folder's files are opened once."""
    with mock.patch.object(jobs, "open_models", opened):
        return jobs.prepare(request, recipe, True, world, forked=world > 1)


OPENED = {}


def opened(folder: Path, parts: dict, _: jobs.Job | None, read: Callable = jobs.open_models) -> tuple[dict, dict]:
    """Most of a case's time would go into modules that are built anew."""
    if (key := (folder, *parts)) not in OPENED:
        OPENED[key] = read(folder, parts)
    return OPENED[key]


def part(job: jobs.Job, truth: Tensor) -> list[float]:
    """A rank's errors: of its latents and, where a parallel VAE made them on it, its frames."""
    parallel = job.recipe.parallel_config
    if parallel.world > 1:
        mesh.open_world(job.device)
    alone, job = job, replace(job, mesh=mesh.open_mesh(job.device, plan.degrees(parallel), parallel.parallel_vae_size))
    pairs = [(make_latents(job), truth)]
    if parallel.parallel_vae_size > 1 and job.mesh.vae is not None:  # alone it would be one rank's own
        pairs.append((make_frames(job, pairs[0][0]), make_frames(alone, pairs[0][0])))
    return [0.0 if torch.equal(a, b) else error(a, b) for a, b in pairs]


def stay(rank: int, pipe: Connection) -> None:
    """A rank's life: cases until it is killed."""
    threading.Thread(target=launch._die_with_parent, daemon=True).start()
    torch.set_num_threads(1)  # as launch.py does: torch makes its pool anew after a fork, and loader threads would race to it
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # the first rank's bars
    while True:
        world, port, task = pickle.loads(pipe.recv_bytes())
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        try:
            found = part(*task)
        except BaseException:
            found = traceback.format_exc()
        pipe.send(found)
        mesh.close_world()


class Ranks:
    """Forked ranks, of which each case takes the first few. After a failure all are made anew: some may wait for ever."""

    def __init__(self, count: int):
        self.count, self.patience, self.pipes, self.processes = count, PATIENCE, [], []

    def run(self, world: int, task: tuple) -> list[list[float]]:
        """What each rank returned. Raises AssertionError with a rank's words, or that it hung."""
        if not self.processes:
            self.start()
        with launch.reserve_port() as held:
            return self.ask(self.pipes[:world], pickle.dumps((world, held.getsockname()[1], task)))

    def ask(self, pipes: list[Connection], told: bytes) -> list[list[float]]:
        end, found = time.monotonic() + self.patience, {}
        for pipe in pipes:
            pipe.send_bytes(told)
        while len(found) < len(pipes):
            ready = wait([pipe for pipe in pipes if pipe not in found], max(0.0, end - time.monotonic()))
            found |= {pipe: pipe.recv() for pipe in ready}
            said = [f"rank {pipes.index(pipe)}: {words}" for pipe, words in found.items() if isinstance(words, str)]
            if said or not ready:
                self.end()
                silent = f"hung: {len(pipes) - len(found)} ranks said nothing in {self.patience} s"
                raise AssertionError(said[0] if said else silent)
        return [found[pipe] for pipe in pipes]

    def start(self) -> None:
        context = get_context("fork")
        for rank in range(self.count):
            here, there = context.Pipe()
            self.processes.append(context.Process(target=stay, args=(rank, there), daemon=True))
            self.processes[-1].start()
            self.pipes.append(here)

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()
        self.pipes, self.processes = [], []


class Judge:
    """Says of a case which rule refused it, or that it is equal; raises AssertionError where neither holds."""

    def __init__(self, home: Path):
        self.folders, self.ranks, self.counts = Folders(home), Ranks(MOST), Counter()
        self.truth = functools.lru_cache(64)(lambda request: make_latents(prepare(request, Recipe(), 1)))

    def judge(self, case: Case) -> str:
        image = str(self.folders.image) if case.image else None
        request = replace(case.request, model=str(self.folders.find(case.config, case.experts)), image=image)
        try:
            with mock.patch.object(checkpoint, "load", side_effect=AssertionError("a weight was read")):
                recipe = case.recipe()
                job = prepare(request, recipe, case.world)
        except ValueError as refusal:
            rules = [name for name, words in RULES.items() if re.search(words, str(refusal))]
            assert rules and "\n" not in str(refusal), f"refused by {rules}: {refusal}"
            return f"refused: {rules[0]}"
        vae, found = recipe.parallel_config.parallel_vae_size, self.ranks.run(case.world, (job, self.truth(request)))
        assert vae == 1 or sum(len(errors) == 2 for errors in found) == vae
        worst = max(max(errors) for errors in found)
        assert worst <= TOLERANCE, f"{worst:.1e} from one rank's"
        return "equal to the bit" if worst == 0 else "equal"

    def __call__(self, case: Case) -> None:
        with contextlib.redirect_stderr(io.StringIO()):  # one rank's bars
            self.counts[self.judge(case)] += 1
        if (done := sum(self.counts.values())) % CASES == 0:
            print(f"{done} cases ...", flush=True)

    def table(self, seconds: float) -> str:
        equal = sum(n for name, n in self.counts.items() if name.startswith("equal"))
        rows = [f"{n:6} {name}" for name, n in self.counts.most_common()]
        return "\n".join([f"{sum(self.counts.values())} cases in {seconds:.0f} s, {equal} run", *rows])


def draw_cases(judge: Judge, count: int, number: int | None = None) -> str:
    """Judge so many drawn cases; without a number always the same ones. The first that fails is made simple and raised."""
    options = settings(max_examples=count, deadline=None, database=None, derandomize=number is None, print_blob=False,
                       suppress_health_check=list(HealthCheck))  # fmt: skip
    test, start = options(given(cases())(judge.__call__)), time.monotonic()
    (test if number is None else seed(number)(test))()
    return judge.table(time.monotonic() - start)


@pytest.fixture
def judge(tmp_path):
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # a forked child of a process whose thread pool has started must not use it
    judge = Judge(tmp_path)
    yield judge
    judge.ranks.end()
    torch.set_num_threads(before)


def test_drawn_cases_equal_one_rank_or_are_refused(judge, capsys):
    table = draw_cases(judge, CASES)
    with capsys.disabled():
        print(f"\n{table}")
    assert sum(judge.counts.values()) >= CASES and sum(n for name, n in judge.counts.items() if "equal" in name) >= CASES // 3


ASKED = Request("a", size="48x32", frames=5, steps=2, guidance=3.0, device="cpu", shift=5.0)
EXAMPLE = Case(WanConfig(3, 6, num_layers=1, ffn_dim=36, text_dim=32), 2, False, ASKED, dict(ring_size=3), 3)


def lose_a_block(q: Tensor, k: Tensor, v: Tensor, prefix: object, axis: mesh.Axis, cut: mesh.Cut, kernel: Callable,
                 merge: attention.Merge) -> Tensor:  # fmt: skip
    """A ring that never sees the last rank's keys."""
    parts = [attention.attention(q, *block, kernel) for block in ring.blocks(k, v, axis, cut)]
    return merge(parts[: 1 + axis.rank], q.dtype)[0]


BROKEN = {  # what is broken, the case, what is said of it
    "a scheme": (lambda: mock.patch.object(plan, "ring", lose_a_block), EXAMPLE, "from one rank's"),
    "no refusal": (lambda: mock.patch.object(plan, "check_heads"), replace(EXAMPLE, parallel=dict(ulysses_size=2), world=2),
                   r"rank \d: Traceback(.|\n)*do not split"),
    "a late refusal": (lambda: mock.patch.object(plan, "check", lambda *_: checkpoint.load()), EXAMPLE, "a weight was read"),
    "an accident": (lambda: mock.patch.object(jobs, "resolve", lambda *_: int("x")), EXAMPLE, r"by \[\]: invalid literal"),
    "a rank that waits": (lambda: mock.patch.object(cfg, "guide", lambda *_: time.sleep(99)), EXAMPLE, "hung"),
}  # fmt: skip


@pytest.mark.parametrize("what", BROKEN)
def test_broken_is_seen(judge, what):
    breaks, case, said = BROKEN[what]
    judge.judge(case)  # right, or refused, as long as nothing is broken
    judge.ranks.end()  # those to come are forked from a broken parent
    judge.ranks.patience = 3 if what == "a rank that waits" else PATIENCE
    with breaks(), pytest.raises(AssertionError, match=said):
        judge.judge(case)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=CASES, help=f"how many (default {CASES})")
    parser.add_argument("--seed", type=int, help="draw others than the test does")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as home:
        judge = Judge(Path(home))
        try:
            print(draw_cases(judge, args.cases, args.seed))
        finally:
            judge.ranks.end()


if __name__ == "__main__":
    main()
