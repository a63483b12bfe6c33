"""The steps that size memory hold every extreme: the longest chunk, the most prompts, one behind the most decodes."""

from __future__ import annotations

import pytest

from sidestream.config.engine import EngineConfig
from sidestream.config.model import ModelConfig
from sidestream.config.resolved import resolve
from sidestream.engine.largest_steps import largest_steps
from tests.tiny_models import tiny_config

BLOCK = 8


@pytest.mark.parametrize(("tokens", "sequences", "longest"), [(64, 4, 1000), (64, 4, 10), (20, 5, 16), (7, 7, 5)])
def test_every_extreme_is_among_them(tokens: int, sequences: int, longest: int) -> None:
    model = ModelConfig.from_hf(tiny_config("glm5_next").to_dict())
    user = EngineConfig(device="cpu", max_num_batched_tokens=tokens, max_num_seqs=sequences, block_size=BLOCK)
    steps = largest_steps(resolve(user, model, cuda_available=False, device_memory=1 << 40), longest=longest)
    plain = [step for step in steps if not step[0].splits]
    shapes = [(sum(c.is_decode for c in step), [c.length for c in step if not c.is_decode]) for step in plain]
    assert max(prompts[0] for decodes, prompts in shapes if not decodes) == min(tokens, longest)
    assert max(len(prompts) for decodes, prompts in shapes if not decodes) == sequences
    assert (sequences - 1, [min(tokens - sequences + 1, longest)]) in shapes
    assert (sequences, []) in shapes
    if longest > BLOCK:  # with states kept inside the chunk too
        assert max(step[0].length for step in steps if step[0].splits) == min(tokens, longest)
