"""Hyper-connections that sum the experts themselves against the same behind a sum of its own, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sidestream.ops.hyper_connection import torch_impl, triton_post, triton_post_pre
from sidestream.ops.hyper_connection.triton_pre import Launch
from sidestream.ops.moe import ExpertSum, device_impl, settled, triton_grouped
from sidestream.ops.moe.triton_sum import summed
from tests.ops.triton_mode import DEVICE

HIDDEN, TOP_K = 64, 3
DTYPES = [torch.float32, torch.bfloat16]
SIZES = [(1, 0), (2, 1), (3, 2), (16, 1), (17, 0)]
"""Rows and shared experts."""


def pending(rows: int, num_shared: int, dtype: torch.dtype, *, stored: torch.dtype = torch.float32) -> ExpertSum:
    """A row in five chooses less, the last two nobody; what nobody chose was never written."""
    ids = torch.rand(rows, 8).argsort(dim=1)[:, :TOP_K].contiguous()
    ids[torch.rand(rows, TOP_K) < 0.2] = -1
    if rows > 2:
        ids[-2:] = -1
    partial = torch.randn(rows * (TOP_K + num_shared), HIDDEN).to(stored)
    partial[: rows * TOP_K][ids.flatten() < 0] = torch.nan
    parts = (partial.to(DEVICE), torch.rand(rows, TOP_K).to(DEVICE), ids.to(DEVICE))
    return ExpertSum(*parts, num_shared, dtype)


def around(rows: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """streams, post, mix."""
    streams = torch.randn(rows, 4, HIDDEN).to(DEVICE, dtype)
    return streams, torch.rand(rows, 4, 1, device=DEVICE), torch.rand(rows, 4, 4, device=DEVICE)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "num_shared"), [*SIZES, (64, 1), (66, 2)])
def test_streams_are_those_of_a_sum_apart(rows: int, num_shared: int, dtype: torch.dtype) -> None:
    output = pending(rows, num_shared, dtype, stored=torch.float32 if rows <= 64 else dtype)
    streams, post, mix = around(rows, dtype)
    assert triton_post.takes(streams, output)
    named: dict[str, Any] = {"mix": mix, "launch": triton_post.Launch(HIDDEN, 4)}
    got = triton_post.hyper_connection_post(streams, output, post, **named)
    assert torch.isfinite(got).all()
    assert torch.equal(got, triton_post.hyper_connection_post(streams, summed(output), post, **named))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block", [1, 16], ids=["row by row", "blocks"])
@pytest.mark.parametrize(("rows", "num_shared"), SIZES)
def test_so_are_their_products(rows: int, num_shared: int, block: int, dtype: torch.dtype) -> None:
    output, (streams, post, mix) = pending(rows, num_shared, dtype), around(rows, dtype)
    fn = torch.randn(24, 4 * HIDDEN, device=DEVICE)
    launch = Launch(block=block, shares=2, depth=2 * HIDDEN, warps=4, finish_warps=4)
    got = triton_post_pre.mixed(streams, output, post, fn, mix=mix, launch=launch)
    want = triton_post_pre.mixed(streams, summed(output), post, fn, mix=mix, launch=launch)
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1][..., :25], want[1][..., :25])


@pytest.mark.parametrize("num_shared", [0, 1, 2])
def test_a_sum_is_the_formulas(num_shared: int) -> None:
    """Any device's kernel against plain torch, which a pair at a time agrees with."""
    output = pending(5, num_shared, torch.float32)
    host = ExpertSum(output.partial.cpu(), output.weights.cpu(), output.ids.cpu(), num_shared, torch.float32)
    want = torch.zeros(5, HIDDEN)
    for token in range(5):
        for place in range(TOP_K):
            if host.ids[token, place] >= 0:
                want[token] += host.weights[token, place] * host.partial[token * TOP_K + place]
        for shared in range(num_shared):
            want[token] += host.partial[5 * TOP_K + shared * 5 + token]
    assert torch.equal(settled(host), want)
    assert torch.equal(summed(output).cpu(), want)


@pytest.mark.parametrize("dtype", DTYPES)
def test_plain_torch_settles_what_it_is_given(dtype: torch.dtype) -> None:
    output, (streams, post, mix) = pending(4, 1, dtype), around(4, dtype)
    got = torch_impl.hyper_connection_post(streams, output, post, mix=mix)
    assert torch.equal(got, torch_impl.hyper_connection_post(streams, settled(output), post, mix=mix))


def test_a_sum_of_another_dtype_is_not_taken() -> None:
    streams = around(2, torch.bfloat16)[0]
    assert triton_post.takes(streams, pending(2, 1, torch.bfloat16))
    assert not triton_post.takes(streams, pending(2, 1, torch.float32))


def test_few_tokens_leave_their_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    """One has no sum of its own; terms of many would take much memory for long."""
    monkeypatch.setattr(device_impl, "_suits_triton", lambda x, w13, w2: True)
    w13, w2 = torch.randn(6, 64, HIDDEN, device=DEVICE), torch.randn(6, HIDDEN, 32, device=DEVICE)
    left = {}
    for rows in (1, 2, 5, 64, 65):
        if rows > 5:
            for name in ("unsummed", "experts"):
                monkeypatch.setattr(triton_grouped, name, lambda *parts, name=name, **named: name)
        choice = {"weights": torch.rand(rows, 2), "ids": torch.rand(rows, 5).argsort(dim=1)[:, :2].contiguous()}
        choice["ids"][-1, 1] = -1
        named: dict[str, Any] = {name: part.to(DEVICE) for name, part in choice.items()}
        named |= {"num_shared": 1, "swiglu_limit": 1.0}
        x = torch.randn(rows, HIDDEN, device=DEVICE)
        got = device_impl.unsummed_where_possible(x, w13, w2, **named)
        left[rows] = got == "unsummed" if isinstance(got, str) else isinstance(got, ExpertSum)
        if rows <= 5:
            assert torch.equal(settled(got), device_impl.grouped_where_possible(x, w13, w2, **named))
    assert left == {1: False, 2: True, 5: True, 64: True, 65: False}
