"""A step's mode is one of three; what chooses between them is a setting."""

from __future__ import annotations

import pytest

from sidestream.core.cudagraph_mode import CUDAGraphMode


def test_a_step_runs_in_one_of_three_modes() -> None:
    assert [mode.name for mode in CUDAGraphMode] == ["NONE", "PIECEWISE", "FULL"]


@pytest.mark.parametrize("mode", CUDAGraphMode)
def test_a_mode_is_known_by_the_setting_that_asks_for_nothing_else(mode: CUDAGraphMode) -> None:
    assert CUDAGraphMode(mode.name.lower()) is mode


@pytest.mark.parametrize("setting", ["full_and_piecewise", "auto", "FULL", ""])
def test_a_setting_that_chooses_by_the_step_is_no_mode(setting: str) -> None:
    with pytest.raises(ValueError, match="is not a valid CUDAGraphMode"):
        CUDAGraphMode(setting)
