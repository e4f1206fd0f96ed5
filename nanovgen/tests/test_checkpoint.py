"""Loading is strict, keeps fp32 what must be, needs no network, and holds no more than one shard beside the model.

What is wrong with a folder is said in one line before a weight is read; other refusals are in test_refusals.py.
"""

import json
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_layout
import torch
from safetensors.torch import load_file, save_file

from nanovgen import checkpoint
from nanovgen.text import UMT5, UMT5Config
from nanovgen.vae import VAE, VAEConfig
from nanovgen.wan import Wan, WanConfig

TRANSFORMER = "diffusion_pytorch_model.safetensors"
ROOT, CPU = Path(__file__).resolve().parents[2], torch.device("cpu")
KINDS = {"text_encoder": (UMT5, UMT5Config), "vae": (VAE, VAEConfig), "transformer": (Wan, WanConfig)}


def open_part(folder: Path, part: str) -> tuple[torch.nn.Module, checkpoint.Component]:
    kind, config = KINDS[part]
    component = checkpoint.open_component(folder / part)
    return checkpoint.build(kind, config.read(component.config)), component


def load(folder: Path, part: str, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    return checkpoint.load(*open_part(folder, part), CPU, dtype)


def stored(folder: Path) -> dict[str, torch.Tensor]:
    return {k: v for path in sorted(folder.glob("*.safetensors")) for k, v in load_file(path).items()}


@pytest.mark.parametrize("part", KINDS)
@pytest.mark.parametrize("shards", [1, 3])
def test_round_trip(tiny_folder, split_weights, part, shards):
    wanted = stored(tiny_folder / part)
    if shards > 1:
        split_weights(tiny_folder / part, shards)
    model = load(tiny_folder, part)
    found = {model.hub_name(name): p for name, p in model.state_dict().items()}
    assert found.keys() == wanted.keys() and all(p.dtype == torch.float32 for p in found.values())
    assert all(torch.equal(p, wanted[name].float()) for name, p in found.items())
    assert not model.training and not any(p.requires_grad or p.is_meta for p in model.parameters())


@pytest.mark.parametrize("config", [tiny_layout.VAE_CONFIG, tiny_layout.COSMOS_VAE_CONFIG], ids=["2.1", "2.2"])
def test_round_trip_of_both_vaes(tmp_path, config):
    vae = VAE(config)
    tiny_layout.save_vae(vae, tmp_path)
    written, patch = json.loads((tmp_path / "vae" / "config.json").read_text()), config.patch_size or 1
    assert written["in_channels"] == written["out_channels"] == 3 * patch**2 and written["patch_size"] == config.patch_size
    assert written["scale_factor_spatial"] == 8 * patch == config.scale and written["is_residual"] == (patch == 2)
    again = load(tmp_path, "vae")
    assert again.config == config
    assert all(torch.equal(p, vae.state_dict()[name].bfloat16().float()) for name, p in again.state_dict().items())


def test_every_byte_is_reported(tiny_folder, split_weights):
    split_weights(tiny_folder / "vae", 3)
    model, component = open_part(tiny_folder, "vae")
    done = []
    checkpoint.load(model, component, CPU, torch.bfloat16, done.append)
    assert sum(done) == component.stored_bytes == sum(t.nbytes for t in stored(tiny_folder / "vae").values())


CHANGES = {
    "drop": (lambda t: t.pop("proj_out.bias"), "1 missing: proj_out.bias$"),
    "add": (lambda t: t.update(extra=torch.zeros(1)), "1 unknown: extra$"),
    "rename": (lambda t: t.update(bias_out=t.pop("proj_out.bias")), "1 missing: proj_out.bias; 1 unknown: bias_out$"),
    "prefix": (lambda t: [t.update({f"model.{n}": t.pop(n)}) for n in sorted(t)], r"\d\d missing: .*; \d\d unknown: model\."),
    "shape": (lambda t: t.update({"proj_out.bias": torch.zeros(2)}), r"1 tensors .* proj_out.bias: \(2,\), .* \(64,\)"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_strict_both_ways(tiny_folder, edit_weights, change):
    edit, said = CHANGES[change]
    edit_weights(tiny_folder / "transformer", edit)
    model, component = open_part(tiny_folder, "transformer")
    for refuse in (lambda: checkpoint.check(model, component), lambda: checkpoint.load(model, component, CPU, torch.float32)):
        with pytest.raises(ValueError, match=said):
            refuse()
    assert all(p.is_meta for p in model.parameters())


def test_fp32_islands_are_never_rounded(tiny_folder):
    """A third is no bf16: it survives in an F32 file, and in the islands of a bf16 model; the rest rounds once."""
    for part in ("transformer", "text_encoder"):
        (path,) = (tiny_folder / part).glob("*.safetensors")
        save_file({k: torch.full(v.shape, 1 / 3) for k, v in load_file(path).items()}, path)
        whole, half = load(tiny_folder, part), load(tiny_folder, part, torch.bfloat16)
        assert all((p == torch.tensor(1 / 3)).all() for p in whole.parameters())
        islands = {n for n, p in half.named_parameters() if p.dtype == torch.float32}
        assert all((p == torch.tensor(1 / 3).to(p.dtype)).all() for p in half.parameters())
        blocks = {n for n in whole.state_dict() if "cross_norm" in n or "scale_shift_table" in n or n.startswith("time_linear_")}
        assert islands == blocks and len(islands) == (8 if part == "transformer" else 0)


def test_bf16_file_in_either_dtype(tiny_folder):
    """bf16 to fp32 adds nothing, and back takes nothing away; what is fp32 in a bf16 model holds the file's value."""
    whole, half = load(tiny_folder, "transformer"), load(tiny_folder, "transformer", torch.bfloat16)
    for (name, a), b in zip(whole.named_parameters(), half.parameters(), strict=True):
        assert torch.equal(a.bfloat16(), b.bfloat16()) and torch.equal(a, b.float()), name
        assert b.dtype == checkpoint.final_dtype(half, name, torch.bfloat16)


def test_loaded_weights_do_not_live_in_the_file(tiny_folder):
    """Copies, not views of the mapped file: it may be replaced or removed afterwards."""
    model, path = load(tiny_folder, "transformer", torch.bfloat16), tiny_folder / "transformer" / TRANSFORMER
    before = {n: p.clone() for n, p in model.named_parameters()}
    path.write_bytes(b"\xff" * path.stat().st_size)
    assert all(torch.equal(before[n], p) for n, p in model.named_parameters())


def test_one_tensor_in_two_shards(tiny_folder, split_weights):
    split_weights(tiny_folder / "transformer")
    first, second = sorted((tiny_folder / "transformer").glob("*.safetensors"))
    name, tensor = min(load_file(first).items())
    save_file(load_file(second) | {name: tensor}, second, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=f"says {name} is in|shards hold"):
        open_part(tiny_folder, "transformer")


def edit_json(path: Path, change) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def bad_index(change):
    """Breaks the transformer's index (change gets it), after splitting it in two shards."""
    return lambda folder, split, edit: edit_json(split(folder / "transformer"), change)


def move(index: dict) -> None:
    names = index["weight_map"]
    first = min(names)
    names[first] = next(shard for shard in sorted(set(names.values())) if shard != names[first])


def resize(by: int):
    def change(folder, split, edit):
        split(folder / "transformer")
        with min((folder / "transformer").glob("*.safetensors")).open("r+b") as file:
            file.truncate(file.seek(0, 2) + by)

    return change


def pop_shard(folder, split, edit):
    split(folder / "transformer", 3)
    max((folder / "transformer").glob("*.safetensors")).unlink()


def seven(tensors, drop: bool):
    for name in sorted(tensors)[:7]:
        tensors[name + "_"] = tensors.pop(name) if drop else torch.zeros(1)


def tensors(change, part="transformer"):
    return lambda folder, split, edit: edit(folder / part, change)


def overwrite(path: str, content: str | None):
    return lambda folder, split, edit: (folder / path).unlink() if content is None else (folder / path).write_text(content)


def overlap(folder, split, edit):
    """Two tensors on the same bytes, and the file as long as its last one says."""
    path = folder / "transformer" / TRANSFORMER
    data = path.read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    header["norm"] = dict(header["proj_out.bias"])
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + int.from_bytes(data[:8], "little") :])


def change_vae(**changes):
    return lambda folder, *_: edit_json(folder / "vae" / "config.json", lambda config: config.update(changes))


FOLDERS = {
    "shard missing": (pop_shard, ["lacks 1 of 3 shards", "-00003-of-00003.safetensors", "download again"]),
    "shard short": (resize(-9), ["-00001-of-00002.safetensors", "bytes where its header says", "download it again"]),
    "shard long": (resize(9), ["-00001-of-00002.safetensors", "bytes where its header says", "download it again"]),
    "total size": (bad_index(lambda i: i["metadata"].update(total_size=7)), ["says 7 bytes", "shards hold"]),
    "index moved": (bad_index(move), ["index.json says", "is in", "it is in"]),
    "index has more": (bad_index(lambda i: i["weight_map"].update({"x.y": min(i["weight_map"].values())})), ["1 missing: x.y"]),
    "index has fewer": (bad_index(lambda i: i["weight_map"].pop("proj_out.bias")), ["1 unknown: proj_out.bias"]),
    "index leads out": (bad_index(lambda i: i["weight_map"].update({"x.y": "../x"})), ["outside its folder", "../x"]),
    "index leads up": (bad_index(lambda i: i["weight_map"].update({"x.y": ".."})), ["outside its folder", ".."]),
    "index is empty": (bad_index(lambda i: i.clear()), ["index.json", "weight_map"]),
    "no expert": (lambda folder, *_: shutil.rmtree(folder / "transformer_2"), ["tiny/transformer_2 is missing"]),
    "unknown tensor": (tensors(lambda t: t.update(stray=torch.zeros(1))), ["tensors 1 unknown: stray"]),
    "missing tensor": (tensors(lambda t: t.pop("proj_out.bias")), ["tensors 1 missing: proj_out.bias"]),
    "seven renamed": (tensors(lambda t: seven(t, True)), ["7 missing: blocks.0.attn1.norm_k.weight, ", "; 7 unknown: "]),
    "wrong shape": (tensors(lambda t: t.update({"proj_out.bias": torch.zeros(8)})), ["1 tensors differ", "(8,)", "(64,)"]),
    "vae shape": (tensors(lambda t: t.update({"quant_conv.bias": torch.zeros(3)}), "vae"), ["tiny/vae", "(3,)", "(32,)"]),
    "header garbage": (overwrite(f"transformer/{TRANSFORMER}", "\x05\0\0\0\0\0\0\0{{{{{"), [TRANSFORMER, "download it again"]),
    "header overlap": (overlap, [TRANSFORMER, "overlap"]),
    "empty file": (overwrite(f"transformer/{TRANSFORMER}", ""), [TRANSFORMER, "0 bytes", "download it again"]),
    "vae channels": (change_vae(in_channels=12), ["in_channels=12", "3 only"]),
    "vae patches": (change_vae(patch_size=2, in_channels=12, out_channels=12), ["is_residual=False with patch_size=2"]),
    "vae statistics": (change_vae(latents_std=[1.0] * 48), ["z_dim=16", "16 latents_mean", "48 latents_std"]),
    "other vae": (change_vae(is_residual=True, patch_size=2, in_channels=12, out_channels=12),
                  ["tiny/vae", "76 missing: decoder.up_blocks.0.upsampler.", "74 unknown: decoder.up_blocks.0.upsamplers.0."]),
    "no config": (overwrite("vae/config.json", None), ["vae/config.json is missing"]),
    "bad config": (overwrite("vae/config.json", "{"), ["vae/config.json is not JSON"]),
    "list config": (overwrite("vae/config.json", "[]"), ["vae/config.json"]),
    "no model index": (lambda folder, *_: [shutil.rmtree(folder / "transformer_2"), (folder / "model_index.json").unlink()],
                       ["model_index.json is missing"]),
    "no scheduler": (lambda folder, *_: shutil.rmtree(folder / "scheduler"), ["scheduler_config.json is missing"]),
    "no flow": (lambda folder, *_: edit_json(folder / "scheduler/scheduler_config.json", lambda c: c.update(prediction_type="v")),
                ["prediction_type=v", "flow_prediction"]),
    "no tokenizer": (lambda folder, *_: shutil.rmtree(folder / "tokenizer"), ["tokenizer"]),
    "bad tokenizer": (overwrite("tokenizer/tokenizer.json", "{}"), ["tokenizer.json"]),
    "other variant": (lambda folder, *_: edit_json(folder / "transformer/config.json", lambda c: c.update(image_dim=1280)),
                      ["image_dim=1280", "None only"]),
}  # fmt: skip


@pytest.mark.parametrize("name", FOLDERS)
def test_folder(refused, tiny_folder, split_weights, edit_weights, name):
    spoil, said = FOLDERS[name]
    spoil(tiny_folder, split_weights, edit_weights)
    line = refused()
    assert all(part in line for part in said), line
    if name == "seven renamed":
        missing, unknown = line.strip().split(" missing: ")[1].split("; 7 unknown: ")
        assert len(missing.split(", ")) == len(unknown.split(", ")) == 5


OFFLINE = """
import socket
def blocked(*_): raise AssertionError("a connection was tried")
socket.socket.connect = socket.socket.connect_ex = socket.create_connection = socket.getaddrinfo = blocked
"""


def fake_cache(cache: Path, folder: Path, name: str) -> Path:
    """The hub's cache as it lies on a disk: refs, a snapshot of links, and blobs."""
    home = cache / f"models--{name.replace('/', '--')}"
    snapshot = home / "snapshots" / ("5" * 40)
    for number, path in enumerate(p for p in sorted(folder.rglob("*")) if p.is_file()):
        link, blob = snapshot / path.relative_to(folder), home / "blobs" / f"{number:040x}"
        for place in (link, blob):
            place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, blob)
        link.symlink_to(blob)
    (home / "refs").mkdir()
    (home / "refs" / "main").write_text("5" * 40)
    return snapshot


