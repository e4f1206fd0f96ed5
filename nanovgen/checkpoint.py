"""Raw safetensors to weights on the device: strict, shard by shard, and nothing is ever unpickled.

A component is a folder: config.json and either one *.safetensors file or several with an *.index.json. All that can be
wrong with it is found from the files' headers (a few KiB each) before a weight is read: a missing, truncated or
re-saved shard, missing or unknown tensors, wrong shapes. Then each tensor goes from the mapped file to the device in
its final dtype, so the host never holds more than one shard beside the model. Several threads read, for one is bound by
the page faults of the mapped file: 1 GiB of bf16 in the page cache went at 2.5 GB/s by one and 5.2 by two on two cores
(1.3 and 2.5 where it became fp32). Ranks on one host read each byte from the disk once between them: the page cache is
theirs together.
"""

import json
import math
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from safetensors import safe_open
from torch import nn

from nanovgen.recipe import read_json

BYTES = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "I64": 8, "I32": 4, "U8": 1, "BOOL": 1}
PARTS = ("model_index.json", "scheduler/*", "tokenizer/*", "text_tokenizer/*", "assets/*.json",
         *(f"{part}/*.{end}" for end in ("json", "safetensors")
           for part in ("text_encoder", "transformer", "transformer_2", "vae")))  # fmt: skip

READERS = 4  # threads


@dataclass(frozen=True)
class Component:
    """One part of a checkpoint, as its headers describe it: for each shard, {tensor name: shape}."""

    folder: Path
    shards: dict[Path, dict[str, tuple[int, ...]]]
    stored_bytes: int
    sizes: dict[str, int]  # bytes, by tensor name

    @property
    def config(self) -> dict:
        return read_json(self.folder / "config.json")


def locate(model: str) -> Path:
    """The folder of a checkpoint: itself, or the hub's snapshot of an id, downloaded only where it is not local yet."""
    if os.path.isdir(model):  # not Path's: that raises on a name that is too long
        return Path(model)
    if model.count("/") != 1 or model.startswith((".", "/", "~")):
        raise ValueError(f"model {model!r} is no folder here and no hub id (owner/name)")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        folder = Path(snapshot_download(model, allow_patterns=list(PARTS), local_files_only=True))
        if is_whole(folder):
            return folder
    except LocalEntryNotFoundError:
        pass
    try:
        return Path(snapshot_download(model, allow_patterns=list(PARTS)))
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        raise ValueError(f"{model} is not whole in the local cache and cannot be downloaded ({type(error).__name__}); "
                         "see weights/README.md, or give --model a folder") from error  # fmt: skip


def is_whole(folder: Path) -> bool:
    """Whether every component that model_index.json names is there with all the shards of its index."""
    try:
        for part, library in read_json(folder / "model_index.json").items():
            if isinstance(library, list) and library[0] and part in ("text_encoder", "transformer", "transformer_2", "vae"):
                open_component(folder / part)
    except ValueError:
        return False
    return True


def open_component(folder: Path) -> Component:
    """Read a component's headers and hold them against its index and the files' sizes. Raises ValueError."""
    if not folder.is_dir():
        raise ValueError(f"{folder} is missing")
    indices, files = sorted(folder.glob("*.safetensors.index.json")), sorted(folder.glob("*.safetensors"))
    if indices:
        index = read_json(indices[0])
        if not index.get("weight_map"):
            raise ValueError(f"{indices[0]} has no weight_map; download it again")
        names = sorted(set(index["weight_map"].values()))
        if strange := [name for name in names if name in ("", "..") or Path(name).name != name]:
            raise ValueError(f"{indices[0]} names a file outside its folder: {strange[0]}")
        if absent := [name for name in names if not (folder / name).exists()]:
            raise ValueError(f"{folder} lacks {len(absent)} of {len(names)} shards: {', '.join(absent[:5])}; download again")
        files = [folder / name for name in names]
    elif pickled := [p.name for p in folder.iterdir() if p.suffix in (".bin", ".pt", ".pth", ".ckpt")] if not files else []:
        raise ValueError(f"{folder} holds {pickled[0]}, a pickle, which is never opened; convert it to safetensors")
    elif len(files) != 1:
        raise ValueError(f"{folder} holds {len(files)} safetensors files and no index; one file, or an index, is needed")
    shards, sizes = {}, {}
    for path in files:
        shards[path], own = read_header(path)
        sizes |= own
    if indices:
        check_index(indices[0], index, shards, sum(sizes.values()))
    return Component(folder, shards, sum(sizes.values()), sizes)


