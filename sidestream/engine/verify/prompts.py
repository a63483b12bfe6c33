"""Prompts to verify with: seeded, half of them longer than the model's index_topk, so that selection matters."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path

from sidestream.config.model import ModelConfig
from sidestream.engine.llm import bundled_model
from sidestream.engine.tokenizer import load_tokenizer
from sidestream.errors import ConfigError

NOMINAL_TOPK = 32
"""Stands for ``index_topk`` where a model attends to everything."""
LONGEST_SHORT = 128
"""Short prompts of a model with a wide selection need not fill it."""


def make_prompts(
    folder: Path, model: ModelConfig, *, count: int, tokens: int, seed: int
) -> tuple[tuple[int, ...], ...]:
    """Token ids of ``count`` prompts, short and long ones in turns; the long ones select from the first step on.

    The bundled checkpoint gets endings of the prompts that ship with it, others random ids of their vocabulary.

    Args:
        tokens: that will be generated behind each.
    Raises:
        ConfigError: the model's positions do not hold a prompt longer than ``index_topk`` and its completion.
    """
    rng = random.Random(seed)
    lengths = prompt_lengths(model, count=count, tokens=tokens, rng=rng)
    texts = _bundled_texts() if folder.resolve() == bundled_model().resolve() else []
    special = {model.bos_token_id, model.pad_token_id, *model.eos_token_ids}
    ordinary = [token for token in range(model.vocab_size) if token not in special]
    prompts = []
    for index, length in enumerate(lengths):
        fitting = [text for text in texts if len(text) >= length]
        if fitting:
            prompts.append(tuple(fitting[index % len(fitting)][-length:]))
        else:
            prompts.append(tuple(rng.choice(ordinary) for _ in range(length)))
    return tuple(prompts)


def prompt_lengths(model: ModelConfig, *, count: int, tokens: int, rng: random.Random) -> list[int]:
    """Short and long in turns: short ones of 2 to ``index_topk`` tokens, long ones of more, up to half as much more."""
    topk = model.indexer.topk if model.indexer is not None else NOMINAL_TOPK
    most = model.max_position_embeddings - tokens
    if most < topk + 1:
        what = f"index_topk {topk}" if model.indexer is not None else f"{topk} tokens"
        raise ConfigError(
            f"a prompt longer than {what} and {tokens} generated tokens pass the model's max_position_embeddings "
            f"{model.max_position_embeddings}; lower --tokens"
        )
    longest = min(topk + max(topk // 2, 16), most)
    shortest = min(2, topk)
    return [
        rng.randint(topk + 1, longest) if index % 2 else rng.randint(shortest, min(topk, LONGEST_SHORT))
        for index in range(count)
    ]


def _bundled_texts() -> list[Sequence[int]]:
    tokenizer = load_tokenizer(bundled_model())
    assert tokenizer is not None, "the bundled checkpoint has a tokenizer"
    lines = (bundled_model().parent / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    return [tokenizer(json.loads(line)["prompt"]).input_ids for line in lines]
