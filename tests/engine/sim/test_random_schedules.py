"""Two hundred random workloads, in every mode and order of work: no hazard, no leak, and the CPU engine's tokens.

Each engine serves its workloads one behind the other; requests arrive, are aborted and lose their blocks at random.
Tokens are compared as the first promise allows: a schedule may choose the other token where the margin is tiny.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from sidestream.config.engine import EngineConfig
from sidestream.core.cudagraph_mode import CUDAGraphMode
from sidestream.core.request import Request
from sidestream.core.sampling_params import SamplingParams
from sidestream.engine.build import BuiltEngine, build_engine
from sidestream.engine.core import EngineCore
from sidestream.streams.simulated import Order, SimulatedBackend
from tests.engine.llm_fixtures import MARGIN
from tests.engine.sim.harness import MODELS, SETTINGS, VOCAB, make_model, open_sim, sim_config
from tests.engine.test_soak import solo_gaps

WORKLOADS = {"none": 4, "piecewise": 21, "full": 21, "full_and_piecewise": 21}
"""Of each of the three engines of a setting: 201 in all."""
LONGEST = 24

ORDERS: dict[str, tuple[Order, str | None]] = {
    "random": (Order.RANDOM, None),
    "lazy": (Order.LAZY, None),
    "starved": (Order.STARVED, "index groups"),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {name: tmp_path_factory.mktemp(name) for name in MODELS}
    for name, folder in made.items():
        make_model(name, folder)
    return made


@dataclass
class Server:
    """An engine under load, and what became of its requests."""

    backend: SimulatedBackend
    core: EngineCore
    rng: random.Random
    sent: dict[str, Request] = field(default_factory=dict)
    made: dict[str, list[int]] = field(default_factory=dict)
    finished: set[str] = field(default_factory=set)
    aborted: set[str] = field(default_factory=set)

    def serve(self, workload: int) -> None:
        """Requests at random steps, now and then an abort, until all is done."""
        rng, core = self.rng, self.core
        waiting = [make_request(f"{workload}-{i}", rng) for i in range(2 + workload % 2)] if workload else rivals()
        while waiting or core.has_work():
            while waiting and (not core.has_work() or rng.random() < 0.6):
                self._send(waiting.pop())
            running = sorted(set(self.sent) - self.finished - self.aborted)
            if workload and running and (not self.aborted or rng.random() < 0.1):
                self.aborted.add(victim := rng.choice(running))
                assert core.abort(victim)
            for output in core.step():
                assert output.token_id is not None
                assert output.request_id not in self.aborted
                self.made[output.request_id].append(output.token_id)
                if output.finish_reason is not None:
                    self.finished.add(output.request_id)
            core.scheduler.check_integrity()

    def _send(self, request: Request) -> None:
        self.sent[request.request_id], self.made[request.request_id] = request, []
        self.core.add(request)


def rivals() -> list[Request]:
    """Two that start on one block each and need two: one of them must give its block back."""
    return [
        Request(
            request_id=f"rival-{i}",
            prompt_token_ids=tuple(range(10 + i, 17 + i)),
            params=SamplingParams(temperature=0),
            seed=0,
            max_tokens=12,
            stop_token_ids=frozenset(),
            mask_token_ids=(),
        )
        for i in range(2)
    ]


def make_request(name: str, rng: random.Random) -> Request:
    prompt = tuple(rng.randrange(3, VOCAB) for _ in range(rng.choice((1, 2, 3, rng.randrange(4, 17)))))
    return Request(
        request_id=name,
        prompt_token_ids=prompt,
        params=SamplingParams(temperature=0),
        seed=0,
        max_tokens=rng.randrange(1, 8),
        stop_token_ids=frozenset({rng.randrange(VOCAB)}),
        mask_token_ids=(),
    )


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("order", ORDERS)
def test_random_workloads_leave_no_hazard_and_give_the_cpu_engine_s_tokens(
    order: str, setting: str, folders: dict[str, Path]
) -> None:
    number = list(ORDERS).index(order) + SETTINGS.index(setting)
    folder = folders[sorted(MODELS)[number % len(MODELS)]]
    kind, starved = ORDERS[order]
    backend = open_sim(kind, seed=number, starved=starved)
    built = build_small(folder, setting, backend)
    core = EngineCore(built)
    free = core.scheduler.num_free_blocks, core.scheduler.num_free_slots
    server = Server(backend, core, random.Random(number))
    for workload in range(WORKLOADS[setting]):
        server.serve(workload)
        backend.check()
        assert (core.scheduler.num_free_blocks, core.scheduler.num_free_slots) == free
    assert server.finished | server.aborted == set(server.sent)
    assert server.aborted
    assert core.scheduler.num_preemptions > 0
    assert built.runner.graphs is not None
    for name in setting.split("_and_"):
        assert built.runner.graphs.dispatcher.steps[CUDAGraphMode(name)] > 0
    check_tokens(folder, server)


def build_small(folder: Path, setting: str, backend: SimulatedBackend) -> BuiltEngine:
    """Two sequences of up to three blocks, and three blocks in all, so that they push each other out."""
    config = sim_config(
        setting, max_num_seqs=2, max_num_batched_tokens=8, max_capture_tokens=4, max_model_len=LONGEST, num_blocks=3
    )
    built = build_engine(folder, config, backend=backend)
    with built.runner.on_device():
        built.pools.poison()
    return built


def check_tokens(folder: Path, server: Server) -> None:
    """Each finished sequence is the choice of the CPU engine, which sees it whole and alone."""
    config = EngineConfig(block_size=8, max_num_seqs=1, num_blocks=4, max_num_batched_tokens=LONGEST, device="cpu")
    solo = build_engine(folder, config)
    solo.pools.poison()
    assert server.finished
    for name in sorted(server.finished):
        prompt = server.sent[name].prompt_token_ids
        gaps = solo_gaps(solo, [*prompt, *server.made[name]], len(prompt))
        assert float(gaps.max()) <= MARGIN, f"{name}: {gaps.tolist()}"
