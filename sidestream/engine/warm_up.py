"""Sends requests through a new engine, one batch for every captured shape, before anybody else's request comes."""

from __future__ import annotations

import random
from collections.abc import Iterator

from sidestream.core.request import Request
from sidestream.core.sampling_params import SamplingParams
from sidestream.engine.build import BuiltEngine
from sidestream.engine.core import EngineCore
from sidestream.engine.startup_clock import StartupClock

TOKENS = 2
"""Tokens that each request asks for: one of its prefill, one of a decode."""
PARAMS = SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)
PLAIN_PROMPT = 8
"""Tokens of the one prompt that is sent where nothing is captured."""


def warm_up(built: BuiltEngine, core: EngineCore, *, clock: StartupClock) -> int:
    """Run every captured shape with real requests, then check that nothing of them is left.

    A batch of one-token prompts makes a mixed step and then a uniform decode of its size; prompts of many tokens make
    the mixed steps that are larger than that.

    Args:
        clock: of the start, whose phase this becomes.
    Returns:
        Batches run.
    """
    batches = list(_batches(built, core))
    tokens = random.Random(0)
    clock.begin("warm-up", total=len(batches))
    for index, lengths in enumerate(batches):
        for place, length in enumerate(lengths):
            core.add(_request(f"warm-up {index}.{place}", length, tokens, vocab=built.config.model.vocab_size))
        while core.has_work():
            core.step()
        clock.advance(index + 1)
    core.scheduler.check_integrity()
    return len(batches)


def _batches(built: BuiltEngine, core: EngineCore) -> Iterator[list[int]]:
    """Prompt lengths of each batch."""
    graphs = built.runner.graphs
    most = core.scheduler.config.max_running
    longest = min(core.scheduler.room(0), built.max_model_len) - TOKENS
    captured = [] if graphs is None else [plan.key for plan in graphs.dispatcher.captures()]
    if not captured:
        yield [max(1, min(PLAIN_PROMPT, longest))]
    for key in captured:
        if key.uniform:
            if key.tokens <= most:
                yield [1] * key.tokens
        elif (lengths := _lengths(key.tokens, most=most, longest=longest)) is not None:
            yield lengths


def _lengths(tokens: int, *, most: int, longest: int) -> list[int] | None:
    """``tokens`` as the lengths of at most ``most`` prompts; None if no step can be that large."""
    count = -(-tokens // longest)
    if count > most:
        return None
    return [tokens // count + (i < tokens % count) for i in range(count)]


def _request(name: str, length: int, tokens: random.Random, *, vocab: int) -> Request:
    """A request of random tokens: equal prompts could share their blocks and make smaller steps."""
    return Request(
        request_id=name,
        prompt_token_ids=tuple(tokens.randrange(vocab) for _ in range(length)),
        params=PARAMS,
        seed=0,
        max_tokens=TOKENS,
        stop_token_ids=frozenset(),
        mask_token_ids=(),
    )
