"""Builds an engine as large as a latency benchmark needs, and measures it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from sidestream.config.engine import EngineConfig
from sidestream.engine.bench.floor import decode_floor, read_rate
from sidestream.engine.bench.latency import WARM_STEPS, decode_times, fill_caches, prefill_times
from sidestream.engine.bench.model_folder import model_folder
from sidestream.engine.bench.report import LatencyReport
from sidestream.engine.build import BuiltEngine, build_engine
from sidestream.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencySettings:
    """What is measured.

    Attributes:
        cases: (batch, context) of each decode.
        prefills: tokens of each prompt.
        steps, repeats: of each decode; a prefill is repeated as often.
        temperature: of sampling; 0 is greedy.
    """

    cases: tuple[tuple[int, int], ...]
    prefills: tuple[int, ...] = ()
    steps: int = 100
    repeats: int = 3
    temperature: float = 0.0

    def __post_init__(self) -> None:
        for name, values in (
            ("batch", [batch for batch, _ in self.cases]),
            ("context", [context for _, context in self.cases]),
            ("prefill", self.prefills),
            ("steps", [self.steps]),
            ("repeats", [self.repeats]),
        ):
            for value in values:
                if value < 1:
                    raise ConfigError(f"{name} must be a positive integer, got {value}")
        if not (self.cases or self.prefills):
            raise ConfigError("there is nothing to measure: name a batch and a context, or a prefill")

    @property
    def max_num_seqs(self) -> int:
        return max([batch for batch, _ in self.cases], default=1)

    def decoded(self, batch: int) -> int:
        """Tokens that each sequence of a batch may decode."""
        return self.repeats * (self.steps + WARM_STEPS) + 2 * batch + WARM_STEPS

    @property
    def max_model_len(self) -> int:
        return max([context + self.decoded(batch) for batch, context in self.cases] + [n + 1 for n in self.prefills])

    def num_blocks(self, block_size: int) -> int:
        """KV blocks that the largest case needs."""
        sizes = [batch * -(-(context + self.decoded(batch)) // block_size) for batch, context in self.cases]
        return max([*sizes, *(n // block_size + 2 for n in self.prefills)])


def open_engine(model: Path, user: EngineConfig, settings: LatencySettings) -> BuiltEngine:
    """Of a checkpoint folder, or of a config file alone and then with dummy weights."""
    user = replace(
        user,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=max(user.max_num_batched_tokens, settings.max_num_seqs),
        max_model_len=settings.max_model_len,
        num_blocks=settings.num_blocks(user.block_size),
        enable_prefix_caching=False,  # a prompt sent again is to be computed again
    )
    with model_folder(model) as (folder, without_weights):
        return build_engine(folder, replace(user, load_format="dummy") if without_weights else user)


def measure(
    built: BuiltEngine,
    settings: LatencySettings,
    *,
    model: str,
    command: Sequence[str],
    on_row: Callable[[str], None] = lambda row: None,
) -> LatencyReport:
    """Time every case.

    Args:
        on_row: told of each result.
    """
    fill_caches(built)
    rate = read_rate(built.runner.streams.backend)
    decodes, prefills = [], []
    for batch, context in settings.cases:
        floor = decode_floor(
            built.config.model,
            batch=batch,
            context=context,
            kv_cache_dtype=built.config.kv_cache_dtype,
            dtype=built.config.dtype,
        )
        decodes.append(
            decode_times(
                built,
                batch=batch,
                context=context,
                steps=settings.steps,
                repeats=settings.repeats,
                floor=floor.ms(rate),
                temperature=settings.temperature,
            )
        )
        row = decodes[-1]
        on_row(
            f"batch {batch:3} context {context:6}: median {row.median:7.3f} ms, p90 {row.p90:7.3f}, "
            f"mean {row.mean:7.3f}; {row.median / row.floor:5.2f} x the floor of {row.floor:.3f} ms"
        )
    for tokens in settings.prefills:
        prefills.append(prefill_times(built, tokens, repeats=settings.repeats))
        on_row(f"prefill of {tokens} tokens: {prefills[-1].tokens_per_s:,.0f} tokens/s")
    return LatencyReport(model, " ".join(command), built, rate, tuple(decodes), tuple(prefills))
