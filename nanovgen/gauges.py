"""What a server counts, in the text format of Prometheus."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from nanovgen.orders import Order, Orders

SECONDS = (0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000, 3000)


class Metrics:
    """Names begin with nanovgen_; `ended` is told of each video, the rest is read when it is asked for."""

    def __init__(self, orders: Orders, ready: callable):
        self.registry = own = CollectorRegistry()
        self.ends = Counter("nanovgen_videos", "Videos by how they ended", ["end"], registry=own)
        for end in ("completed", "failed", "cancelled", "refused"):
            self.ends.labels(end)
        self.started = Counter("nanovgen_started", "Videos that the ranks began with", registry=own)
        self.seconds = Histogram("nanovgen_video_seconds", "Seconds of a completed video", buckets=SECONDS, registry=own)
        self.stages = Histogram("nanovgen_stage_seconds", "Its stages", ["stage"], buckets=SECONDS, registry=own)
        self.queued = Histogram("nanovgen_queued_seconds", "Seconds that it waited", buckets=SECONDS, registry=own)
        self.sent = Counter("nanovgen_sent_bytes", "Bytes that rank 0 sent, by axis", ["axis"], registry=own)
        self.memory = Gauge("nanovgen_peak_bytes", "Peak memory of rank 0, by stage of the last video", ["stage"], registry=own)
        Gauge("nanovgen_waiting", "Videos that wait", registry=own).set_function(lambda: len(orders.waiting))
        Gauge("nanovgen_in_progress", "Videos being made", registry=own).set_function(lambda: int(orders.current is not None))
        Gauge("nanovgen_ready", "1 where /health is 200", registry=own).set_function(lambda: int(ready()))

    def ended(self, order: Order) -> None:
        self.ends.labels("cancelled" if order.unwanted else order.status).inc()
        self.queued.observe(order.started - order.created)
        if order.report is None:
            return
        self.seconds.observe(order.report["seconds"])
        for stage, row in order.report["stages"].items():
            self.stages.labels(stage).observe(row["seconds"])
            self.memory.labels(stage).set(row["peak_bytes"])
        for axis, amount in order.report["bytes_sent"].items():
            self.sent.labels(axis).inc(amount)

    def text(self) -> bytes:
        return generate_latest(self.registry)
