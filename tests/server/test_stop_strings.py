"""Fault 15 of docs/faults.md over HTTP: stop strings across tokens, streamed and whole."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.server.live_server import LiveServer

PROMPT = "Question: What is 12 + 30?\nAnswer:"
TEXT = " 12 + 30 = 42\n#### 42"
"""What the bundled model answers."""


def whole(server: LiveServer, **fields: Any) -> tuple[str, str, Any]:
    _, answer = server.post("/v1/completions", {"prompt": PROMPT, "temperature": 0, "max_tokens": 30, **fields})
    (choice,) = answer["choices"]
    return choice["text"], choice["finish_reason"], choice["stop_reason"]


def streamed(server: LiveServer, **fields: Any) -> tuple[list[str], str, Any]:
    body = {"prompt": PROMPT, "temperature": 0, "max_tokens": 30, "stream": True, **fields}
    pieces, last = [], {}
    with httpx.stream("POST", server.url + "/v1/completions", json=body, timeout=300) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in answer.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    for line in lines[:-1]:
        (last,) = json.loads(line.removeprefix("data: "))["choices"]
        pieces.append(last["text"])
    return pieces, last["finish_reason"], last["stop_reason"]


@pytest.mark.parametrize(
    ("fields", "expected", "reason", "stop"),
    [
        ({}, TEXT, "stop", None),
        ({"stop": "= 42\n#"}, " 12 + 30 ", "stop", "= 42\n#"),
        ({"stop": ["#### 42", "42\n"]}, " 12 + 30 = ", "stop", "42\n"),
        ({"stop": ["0 = 4", "30"]}, " 12 + ", "stop", "30"),
        ({"stop": "42\n#### 43"}, TEXT, "stop", None),
        ({"stop": " = 43", "max_tokens": 10}, " 12 + 30 = 4", "length", None),
        ({"stop": "42", "include_stop_str_in_output": True}, " 12 + 30 = 42", "stop", "42"),
        ({"stop": "42", "min_tokens": 12}, " 12 + 30 = 42\n#### ", "stop", "42"),
    ],
)
def test_text_ends_where_the_earliest_match_begins(
    server: LiveServer, fields: dict[str, Any], expected: str, reason: str, stop: str | None
) -> None:
    assert whole(server, **fields) == (expected, reason, stop)
    pieces, streamed_reason, streamed_stop = streamed(server, **fields)
    assert ("".join(pieces), streamed_reason, streamed_stop) == (expected, reason, stop)


def test_held_back_text_is_never_shown_early(server: LiveServer) -> None:
    """Every prefix that a client sees is a prefix of the final text."""
    pieces, _, _ = streamed(server, stop=["42\n#### 4", " + 31"])
    shown = ""
    for piece in pieces:
        shown += piece
        assert " 12 + 30 = ".startswith(shown)
    assert shown == " 12 + 30 = "
