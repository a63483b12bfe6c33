"""The checkpoint's tokenizer, if it has one. No code from a checkpoint is ever run."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from sidestream.errors import CheckpointError

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
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path, trust_remote_code=False, local_files_only=True)
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
