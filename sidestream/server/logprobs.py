"""Log-probabilities in OpenAI's two shapes: columns for completions, one object a token for chats."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sidestream.core.outputs import Logprob
from sidestream.server.token_text import TokenText

FLOOR = -9999.0
"""Stands for the logarithm of 0, which JSON has no number for."""

Row = Mapping[int, Logprob]


@dataclass(slots=True)
class LogprobColumns:
    """Columns of one completion as it grows; ``offset`` counts the characters before the next token."""

    tokens_text: TokenText
    top: int
    offset: int = 0
    columns: dict[str, list[Any]] = field(default_factory=lambda: _empty())

    def add(self, token: int, row: Row | None) -> None:
        """One token; ``row`` is None for the first of a prompt, which nothing predicts."""
        text = self.tokens_text.text(token)
        self.columns["tokens"].append(text)
        self.columns["text_offset"].append(self.offset)
        self.offset += len(text)
        if row is None:
            self.columns["token_logprobs"].append(None)
            self.columns["top_logprobs"].append(None)
            return
        self.columns["token_logprobs"].append(finite(row[token].logprob))
        self.columns["top_logprobs"].append(self._top(row))

    def take(self) -> dict[str, Any]:
        """What was added since the last call."""
        taken, self.columns = self.columns, _empty()
        return dict(taken)

    def _top(self, row: Row) -> dict[str, float]:
        """The top tokens by rank and the chosen one; of tokens with one text the likelier counts."""
        best: dict[str, float] = {}
        for token, entry in sorted(row.items(), key=lambda pair: pair[1].rank):
            best.setdefault(self.tokens_text.text(token), finite(entry.logprob))
        return best


def _empty() -> dict[str, list[Any]]:
    return {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}


def chat_logprobs(tokens: TokenText, chosen: Sequence[int], rows: Sequence[Row], *, top: int) -> dict[str, Any]:
    """``logprobs`` of a chat choice."""
    content = []
    for token, row in zip(chosen, rows, strict=True):
        ranked = sorted(row.items(), key=lambda pair: pair[1].rank)[:top]
        entry = _entry(tokens, token, row[token])
        content.append(entry | {"top_logprobs": [_entry(tokens, other, logprob) for other, logprob in ranked]})
    return {"content": content, "refusal": None}


def _entry(tokens: TokenText, token: int, logprob: Logprob) -> dict[str, Any]:
    return {
        "token": tokens.text(token),
        "logprob": finite(logprob.logprob),
        "bytes": list(tokens.token_bytes(token)),
    }


def finite(value: float) -> float:
    return max(value, FLOOR)
