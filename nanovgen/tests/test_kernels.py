"""Attention kernels that are installed apart from torch: which is chosen, what is refused, and our wrapping of each.

None of them runs without its card. A stand-in module with its documented signature and layouts, computing what it should,
shows that we hand over and take back the right thing; speed and numbers on a card are bench.py's and prove's.
"""

import math
import sys
from dataclasses import replace
from types import ModuleType

import pytest
import torch

from nanovgen import attention, fp8, mesh, plan
from nanovgen.attention import KERNELS
from nanovgen.recipe import ParallelConfig
from nanovgen.wan import WanConfig

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, descales: list) -> tuple[torch.Tensor, torch.Tensor]:
    """As FlashAttention's functions: (b, s, H, d) in and out, LSE (b, H, s), a descale (b, Hkv) for each of q, k, v."""
    groups, dtype = k.shape[2], torch.bfloat16 if q.dtype == torch.float8_e4m3fn else q.dtype
    for x, descale in zip((q, k, v), descales, strict=True):
        assert (x.dtype == torch.float8_e4m3fn) == (descale is not None) and x.stride(-1) == 1
        assert descale is None or (descale.shape == (x.shape[0], groups) and descale.dtype == torch.float32)
    q, k, v = (x.double() if s is None else x.double() * s.double().repeat_interleave(x.shape[2] // groups, 1)[:, None, :, None]
               for x, s in zip((q, k, v), descales, strict=True))  # fmt: skip
    k, v = (x.repeat_interleave(q.shape[2] // groups, dim=2) for x in (k, v))
    scores = torch.einsum("bshd,bthd->bhst", q, k) / math.sqrt(q.shape[-1])
    return torch.einsum("bhst,bthd->bshd", scores.softmax(-1), v).to(dtype), scores.logsumexp(-1).float()


def fa2(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, return_attn_probs=False):
    assert return_attn_probs
    return *plain(q, k, v, [None] * 3), None


def fa3(q, k, v, softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None,
        return_attn_probs=False):  # fmt: skip
    assert return_attn_probs
    return plain(q, k, v, [q_descale, k_descale, v_descale])


def fa4(q, k, v, softmax_scale=None, causal=False, return_lse=False):
    assert return_lse
    return plain(q, k, v, [None] * 3)


@pytest.fixture
def install(monkeypatch):
    """Put a stand-in where a kernel's module would be."""

    def put(**functions) -> None:
        for name, function in functions.items():
            module = ModuleType(attention.MODULES[name][0])
            module.flash_attn_func = function
            monkeypatch.setitem(sys.modules, module.__name__, module)
        if "fa4" in functions and "flash_attn" not in sys.modules:
            monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))  # its parent
        attention.installed.cache_clear()

    yield put
    monkeypatch.undo()
    attention.installed.cache_clear()


@pytest.fixture
def card(monkeypatch):
    return lambda *capability: monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)


@pytest.mark.parametrize("name", ["fa2", "fa3", "fa4", "fa3-fp8"])
def test_wrapping(install, name):
    install(**{name.removesuffix("-fp8"): globals()[name.removesuffix("-fp8")]})
    attention.prove(KERNELS[name], CPU, torch.bfloat16, 32)


@pytest.mark.parametrize("name", ["fa3", "fa3-fp8"])
def test_a_wrong_wrapping_is_seen(install, name):
    """The LSE in base 2, then descales that belong to other heads."""

    def base_two(*arguments, **options):
        o, lse = fa3(*arguments, **options)
        return o, lse / math.log(2)

    install(fa3=base_two)
    with pytest.raises(RuntimeError, match="LSE is off"):
        attention.prove(KERNELS[name], CPU, torch.bfloat16, 32)


