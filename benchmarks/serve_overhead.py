"""What HTTP costs: tokens per second of streams through the server, against the offline engine on the same work.

Both engines stand ready in one run and take turns, so that whatever else the machine does meets both. The client reads
raw bytes and counts events, lest it be measured itself; engine, server and client still share the machine's cores.

    python -m benchmarks.serve_overhead --json benchmarks/results/serve-overhead.json
    python -m benchmarks.serve_overhead --config benchmarks/configs/glm5-next-slice-a.json --device cuda

With ``--config`` the model has that config, random weights and no tokenizer: every token is an event without text.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.event_stream import completion, place_of, tokens_so_far
from sidestream import LLM, SamplingParams
from sidestream.engine.bench.load.child_server import child_server
from sidestream.engine.bench.model_folder import model_folder

Prompt = str | list[int]


def prompts(streams: int, *, text: bool) -> list[Prompt]:
    if text:
        return [f"Question: What is {11 + i} + {29 + 2 * i}?\nAnswer:" for i in range(streams)]
    return [[(7 * i + 13 * k) % 1000 + 1 for k in range(16)] for i in range(streams)]


def offline(llm: LLM, work: Sequence[Prompt], tokens: int) -> float:
    """Tokens per second of one batch."""
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    began = time.perf_counter()
    outputs = llm.generate(list(work), params)
    seconds = time.perf_counter() - began
    made = sum(len(output.outputs[0].token_ids) for output in outputs)
    assert made == len(work) * tokens, f"{made} tokens were generated"
    return made / seconds


async def one_stream(place: tuple[str, int], prompt: Prompt, tokens: int) -> int:
    """Completion tokens that the server reports at the end of a stream."""
    last = b""
    async for end in completion(place, prompt, tokens, continuous_usage=not isinstance(prompt, str)):
        last = end
    return tokens_so_far(last)


def streamed(address: str, work: Sequence[Prompt], tokens: int) -> float:
    """Tokens per second of as many streams at once, first byte sent to last byte read."""
    place = place_of(address)

    async def run() -> int:
        jobs = [one_stream(place, prompt, tokens) for prompt in work]
        return sum(await asyncio.gather(*jobs))

    began = time.perf_counter()
    made = asyncio.run(run())
    seconds = time.perf_counter() - began
    assert made == len(work) * tokens, f"{made} tokens were generated"
    return made / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--config", type=Path, help="random weights for this config; the bundled model without it")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--max-model-len", type=int, default=1024)
    parser.add_argument("--memory-share", type=float, default=0.4, help="of the device, for each of the two engines")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with ExitStack() as stack:
        model = None if arguments.config is None else stack.enter_context(model_folder(arguments.config))[0]
        measure(arguments, model)


def measure(arguments: argparse.Namespace, model: Path | None) -> None:
    settings: dict[str, Any] = {
        "device": arguments.device,
        "max_num_seqs": arguments.streams,
        "max_model_len": arguments.max_model_len,
        "memory_limit": arguments.memory_share,
    }
    options = ["--no-prefix-caching"]
    if model is not None:
        options.append(str(model))
        settings["load_format"] = "dummy"
    for name, value in settings.items():
        options += ["--" + name.replace("_", "-"), f"{value:.0%}" if isinstance(value, float) else str(value)]
    rounds: list[dict[str, float]] = []
    with child_server(options, on_line=lambda line: print(f"server: {line}")) as address:
        if arguments.device == "cuda":
            settings["memory_limit"] *= 2  # there the limit is on all that is in use, the server's part included
        llm = LLM(model, enable_prefix_caching=False, **settings)
        work = prompts(arguments.streams, text=model is None)
        offline(llm, work, 8)
        streamed(address, work, 8)
        for _ in range(arguments.rounds):
            alone = offline(llm, work, arguments.tokens)
            http = streamed(address, work, arguments.tokens)
            rounds.append({"offline": alone, "http": http, "ratio": http / alone})
            print(f"offline {alone:7.0f} tokens/s, through HTTP {http:7.0f}, ratio {http / alone:.2f}")
    ratios = [entry["ratio"] for entry in rounds]
    result: dict[str, Any] = {
        "streams": arguments.streams,
        "tokens": arguments.tokens,
        "rounds": rounds,
        "ratio_median": statistics.median(ratios),
        "model": "bundled" if model is None else arguments.config.name,
        "device": arguments.device,
        "cores": os.cpu_count(),
        "machine": platform.processor() or platform.machine(),
    }
    print(f"ratio {result['ratio_median']:.2f} (median of {len(ratios)}, {min(ratios):.2f} to {max(ratios):.2f})")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