@pytest.mark.parametrize("name", ["someone/tiny", "Wan-AI/Wan2.2-T2V-A14B-Diffusers"])
def test_hub_cache_without_a_network(tiny_folder, tmp_path, spawn, finish, split_weights, name):
    """By id, from the cache alone: no flag, no connection; for a preset's id as for one that we do not know."""
    split_weights(tiny_folder / "transformer")
    fake_cache(tmp_path / "cache", tiny_folder, name)
    arguments = ("a red circle", "--model", name, "--size", "64x32", "--frames", 5, "--steps", 1, "--out", "v.mp4")
    env = {"HF_HUB_CACHE": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "0"}
    result = finish(spawn(*arguments, code=OFFLINE, **env))
    assert result.code == 0 and Path("v.mp4").stat().st_size, result
    shard = next((tmp_path / "cache").glob("*/snapshots/*/transformer/*-00002-*"))
    shard.unlink()  # a download that broke off
    result = finish(spawn(*arguments, HF_HUB_CACHE=env["HF_HUB_CACHE"], HF_HUB_OFFLINE="1"))
    assert result.code == 2 and result.err.count("\n") == 1 and "lacks 1 of 2 shards" in result.err


def write_dummy(folder: Path, shards: int = 8, tensors: int = 4, numbers: int = 2**23) -> None:
    """A component of 1 GiB fp32 zeros that takes no room on the disk."""
    folder.mkdir()
    where = {}
    for i in range(shards):
        names, size = [f"weights.{i * tensors + j}" for j in range(tensors)], 4 * numbers
        entry = {n: {"dtype": "F32", "shape": [numbers], "data_offsets": [j * size, (j + 1) * size]} for j, n in enumerate(names)}
        header = json.dumps(entry).encode()
        shard = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        with (folder / shard).open("wb") as file:
            file.write(struct.pack("<Q", len(header)) + header)
            file.truncate(8 + len(header) + tensors * size)
        where |= dict.fromkeys(names, shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))


