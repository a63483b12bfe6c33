"""Where a kernel's benchmark puts what it found: checked before anything is measured, written again after each case."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any


def out_file(text: str) -> Path:
    """A file for results, as argparse's ``type``: its folder must be there."""
    path = Path(text)
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {path.parent}")
    return path


def only_file(description: str | None) -> Path:
    """The one argument of a script that takes nothing but a file for results."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=out_file)
    return parser.parse_args().out  # type: ignore[no-any-return]


def keep(path: Path | None, found: Any) -> None:
    """Write everything so far."""
    if path is not None:
        path.write_text(json.dumps(found, indent=1, default=str) + "\n")
