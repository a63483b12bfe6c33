"""Where the small trained checkpoint lies that ships with Sidestream, its questions, and configs of large models."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

BUNDLED_MODEL = "glm5-next-tiny"


def bundled_model() -> Path:
    """Folder of the checkpoint."""
    return _assets() / BUNDLED_MODEL


def bundled_questions() -> Path:
    """Questions that it never saw, in GSM8K's format."""
    return _assets() / "arithmetic.jsonl"


def known_configs() -> dict[str, Path]:
    """Files like ``config.json`` of published models, by name: their public configs, completed with the defaults of
    ``transformers``."""
    return {path.stem: path for path in sorted((_assets() / "configs").glob("*.json"))}


def _assets() -> Path:
    return Path(str(resources.files("sidestream"))) / "assets"
