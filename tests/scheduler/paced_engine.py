"""The fake engine with a pacer and a cost of each step, told to the pacer as a clock would: nothing here is timed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

from sidestream.core.batch import ScheduledStep
from sidestream.core.outputs import TokenEvent
from sidestream.scheduler.prefill_pacer import PrefillPacer
from sidestream.scheduler.scheduler import Scheduler
from tests.scheduler.fake_engine import FakeEngine, make_config, make_request


def decode_seconds(num_decodes: int) -> float:
    """A step of 50 decodes takes 20 ms."""
    return 0.0075 + 0.00025 * num_decodes


def chunk_seconds(tokens: int) -> float:
    return 0.002 + 0.0002 * tokens


@dataclass(frozen=True)
class Cost:
    decodes: int
    tokens: int
    seconds: float

    @property
    def stretch(self) -> float:
        """The step's time over that of its decodes alone."""
        return self.seconds / decode_seconds(self.decodes)


@dataclass
class PacedEngine(FakeEngine):
    """``cost`` gives the seconds of a step: its index, decodes, prefill tokens."""

    cost: Callable[[int, int, int], float] = lambda index, decodes, tokens: (
        decode_seconds(decodes) + (chunk_seconds(tokens) if tokens else 0)
    )
    pacer: PrefillPacer | None = field(default_factory=PrefillPacer)
    costs: list[Cost] = field(default_factory=list)
    untold: deque[Cost] = field(default_factory=deque)
    names: count[int] = field(default_factory=count)

    def __post_init__(self) -> None:
        self.scheduler = Scheduler(self.config, pacer=self.pacer)

    def step(self) -> list[TokenEvent]:
        events = super().step()
        while len(self.untold) > len(self.pending):
            cost = self.untold.popleft()
            if self.pacer is not None:
                self.pacer.observe(cost.decodes, cost.tokens, cost.seconds)
        return events

    def execute(self, step: ScheduledStep) -> dict[str, int]:
        decodes = sum(chunk.is_decode for chunk in step.chunks)
        tokens = step.num_tokens - decodes
        self.costs.append(Cost(decodes, tokens, self.cost(step.index, decodes, tokens)))
        self.untold.append(self.costs[-1])
        return super().execute(step)

    def ask(self, prompt: int, *, max_tokens: int) -> str:
        """Add a request; its name."""
        name = f"r{next(self.names)}"
        self.add(make_request(name, prompt, max_tokens=max_tokens))
        return name

    def decode(self, streams: int) -> None:
        """Run so many streams until all of them have decoded together a few times."""
        for _ in range(streams):
            self.ask(2, max_tokens=10_000)
        while sum(cost.decodes == streams for cost in self.costs) < 8:
            self.step()
        self.costs.clear()

    def run_until_done(self, *names: str, limit: int = 5_000) -> list[Cost]:
        """Costs of the steps until these have finished, the ones that prefill or could have."""
        for _ in range(limit):
            if all(name in self.reasons for name in names):
                return self.costs
            self.step()
        raise AssertionError(f"not done after {limit} steps")


def paced(*, depth: int = 0, budget: int = 1024, seats: int = 64, **more: object) -> PacedEngine:
    config = make_config(
        max_num_seqs=seats,
        num_slots=seats + 1,
        max_num_batched_tokens=budget,
        max_model_len=20_000,
        num_blocks=2_000,
        block_size=16,
        prefill_quantum=64,
    )
    return PacedEngine(config, depth=depth, **more)  # type: ignore[arg-type]
