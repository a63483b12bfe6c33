"""Prints or rewrites the module list of docs/structure.md: each module with the first sentence of its docstring.

    python scripts/structure.py          # print the list
    python scripts/structure.py --write  # put it into docs/structure.md

A test compares the page with this list, so the page cannot go stale.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "structure.md"
START, END = "<!-- modules -->", "<!-- end of modules -->"


def sentence(path: Path) -> str:
    """First sentence of a module's docstring."""
    text = " ".join((ast.get_docstring(ast.parse(path.read_text())) or "").split("\n\n")[0].split())
    return re.split(r"(?<=[.!?]) (?=[A-Z`])", text)[0]


def module_list() -> str:
    """Markdown: one heading a folder, one line a module."""
    lines: list[str] = []
    folder = None
    package = ROOT / "sidestream"
    for path in sorted(package.rglob("*.py"), key=lambda p: (len(p.relative_to(package).parts) > 1, p.as_posix())):
        relative = path.relative_to(package)
        if not sentence(path):
            continue
        top = relative.parts[0] if len(relative.parts) > 1 else ""
        if top != folder:
            folder = top
            lines += ["", f"### sidestream/{top}".rstrip("/"), ""]
        lines.append(f"- `{relative.as_posix()}`: {sentence(path)}")
    return "\n".join(lines).strip() + "\n"


def page_with(listing: str, page: str) -> str:
    """The page with its list replaced."""
    head, rest = page.split(START)
    return f"{head}{START}\n\n{listing}\n{END}{rest.split(END)[1]}"


def main() -> None:
    if "--write" in sys.argv[1:]:
        PAGE.write_text(page_with(module_list(), PAGE.read_text()))
    else:
        print(module_list())


if __name__ == "__main__":
    main()
