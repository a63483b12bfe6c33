"""When two runs of the same prompts are equal: to the bit, or up to a margin."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sidestream.engine.verify.report import Difference, Rule


@dataclass(slots=True)
class Generated:
    """What one prompt was answered, a number each step.

    Attributes:
        logprobs: of the chosen tokens.
        margins: how far the second most likely token is behind, in nats.
    """

    token_ids: list[int]
    logprobs: list[float]
    margins: list[float]


@dataclass(frozen=True, slots=True)
class Comparison:
    """Of all prompts; see ``report.Cell`` for the fields."""

    compared: int
    narrow: int
    spread: float
    differences: tuple[Difference, ...]


def compare(reference: Sequence[Generated], other: Sequence[Generated], rule: Rule, *, bound: float) -> Comparison:
    """Compare prompt by prompt under BITWISE or BOUND; one difference a prompt at most, the first.

    Under BOUND a step whose margin in either run is under ``bound`` may give another token, which ends that prompt's
    comparison. If it gives the same one the comparison goes on: what follows has the same tokens before it.
    """
    compared, narrow, spread = 0, 0, 0.0
    differences = []
    for prompt, (a, b) in enumerate(zip(reference, other, strict=True)):
        assert len(a.token_ids) == len(b.token_ids), f"prompt {prompt}: {len(a.token_ids)}, {len(b.token_ids)} tokens"
        for step in range(len(a.token_ids)):
            tokens = (a.token_ids[step], b.token_ids[step])
            logprobs = (a.logprobs[step], b.logprobs[step])
            margin = min(a.margins[step], b.margins[step])
            if tokens[0] != tokens[1] and rule is Rule.BOUND and margin < bound:
                narrow += 1
                break
            apart = abs(logprobs[0] - logprobs[1])
            equal = logprobs[0] == logprobs[1] if rule is Rule.BITWISE else apart <= bound
            if tokens[0] != tokens[1] or not equal:
                differences.append(Difference(prompt, step, tokens, logprobs, a.margins[step]))
                break
            compared += 1
            spread = max(spread, apart)
    return Comparison(compared, narrow, spread, tuple(differences))
