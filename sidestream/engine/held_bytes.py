"""How many bytes of tensors an object of this package holds."""

from __future__ import annotations

import torch


def bytes_of(model: object) -> int:
    """Bytes of every tensor reachable from ``model``, shared storage counted once, allocators' rounding left out."""
    storages: dict[int, int] = {}
    pending: list[object] = [model]
    seen: set[int] = set()
    while pending:
        item = pending.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, torch.Tensor):
            span = sum((n - 1) * s for n, s in zip(item.shape, item.stride(), strict=True))
            extent = int(item.storage_offset() + span) + 1
            key = item.untyped_storage()._cdata
            storages[key] = max(storages.get(key, 0), extent * item.itemsize)
        elif isinstance(item, list | tuple):
            pending.extend(item)
        elif type(item).__module__.startswith("sidestream."):
            slots = getattr(type(item), "__slots__", ())
            pending.extend(vars(item).values() if hasattr(item, "__dict__") else (getattr(item, s) for s in slots))
    return sum(storages.values())
