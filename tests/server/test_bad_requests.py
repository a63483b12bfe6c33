"""Fault 1 of docs/faults.md over HTTP: bad requests are refused one by one with a reason, and hurt nobody."""

from __future__ import annotations

import json
import threading
from typing import Any

import openai
import pytest

from sidestream import LLM, SamplingParams
from tests.server.live_server import LiveServer

VOCAB = 512
"""Filled in from the checkpoint by the test."""

BAD_COMPLETIONS: list[tuple[dict[str, Any], str]] = [
    ({"prompt": ""}, "empty string"),
    ({"prompt": [""]}, "empty string"),
    ({"prompt": []}, "empty list"),
    ({"prompt": [[]]}, "empty list"),
    ({"prompt": None}, "prompt"),
    ({}, "prompt is missing"),
    ({"prompt": [-1]}, "-1"),
    ({"prompt": ["VOCAB"]}, "VOCAB"),
    ({"prompt": [1, "a"]}, "prompt"),
    ({"prompt": {"a": 1}}, "prompt"),
    ({"prompt": [5] * 40000}, "max_model_len"),
    ({"prompt": "\ud800"}, "prompt"),
    ({"top_k": 0.01}, "top_k"),
    ({"top_k": -2}, "top_k is -2"),
    ({"top_p": 0}, "top_p is 0"),
    ({"top_p": 1.5}, "top_p is 1.5"),
    ({"top_p": "x"}, "top_p must be a number, got 'x'"),
    ({"min_p": 2}, "min_p is 2"),
    ({"temperature": -1}, "temperature is -1"),
    ({"temperature": float("nan")}, "temperature is NaN"),
    ({"temperature": float("inf")}, "temperature is Infinity"),
    ({"temperature": True}, "temperature"),
    ({"max_tokens": 0}, "max_tokens is 0"),
    ({"max_tokens": -1}, "max_tokens is -1"),
    ({"max_tokens": 10**30}, "max_tokens is .*9223372036854775807"),
    ({"min_tokens": 50, "max_tokens": 10}, "min_tokens 50"),
    ({"n": 0}, "n is 0"),
    ({"n": 1000}, "n is 1000"),
    ({"n": 9, "prompt": ["a"] * 9}, "max_sequences"),
    ({"best_of": 3}, "best_of is 3"),
    ({"logit_bias": {"999999": 1}}, "999999"),
    ({"logit_bias": {"x": 1}}, "'x'"),
    ({"logit_bias": {"5": 1000}}, "1000"),
    ({"logit_bias": [1]}, "logit_bias"),
    ({"stop": ""}, "stop holds an empty string"),
    ({"stop": ["x"] * 1000}, "stop has 1000"),
    ({"stop": ["\ud800"]}, "stop"),
    ({"stop_token_ids": [10**6]}, "stop_token_ids"),
    ({"logprobs": 10**6}, "logprobs is 1000000"),
    ({"logprobs": True}, "logprobs"),
    ({"seed": 2**64}, "seed"),
    ({"seed": "1"}, "seed"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"suffix": "x"}, "suffix"),
    ({"request_id": "again"}, "'request_id' is not a field"),
    ({"temprature": 1}, "is 'temperature' meant"),
    ({"model": "\ud800"}, "model"),
]

BAD_CHATS: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": [{"content": "no role"}]}, "role"),
    ({"messages": [{"role": "user"}]}, "messages.0: a message needs content"),
    ({"messages": [{"role": "user", "content": 5}]}, "content"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "type"),
    ({"messages": "hello"}, "messages"),
    ({"messages": [{"role": "user", "content": "\ud800"}]}, "content"),
    ({"max_tokens": 5, "max_completion_tokens": 6}, "max_completion_tokens is 6"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 1000}, "logprobs is 1000"),
    ({"chat_template_kwargs": {"tokenize": True}}, "'tokenize'"),
    ({"tools": [{"type": "function"}]}, "function"),
    ({"response_format": {"type": "poem"}}, "response_format"),
]

