"""How fast a server answers: waits until it is ready, sends requests, so many at a time, and says where the time went.

    python -m nanovgen.serve bench --url http://127.0.0.1:8000 --requests 8 --concurrency 2

    requests/s | p50 p90 p99 of each: total (from asking to the last byte), queued, the stages, generation, download

Figures of the server come from its Server-Timing header; total and download are measured here.
"""

import argparse
import json
import sys
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from nanovgen.guard import read_token

LOOK, BUSY = 0.1, 2.0  # seconds: between two looks at a job, and until a full server is asked again
PERCENTILES = (50, 90, 99)


def parse(arguments: list[str]) -> argparse.Namespace:
    raw = argparse.RawDescriptionHelpFormatter
    p = argparse.ArgumentParser(prog="nanovgen.serve bench", description=__doc__, formatter_class=raw)
    p.add_argument("--url", default="http://127.0.0.1:8000", help="of the server (default http://127.0.0.1:8000)")
    p.add_argument("--requests", type=int, default=8, help="(default 8)")
    p.add_argument("--concurrency", type=int, default=1, help="requests under way at a time (default 1)")
    p.add_argument("--wait", type=float, default=1800, help="seconds to wait for /health (default 1800)")
    p.add_argument("--token-file", type=Path, help="a file that holds the server's token")
    p.add_argument("--prompt", default="a red circle moves right on a black background")
    p.add_argument("--size", help="WIDTHxHEIGHT (the server's)")
    p.add_argument("--num-frames", type=int, help="4k+1 (the server's)")
    p.add_argument("--num-inference-steps", type=int, help="(the server's)")
    p.add_argument("--seed", type=int, default=0, help="of the first request; each later one has the next (default 0)")
    p.add_argument("--out", type=Path, help="JSON of all of it")
    return p.parse_args(arguments)


class Client:
    """One server. Raises OSError (HTTPError is one) where it cannot be reached or says no."""

    def __init__(self, url: str, token: str | None):
        self.url, self.headers = url.rstrip("/"), {"Authorization": f"Bearer {token}"} if token else {}

    def ask(self, path: str, body: dict | None = None) -> tuple[bytes, dict]:
        data = None if body is None else json.dumps(body).encode()
        headers = self.headers | ({} if body is None else {"Content-Type": "application/json"})
        with urllib.request.urlopen(urllib.request.Request(self.url + path, data, headers)) as answer:
            return answer.read(), {name.lower(): value for name, value in answer.headers.items()}

    def wait(self, seconds: float) -> None:
        """Until /health is 200. Raises OSError after so many seconds."""
        end, last = time.monotonic() + seconds, None
        while time.monotonic() < end:
            try:
                self.ask("/health")
                return
            except OSError as error:
                last = error
            time.sleep(min(1.0, LOOK + seconds / 100))
        raise OSError(f"{self.url} is not ready after {seconds:g} s: {last}")

    def create(self, body: dict) -> str:
        """The id of a new job; a server whose queue is full is asked again."""
        while True:
            try:
                return json.loads(self.ask("/v1/videos", body)[0])["id"]
            except urllib.error.HTTPError as error:
                if error.code != 429:
                    raise OSError(f"{error.code}: {json.loads(error.read())['error']['message']}") from None
                time.sleep(float(error.headers.get("Retry-After", BUSY)))

    def run(self, body: dict) -> dict[str, float]:
        """Seconds of one video, by stage."""
        start = time.monotonic()
        name = self.create(body)
        while (job := json.loads(self.ask(f"/v1/videos/{name}")[0]))["status"] in ("queued", "in_progress"):
            time.sleep(LOOK)
        if job["status"] == "failed":
            raise OSError(job["error"]["message"])
        asked = time.monotonic()
        movie, headers = self.ask(f"/v1/videos/{name}/content")
        parts = (part.split(";dur=") for part in headers["server-timing"].split(", "))
        seconds = {stage: float(ms) / 1000 for stage, ms in parts}
        seconds["generation"] = seconds.pop("total")
        end = time.monotonic()
        return {"total": end - start, **seconds, "download": end - asked, "bytes": len(movie)}


def measure(client: Client, args: argparse.Namespace) -> dict:
    """All requests, and the percentiles of what they took."""
    body = {name: getattr(args, name) for name in ("prompt", "size", "num_frames", "num_inference_steps")}
    given = {name: value for name, value in body.items() if value is not None}
    bodies = [given | {"seed": args.seed + i} for i in range(args.requests)]
    rows, errors, lock, start = [], [], threading.Lock(), time.monotonic()

    def one(body: dict) -> None:
        try:
            row = client.run(body)
        except OSError as error:
            with lock:
                errors.append(str(error))
            return
        with lock:
            rows.append(row)

    with ThreadPoolExecutor(args.concurrency) as pool:
        list(pool.map(one, bodies))
    seconds = time.monotonic() - start
    names = [name for name in dict.fromkeys(name for row in rows for name in row) if name != "bytes"]
    spread = {name: dict(zip(PERCENTILES, np.percentile([row.get(name, 0.0) for row in rows], PERCENTILES).tolist(), strict=True))
              for name in names}  # fmt: skip
    return {"url": client.url, "requests": args.requests, "concurrency": args.concurrency, "seconds": seconds, "errors": errors,
            "per_second": len(rows) / seconds, "percentiles": spread, "rows": rows}  # fmt: skip


def main(arguments: list[str]) -> int:
    """Exit status: 0 all were made, 1 some were not or the server was never ready, 2 refused."""
    args = parse(arguments)
    try:
        if args.requests < 1 or args.concurrency < 1:
            raise ValueError(f"--requests {args.requests} and --concurrency {args.concurrency} must be at least 1")
        client = Client(args.url, read_token(args.token_file))
        client.wait(args.wait)
    except (ValueError, OSError) as error:
        print(f"nanovgen.serve bench: {error}", file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1
    report = measure(client, args)
    pace = f"{report['seconds']:.2f} s, {report['per_second']:.3f} a second"
    print(f"{args.requests} requests, {args.concurrency} at a time: {pace}")
    print(f"{'seconds':<11}" + "".join(f" {f'p{p}':>8}" for p in PERCENTILES))
    for name, row in report["percentiles"].items():
        print(f"{name:<11}" + "".join(f" {row[p]:8.3f}" for p in PERCENTILES))
    for error in report["errors"]:
        print(f"failed: {error}", file=sys.stderr)
    if args.out:
        args.out.write_text(json.dumps(report, indent=1) + "\n")
    return 1 if report["errors"] else 0
