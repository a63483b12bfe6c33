"""Triton carries a variable through a loop if its value there is another than before. It compares values while it reads
the body for the first time, with all variables as they were before the loop: ``a = b`` before and in the loop looks the
same then, so ``a`` keeps the first value for ever. A kernel whose arrivals all went to one barrier never ended."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

KERNELS = sorted((Path(__file__).parents[2] / "sidestream" / "ops").glob("*/triton_*.py"))


def copies(node: ast.AST) -> Iterator[tuple[str, str, int]]:
    """(name, what it is set to, line) wherever one name is set to another."""
    for each in ast.walk(node):
        if isinstance(each, ast.Assign) and isinstance(each.value, ast.Name) and isinstance(each.targets[0], ast.Name):
            yield each.targets[0].id, each.value.id, each.lineno


def not_carried(source: str) -> list[str]:
    """``function.name`` of compiled functions."""
    found = []
    for function in ast.walk(ast.parse(source)):
        if not isinstance(function, ast.FunctionDef) or not any(
            "jit" in ast.unparse(d) for d in function.decorator_list
        ):
            continue
        for loop in ast.walk(function):
            if isinstance(loop, ast.For | ast.While):
                before = {(a, b) for a, b, line in copies(function) if line < loop.lineno}
                found += [f"{function.name}.{a}" for a, b, _ in copies(loop) if (a, b) in before]
    return found


def test_what_is_looked_for_is_found() -> None:
    source = (
        "@gluon.jit\ndef f(n):\n    i = 0\n    last = {}\n    for _ in range(n):\n        last = i\n        i = i + 1"
    )
    assert not_carried(source.format("i")) == ["f.last"]
    assert not_carried(source.format("0")) == []
    assert len(KERNELS) > 30


@pytest.mark.parametrize("path", KERNELS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_every_kernel_carries_what_it_sets_in_loops(path: Path) -> None:
    assert not_carried(path.read_text()) == []
