"""The ranks of a server: they take the same requests in the same order, fail together, and meet again after a failure.

    rank 0   post 7 -> store | generate .. generate   | done 7                     | post 8
    rank 1   take 7 <- store | generate .. it fails   | failed 7, its groups close | meet again | take 8
    rank 2   take 7 <- store | generate .. cut off    | failed 7 is there already  | meet again | take 8

Between requests nobody waits in a collective: notes are left in the store that the ranks met by, so an idle server never
runs into a collective's timeout. A rank that fails in the middle cannot tell its peers by a collective, for they are in
another one; it leaves a note with the reason, and everyone's groups are broken off and made anew. A thread beside each
rank sees such notes, and sees that rank 0 (for rank 0: that all) still beat; a rank whose beat stops is lost.
"""

import gc
import json
import os
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, replace

import torch

from nanovgen import generate, mesh, plan
from nanovgen import job as jobs
from nanovgen.job import Job
from nanovgen.mesh import Mesh
from nanovgen.recipe import Request

POLL, PULSE, PATIENCE = 0.02, 0.5, 10.0  # seconds: between two looks into the store, two beats, and until a silent rank is lost


class Cancelled(Exception):
    """Raised on all ranks after the same step."""


class Stages(generate.Stages):
    """Stages that end between two steps when rank 0 says so."""

    def wanted(self) -> bool:
        """Rank 0's word on whether to go on."""
        return True

    def step(self, job: Job, i: int, x: torch.Tensor, v: torch.Tensor) -> None:
        stop = torch.tensor([0 if self.wanted() else 1], dtype=torch.int32, device=job.device)
        if mesh.broadcast(stop, job.mesh.world).item():
            raise Cancelled


class Ranks:
    """This rank among them. `lost` is told, from another thread, why no request can be served any more."""

    def __init__(self, base: Job, forked: bool, lost: Callable[[str], None]):
        self.rank, self.world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        self.base, self.forked, self.lost = base, forked, lost
        self.store = mesh.open_store()
        self.number, self.meetings = 0, 0  # of the request, and how often they have met
        self.failure: str | None = None  # of the request that is not settled yet
        self.holding = threading.Lock()  # the groups: while they are closed they cannot be broken off
        self.meet()
        threading.Thread(target=self._watch, name="watch", daemon=True).start()

    def meet(self) -> None:
        """Open the world, or another one in the place of one that was left."""
        parallel, device, ours = self.base.recipe.parallel_config, self.base.device, Mesh()
        if self.world > 1:
            device = mesh.open_world(torch.device(device.type), self.store, f"world {self.meetings}")
            ours = mesh.open_mesh(device, plan.degrees(parallel), parallel.parallel_vae_size)
        self.base = replace(self.base, device=device, mesh=ours)
        self.meetings += 1

    def leave(self) -> None:
        with self.holding:
            mesh.abort(self.base.mesh)
            self.base = replace(self.base, mesh=Mesh())
            gc.collect()  # groups close their connections when the last that knew them is gone
            mesh.close_world()
        if self.base.device.type == "cuda":
            torch.cuda.synchronize()  # a device that is broken ends this rank here
            torch.cuda.empty_cache()

    def prepare(self, request: Request) -> Job:
        """Raises ValueError."""
        return jobs.prepare(request, self.base.recipe, world=self.world, forked=self.forked, like=self.base)

    def post(self, request: Request) -> None:
        """Rank 0: let the others take it."""
        self.store.set(f"request {self.number}", json.dumps(asdict(request)))

    def take(self) -> Request:
        """The others: wait for the next one."""
        while not self.store.check([f"request {self.number}"]):
            time.sleep(POLL)
        return Request(**json.loads(self.store.get(f"request {self.number}")))

    def run(self, request: Request, stages: Stages) -> tuple[dict | None, str | None]:
        """On every rank: what `generate` reports, or why there is nothing: the same on all of them, and nobody is left in it."""
        report = error = None
        self.base.mesh.sent.clear()
        try:
            report = generate.generate(self.prepare(request), stages)
        except Cancelled:
            error = "cancelled"
        except Exception as problem:
            self.failure = f"rank {self.rank}: {' '.join((str(problem) or type(problem).__name__).split())}"
        failed = self._settle()
        return (None, failed) if failed else (report, error)

    def _settle(self) -> str | None:
        """All are done (None), or the first failure, after which they have met again."""
        number = self.number
        done, failed = f"done {number}", f"failed {number}"
        if self.failure:
            self.store.compare_set(failed, "", self.failure)  # the first one counts
        else:
            self.store.add(done, 1)
        while not (broken := self.store.check([failed])) and self.store.add(done, 0) < self.world:
            time.sleep(POLL)
        if broken:
            self.failure = self.store.get(failed).decode()
            self.leave()
            self.meet()
        if self.rank == 0 and number:
            for key in ("request", "done", "failed"):
                self.store.delete_key(f"{key} {number - 1}")  # all have come past it
        first, self.failure = self.failure, None
        self.number += 1
        return first

    def _watch(self) -> None:
        """The thread: beat, look for a note of failure, look for the others' beats."""
        store, cut = self.store.clone(), -1
        heard = {rank: (0, time.monotonic()) for rank in (range(1, self.world) if self.rank == 0 else [0])}
        try:
            while True:
                store.add(f"beat {self.rank}", 1)
                number = self.number
                if cut < number and store.check([f"failed {number}"]):
                    cut = number
                    with self.holding:
                        mesh.abort(self.base.mesh)
                for rank, (beat, since) in heard.items():
                    if (now := store.add(f"beat {rank}", 0)) != beat or now == 0:  # 0: it has not come yet
                        heard[rank] = (now, time.monotonic())
                    elif time.monotonic() - since > PATIENCE:
                        self.lost(f"rank {rank} has not been heard of for {PATIENCE:.0f} s")
                        return
                time.sleep(PULSE)
        except RuntimeError as error:
            self.lost(f"rank {self.rank} can leave no notes any more: {' '.join(str(error).split())[:200]}")
