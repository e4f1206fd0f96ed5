"""The VAE's other ways to the same video: bf16, channels last, compiled; and what a decode holds in memory, counted."""

import math
import random
from dataclasses import replace
from functools import partial
from pathlib import Path

import clip_world
import imageio.v3 as iio
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from nanovgen import checkpoint, compiled, vae_parallel
from nanovgen.job import find_vae_dtype
from nanovgen.mesh import Axis
from nanovgen.vae import VAE, CausalConv3d, Norm, ResBlock, Stream, Upsample, VAEConfig
from nanovgen.vae_parallel import StripStream

NARROW = VAEConfig(base_dim=16)
RESIDUAL = replace(NARROW, decoder_base_dim=32, z_dim=48, is_residual=True, patch_size=2)
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def no_grad(one_thread):
    with torch.no_grad():
        yield


def made(config: VAEConfig) -> VAE:
    torch.manual_seed(0)
    return VAE(config).requires_grad_(False).eval()


def noise(config: VAEConfig, f: int = 3, y: int = 3, x: int = 5) -> torch.Tensor:
    return torch.randn(1, config.z_dim, f, y, x, generator=torch.Generator().manual_seed(1))


def decoded(model: VAE, z: torch.Tensor, chunk: int = 1) -> torch.Tensor:
    stream = Stream()
    return torch.cat([model.unpatch(model.decoder(part, stream)) for part in z.split(chunk, dim=2)], dim=2)


def test_bf16():
    """tiny-wan's decode of a clip: both against the clip, and against each other."""
    component = checkpoint.open_component(ROOT / "weights" / "tiny-wan" / "vae")
    models = [checkpoint.load(checkpoint.build(VAE, VAEConfig.read(component.config)), component, CPU, dtype)
              for dtype in (torch.float32, torch.bfloat16)]  # fmt: skip
    clip = clip_world.render([clip_world.sample_clip(random.Random(0), 1)], CPU)[:, :, :9]
    whole, half = (torch.cat([*m.decode(m.encode(clip))], dim=2).float() for m in models)
    assert models[1].encode(clip[:, :, :5]).dtype == torch.float32  # the latents' statistics are undone in fp32

    def psnr(a, b):
        return 10 * math.log10(4 / (a - b).square().mean().item())

    print(
        f"PSNR: float32 and bfloat16 {psnr(whole, half):.1f} dB; to the clip {psnr(whole, clip):.2f} and {psnr(half, clip):.2f}"
    )
    assert psnr(whole, half) > 40 and psnr(half, clip) > psnr(whole, clip) - 0.5


@pytest.mark.parametrize(
    ("name", "device", "wanted"),
    [("auto", "cpu", "float32"), ("auto", "cuda", "bfloat16"), ("float32", "cuda", "float32"), ("bfloat16", "cpu", "bfloat16")],
)
def test_what_dtype_means(name, device, wanted):
    assert find_vae_dtype(name, torch.device(device)) == getattr(torch, wanted)


def test_bf16_of_a_run(ask, cli, i2v_folder):
    """With an image, which is encoded too; what is not asked for anew is float32 again."""
    iio.imwrite("red.png", np.full((20, 30, 3), (255, 0, 0), np.uint8))
    result = ask("--model", i2v_folder, "--image", "red.png", "--vae-dtype", "bfloat16")
    assert result.code == 0 and "(VAE bfloat16)" in result.lines["runs"]
    for name, more in {"same": ["--vae-dtype", "bfloat16"], "float32": []}.items():
        again = cli("--latents", "v.latents.safetensors", "--out", f"{name}.mp4", *more)
        assert again.code == 0 and f"(VAE {'bfloat16' if more else 'float32'})" in again.lines["runs"]
    assert Path("same.mp4").read_bytes() == Path("v.mp4").read_bytes() != Path("float32.mp4").read_bytes()


class Live(TorchDispatchMode):
    """Bytes of all tensors made that are alive, the most."""

    def __init__(self):
        super().__init__()
        self.alive, self.peak = {}, 0

    def __torch_dispatch__(self, op, types, given=(), more=None):
        out = op(*given, **(more or {}))
        for storage in (x.untyped_storage() for x in tree_leaves(out) if isinstance(x, torch.Tensor)):
            self.alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.alive = {key: (ref, size) for key, (ref, size) in self.alive.items() if not ref.expired()}
        self.peak = max(self.peak, sum(size for _, size in self.alive.values()))
        return out


FULL = {"2.1": VAEConfig(), "2.2": VAEConfig(160, 256, 48, is_residual=True, patch_size=2)}


