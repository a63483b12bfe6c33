"""Padding rows of captured steps: they write nobody's memory, stay finite, and breaks know which rows they are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from sidestream.attention.latent import PagedLatentAttention
from sidestream.core.batch import SCRATCH_BLOCK, SCRATCH_SLOT
from sidestream.core.forward_context import get_forward_context
from sidestream.engine.runner import StepOutput
from sidestream.layers import mlp
from sidestream.layers.indexer import Indexer
from sidestream.layers.kda import KimiDeltaAttention
from sidestream.streams.simulated import SimulatedBackend
from tests.engine.harness import Part, oracle_logprobs, random_sequences
from tests.engine.sim.harness import VOCAB, SimHarness, captured_sizes, decodes, make_model
from tests.tolerances import PARITY_LOGPROB

REPLAYS = 20
BUCKET = 8
EIGHT: dict[str, Any] = {"max_num_seqs": BUCKET, "max_num_batched_tokens": BUCKET, "max_capture_tokens": BUCKET}


@dataclass(frozen=True)
class Memory:
    """Bytes of every pool on the host: [num_blocks, bytes] and [slots, bytes] each."""

    blocks: list[torch.Tensor]
    slots: list[torch.Tensor]

    @classmethod
    def of(cls, harness: SimHarness) -> Memory:
        pools = harness.built.pools
        blocks = [*pools.kv.values(), *pools.index_keys.values()]
        slots = [*pools.index_tail.values(), *pools.conv.values(), *pools.recurrent.values()]
        assert len(blocks) + len(slots) == len(pools.tensors())
        return cls(
            [x.cpu().reshape(pools.num_blocks, -1).view(torch.uint8) for x in blocks],
            [x.cpu().reshape(pools.num_slots + pools.num_snapshots, -1).view(torch.uint8) for x in slots],
        )


def changed(before: Sequence[torch.Tensor], after: Sequence[torch.Tensor]) -> set[int]:
    """Rows that differ in any of the tensors."""
    rows: set[int] = set()
    for a, b in zip(before, after, strict=True):
        rows |= set((a != b).any(dim=1).nonzero().reshape(-1).tolist())
    return rows


@pytest.mark.parametrize("setting", ["piecewise", "full"])
def test_twenty_replays_leave_parked_and_free_memory_as_it_was(setting: str, tmp_path: Path) -> None:
    """Three sequences decode in a bucket of eight beside a parked one, which then goes on as if nothing had been."""
    oracle = make_model("glm5_next", tmp_path)
    with captured_sizes(BUCKET):
        harness = SimHarness(tmp_path, setting, **EIGHT)
    prompts = (5, 6, 4, 7)
    sequences = random_sequences([p + REPLAYS for p in prompts[:3]] + [prompts[3] + 3], vocab=VOCAB, seed=7)
    own_slots = harness.free_slots[::-1][:4]  # in the order in which the sequences take them
    parked_slot = own_slots[3]

    def schedule() -> Iterator[list[Part]]:
        untouched = Memory.of(harness)
        for number in (3, 0, 1, 2):
            free = set(harness.free_blocks)
            yield [Part(number, prompts[number])]
            if number == 3:
                parked_blocks = free - set(harness.free_blocks)
        before = Memory.of(harness)
        assert parked_slot in changed(untouched.slots, before.slots)
        assert parked_blocks <= changed(untouched.blocks, before.blocks)
        for _ in range(REPLAYS):
            free = set(harness.free_blocks)
            yield decodes(0, 1, 2)
            after = Memory.of(harness)
            slots, blocks = changed(before.slots, after.slots), changed(before.blocks, after.blocks)
            assert set(own_slots[:3]) <= slots <= {*own_slots[:3], SCRATCH_SLOT}
            assert blocks
            assert not blocks & (parked_blocks | set(harness.free_blocks) - {SCRATCH_BLOCK})
        for _ in range(3):
            yield decodes(3)

    rows = harness.run(sequences, schedule())
    steps = harness.graphs.dispatcher.steps
    assert sum(n for mode, n in steps.items() if mode.value == setting) >= REPLAYS
    for got, sequence in zip(rows, sequences, strict=True):
        assert float((got - oracle_logprobs(oracle, sequence)).abs().max()) < PARITY_LOGPROB


# What breaks see


@dataclass
class Sizes:
    """Notes of each break body: its kind, the step's true tokens, the rows of what it was given and of its result."""

    seen: list[tuple[str, int, int, int]]
    backend: SimulatedBackend

    def note(self, kind: str, given: torch.Tensor, result: torch.Tensor | None) -> None:
        inputs = get_forward_context().inputs
        if result is not None:
            assert result.shape[0] == given.shape[0]
            self.backend.expect_written(result)
        self.seen.append((kind, inputs.num_tokens, inputs.mixer_rows, given.shape[0]))


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> Sizes:
    made = Sizes([], SimulatedBackend())
    real_attend, real_kda, real_select = PagedLatentAttention.attend, KimiDeltaAttention._attend, Indexer._select

    def attend(self: PagedLatentAttention, layer: int, query: torch.Tensor, *rest: Any, **keys: Any) -> torch.Tensor:
        result = real_attend(self, layer, query, *rest, **keys)
        made.note("attention", query, result)
        return result

    def kda(self: KimiDeltaAttention, projected: torch.Tensor) -> torch.Tensor:
        result = real_kda(self, projected)
        made.note("KDA", projected, result)
        return result

    def select(self: Indexer, query: torch.Tensor, *rest: Any) -> None:
        real_select(self, query, *rest)
        made.note("indexer", query, None)

    monkeypatch.setattr(PagedLatentAttention, "attend", attend)
    monkeypatch.setattr(KimiDeltaAttention, "_attend", kda)
    monkeypatch.setattr(Indexer, "_select", select)
    return made


