"""Linear layers of few rows on a GPU at the sizes of real models: right, repeatable, captured, row by row."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from sidestream.ops.linear import linear, logits, triton_linear, triton_stream
from sidestream.ops.linear.launches import Launch, Stream, launch_for, stream_for
from tests.tolerances import BF16_OUTPUT

pytestmark = pytest.mark.gpu

SIZES = [
    (24896, 4096),
    (4096, 8192),
    (2336, 4096),
    (20480, 1536),
    (4096, 16384),
    (4096, 12288),
    (32768, 4096),
    (7168, 2048),
    (1000, 96),
]
ROWS = [1, 2, 5, 8, 16, 17, 32, 33, 64]
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
BY_KERNELS = [
    (rows, *size)
    for size in SIZES
    for rows in (2, 8, 16, 17, 33, 64)
    if launch_for(rows, *size) or (HOPPER and stream_for(rows, *size))
]


def draw(*shape: int, spread: float = 1.0) -> torch.Tensor:
    """Weights before x: a product may read its weight while the kernel in front ends, see ``triton_stream.linear``."""
    return torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_(0, spread)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(6)


@pytest.fixture
def streamed(monkeypatch: pytest.MonkeyPatch) -> list[Stream]:
    """Launches of ``triton_stream`` as the operator makes them."""
    launches, run = list[Stream](), triton_stream.linear

    def noted(*args: Any, launch: Stream, **how: Any) -> torch.Tensor:
        launches.append(launch)
        return run(*args, launch=launch, **how)

    monkeypatch.setattr(triton_stream, "linear", noted)
    return launches


def expected(rows: int, out_features: int, in_features: int) -> list[Stream]:
    """What the table says, where there is a copy engine."""
    launch = stream_for(rows, out_features, in_features)
    return [launch] if launch is not None and HOPPER else []


def product(x: torch.Tensor, weight: torch.Tensor, launch: Launch | Stream, out: torch.Tensor) -> torch.Tensor:
    module: Any = triton_stream if isinstance(launch, Stream) else triton_linear
    return module.linear(x, weight, None, launch=launch, out=out)  # type: ignore[no-any-return]


def check(got: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
    """Against fp64. Matrix units add 16 products at a time and cut each sum, of at most 4 here, by one fp32 ulp; then
    bf16 rounds once, or to the other side of a tie."""
    want = x.double() @ weight.double().T
    want = want if bias is None else want + bias.double()
    cut = x.shape[1] / 16 * 4 * 2**-23
    torch.testing.assert_close(got.double(), want, rtol=2 * BF16_OUTPUT, atol=cut)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("out_features", "in_features"), SIZES)
def test_equals_fp64(out_features: int, in_features: int, rows: int, bias: bool, streamed: list[Stream]) -> None:
    """Sums of thousands of products of order 1 / sqrt(depth): fp32's rounding of them, then bf16's."""
    weight, given = draw(out_features, in_features, spread=in_features**-0.5), draw(out_features) if bias else None
    x = draw(rows, in_features + 64)[:, 64:]
    got = linear(x, weight, given)
    assert streamed == expected(rows, out_features, in_features)
    check(got, x, weight, given)


@pytest.mark.parametrize("rows", [2, 17, 64])
def test_logits_are_the_sums_themselves(rows: int, streamed: list[Stream]) -> None:
    """fp32 from bf16, at the head: rounding them gives the narrow results."""
    weight, x = draw(32768, 4096, spread=4096**-0.5), draw(rows, 4096)
    got = torch.full((rows, 32768), torch.nan, device="cuda")
    logits(x, weight, out=got)
    assert streamed == expected(rows, 32768, 4096)
    torch.testing.assert_close(got.double(), x.double() @ weight.double().T, rtol=0.0, atol=4096 / 16 * 4 * 2**-23)
    assert torch.equal(got.bfloat16(), linear(x, weight, None)) or not HOPPER


CHAINS: list[tuple[int, Launch | Stream | None, dict[str, Any]]] = [
    *(
        (rows, launch_for(rows, 4096, 4096), ways)
        for rows in (1, 3, 16)
        for ways in ({"early": False}, {"stages": 2}, {})
    ),
    *((rows, stream_for(rows, 4096, 4096), ways) for rows in (3, 16, 17, 64) for ways in ({"early": False}, {})),
]


@pytest.mark.parametrize(("rows", "launch", "ways"), CHAINS)
def test_every_way_of_launching_in_a_chain(rows: int, launch: Launch | Stream | None, ways: dict[str, Any]) -> None:
    """Each product reads what the one before it wrote, in a graph, and writes what that one read: a kernel that reads
    or writes too early shows. With parts of the depth and without, in turn."""
    weights = [draw(4096, 4096, spread=4096**-0.5) for _ in range(6)]
    x, outs = draw(rows, 4096), [draw(rows, 4096) for _ in range(2)]
    assert launch is not None
    one_part = {"steps": 64} if isinstance(launch, Stream) else {}
    launches = [replace(launch, **ways), replace(launch, splits=1, **one_part, **ways)]

    def run() -> torch.Tensor:
        y = x
        for i, weight in enumerate(weights):
            y = product(y, weight, launches[i % 2], outs[i % 2])
        return y

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    for _ in range(20):
        x.normal_()
        want = x
        for i, weight in enumerate(weights):
            apart = torch.full_like(x, torch.nan)
            want = product(want, weight, replace(launches[i % 2], early=False), apart)
            torch.cuda.synchronize()
        for poisoned in outs:
            poisoned.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out, want)


@pytest.mark.parametrize(("rows", "out_features", "in_features"), BY_KERNELS)
def test_a_row_depends_on_itself_alone(rows: int, out_features: int, in_features: int) -> None:
    """Nor on how many there are, from 2 to 16, from 17 to 32 and from 33 to 64."""
    weight, x = draw(out_features, in_features, spread=in_features**-0.5), draw(rows, in_features)
    want = linear(x, weight, None)
    assert all(torch.equal(linear(x, weight, None), want) for _ in range(50))
    assert torch.equal(linear(x.flip(0), weight, None).flip(0), want)
    fewest = next(fewest for fewest in (33, 17, 2) if rows >= fewest)
    assert torch.equal(linear(x[:fewest], weight, None), want[:fewest])
    x[torch.arange(rows, device="cuda") != 1] = torch.nan
    assert torch.equal(linear(x, weight, None)[1], want[1])


def test_a_weight_beyond_2_to_the_31_elements() -> None:
    weight = draw(140_000, 16384, spread=16384**-0.5)
    launches = (Launch(1, 8, 512, 4, 3), Launch(16, 64, 128, 4, 4), Stream(16, 4, 256), Stream(64, 4, 256))
    for launch in launches:
        x = draw(min(launch.rows, 4), 16384)
        got = product(x, weight, launch, torch.full((x.shape[0], 140_000), torch.nan, dtype=x.dtype, device="cuda"))
        check(got[:, -64:], x, weight[-64:])
        assert not got.isnan().any()
