"""Triton index keys: storing keys, and one kernel that pools, stores and keeps the tail of a uniform decode.

A program takes one row. It reads the older members of the row's window from the ring before it writes the row's own
token there, and no other program touches the slot, so reading and writing need no second launch.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sidestream.core.ring import RingPlan

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class KeysPlan:
    """Launch parameters.

    Attributes:
        pdl: launch while the kernel before still runs (programmatic dependent launch), and wait for it there.
    """

    warps: int
    pdl: bool = False


POOLS_PLAN = KeysPlan(warps=1)
WRITE_PLAN = KeysPlan(warps=4)
_WRITE_ROWS = 16
"""Rows a program stores."""


@triton.jit
def _write_pools_kernel(
    k, gate, ape, tail, keys, carry_rows, window_rows, keep_rows, entries,
    k_row, k_dim, gate_row, gate_dim, ape_row, ape_dim, tail_row, keys_row,
    KPOOL: tl.constexpr, MEMBERS: tl.constexpr, DIM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    member, dims = tl.arange(0, MEMBERS), tl.arange(0, DIM)
    older = member < KPOOL - 1
    # Members before the start of the sequence are row 0 of the plan's source. No pool that counts has one.
    exists = tl.load(window_rows + row * KPOOL + member, mask=older, other=0) > 0
    ring = tl.load(carry_rows + row * (KPOOL - 1) + member, mask=older, other=0)
    keep = tl.load(keep_rows + row)
    entry = tl.load(entries + row)
    bias = tl.load(ape + member[:, None] * ape_row + dims[None, :] * ape_dim, mask=(member < KPOOL)[:, None], other=0.0)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    own_key, own_gate = tl.load(k + row * k_row + dims * k_dim), tl.load(gate + row * gate_row + dims * gate_dim)
    held = tail + ring[:, None] * tail_row + dims[None, :]
    carried = (older & exists)[:, None]
    own = (member == KPOOL - 1)[:, None]
    key = tl.load(held, mask=carried, other=0.0).to(tl.float32)
    score = tl.load(held + DIM, mask=carried, other=0.0).to(tl.float32)
    key = tl.where(own, own_key.to(tl.float32)[None, :], key)
    score = tl.where(own, own_gate.to(tl.float32)[None, :], score) + bias.to(tl.float32)
    score = tl.where((member < KPOOL)[:, None], score, float("-inf"))
    raw = tl.exp(score - tl.max(score, axis=0)[None, :])
    pooled = tl.sum(raw / tl.sum(raw, axis=0)[None, :] * key, axis=0)
    tl.store(keys + entry * keys_row + dims, pooled.to(k.dtype.element_ty).to(keys.dtype.element_ty))
    # All threads have read the ring.
    tl.debug_barrier()
    tl.store(tail + keep * tail_row + dims, own_key.to(tail.dtype.element_ty))
    tl.store(tail + keep * tail_row + DIM + dims, own_gate.to(tail.dtype.element_ty))


@triton.jit(do_not_specialize=["count"])
def _write_keys_kernel(
    keys, rows, k, keys_row, keys_dim, rows_stride, k_row, k_dim, count, dim,
    ROWS: tl.constexpr, DIM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    line = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    dims = tl.arange(0, DIM)
    row = tl.load(rows + line * rows_stride, mask=line < count, other=0)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    mask = (line < count)[:, None] & (dims < dim)[None, :]
    key = tl.load(k + line[:, None] * k_row + dims[None, :] * k_dim, mask=mask)
    place = keys + row[:, None] * keys_row + dims[None, :] * keys_dim
    tl.store(place, key.to(keys.dtype.element_ty), mask=mask)


def takes_pools(
    k: torch.Tensor, gate: torch.Tensor, tail: torch.Tensor, keys_flat: torch.Tensor, plan: RingPlan
) -> bool:
    """Whether ``write_pools`` is made for these: one float type of keys and gates, a power of two of channels, pools of
    two tokens or more, rows whose channels lie side by side."""
    dim = k.shape[1]
    floats = all(t.dtype in FLOATS for t in (k, gate, tail, keys_flat)) and k.dtype is gate.dtype
    lined_up = tail.stride(1) == 1 and keys_flat.stride(1) == 1
    return floats and lined_up and plan.window > 1 and dim >= 16 and dim & (dim - 1) == 0


def write_pools(
    k: torch.Tensor,
    gate: torch.Tensor,
    ape: torch.Tensor,
    *,
    tail: torch.Tensor,
    plan: RingPlan,
    keys_flat: torch.Tensor,
    entries: torch.Tensor,
    launch: KeysPlan = POOLS_PLAN,
) -> None:
    """As ``keys.write_pools``, for what ``takes_pools`` accepts."""
    rows, dim = k.shape
    if rows == 0:
        return
    indices = (plan.carry_rows, plan.window_rows, plan.keep_rows, entries)
    assert all(index.is_contiguous() for index in indices), "index tensors of a step are contiguous"
    _write_pools_kernel[(rows,)](
        k, gate, ape, tail, keys_flat, *indices,
        *k.stride(), *gate.stride(), *ape.stride(), tail.stride(0), keys_flat.stride(0), KPOOL=plan.window,
        MEMBERS=triton.next_power_of_2(plan.window), DIM=dim, PDL=launch.pdl, launch_pdl=launch.pdl,
        num_warps=launch.warps,
    )  # fmt: skip


def write_keys(keys_flat: torch.Tensor, rows: torch.Tensor, k: torch.Tensor, *, launch: KeysPlan = WRITE_PLAN) -> None:
    """As ``keys.write_keys``, for float types in ``FLOATS``."""
    count, dim = k.shape
    if count == 0:
        return
    together = 1 if count <= 256 else _WRITE_ROWS
    _write_keys_kernel[(triton.cdiv(count, together),)](
        keys_flat, rows, k, *keys_flat.stride(), rows.stride(0), *k.stride(), count, dim,
        ROWS=together, DIM=triton.next_power_of_2(dim), PDL=launch.pdl, launch_pdl=launch.pdl,
        num_warps=launch.warps if together > 1 else 1,
    )  # fmt: skip
