"""The engines that a verification compares, and how prompts are sent through one of them under a schedule."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Protocol

from sidestream.core.outputs import EngineOutput
from sidestream.core.request import Request
from sidestream.core.sampling_params import SamplingParams
from sidestream.engine.build import BuiltEngine, in_graph_mode
from sidestream.engine.core import EngineCore
from sidestream.engine.verify.compare import Generated
from sidestream.engine.verify.layer_digests import LayerDigests
from sidestream.engine.verify.report import Batching, Prefill, Rule, Schedule

ROW_MULTIPLE = 8
"""Rows of a step are padded to at most the next multiple of this."""


class Progress(Protocol):
    """Told how a verification goes on."""

    def begin(self, label: str, tokens: int) -> None:
        """A cell begins that will generate so many tokens."""
        ...

    def advance(self, tokens: int) -> None: ...

    def note(self, text: str) -> None:
        """Something a user wants to know now."""
        ...


@dataclass(frozen=True, slots=True)
class Variant:
    """A column of the matrix.

    Attributes:
        name: as the table shows it.
        cudagraph_mode: a setting of the engine.
        on_host: run by the plain CPU engine, not on the device that is verified.
        hosted: with a host pool (HiSparse).
        rule: compared with the first variant's cell of the same schedule; REFERENCE for the first itself.
    """

    name: str
    cudagraph_mode: str
    on_host: bool
    rule: Rule
    hosted: bool = False


NONE = Variant("NONE", "none", on_host=False, rule=Rule.REFERENCE)
PIECEWISE = Variant("PIECEWISE", "piecewise", on_host=False, rule=Rule.BITWISE)
FULL = Variant("FULL", "full", on_host=False, rule=Rule.BITWISE)
FULL_AND_PIECEWISE = Variant("FULL_AND_PIECEWISE", "full_and_piecewise", on_host=False, rule=Rule.BITWISE)
PLAIN_CPU = Variant("plain CPU", "none", on_host=True, rule=Rule.BOUND)

VARIANTS: dict[str, tuple[Variant, ...]] = {
    "cuda": (NONE, PIECEWISE, FULL, FULL_AND_PIECEWISE),
    "sim": (NONE, PIECEWISE, FULL, PLAIN_CPU),
    "cpu": (NONE,),
}
"""By device; the first is what others are compared with. Simulation is slow, so what FULL_AND_PIECEWISE makes of the
steps of PIECEWISE and FULL is left to a GPU; a CPU has no other modes."""


def variants_of(device: str, *, hisparse: bool) -> tuple[Variant, ...]:
    """The columns for a device; with ``hisparse`` each of its modes once more."""
    plain = VARIANTS[device]
    again = [replace(v, name=f"{v.name}, HiSparse", rule=Rule.BITWISE, hosted=True) for v in plain if not v.on_host]
    return (*plain, *again) if hisparse else plain


@dataclass(slots=True)
class CellRun:
    """What one cell gave; ``generated`` is one a prompt, in order, and None for prompts that were not run."""

    generated: list[Generated | None]
    steps: Counter[str] = field(default_factory=Counter)
    fallbacks: Counter[str] = field(default_factory=Counter)
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Workload:
    """What every cell runs.

    Attributes:
        tokens: generated behind each prompt.
        chunk: tokens a step under chunked prefill.
    """

    prompts: tuple[tuple[int, ...], ...]
    tokens: int
    chunk: int

    def run(
        self,
        built: BuiltEngine,
        schedule: Schedule,
        *,
        progress: Progress | None = None,
        only: Sequence[int] | None = None,
        until: tuple[int, int] | None = None,
    ) -> CellRun:
        """Send prompts through an engine.

        Args:
            only: these prompts; None runs all.
            until: (prompt, tokens) after which the rest is dropped.
        """
        prompts = range(len(self.prompts)) if only is None else only
        run = CellRun([None] * len(self.prompts))
        core = EngineCore(_with_budget(built, self.chunk) if schedule.prefill is Prefill.CHUNKED else built)
        groups = [[prompt] for prompt in prompts] if schedule.batching is Batching.ALONE else [list(prompts)]
        with _counting(built, run):
            for group in groups:
                for prompt in group:
                    run.generated[prompt] = Generated([], [], [])
                    core.add(self._request(prompt))
                while core.has_work():
                    for output in core.step():
                        _append(run, output)
                        if progress is not None:
                            progress.advance(1)
                    if until is not None and _reached(run, *until):
                        return run
        return run

    def _request(self, prompt: int) -> Request:
        return Request(
            request_id=str(prompt),
            prompt_token_ids=self.prompts[prompt],
            params=SamplingParams(max_tokens=self.tokens, temperature=0.0, ignore_eos=True, logprobs=2),
            seed=0,
            max_tokens=self.tokens,
            stop_token_ids=frozenset(),
            mask_token_ids=(),
        )


def observed(built: BuiltEngine, cudagraph_mode: str) -> tuple[BuiltEngine, LayerDigests]:
    """An engine over the same weights that records what its layers put out."""
    backend, config = built.runner.streams.backend, built.config
    rows = -(-config.max_num_batched_tokens // ROW_MULTIPLE) * ROW_MULTIPLE
    digests = LayerDigests(config.model, max_rows=rows, device=backend.device)
    backend.synchronize()
    return in_graph_mode(built, cudagraph_mode, observer=digests), digests


def _with_budget(built: BuiltEngine, tokens: int) -> BuiltEngine:
    """The same engine, which schedules at most so many tokens a step; what it pads and captures stays as it is."""
    return replace(built, config=replace(built.config, max_num_batched_tokens=tokens))


@contextmanager
def _counting(built: BuiltEngine, run: CellRun) -> Iterator[None]:
    """Add the block's steps by mode to ``run``."""
    graphs = built.runner.graphs
    if graphs is None:
        yield
        return
    steps, fallbacks = graphs.dispatcher.steps.copy(), graphs.dispatcher.fallbacks.copy()
    try:
        yield
    finally:
        run.steps = Counter({mode.value: n for mode, n in (graphs.dispatcher.steps - steps).items()})
        run.fallbacks = graphs.dispatcher.fallbacks - fallbacks


def _append(run: CellRun, output: EngineOutput) -> None:
    made = run.generated[int(output.request_id)]
    assert made is not None
    assert output.token_id is not None
    assert output.logprobs is not None
    made.token_ids.append(output.token_id)
    made.logprobs.append(output.logprobs[0][1])
    made.margins.append(output.logprobs[0][1] - output.logprobs[1][1])


def _reached(run: CellRun, prompt: int, tokens: int) -> bool:
    made = run.generated[prompt]
    return made is not None and len(made.token_ids) >= tokens
