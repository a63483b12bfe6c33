"""docs/streams.md: its examples run, on several schedules and alone, and its drawings are what the script draws."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import timelines
from sidestream.streams import simulated

ROOT = Path(__file__).resolve().parent.parent.parent
PAGE = ROOT / "docs" / "streams.md"
EXAMPLES = {"handoff": 0, "breakable capture": 1}

ALONE = """
import sys, types

package = types.ModuleType("sidestream")  # not its __init__, which offers the engine
package.__path__ = [{folder!r}]
sys.modules["sidestream"] = package
exec(compile({example!r}, "docs/streams.md", "exec"), {{}})
print(*sorted(name for name in sys.modules if name.startswith("sidestream.")))
"""


def example(name: str) -> str:
    blocks: list[str] = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    assert len(blocks) == len(EXAMPLES)
    return blocks[EXAMPLES[name]]


@pytest.mark.parametrize("name", EXAMPLES)
@pytest.mark.parametrize("order", [simulated.Order.INLINE, simulated.Order.LAZY, simulated.Order.RANDOM])
def test_the_examples_run(
    name: str, order: simulated.Order, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = simulated.SimulatedBackend(order)
    monkeypatch.setattr(simulated, "SimulatedBackend", lambda: made)
    exec(compile(example(name), "docs/streams.md", "exec"), {})
    made.check()
    if name == "handoff":
        assert capsys.readouterr().out.startswith("stream waits: external")


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_examples_need_nothing_else_of_the_package(name: str) -> None:
    code = ALONE.format(folder=str(ROOT / "sidestream"), example=example(name))
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    loaded = set(result.stdout.splitlines()[-1].split())
    allowed = {"sidestream.errors"}
    if name == "breakable capture":
        allowed |= {"sidestream.core", "sidestream.core.eager_break"}
        allowed |= {"sidestream.graphs", "sidestream.graphs.breakable"}
    others = {module for module in loaded if module.split(".")[1] != "streams"}
    assert others == allowed


@pytest.mark.parametrize("policy", timelines.POLICIES)
def test_the_drawings_are_up_to_date(policy: str) -> None:
    assert (ROOT / "docs" / f"timeline-{policy}.svg").read_text() == timelines.drawing(policy)


def test_the_drawings_show_the_overlap() -> None:
    external, stream = (timelines.starts(timelines.work_under(policy)) for policy in timelines.POLICIES)
    assert external["conversion"] == external["rest of the segment"]
    assert stream["attention"] - external["attention"] == 60  # all of the conversion


NAMES = re.compile(r"`([\w./]+)`")
WALK = ROOT / "docs" / "decode_step.md"
SOURCES = [path.read_text() for path in (ROOT / "sidestream").rglob("*.py")]


def named_in(page: Path) -> tuple[list[str], list[str]]:
    """What a page sets in code font: paths, and names."""
    names = NAMES.findall(page.read_text())
    return [name for name in names if "/" in name], [name for name in names if "/" not in name]


@pytest.mark.parametrize("page", [WALK, PAGE], ids=lambda page: page.name)
def test_every_file_that_a_page_names_exists(page: Path) -> None:
    paths, _ = named_in(page)
    assert len(paths) > 3
    assert [path for path in paths if not ((ROOT / "sidestream" / path).exists() or (ROOT / path).exists())] == []


def test_every_name_of_the_walk_stands_in_the_sources() -> None:
    """A method must be one of the class that it is named with."""
    _, names = named_in(WALK)
    assert len(names) > 30
    words = set(re.findall(r"\w+", "\n".join(SOURCES)))
    members: dict[str, list[set[str]]] = {}  # of each class of a name: there are several schedulers
    for source in SOURCES:
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ClassDef):
                methods = {inner.name for inner in node.body if isinstance(inner, ast.FunctionDef)}
                members.setdefault(node.name, []).append(methods)
    for name in names:
        owner, *rest = name.split(".")
        if owner in members:
            assert any(set(rest) <= methods for methods in members[owner]), name
        assert {owner, *rest} <= words, name
