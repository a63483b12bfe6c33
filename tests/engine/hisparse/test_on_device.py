"""HiSparse on the simulated device: the same bits in every graph mode, and no hazard on any stream."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sidestream.streams.simulated import Order
from tests.engine.harness import random_sequences
from tests.engine.hisparse.pressed import PRESSED, host_memory, long_and_short, open_blocks, placement_of
from tests.engine.sim.harness import SETTINGS, VOCAB, SimHarness, make_model, open_sim

LENGTHS = [104, 60]
SIM = {"max_num_seqs": 2, "max_capture_tokens": 4, "max_model_len": 120, "num_blocks": 7}


@pytest.mark.parametrize("model", ["glm5_next", "glm_moe_dsa"])
def test_every_mode_gives_the_bits_of_an_engine_without_pressure(model: str, tmp_path: Path) -> None:
    make_model(model, tmp_path)
    sequences = random_sequences(LENGTHS, vocab=VOCAB, seed=6)
    schedule = long_and_short(LENGTHS, 90)
    settings = PRESSED | SIM
    want = SimHarness(tmp_path, "none", **settings | {"num_blocks": 60}).run(sequences, schedule)
    host = {"hisparse_host_memory": host_memory(tmp_path, 60)}
    for seed, mode in enumerate(SETTINGS):
        backend = open_sim(Order.RANDOM, seed=seed)
        pressed = SimHarness(tmp_path, mode, backend=backend, **settings | host)
        open_blocks(pressed, seed)
        got = pressed.run(sequences, schedule)
        placement = placement_of(pressed.built)
        assert placement.num_spilled > 10
        for a, b in zip(got, want, strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize(("mode", "factor"), [("piecewise", 1), ("full", 1), ("full", 4)])
def test_hot_slots_of_exactly_top_k_and_of_many(mode: str, factor: int, tmp_path: Path) -> None:
    make_model("glm_moe_dsa", tmp_path)
    lengths = [64, 31]
    sequences = random_sequences(lengths, vocab=VOCAB, seed=8)
    schedule = long_and_short(lengths, 50)
    settings = PRESSED | SIM
    want = SimHarness(tmp_path, "none", **settings | {"num_blocks": 60}).run(sequences, schedule)
    host = {"hisparse_host_memory": host_memory(tmp_path, 60), "hisparse_hot_factor": factor}
    pressed = SimHarness(tmp_path, mode, backend=open_sim(Order.RANDOM, seed=factor), **settings | host)
    open_blocks(pressed, factor)
    got = pressed.run(sequences, schedule)
    assert placement_of(pressed.built).num_spilled > 4
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(("starved", "mode"), [("spills", "full"), ("index groups", "piecewise"), ("compute", "none")])
def test_a_stream_that_gets_nothing_before_it_must(starved: str, mode: str, tmp_path: Path) -> None:
    """Copies that run as late as they may, and then steps that do: the same bits."""
    make_model("glm_moe_dsa", tmp_path)
    lengths = [60, 25]
    sequences = random_sequences(lengths, vocab=VOCAB, seed=9)
    schedule = long_and_short(lengths, 46)
    settings = PRESSED | SIM
    want = SimHarness(tmp_path, "none", **settings | {"num_blocks": 60}).run(sequences, schedule)
    host = {"hisparse_host_memory": host_memory(tmp_path, 60), "hisparse_watermark": 0.3}
    pressed = SimHarness(tmp_path, mode, backend=open_sim(Order.STARVED, starved=starved), **settings | host)
    open_blocks(pressed, 3)
    got = pressed.run(sequences, schedule)
    assert placement_of(pressed.built).num_spilled > 4
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)
