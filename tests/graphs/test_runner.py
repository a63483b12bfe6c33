"""GraphRunner on the simulated device with a model of two lines: warm-up, capture, replay, what debug mode catches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch

from sidestream.attention.step_inputs import StepInputsBuilder
from sidestream.core.cudagraph_mode import CUDAGraphMode
from sidestream.core.step_inputs import StepInputs
from sidestream.errors import GraphError
from sidestream.graphs.breakable import BreakableCUDAGraphCapture
from sidestream.graphs.dispatch import GraphKey, StepPlan
from sidestream.graphs.runner import GraphRunner
from sidestream.graphs.static_buffers import StaticBuffers
from sidestream.streams import Capture, Graph
from sidestream.streams.simulated import DeviceError, Order
from tests.graphs.pieces import break_here
from tests.graphs.steps import decodes, step_builder
from tests.streams.programs import Machine

ROWS = 4
FULL = StepPlan(CUDAGraphMode.FULL, GraphKey(ROWS, 1))
PIECEWISE = StepPlan(CUDAGraphMode.PIECEWISE, GraphKey(ROWS, 1))
SMALL = {plan: StepPlan(plan.mode, GraphKey(2, 1)) for plan in (FULL, PIECEWISE)}


@dataclass(eq=False)
class Model:
    """hidden = (token id * 2 + 0.5) * context length; the addition is a break in PIECEWISE.

    Attributes:
        skip: the break forgets to write its result.
    """

    machine: Machine
    debug: bool = False
    skip: bool = False
    buffers: StaticBuffers = field(init=False)
    runner: GraphRunner = field(init=False)
    builder: StepInputsBuilder = field(init=False)

    def __post_init__(self) -> None:
        backend = self.machine.backend
        self.buffers = StaticBuffers(ROWS, backend.device)
        self.runner = GraphRunner(self.machine.streams, self.buffers, debug=self.debug)
        self.builder = step_builder(backend, max_seqs=ROWS, max_tokens=ROWS)
        backend.synchronize()

    def forward_of(self, step: StepInputs) -> Callable[[], dict[str, torch.Tensor]]:
        def forward() -> dict[str, torch.Tensor]:
            held = self.buffers.hold("ids", step.token_ids.to(torch.float32) * 2)
            added = self.buffers.take("added", tuple(held.shape), torch.float32)

            def add() -> None:
                if not self.skip:
                    added.copy_(held + 0.5)

            break_here(add, "add")
            assert step.context_lens is not None
            return {"hidden": added * step.context_lens}

        return forward

    def capture(self, *plans: StepPlan) -> None:
        with self.machine.on_compute():
            for plan in plans:
                step = self.begin(plan)
                self.runner.warm_up(self.forward_of(step))
                self.machine.backend.synchronize()
                step = self.begin(plan)
                self.runner.capture(plan, self.forward_of(step), step)

    def begin(self, plan: StepPlan) -> StepInputs:
        self.machine.streams.begin_step()
        return self.builder.scratch(rows=plan.key.tokens, uniform=True)

    def step(self, plan: StepPlan, ids: list[int], *, builder: StepInputsBuilder | None = None) -> list[float]:
        """Replay with the ids at positions 3, 4, ..; the true rows' results."""
        starts = range(3, 3 + len(ids))
        with self.machine.on_compute():
            self.machine.streams.begin_step()
            step = (builder or self.builder).build_uniform(decodes(starts), ids, rows=plan.key.tokens)
            hidden = self.runner.replay(plan, step)["hidden"]
            assert hidden.shape[0] == plan.key.tokens
            return self.machine.read(hidden)[: len(ids)]


def expected(ids: list[int]) -> list[float]:
    return [(2 * token + 0.5) * (4 + row) for row, token in enumerate(ids)]


@pytest.fixture(params=[FULL, PIECEWISE], ids=["full", "piecewise"])
def plan(request: pytest.FixtureRequest) -> StepPlan:
    return request.param  # type: ignore[no-any-return]


@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize("order", [Order.LAZY, Order.RANDOM])
def test_replays_follow_each_steps_inputs(plan: StepPlan, order: Order, debug: bool) -> None:
    machine = Machine(order)
    model = Model(machine, debug=debug)
    model.capture(plan, SMALL[plan])
    for chosen, ids in ((plan, [1, 2, 3]), (SMALL[plan], [9]), (plan, [4, 5, 6, 7]), (SMALL[plan], [2, 3])):
        assert model.step(chosen, ids) == expected(ids)
    machine.backend.check()


