"""What runs on a GPU machine needs only what the engine's core does: the packages of a server may be missing there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
ABSENT = ("pydantic", "fastapi", "uvicorn", "zmq", "msgspec", "xgrammar", "fla", "prometheus_client", "openai")
IMPORTS = """
import importlib, sys, traceback


class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {absent}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)


sys.meta_path.insert(0, Absent())
import tests.conftest

for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except Exception:
        print(name, traceback.format_exc(), flush=True)
"""


def names() -> list[str]:
    """Every module of the benchmarks and of the tests that need a GPU."""
    paths = [*(ROOT / "benchmarks").rglob("*.py"), *(ROOT / "tests" / "gpu").rglob("*.py")]
    paths += [path for path in (ROOT / "tests" / "ops").rglob("test_*.py") if "mark.gpu" in path.read_text()]
    return sorted(".".join(path.relative_to(ROOT).with_suffix("").parts) for path in paths if path.stem != "__init__")


def failed_imports(modules: list[str]) -> str:
    command = [sys.executable, "-c", IMPORTS.format(absent=ABSENT), *modules]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_benchmarks_and_gpu_tests_import_without_the_packages_of_a_server() -> None:
    modules = names()
    assert {"benchmarks.decode_gpu", "benchmarks.kernels.bench_moe", "tests.gpu.engine.test_modes"} <= set(modules)
    failed = failed_imports(modules)
    assert not failed, failed


def test_the_packages_are_kept_out() -> None:
    """The module of messages needs one of them, so the test above could fail."""
    assert "No module named 'msgspec'" in failed_imports(["sidestream.engine.wire"])
