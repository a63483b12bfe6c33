"""Expand and collapse in one launch of clusters, its own source run on a CPU: see ``tests.ops.gluon_in_torch``.

All processors of a cluster are one tensor's first dimension here, so they run in step; what one of them tells the
others is there behind a barrier and not before.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import pytest
import torch

from sidestream.ops.hyper_connection import launches, reference, torch_impl
from sidestream.ops.hyper_connection.launches import Cluster
from sidestream.ops.moe import ExpertSum, settled
from tests.ops.gluon_in_torch import Front, Pointer, Shared, allocate, functions_of, language, with_functions
from tests.ops.kda.gluon_in_torch import Copies
from tests.tolerances import BF16_STEPS, FP32_ROUNDING

triton_cluster = pytest.importorskip("sidestream.ops.hyper_connection.triton_cluster")

HIDDEN = 4096
HELD = Cluster(warps=8, held=True)
HELD_4 = Cluster(rows=4, warps=8, held=True, terms=2)
FUNCTIONS = functions_of(triton_cluster)
PARTS = [
    *functions_of(import_module("sidestream.ops.hyper_connection.triton_cluster_parts")),
    *functions_of(import_module("sidestream.ops.hyper_connection.triton_cluster_products")),
]
SETTINGS: dict[str, Any] = {"norm_eps": 1e-5, "eps": 1e-6, "iters": 20}


class Exchange:
    """Memory by which processors tell each other: what is written is there for all once they met at a barrier."""

    def __init__(self, *memories: torch.Tensor) -> None:
        self.places = {memory.data_ptr() for memory in memories}
        self.written, self.arrived = list[Callable[[], None]](), list[Callable[[], None]]()
        self.met = 0

    def store(self, target: Pointer, value: torch.Tensor, mask: torch.Tensor | None = None) -> None:
        write = partial(target.store, value.clone(), mask)
        if target.memory.data_ptr() in self.places:
            self.written.append(write)
        else:
            write()

    def arrive(self) -> None:
        assert not self.arrived, "the barrier before this one was not waited for"
        self.arrived, self.written = self.written, []
        self.met += 1

    def wait(self) -> None:
        for write in self.arrived:
            write()
        self.arrived = []


def from_here(tensor: torch.Tensor) -> torch.Tensor:
    """All memory that an address of it reaches."""
    reached = tensor.untyped_storage().nbytes() // tensor.itemsize - tensor.storage_offset()
    return torch.as_strided(tensor, (reached,), (1,))


class Kernel:
    """Stands for ``_between``: a launch runs its clusters one after the other. ``faulty`` changes names."""

    def __init__(self, faulty: Callable[[dict[str, Any]], None] | None = None) -> None:
        self.faulty = faulty

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        return partial(self.run, grid)

    def run(self, grid: tuple[int], *given: Any, **how: Any) -> None:
        assert how.pop("launch_pdl")
        assert (how.pop("maxnreg", None) is not None) == how["held"]
        assert (how.pop("num_warps"), how.pop("num_ctas")) == (how["W"], how["C"])
        exchanged = given[11:13]
        for memory in given[7:13]:
            memory.fill_(torch.nan)
        memory = [Pointer(from_here(each)) if isinstance(each, torch.Tensor) else each for each in given]
        before = [each.clone() for each in given[:4]]
        for cluster in range(grid[0]):
            front, exchange = Front(given[:4]), Exchange(*exchanged)
            names = names_of((cluster, 0), front, exchange)
            if self.faulty is not None:
                self.faulty(names)
            names["_between"](*memory, **how)
            assert exchange.met == 2
            assert not exchange.written, "written and told nobody"
            assert not exchange.arrived
        assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(given[:4], before, strict=True))


def names_of(program: tuple[int, int], front: Front, exchange: Exchange) -> dict[str, Any]:
    """Names that the modules' functions use, assembly in torch."""

    def load(source: Pointer, mask: torch.Tensor | None = None, other: float = 0, cache_modifier: str = "") -> Any:
        exchanged = source.memory.data_ptr() in exchange.places
        assert exchanged == (cache_modifier == ".cg"), "another processor's number may lie in this one's cache"
        return source.load(mask, other)

    own: dict[str, Any] = {
        "DotOperandLayout": lambda *_: None,
        "allocate_shared_memory": allocated,
        "inline_asm_elementwise": lambda asm, constraints, given, **how: given[0],
        "load": load,
        "rsqrt": torch.rsqrt,
        "store": exchange.store,
        "to_linear_layout": lambda layout, shape: None,
    }
    names: dict[str, Any] = {"gl": language(program, **own), "mma_v2": product, "async_copy": Copies()}
    names |= {"gdc_wait": front.wait, "gdc_launch_dependents": lambda: None}
    with_functions(names, [*FUNCTIONS, *PARTS])
    names |= {name: lambda *_: None for name in ("over_processors", "warp_sums", "in_memory")}
    names |= {"cluster_arrive": exchange.arrive, "cluster_wait": exchange.wait, "warp": lambda: 0, "rank": lambda: 0}
    names |= {"rounded": lambda x: x.bfloat16().float(), "narrowed": lambda x: x.bfloat16()}
    names |= {"reciprocal": torch.reciprocal, "not_before": lambda x: x, "upper_bits": upper_bits}
    return names


