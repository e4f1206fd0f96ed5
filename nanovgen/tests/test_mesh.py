"""The collectives, the token cuts and the merge of partial results, on a few forked ranks or on none."""

import itertools
import os
import random
import time
from collections import Counter
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist

from nanovgen import attention, cfg, mesh, plan, push, ulysses
from nanovgen.mesh import Axis, Cut, Mesh
from nanovgen.recipe import ParallelConfig
from nanovgen.wan import Wan, WanConfig, rope_table

CPU = torch.device("cpu")
CONFIG = WanConfig(num_attention_heads=4, attention_head_dim=12, num_layers=1, ffn_dim=96, text_dim=16)
GROUPS = [  # world, {axis: its rows of world ranks}; the other axes have size 1
    (1, {}),
    (2, {"ulysses": [[0, 1]]}),
    (3, {"ring": [[0, 1, 2]]}),
    (4, {"ring": [[0, 2], [1, 3]], "ulysses": [[0, 1], [2, 3]]}),
    (4, {"cfg": [[0, 2], [1, 3]], "tp": [[0, 1], [2, 3]]}),
    (4, {"kv_axis": [[0, 2], [1, 3]], "q_axis": [[0, 1], [2, 3]]}),
    (6, {"tp": [[0, 3], [1, 4], [2, 5]], "ulysses": [[0, 1, 2], [3, 4, 5]]}),
]


def numbers(world_rank: int, *shape: int) -> torch.Tensor:
    """What that rank puts in: not contiguous."""
    x = torch.randn(*reversed(shape), generator=torch.Generator().manual_seed(world_rank))
    return x.permute(*reversed(range(x.ndim)))


def own_rank() -> int:
    return int(os.environ["RANK"])


def row_of(rows: list[list[int]]) -> list[int]:
    return next((row for row in rows if own_rank() in row), [own_rank()])


def try_collectives(axis: Axis, row: list[int]) -> None:
    p, r = axis.size, axis.rank
    assert (p, r) == (len(row), row.index(own_rank()))
    theirs = [numbers(rank, p, 3, 4) for rank in row]
    mine = numbers(own_rank(), p, 3, 4)
    equal = partial(torch.testing.assert_close, atol=1e-6, rtol=0)
    exact = partial(torch.testing.assert_close, atol=0, rtol=0)
    exact(mesh.all_to_all(mine, axis), torch.stack([x[r] for x in theirs]))
    exact(mesh.all_gather(mine, axis), torch.stack(theirs))
    equal(mesh.reduce_scatter(mine, axis), sum(x[r] for x in theirs))
    equal(mesh.all_reduce(mine, axis), sum(theirs))
    exact(mesh.all_reduce(mine, axis, largest=True), torch.stack(theirs).amax(0))
    exact(mesh.start_shift(mine, axis).wait(), theirs[r - 1])
    first, last = numbers(own_rank(), 4, 1), numbers(own_rank() + 10, 4, 1)
    before, after = mesh.start_edges(first.t(), last.t(), axis).wait()
    exact(before, numbers(row[r - 1] + 10, 4, 1).t() if r else torch.zeros(1, 4))
    exact(after, numbers(row[r + 1], 4, 1).t() if r < p - 1 else torch.zeros(1, 4))
    before, after = mesh.start_edges(first.t(), None, axis).wait()
    assert before is None
    exact(after, numbers(row[r + 1], 4, 1).t() if r < p - 1 else torch.zeros(1, 4))
    exact(mine, numbers(own_rank(), p, 3, 4))  # nothing wrote into what was given
    exact(mesh.broadcast(mine.contiguous(), axis), theirs[0])
    exact(mesh.broadcast(mine, axis), theirs[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64, torch.uint8])