BAD_BODIES = [b"", b"{", b"[]", b"null", b'"text"', b"\xff\xfe", b"[" * 100_000, b'{"prompt": NaN}']


def refused(server: LiveServer, path: str, body: Any, says: str, status: int = 400) -> None:
    got, answer = server.post(path, body)
    assert got == status, f"{str(body)[:200]}: {got} {answer}"
    error = answer["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    import re

    assert re.search(says, error["message"]), f"{str(body)[:200]}: {error['message']!r} does not say {says!r}"


@pytest.fixture(scope="module")
def vocab(llm: LLM) -> int:
    return llm.built.config.model.vocab_size


def test_each_is_refused_while_a_long_stream_runs_unchanged(server: LiveServer, llm: LLM, vocab: int) -> None:
    """The stream goes on through all of them and is token for token the offline one."""
    prompt, length = "Question: What is 12 + 30?\nAnswer:", 900
    texts: list[str] = []
    started = threading.Event()

    def read() -> None:
        with openai.OpenAI(base_url=server.url + "/v1", api_key="any") as client:
            stream = client.completions.create(
                model="glm5-next-tiny",
                prompt=prompt,
                temperature=0,
                max_tokens=length,
                stream=True,
                extra_body={"ignore_eos": True},
            )
            for chunk in stream:
                started.set()
                texts.extend(choice.text for choice in chunk.choices)

    reader = threading.Thread(target=read)
    reader.start()
    assert started.wait(120)
    for changes, says in BAD_COMPLETIONS:
        body = {"prompt": "fine", "max_tokens": 5} | changes if changes else {"max_tokens": 5}
        text = json.dumps(body).replace('"VOCAB"', str(vocab))
        refused(server, "/v1/completions", text.encode(), says.replace("VOCAB", str(vocab)), _status(changes))
    for changes, says in BAD_CHATS:
        refused(server, "/v1/chat/completions", {"messages": [{"role": "user", "content": "fine"}]} | changes, says)
    for raw in BAD_BODIES:
        for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
            refused(server, path, raw, "the body|which is not JSON")
    refused(server, "/detokenize", {"tokens": [vocab]}, str(vocab))
    refused(server, "/detokenize", {"tokens": [-1]}, "-1")
    refused(server, "/tokenize", {}, "prompt or messages")
    assert reader.is_alive(), "the stream ended before the last bad request; make it longer"
    reader.join()
    (offline,) = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=length, ignore_eos=True))
    assert "".join(texts) == offline.outputs[0].text
    server.await_idle()


def _status(changes: dict[str, Any]) -> int:
    return 400


def test_other_refusals_have_their_own_status(server: LiveServer) -> None:
    refused(server, "/v1/completions", {"prompt": "a", "model": "other"}, "'other' is not served here", 404)
    refused(server, "/v1/embeddings", {"input": "a"}, "Not Found", 404)
    status, answer = server.get("/v1/completions")
    assert (status, answer["error"]["type"]) == (405, "invalid_request_error")
    refused(server, "/v1/completions", b'{"prompt": "' + b"a" * 1_000_000 + b'"}', "limit is 1000000", 413)


def test_a_body_without_a_length_is_limited_too(server: LiveServer) -> None:
    import http.client

    host, port = server.url.removeprefix("http://").split(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=30)
    chunks = (b"a" * 100_000 for _ in range(12))
    connection.request(
        "POST", "/v1/completions", body=chunks, headers={"content-type": "application/json"}, encode_chunked=True
    )
    answer = connection.getresponse()
    assert answer.status == 413
    assert "limit is 1000000" in json.loads(answer.read())["error"]["message"]
    connection.close()


def test_huge_numbers_are_upper_bounds_where_they_fit(server: LiveServer) -> None:
    """``max_tokens`` is clamped to the room left, so 1e12 is no error."""
    status, answer = server.post(
        "/v1/completions", {"prompt": "Question: What is 1 + 2?\nAnswer:", "max_tokens": 10**12, "temperature": 0}
    )
    assert status == 200
    assert answer["choices"][0]["finish_reason"] == "stop"