@pytest.mark.parametrize(("chunk", "dtype"), [(1, torch.float32), (1, torch.bfloat16), (2, torch.bfloat16), (4, torch.float32)])
@pytest.mark.parametrize("name", FULL)
def test_memory_of_a_decode(name, chunk, dtype):
    """720p on meta, tensor by tensor, against the formula of the plan."""
    with torch.device("meta"):
        model = VAE(FULL[name]).to(dtype)
    f, (y, x) = 3 * chunk, (n // FULL[name].scale for n in (720, 1280))
    z = torch.empty(1, FULL[name].z_dim, f, y, x, device="meta", dtype=dtype)
    with Live() as live:
        stream = Stream()
        for part in z.split(chunk, dim=2):
            model.unpatch(model.decoder(part, stream))
    said, weights = model.float().decode_bytes(f, y, x, chunk, dtype.itemsize), sum(p.numel() for p in model.parameters())
    held = live.peak + weights * dtype.itemsize
    print(
        f"{name}, {dtype}, chunk {chunk}: {held / 1e9:.2f} GB with the weights; beside them {live.peak / said:.2f} of the plan's"
    )
    assert 0.75 < live.peak / said < 1.05  # it allows for chunks of one, where the past weighs most
    assert held < 12 * 2**30 or chunk > 1 or dtype == torch.float32


@pytest.mark.parametrize("name", FULL)
@pytest.mark.parametrize("chunk", (1, 3))
@pytest.mark.parametrize("strip", (None, 3, 4), ids=["whole", "rows", "columns"])
def test_no_convolution_turns_its_input_around(name, chunk, strip, monkeypatch, one_thread):
    """All is channels last, single frames, first chunks and strips too: else a GPU copies each tensor around each layer.

    So is each weight, which is used where it lies.
    """
    z = FULL[name].z_dim
    config = replace(FULL[name], base_dim=8, decoder_base_dim=12, latents_mean=(0.0,) * z, latents_std=(1.0,) * z)
    monkeypatch.setattr(CausalConv3d, "IN_3D", ((24, 24),))
    model, real, real_3d, turned, deep = VAE(config).eval(), F.conv2d, F.conv3d, [], []
    before = {name: p.clone() for name, p in model.named_parameters()}
    lying = {p.data_ptr() for p in model.laid_out().parameters()}
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())

    def conv2d(x, weight, *more, **named):
        out = real(x, weight, *more, **named)
        assert weight.data_ptr() in lying and weight.is_contiguous(memory_format=torch.channels_last)
        turned.append(not (x.is_contiguous(memory_format=torch.channels_last) and x.stride(1) == 1 and out.stride(1) == 1))
        return out

    def conv3d(x, weight, *more, **named):
        assert weight.data_ptr() in lying
        deep.append(all(t.is_contiguous(memory_format=torch.channels_last_3d) for t in (x, weight)))
        return real_3d(x, weight, *more, **named).contiguous(memory_format=torch.channels_last_3d)  # as cuDNN gives it

    monkeypatch.setattr(F, "conv2d", conv2d)
    monkeypatch.setattr(F, "conv3d", conv3d)
    with torch.inference_mode():
        stream = Stream if strip is None else partial(StripStream, Axis("vae"), strip, (4, 6)[strip - 3])
        video = torch.cat(list(model.decode(torch.randn(1, z, 4, 4, 6), chunk, stream())), dim=2)
        assert sum(turned) == 1 and turned[0]  # as latents come
        assert all(deep) and len(deep) > 5
        monkeypatch.setattr(F, "conv3d", real_3d)
        turned.clear()
        model.encode(video, chunk, stream())
        assert not any(turned) and len(turned) > 30


@pytest.mark.parametrize("config", [NARROW, replace(RESIDUAL, decoder_base_dim=40)], ids=["2.1", "2.2"])
def test_a_convolution_in_2d_and_in_3d(config, monkeypatch):
    """The same numbers, whichever kernel a width takes, and where the past is summed and not seen."""
    z = noise(config)
    wanted = decoded(made(config), z)
    widths = [(m.in_channels, m.out_channels) for m in made(config).modules() if isinstance(m, CausalConv3d)]
    few = {pair for pair in widths if 3 * pair[1] <= pair[0]}
    assert few and len(set(widths) - few) > 3
    for pairs, kind in ((tuple(widths), CausalConv3d.few), ((), property(lambda self: False))):
        monkeypatch.setattr(CausalConv3d, "IN_3D", pairs)
        monkeypatch.setattr(CausalConv3d, "few", kind)
        assert (decoded(made(config), z) - wanted).norm() < 5e-6 * wanted.norm()


def test_borders_travel_while_the_norm_runs(monkeypatch):
    """Each convolution sends its lines, ready, before the whole strip is normed, and waits for the others' after it."""
    said, shape = [], (1, 24, 2, 4, 6)

    class Sent:
        def __init__(self, *lines):
            said.append([tuple(line.shape) for line in lines])
            self.lines = [torch.zeros_like(line) for line in lines]

        def wait(self):
            said.append("wait")
            return self.lines

    def act(x):
        said.append(tuple(x.shape))
        return x

    monkeypatch.setattr(vae_parallel, "start_edges", lambda first, last, axis: Sent(first, last))
    CausalConv3d(24, 24, 3).product(torch.randn(shape), StripStream(Axis("vae"), 4, 6), act)
    line = (1, 24, 2, 4, 1)
    assert said == [line, line, [(1, 2, 4, 1, 24)] * 2, shape, "wait"]


@pytest.mark.parametrize("name", FULL)
def test_shapes_that_a_compiled_method_meets(name, monkeypatch):
    """In strips, with a first chunk, later ones and a shorter last one: beyond compiled.SHAPES a method would stay eager."""
    seen = {}

    def noted(kind, method, real):
        def call(self, *given):
            shapes = tuple(tuple(x.shape) for x in tree_leaves(given) if isinstance(x, torch.Tensor))
            seen.setdefault((kind.__name__, method), set()).add(shapes)
            return real(self, *given)

        return call

    for kind in (CausalConv3d, Norm, ResBlock, Upsample):
        for method in kind.LOCAL:
            monkeypatch.setattr(kind, method, noted(kind, method, getattr(kind, method)))
    monkeypatch.setattr(StripStream, "all_keys", lambda self, kv: kv)
    with torch.device("meta"):
        model = VAE(FULL[name])
        stream, (y, x) = StripStream(Axis("vae"), 4, 6), (4 * model.config.scale, 6 * model.config.scale)
        for part in torch.empty(1, model.config.z_dim, 5, 4, 6).split(2, dim=2):
            model.decoder(part, stream)
        model.moments(torch.empty(1, 3, 17, y, x), 2, StripStream(Axis("vae"), 4, 6))
    counts = {".".join(key): len(shapes) for key, shapes in seen.items()}
    print(name, counts)
    assert len(counts) > 10 and 30 < max(counts.values()) < compiled.SHAPES
