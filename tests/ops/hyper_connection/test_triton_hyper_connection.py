"""The Triton kernels of hyper-connections, interpreted where there is no GPU, against the formula."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from sidestream.ops.hyper_connection import reference, triton_post, triton_post_pre, triton_pre
from sidestream.ops.hyper_connection.triton_pre import Launch
from tests.ops.triton_mode import DEVICE, INTERPRETED
from tests.tolerances import BF16_STEPS, FP32_ROUNDING

ONE_ROW = Launch(block=16, shares=4, depth=16, warps=4, finish_warps=4)
ALONE = Launch(block=1, shares=8, depth=32, warps=4, finish_warps=4)
MANY_ROWS = Launch(block=16, shares=2, depth=64, warps=4, finish_warps=4, sinkhorn_rows=8)
FACTORS = replace(ONE_ROW, factors=True)
MANY_FACTORS = replace(MANY_ROWS, factors=True)
BF16 = 2 * BF16_STEPS if INTERPRETED else BF16_STEPS
"""The collapse, its norm and the weight round in turn; the interpreter cuts off instead."""
LAUNCHES = {
    ONE_ROW: "one row",
    ALONE: "row by row",
    MANY_ROWS: "many rows",
    FACTORS: "one row by factors",
    MANY_FACTORS: "many rows by factors",
}
DTYPES = [torch.float32, torch.bfloat16]


def inputs(tokens: int, hidden: int, dtype: torch.dtype, *, spread: float = 1.0) -> dict[str, Any]:
    """``spread`` sharpens the mix: large is near a permutation, slow for Sinkhorn."""
    fn = torch.randn(24, 4 * hidden) / (4 * hidden) ** 0.5
    fn[8:] *= spread
    made = {"streams": torch.randn(tokens, 4, hidden).to(dtype), "fn": fn, "base": torch.randn(24)}
    made["norm_weight"] = (torch.rand(2, hidden) + 0.5).to(dtype)
    on_device = {name: tensor.to(DEVICE) for name, tensor in made.items()}
    return {**on_device, "norm_eps": 1e-5, "eps": 1e-6, "iters": 20}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("launch", LAUNCHES, ids=LAUNCHES.values())
@pytest.mark.parametrize(("tokens", "hidden", "spread"), [(1, 24, 1.0), (3, 32, 8.0), (9, 40, 1.0)])
def test_pre_equals_the_formula(tokens: int, hidden: int, spread: float, launch: Launch, dtype: torch.dtype) -> None:
    made = inputs(tokens, hidden, dtype, spread=spread)
    assert triton_pre.takes(made["streams"], made["fn"], made["base"], made["norm_weight"])
    got = triton_pre.hyper_connection_pre(**made, launch=launch)
    want = reference.hyper_connection_pre(**made)
    bound = 4 * FP32_ROUNDING if dtype == torch.float32 else BF16
    torch.testing.assert_close(got[0], want[0], rtol=bound, atol=4 * FP32_ROUNDING)
    for name, a, b in zip(("post", "mix"), got[1:], want[1:], strict=True):
        assert a.is_contiguous()
        torch.testing.assert_close(a, b, rtol=0, atol=FP32_ROUNDING * spread, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("launch", [ONE_ROW, FACTORS, MANY_FACTORS], ids=["matrix", "factors", "factors of many rows"])
def test_streams_that_all_mix_into_one(launch: Launch) -> None:
    """Rows of the mix that columns contradict: what these are divided by goes to 10^5, and to 10^-5."""
    made = inputs(3, 16, torch.float32)
    made["base"][8:] = torch.tensor(
        [90.0, 0.0, 0.0, 0.0, 90.0, 20.0, 0.0, 0.0, 90.0, 0.0, 0.0, 0.0, 0.0, 0.0, 90.0, 0.0]
    )
    got = triton_pre.hyper_connection_pre(**made, launch=launch)
    torch.testing.assert_close(got[2], reference.hyper_connection_pre(**made)[2], rtol=0, atol=FP32_ROUNDING)


@pytest.mark.parametrize("iters", [1, 2])
def test_columns_are_normalised_last(iters: int) -> None:
    """And every sum has its eps, here a large one."""
    made = {**inputs(5, 16, torch.float32), "eps": 0.05, "iters": iters}
    for launch in (ONE_ROW, MANY_ROWS, FACTORS, MANY_FACTORS):
        got = triton_pre.hyper_connection_pre(**made, launch=launch)
        for a, b in zip(got, reference.hyper_connection_pre(**made), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=4 * FP32_ROUNDING)


@pytest.mark.parametrize("launch", LAUNCHES, ids=LAUNCHES.values())
def test_garbage_in_one_row_stays_there(launch: Launch) -> None:
    made = inputs(6, 24, torch.float32)
    clean = triton_pre.hyper_connection_pre(**made, launch=launch)
    made["streams"][[0, 4]] = torch.nan
    dirty = triton_pre.hyper_connection_pre(**made, launch=launch)
    for a, b in zip(clean, dirty, strict=True):
        assert torch.equal(a[[1, 2, 3, 5]], b[[1, 2, 3, 5]])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "hidden"), [(1, 24), (3, 70)])
def test_post_equals_the_formula(tokens: int, hidden: int, dtype: torch.dtype) -> None:
    """With an output that is a slice, and strided weights, as other implementations of the collapse return them."""
    streams = torch.randn(tokens, 4, hidden).to(DEVICE, dtype)
    output = torch.randn(tokens, hidden + 4).to(DEVICE, dtype)[:, 3 : 3 + hidden]
    post = torch.rand(tokens, 9, device=DEVICE)[:, 2:6].unsqueeze(2)
    mix = torch.rand(4, tokens, 4, device=DEVICE).permute(1, 2, 0)
    if INTERPRETED and dtype == torch.bfloat16:
        post, mix = post.to(dtype).float(), mix.to(dtype).float()  # the interpreter would cut them off
    assert triton_post.takes(streams, output)
    got = triton_post.hyper_connection_post(streams, output, post, mix=mix, launch=triton_post.Launch(32, 4))
    want = reference.hyper_connection_post(streams, output, post, mix=mix)
    assert got.dtype == dtype
    bound = FP32_ROUNDING if dtype == torch.float32 else BF16_STEPS
    torch.testing.assert_close(got, want, rtol=bound, atol=FP32_ROUNDING)


def test_what_the_kernels_take() -> None:
    made = inputs(2, 16, torch.float32)
    others = (made["fn"], made["base"], made["norm_weight"])
    assert not triton_pre.takes(made["streams"][:, :3], *others)
    assert not triton_pre.takes(made["streams"].transpose(0, 1).contiguous().transpose(0, 1), *others)
    assert not triton_pre.takes(made["streams"][:0], *others)
    assert not triton_post.takes(made["streams"], made["streams"][:, 0].bfloat16())
    for rows in (1, 17, 129, 8192):
        launch = triton_pre.launch_for(rows, 16_384)
        assert launch.block * triton_pre.COLUMNS <= 4096
        assert launch.shares & (launch.shares - 1) == 0
        assert launch.factors == (rows <= 16)  # as timed on a GPU


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block", [1, 16], ids=["row by row", "blocks"])
@pytest.mark.parametrize(("tokens", "hidden"), [(1, 64), (3, 128), (19, 64)])
def test_post_and_the_next_pre_in_two_kernels(tokens: int, hidden: int, block: int, dtype: torch.dtype) -> None:
    """Streams are those of the kernel that only mixes, bit for bit, and the collapse is theirs."""
    made = inputs(tokens, hidden, dtype)
    output = torch.randn(tokens, hidden + 4).to(DEVICE, dtype)[:, 3 : 3 + hidden]
    post = torch.rand(tokens, 9, device=DEVICE)[:, 2:6].unsqueeze(2)
    mix = torch.rand(4, tokens, 4, device=DEVICE).permute(1, 2, 0)
    launch = Launch(block=block, shares=2, depth=2 * hidden, warps=4, finish_warps=4, factors=block > 1)
    streams = made.pop("streams")
    got = triton_post_pre.hyper_connection_post_pre(streams, output, post, mix=mix, **made, launch=launch)
    want = triton_post.hyper_connection_post(streams, output, post, mix=mix, launch=triton_post.Launch(32, 4))
    assert torch.equal(got[0], want)
    collapsed = reference.hyper_connection_pre(got[0], **made)
    bound = 4 * FP32_ROUNDING if dtype == torch.float32 else BF16
    torch.testing.assert_close(got[1], collapsed[0], rtol=bound, atol=4 * FP32_ROUNDING)
    for a, b in zip(got[2:], collapsed[1:], strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=FP32_ROUNDING)


@pytest.mark.parametrize("block", [1, 16], ids=["row by row", "blocks"])
def test_garbage_in_one_row_stays_there_across_both(block: int) -> None:
    made = inputs(6, 64, torch.float32)
    streams, output = made.pop("streams"), torch.randn(6, 64, device=DEVICE)
    post, mix = torch.rand(6, 4, 1, device=DEVICE), torch.rand(6, 4, 4, device=DEVICE)
    launch = Launch(block=block, shares=4, depth=64, warps=4, finish_warps=4)
    clean = triton_post_pre.hyper_connection_post_pre(streams, output, post, mix=mix, **made, launch=launch)
    output[[0, 4]] = torch.nan
    dirty = triton_post_pre.hyper_connection_post_pre(streams, output, post, mix=mix, **made, launch=launch)
    for a, b in zip(clean, dirty, strict=True):
        assert torch.equal(a[[1, 2, 3, 5]], b[[1, 2, 3, 5]])


def test_no_streams_are_read_ahead_that_may_still_be_written() -> None:
    """Kernels that mix and multiply let others start before streams are whole, unless they are late."""
    for rows in range(1, 140):
        ahead = triton_post.launch_for(rows).ahead
        joint = triton_post_pre.launch_for(rows, 4096)
        assert not ahead or rows > triton_post_pre.MOST_ROWS or joint.late


def test_what_both_at_once_take() -> None:
    assert triton_post_pre.launch_for(1, 4096).shares == 64
    for rows in (1, 2, 3, 16, 17, 128):
        launch = triton_post_pre.launch_for(rows, 4096)
        assert launch.depth * launch.shares == 4 * 4096
        assert launch.block == 1 or launch.depth >= triton_post_pre.SHALLOWEST
    most = triton_post_pre.MOST_ROWS
    # too many rows; columns that shares do not divide; a share that is no power of two
    for hidden, rows, taken in (
        (4096, 1, True),
        (4096, most, True),
        (4096, most + 1, False),
        (96, 1, False),
        (192, 1, False),
    ):
        made = inputs(rows, hidden, torch.bfloat16)
        given = (made["fn"], made["base"], made["norm_weight"])
        assert triton_post_pre.takes(made["streams"], made["streams"][:, 0], *given) == taken
