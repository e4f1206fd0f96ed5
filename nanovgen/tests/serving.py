"""A server as its own process, and a small HTTP client for it: what the tests of serving and the soak share."""

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
SMALL = ("--size=64x32", "--frames=5", "--steps=2", "--shift=5")
SOON = 15  # seconds from a fault to the last process's end: the promise
PATIENCE = 60  # seconds for what has no promise, on a busy machine too; a collective would wait for 300


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Answer(NamedTuple):
    status: int
    body: bytes
    headers: dict[str, str]

    @property
    def json(self) -> dict:
        return json.loads(self.body)

    @property
    def error(self) -> str:
        return self.json["error"]["message"]


class Server:
    """One process in `folder`; more flags as they are given. `code` runs before it, on every rank."""

    def __init__(self, folder: Path, *flags: object, code: str = "", torchrun: int = 0):
        self.folder, self.port = folder, free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        folder.mkdir(exist_ok=True)
        start = f"import sys\nsys.path.insert(0, {str(ROOT)!r})\n{code}\nfrom nanovgen import serve\nsys.exit(serve.main())\n"
        program = folder / "server.py"
        program.write_text(start)
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={torchrun}"] if torchrun else []
        given = [*SMALL, "--port", self.port, "--folder", folder / "videos", *flags]
        command = [sys.executable, *launcher, str(program), *map(str, given)]
        with (folder / "log").open("a") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder, stdin=subprocess.DEVNULL,
                                            env=os.environ | {"OMP_NUM_THREADS": "1"})  # fmt: skip

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text().replace("\r", "\n")

    def ask(self, path: str, body: object = None, method: str | None = None, timeout: float = 60, **headers: str) -> Answer:
        """A dict is sent as JSON, bytes as they are."""
        data = json.dumps(body).encode() if isinstance(body, dict) else body
        headers = {name.replace("_", "-"): value for name, value in headers.items()}
        if isinstance(body, dict):
            headers = {"Content-Type": "application/json"} | headers
        request = urllib.request.Request(self.url + path, data, headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=timeout) as found:
                return Answer(found.status, found.read(), {k.lower(): v for k, v in found.headers.items()})
        except urllib.error.HTTPError as error:
            return Answer(error.code, error.read(), {k.lower(): v for k, v in error.headers.items()})

    def health(self) -> int:
        """0: nobody listens."""
        try:
            return self.ask("/health", timeout=5).status
        except (OSError, http.client.HTTPException):  # the latter: it ended while it answered
            return 0

    def ready(self, seconds: float = 300) -> "Server":
        wait_for(lambda: self.process.poll() is not None or self.health() == 200, seconds, "it never became ready")
        assert self.process.poll() is None, self.log
        return self

    def make(self, **body: object) -> str:
        """The id of a new order."""
        made = self.ask("/v1/videos", {"prompt": "a red circle moves right"} | body)
        assert made.status == 202, made
        return made.json["id"]

    def video(self, name: str) -> dict:
        found = self.ask(f"/v1/videos/{name}")
        assert found.status == 200, found
        return found.json

    def ended(self, name: str, seconds: float = 60) -> dict:
        wait_for(lambda: self.video(name)["status"] in ("completed", "failed"), seconds, f"{name} never ends")
        return self.video(name)

    def reaches(self, name: str, stage: str) -> None:
        wait_for(lambda: self.video(name)["stage"] == stage, 180, f"{name} never comes to {stage}")

    def files(self) -> set[str]:
        return {path.name for path in (self.folder / "videos").iterdir()} - {"videos.sqlite", ".lock"}

    def processes(self) -> list[int]:
        """All that work in its folder: ranks and encoders too."""
        found = []
        for cwd in Path("/proc").glob("[0-9]*/cwd"):
            try:
                if cwd.readlink() == self.folder.resolve():
                    found.append(int(cwd.parent.name))
            except OSError:
                continue
        return sorted(found)

    def ranks(self, count: int) -> list[int]:
        """The pids of forked ranks, in the order of their ranks."""
        return children(self.process.pid)[:count]

    def gone(self, seconds: float = SOON) -> None:
        wait_for(lambda: not self.processes(), seconds, "processes are left")
        self.process.wait(timeout=SOON)

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Its exit status."""
        self.process.send_signal(number)
        self.gone()
        return self.process.returncode

    def kill(self) -> None:
        for pid in self.processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        wait_for(lambda: not self.processes(), SOON)


def children(pid: int) -> list[int]:
    """In the order in which they were forked: by rank."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            if int(stat.read_text().rpartition(")")[2].split()[1]) == pid:
                found.append(int(stat.parent.name))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return sorted(found)


def wait_for(condition: Callable[[], object], seconds: float = 180, what: str = "nothing happened") -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.02)
