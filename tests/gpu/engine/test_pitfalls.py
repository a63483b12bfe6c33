"""Faults that engines of this kind shipped, on a GPU: padding rows, events across graphs, baked temporaries."""

from __future__ import annotations

import pytest
import torch

from sidestream.core.batch import Chunk
from sidestream.engine.build import BuiltEngine, in_graph_mode
from tests.gpu.engine.machine import bundled, prompts, run
from tests.gpu.streams.machine import spin

pytestmark = pytest.mark.gpu

BLOCK = 64


def poison(built: BuiltEngine) -> None:
    built.pools.poison()
    torch.cuda.synchronize()


class Decoder:
    """Prefills sequences into chosen blocks and slots, then decodes them step by step."""

    def __init__(self, built: BuiltEngine, lengths: dict[int, int]) -> None:
        """``lengths``: slot -> prompt tokens; the slot's sequence owns blocks 4 * slot + 1 to 4 * slot + 4."""
        self.built = built
        self.done = dict.fromkeys(lengths, 0)
        for slot, length in lengths.items():
            self.step({slot: length}, decode=False)

    def chunk(self, slot: int, length: int, *, decode: bool) -> Chunk:
        start = self.done[slot]
        blocks = tuple(range(4 * slot + 1, 4 * slot + 5))[: -(-(start + length) // BLOCK)]
        return Chunk(str(slot), start, length, blocks, slot, decode, True)

    def step(self, lengths: dict[int, int], *, decode: bool = True) -> torch.Tensor:
        """Logits of all rows, on the host."""
        runner = self.built.runner
        chunks = [self.chunk(slot, length, decode=decode) for slot, length in lengths.items()]
        ids = [5 + (31 * (chunk.start + i) + 7 * chunk.slot) % 1500 for chunk in chunks for i in range(chunk.length)]
        with runner.on_device():
            logits = runner.logits(runner.forward(chunks, ids), range(len(ids))).cpu()
        for slot, length in lengths.items():
            self.done[slot] += length
        return logits


@pytest.mark.parametrize("mode", ["piecewise", "full"])
def test_padding_rows_leave_parked_and_free_slots_alone(mode: str) -> None:
    built = bundled(mode, max_num_seqs=8)
    live, parked = (2, 4, 5, 7, 8), 3  # five rows in a bucket of eight
    decoder = Decoder(built, dict.fromkeys((*live, parked), 70))
    torch.cuda.synchronize()
    pools = built.pools
    untouched = [slot for slot in range(1, built.num_slots) if slot not in live]
    blocks = [block for block in range(1, 40) if (block - 1) // 4 not in live]

    def watched() -> list[torch.Tensor]:
        states = [state[untouched].cpu() for state in pools.recurrent.values()]
        rings = [
            ring.view(built.num_slots + built.num_snapshots, -1)[untouched].cpu()
            for ring in (*pools.conv.values(), *pools.index_tail.values())
        ]
        rows = [kv.view(built.num_blocks, -1)[blocks].cpu() for kv in pools.kv.values()]
        return [*states, *rings, *rows, *(keys[blocks].cpu() for keys in pools.index_keys.values())]

    before = watched()
    for _ in range(20):
        decoder.step(dict.fromkeys(live, 1))
    torch.cuda.synchronize()
    for one, other in zip(before, watched(), strict=True):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@pytest.mark.parametrize("size", [1, 2, 8])
def test_a_slowed_side_stream_changes_nothing(size: int) -> None:
    """First and fiftieth replay, inputs changed in between; the conversion is held back by a spinning kernel."""
    lengths = {slot: 90 + 7 * slot for slot in range(1, size + 1)}
    reference = bundled("none", max_num_seqs=size)
    expected = Decoder(reference, lengths)
    wanted = [expected.step(dict.fromkeys(lengths, 1)) for _ in range(50)]
    built = in_graph_mode(reference, "piecewise")
    poison(built)
    for group in built.runner.attention.groups:
        resolver = group.resolver

        class Slowed:
            def resolve(self, *args: object, inner: object = resolver, **kwargs: object) -> None:
                spin(400_000)
                inner.resolve(*args, **kwargs)  # type: ignore[attr-defined]

        group.resolver = Slowed()
    decoder = Decoder(built, lengths)
    for step, want in enumerate(wanted):
        assert torch.equal(decoder.step(dict.fromkeys(lengths, 1)), want), f"step {step}"


@pytest.mark.parametrize("mode", ["piecewise", "full"])
def test_memory_churn_between_replays_changes_nothing(mode: str) -> None:
    """Temporaries baked into a graph would be overwritten by what others allocate between its replays."""
    reference = bundled("none", max_num_seqs=4, max_num_batched_tokens=64)

    def hundred(built: BuiltEngine, *, churn: bool) -> list[torch.Tensor]:
        poison(built)
        decoder = Decoder(built, {1: 40, 2: 55})
        decoder.done[3] = 0
        results, kept = [], []
        for step in range(100):
            if churn:
                kept.append(torch.full((1 + step * 7919 % 4_000_000,), float("nan"), device="cuda"))
                if step % 3 == 0:
                    kept.clear()
            if step % 10 == 5:
                results.append(decoder.step({3: 16}, decode=False))
            results.append(decoder.step({1: 1, 2: 1}))
        return results

    expected = hundred(reference, churn=False)
    got = hundred(in_graph_mode(reference, mode), churn=True)
    for step, (one, other) in enumerate(zip(got, expected, strict=True)):
        assert torch.equal(one, other), f"step {step}"


def test_a_mixed_batch_leaves_no_padded_row_unwritten() -> None:
    """With static buffers poisoned before each replay, an unwritten padded row would turn up as NaN."""
    built = bundled("piecewise", max_num_seqs=4, max_num_batched_tokens=32)
    assert built.runner.graphs is not None
    decoder = Decoder(built, {1: 20, 2: 9})
    runner = built.runner
    chunks = [decoder.chunk(1, 1, decode=True), decoder.chunk(2, 5, decode=False)]
    with runner.on_device():
        hidden = runner.forward(chunks, [9, 8, 7, 6, 5, 4]).hidden.cpu()
    assert hidden.shape[0] == 8
    assert torch.isfinite(hidden).all()


def test_requests_of_all_lengths_in_both_orders() -> None:
    asked = prompts(9, 500, seed=3, vocab=1536)
    built = bundled("full_and_piecewise", max_num_seqs=3, max_num_batched_tokens=64, num_blocks=24, max_model_len=1024)
    got = run(built, asked, max_tokens=20)
    assert built.runner.graphs is not None
    assert not built.runner.graphs.dispatcher.fallbacks
    assert run(in_graph_mode(built, "none"), asked, max_tokens=20) == got