def test_words(dtype):
    """Whatever lies behind a view, a copy by words is the copy number by number; and what can go by words does."""
    draw, wide = random.Random(0), 0
    n = 16 // dtype.itemsize
    memory = torch.randint(0, 100, (4096,)).to(dtype)
    for _ in range(300):
        last, step = draw.choice([1, 3, n, 2 * n]), draw.choice([1, 1, 1, 2])
        shape = [draw.randint(1, 3), 2, draw.randint(0, 3), last]
        stride = [draw.choice([1, n, 2 * n, 3 * n + 1]) * draw.randint(0, 3) for _ in range(3)] + [step]
        x = memory.as_strided(shape, stride, draw.choice([0, n, 3]))
        wide += mesh.words(x).dtype == torch.complex128
        assert torch.equal(mesh.packed(x), x) and mesh.packed(x).is_contiguous() and mesh.packed(x).dtype == dtype
        wanted = x.permute(1, 0, 2, 3).flatten(1, 2)
        assert torch.equal(mesh.regroup(x, "a b c d -> b (a c) d"), wanted)
    assert 5 < wide < 295
    heads = torch.empty(1, 6, 4, 128, dtype=dtype).unflatten(2, (2, 2)).movedim(2, 0)  # what Ulysses sends
    assert mesh.words(heads).dtype == torch.complex128 and mesh.words(torch.tensor(1.0)).dtype == torch.float32


@pytest.mark.parametrize(("ranks", "groups"), GROUPS)
def test_collectives(on_ranks, ranks, groups):
    """Of every axis, also those of size 1, with strided inputs; most groups do not start at rank 0."""

    def work() -> dict:
        m = mesh.open_mesh(CPU, {name: len(rows[0]) for name, rows in groups.items()})
        for name in mesh.NAMES:
            try_collectives(getattr(m, name), row_of(groups.get(name, [])))
        return m.bytes_sent()

    sent = on_ranks(ranks, work)
    assert all(set(found) == set(groups) for found in sent)
    for name, rows in groups.items():  # p x 12 numbers of 4 bytes, and edges of 4
        p = len(rows[0])
        collectives = 12 * (p - 1) * (1 + p + 1 + 2 + 2) + 12 * p
        for row in rows:
            for r, rank in enumerate(row):
                edges = 4 * ((r > 0) * 2 + (r < p - 1)) + (2 * 12 * p * (p - 1) if r == 0 else 0)
                assert sent[rank][name] == 4 * (collectives + edges), (name, rank)


def test_seq_and_vae_axes(on_ranks):
    """seq is cp and ulysses in one row, within a CFG half; vae is the first ranks, None outside."""

    def work() -> tuple:
        m = mesh.open_mesh(CPU, {"cfg": 2, "kv_axis": 2, "q_axis": 1, "ulysses": 2}, vae=3)
        found = [dist.get_process_group_ranks(a.group) for a in (m.seq, m.cfg, m.kv_axis, m.ulysses, m.vae or m.world)]
        return found, m.seq.rank, m.vae and m.vae.rank

    for rank, (found, seq, vae) in enumerate(on_ranks(8, work)):
        half, r = divmod(rank, 4)
        seats = [0, 1, 2, 3]
        assert found[0] == [4 * half + i for i in seats] and seq == r and found[1] == [r, r + 4]
        assert found[2] == [rank - r + r % 2, rank - r + r % 2 + 2] and found[3] == [rank - rank % 2, rank - rank % 2 + 1]
        assert (found[4], vae) == (([0, 1, 2], rank) if rank < 3 else ([*range(8)], None))


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_ring_of_large_messages(on_ranks, ranks):
    def work() -> list:
        axis = mesh.open_mesh(CPU, {"ring": ranks}).ring
        x = torch.full((4 << 20,), float(axis.rank))
        for step in range(1, ranks + 1):
            x = mesh.start_shift(x, axis).wait()
            assert (x == (axis.rank - step) % ranks).all()
        return axis.sent["ring", "shift", "bytes"]

    assert on_ranks(ranks, work) == [ranks * (16 << 20)] * ranks


def slow(x: torch.Tensor) -> Callable[[], torch.Tensor]:
    def project() -> torch.Tensor:
        time.sleep(random.random() / 500)
        return x.clone()

    return project


