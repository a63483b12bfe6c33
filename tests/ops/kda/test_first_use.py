"""A kernel that differs from the plain one, or cannot run, is not used; which one it is, is asked once."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sidestream.ops.kda import decode, first_use

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_use, "_VERDICTS", {})


def test_equal_kernels_agree_and_are_asked_once() -> None:
    calls = []

    def counted(**arguments: Any) -> torch.Tensor:
        calls.append(arguments)
        return decode.decode_step(**arguments)

    assert first_use.agree("ordered", CPU, counted, decode.decode_step)
    assert first_use.agree("ordered", CPU, counted, decode.decode_step)
    assert len(calls) == 1


@pytest.mark.parametrize("part", ["output", "state", "ring"])
def test_what_differs_is_named(part: str) -> None:
    def wrong(**arguments: Any) -> torch.Tensor:
        out = decode.decode_step(**arguments)
        {"output": out, "state": arguments["state"][4], "ring": arguments["conv_state"][12:]}[part].mul_(1.1)
        return out

    with pytest.warns(RuntimeWarning, match=f"{part} of a sample"):
        assert not first_use.agree("ordered", CPU, wrong, decode.decode_step)
    assert not first_use.agree("ordered", CPU, decode.decode_step, decode.decode_step), "the verdict was forgotten"


def test_a_kernel_that_cannot_run_is_not_used() -> None:
    def broken(**arguments: Any) -> torch.Tensor:
        raise RuntimeError("no such instruction")

    with pytest.warns(RuntimeWarning, match="no such instruction"):
        assert not first_use.agree("ordered", CPU, broken, decode.decode_step)
