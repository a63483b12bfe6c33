"""What the text of a completion must look like, if a request says so."""

from __future__ import annotations

import json as json_text
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sidestream.errors import RequestError

MAX_CHARACTERS = 65536
"""Of a schema, expression or grammar."""
FORMS = ("json", "regex", "grammar", "choice", "json_object")


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputs:
    """Exactly one form; the completion's whole text matches it if the completion ends by itself.

    Args:
        json: a JSON schema, as text or as a mapping, which is kept as text.
        regex: a regular expression.
        grammar: EBNF in GBNF's notation; ``root`` is the whole text.
        choice: the text is one of these.
        json_object: any JSON object.
    Raises:
        RequestError: no form or several, or one that is too long or of a wrong type.
    """

    json: str | Mapping[str, Any] | None = None
    regex: str | None = None
    grammar: str | None = None
    choice: Sequence[str] | None = None
    json_object: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.json, Mapping):
            try:
                object.__setattr__(self, "json", json_text.dumps(dict(self.json), sort_keys=True))
            except (TypeError, ValueError, RecursionError) as error:
                raise RequestError(f"structured_outputs json is not a JSON schema: {error}") from None
        given = [name for name in FORMS if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            raise RequestError(f"structured_outputs needs exactly one of {', '.join(FORMS)}, got {given or 'none'}")
        if self.choice is not None:
            if isinstance(self.choice, str) or not self.choice or not all(isinstance(c, str) for c in self.choice):
                raise RequestError(f"structured_outputs choice must be a non-empty list of texts, got {self.choice!r}")
            object.__setattr__(self, "choice", tuple(self.choice))
        elif not isinstance(getattr(self, given[0]), bool if given[0] == "json_object" else str):
            raise RequestError(f"structured_outputs {given[0]} is {type(getattr(self, given[0])).__name__}")
        size = sum(map(len, self.choice)) if self.choice is not None else len(str(getattr(self, given[0])))
        if size > MAX_CHARACTERS:
            raise RequestError(f"structured_outputs {given[0]} has {size} characters, the limit is {MAX_CHARACTERS}")
