"""Small checkpoints with tokenizers for tests of ``LLM``, and the comparison that DESIGN's first promise allows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from tests.engine.harness import oracle_logprobs
from tests.engine.tiny_tokenizers import byte_level
from tests.tiny_models import VARIANTS, build_oracle, save_checkpoint

MARGIN = 1e-4
"""Top-2 margin, in nats, under which another schedule may choose the other token."""


def make_checkpoint(variant: str, folder: Path, *, seed: int = 21, tokenizer: bool = False) -> torch.nn.Module:
    """Write a tiny checkpoint, with a byte-level tokenizer if asked for; returns its oracle."""
    architecture, overrides = VARIANTS[variant]
    if tokenizer:
        made = byte_level()
        overrides = {**overrides, "vocab_size": len(made)}
        made.save_pretrained(folder)
    oracle = build_oracle(architecture, seed, **overrides)
    save_checkpoint(oracle, folder)
    return oracle


def check_greedy(oracle: torch.nn.Module, prompt: Sequence[int], generated: Sequence[int]) -> None:
    """Each generated token is the oracle's own choice for the tokens before it, up to margins under the bound."""
    rows = oracle_logprobs(oracle, [*prompt, *generated])[len(prompt) - 1 : -1]
    best = rows.topk(2, dim=-1)
    chosen = rows.gather(-1, torch.tensor(generated)[:, None])[:, 0]
    behind = best.values[:, 0] - chosen
    wrong = [i for i, gap in enumerate(behind.tolist()) if gap > MARGIN]
    assert not wrong, f"tokens {wrong} of {len(generated)} are not the oracle's, behind by {behind[wrong].tolist()}"
