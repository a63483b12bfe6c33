"""Many streams at once, some of which are cut at random: what stays is right, and what goes leaves nothing."""

from __future__ import annotations

import asyncio
import json
import random

import httpx

from sidestream import LLM, SamplingParams
from tests.server.live_server import LiveServer

STREAMS = 60
CUT = 0.4
MARGIN = 1e-3
"""Top-2 margin in nats, under which another batch may choose the other token: twenty times what fp32 differs by."""


async def stream(client: httpx.AsyncClient, prompt: str, tokens: int, cut_after: int | None) -> str | None:
    """The text of a whole stream; None of one that was cut."""
    body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    text, lines = "", 0
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.status_code == 200
        async for line in answer.aiter_lines():
            if line == "data: [DONE]":
                return text
            if line:
                text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
                lines += 1
                if lines == cut_after:
                    return None
    raise AssertionError(f"the stream of {prompt!r} ended without [DONE]")


def test_kept_streams_equal_their_solo_answers(server: LiveServer, llm: LLM) -> None:
    draws = random.Random(11)
    numbers = [(draws.randrange(2, 99), draws.randrange(2, 99)) for _ in range(STREAMS)]
    prompts = [f"Question: What is {a} + {b}?\nAnswer:" for a, b in numbers]
    lengths = [draws.randrange(5, 40) for _ in prompts]
    cuts = [draws.randrange(1, length) if draws.random() < CUT else None for length in lengths]

    async def run() -> list[str | None]:
        limits = httpx.Limits(max_connections=STREAMS)
        async with httpx.AsyncClient(base_url=server.url, timeout=300, limits=limits) as client:
            jobs = [stream(client, *job) for job in zip(prompts, lengths, cuts, strict=True)]
            return await asyncio.gather(*jobs)

    texts = asyncio.run(run())
    kept = [i for i, cut in enumerate(cuts) if cut is None]
    assert 20 < len(kept) < STREAMS - 10, "both kinds are there"
    params = [SamplingParams(temperature=0, max_tokens=lengths[i], ignore_eos=True, logprobs=2) for i in kept]
    for place, i in enumerate(kept):
        (offline,) = llm.generate(prompts[i], params[place])
        assert_equal_up_to_a_tie(texts[i], offline.outputs[0], llm)
    server.await_idle()


def assert_equal_up_to_a_tie(text: str | None, solo: object, llm: LLM) -> None:
    """Equal texts, or a first difference at a step whose two best tokens are within the margin."""
    assert text is not None
    shown = ""
    for token, row in zip(solo.token_ids, solo.logprobs, strict=True):  # type: ignore[attr-defined]
        best = sorted((entry.logprob for entry in row.values()), reverse=True)[:2]
        if best[0] - best[1] < MARGIN:
            assert text.startswith(shown)
            return
        shown = solo.text[: len(shown) + len(llm.tokenizer.decode([token]))]  # type: ignore[attr-defined]
    assert text == solo.text  # type: ignore[attr-defined]