def read_header(path: Path) -> tuple[dict[str, tuple[int, ...]], dict[str, int]]:
    """Names and shapes in a safetensors file, and bytes by name, without reading the data."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= min(size - 8, 100_000_000):
            raise ValueError(f"{path} is no whole safetensors file ({size} bytes); download it again")
        try:
            header = json.loads(file.read(length))
        except ValueError:
            raise ValueError(f"{path} has a header that is not JSON; download it again") from None
    header.pop("__metadata__", None)
    data = max((entry["data_offsets"][1] for entry in header.values()), default=0)
    if size != 8 + length + data:
        raise ValueError(f"{path} has {size} bytes where its header says {8 + length + data}; download it again")
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        if entry["dtype"] not in BYTES or end - begin != math.prod(entry["shape"]) * BYTES[entry["dtype"]]:
            raise ValueError(f"{path}: {name} is {entry['dtype']} {entry['shape']} in {end - begin} bytes")
    if sum(end - begin for begin, end in (entry["data_offsets"] for entry in header.values())) != data:
        raise ValueError(f"{path} has tensors that overlap, or gaps between them; download it again")
    sizes = {name: entry["data_offsets"][1] - entry["data_offsets"][0] for name, entry in header.items()}
    return {name: tuple(entry["shape"]) for name, entry in header.items()}, sizes


def check_index(path: Path, index: dict, shards: dict[Path, dict], total: int) -> None:
    found = {name: shard.name for shard, header in shards.items() for name in header}
    compare_names(str(path), set(index["weight_map"]), set(found), "its shards have")
    if moved := [name for name, shard in index["weight_map"].items() if found[name] != shard]:
        raise ValueError(f"{path} says {moved[0]} is in {index['weight_map'][moved[0]]}; it is in {found[moved[0]]}")
    stated = index.get("metadata", {}).get("total_size", total)
    if stated != total:
        raise ValueError(f"{path} says {stated} bytes of tensors; its shards hold {total}")


def compare_names(what: str, wanted: set[str], found: set[str], who: str) -> None:
    missing, unknown = sorted(wanted - found), sorted(found - wanted)
    if missing or unknown:
        lists = [
            f"{len(names)} {kind}: {', '.join(names[:5])}"
            for kind, names in (("missing", missing), ("unknown", unknown))
            if names
        ]
        raise ValueError(f"{what}: {who} {'; '.join(lists)}")


def build(model_class: type[nn.Module], config: object) -> nn.Module:
    """The model on meta: shapes and no memory."""
    with torch.device("meta"):
        return model_class(config)


def check(model: nn.Module, component: Component) -> None:
    """Refuse a component whose names or shapes are not the model's, in either direction.

    A model whose files hold another's weights too (Cosmos3's two towers) says by `foreign` which names those are.
    """
    foreign, cut = getattr(model, "foreign", lambda name: False), sliced(model)
    found = {name: shape for header in component.shards.values() for name, shape in header.items() if not foreign(name)}
    wanted = {model.hub_name(name): whole_shape(cut, name, p) for name, p in model.state_dict().items()}
    compare_names(str(component.folder), set(wanted), set(found), "tensors")
    if wrong := [name for name in wanted if wanted[name] != found[name]]:
        name = wrong[0]
        raise ValueError(f"{component.folder}: {len(wrong)} tensors differ in shape, first {name}: {found[name]}, "
                         f"where its config asks for {wanted[name]}")  # fmt: skip


def sliced(model: nn.Module) -> dict[str, tuple[int, object]]:
    """Parameters of which this rank keeps a slice (tensor parallelism): the dim that is cut, and the axis."""
    return {f"{where}.{name}": (dim, module.axis) for where, module in model.named_modules()
            for name, dim in getattr(module, "SLICED", {}).items()}  # fmt: skip


def whole_shape(cut: dict, name: str, p: torch.Tensor) -> tuple[int, ...]:
    dim, axis = cut.get(name, (0, None))
    return tuple(n * axis.size if axis and i == dim else n for i, n in enumerate(p.shape))


def final_dtype(model: nn.Module, name: str, dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if any(part in name for part in model.FP32) else dtype


def read_slice(shard: safe_open, name: str, dim: int, axis: object) -> torch.Tensor:
    """This rank's slice of a stored tensor; the rest of it is never read."""
    stored = shard.get_slice(name)
    size = stored.get_shape()[dim] // axis.size
    mine = slice(axis.rank * size, (axis.rank + 1) * size)
    return stored[mine] if dim == 0 else stored[:, mine]


def load(model: nn.Module, component: Component, device: torch.device, dtype: torch.dtype,
         progress: Callable[[int], object] = lambda done: None) -> nn.Module:  # fmt: skip
    """Fill a model built on meta. Weights that it lists in FP32 go there straight from the file. `progress` gets bytes."""
    check(model, component)
    ours = {model.hub_name(name): name for name in model.state_dict()}
    weights, cut = {}, sliced(model)

    def read(shard: safe_open, theirs: str) -> int:
        name = ours[theirs]
        tensor = read_slice(shard, theirs, *cut[name]) if name in cut else shard.get_tensor(theirs)
        if device.type == "cuda":
            tensor = tensor.pin_memory()  # here the file is read; from elsewhere the driver would copy it once more
        weights[name] = tensor.to(device, final_dtype(model, name, dtype), non_blocking=device.type == "cuda", copy=True)
        return tensor.nbytes

    with ThreadPoolExecutor(READERS) as pool:
        for path, header in component.shards.items():
            with safe_open(path, framework="pt", device="cpu") as shard:  # mapped, not read
                for done in pool.map(partial(read, shard), sorted(header.keys() & ours.keys())):
                    progress(done)
    model.load_state_dict(weights, assign=True)
    return model.requires_grad_(False).eval()