def test_fp8_keeps_three_bits():
    """An outlier in one head costs the others nothing; a key head's group of query heads shares a unit."""
    x = torch.randn(2, 8, 65, 16, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    x[:, 0, 0, 0] = 3e4
    rounded, unit = attention.by_heads(x, 2)
    assert rounded.dtype == torch.float8_e4m3fn and unit.shape == (2, 2) and rounded.float().abs().max() == 448
    found = rounded.double() * unit.double().repeat_interleave(4, dim=1)[:, :, None, None]
    error = ((found - x.double())[:, 4:].norm() / x.double()[:, 4:].norm()).item()
    print(f"float8's rounding: {error:.2e}")
    assert 1e-2 < error < 4e-2  # half a unit in the fourth bit, spread evenly: 1/16 / sqrt(3) at most


WAN = WanConfig(num_attention_heads=6, attention_head_dim=16, num_layers=1, ffn_dim=64, text_dim=16)


@pytest.mark.parametrize(("ranks", "tokens"), [(2, 16), (3, 14), (3, 2)])
def test_fused_ulysses_rounds_before_it_sends(install, on_ranks, ranks, tokens):
    """To the bit what one rank makes of the whole, whose numbers have the same units: also where a rank has none of them."""
    install(fa3=fa3)
    parallel, kernel = ParallelConfig(ulysses_size=ranks, fused_ulysses=True), KERNELS["fa3-fp8"]

    def work() -> tuple[bool, bool, dict]:
        m, generator = mesh.open_mesh(CPU, {"ulysses": ranks}), torch.Generator().manual_seed(0)
        q, k, v = (torch.randn(1, tokens, 6, 16, generator=generator).to(torch.bfloat16) for _ in range(3))
        q[:, 0, 2] *= 100  # on the first rank alone: the others learn of it
        found, units_of_its_own = [], attention.Float8(kernel_of.largest, lambda x, _: fp8.quantize(x, (1, 4)), kernel_of.attend)
        for steps in (kernel_of, units_of_its_own):
            attention.FLOAT8[kernel] = steps
            m.sent.clear()
            own = [lambda x=x: mesh.shard(x, m.seq, 1) for x in (q, k, v)]
            found.append(plan.bind(parallel, m, tokens, kernel)(*own))
        wanted = mesh.shard(attention.attention(q, k, v, kernel)[0], m.seq, 1)
        return torch.equal(found[0], wanted), torch.equal(found[1], wanted), m.bytes_sent()

    kernel_of = attention.FLOAT8[kernel]
    shape = replace(plan.work(WAN, (1, 2, 2 * tokens), 2, kernel), layers=1, channels=0)
    equal, broken, sent = zip(*on_ranks(ranks, work), strict=True)
    assert all(equal) and not all(broken)
    assert shape.tokens == tokens and all(s == plan.bytes_sent(parallel, shape, 1) for s in sent), sent
    plain = plan.bytes_sent(parallel, replace(shape, float8=False), 1)["ulysses"]
    print(f"{sent[0]} for {plain} in bfloat16")


def test_what_is_not_rounded_before(install):
    """Within a ring or a grid the kernel rounds what it gets, and what travels is as wide as ever."""
    kernel = KERNELS["fa3-fp8"]
    for more in (dict(ring_size=2), dict(attn2d_size=(2, 1))):
        parallel = ParallelConfig(ulysses_size=2, fused_ulysses=True, **more)
        works = [plan.work(WAN, (1, 4, 8), 2, kernel=which) for which in (kernel, KERNELS["cpu"])]
        assert works[0].float8 and not works[1].float8
        assert plan.bytes_sent(parallel, works[0], 1) == plan.bytes_sent(parallel, works[1], 1)


def test_grouped_keys_equal_repeated_ones():
    q, k, v = (torch.randn(2, n, h, 16, requires_grad=True) for n, h in ((9, 8), (5, 2), (5, 2)))
    with torch.no_grad():
        found = attention.attention(q, k, v)
        wanted = attention.attention(q, *(x.repeat_interleave(4, dim=2) for x in (k, v)))
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    attention.attention(q, k, v)[0].sum().backward()
    assert k.grad.shape == k.shape and k.grad.abs().sum() > 0


@pytest.mark.parametrize(("capability", "here", "wanted"), [
    ((9, 0), ["fa3"], "fa3"), ((9, 0), ["fa2"], "cudnn"), ((9, 0), [], "cudnn"), ((10, 0), ["fa4", "fa3"], "fa4"),
    ((10, 0), ["fa3"], "cudnn"), ((8, 0), ["fa2", "fa3", "fa4"], "cudnn"), ((12, 0), ["fa4"], "cudnn"),
])  # fmt: skip
def test_default_by_card(install, card, capability, here, wanted):
    card(*capability)
    install(**{name: globals()[name] for name in here})
    assert attention.default_kernel(GPU, torch.bfloat16) == wanted
    assert attention.default_kernel(GPU, torch.bfloat16, grad=True) == "cudnn"
    assert attention.default_kernel(GPU, torch.float32) == "efficient" and attention.default_kernel(CPU, torch.bfloat16) == "cpu"


def test_what_is_refused(install, card):
    card(8, 6)
    bf16 = torch.bfloat16
    assert attention.refusal("fa3", GPU, bf16) == attention.refusal("fa3-fp8", GPU, bf16) == "is not installed here"
    install(fa3=fa3, fa2=fa2)
    assert attention.refusal("fa3-fp8", GPU, bf16) == "is for cards of capability 9.x, and this one's is 8.6"
    assert attention.refusal("fa2", GPU, bf16) is None
    assert attention.refusal("fa2", GPU, torch.float32) == "takes bfloat16, not float32"
    assert attention.refusal("fa2", CPU, bf16) == attention.refusal("cudnn", CPU, bf16) == "does not run on cpu"
    assert (
        attention.refusal("cpu", GPU, bf16) == "does not run on cuda"
        and attention.refusal("efficient", GPU, torch.float32) is None
    )
