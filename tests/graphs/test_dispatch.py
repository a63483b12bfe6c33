"""Which graph a step gets: all settings, the padding they share, fallbacks with their reasons."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidestream.config.resolved import CUDAGRAPH_MODES
from sidestream.core.cudagraph_mode import CUDAGraphMode
from sidestream.errors import ConfigError
from sidestream.graphs.dispatch import (
    CUDAGRAPH_SETTINGS,
    NOT_UNIFORM,
    TOO_LARGE,
    GraphDispatcher,
    GraphKey,
    StepPlan,
)

NONE, PIECEWISE, FULL = CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL


def dispatcher(setting: str, *, largest: int | None = 16) -> GraphDispatcher:
    return GraphDispatcher(setting, max_num_seqs=4, max_num_batched_tokens=32, max_capture_tokens=largest)


@pytest.mark.parametrize(
    ("setting", "decode", "mixed"),
    [
        ("none", NONE, NONE),
        ("piecewise", PIECEWISE, PIECEWISE),
        ("full", FULL, NONE),
        ("full_and_piecewise", FULL, PIECEWISE),
    ],
)
def test_every_setting(setting: str, decode: CUDAGraphMode, mixed: CUDAGraphMode) -> None:
    chosen = dispatcher(setting)
    assert chosen.plan(3, uniform=True) == StepPlan(decode, GraphKey(4, 1))
    assert chosen.plan(3, uniform=False) == StepPlan(mixed, GraphKey(4, 0))
    assert chosen.plan(9, uniform=False) == StepPlan(mixed, GraphKey(16, 0))
    assert chosen.plan(17, uniform=False) == StepPlan(NONE, GraphKey(24, 0))
    assert sum(chosen.steps.values()) == 4
    assert chosen.steps[decode] >= 1


def test_the_settings_are_those_of_the_configuration() -> None:
    assert tuple(CUDAGRAPH_SETTINGS) == CUDAGRAPH_MODES


@given(st.integers(1, 32), st.booleans())
def test_padding_and_key_are_the_same_in_every_setting(tokens: int, uniform: bool) -> None:
    uniform = uniform and tokens <= 4
    keys = {dispatcher(setting).plan(tokens, uniform=uniform).key for setting in CUDAGRAPH_SETTINGS}
    assert len(keys) == 1
    assert keys.pop().tokens >= tokens


@given(
    st.sampled_from(sorted(CUDAGRAPH_SETTINGS)),
    st.integers(1, 40),
    st.integers(1, 300),
    st.none() | st.integers(1, 300),
    st.data(),
)
def test_what_is_planned_with_a_graph_was_captured(
    setting: str, seqs: int, tokens: int, largest: int | None, data: st.DataObject
) -> None:
    tokens = max(tokens, seqs)
    chosen = GraphDispatcher(setting, max_num_seqs=seqs, max_num_batched_tokens=tokens, max_capture_tokens=largest)
    captured = chosen.captures()
    assert len(set(captured)) == len(captured)
    for _ in range(5):
        uniform = data.draw(st.booleans())
        plan = chosen.plan(data.draw(st.integers(1, seqs if uniform else tokens)), uniform=uniform)
        assert plan.mode is NONE or plan in captured
        assert plan.key.uniform == uniform
    graphless = chosen.steps[NONE] if setting != "none" else 0
    assert sum(chosen.fallbacks.values()) == graphless  # each step without the graph that was asked for has a reason


def test_captures_come_largest_first_and_stop_at_the_largest_to_capture() -> None:
    plans = dispatcher("full_and_piecewise").captures()
    tokens = [plan.key.tokens for plan in plans]
    assert tokens == sorted(tokens, reverse=True) == [16, 8, 4, 4, 2, 2, 1, 1]
    assert [plan.key.tokens for plan in plans if plan.mode is FULL] == [4, 2, 1]
    assert all(plan.key.uniform is (plan.mode is FULL) for plan in plans)
    assert dispatcher("none").captures() == ()
    assert {plan.mode for plan in dispatcher("full").captures()} == {FULL}
    piecewise = dispatcher("piecewise", largest=None).captures()
    assert piecewise[0].key.tokens == 32
    assert {plan.key.query_length for plan in piecewise} == {0, 1}


def test_fallbacks_are_counted_with_their_reason() -> None:
    chosen = dispatcher("full")
    for tokens, uniform in ((4, True), (4, False), (20, False)):
        chosen.plan(tokens, uniform=uniform)
    assert dict(chosen.fallbacks) == {NOT_UNIFORM: 2}
    assert dict(chosen.steps) == {FULL: 1, NONE: 2}
    for setting in ("piecewise", "full_and_piecewise"):
        chosen = dispatcher(setting)
        for tokens, uniform in ((4, True), (16, False), (17, False), (32, False)):
            chosen.plan(tokens, uniform=uniform)
        assert dict(chosen.fallbacks) == {TOO_LARGE: 2}
        assert chosen.steps[NONE] == 2
    chosen = dispatcher("none")
    chosen.plan(4, uniform=False)
    assert not chosen.fallbacks  # nothing else was asked for


def test_a_step_beyond_the_limits_is_a_bug() -> None:
    with pytest.raises(AssertionError, match="a step of 33 tokens was scheduled, the limit is 32"):
        dispatcher("none").plan(33, uniform=False)
    with pytest.raises(AssertionError, match="a step of 5 tokens was scheduled, the limit is 4"):
        dispatcher("none").plan(5, uniform=True)


def test_an_unknown_setting_is_refused() -> None:
    with pytest.raises(ConfigError, match="cudagraph_mode is 'fast', allowed are 'none', 'piecewise'"):
        dispatcher("fast")
