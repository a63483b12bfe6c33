"""What the text of a completion must look like, if a request says so."""

from __future__ import annotations

import json as json_text
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sidestream.errors import RequestError

MAX_CHARACTERS = 65536
"""Of a schema, expression or grammar."""
MAX_TAG_CHARACTERS = 16 * MAX_CHARACTERS
"""Of a structural tag, which may hold the schemas of a hundred tools."""
JSON_WHITESPACE = 2
"""Most characters of white space in one place of JSON: a model that likes them would otherwise write nothing else."""
FORMS = ("json", "regex", "grammar", "choice", "json_object", "structural_tag")
MAPPINGS = ("json", "structural_tag")
"""Forms that may be given as a mapping."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputs:
    """Exactly one form; the completion's whole text matches it if the completion ends by itself.

    Args:
        json: a JSON schema, as text or as a mapping, which is kept as text.
        regex: a regular expression.
        grammar: EBNF in GBNF's notation; ``root`` is the whole text.
        choice: the text is one of these.
        json_object: any JSON object.
        structural_tag: xgrammar's description of text with parts of given forms, as JSON text or as a mapping.
        control_characters: False keeps those but newlines out of the text, as JSON forms always do: xgrammar lets
            JSON strings of limited length hold them.
        source: what the user calls that which asks for the form; complaints begin with it.
    Raises:
        RequestError: no form or several, or one that is too long or of a wrong type.
    """

    json: str | Mapping[str, Any] | None = None
    regex: str | None = None
    grammar: str | None = None
    choice: Sequence[str] | None = None
    json_object: bool = False
    structural_tag: str | Mapping[str, Any] | None = None
    control_characters: bool = True
    source: str = "structured_outputs"

    def __post_init__(self) -> None:
        for name in MAPPINGS:
            if isinstance(value := getattr(self, name), Mapping):
                try:
                    object.__setattr__(self, name, json_text.dumps(dict(value)))
                except (TypeError, ValueError, RecursionError) as error:
                    raise RequestError(f"{self.source} {name} is not a JSON schema: {error}") from None
        if self.json is not None or self.json_object:
            object.__setattr__(self, "control_characters", False)
        given = [name for name in FORMS if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            raise RequestError(f"{self.source} needs exactly one of {', '.join(FORMS)}, got {given or 'none'}")
        if self.choice is not None:
            if isinstance(self.choice, str) or not self.choice or not all(isinstance(c, str) for c in self.choice):
                raise RequestError(f"{self.source} choice must be a non-empty list of texts, got {self.choice!r}")
            object.__setattr__(self, "choice", tuple(self.choice))
        elif not isinstance(getattr(self, given[0]), bool if given[0] == "json_object" else str):
            raise RequestError(f"{self.source} {given[0]} is {type(getattr(self, given[0])).__name__}")
        size = sum(map(len, self.choice)) if self.choice is not None else len(str(getattr(self, given[0])))
        limit = MAX_TAG_CHARACTERS if self.structural_tag is not None else MAX_CHARACTERS
        if size > limit:
            raise RequestError(f"{self.source} {given[0]} has {size} characters, the limit is {limit}")

    @property
    def kind(self) -> str:
        """Which of ``FORMS`` it is."""
        return next(name for name in FORMS if getattr(self, name) not in (None, False))
