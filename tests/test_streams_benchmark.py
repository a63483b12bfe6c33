"""What the benchmark of streams measures is in order, and does what it says, on the simulated device."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from benchmarks import breaks_gpu, streams_gpu
from sidestream.config.engine import EngineConfig
from sidestream.engine.build import build_engine
from sidestream.engine.bundled import bundled_model
from sidestream.streams import Policy, Streams, WaitKind
from sidestream.streams.simulated import SimulatedBackend

FORMS = [(rungs, False) for rungs in range(1, 7)] + [(2, True), (6, True)]


@pytest.mark.parametrize(("rungs", "full"), FORMS)
def test_a_ladder_does_the_first_rungs_of_every_break(rungs: int, full: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(breaks_gpu, "BREAKS", 3)
    backend = SimulatedBackend(seed=rungs)
    streams = Streams(backend)
    with torch.inference_mode(), backend.use(streams.compute):
        ladder = breaks_gpu.Ladder(streams, streams.new_stream("side"), "ladder", rungs=rungs, busy=0)
        step = ladder.captured(full=full)
        backend.synchronize()
        before = float(ladder.x.cpu()[0]), float(ladder.y.cpu()[0])
        for _ in range(4):
            step()
        backend.synchronize()
        segments, kernels = float(ladder.x.cpu()[0]) - before[0], float(ladder.y.cpu()[0]) - before[1]
    backend.check()
    assert segments == 4 * (2 * 3 + 1)
    assert kernels == (4 * 3 if rungs > 1 else 0)
    there, back = (sum((pair[i].waits for pair in ladder.handoffs), Counter()) for i in range(2))
    crossed = 0 if full else (1 + 4) * 3  # at capture, since the break runs there too, and in four replays
    assert there[WaitKind.EXTERNAL_EVENT] == (crossed if rungs > 3 else 0)
    assert back[WaitKind.EVENT] == (3 + crossed if rungs > 5 else 0)  # and in the run that loads the kernels


@pytest.mark.parametrize("policy", list(Policy))
@pytest.mark.parametrize("conversion", [None, 0])
def test_steps_of_index_groups_are_in_order(
    policy: Policy, conversion: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams_gpu, "spin", lambda cycles: None)
    monkeypatch.setattr(streams_gpu, "GROUPS", 2)
    backend = SimulatedBackend(seed=1)
    streams = Streams(backend, policy=policy)
    with torch.inference_mode():
        made = streams_gpu.GroupSteps(streams, streams.new_stream("side"), 0, topk=1, behind=1, conversion=conversion)
        step = made.captured(full=False)
        for _ in range(4):
            step()
        backend.synchronize()
        seen, chosen = made.seen.cpu(), made.groups[-1].logical_topk_indices.cpu()
    backend.check()
    assert torch.equal(seen, chosen.long())


def test_sequences_of_a_decode_step_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that are alike choose the same experts, so a step reads fewer weights than in service."""
    config = EngineConfig(device="cpu", dtype="float32", max_num_seqs=4, max_model_len=256, max_num_batched_tokens=64)
    built = build_engine(bundled_model(), config)
    for tensor in built.pools.tensors():
        tensor.zero_()
    seen: list[torch.Tensor] = []
    real = built.runner.logits
    monkeypatch.setattr(built.runner, "logits", lambda *given: seen.append(real(*given)))
    streams_gpu.decode_step(built, 4, 64)()
    assert len(seen) == 1
    assert len(torch.unique(seen[0], dim=0)) == 4
