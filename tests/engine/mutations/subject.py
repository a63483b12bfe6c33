"""The engine under mutation: smallest models, smallest shapes, one fixed run, and everything that shows a fault."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sidestream.config.engine import EngineConfig
from sidestream.core.request import Request
from sidestream.core.sampling_params import SamplingParams
from sidestream.engine import build
from sidestream.engine.core import EngineCore
from sidestream.engine.runner import StepOutput
from sidestream.errors import GraphError, HandoffError
from sidestream.streams import Handoff
from sidestream.streams.simulated import Order, SimulatedBackend
from sidestream.streams.simulated.hazards import Hazard
from sidestream.streams.simulated.schedule import DeviceFaultError
from sidestream.streams.simulated.tensor import SimTensor
from tests.tiny_models import build_oracle, next_layers, save_checkpoint

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "DS": ("glm_moe_dsa", {"num_hidden_layers": 2, "indexer_types": ["full", "shared"]}),
    "DSD": ("glm_moe_dsa", {"num_hidden_layers": 3, "indexer_types": ["full", "shared", "full"]}),
    "KD": ("glm5_next", {**next_layers("KD"), "hc_mult": 2, "hc_sinkhorn_iters": 2}),
}
"""Name to architecture and overrides: a group with a follower; another behind it; linear attention before a group."""

PROMPTS = ((5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15), (9, 8, 7))
LONG_PROMPTS = (tuple(range(5, 66)), (9, 8, 7))
"""The first fills more blocks than a device under pressure has."""
NEW_TOKENS = 4
HOSTED_PLACES = 6

FAILURES = (HandoffError, GraphError, AssertionError, RuntimeError)
"""What a fault may be refused with; the last are the device's and torch's."""


@dataclass(frozen=True, slots=True)
class Workload:
    """One way to serve the fixed requests; with ``hisparse``, longer ones on a device that is short of room."""

    mode: str
    model: str = "DS"
    order: Order = Order.LAZY
    seed: int = 0
    policy: str = "auto"
    debug: bool = True
    hisparse: bool = False

    def __str__(self) -> str:
        policy = "" if self.policy == "auto" else f", policy {self.policy}"
        hosted = ", hisparse" if self.hisparse else ""
        return f"{self.model} {self.mode}, {self.order.value} {self.seed}{policy}{hosted}"


@dataclass(frozen=True, slots=True)
class Outcome:
    """Attributes:
    error: that ended the run, or None.
    hazards: found until then.
    tokens: (request, token, log-probabilities) in order, exact; empty after an error.
    handoffs: name, the stream of its last publish, and how often a wait became what; empty after an error.
    """

    error: BaseException | None
    hazards: tuple[Hazard, ...]
    tokens: tuple[Any, ...]
    handoffs: tuple[tuple[str, str, dict[str, int]], ...]

    @property
    def clean(self) -> bool:
        return self.error is None and not self.hazards

    def __str__(self) -> str:
        error = "no error" if self.error is None else f"{type(self.error).__name__}: {self.error}"
        return "\n".join([error, *map(str, self.hazards), *map(str, self.tokens), *map(str, self.handoffs)])


def save_models(folder: Path) -> None:
    """Write the checkpoints."""
    for name, (architecture, overrides) in MODELS.items():
        save_checkpoint(build_oracle(architecture, 0, **overrides), folder / name)


def serve(folder: Path, work: Workload) -> Outcome:
    """Build the engine and serve the requests on a new simulated device."""
    backend = SimulatedBackend(work.order, seed=work.seed)
    error: BaseException | None = None
    tokens: tuple[Any, ...] = ()
    handoffs: tuple[Any, ...] = ()
    try:
        tokens, handoffs = _serve(folder / work.model, work, backend)
    except FAILURES as failure:
        error = failure
    try:
        hazards = backend.hazards()
    except DeviceFaultError as failure:
        error, hazards = error or failure, backend._core.log.settle()
    return Outcome(error, hazards, tokens, handoffs)


def _serve(model: Path, work: Workload, backend: SimulatedBackend) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Two steps that sample nothing, so that the host runs ahead; one of 3 tokens in 4 rows; one of a decode beside a
    prefill; decodes of two sequences, then of one."""
    config = EngineConfig(
        device="sim",
        dtype="float32",
        cudagraph_mode=work.mode,
        stream_policy=work.policy,
        graph_debug=work.debug,
        max_num_seqs=2,
        max_num_batched_tokens=4,
        max_model_len=96 if work.hisparse else 32,
        block_size=8,
        num_blocks=HOSTED_PLACES if work.hisparse else 8,
        memory_limit="1GiB",
        hisparse_host_memory="64KiB" if work.hisparse else None,
        hisparse_hot_factor=1,
        hisparse_watermark=0.7,  # so much that a block leaves in the step behind that which filled it
    )
    built = build.build_engine(model, config, backend=backend)
    core = EngineCore(built)
    hidden: list[torch.Tensor] = []
    forward = built.runner.forward

    def keep(*step: Any, **unknown: Any) -> StepOutput:
        output = forward(*step, **unknown)
        hidden[:] = [output.hidden]
        return output

    sample = core._sample

    def look(step: Any, output: StepOutput) -> Any:
        launched = sample(step, output)
        if launched.sampled:  # log-probabilities were asked for, so the host has waited
            assert isinstance(hidden[0], SimTensor)
            assert hidden[0].elem.isfinite().all(), "hidden states, padding rows included, are not finite"
        return launched

    built.runner.forward = keep  # type: ignore[method-assign]
    core._sample = look  # type: ignore[method-assign]
    params = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=2)
    prompts = LONG_PROMPTS if work.hisparse else PROMPTS
    waiting = [Request(str(i), p, params, i, NEW_TOKENS, frozenset(), ()) for i, p in enumerate(prompts)]
    core.add(waiting.pop(0))
    made: list[Any] = []
    while core.has_work():
        outputs = core.step()
        made += [(output.request_id, output.token_id, output.logprobs) for output in outputs]
        if outputs and waiting:
            core.add(waiting.pop())
    holders: list[object] = [*built.runner.attention.groups, built.runner.hisparse]
    groups = [handoff for holder in holders if holder is not None for handoff in vars(holder).values()]
    handoffs = [
        (h.name, h._last.stream.name if h._last else "", {kind.value: n for kind, n in h.waits.items()})
        for h in groups
        if isinstance(h, Handoff)
    ]
    return tuple(made), tuple(handoffs)
