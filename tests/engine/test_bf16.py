"""bf16 runs against the same weights in fp32: the difference is what bf16 rounding explains.

The yardstick is the oracle's own bf16 run: an engine that rounds where the model's authors round is as far from fp32
as theirs. Rows where a selection or a routing flips on a near tie are far off in both, so medians are compared.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.engine.harness import Harness, decoded, oracle_logprobs, random_sequences
from tests.tiny_models import VARIANTS, build_oracle, save_checkpoint
from tests.tolerances import BF16_OVER_ORACLE, PARITY_LOGPROB

LENGTHS = (90, 61)


@pytest.mark.parametrize("variant", ["next", "dsa", "deepseek", "kimi"])
def test_bf16_error_is_what_the_oracle_s_bf16_error_is(variant: str, tmp_path: Path) -> None:
    architecture, overrides = VARIANTS[variant]
    oracle = build_oracle(architecture, 31, **overrides)
    save_checkpoint(oracle.to(torch.bfloat16), tmp_path)
    exact, half = (  # the same rounded weights; what a model keeps in fp32 stays there
        type(oracle).from_pretrained(tmp_path, dtype=dtype, attn_implementation="eager").eval()
        for dtype in (torch.float32, torch.bfloat16)
    )
    sequences = random_sequences(LENGTHS, vocab=136, seed=8)
    expected = [oracle_logprobs(exact, sequence) for sequence in sequences]
    fp32 = Harness(tmp_path).run(sequences, decoded(LENGTHS, 40))
    bf16 = Harness(tmp_path, dtype="bfloat16").run(sequences, decoded(LENGTHS, 40))
    theirs = [oracle_logprobs(half, sequence) for sequence in sequences]

    def median_error(rows: list[torch.Tensor]) -> float:
        return float(torch.cat([(a - b).abs().amax(-1) for a, b in zip(rows, expected, strict=True)]).median())

    assert median_error(fp32) < PARITY_LOGPROB
    ours, oracle_error = median_error(bf16), median_error(theirs)
    print(f"{variant}: bf16 median error {ours:.4f} nats, the oracle's own {oracle_error:.4f}")
    assert ours < BF16_OVER_ORACLE * oracle_error