def allocated(dtype: torch.dtype, shape: list[int], layout: None, value: torch.Tensor | None = None) -> Shared:
    if value is None:
        return allocate(dtype, shape, layout)
    assert value.dtype is dtype
    return Shared(value)


def upper_bits(x: torch.Tensor) -> torch.Tensor:
    return (x.view(torch.int32) & ~0x1FFF).view(torch.float32)


def product(a: torch.Tensor, b: torch.Tensor, sums: torch.Tensor, input_precision: str | None = None) -> torch.Tensor:
    if input_precision == "tf32":
        return upper_bits(a) @ upper_bits(b) + sums
    assert a.dtype == b.dtype == torch.bfloat16
    return a.float() @ b.float() + sums


def drawn(rows: int) -> dict[str, Any]:
    return {
        "streams": torch.randn(rows, 4, HIDDEN).bfloat16(),
        "output": torch.randn(rows, HIDDEN + 8).bfloat16()[:, 3 : 3 + HIDDEN],
        "post": torch.rand(rows, 9)[:, 2:6].unsqueeze(2),
        "mix": torch.rand(4, rows, 4).permute(1, 2, 0),
        "fn": torch.randn(24, 4 * HIDDEN) / (4 * HIDDEN) ** 0.5,
        "base": torch.randn(24),
        "norm_weight": (torch.rand(2, HIDDEN) + 0.5).bfloat16(),
        **SETTINGS,
    }


def pending(rows: int) -> ExpertSum:
    ids = torch.rand(rows, 64).topk(8).indices
    ids[0, 3], ids[-1] = -1, -1
    partial = torch.randn(rows * 9, HIDDEN)
    partial[: rows * 8][ids.flatten() < 0] = torch.nan
    return ExpertSum(partial, torch.rand(rows, 8), ids, 1, torch.bfloat16)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[torch.Tensor, ...]]:
    def run(
        made: dict[str, Any], launch: Cluster, faulty: Callable[[dict[str, Any]], None] | None = None
    ) -> tuple[torch.Tensor, ...]:
        monkeypatch.setattr(triton_cluster, "_between", Kernel(faulty))
        got: tuple[torch.Tensor, ...] = triton_cluster.hyper_connection_post_pre(**made, launch=launch)
        return got

    return run


