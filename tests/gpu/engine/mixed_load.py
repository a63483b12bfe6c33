"""Starts slice A under a memory limit, serves a mixed load, and reports what memory and compilations came to.

In a process of its own, since the driver's figure is of the whole device:

    python -m tests.gpu.engine.mixed_load 40GiB 5
"""

from __future__ import annotations

import json
import math
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from sidestream.config.engine import EngineConfig
from sidestream.core.request import Request
from sidestream.core.sampling_params import SamplingParams
from sidestream.engine.build import BuiltEngine, build_engine
from sidestream.engine.compile_steps import SAMPLINGS
from sidestream.engine.core import EngineCore
from tests.gpu.engine.machine import SLICE_A, dummy_folder

MAX_NUM_SEQS, MAX_TOKENS = 64, 8192


def start(limit: str) -> BuiltEngine:
    """Slice A as it would be served: caches fill the limit, 35 sizes are captured."""
    with tempfile.TemporaryDirectory() as folder:
        return build_engine(
            dummy_folder(SLICE_A, Path(folder)),
            EngineConfig(
                device="cuda",
                load_format="dummy",
                cudagraph_mode="full_and_piecewise",
                max_num_seqs=MAX_NUM_SEQS,
                max_num_batched_tokens=MAX_TOKENS,
                max_capture_tokens=640,
                memory_limit=limit,
            ),
        )


def request(name: str, draw: random.Random, vocab: int, *, prompt: int, tokens: int) -> Request:
    params = draw.choice(SAMPLINGS)
    return Request(
        request_id=name,
        prompt_token_ids=tuple(draw.randrange(vocab) for _ in range(prompt)),
        params=params if draw.random() < 0.8 else SamplingParams(temperature=0.0, logprobs=3, prompt_logprobs=2),
        seed=draw.randrange(1 << 30),
        max_tokens=tokens,
        stop_token_ids=frozenset(),
        mask_token_ids=(),
    )


def serve(built: BuiltEngine, seconds: float, *, seed: int = 0) -> dict[str, int]:
    """Requests of all lengths, few and many at once, some aborted; the most that the driver said was in use."""
    draw, vocab = random.Random(seed), built.config.model.vocab_size
    core, most, steps, count = EngineCore(built), 0, 0, 0
    open_requests: set[str] = set()
    until = time.perf_counter() + seconds

    def add(prompt: int, tokens: int) -> None:
        nonlocal count
        count += 1
        open_requests.add(str(count))
        core.add(request(str(count), draw, vocab, prompt=prompt, tokens=tokens))

    longest = min(built.max_model_len - 100, 60_000)
    octaves = math.log2(min(longest, 11_000))
    add(longest, 20)
    while time.perf_counter() < until or core.has_work():
        busy = time.perf_counter() < until
        wanted = built.config.max_num_seqs if steps // 150 % 2 else 3
        if busy and len(open_requests) < wanted and draw.random() < 0.5:
            add(int(2 ** draw.uniform(0, octaves)), draw.randrange(1, 60))
        if busy and open_requests and draw.random() < 0.01:
            name = draw.choice(sorted(open_requests))
            core.abort(name)
            open_requests.discard(name)
        if not core.has_work():
            if not busy:
                break
            add(1, 1)
        for output in core.step():
            if output.finish_reason is not None:
                open_requests.discard(output.request_id)
        steps += 1
        free, total = torch.cuda.mem_get_info()
        most = max(most, total - free)
    return {"most_in_use": most, "steps": steps, "requests": count}


def main() -> None:
    limit, seconds = sys.argv[1], float(sys.argv[2])
    built = start(limit)
    found: dict[str, Any] = {"startup": dict(built.startup), "at_ready": built.ledger_now().as_json()}
    found |= {"blocks": built.num_blocks, "max_model_len": built.max_model_len}
    found["load"] = serve(built, seconds)
    found |= {"ledger": built.ledger_now().as_json(), "late": list(built.compiled_after_ready())}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
