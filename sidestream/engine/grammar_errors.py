"""What xgrammar says against a form, in words for whoever sent the form: without its source lines and its C++."""

from __future__ import annotations

import re

PLACE = re.compile(r"\[\d\d:\d\d:\d\d\] \S+:\d+: ")
"""Time and source line, in front of what is said."""
CHECK = re.compile(r"^Check failed: \(.*?\) is (?:false|true): ", re.DOTALL)
PARSER = re.compile(
    r"^(?:Regex parsing|EBNF parser|EBNF lexer) error at ((?:line \d+, column|position) \d+): ", re.DOTALL
)
REPEATED = re.compile(r"\. The JSON string is:.*", re.DOTALL)
"""The form once more."""
INTERNAL = re.compile(r"\.(?:cc|h|py)\b|Check failed|::|0x[0-9a-f]{4}|incompatible function arguments|Traceback")
MAX_CHARACTERS = 200
UNKNOWN = "it is none that can be followed"


def reason(error: Exception, *, keep_place: bool) -> str:
    """Why a form was refused.

    Args:
        keep_place: the place that is named is one in the form as it was sent; else it is one in a grammar made of it.
    """
    said = CHECK.sub("", PLACE.sub("", str(error)).strip())
    place = PARSER.match(said)
    said = REPEATED.sub("", said[place.end() :] if place else said).strip().rstrip(".")
    said = " ".join(said.split())
    if not isinstance(error, RuntimeError) or not said or INTERNAL.search(said):
        return UNKNOWN
    if len(said) > MAX_CHARACTERS:
        said = said[: MAX_CHARACTERS - 3] + "..."
    if place is not None and (keep_place or place[1].startswith("position")):  # of an expression, not of a grammar
        return f"at {place[1]}: {said}"
    return said
