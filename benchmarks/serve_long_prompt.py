"""What a long prompt does to streams that decode beside it: their inter-token latency with it, over that without.

Two servers stand ready in one run and take turns, one with prefill pacing and one without. In each round streams decode
for a while; then one long prompt arrives (or several at once), and the round ends with its first token.

    python -m benchmarks.serve_long_prompt --json benchmarks/results/serve-long-prompt.json
    python -m benchmarks.serve_long_prompt --config benchmarks/configs/glm5-next-slice-a.json --device cuda

With ``--config`` the model has that config and random weights. The client counts raw events; tokens that come in one
read are as many equal gaps. Client, server and engine share the machine's cores.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import re
import statistics
import time
from contextlib import ExitStack, aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.event_stream import completion, place_of, tokens_so_far
from sidestream.engine.bench.environment import device_name, versions
from sidestream.engine.bench.load.child_server import child_server
from sidestream.engine.bench.model_folder import model_folder

SETTLING_TOKENS = 8
"""Tokens of each stream before its latency counts."""
PERCENTILES = (50, 90, 99)


def prompt_ids(length: int, seed: int) -> list[int]:
    return [(7 * i + 13 * seed + i * i % 11) % 1000 + 3 for i in range(length)]


@dataclass
class Stream:
    """One streamed completion, as it arrives.

    Attributes:
        arrivals: (second, new tokens) of each read.
    """

    prompt: list[int]
    max_tokens: int
    sent: float = 0.0
    tokens: int = 0
    arrivals: list[tuple[float, int]] = field(default_factory=list)

    async def run(self, place: tuple[str, int]) -> None:
        self.sent = time.perf_counter()
        async with aclosing(completion(place, self.prompt, self.max_tokens, continuous_usage=True)) as events:
            async for end in events:
                now = time.perf_counter()
                if (tokens := tokens_so_far(end)) > self.tokens:
                    self.arrivals.append((now, tokens - self.tokens))
                    self.tokens = tokens

    def gaps(self, begin: float, end: float) -> list[float]:
        """Seconds between tokens that came in this time, one a token."""
        found: list[float] = []
        for (before, _), (now, new) in zip(self.arrivals, self.arrivals[1:], strict=False):
            if before >= begin and now <= end:
                found += [(now - before) / new] * new
        return found


async def metric(place: tuple[str, int], name: str) -> float:
    """The sum of a metric's samples."""
    reader, writer = await asyncio.open_connection(*place)
    writer.write(f"GET /metrics HTTP/1.1\r\nhost: {place[0]}\r\nconnection: close\r\n\r\n".encode())
    text = (await reader.read()).decode()
    writer.close()
    return sum(float(value) for value in re.findall(rf"^{re.escape(name)}(?:{{.*}})? (\S+)$", text, re.MULTILINE))


async def idle(place: tuple[str, int]) -> None:
    """Return when no request is left: an end of connection ends them."""
    while await metric(place, "vllm:num_requests_running") + await metric(place, "vllm:num_requests_waiting"):
        await asyncio.sleep(0.1)


def summary(gaps: list[float]) -> dict[str, float]:
    """Milliseconds."""
    cuts = statistics.quantiles(gaps, n=100, method="inclusive")
    named = {f"p{p}": cuts[p - 1] * 1e3 for p in PERCENTILES}
    return {"mean": statistics.fmean(gaps) * 1e3, **named, "max": max(gaps) * 1e3, "tokens": len(gaps)}


async def one_round(address: str, arguments: argparse.Namespace, seed: int) -> dict[str, Any]:
    """Streams alone, then with the long prompt."""
    place = place_of(address)
    await idle(place)
    paced = await metric(place, "sidestream:prefill_paced_steps_total")
    streams = [Stream(prompt_ids(16, 1000 * seed + i), arguments.max_model_len - 32) for i in range(arguments.streams)]
    tasks = [asyncio.create_task(stream.run(place)) for stream in streams]
    long = [Stream(prompt_ids(arguments.prompt_tokens, 7 * seed + i), 1) for i in range(arguments.prompts)]
    try:
        while min(stream.tokens for stream in streams) < SETTLING_TOKENS:
            await asyncio.sleep(0.01)
        began = time.perf_counter()
        await asyncio.sleep(arguments.alone_seconds)
        arrived = time.perf_counter()
        await asyncio.gather(*[prompt.run(place) for prompt in long])
        done = max(prompt.arrivals[0][0] for prompt in long)
        if any(task.done() for task in tasks):
            raise SystemExit("a stream ended before the long prompt's first token; raise --max-model-len")
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    alone = summary([gap for stream in streams for gap in stream.gaps(began, arrived)])
    beside = summary([gap for stream in streams for gap in stream.gaps(arrived, done)])
    await idle(place)
    return {
        "alone_ms": alone,
        "beside_ms": beside,
        "ratio": {name: beside[name] / alone[name] for name in alone if name != "tokens"},
        "first_token_s": statistics.fmean(prompt.arrivals[0][0] - prompt.sent for prompt in long),
        "paced_steps": await metric(place, "sidestream:prefill_paced_steps_total") - paced,
    }


