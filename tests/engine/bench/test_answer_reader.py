"""What the events of an answer are taken for: tokens, counts, the end, or a fault."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sidestream.engine.bench.load.answer_reader import AnswerReader
from sidestream.engine.bench.load.outcome import Answer, RequestFailed
from tests.engine.bench.fake_server import text_event, usage


def read(*events: tuple[float, Any], finished: float = 9.0) -> Answer:
    """Of events at known times, sent at 0."""
    reader = AnswerReader(0.0)
    for at, content in events:
        reader.event(at, content.encode() if isinstance(content, str) else json.dumps(content).encode())
    return reader.answer(finished)


def delta(**fields: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": fields, "finish_reason": None}]}


def test_counts_are_the_servers() -> None:
    """Three events, eleven tokens."""
    end = {"choices": [], "usage": usage(40, 11, prompt_tokens_details={"cached_tokens": 32})}
    answer = read(
        (1.0, text_event("four tokens in one")),
        (2.0, text_event(" more")),
        (3.5, text_event(" end", reason="length")),
        (3.6, end),
        (3.6, "[DONE]"),
    )
    assert answer.counted
    assert answer.times.completion_tokens == 11
    assert (answer.times.prompt_tokens, answer.times.cached_tokens) == (40, 32)
    assert answer.times.arrivals == (1.0, 2.0, 3.5), "a final count brings no tokens"
    assert answer.times.tpot == pytest.approx(2500 / 10)


def test_without_usage_events_stand_for_tokens() -> None:
    """And the answer says so; a null is no count, nor is anything else but one."""
    for nothing in (None, {}, {"completion_tokens": None}, {"completion_tokens": "5"}, {"completion_tokens": True}):
        more = {} if nothing is None else {"usage": nothing}
        answer = read((1.0, text_event("a") | more), (2.0, text_event("b") | {"usage": None}), (3.0, "[DONE]"))
        assert not answer.counted
        assert (answer.times.completion_tokens, answer.times.prompt_tokens) == (2, None)


def test_a_role_is_no_token() -> None:
    answer = read(
        (1.0, delta(role="assistant", content="")),
        (2.0, delta(content="Hi")),
        (3.0, {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}),
        (3.0, "[DONE]"),
    )
    assert answer.times.arrivals == (2.0,)
    assert answer.times.completion_tokens == 1


@pytest.mark.parametrize(
    "fields", [{"reasoning_content": "Hm"}, {"reasoning": "Hm"}, {"tool_calls": [{"index": 0, "function": {}}]}]
)
def test_reasoning_and_calls_are_tokens(fields: dict[str, Any]) -> None:
    assert read((1.5, delta(**fields)), (2.0, "[DONE]")).times.arrivals == (1.5,)


def test_tokens_without_text_are_seen_where_the_server_counts_each() -> None:
    """A model without a tokenizer, with ``continuous_usage_stats``; an event that brings no more tokens is none."""
    answer = read(
        (1.0, text_event("", usage=usage(8, 1))),
        (2.0, text_event("", usage=usage(8, 2))),
        (2.5, text_event("", usage=usage(8, 2), reason="length")),
        (2.6, {"choices": [], "usage": usage(8, 2)}),
    )
    assert answer.times.arrivals == (1.0, 2.0)
    assert answer.times.completion_tokens == 2


def test_events_that_came_together_are_one_arrival() -> None:
    answer = read((1.0, text_event("a")), (1.0, text_event("b")), (2.0, text_event("c")), (2.0, "[DONE]"))
    assert answer.times.arrivals == (1.0, 2.0)
    assert answer.times.completion_tokens == 3


def test_an_end_without_done_needs_a_reason() -> None:
    assert read((1.0, text_event("a", reason="stop"))).times.arrivals == (1.0,)
    with pytest.raises(RequestFailed, match="unfinished: after 1 events"):
        read((1.0, text_event("a")))


@pytest.mark.parametrize(
    ("content", "kind", "message"),
    [
        ({"error": {"message": "the engine is dead", "code": 503}}, "error event", "the engine is dead"),
        ({"error": "out of memory"}, "error event", "out of memory"),
        ({"error": {"message": "late", "code": 1}, "choices": []}, "error event", "late"),
        ("{broken", "bad event", "not JSON"),
        ("[1, 2]", "bad event", "not an object"),
        ({"object": "error", "message": "old words"}, "bad event", "old words"),
        ({"choices": "none"}, "bad event", "no list of choices"),
        ({"choices": [1]}, "bad event", "no list of choices"),
        ('{"choices": "\xff"}', "bad event", "no list of choices"),
    ],
)
def test_faults_have_kinds(content: Any, kind: str, message: str) -> None:
    with pytest.raises(RequestFailed, match=message) as caught:
        read((1.0, text_event("a")), (2.0, content))
    assert caught.value.kind == kind


def test_bytes_that_are_no_text() -> None:
    with pytest.raises(RequestFailed, match="bad event"):
        AnswerReader(0.0).event(1.0, b'{"choices": [{"text": "\xff\xfe"}]}')
