"""What a machine can do, in a few constants, each with its source; cost.py makes seconds of them.

Rates are what a kernel keeps up, not a data sheet's peak. A file that a measurement wrote (JSON: "base", the name of one of
these, and the constants that it found, "sources" among them) stands for a machine wherever a name does.
"""

import json
from dataclasses import dataclass, fields, replace
from pathlib import Path

TERA, GIGA, MICRO = 1e12, 1e9, 1e-6


@dataclass(frozen=True)
class Machine:
    """Rates in flop/s and bytes/s of one GPU and one way, times in seconds, memory in bytes."""

    name: str
    domain: int  # GPUs that NVLink joins
    host: int  # GPUs of one host: what a copy engine can push to
    sms: int  # streaming multiprocessors: how many tiles run at once
    tile: int  # query rows of an attention kernel's tile
    memory: float
    stream: float  # an elementwise kernel's reads and writes
    attention: dict[str, float]  # by kernel, the best first, while all SMs have a tile
    linear: float  # matrix products, likewise
    link: float  # a collective, inside a domain
    shift: float  # send and receive
    push: float  # copy engine
    across: float  # a GPU's share of the network between domains
    latency: float  # of one exchange, before its first byte
    latency_across: float
    ring_step: float  # the least time between two exchanges of a ring, however short its attention pass
    decode: dict[str, float]  # convolutions of the VAE's decoder, by model family
    vae_exchange: float  # of one halo, with the waiting for it
    vae_hop: float  # more of it for each further rank
    tail: float  # pixels a second of what no rank shares: text, H.264, the answer
    read: float  # weights from the page cache to a GPU
    sources: dict[str, str]


