"""Orders: the videos that clients asked a server for, in an SQLite file. One is worked on, a bounded number waits.

    queued -> in_progress -> completed | failed            deleted: at once, or between two steps of the one in progress

What a restart must know is in the file; what is of the moment (stage, step, preview) is in memory. After a restart the
finished ones are there, those that waited still wait, and the one that was lost has failed, with the command that goes on.
"""

import json
import secrets
import shlex
import sqlite3
import threading
import time
from collections import deque
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path

from nanovgen import generate
from nanovgen.recipe import Request

TABLE = """create table if not exists videos (number integer primary key autoincrement, id text unique, status text,
    request text, plan text, created real, started real, completed real, error text, report text)"""
UPDATE = "update videos set status = ?, started = ?, completed = ?, error = ?, report = ? where id = ?"
ENDS = (".mp4", ".json", ".png", ".latents.safetensors", ".image.png")  # of the files of one video; the last is an upload


class Full(Exception):
    """As many wait as may."""


@dataclass
class Order:
    """One video. Times in seconds since 1970; `plan` as it is printed, `report` the figures of `generate`."""

    id: str
    request: Request
    plan: dict[str, str]
    created: float
    status: str = "queued"
    started: float | None = None
    completed: float | None = None
    error: str | None = None
    report: dict | None = None
    stage: str = ""
    step: int = 0
    preview: bytes | None = None  # a JPEG
    unwanted: bool = False  # deleted by its client
    events: list[dict] = field(default_factory=list)  # what was told so far, oldest first

    @property
    def ended(self) -> bool:
        return self.status in ("completed", "failed")

    @property
    def progress(self) -> int:
        """Percent: the steps are 90 of them, decoding and writing the rest."""
        return 100 if self.status == "completed" else 90 * self.step // max(1, self.request.steps or 1)

    def tell(self, **news: object) -> None:
        """For whoever follows: a new stage, step or status."""
        for name, value in news.items():
            setattr(self, name, value)
        event = {"status": self.status, "stage": self.stage, "step": self.step, "steps": self.request.steps,
                 "progress": self.progress, "error": self.error}  # fmt: skip
        if not self.events or event != self.events[-1]:
            self.events.append(event)


