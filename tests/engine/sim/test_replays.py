"""Many replays of the same graphs: with inputs that change, on a starved stream, and beside a churning allocator."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from sidestream.core.cudagraph_mode import CUDAGraphMode
from sidestream.streams.simulated import Order
from tests.engine.harness import Part, oracle_logprobs, random_sequences
from tests.engine.sim.harness import VOCAB, SimHarness, captured_sizes, decodes, make_model, open_sim
from tests.tiny_models import build_oracle, next_layers, save_checkpoint
from tests.tolerances import PARITY_LOGPROB


@pytest.mark.parametrize("setting", ["piecewise", "full"])
def test_fifty_replays_of_sizes_1_2_and_8_beside_a_starved_stream(setting: str, tmp_path: Path) -> None:
    """The first replay and the fiftieth are right, and all between them, whatever the size before was."""
    oracle = make_model("glm_moe_dsa", tmp_path)
    backend = open_sim(Order.STARVED, starved="index groups")
    with captured_sizes(1, 2, 8):
        harness = SimHarness(tmp_path, setting, backend=backend, max_num_seqs=8, max_num_batched_tokens=8)
    decoding = [[0, 1, 2]] * 50 + [[n % 3] for n in range(50)] + [sorted({n % 3, (n + 1) % 3}) for n in range(50)]
    random.Random(0).shuffle(decoding)
    prompt = 3
    lengths = [prompt + sum(number in step for step in decoding) for number in range(3)]
    sequences = random_sequences(lengths, vocab=VOCAB, seed=12)
    schedule = [[Part(number, prompt)] for number in range(3)] + [decodes(*step) for step in decoding]
    rows = harness.run(sequences, schedule)
    assert harness.graphs.dispatcher.steps[CUDAGraphMode(setting)] >= 150
    for got, sequence in zip(rows, sequences, strict=True):
        assert float((got - oracle_logprobs(oracle, sequence)).abs().max()) < PARITY_LOGPROB


def test_a_hundred_replays_beside_a_churning_allocator_equal_eager(tmp_path: Path) -> None:
    """Between replays of chunked prefills blocks of all sizes are allocated, overwritten and released."""
    save_checkpoint(build_oracle("glm5_next", 17, **next_layers("KD")), tmp_path)
    rng = random.Random(3)
    sizes = [rng.choice((2, 4, 4, 7, 8)) for _ in range(100)]
    sequences = random_sequences([sum(sizes[:50]), sum(sizes[50:])], vocab=VOCAB, seed=13)
    settings: dict[str, Any] = {"max_num_seqs": 2, "max_num_batched_tokens": 8, "max_model_len": 512, "num_blocks": 80}
    kept: list[torch.Tensor] = []

    def schedule(*, churn: bool) -> Iterator[list[Part]]:
        order = [(number // 50, size) for number, size in enumerate(sizes)]
        random.Random(4).shuffle(order)
        done = [0, 0]
        for sequence, size in order:
            if churn:
                overwrite()
            yield [Part(sequence, size)]
            done[sequence] += size
        assert done == [len(sequence) for sequence in sequences]

    def overwrite() -> None:
        for _ in range(6):
            shape = rng.choice(((2, 64), (8, 64), (8, 4, 64), (4, 16), (8, 300), (rng.randrange(1, 4000),)))
            kept.append(torch.full(shape, rng.choice((float("nan"), 1e30)), device="sim"))
        for _ in range(5):
            kept.pop(rng.randrange(len(kept)))

    with captured_sizes(2, 4, 8):
        eager = SimHarness(tmp_path, "none", **settings).run(sequences, schedule(churn=False))
        harness = SimHarness(tmp_path, "piecewise", **settings)
    replayed = harness.run(sequences, schedule(churn=True))
    assert harness.graphs.dispatcher.steps[CUDAGraphMode.PIECEWISE] == 100
    assert len(kept) == 100
    for a, b in zip(replayed, eager, strict=True):
        assert torch.equal(a, b)
