"""The checkpoint's tokenizer, if it has one. No code from a checkpoint is ever run."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from sidestream.errors import CheckpointError

PLAIN_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")
"""Names of the class that needs nothing but ``tokenizer.json``."""
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


def load_tokenizer(folder: str | os.PathLike[str]) -> Any | None:
    """A transformers tokenizer, or None where the folder holds no tokenizer file.

    Raises:
        CheckpointError: the files are there and cannot be read.
    """
    path = Path(folder)
    if not any((path / name).is_file() for name in TOKENIZER_FILES):
        return None
    from huggingface_hub.errors import StrictDataclassError

    try:
        return _loader(path).from_pretrained(path, trust_remote_code=False, local_files_only=True)
    except (
        OSError,
        ArithmeticError,
        AttributeError,
        LookupError,
        RuntimeError,
        TypeError,
        ValueError,
        StrictDataclassError,
    ) as error:
        raise CheckpointError(f"the tokenizer in {path} cannot be read: {error}") from error


def _loader(folder: Path) -> Any:
    """The class that reads the tokenizer: the plain one if the folder names that, which spares seconds of imports."""
    try:
        named = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        named = None
    plain = isinstance(named, dict) and named.get("tokenizer_class") in PLAIN_CLASSES and "auto_map" not in named
    if plain and (folder / "tokenizer.json").is_file():
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast
    from transformers import AutoTokenizer

    return AutoTokenizer