MEASURE = """
import sys, torch
from pathlib import Path
from nanovgen import checkpoint
class Toy(torch.nn.Module):
    FP32 = ()
    def __init__(self, config):
        super().__init__()
        self.weights = torch.nn.ParameterList(torch.empty(2**23) for _ in range(32))
    def hub_name(self, name): return name
def peak():
    return int(next(x for x in open("/proc/self/status") if x.startswith("VmHWM")).split()[1]) / 1024
model, component, before = checkpoint.build(Toy, None), checkpoint.open_component(Path(sys.argv[1])), peak()
checkpoint.load(model, component, torch.device("cpu"), torch.bfloat16)
print(before, peak(), sum(p.nbytes for p in model.parameters()) / 2**20)
"""


def test_peak_memory_of_loading(tmp_path):
    """1 GiB of fp32 in 8 shards to bf16: the model (512 MiB) and one mapped shard (128 MiB), not twice the checkpoint."""
    write_dummy(tmp_path / "dummy")
    command = [sys.executable, "-c", MEASURE, str(tmp_path / "dummy")]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    shutil.rmtree(tmp_path / "dummy")
    assert ran.returncode == 0, ran.stderr
    before, after, model = map(float, ran.stdout.split())
    print(f"peak {after:.0f} MiB - {before:.0f} before = {after - before:.0f}; model {model:.0f}, one shard 128")
    assert model == 512 and after - before <= model + 128 + 100
