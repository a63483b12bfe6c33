"""``docs/faults.md`` names tests that exist, and some for every fault."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TEST = re.compile(r"`(tests/[\w/]+\.py)(?:::(\w+))?`")
FAULTS = 17


def rows() -> list[list[str]]:
    """Cells of the page's table rows, headings left out."""
    lines = (ROOT / "docs" / "faults.md").read_text().splitlines()
    tables = [line for line in lines if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in tables]
    return [row for row, below in zip(cells, [*cells[1:], [""]], strict=True) if "---" not in row[0] + below[0]]


def test_every_test_that_is_named_exists() -> None:
    wrong = []
    for row in rows():
        named = TEST.findall(" ".join(row))
        assert named, f"no test: {row[:2]}"
        for path, name in named:
            file = ROOT / path
            defined = ast.parse(file.read_text()).body if file.is_file() else []
            if not any(isinstance(x, ast.FunctionDef) and x.name.startswith("test_") for x in defined):
                wrong.append(path)
            elif name and not any(isinstance(x, ast.FunctionDef) and x.name == name for x in defined):
                wrong.append(f"{path}::{name}")
    assert not wrong, wrong


def test_every_fault_has_a_row_with_all_of_its_cells() -> None:
    numbered = [row for row in rows() if row[0].isdigit()]
    assert [int(row[0]) for row in numbered] == list(range(1, FAULTS + 1))
    assert all(len(row) == 5 and all(row) for row in numbered)