def test_breaks_of_mixed_batches_see_true_sizes_at_replay_and_leave_padded_rows_finite(
    sizes: Sizes, tmp_path: Path
) -> None:
    """Static buffers hold NaN before each replay, so what is finite behind it was written by it."""
    oracle = make_model("glm5_next", tmp_path)
    with captured_sizes(BUCKET):
        harness = SimHarness(tmp_path, "piecewise", backend=sizes.backend, **EIGHT)
    at_capture = {(kind, true) for kind, true, *_ in sizes.seen if kind == "indexer"}
    assert ("indexer", BUCKET) in at_capture  # a scratch prefill of the whole bucket: not what replays must see
    sequences = random_sequences((12, 9, 3), vocab=VOCAB, seed=8)
    buffers = harness.graphs.runner.buffers

    def check(tokens: int) -> None:
        seen, sizes.seen = sizes.seen, []
        kinds = ["KDA", "indexer", "attention", "attention"]
        assert seen == [(kind, tokens, tokens, BUCKET) for kind in kinds]
        for name in sorted(set(buffers.names) - {"logits"}):  # those are of uniform decodes
            buffer = buffers.existing(name, buffers.max_rows).cpu()
            assert torch.isfinite(buffer[:BUCKET]).all(), f"{name}: padded rows are not finite"
            if name.endswith("result"):
                assert set(buffer[tokens:BUCKET].reshape(-1).tolist()) <= {0.0}, f"{name}: padded rows are not zero"

    def schedule() -> Iterator[list[Part]]:
        sizes.seen.clear()
        steps = [[Part(0, 3)], [Part(0, 2), Part(1, 3)], [*decodes(0), Part(1, 5)], [*decodes(0), Part(2, 1)]]
        for step in steps:
            yield step
            check(sum(part.length for part in step))
        yield [*decodes(0), Part(2, 2), Part(1, 1)]
        check(4)
        yield [Part(0, 4)]
        check(4)

    rows = harness.run(sequences, schedule())
    for got, sequence in zip(rows, sequences, strict=True):
        assert float((got - oracle_logprobs(oracle, sequence)).abs().max()) < PARITY_LOGPROB


def test_breaks_of_uniform_decodes_cover_the_padding_that_has_no_tokens(sizes: Sizes, tmp_path: Path) -> None:
    """There the shapes follow from the bucket alone: rows behind the true tokens are sequences of no length."""
    make_model("glm5_next", tmp_path)
    with captured_sizes(BUCKET):
        harness = SimHarness(tmp_path, "piecewise", backend=sizes.backend, **EIGHT)
    buffers = harness.graphs.runner.buffers

    def schedule() -> Iterator[list[Part]]:
        for number in range(3):
            yield [Part(number, 2)]
        for _ in range(3):
            sizes.seen.clear()
            yield decodes(0, 1, 2)
            assert sizes.seen == [(kind, 3, BUCKET, BUCKET) for kind in ("KDA", "attention", "attention")]
            for name in buffers.names:
                if not name.startswith("indexer"):  # those are of mixed batches
                    assert torch.isfinite(buffers.existing(name, BUCKET).cpu()).all(), name

    harness.run(random_sequences((5, 5, 5), vocab=VOCAB, seed=8), schedule())


def test_the_returned_hidden_states_are_finite_in_every_row(tmp_path: Path) -> None:
    make_model("kimi_linear", tmp_path)
    with captured_sizes(BUCKET):
        harness = SimHarness(tmp_path, "full_and_piecewise", **EIGHT)
    real, hidden = harness.built.runner.forward, []

    def forward(*arguments: Any) -> StepOutput:
        made = real(*arguments)
        hidden.append(made.hidden.cpu())
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(harness.built.runner, "forward", forward)
        steps = [[Part(0, 5)], [*decodes(0), Part(1, 2)], decodes(0, 1), decodes(1)]
        harness.run(random_sequences((7, 4), vocab=VOCAB, seed=8), steps)
    assert [rows.shape[0] for rows in hidden] == [BUCKET] * 4
    assert all(bool(torch.isfinite(rows).all()) for rows in hidden)


@pytest.mark.parametrize("setting", ["piecewise", "full"])
def test_padding_rows_of_a_decode_choose_no_expert(
    setting: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that a captured batch reads the weights of its tokens' experts alone."""
    make_model("glm5_next", tmp_path)
    real, chosen = mlp.unsummed_experts, {}

    def experts(x: torch.Tensor, *weights: torch.Tensor, ids: torch.Tensor, **named: Any) -> Any:
        if get_forward_context().inputs.uniform:
            chosen.setdefault(ids.shape, []).append(ids)
        return real(x, *weights, ids=ids, **named)

    monkeypatch.setattr(mlp, "unsummed_experts", experts)
    with captured_sizes(BUCKET):
        harness = SimHarness(tmp_path, setting, **EIGHT)
    (all_ids,) = chosen.values()
    last = all_ids[-1]  # nothing behind the last layer's experts writes into its memory

    def schedule() -> Iterator[list[Part]]:
        for number in range(3):
            yield [Part(number, 2)]
        for _ in range(3):
            yield decodes(0, 1, 2)
            ids = last.cpu()
            assert set(ids[3:].flatten().tolist()) == {-1}
            assert bool((ids[:3] >= 0).all())

    harness.run(random_sequences((5, 5, 5), vocab=VOCAB, seed=8), schedule())
