"""The bundled checkpoint scores on a GPU what it scores on a CPU, in every graph mode."""

from __future__ import annotations

import pytest

from sidestream.core.sampling_params import SamplingParams
from sidestream.engine.bundled import bundled_questions
from sidestream.engine.exact_match import STOP, Item, judge, plain_prompt, read_items, score
from sidestream.engine.llm import LLM

pytestmark = pytest.mark.gpu

ASKED = SamplingParams(temperature=0.0, max_tokens=256, stop=STOP)
ENGINE = {"device": "cuda", "max_num_seqs": 16, "max_model_len": 1024, "memory_limit": "130GiB"}


def texts(items: list[Item], **settings: object) -> list[str]:
    llm = LLM(**(ENGINE | settings))  # type: ignore[arg-type]
    return [
        result.outputs[0].text for result in llm.generate([plain_prompt([], item.question) for item in items], ASKED)
    ]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_all_held_out_arithmetic_is_right_in_every_mode(dtype: str) -> None:
    """On a CPU in fp32 all hundred are (benchmarks/results/eval-2026-11-30.json)."""
    items = read_items(bundled_questions())
    found = {
        mode: texts(items, dtype=dtype, cudagraph_mode=mode)
        for mode in ("none", "piecewise", "full", "full_and_piecewise")
    }
    for mode, answers in found.items():
        result = score([judge(item, text) for item, text in zip(items, answers, strict=True)])
        print(f"{dtype} {mode}: {result.correct} of {result.items}")
        assert answers == found["none"], mode
        assert result.correct == len(items), mode
