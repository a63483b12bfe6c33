"""Finds every place of the engine that orders work, in its source, and makes the engine run without one of them."""

from __future__ import annotations

import ast
import importlib
import sys
import textwrap
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import sidestream

PACKAGE = Path(sidestream.__file__).parent

ORDERING_CALLS = frozenset(
    {
        # Handoff
        "publish",
        "wait",
        "require_published",
        # StreamBackend and Streams
        "begin_step",
        "record",
        "record_stream",
        "synchronize",
        "synchronize_event",
        "use",
        "wait_stream",
        # what the engine makes of them
        "on_device",
        "replay",
        "set_logical_topk_ready",
        # handoffs of captures
        "add_publish",
        "add_wait",
        "after_replay",
        "before_replay",
    }
)
"""Methods that order work of a stream, mark a place in one, choose one, or say that something happened."""

OTHER_CALLS = frozenset(
    {
        "abort_capture",
        "begin_capture",
        "capture",
        "claim_name",
        "current_stream",
        "end_capture",
        "event_done",
        "host_buffer",
        "is_capturing",
        "new_event",
        "new_pool",
        "new_stream",
    }
)
"""The other methods of ``streams``."""

NOT_STEPS = (
    "streams/backend.py",
    "streams/cuda.py",
    "streams/inline.py",
    "streams/simulated/",
    "engine/bench/",
    "engine/device_memory.py",
    "engine/doctor/",
    "engine/engine_process.py",
    "engine/form_compiler.py",
    "engine/form_trials.py",
    "engine/memory_probe.py",
    "engine/verify/",
    "server/",
)
"""The devices, which do what they are told; the doctor, whose small programs ask what a device does; ``verify``, which
runs whole engines one after the other; the memory probe, the benchmarks and the server's engine process, which run
whole steps one after the other and read clocks and counters between them; what tries and compiles forms, on threads of
its own; the server, which waits for clients and for an engine in another process."""

BOOKKEEPING = ("cache/prefix_cache.py", "scheduler/prefixes.py", "scheduler/scheduler.py")
"""Of the host alone: ``publish`` says there which blocks a later sequence may find, ``begin_step`` that copies
of the step before are made. Tests hold them to plain Python."""

WITHIN_A_KERNEL = frozenset({"mbarrier"})
"""Modules of a kernel language whose ``wait`` orders the warps of one program, not the work of streams."""


@dataclass(frozen=True, slots=True)
class Place:
    """A call that orders work.

    Attributes:
        path: below the package.
        function: qualified name of the outermost function.
        call: its source.
        number: among equal calls of the function, from 1.
    """

    path: str
    function: str
    call: str
    number: int
    line: int
    column: int

    def __str__(self) -> str:
        again = f" #{self.number}" if self.number > 1 else ""
        return f"{self.path} {self.function}: {self.call}{again}"


def places() -> list[Place]:
    """Every ordering call of the engine, in the order of the source."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        relative = path.relative_to(PACKAGE).as_posix()
        if not relative.startswith(NOT_STEPS + BOOKKEEPING):
            found += _places_of(relative, ast.parse(_source(relative)))
    return found


@cache
def _source(path: str) -> str:
    """Of a module, as it was when first asked for."""
    return (PACKAGE / path).read_text()


def _places_of(path: str, tree: ast.Module) -> list[Place]:
    found: list[Place] = []
    for name, function in _functions(tree):
        seen: Counter[str] = Counter()
        for node in _calls(function):
            text = ast.unparse(node)
            seen[text] += 1
            found.append(Place(path, name, text, seen[text], node.lineno, node.col_offset))
    assert len(found) == len(_calls(tree)), f"{path} has an ordering call outside of functions and methods"
    return found


def _functions(tree: ast.Module) -> list[tuple[str, ast.FunctionDef]]:
    """Outermost functions: a closure belongs to the one it stands in."""
    found = []
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            found.append((node.name, node))
        elif isinstance(node, ast.ClassDef):
            found += [(f"{node.name}.{f.name}", f) for f in node.body if isinstance(f, ast.FunctionDef)]
    return found


def _calls(function: ast.AST) -> list[ast.Call]:
    """Ordering calls in the order of the source; one whose value is the step's result cannot be left out."""
    results = {id(n.value) for n in ast.walk(function) if isinstance(n, ast.Return) and _names(n.value, {"replay"})}
    calls = [
        node
        for node in ast.walk(function)
        if isinstance(node, ast.Call) and _names(node, ORDERING_CALLS) and id(node) not in results
    ]
    return sorted(calls, key=lambda node: (node.lineno, node.col_offset))


