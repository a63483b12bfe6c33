"""How many tokens a step may prefill beside its decodes, learnt from how long steps take."""

from __future__ import annotations

import sys
from math import ceil

from sidestream.scheduler.chunk_times import ChunkTimes
from sidestream.scheduler.decode_times import DecodeTimes

UNLIMITED = sys.maxsize
AIM = 0.9
"""Of what prompts may add to a step, what is planned: steps vary."""
FIRST_TOKENS = 32
"""Tokens a step as long as nothing is known of what they cost."""
LEAST_TOKENS = 16
"""A step that prefills at all gets so many, whatever they cost; fewer tell nothing of what they cost."""
MOST_STEPS = 8
"""Some prompt gets on in each so many steps, whatever it costs."""
SHORT_PROMPT = 256
"""Tokens up to which prompts are not paced while none is longer: in chunks they would cost so much more, where any
prefill is dear, that they pile up and all end later."""
REFRESH_STEPS = 32
"""After so many steps with prefill one goes without, to see how long decodes take alone."""


class PrefillPacer:
    """Keeps prompts from stalling decodes: each prompt that wants prefill may take as long as the decodes do.

    With p prompts a step is to take at most 1 + p times what its decodes take alone; with nothing decoding there is no
    limit. Where not even ``LEAST_TOKENS`` fit into that, because any prefill at all makes a step longer by more, larger
    chunks come in every few steps, so that steps take no more than that on average.

    It reads no clock: who runs the steps says how long they took.

    Args:
        short_prompt: longest prompt that needs no pacing.
    """

    def __init__(self, *, short_prompt: int = SHORT_PROMPT) -> None:
        self._short_prompt = short_prompt
        self._decode_times = DecodeTimes()
        self._chunk_times = ChunkTimes()
        self._plain_steps = 0
        self._prefill_steps = 0

    def observe(self, num_decodes: int, num_prefill_tokens: int, seconds: float) -> None:
        """A step took so long."""
        if not num_decodes or seconds <= 0:
            return
        if not num_prefill_tokens:
            self._decode_times.observe(num_decodes, seconds)
        elif num_prefill_tokens >= LEAST_TOKENS:
            alone = self._decode_times.expected(num_decodes)
            if alone is not None:
                self._chunk_times.observe(num_prefill_tokens, seconds, alone=alone)

    def budget(self, num_decodes: int, num_prompts: int, *, longest: int = UNLIMITED) -> int:
        """Most prefill tokens of the next step, which is counted as planned: call it once for each.

        Args:
            num_prompts: that could go on or begin, waiting ones included.
            longest: tokens of the longest of them that may be in the step.
        """
        if not num_decodes or (num_prompts and longest <= self._short_prompt):
            return UNLIMITED
        tokens, pause = self._plan(num_decodes, num_prompts) if num_prompts else (UNLIMITED, 0)
        if not num_prompts or self._plain_steps < pause:
            self._plain_steps += 1
            self._prefill_steps = 0
            return tokens if not num_prompts else 0
        self._plain_steps = 0
        self._prefill_steps += 1
        return tokens

    def _plan(self, num_decodes: int, num_prompts: int) -> tuple[int, int]:
        """Tokens of the next step with prefill, and how many without there should have been before it."""
        alone = self._decode_times.expected(num_decodes)
        if alone is None:
            return FIRST_TOKENS, 1
        refresh = REFRESH_STEPS if self._decode_times.settled(num_decodes) else 1
        pause = int(self._prefill_steps >= refresh)
        if not self._chunk_times.known:
            return FIRST_TOKENS, pause
        allowance = AIM * num_prompts * alone
        tokens = self._chunk_times.tokens_within(allowance)
        if tokens < LEAST_TOKENS:
            tokens = max(LEAST_TOKENS, self._chunk_times.worthwhile_tokens())
            steps = ceil(self._chunk_times.expected(tokens) / allowance)
            pause = max(pause, min(steps, MOST_STEPS) - 1)
        return tokens, pause