def test_what_was_captured_can_be_looked_at() -> None:
    model = Model(Machine())
    model.capture(PIECEWISE, FULL, SMALL[FULL])
    assert model.runner.captured == (PIECEWISE, FULL, SMALL[FULL])
    pieces, graph = model.runner.capture_of(PIECEWISE), model.runner.capture_of(FULL)
    assert isinstance(pieces, BreakableCUDAGraphCapture)
    assert (pieces.name, pieces.breaks) == ("piecewise graph of 4 tokens, uniform", ("add",))
    assert len(pieces.segments) == 2
    assert isinstance(graph, Capture)
    assert graph.name == "full graph of 4 tokens, uniform"
    assert model.buffers.names == ("ids", "added", "hidden")


def test_all_shapes_of_both_modes_share_one_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine()
    model, pools = Model(machine), []
    begin = machine.backend.begin_capture

    def begin_capture(name: str, pool: object) -> Graph:
        pools.append(pool)
        return begin(name, pool)

    monkeypatch.setattr(machine.backend, "begin_capture", begin_capture)
    model.capture(PIECEWISE, FULL, SMALL[PIECEWISE], SMALL[FULL])
    assert len(pools) == 2 * (2 + 1)  # two segments, or one graph
    assert pools[0] is not None
    assert all(pool is pools[0] for pool in pools)


def test_a_shape_is_captured_once(plan: StepPlan) -> None:
    model = Model(Machine())
    model.capture(plan)
    with pytest.raises(AssertionError, match="is captured already"):
        model.capture(plan)


def test_a_capture_without_a_warm_up_is_refused_and_later_ones_work(plan: StepPlan) -> None:
    machine = Machine()
    model = Model(machine)
    with machine.on_compute():
        step = model.begin(plan)
        with pytest.raises(AssertionError, match="'ids' is first asked for inside a capture; warm up") as raised:
            model.runner.capture(plan, model.forward_of(step), step)
    (note,) = raised.value.__notes__
    assert note.endswith(f"capture '{plan.mode.value} graph of 4 tokens, uniform'")
    assert model.runner.captured == ()
    assert model.buffers.names == ()
    model.capture(plan)
    assert model.step(plan, [5]) == expected([5])
    machine.backend.check()


def test_a_failed_forward_leaves_no_capture_open_and_no_buffer_frozen(plan: StepPlan) -> None:
    machine = Machine()
    model = Model(machine)

    def reads_on_the_host() -> dict[str, torch.Tensor]:
        results = model.forward_of(step)()
        results["hidden"].sum().item()
        return results

    with machine.on_compute():
        step = model.begin(plan)
        model.runner.warm_up(reads_on_the_host)
        with pytest.raises(DeviceError, match="not permitted when stream is capturing") as raised:
            model.runner.capture(plan, reads_on_the_host, step)
    assert "graph of 4 tokens, uniform" in raised.value.__notes__[0]
    assert machine.streams.open_capture is None
    model.buffers.take("another", (1,), torch.float32)
    model.capture(plan)
    assert model.step(plan, [1, 2]) == expected([1, 2])


def test_debug_mode_catches_an_input_that_moved(plan: StepPlan) -> None:
    machine = Machine()
    model = Model(machine, debug=True)
    model.capture(plan)
    elsewhere = step_builder(machine.backend, max_seqs=ROWS, max_tokens=ROWS)
    machine.backend.synchronize()
    with pytest.raises(GraphError, match=f"'{plan.mode.value} graph of 4 tokens, uniform' reads 'block_table', .*"):
        model.step(plan, [1, 2], builder=elsewhere)
    assert model.step(plan, [1, 2]) == expected([1, 2])


def test_without_debug_mode_a_moved_input_is_not_looked_at(plan: StepPlan) -> None:
    """The graph reads the place it was captured with: this is what debug mode is for."""
    machine = Machine()
    model = Model(machine)
    model.capture(plan)
    assert model.step(plan, [1, 2]) == expected([1, 2])
    elsewhere = step_builder(machine.backend, max_seqs=ROWS, max_tokens=ROWS)
    machine.backend.synchronize()
    assert model.step(plan, [7, 8], builder=elsewhere) == expected([1, 2])


def test_debug_mode_shows_a_break_that_does_not_write_its_result() -> None:
    for debug in (False, True):
        model = Model(Machine(), debug=debug)
        model.capture(PIECEWISE)
        assert model.step(PIECEWISE, [1, 2]) == expected([1, 2])
        model.skip = True
        found = model.step(PIECEWISE, [7, 8])
        if debug:
            assert all(value != value for value in found)
        else:
            assert found == expected([1, 2])  # the last step's, and nobody would know
