"""The house keeps its own rules: imports point down, two files talk to torch.distributed, the README names what there is."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "nanovgen"
LEVELS = [  # a file imports from earlier rows only
    {"push", "recipe", "fp8", "machines", "as_rank", "compiled"},
    {"mesh"},
    {"attention", "checksum", "vae", "text", "dress", "scheduler", "video"},
    {"ulysses", "ring", "attn2d", "cfg", "tp", "vae_parallel", "metrics"},
    {"wan", "cosmos", "checkpoint", "launch"},
    {"plan"},
    {"job"},
    {"summary"},
    {"generate", "lesson", "floor", "preview"},
    {"cost", "peers"},
    {"choose", "article", "calibrate", "orders", "ranks", "guard", "asked"},
    {"gauges", "client", "clips", "bench"},
    {"api", "quality", "report"},
    {"server"},
    {"serve"},
]


def imported(path: Path) -> set[str]:
    """Names of nanovgen's modules that a file imports when it is imported itself (not those of its command line)."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ImportFrom) and node.module == "nanovgen":
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("nanovgen."):
            found.add(node.module.split(".")[1])
    return found


def test_every_file_has_a_level():
    assert set().union(*LEVELS) == {p.stem for p in PACKAGE.glob("*.py")} - {"__init__"}


@pytest.mark.parametrize("level", range(len(LEVELS)))
def test_imports_point_down(level):
    below = set().union(*LEVELS[:level])
    for name in LEVELS[level]:
        assert imported(PACKAGE / f"{name}.py") <= below, name


def test_two_files_talk_to_other_ranks():
    """mesh by collectives; push, which mesh alone starts, by writing to their memory. as_rank is the ranks that are not there."""
    said = {p.stem: p.read_text().replace("torch.distributed is", "") for p in PACKAGE.glob("*.py")}
    assert {name for name, text in said.items() if "torch.distributed" in text} == {"mesh", "push", "as_rank"}


def test_oracles_are_not_run_time():
    for path in [*PACKAGE.glob("*.py"), ROOT / "run.py", *(ROOT / "weights").glob("*.py")]:
        names = {
            alias.name.split(".")[0]
            for n in ast.walk(ast.parse(path.read_text()))
            if isinstance(n, ast.Import)
            for alias in n.names
        }
        names |= {(n.module or "").split(".")[0] for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.ImportFrom)}
        assert not names & {"diffusers", "transformers", "jax", "flax"}, path


def test_readme_names_the_files_and_ci_its_test_command():
    readme, ci = (ROOT / "README.md").read_text(), (ROOT / ".ci" / "run").read_text()
    assert [p.name for p in PACKAGE.glob("*.py") if p.stem != "__init__" and f"`nanovgen/{p.name}`" not in readme] == []
    assert "    python -m pytest\n" in readme and "\npython -m pytest\n" in ci
