"""The repository's own rules: lint, types, import order, module size, public names, documentation that names files."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import structure

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "sidestream"

IMPORT_ORDER = (
    "errors",
    "env",
    "config",
    "streams",
    "core",
    "weights",
    "ops",
    "layers",
    "models",
    "attention",
    "graphs",
    "cache",
    "scheduler",
    "engine",
    "server",
    "cli",
)
"""A folder imports itself and what stands before it."""

MAX_LINES = 400
LONG_MODULES: dict[str, str] = {}
"""Path below the repository to the reason why it may be longer."""

PUBLIC_NAMES = (
    "LLM",
    "CapacityError",
    "CheckpointError",
    "CompletionOutput",
    "ConfigError",
    "Logprob",
    "ModelConfig",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "SidestreamError",
    "__version__",
)


def python_files(*folders: str) -> list[Path]:
    return sorted(p for folder in folders for p in (ROOT / folder).rglob("*.py"))


def imported_folders(path: Path) -> set[str]:
    """Top-level folders of the package that a module imports, wherever the import stands."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names = [node.module or ""]
            if node.module == "sidestream":
                names = [f"sidestream.{alias.name}" for alias in node.names if alias.name != "__version__"]
        found |= {name.split(".")[1] for name in names if name.startswith("sidestream.")}
    return found


def test_imports_point_one_way() -> None:
    wrong = []
    for path in python_files("sidestream"):
        relative = path.relative_to(PACKAGE)
        if len(relative.parts) == 1 and relative.stem in ("__init__", "__main__"):
            continue
        own = relative.parts[0].removesuffix(".py")
        for other in imported_folders(path):
            assert other in IMPORT_ORDER, f"{relative} imports {other} from the package root; name its module"
            if other != own and IMPORT_ORDER.index(other) > IMPORT_ORDER.index(own):
                wrong.append(f"{relative} imports sidestream.{other}")
    assert not wrong, "\n".join(wrong)


def test_modules_stay_small() -> None:
    long = {}
    for path in python_files("sidestream", "training", "benchmarks"):
        lines = len(path.read_text().splitlines())
        name = path.relative_to(ROOT).as_posix()
        if lines > MAX_LINES and name not in LONG_MODULES:
            long[name] = lines
    assert not long, f"longer than {MAX_LINES} lines: {long}; split them by responsibility"


def test_every_test_file_collects_something() -> None:
    empty = []
    for path in python_files("tests"):
        if path.name.startswith("test_"):
            tree = ast.parse(path.read_text())
            if not any(isinstance(node, ast.FunctionDef) and node.name.startswith("test_") for node in ast.walk(tree)):
                empty.append(path.name)
    assert not empty, empty


def test_public_names_are_pinned() -> None:
    import sidestream

    assert sorted(sidestream.__all__) == sorted(PUBLIC_NAMES)
    for name in PUBLIC_NAMES:
        assert getattr(sidestream, name) is not None


def test_structure_page_is_true() -> None:
    page = structure.PAGE.read_text()
    assert structure.page_with(structure.module_list(), page) == page, "run python scripts/structure.py --write"


def test_every_module_says_what_it_is() -> None:
    silent = [p.name for p in python_files("sidestream") if p.name != "__init__.py" and not structure.sentence(p)]
    assert not silent, silent


@pytest.mark.parametrize("command", [["ruff", "check", "."], ["ruff", "format", "--check", "."], ["mypy"]])
def test_static_checks(command: list[str]) -> None:
    result = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


def test_core_imports_without_optional_packages() -> None:
    """The engine's core must import where pydantic, fastapi, uvicorn, pyzmq and msgspec are missing."""
    blocked = ("pydantic", "fastapi", "uvicorn", "zmq", "msgspec", "xgrammar", "typer", "rich")
    code = f"import sys\nfor name in {blocked!r}: sys.modules[name] = None\nimport sidestream.engine.core\n"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
