"""How much context the prefills of one step may have behind them: the largest first turn, nobody starves."""

from __future__ import annotations

import pytest

from sidestream.scheduler.fair_share import within_limit
from sidestream.scheduler.scheduler import Scheduler
from tests.scheduler.fake_engine import make_config, make_request


@pytest.mark.parametrize(
    ("sizes", "ahead", "limit", "chosen"),
    [
        ([5, 5, 5], [True] * 3, 10, [0, 1]),
        ([50, 1], [True] * 2, 10, [0]),  # the first in any case
        ([5, 9, 5], [True] * 3, 10, [0, 2]),  # one that does not fit lets others by
        ([5, 9, 1], [False] * 3, 10, [0]),  # but none that waits behind it
        ([5, 9, 1, 2], [True, False, False, True], 10, [0, 3]),
        ([0, 0, 0], [False] * 3, 0, [0, 1, 2]),
        ([], [], 4, []),
    ],
)
def test_as_many_as_fit(sizes: list[int], ahead: list[bool], limit: int, chosen: list[int]) -> None:
    assert within_limit(sizes, ahead=ahead, limit=limit) == chosen


@pytest.mark.parametrize("limit", [13, 20, None])
def test_long_prompts_take_turns_and_all_end(limit: int | None) -> None:
    """Four prompts of up to 52 tokens, 13 blocks: no step has more context behind its prefills than the limit, all are
    served, and none waits for more steps than the three others take."""
    scheduler = Scheduler(make_config(max_prefill_context=limit))
    for i in range(4):
        scheduler.add(make_request(f"r{i}", 52 - i, max_tokens=3))
    idle: dict[str, int] = {}
    together = 0
    while (step := scheduler.schedule()) is not None:
        prefills = [chunk for chunk in step.chunks if not chunk.is_decode]
        context = sum(chunk.start // 4 for chunk in prefills)
        assert limit is None or len(prefills) == 1 or context <= limit
        together = max(together, context)
        served = {chunk.request_id for chunk in step.chunks}
        for name in [f"r{i}" for i in range(4)]:
            idle[name] = 0 if name in served else idle.get(name, 0) + 1
            running = scheduler.num_running and idle[name]
            assert not (name in served and running) or idle[name] <= 4
        scheduler.commit(step, {chunk.request_id: 7 for chunk in step.chunks if chunk.samples})
        scheduler.check_integrity()
    assert not scheduler.has_work()
    assert limit is not None or together > 20
