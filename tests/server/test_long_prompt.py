"""A long prompt beside streams of a live server: it is paced, everybody is answered."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

from sidestream import LLM, SamplingParams
from tests.server.live_server import LiveServer

STREAMS = 4
TOKENS = 300
LONG = [3 + (7 * i) % 997 for i in range(2500)]
PACED = "sidestream:prefill_paced_steps_total"


def test_a_long_prompt_is_paced_and_everybody_is_answered(server: LiveServer, llm: LLM) -> None:
    server.await_idle()
    before = server.metric(PACED)

    def ask(prompt: list[int], max_tokens: int) -> Any:
        body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        return server.post("/v1/completions", body)

    short = [[5 + i, 17, 40 + i] for i in range(STREAMS)]
    with ThreadPoolExecutor(STREAMS + 1) as threads:
        jobs = [threads.submit(ask, prompt, TOKENS) for prompt in short]
        while server.metric("vllm:num_requests_running") < STREAMS:
            assert not any(job.done() for job in jobs)
        long = threads.submit(ask, LONG, 4)
        answers = [job.result() for job in (*jobs, long)]
    assert [status for status, _ in answers] == [200] * (STREAMS + 1)
    assert [body["usage"]["completion_tokens"] for _, body in answers] == [TOKENS] * STREAMS + [4]
    server.await_idle()
    assert server.metric(PACED) > before
    alone = llm.generate([LONG], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))[0]
    assert answers[-1][1]["choices"][0]["text"] == alone.outputs[0].text
