"""Prompts of a JSON Lines file: one an object, with sampling parameters of its own."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from sidestream.cli.standard_streams import read_stdin
from sidestream.core.sampling_params import SamplingParams
from sidestream.engine.json_lines import read_json_lines
from sidestream.errors import RequestError

PROMPT_KEYS = ("prompt", "prompt_token_ids", "messages")
SAMPLING_KEYS = tuple(field.name for field in fields(SamplingParams))
ANSWER_KEYS = ("index", "prompt_tokens", "outputs")


def read_prompts(path: Path) -> list[dict[str, Any]]:
    """The file's objects; ``-`` is standard input.

    Raises:
        RequestError: naming the line and what is wrong with it.
    """
    entries = []
    for place, entry in read_json_lines(path, of="prompts", text=read_stdin() if str(path) == "-" else None):
        if not isinstance(entry, dict) or sum(entry.get(key) is not None for key in PROMPT_KEYS) != 1:
            raise RequestError(f"{place} must be an object with one of {', '.join(PROMPT_KEYS)}")
        for key in entry:
            if key not in SAMPLING_KEYS and (near := get_close_matches(key, SAMPLING_KEYS, n=1, cutoff=0.85)):
                raise RequestError(f"{place} has {key!r}, which is no sampling parameter; is {near[0]!r} meant?")
        if taken := sorted(set(entry) & set(ANSWER_KEYS)):
            raise RequestError(f"{place} has {', '.join(taken)}, which the answer needs; rename")
        entries.append(entry)
    return entries


def with_overrides(params: SamplingParams, entry: Mapping[str, Any], index: int) -> SamplingParams:
    """The command line's parameters with those of one prompt; a null stands for the command line's."""
    own = {key: entry[key] for key in SAMPLING_KEYS if entry.get(key) is not None}
    try:
        if isinstance(own.get("logit_bias"), Mapping):
            own["logit_bias"] = {_token_id(token): bias for token, bias in own["logit_bias"].items()}
        return SamplingParams(**{key: getattr(params, key) for key in SAMPLING_KEYS} | own)
    except RequestError as error:
        raise RequestError(f"prompt {index}: {error}") from None


def _token_id(text: str) -> int:
    """JSON's keys are text, token ids are not."""
    if not re.fullmatch(r"-?[0-9]{1,18}", text):
        raise RequestError(f"logit_bias holds {text!r}, which is not a token id")
    return int(text)
