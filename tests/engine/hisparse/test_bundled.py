"""The checkpoint that ships, on a device that holds a quarter of its prompts: the same answers, and the right ones."""

from __future__ import annotations

from typing import Any

from sidestream import LLM, SamplingParams
from sidestream.engine.llm import bundled_model
from tests.engine.hisparse.pressed import placement_of
from training.data import Kind, heldout_item

ASKED, LENGTH = 6, 512
SETTINGS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "max_model_len": 640,
    "max_num_seqs": 3,
    "max_num_batched_tokens": 128,
    "block_size": 16,
    "enable_prefix_caching": False,
}


def test_retrieval_is_as_right_as_without() -> None:
    resident = LLM(bundled_model(), **SETTINGS, num_blocks=120)
    hosted = LLM(bundled_model(), **SETTINGS, num_blocks=30, hisparse_host_memory="64MiB", hisparse_hot_factor=1)

    def encode(text: str) -> list[int]:
        return list(resident.tokenizer(text, add_special_tokens=False).input_ids)  # type: ignore[misc]

    retrieval: Kind = "retrieval"
    items = [heldout_item(encode, 78, i, retrieval, LENGTH) for i in range(ASKED)]
    params = SamplingParams(temperature=0, max_tokens=24, logprobs=2)
    want, got = (llm.generate([item.prompt for item in items], params) for llm in (resident, hosted))
    assert placement_of(hosted.built).num_spilled > 60
    for a, b in zip(want, got, strict=True):
        assert a.outputs[0].token_ids == b.outputs[0].token_ids
        assert a.outputs[0].logprobs == b.outputs[0].logprobs
    right = sum(
        output.outputs[0].text.strip() == item.answer_text.strip() for output, item in zip(got, items, strict=True)
    )
    assert right >= ASKED - 1