@pytest.mark.parametrize("inner", [{}, {"ring_size": 2}, {"attn2d_size": (1, 2), "attn2d_merge": "overlapped"}])
def test_async_is_sync_to_the_bit(on_ranks, inner):
    """However late each rank's projections are; 15 tokens do not divide."""
    kinds = [ParallelConfig(ulysses_size=2, **way, **inner) for way in ({}, {"async_ulysses": True}, {"fused_ulysses": True})]

    def work() -> None:
        m = mesh.open_mesh(CPU, plan.degrees(kinds[0]))
        random.seed(own_rank())
        for repeat in range(30):
            generator = torch.Generator().manual_seed(repeat)
            own = [mesh.shard(torch.randn(1, 15, 4, 8, generator=generator), m.seq, 1) for _ in range(3)]
            found = [plan.bind(kind, m, 15, attention._cpu)(*map(slow, own)) for kind in kinds]
            assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2]), repeat

    on_ranks(kinds[0].world, work)


@pytest.mark.parametrize(("local", "devices", "degree", "blocked", "said"), [
    (8, 8, 4, None, None), (8, 8, 8, None, None), (None, 8, 2, None, "no ranks were launched here"),
    (4, 4, 8, None, "8 ranks of a row, 4 on a host"), (6, 6, 4, None, "4 ranks of a row, 6 on a host"),
    (4, 1, 4, None, "a rank sees 1 of 4 devices"), (4, 4, 2, (2, 3), "no peer access from device 2 to 3"),
])  # fmt: skip
def test_where_ranks_may_push(monkeypatch, local, devices, degree, blocked, said):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if local:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(local))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: (a, b) != blocked)
    assert push.refusal(torch.device("cuda"), degree) == said
    assert push.refusal(CPU, degree) == "cpu ranks share no memory"


@pytest.mark.parametrize("halves", [1, 2])
@pytest.mark.parametrize("streams", [1, 2, 3])
def test_streams_in_turn(on_ranks, halves, streams):
    """Three guidance streams on two halves take two turns: in order everywhere, each run once, a turn an exchange."""
    x = torch.randn(2, 5, generator=torch.Generator().manual_seed(0))
    wanted = [torch.sin((i + 1) * x) for i in range(streams)]

    def work() -> tuple:
        axis, ran = mesh.open_mesh(CPU, {"cfg": halves}).cfg, []
        found = cfg.run_streams(lambda i: (ran.append(i), torch.sin((i + 1) * x))[1], streams, axis)
        assert len(found) == streams and all(map(torch.equal, found, wanted)) and ran == cfg.mine(streams, axis)
        return ran, axis.sent["cfg", "all_gather", "elements"]

    turns = 0 if streams == 1 or halves == 1 else -(-streams // halves)
    ran, sent = zip(*on_ranks(halves, work), strict=True)
    assert sorted(i for one in ran for i in one) == ([0] * halves if streams == 1 else [*range(streams)])
    assert sent == ((halves - 1) * 10 * turns,) * halves


@pytest.mark.parametrize(("tokens", "ranks", "chunks"), [
    (75, 4, [19, 19, 19, 18]), (5, 4, [2, 2, 1, 0]), (5, 8, [1, 1, 1, 1, 1, 0, 0, 0]),
])  # fmt: skip
def test_cut_and_joined(on_ranks, tokens, ranks, chunks):
    def work() -> int:
        axis = mesh.open_mesh(CPU, {"ring": ranks}).seq
        whole = torch.randn(2, tokens, 3, generator=torch.Generator().manual_seed(0))
        own = mesh.shard(whole, axis, 1)
        assert torch.equal(mesh.unshard(own, axis, 1, tokens), whole)
        assert Cut(tokens, ranks, axis.rank).real(axis.rank) == own.shape[1]
        return own.shape[1]

    assert on_ranks(ranks, work) == chunks


@pytest.mark.parametrize("parallel", [ParallelConfig(ring_size=4), ParallelConfig(ulysses_size=2, attn2d_size=(2, 1))])
def test_rotary_table_of_a_rank(on_ranks, parallel):
    """What a block is handed on each rank, put together, is the whole clip's table to the bit: 75 tokens on 4 ranks."""

    def work() -> int:
        m, seen = mesh.open_mesh(CPU, plan.degrees(parallel)), []
        torch.manual_seed(0)
        model = Wan(CONFIG).eval()
        model.blocks[0].register_forward_pre_hook(lambda module, given: seen.append(given[3]))
        with torch.inference_mode():
            attend = plan.bind(parallel, m, 75, attention._cpu)
            model(torch.randn(1, 16, 5, 6, 10), torch.tensor([9]), model.context(torch.randn(1, 4, 16), 5, 6, 10), attend, m.seq)
            assert torch.equal(mesh.unshard(seen[0], m.seq, 1, 75), rope_table(5, 3, 5, 12))
        return seen[0].shape[1]

    assert on_ranks(4, work) == [19, 19, 19, 18]


def test_an_idle_axis_is_seen():
    sent = Counter()
    m = Mesh(ring=Axis("ring", 2, 0, None, sent), cfg=Axis("cfg", 2, 0, None, sent), sent=sent)
    m.cfg.count("all_gather", 4, 4)
    m.check_used(["cfg", "ulysses"])
    with pytest.raises(RuntimeError, match="ring has 2 ranks and exchanged nothing"):
        m.check_used(["cfg", "ring"])


def test_a_world_that_the_degrees_do_not_fill():
    with pytest.raises(ValueError, match="ring 2 x ulysses 2 = 4 ranks, and there are 1"):
        mesh.open_mesh(CPU, {"ring": 2, "ulysses": 2})


@pytest.mark.parametrize(("rank", "local"), [(0, 0), (5, 1), (71, 3)])
def test_device_by_local_rank(monkeypatch, rank, local):
    """Never the world rank: two machines would fight over a device, or ask for one that is not there."""
    said = {}
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("LOCAL_RANK", str(local))
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: said.update(set=device))
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **given: said.update(backend=backend, **given))
    device = torch.device("cuda", local)
    assert mesh.open_world(torch.device("cuda")) == device
    assert (said["set"], said["device_id"], said["backend"], said["timeout"].total_seconds()) == (device, device, "nccl", 300)
    assert mesh.open_world(CPU) == CPU and said["backend"] == "gloo" and said["device_id"] is None