@pytest.mark.parametrize(
    "launch",
    [Cluster(), Cluster(rows=4, late=True), Cluster(rows=16, ahead=False), Cluster(terms=2), HELD, HELD_4],
    ids=str,
)
@pytest.mark.parametrize("rows", [1, 8, 19])
@pytest.mark.parametrize("summed", [False, True], ids=["summed on the way", "summed"])
def test_equals_the_formula(
    rows: int, launch: Cluster, summed: bool, run: Callable[..., tuple[torch.Tensor, ...]]
) -> None:
    made = drawn(rows)
    if not summed:
        made["output"] = pending(rows)
    got = run(made, launch)
    of_post = {name: made.pop(name) for name in ("streams", "output", "post", "mix")}
    of_post["output"] = settled(of_post["output"])
    want = reference.hyper_connection_post(**of_post)
    torch.testing.assert_close(got[0], want, rtol=BF16_STEPS, atol=FP32_ROUNDING)
    collapsed = reference.hyper_connection_pre(got[0], **made)
    torch.testing.assert_close(got[1], collapsed[0], rtol=BF16_STEPS, atol=FP32_ROUNDING)
    for a, b in zip(got[2:], collapsed[1:], strict=True):
        assert a.is_contiguous()
        torch.testing.assert_close(a, b, rtol=0, atol=2 * FP32_ROUNDING)


def test_garbage_in_one_row_stays_there(run: Callable[..., tuple[torch.Tensor, ...]]) -> None:
    made = drawn(6)
    clean = run(made, Cluster())
    made["streams"][[0, 4]] = torch.nan
    for a, b in zip(clean, run(made, Cluster()), strict=True):
        assert torch.equal(a[[1, 2, 3, 5]], b[[1, 2, 3, 5]])


def test_rows_have_the_same_bits_in_any_cluster(run: Callable[..., tuple[torch.Tensor, ...]]) -> None:
    made = drawn(11)
    whole = run(made, Cluster())
    part = {**made, **{name: made[name][7:] for name in ("streams", "output", "post", "mix")}}
    for a, b in zip(whole, run(part, Cluster()), strict=True):
        assert torch.equal(a[7:], b)


def _no_meeting(names: dict[str, Any]) -> None:
    names["cluster_wait"] = lambda: None


def _no_wait(names: dict[str, Any]) -> None:
    names["gdc_wait"] = lambda: None


@pytest.mark.parametrize("faulty", [_no_meeting, _no_wait])
def test_what_was_taken_out_is_missed(
    faulty: Callable[[dict[str, Any]], None], run: Callable[..., tuple[torch.Tensor, ...]]
) -> None:
    made = drawn(3)
    try:
        got = run(made, Cluster(), faulty)
    except AssertionError:
        return
    assert any(part.isnan().any() for part in got)


def test_what_one_launch_takes() -> None:
    for hidden, launch, taken in (
        (4096, Cluster(), True),
        (4096, Cluster(rows=4), True),
        (4096, Cluster(rows=2), False),  # less than two elements of a row for a thread
        (4096, Cluster(processors=8), False),  # twice as many factors as registers hold
        (2048, Cluster(warps=8), True),
        (4096, HELD, True),
        (4096, Cluster(held=True), False),
        (4096, Cluster(rows=16, warps=8, held=True), False),
        (512, Cluster(), False),
        (6144, Cluster(), False),
    ):
        assert triton_cluster.fits(hidden, launch) == taken, (hidden, launch)


def test_the_table_says_which_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    assert launches.cluster_for(8) is None
    monkeypatch.setitem(launches.CLUSTER_ROWS, range(3, 65), Cluster(rows=4))
    assert [launches.cluster_for(rows) for rows in (2, 3, 64, 65)] == [None, Cluster(rows=4), Cluster(rows=4), None]


def test_the_formula_is_the_operators() -> None:
    """That the reference above is what the engine's CPU path does."""
    made = drawn(2)
    made["streams"], made["output"], made["norm_weight"] = (
        made[name].float() for name in ("streams", "output", "norm_weight")
    )
    for a, b in zip(
        torch_impl.hyper_connection_post_pre(**made), reference.hyper_connection_post_pre(**made), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
