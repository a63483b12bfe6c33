"""Triton makes a constant of an argument that is 1, so that strides of adjacent elements give wide accesses. Where the
argument is annotated ``int`` it does not, nor does it widen one beyond 2**31."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

KERNELS = sorted((Path(__file__).parents[2] / "sidestream" / "ops").glob("*/triton_*.py"))


def annotated_int(source: str) -> list[str]:
    """``function.argument`` of compiled functions."""
    return [
        f"{function.name}.{argument.arg}"
        for function in ast.walk(ast.parse(source))
        if isinstance(function, ast.FunctionDef) and any("jit" in ast.unparse(d) for d in function.decorator_list)
        for argument in function.args.args
        if argument.annotation is not None and ast.unparse(argument.annotation) == "int"
    ]


def test_what_is_looked_for_is_found() -> None:
    source = "@triton.jit(do_not_specialize=['n'])\ndef f(x: tl.tensor, n: int): ...\ndef g(n: int): ..."
    assert annotated_int(source) == ["f.n"]
    assert len(KERNELS) > 30


@pytest.mark.parametrize("path", KERNELS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_no_argument_of_a_kernel_is_annotated_int(path: Path) -> None:
    assert annotated_int(path.read_text()) == []
