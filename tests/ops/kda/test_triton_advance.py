"""The kernel of ``triton_advance``, its own source run on a CPU with torch in the place of Gluon's language.

Gluon has no interpreter. This one knows nothing of threads, so it says nothing about barriers or layouts; it does catch
wrong places, masks and formulas, and a state that is used before its copy was waited for.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch

from sidestream.ops.kda import reference
from sidestream.ops.kda.torch_impl import L2_EPS
from tests.ops.kda.decode_step_case import decode_step_case, owned
from tests.ops.operator_case import map_tensors
from tests.tolerances import FP32_GEMM

triton_advance = pytest.importorskip("sidestream.ops.kda.triton_advance")


class Pointer:
    """Places in one flat memory."""

    def __init__(self, memory: torch.Tensor, place: Any = 0) -> None:
        self.memory, self.place = memory.view(-1), torch.as_tensor(place)
        self.dtype = types.SimpleNamespace(element_ty=memory.dtype)

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.memory, self.place + offset)

    def load(self, mask: torch.Tensor | None = None, other: float = 0) -> torch.Tensor:
        if mask is None:
            return self.memory[self.place]
        mask = mask.broadcast_to(self.place.shape)
        return torch.where(mask, self.memory[torch.where(mask, self.place, 0)], torch.tensor(other).to(self.memory))


class Shared:
    """Shared memory, NaN until it is written."""

    def __init__(self, data: torch.Tensor) -> None:
        self.data = data

    def index(self, i: int) -> Shared:
        return Shared(self.data[i])

    def slice(self, start: int, length: int) -> Shared:
        return Shared(self.data[start : start + length])

    def store(self, value: torch.Tensor) -> None:
        self.data.copy_(value)

    def load(self, layout: object) -> torch.Tensor:
        return self.data.clone()


def language(program: list[int]) -> dict[str, Any]:
    """Names that the module's functions use."""
    copies: list[Callable[[], Any]] = []

    def layout(*_args: Any, **_kwargs: Any) -> None:
        return None

    def store(target: Pointer, value: torch.Tensor, mask: torch.Tensor | None = None) -> None:
        if mask is None:
            target.memory[target.place] = value
        else:
            mask = mask.broadcast_to(target.place.shape)
            target.memory[target.place[mask]] = value[mask]

    def wait_group(outstanding: int) -> None:
        assert outstanding == 0
        while copies:
            copies.pop()()

    gl = types.SimpleNamespace(
        **{name: getattr(torch, name) for name in ("int32", "int64", "float32", "exp", "log", "sqrt")},
        minimum=lambda x, y: x.clamp(max=y),
        where=lambda mask, x, y: torch.where(mask, torch.as_tensor(x), torch.as_tensor(y)),
        convert_layout=lambda x, layout, assert_trivial: x,
        constexpr=None,
        static_range=range,
        BlockedLayout=layout,
        SliceLayout=layout,
        SwizzledSharedLayout=layout,
        allocate_shared_memory=lambda dtype, shape, layout: Shared(torch.full(shape, torch.nan, dtype=dtype)),
        arange=lambda first, end, layout: torch.arange(first, end),
        zeros=lambda shape, dtype, layout: torch.zeros(shape, dtype=dtype),
        sum=lambda x, axis: x.sum(axis),
        thread_barrier=lambda: None,
        program_id=lambda axis: torch.tensor(program[axis]),
        load=lambda source, mask=None, other=0: source.load(mask, other),
        store=store,
    )
    async_copy = types.SimpleNamespace(
        async_copy_global_to_shared=lambda target, source, mask: copies.append(
            lambda: target.data.copy_(source.load(mask))
        ),
        commit_group=lambda: None,
        wait_group=wait_group,
    )
    names: dict[str, Any] = {"gl": gl, "async_copy": async_copy, "gdc_wait": lambda: None}
    for name in ("_sigmoid", "advance"):
        names[name] = types.FunctionType(getattr(triton_advance, name).fn.__code__, names, name)
    return names


@pytest.mark.parametrize(("versions", "rollback", "bounded"), [(1, 0, True), (3, 2, False)])
def test_a_step_equals_the_formula(versions: int, rollback: int, bounded: bool) -> None:
    """Fresh, continuing and padding rows; what is nobody's is NaN."""
    choice = {"padding": 2, "versions": versions, "rollback": rollback, "bounded": bounded}
    case = decode_step_case(6, 2, 128, **choice)
    mine = map_tensors(case, torch.clone)
    rows, heads, dim = 6, 2, 128
    low = mine["projected"][:, 3 * heads * dim : 3 * heads * dim + 2 * dim].view(rows, 2, dim).transpose(0, 1)
    expanded = torch.bmm(low, mine["expand"].transpose(1, 2)).contiguous()
    out, plan, weight = torch.empty(rows, heads * dim), case["plan"], mine["conv_weight"]
    program = [0, 0]
    names = language(program)
    memories = (mine["projected"], mine["conv_state"], mine["state"], out, expanded, weight.t())
    memories += tuple(mine[name] for name in ("dt_bias", "A_log", "norm_weight", "slots", "start"))
    for program[0] in range(heads):
        for program[1] in range(rows):
            names["advance"](
                *(Pointer(memory) for memory in memories),
                *(case["lower_bound"] or 0.0, case["norm_eps"], mine["projected"].stride(0)),
                *(weight.stride(0), weight.stride(1), rows * heads * dim, heads, L2_EPS, versions, dim),
                *(plan.window, plan.length, bounded, True),
            )
    want = reference.decode_step(**case)
    torch.testing.assert_close(out, want, rtol=FP32_GEMM, atol=FP32_GEMM)
    torch.testing.assert_close(owned(mine["state"]), owned(case["state"]), rtol=0, atol=FP32_GEMM)
    assert torch.equal(owned(mine["conv_state"], length=plan.length), owned(case["conv_state"], length=plan.length))
