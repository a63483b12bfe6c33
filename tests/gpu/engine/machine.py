"""What the GPU tests of the engine share: engines of the bundled checkpoint or of dummy weights, and greedy runs."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

from sidestream.config.engine import EngineConfig
from sidestream.core.request import Request
from sidestream.core.sampling_params import SamplingParams
from sidestream.engine.build import BuiltEngine, build_engine
from sidestream.engine.core import EngineCore
from sidestream.engine.llm import bundled_model

REPOSITORY = Path(__file__).parents[3]
SLICE_A = REPOSITORY / "benchmarks" / "configs" / "glm5-next-slice-a.json"

Tokens = list[tuple[int, float]]
"""(token, its log-probability) for each step."""


def bundled(mode: str, **settings: object) -> BuiltEngine:
    """The bundled checkpoint on the GPU, small enough that every shape is captured in seconds."""
    chosen: dict[str, object] = {
        "device": "cuda",
        "dtype": "float32",
        "max_num_seqs": 8,
        "max_num_batched_tokens": 256,
        "max_model_len": 4096,
        "memory_limit": "130GiB",
        "graph_debug": True,
    }
    return build_engine(bundled_model(), EngineConfig(cudagraph_mode=mode, **(chosen | settings)))  # type: ignore[arg-type]


def dummy_folder(config: Path, folder: Path) -> Path:
    """A checkpoint folder of a config alone, for ``load_format="dummy"``."""
    shutil.copy(config, folder / "config.json")
    return folder


def prompts(count: int, longest: int, *, seed: int, vocab: int) -> list[tuple[int, ...]]:
    """Token ids of lengths from 1 to ``longest``."""
    state, made = seed * 7919 + 1, []
    for i in range(count):
        length = 1 + (longest - 1) * i // max(1, count - 1)
        ids = []
        for _ in range(length):
            state = (state * 1103515245 + 12345) % 2**31
            ids.append(5 + state % (vocab - 5))
        made.append(tuple(ids))
    return made


def run(built: BuiltEngine, asked: Sequence[tuple[int, ...]], *, max_tokens: int) -> list[Tokens]:
    """Complete prompts greedily, all at once."""
    core = EngineCore(built)
    results: dict[str, Tokens] = {}
    for i, prompt in enumerate(asked):
        results[str(i)] = []
        core.add(
            Request(
                request_id=str(i),
                prompt_token_ids=prompt,
                params=SamplingParams(temperature=0, logprobs=1),
                seed=0,
                max_tokens=max_tokens,
                stop_token_ids=frozenset(),
                mask_token_ids=(),
            )
        )
    while core.has_work():
        for output in core.step():
            if output.token_id is not None:
                assert output.logprobs is not None
                results[output.request_id].append((output.token_id, output.logprobs[0][1]))
    return list(results.values())


def bundled_prompts() -> list[tuple[int, ...]]:
    """The prompts that ship with the checkpoint, as token ids."""
    from sidestream.engine.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(bundled_model())
    assert tokenizer is not None
    lines = (REPOSITORY / "sidestream" / "assets" / "prompts.jsonl").read_text().splitlines()
    return [tuple(tokenizer.encode(json.loads(line)["prompt"])) for line in lines]
