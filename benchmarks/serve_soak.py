"""Many streams for minutes, many of them cut at random: nothing may leak, and every answer that was kept must be right.

    python -m benchmarks.serve_soak --seconds 180 --json benchmarks/results/serve-soak.json

At the end kept answers are compared with what the offline engine gives each prompt alone: equal up to the first step
whose two best tokens are within ``MARGIN`` nats, where another batch may choose the other. Memory is what both
processes have resident.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import psutil

from sidestream import LLM, RequestOutput, SamplingParams
from sidestream.engine.bench.load.child_server import child_server

CUT = 0.4
MARGIN = 1e-3
CHECKED = 120
"""Kept answers that are computed again."""


class Soak:
    """Clients of one server, and what they saw."""

    def __init__(self, address: str, seconds: float) -> None:
        self.address = address
        self.end = time.monotonic() + seconds
        self.kept: list[tuple[str, int, str]] = []
        self.cut = 0
        self.memory: list[tuple[float, float]] = []

    async def client(self, seed: int, http: httpx.AsyncClient) -> None:
        """Ask until the time is over."""
        draws = random.Random(seed)
        while time.monotonic() < self.end:
            facts = "".join(
                f"The code of {draws.choice('abcdefgh')} is {draws.randrange(9999)}. "
                for _ in range(draws.randrange(8))
            )
            prompt = f"{facts}Question: What is {draws.randrange(9, 99)} + {draws.randrange(9, 99)}?\nAnswer:"
            tokens = draws.randrange(4, 48)
            stream = draws.random() < 0.8
            after = draws.random() * 3 if draws.random() < CUT else None
            try:
                text = await asyncio.wait_for(self.ask(http, prompt, tokens, stream), after)
                self.kept.append((prompt, tokens, text))
            except TimeoutError:
                self.cut += 1

    async def ask(self, http: httpx.AsyncClient, prompt: str, tokens: int, stream: bool) -> str:
        body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": stream}
        if not stream:
            answer = await http.post("/v1/completions", json=body)
            assert answer.status_code == 200, answer.text
            return str(answer.json()["choices"][0]["text"])
        text = ""
        async with http.stream("POST", "/v1/completions", json=body) as events:
            assert events.status_code == 200
            async for line in events.aiter_lines():
                if line == "data: [DONE]":
                    return text
                if line:
                    text += json.loads(line[6:])["choices"][0]["text"]
        raise AssertionError(f"the stream of {prompt!r} ended early")

    async def watch(self, processes: list[psutil.Process]) -> None:
        began = time.monotonic()
        while time.monotonic() < self.end:
            resident = sum(process.memory_info().rss for process in processes) / 2**20
            self.memory.append((time.monotonic() - began, resident))
            await asyncio.sleep(1)

    async def run(self, streams: int, processes: list[psutil.Process]) -> None:
        limits = httpx.Limits(max_connections=streams, max_keepalive_connections=streams)
        async with httpx.AsyncClient(base_url=self.address, timeout=None, limits=limits) as http:
            await asyncio.gather(self.watch(processes), *(self.client(seed, http) for seed in range(streams)))


def differs(text: str, alone: RequestOutput, llm: LLM) -> bool:
    """Whether an answer is another than the one alone, ties left out."""
    made = alone.outputs[0]
    sure = ""
    for count, row in enumerate(made.logprobs or (), start=1):
        best = sorted((entry.logprob for entry in row.values()), reverse=True)[:2]
        if best[0] - best[1] < MARGIN:
            return not text.startswith(sure)
        sure = str(llm.tokenizer.decode(made.token_ids[:count])) if llm.tokenizer is not None else ""
        sure = sure if made.text.startswith(sure) else ""
    return text != made.text


def leaks(address: str) -> dict[str, Any]:
    """What is still held once nobody asks any more."""
    time.sleep(2)
    ledger = httpx.get(address + "/ledger").json()
    text = httpx.get(address + "/metrics").text
    busy = sum(float(value) for value in re.findall(r"^vllm:num_requests_\w+\{.*\} (\S+)$", text, re.MULTILINE))
    return {"blocks_held": ledger["blocks"]["total"] - ledger["blocks"]["free"], "requests": busy}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=180)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    codes: list[int] = []
    with child_server(["--device", "cpu", "--max-num-seqs", "64"], on_line=print, on_end=codes.append) as address:
        soak = Soak(address, arguments.seconds)
        asyncio.run(soak.run(arguments.streams, psutil.Process().children(recursive=True)))
        held = leaks(address)
    (code,) = codes
    llm = LLM(device="cpu")
    checked = random.Random(0).sample(soak.kept, min(CHECKED, len(soak.kept)))
    wrong = []
    for prompt, tokens, text in checked:
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, logprobs=2)
        (alone,) = llm.generate(prompt, params)
        if differs(text, alone, llm):
            wrong.append({"prompt": prompt, "text": text, "alone": alone.outputs[0].text})
    half = [size for at, size in soak.memory if arguments.seconds / 3 < at < 2 * arguments.seconds / 3]
    last = [size for at, size in soak.memory if at >= 2 * arguments.seconds / 3]
    result = {
        "streams": arguments.streams,
        "seconds": arguments.seconds,
        "kept": len(soak.kept),
        "cut": soak.cut,
        "checked": len(checked),
        "wrong": wrong,
        "resident_mib": {"second_third": max(half, default=0), "last_third": max(last, default=0)},
        "held_at_the_end": held,
        "exit_code": code,
    }
    print(json.dumps({**result, "wrong": len(wrong)}))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    sys.exit(bool(wrong) or held["requests"] > 0 or held["blocks_held"] > 0 or code != 0)


if __name__ == "__main__":
    main()