# The merge of partial results


def partials(dtype: torch.dtype, pieces: int) -> tuple[list, torch.Tensor, torch.Tensor]:
    """Attention over `pieces` parts of 840 keys, and the truth in fp64 with its LSE."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, n, 6, 16, generator=generator).to(dtype) for n in (6, 840, 840))
    parts = [attention.attention(q, *kv) for kv in zip(k.chunk(pieces, 1), v.chunk(pieces, 1), strict=True)]
    scores = torch.einsum("bshd,bthd->bsht", q.double(), k.double()) / 4
    return parts, torch.einsum("bsht,bthd->bshd", scores.softmax(-1), v.double()), scores.logsumexp(-1)


def test_merge_is_exact_in_any_order():
    parts, truth, lse = partials(torch.float32, 4)
    for order in itertools.permutations(parts):
        o, total = attention.merge([*order], torch.float32)
        torch.testing.assert_close(o.double(), truth, atol=1e-6, rtol=0)
        torch.testing.assert_close(total.double(), lse, atol=1e-5, rtol=0)


def test_merge_of_one_and_of_none():
    (part,), _, _ = partials(torch.float32, 1)
    nothing = torch.full_like(part[0], 7.0), torch.full_like(part[1], -torch.inf)
    for given in ([part], [part, nothing], [nothing, part], [nothing, part, nothing]):
        o, lse = attention.merge(given, torch.float32)
        torch.testing.assert_close(o, part[0], atol=1e-7, rtol=1e-6)
        assert torch.equal(lse, part[1])
    o, lse = attention.merge([nothing, nothing], torch.bfloat16)
    assert (o == 0).all() and (lse == -torch.inf).all() and o.dtype == torch.bfloat16
    empty = attention.attention(part[0], part[0][:, :0], part[0][:, :0])
    assert torch.equal(attention.merge([part, empty], torch.float32)[1], part[1])


def test_merge_of_bf16_does_not_add_up():
    """All at once, and one by one as in a ring: the error of 8 partials is that of 2."""
    found = {}
    for pieces in (2, 8):
        parts, truth, _ = partials(torch.bfloat16, pieces)
        running = parts[0]
        for part in parts[1:]:
            running = attention.merge([running, part], torch.float32)
        outs = attention.merge(parts, torch.bfloat16)[0], running[0].bfloat16()
        found[pieces] = max(((o.double() - truth).norm() / truth.norm()).item() for o in outs)
    assert found[8] <= 1.1 * found[2] < 1e-2, found


def test_fused_needs_as_many_key_heads():
    ulysses.check(8, 2, 2)
    ulysses.check(8, 8, 4, fused=True)
    for given, said in (((8, 2, 2, True), "fused ulysses stacks q, k, v, and 8 heads are not 2; use the unfused way"),
                        ((12, 4, 6), "4 key heads do not split over ulysses 6; use 4"),
                        ((12, 12, 8), "12 heads do not split over ulysses 8; use 6")):  # fmt: skip
        with pytest.raises(ValueError, match=said):
            ulysses.check(*given)


GRID = {2: (2, 1), 4: (2, 2), 8: (4, 2), 9: (3, 3), 36: (6, 6), 72: (9, 8)}  # rows, columns
SECONDS = {36: 120, 72: 240}


@pytest.mark.parametrize("p", GRID)
def test_elements_sent_are_the_headers_formulas(on_ranks, p):
    """Each scheme alone over p ranks, in all its ways, one attention: counted, against the formulas written out again."""
    (n, m), heads, d, tokens = GRID[p], 72, 4, 2 * p
    share = tokens * heads * d // p  # S C / p
    wanted = {"ulysses": {"ulysses": 4 * (p - 1) * share // p}, "ring": {"ring": 2 * (p - 1) * share}}
    for way in plan.ATTN2D:
        merged = (m - 1) * (share + share // d) + 2 * (m - 1) * share // d  # sums by one reduce-scatter, the largest LSE agreed
        row = (m - 1) * share + (merged if way == "reduce_scatter" else (m - 1) * (share + share // d))
        wanted[way] = {axis: count for axis, count in (("q_axis", row), ("kv_axis", 2 * (n - 1) * share)) if count}

    def work() -> dict:
        shapes = {"ulysses": dict(ulysses_size=p), "ring": dict(ring_size=p), "attn2d": dict(attn2d_size=(n, m))}
        ways = {"ulysses": ({}, dict(fused_ulysses=True), dict(async_ulysses=True)), "ring": ({},),
                "attn2d": [dict(attn2d_merge=way) for way in plan.ATTN2D]}  # fmt: skip
        found = []
        for scheme, degrees in shapes.items():
            open_mesh = mesh.open_mesh(CPU, plan.degrees(ParallelConfig(**degrees)))
            for way in ways[scheme]:
                open_mesh.sent.clear()
                project = lambda: torch.ones(1, 2, heads, d)  # noqa: E731
                plan.bind(ParallelConfig(**degrees, **way), open_mesh, tokens, attention.KERNELS["cpu"])(
                    project, project, project
                )
                sent = Counter()
                for (axis, _, unit), amount in open_mesh.sent.items():
                    sent[axis] += amount if unit == "elements" else 0
                found.append((way.get("attn2d_merge", scheme), dict(sent)))
        return found

    for rank, found in enumerate(on_ranks(p, work, SECONDS.get(p, 30))):
        for name, sent in found:
            assert sent == wanted[name], (rank, name)


@pytest.mark.parametrize("heads", [(24, 24, 24), (10, 2, 2), (20, 20, 4)])
def test_ulysses_refuses_by_itself(on_ranks, heads):
    """A head is not split, whoever calls the scheme: 24 heads, 2 or 4 key heads on 5 ranks. (20 and 10 query heads fit.)"""

    def work() -> str:
        m = mesh.open_mesh(CPU, {"ulysses": 5})
        projections = [lambda h=h: torch.ones(1, 2, h, 4) for h in heads]
        try:
            plan.bind(ParallelConfig(ulysses_size=5), m, 10, attention.KERNELS["cpu"])(*projections)
        except ValueError as error:
            return str(error)

    said = f"{min(heads)} heads do not split over ulysses 5; use {max(d for d in range(1, 5) if min(heads) % d == 0)}"
    assert all(found.startswith(said) for found in on_ranks(5, work))
