"""The folder of a model to measure: a checkpoint's, or one made for a config file that gets dummy weights."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def model_folder(model: Path) -> Iterator[tuple[Path, bool]]:
    """The folder, and whether it holds no weights; one made for a file goes with the block."""
    if not model.is_file():
        yield model, False
        return
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(model, Path(folder) / "config.json")
        yield Path(folder), True