class Orders:
    """All orders of one folder. Safe to use from any thread."""

    def __init__(self, folder: Path, most: int):
        self.folder, self.most = folder, most
        self.lock = threading.Condition(threading.RLock())
        self.waiting: deque[Order] = deque()
        self.current: Order | None = None
        self.unsaved: dict[str, tuple[Order, str]] = {}  # and the status to write, by id: what a full disk did not take
        self.file = sqlite3.connect(folder / "videos.sqlite", check_same_thread=False, isolation_level=None)
        self.file.row_factory = sqlite3.Row
        self.file.execute(TABLE)
        for order in self._read("order by number"):
            if order.status == "queued":
                self.waiting.append(order)
            elif order.status == "in_progress":
                self._found_open(order)
            elif order.status == "deleting":
                self._remove(order)

    def out(self, name: str) -> Path:
        return self.folder / f"{name}.mp4"

    def image(self, name: str) -> Path:
        return self.folder / f"{name}.image.png"

    def new_id(self) -> str:
        return f"video_{secrets.token_hex(12)}"

    def add(self, name: str, request: Request, plan: dict[str, str]) -> Order:
        """Raises Full, or OSError where it cannot be written down."""
        order = Order(name, request, plan, time.time())
        with self.lock:
            self.check_room()
            try:
                self.file.execute("insert into videos (id, status, request, plan, created) values (?, ?, ?, ?, ?)",
                                  (name, "queued", json.dumps(asdict(request)), json.dumps(plan), order.created))  # fmt: skip
            except sqlite3.OperationalError as error:
                raise OSError(f"the order cannot be written down: {error}") from None
            self.waiting.append(order)
            order.tell()
            self.lock.notify_all()
        return order

    def check_room(self) -> None:
        if len(self.waiting) >= self.most:
            raise Full(f"{self.most} videos wait already; ask again when one of them is done")

    def take(self, seconds: float) -> Order | None:
        """The next one, in progress from now on; None where none came in so many seconds."""
        with self.lock:
            self._save()
            if not self.lock.wait_for(lambda: self.waiting, seconds):
                return None
            self.current = self.waiting.popleft()
            self.current.started = time.time()
            self._write(self.current, "in_progress")
            return self.current

    def end(self, order: Order, report: dict | None = None, error: str | None = None) -> None:
        """It is completed with a report, or failed with an error; one that nobody wants is gone. The first end counts."""
        with self.lock:
            if self.current is not order:
                return
            self.current = None
            order.completed, order.report, order.error, order.preview = time.time(), report, error, None
            if order.unwanted:
                order.tell(status="failed")
                self._remove(order)
            else:
                self._write(order, "failed" if report is None else "completed")

    def find(self, name: str) -> Order | None:
        with self.lock:
            found = [self._in_memory()[name]] if name in self._in_memory() else self._read("where id = ?", name)
            return found[0] if found and not found[0].unwanted else None

    def page(self, after: str | None, limit: int, descending: bool) -> tuple[list[Order], bool]:
        """Up to `limit` orders that come after the one of id `after`, and whether there are more. An unknown id: none."""
        way, sign = ("desc", "<") if descending else ("asc", ">")
        from_here = f"and number {sign} (select number from videos where id = ?)" if after else ""
        with self.lock:
            rows = self._read(f"where status != 'deleting' {from_here} order by number {way} limit ?",
                              *([after] if after else []), limit + 1)  # fmt: skip
            known = self._in_memory()
        found = [known.get(order.id, order) for order in rows[:limit]]
        return [order for order in found if not order.unwanted], len(rows) > limit

    def delete(self, name: str) -> bool:
        """Whether there was one. The one in progress goes when its ranks have let go of it."""
        with self.lock:
            order = self.find(name)
            if order is None:
                return False
            order.unwanted = True
            if order is self.current:
                self._write(order, "deleting")
                return True
            if order in self.waiting:
                self.waiting.remove(order)
            order.tell(status="failed", error="deleted")
            self._remove(order)
            return True

    def close(self) -> None:
        with self.lock:
            self.file.close()

    def _found_open(self, order: Order) -> None:
        """The server ended in it: the video may be whole all the same."""
        out, report = self.out(order.id), self.out(order.id).with_suffix(".json")
        self.current = order
        if out.exists() and report.exists():
            self.end(order, report=json.loads(report.read_text()))
        else:
            self.end(order, error=f"the server ended while it was made; {way_on(order.request)}")

    def _read(self, where: str, *values: object) -> list[Order]:
        found = []
        for row in self.file.execute(f"select * from videos {where}", values):
            known = {name: row[name] for name in ("id", "created", "status", "started", "completed", "error")}
            known |= {name: json.loads(row[name]) for name in ("request", "plan", "report") if row[name] is not None}
            request = Request(**known["request"])  # the folder may have moved
            image = request.image and str(self.image(row["id"]))
            found.append(Order(**known | {"request": replace(request, out=str(self.out(row["id"])), image=image)}))
            found[-1].tell(step=request.steps if row["status"] == "completed" else 0)
        return found

    def _in_memory(self) -> dict[str, Order]:
        """Those of which the file does not know all."""
        alive = (*(order for order, _ in self.unsaved.values()), self.current, *self.waiting)
        return {order.id: order for order in alive if order is not None}

    def _write(self, order: Order, status: str) -> None:
        order.tell(status="in_progress" if status == "deleting" else status)
        self.unsaved[order.id] = order, status
        self._save()

    def _remove(self, order: Order) -> None:
        for end in ENDS:
            self.out(order.id).with_suffix(end).unlink(missing_ok=True)
        self.unsaved[order.id] = order, "gone"
        self._save()

    def _save(self) -> None:
        """Write down what is new. A full disk must not stop the server: what it does not take is tried again."""
        for name, (order, status) in [*self.unsaved.items()]:
            report = order.report and {key: order.report[key] for key in ("stages", "seconds", "bytes_sent", "graphs_in_steps")}
            new = (status, order.started, order.completed, order.error, report and json.dumps(report), name)
            try:
                if status == "gone":
                    self.file.execute("delete from videos where id = ?", (name,))
                else:
                    self.file.execute(UPDATE, new)
            except sqlite3.OperationalError:
                return
            del self.unsaved[name]


def tidy(folder: Path) -> None:
    """Remove what writers left that were killed. For the one who holds the folder's lock, when nobody writes."""
    for part in (*folder.glob(".*.part"), *folder.glob(".*.part.mp4"), *folder.glob("warm-up.*")):
        part.unlink(missing_ok=True)


def way_on(request: Request) -> str:
    """What can be done about a video that was not finished: its latents are decoded, or it is made again, by hand."""
    out = Path(request.out)
    if (saved := generate.latents_path(out)).exists():
        return f"its latents are safe; go on from them with: {generate.decode_again(saved, out)}"
    values = {f: getattr(request, f.name) for f in fields(Request) if f.name != "prompt"}
    given = {f.name: value for f, value in values.items() if value != f.default}
    flags = [f"--{name.replace('_', '-')}" + ("" if value is True else f"={value}") for name, value in given.items()]
    return f"no latents were saved; make it again with: {shlex.join(['python', 'run.py', *flags, '--', request.prompt])}"
