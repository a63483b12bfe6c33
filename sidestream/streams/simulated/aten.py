"""What aten operators do: which arguments they write, which only make a view, which make the host wait."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

aten = torch.ops.aten

_DATA_DEPENDENT = {
    "aten::nonzero",
    "aten::masked_select",
    "aten::unique_dim",
    "aten::_unique2",
    "aten::_unique",
    "aten::unique_consecutive",
    "aten::repeat_interleave",
    "aten::bincount",
    "aten::_local_scalar_dense",
    "aten::equal",
    "aten::is_nonzero",
    "aten::histc",
}
"""The shape or value of the result depends on data, so the host waits for it."""

_ROWS: dict[str, tuple[str, str]] = {
    "aten::index_select": ("self", "index"),
    "aten::embedding": ("weight", "indices"),
    "aten::index": ("self", "indices"),
    "aten::index_put": ("self", "indices"),
    "aten::index_put_": ("self", "indices"),
    "aten::_index_put_impl_": ("self", "indices"),
    "aten::index_copy_": ("self", "index"),
    "aten::index_add_": ("self", "index"),
    "aten::index_fill_": ("self", "index"),
}
"""Operators that touch only rows of their first argument: (that argument, the argument with the row numbers)."""


@dataclass(frozen=True, slots=True)
class OpInfo:
    """Attributes:
    names: of the arguments, in order.
    writes: names of arguments written in place.
    view: the result is a view of the first tensor and nothing runs.
    composite: made of other operators, to be taken apart.
    waits: the host waits for the result.
    """

    names: tuple[str, ...]
    writes: frozenset[str]
    view: bool
    composite: bool
    waits: bool


@cache
def info_of(func: Any) -> OpInfo:
    """From the operator's schema."""
    schema = func._schema
    writes = frozenset(a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write)
    if torch.Tag.inplace_view in func.tags and schema.name != "aten::detach_":
        raise NotImplementedError(f"{func}: changes the shape of a tensor in place, which the simulated device refuses")
    aliased = any(r.alias_info is not None for r in schema.returns)
    tensors = all("Tensor" in str(r.type) for r in schema.returns)
    return OpInfo(
        names=tuple(a.name for a in schema.arguments),
        writes=writes,
        view=schema.name in ("aten::_unsafe_view", "aten::lift_fresh") or (aliased and not writes),
        composite=torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"),
        waits=schema.name in _DATA_DEPENDENT or not tensors,
    )


def named_arguments(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """(name, value) of the arguments given."""
    yield from zip(info_of(func).names, args, strict=False)
    yield from kwargs.items()


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Tensors of an argument, lists looked into."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            if isinstance(item, torch.Tensor):
                yield item


def row_index(func: Any, named: dict[str, Any]) -> tuple[str, torch.Tensor] | None:
    """The argument that is touched only at some rows, and the index tensor that holds them."""
    entry = _ROWS.get(func._schema.name)
    if entry is None or named.get("dim", 0) != 0:
        return None
    target, source = entry
    index = named[source]
    if isinstance(index, (list, tuple)):
        index = index[0] if index else None
    if index is None or index.dtype is torch.bool or index.dtype is torch.uint8:
        return None
    return target, index


def has_mask_index(func: Any, named: dict[str, Any]) -> bool:
    """Boolean indices are turned into positions first, which the host waits for."""
    if func._schema.name not in ("aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"):
        return False
    return any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in named["indices"])