async def alone(address: str, arguments: argparse.Namespace) -> float:
    """Seconds to the first token of the long prompt where nothing else runs."""
    prompt = Stream(prompt_ids(arguments.prompt_tokens, 999), 1)
    await prompt.run(place_of(address))
    return prompt.arrivals[0][0] - prompt.sent


def show(name: str, entry: dict[str, Any]) -> None:
    before, beside, ratio = entry["alone_ms"], entry["beside_ms"], entry["ratio"]
    figures = ", ".join(f"{key} {before[key]:.1f} -> {beside[key]:.1f} ms ({ratio[key]:.2f})" for key in ratio)
    print(f"{name}: {figures}; first token of the long prompt after {entry['first_token_s']:.2f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=50)
    parser.add_argument("--prompt-tokens", type=int, default=16_000)
    parser.add_argument("--prompts", type=int, default=1, help="long prompts that arrive at once")
    parser.add_argument("--alone-seconds", type=float, default=5.0, help="before the long prompt arrives")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--config", type=Path, help="random weights for this config; the bundled model without it")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--max-model-len", type=int, default=20_000)
    parser.add_argument("--memory-share", type=float, default=0.4, help="of the device, for each of the two servers")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.prompt_tokens >= arguments.max_model_len:
        parser.error(
            f"--prompt-tokens {arguments.prompt_tokens} is not below --max-model-len {arguments.max_model_len}"
        )
    measure(arguments)


def measure(arguments: argparse.Namespace) -> None:
    settings: dict[str, Any] = {
        "device": arguments.device,
        "max-num-seqs": arguments.streams + arguments.prompts,
        "max-model-len": arguments.max_model_len,
    }
    options = ["--no-prefix-caching"]
    for name, value in settings.items():
        options += [f"--{name}", str(value)]
    results: dict[str, Any] = {}
    with ExitStack() as stack:
        if arguments.config is not None:
            folder, _ = stack.enter_context(model_folder(arguments.config))
            options = [str(folder), "--load-format", "dummy", *options]
        addresses: dict[str, str] = {}
        for place, (name, flag) in enumerate({"paced": "--prefill-pacing", "not paced": "--no-prefill-pacing"}.items()):
            # on a GPU the limit is on all that is in use, the first server's part included
            share = arguments.memory_share * (1 + place * (arguments.device == "cuda"))
            limit = ["--memory-limit", f"{share:.0%}"]
            addresses[name] = stack.enter_context(child_server([*options, *limit, flag], on_line=print))
        for name, address in addresses.items():
            results[name] = {"first_token_alone_s": asyncio.run(alone(address, arguments)), "rounds": []}
        for number in range(arguments.rounds + 1):
            for name, address in addresses.items():
                entry = asyncio.run(one_round(address, arguments, number))
                show(name if number else f"{name}, warm-up", entry)
                if number:
                    results[name]["rounds"].append(entry)
    for name, result in results.items():
        ratios = {
            key: statistics.median(entry["ratio"][key] for entry in result["rounds"])
            for key in result["rounds"][0]["ratio"]
        }
        result["ratio_median"] = ratios
        first = statistics.median(entry["first_token_s"] for entry in result["rounds"])
        print(
            f"{name}: inter-token latency times {ratios['p50']:.2f} (p50), {ratios['mean']:.2f} (mean), "
            f"{ratios['p99']:.2f} (p99), {ratios['max']:.2f} (max); first token of the long prompt after {first:.2f} "
            f"s, alone {result['first_token_alone_s']:.2f} s"
        )
    report = {
        "streams": arguments.streams,
        "prompt_tokens": arguments.prompt_tokens,
        "prompts": arguments.prompts,
        "alone_seconds": arguments.alone_seconds,
        **results,
        "model": "bundled" if arguments.config is None else arguments.config.name,
        "device": device_name(arguments.device),
        "versions": versions(),
        "cores": os.cpu_count(),
        "machine": platform.machine(),
    }
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