GB200 = Machine(
    "gb200-nvl72", domain=72, host=4, sms=152, tile=256, memory=186 * GIGA, stream=0.8 * 8 * TERA,
    attention={"fa4": 1298 * TERA}, linear=0.735 * 2500 * TERA, link=548 * GIGA, shift=548 * GIGA, push=548 * GIGA,
    across=50 * GIGA, latency=27 * MICRO, latency_across=40 * MICRO, ring_step=786 * MICRO,
    decode={"wan": 223 * TERA, "cosmos": 480 * TERA}, vae_exchange=427 * MICRO, vae_hop=35.8 * MICRO, tail=53.4e6,
    read=5 * GIGA,
    sources={
        "memory, stream": "data sheet: 186 GB at 8 TB/s, of which an elementwise kernel gets 0.8",
        "sms, tile": "152 SMs; FlashAttention-4 takes two tiles of 128 queries at once (arXiv:2603.05451)",
        "linear": "data sheet: 2.5 PFLOP/s dense bf16, times the share that Wan's matrices reach on our H200 (cold: 727 of 989)",
        "attention, link, ring_step": "fitted to the article's denoise times: python -m nanovgen.plan --article",
        "shift, push": "as link: the article's times do not tell them apart",
        "latency": "the article's isolated exchange: (unfused - fused) / 2 is 32 us on 4 ranks and 21 on 8",
        "decode, vae_exchange, vae_hop": "fitted to the article's five decode times; Cosmos3's rate to its tail on one B200",
        "tail": "the article: 346.16 - 342.04 - 2.72 s and its like are 1.33 s, for 77 frames of 1280x720",
        "across, latency_across": "a 400 Gb/s port a GPU by its data sheet; not measured",
        "read": "two threads on two CPU cores: 5.2 GB/s of bf16 (checkpoint.py); not measured on this machine",
    },
)  # fmt: skip
H200 = Machine(
    "h200-nvlink", domain=8, host=8, sms=132, tile=128, memory=141 * GIGA, stream=0.8 * 4.8 * TERA,
    attention={"fa3": 676 * TERA, "cudnn": 574 * TERA}, linear=672 * TERA, link=249 * GIGA, shift=299 * GIGA, push=385 * GIGA,
    across=50 * GIGA, latency=20 * MICRO, latency_across=40 * MICRO, ring_step=786 * MICRO,
    decode={"wan": 203 * TERA, "cosmos": 497 * TERA}, vae_exchange=427 * MICRO, vae_hop=35.8 * MICRO, tail=53.4e6,
    read=5 * GIGA,
    sources={
        "memory, stream": "data sheet: 141 GB at 4.8 TB/s, of which an elementwise kernel gets 0.8",
        "sms, tile": "132 SMs; FlashAttention-3 takes 128 queries (arXiv:2407.08608)",
        "attention": "measured on two H200s, Wan A14B, 72,000 tokens, bf16: 184.9 ms a block by cuDNN; FlashAttention-3",
        "linear": "measured there, each as hot as in a forward: 63.9 ms for a block's matrices (cold: 59.1)",
        "link, shift, push": "measured there: all-to-all, send and receive each way, copy engine",
        "latency": "NCCL's usual, not measured",
        "decode": "measured there, in bf16: 77 frames of 720p in 2.99 s, eager as run.py (compiled 1.65); Cosmos3's compiled 2.6",
        "ring_step, vae_exchange, vae_hop, tail": "as the GB200's, not measured",
        "across, latency_across": "a 400 Gb/s port a GPU by its data sheet; not measured",
        "read": "as the GB200's, not measured",
    },
)  # fmt: skip
B200 = replace(
    GB200, name="b200-nvlink", domain=8, host=8, sms=148, memory=180 * GIGA, attention={"fa4": 0.9 * GB200.attention["fa4"]},
    linear=0.9 * GB200.linear, decode={family: 0.9 * rate for family, rate in GB200.decode.items()},
    sources=GB200.sources | {
        "attention, linear, decode": "0.9 of the GB200's: data sheets, 2.25 of 2.5 PFLOP/s",
        "memory, stream": "data sheet: 180 GB at 8 TB/s, of which an elementwise kernel gets 0.8",
        "sms, tile": "148 SMs; FlashAttention-4 takes two tiles of 128 queries at once (arXiv:2603.05451)",
        "link, ring_step": "as the GB200's",
    },
)  # fmt: skip
H200_INFINIBAND = replace(
    H200, name="h200-infiniband", across=0.9 * 50 * GIGA,
    sources=H200.sources | {
        "across, latency_across": "hosts of 8 with a 400 Gb/s port a GPU (data sheet), 0.9 of it; latency assumed",
    },
)  # fmt: skip
MACHINES = {machine.name: machine for machine in (GB200, B200, H200, H200_INFINIBAND)}


def find(name: str) -> Machine:
    """By name, or from a file of measured constants. Raises ValueError in one line."""
    if name in MACHINES:
        return MACHINES[name]
    if not Path(name).is_file():
        raise ValueError(f"machine {name} is no file; by name there are: {', '.join(MACHINES)}")
    try:
        found = json.loads(Path(name).read_text())
        base = MACHINES[found.pop("base")]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(f"{name} is not JSON with the base of its constants, one of {', '.join(MACHINES)}") from None
    if unknown := sorted(set(found) - {f.name for f in fields(Machine)}):
        raise ValueError(f"{name}: unknown constant {unknown[0]}; known: {', '.join(f.name for f in fields(Machine))}")
    merged = {key: value | {k: v for k, v in getattr(base, key).items() if k not in value} if isinstance(value, dict) else value
              for key, value in found.items()}  # a measured kernel comes before one that was not  # fmt: skip
    return replace(base, **{"name": name} | merged)


def of_device(device: str, ranks: int, local: int) -> tuple[Machine, str]:
    """The machine whose GPUs bear that name, and what to say where another has to stand in for it."""
    across = "h200-infiniband" if ranks > local else "h200-nvlink"
    for mark, name in (("GB200", "gb200-nvl72"), ("B200", "b200-nvlink"), ("H200", across)):
        if mark in device:
            return MACHINES[name], ""
    return MACHINES[across], f", by the constants of {across}, for there are none of {device}"
