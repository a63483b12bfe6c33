"""The memory budget: what is counted against it, in which order, and what is said where it is too small."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sidestream import LLM, CapacityError, ModelConfig
from sidestream.cache.hosted_rows import HOT_ROWS
from sidestream.cache.pools import CachePools
from sidestream.config.engine import EngineConfig
from sidestream.config.resolved import ResolvedConfig, resolve
from sidestream.core.batch import Chunk
from sidestream.engine import build, memory_probe
from sidestream.engine.build import BuiltEngine, build_engine, in_graph_mode
from sidestream.engine.device_memory import Segments
from sidestream.engine.held_bytes import bytes_of
from sidestream.engine.largest_steps import largest_steps
from sidestream.engine.ledger import ACTIVATIONS, CONTEXT, GRAPHS, RESERVE, STATIC, WEIGHTS
from sidestream.engine.runner import ModelRunner
from sidestream.graphs.dispatch import StepPlan
from tests.engine.hisparse.pressed import host_memory
from tests.engine.hisparse.spilled_rows import settings_for
from tests.engine.sim.harness import captured_sizes, make_model, open_sim, sim_config
from tests.tiny_models import tiny_config

MIB = 2**20


class FakeMemory:
    """A device on which capturing a shape, and running a step, take fixed amounts.

    Attributes:
        log: what was done, in order.
    """

    def __init__(self) -> None:
        self.context = self.beside = 50 * MIB
        self.live = self.free = self.pools = 0
        self.log: list[str] = []

    def segments(self) -> Segments:
        return Segments(self.live, self.free, self.pools)

    def beside_torch(self) -> int:
        return self.beside

    def in_use(self) -> int:
        return self.beside + self.live + self.free + self.pools

    def pinned(self) -> int:
        return 3 * MIB

    def enforce(self, budget: int) -> None:
        self.log.append(f"enforce {budget // MIB}")

    def lift(self) -> None:
        self.log.append("lift")


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> FakeMemory:
    fake = FakeMemory()
    capture, step, load, pools = ModelRunner.capture, memory_probe.run_step, build.load_model, build.CachePools

    def captured(runner: ModelRunner, *args: Any, shapes: Sequence[StepPlan] | None = None) -> None:
        assert runner.graphs is not None
        count = len(runner.graphs.dispatcher.captures() if shapes is None else shapes)
        fake.log.append(f"capture {count}")
        fake.pools += 4 * MIB
        fake.beside += count * MIB
        capture(runner, *args, shapes=shapes)

    def ran(*args: Any, **more: Any) -> None:
        step(*args, **more)
        fake.free = max(fake.free, 16 * MIB)
        fake.log.append("step")

    def loaded(*args: Any, **more: Any) -> Any:
        fake.log.append("load")
        model, report = load(*args, **more)
        fake.live += bytes_of(model)
        return model, report

    def allocated(*args: Any, **more: Any) -> CachePools:
        made = pools(*args, **more)
        fake.live += made.bytes_total()
        fake.log.append(f"pools {made.num_blocks}")
        return made

    def released() -> None:
        fake.free = 0
        if "load" not in fake.log:  # the trial's runner is gone, or none was made yet
            fake.pools = 0

    monkeypatch.setattr(build, "_device_memory", lambda backend: fake)
    monkeypatch.setattr(memory_probe, "release", released)
    monkeypatch.setattr(ModelRunner, "capture", captured)
    monkeypatch.setattr(memory_probe, "run_step", ran)
    monkeypatch.setattr(build, "load_model", loaded)
    monkeypatch.setattr(build, "compile_steps", lambda config, longest: iter(()))  # slow where all is simulated
    monkeypatch.setattr(build, "CachePools", allocated)
    return fake


def on_sim(folder: Path, **settings: Any) -> BuiltEngine:
    with captured_sizes(2):
        return build_engine(folder, sim_config("full_and_piecewise", **settings), backend=open_sim())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("glm5_next")
    make_model("glm5_next", made)
    return made


def test_everything_is_measured_before_a_byte_of_the_checkpoint_is_read(folder: Path, memory: FakeMemory) -> None:
    built = on_sim(folder)
    first = memory.log.index("load")
    assert memory.log[:first] == ["lift", "pools 2", "capture 2", *["step"] * 5]
    assert memory.log[first:] == ["load", "pools 41", "capture 3", *["step"] * 5, "enforce 4096"]
    ledger = built.ledger
    parts = {part.name: part for part in ledger.parts}
    assert parts[CONTEXT].predicted == parts[CONTEXT].measured == 50 * MIB
    assert parts[WEIGHTS].predicted == parts[WEIGHTS].measured == built.weight_bytes
    assert parts[ACTIVATIONS].predicted == parts[ACTIVATIONS].measured == 16 * MIB
    assert parts[GRAPHS].predicted == (4 + 2) * MIB
    assert parts[GRAPHS].measured == (4 + 3) * MIB
    assert parts[STATIC].measured == parts[STATIC].predicted > 0
    for kind in ("kv", "index_keys", "index_tail", "conv", "recurrent"):
        assert parts[f"{kind} cache"].predicted == parts[f"{kind} cache"].measured > 0
    assert ledger.total == ledger.in_use == memory.in_use()
    assert ledger.pinned == 3 * MIB
    memory.beside += 5 * MIB
    assert built.ledger_now().in_use == ledger.in_use + 5 * MIB


def test_caches_fill_what_the_rest_leaves(folder: Path, memory: FakeMemory) -> None:
    built = on_sim(folder, num_blocks=None, max_model_len=2048, memory_limit="203MiB")
    predicted = built.ledger.predicted
    assert predicted <= 203 * MIB
    assert predicted + built.pools.groups.bytes_per_block > 203 * MIB
    assert 2 < built.num_blocks < 4 * 256 + 1
    assert built.ledger.bytes_of("reserve") == 0
    assert next(part for part in built.ledger.parts if part.name == RESERVE).predicted == memory_probe.RESERVE_BYTES


@pytest.mark.parametrize("length", [801, None])
def test_blocks_of_the_host_pool_count_from_the_first(
    folder: Path, memory: FakeMemory, length: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device has 45 places of 16 tokens: what is known before anything is measured may not refuse a sequence that
    fits with host blocks, and what is measured then are steps of that length."""
    lengths: list[int] = []
    steps = largest_steps

    def noted(config: ResolvedConfig, *, longest: int) -> tuple[tuple[Chunk, ...], ...]:
        lengths.append(longest)
        return steps(config, longest=longest)

    monkeypatch.setattr(build, "largest_steps", noted)
    settings = settings_for(700, 16, chunk=256) | {"max_model_len": length, "max_num_seqs": 2}
    built = on_sim(folder, **settings, hisparse_host_memory=host_memory(folder, 60))
    assert built.max_model_len == (length or (45 + 60 * 8 // 16) * 16)
    assert lengths == [built.max_model_len] * 2
    hot = next(part for part in built.ledger.parts if part.name == HOT_ROWS)
    assert hot.predicted == hot.measured > 0


def test_working_room_is_asked_for_before_anything_is_measured(folder: Path, memory: FakeMemory) -> None:
    settings = settings_for(700, 16, chunk=256) | {"num_blocks": 16}
    with pytest.raises(CapacityError, match="16 KV blocks on the device are less than the 18 that one step may write"):
        on_sim(folder, **settings, hisparse_host_memory=host_memory(folder, 120))
    assert memory.log == []


@pytest.mark.parametrize(
    ("limit", "named", "before"),
    [
        ("50MiB", r"weights.*CUDA context \(52428800 bytes\).*memory_limit", []),
        ("120MiB", r"activations \(16777216 bytes\), static buffers.*graph pool.*max_num_batched_tokens", ["lift"]),
    ],
)
def test_too_small_a_budget_fails_before_weights_are_loaded(
    folder: Path, memory: FakeMemory, limit: str, named: str, before: list[str]
) -> None:
    with pytest.raises(CapacityError, match=named):
        on_sim(folder, memory_limit=limit)
    assert "load" not in memory.log
    assert memory.log[: len(before)] == before
    assert ("step" in memory.log) == bool(before)


def test_another_mode_lifts_the_bound(folder: Path, memory: FakeMemory) -> None:
    built = on_sim(folder)
    in_graph_mode(built, "none")
    assert memory.log[-1] == "lift" or memory.log[-2:] == ["lift", "capture 0"]


def test_a_cpu_counts_weights_and_caches(folder: Path) -> None:
    llm = LLM(folder, device="cpu", num_blocks=8, max_model_len=64, block_size=8)
    ledger = llm.ledger()
    assert next(part.name for part in ledger.parts) == WEIGHTS
    assert all(part.predicted == part.measured for part in ledger.parts)
    assert ledger.total == llm.built.weight_bytes + llm.built.pools.bytes_total()
    assert ledger.total < ledger.budget
    assert ledger.in_use > 50 * MIB  # this process, torch included
    text = str(ledger)
    assert "weights" in text
    assert "resident, says the system" in text
    assert ledger.as_json()["measured"] == ledger.total


@pytest.mark.parametrize(
    ("tokens", "sequences", "longest"), [(64, 4, 1000), (64, 4, 10), (7, 7, 5), (9, 4, 1), (1, 1, 1)]
)
def test_the_largest_steps_are_legal_and_as_large_as_can_be(tokens: int, sequences: int, longest: int) -> None:
    model = ModelConfig.from_hf(tiny_config("glm5_next").to_dict())
    user = EngineConfig(device="cpu", max_num_batched_tokens=tokens, max_num_seqs=sequences, block_size=8)
    config = resolve(user, model, cuda_available=False, device_memory=1 << 40)
    steps = largest_steps(config, longest=longest)
    for step in steps:
        assert 0 < sum(chunk.length for chunk in step) <= tokens
        assert len(step) <= sequences
        assert all(chunk.end == longest and chunk.start >= 0 for chunk in step)
        assert all(len(chunk.block_ids) * 8 >= chunk.end for chunk in step)
        decodes = [chunk.is_decode for chunk in step]
        assert decodes == sorted(decodes, reverse=True)
    assert max(sum(chunk.length for chunk in step) for step in steps) == min(tokens, sequences * longest)
    assert max(len(step) for step in steps) == min(tokens, sequences)
    assert any(all(chunk.is_decode for chunk in step) for step in steps) == (longest > 1)
    keeping = [step for step in steps if step[0].splits]
    if longest > 8 and tokens > 8:  # a state behind each block of the most tokens that a step may prefill
        assert max(sum(chunk.length for chunk in step) for step in keeping) == min(tokens, 4 * longest)
        for chunk in keeping[0]:
            inside = range(chunk.start + 1, chunk.end)
            assert [split.position for split in chunk.splits] == [place for place in inside if place % 8 == 0]
    off = resolve(replace(user, enable_prefix_caching=False), model, cuda_available=False, device_memory=1 << 40)
    assert not any(chunk.splits for step in largest_steps(off, longest=longest) for chunk in step)
