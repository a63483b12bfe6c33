"""Inter-token latency and prefill speed of a built engine, with requests that run as in service.

Requests go through the engine core: planned, launched one step ahead where the device runs beside the host, sampled,
read, committed. Before decodes are timed their prompts are not computed: caches hold random numbers, which cost what
real ones do. Prefills are computed.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from sidestream.core.batch import Chunk
from sidestream.core.request import Request
from sidestream.core.sampling_params import SamplingParams
from sidestream.engine.bench.summary import percentile
from sidestream.engine.build import BuiltEngine, row_layout
from sidestream.engine.core import EngineCore
from sidestream.engine.runner import StepOutput
from sidestream.ops.kv_rows import KVRowLayout, pack_rows

WARM_STEPS = 5
"""Steps before those that are timed."""
_FILL_ELEMENTS = 1 << 28
"""Cache elements drawn at once."""
_PACKED_ROWS = 1 << 16
"""Quantised rows packed at once."""


@dataclass(frozen=True, slots=True)
class DecodeTimes:
    """Milliseconds between two calls of ``EngineCore.step``, each of which gives every sequence a token.

    Attributes:
        median, p90, mean: medians over the repeats of each repeat's own.
        medians: of each repeat.
        floor: of such a step.
    """

    batch: int
    context: int
    median: float
    p90: float
    mean: float
    medians: tuple[float, ...]
    floor: float

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "to_floor": self.median / self.floor}


@dataclass(frozen=True, slots=True)
class PrefillTimes:
    """One prompt alone, from its arrival to its first token.

    Attributes:
        seconds: of each repeat.
    """

    tokens: int
    seconds: tuple[float, ...]

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / statistics.median(self.seconds)

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "tokens_per_s": self.tokens_per_s}


class Decoding:
    """Sequences that have a context behind them and decode.

    Args:
        context: tokens of each at the start.
        room: tokens that each may decode.
        temperature: of sampling; 0 is greedy.
    """

    def __init__(self, built: BuiltEngine, batch: int, context: int, *, room: int, temperature: float = 0.0) -> None:
        self.core = EngineCore(built)
        self._names = [str(i) for i in range(batch)]
        runner, hidden = built.runner, built.config.model.hidden_size
        for i in range(batch):
            self.core.add(request_of(built, context, name=str(i), seed=i, max_tokens=room, temperature=temperature))
        real = runner.forward
        device, dtype = runner.streams.backend.device, getattr(torch, built.config.dtype)

        def uncomputed(chunks: Sequence[Chunk], token_ids: Sequence[int], **unknown: Any) -> StepOutput:
            if all(chunk.is_decode for chunk in chunks):
                return real(chunks, token_ids, **unknown)
            runner.streams.begin_step()
            if runner.hisparse is not None:  # blocks find their places, and leave, as if they were written
                runner.hisparse.begin_step(chunks)
                runner.hisparse.end_step()
            rows = -(-len(token_ids) // 8) * 8  # as many as a step on a CPU has
            return StepOutput(torch.randn(rows, hidden, dtype=dtype, device=device))  # else all begin with one token

        runner.forward = uncomputed  # type: ignore[method-assign]
        try:
            while sum(output.token_id is not None for output in self.core.step()) < batch:
                pass
        finally:
            runner.forward = real  # type: ignore[method-assign]

    def times(self, steps: int) -> list[float]:
        """Milliseconds of each of some steps."""
        for _ in range(WARM_STEPS):
            self.core.step()
        taken = []
        last = time.perf_counter()
        for _ in range(steps):
            self.core.step()
            now = time.perf_counter()
            taken.append(1e3 * (now - last))
            last = now
        return taken

    def close(self) -> None:
        """End every sequence."""
        for name in self._names:
            self.core.abort(name)
        while self.core.has_work():
            self.core.step()


def decode_times(
    built: BuiltEngine, *, batch: int, context: int, steps: int, repeats: int, floor: float, temperature: float = 0.0
) -> DecodeTimes:
    """Time ``repeats`` times ``steps`` steps.

    Args:
        floor: milliseconds, see ``floor.decode_floor``.
    """
    room = repeats * (steps + WARM_STEPS) + 2 * batch + WARM_STEPS  # sequences start one after the other
    decoding = Decoding(built, batch, context, room=room, temperature=temperature)
    rounds = [sorted(decoding.times(steps)) for _ in range(repeats)]
    decoding.close()
    medians = tuple(statistics.median(times) for times in rounds)
    return DecodeTimes(
        batch=batch,
        context=context,
        median=statistics.median(medians),
        p90=statistics.median(percentile(times, 0.9) for times in rounds),
        mean=statistics.median(statistics.fmean(times) for times in rounds),
        medians=medians,
        floor=floor,
    )


def prefill_times(built: BuiltEngine, tokens: int, *, repeats: int) -> PrefillTimes:
    """Time one prompt alone; a first one is not counted."""
    taken = []
    for i in range(repeats + 1):
        core = EngineCore(built)
        core.add(request_of(built, tokens, name="prefill", seed=100 + i, max_tokens=1, temperature=0.0))
        started = time.perf_counter()
        while core.has_work():
            core.step()
        taken.append(time.perf_counter() - started)
    return PrefillTimes(tokens, tuple(taken[1:]))


def request_of(
    built: BuiltEngine, tokens: int, *, name: str, seed: int, max_tokens: int, temperature: float
) -> Request:
    """A prompt of random tokens that nothing but ``max_tokens`` ends."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(built.config.model.vocab_size, (tokens,), generator=generator).tolist()
    return Request(
        request_id=name,
        prompt_token_ids=tuple(ids),
        params=SamplingParams(temperature=temperature),
        seed=seed,
        max_tokens=max_tokens,
        stop_token_ids=frozenset(),
        mask_token_ids=(),
    )


@torch.inference_mode()
def fill_caches(built: BuiltEngine) -> None:
    """Caches as a long service would leave them: finite, all different, and of a size that attention passes on, or all
    sequences would go on alike: with the same tokens, and with fewer experts than different ones choose."""
    layout = row_layout(built.config)
    with built.runner.on_device():
        for tensor in built.pools.tensors():
            if not tensor.is_floating_point():
                _fill_packed(tensor, layout)
                continue
            for part in torch.split(tensor.view(-1), _FILL_ELEMENTS):
                part.normal_(0.0, 0.5)
    built.runner.settle()


def _fill_packed(rows: torch.Tensor, layout: KVRowLayout) -> None:
    """Quantised rows [N, row_elems] of normal latents and rope keys. Random bytes would not do: nearly all of them are
    scales far too small or far too large."""
    for part in torch.split(rows, _PACKED_ROWS):
        drawn = torch.randn(len(part), layout.latent_dim + layout.rope_dim, device=rows.device).mul_(0.5)
        latent, rope = drawn[:, : layout.latent_dim], drawn[:, layout.latent_dim :]
        part.copy_(pack_rows(latent, rope if layout.rope_dim else None, layout))