def _names(node: ast.AST | None, methods: Collection[str]) -> bool:
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or node.func.attr not in methods:
        return False
    owner = node.func.value
    return not (isinstance(owner, ast.Name) and owner.id in WITHIN_A_KERNEL)


class _Removal(ast.NodeTransformer):
    """Takes one call out and leaves the lines of all others as they are."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.removed = 0

    def _is_it(self, node: ast.AST | None) -> bool:
        at = (self.place.line, self.place.column)
        hit = isinstance(node, ast.Call) and (node.lineno, node.col_offset) == at
        hit = hit and ast.unparse(node) == self.place.call  # type: ignore[arg-type]
        self.removed += hit
        return hit

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        return ast.copy_location(ast.Pass(), node) if self._is_it(node.value) else node

    def visit_Return(self, node: ast.Return) -> ast.AST:
        if self._is_it(node.value):
            nothing = ast.parse("__import__('contextlib').nullcontext()", mode="eval").body
            node.value = ast.fix_missing_locations(ast.copy_location(nothing, node))
        return node

    def visit_With(self, node: ast.With) -> ast.AST:
        self.generic_visit(node)
        node.items = [item for item in node.items if not self._is_it(item.context_expr)]
        if node.items:
            return node
        return ast.copy_location(ast.If(test=ast.Constant(True), body=node.body, orelse=[]), node)


def remove(place: Place, patch: pytest.MonkeyPatch) -> None:
    """Run the engine without the call until the patch is undone."""
    function = dict(_functions(ast.parse(_source(place.path))))[place.function]
    removal = _Removal(place)
    changed = removal.visit(function)
    assert removal.removed == 1, f"{place} is part of a larger expression and cannot be taken out alone"
    _install(place.path, place.function, ast.Module(body=[changed], type_ignores=[]), patch)


@dataclass(frozen=True, slots=True)
class Edit:
    """Another text of one function: ``old`` stands in it once."""

    path: str
    function: str
    old: str
    new: str


def apply(edits: Sequence[Edit], patch: pytest.MonkeyPatch) -> None:
    """Run the engine with the edits until the patch is undone."""
    by_function: dict[tuple[str, str], list[Edit]] = {}
    for edit in edits:
        by_function.setdefault((edit.path, edit.function), []).append(edit)
    for (path, name), changes in by_function.items():
        source = _source(path)
        function = dict(_functions(ast.parse(source)))[name]
        start = min([function.lineno, *(decorator.lineno for decorator in function.decorator_list)])
        text = textwrap.dedent("\n".join(source.splitlines()[start - 1 : function.end_lineno]))
        for edit in changes:
            assert text.count(edit.old) == 1, f"{path} {name} has {edit.old!r} {text.count(edit.old)} times, not once"
            text = text.replace(edit.old, edit.new)
        _install(path, name, ast.parse("\n" * (start - 1) + text), patch)


def _install(path: str, function: str, tree: ast.Module, patch: pytest.MonkeyPatch) -> None:
    """Put a changed function, compiled under its own file and lines, in the place of the original."""
    code = compile(
        ast.fix_missing_locations(tree),
        str(PACKAGE / path),
        "exec",
        flags=annotations.compiler_flag,
        dont_inherit=True,
    )
    module = importlib.import_module("sidestream." + path.removesuffix(".py").replace("/", "."))
    made: dict[str, Any] = {}
    exec(code, vars(module), made)
    owner, _, name = function.rpartition(".")
    if owner:
        patch.setattr(getattr(module, owner), name, made[name])
        return
    original = getattr(module, name)
    for other in list(sys.modules.values()):
        if getattr(other, "__name__", "").startswith("sidestream") and vars(other).get(name) is original:
            patch.setattr(other, name, made[name])
