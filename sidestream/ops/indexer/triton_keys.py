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
from sidestream.ops.triton_rounding import lone_product

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class KeysPlan:
    """Launch parameters.

    Attributes:
        pdl: launch while the kernel before still runs (programmatic dependent launch), and wait for it there.
    """

    warps: int
    pdl: bool = False


INTERPRETED: bool = triton.knobs.runtime.interpret
"""Kernels run on a CPU, which launches nothing early."""
POOLS_PLAN = KeysPlan(warps=1, pdl=not INTERPRETED)
WRITE_PLAN = KeysPlan(warps=4, pdl=not INTERPRETED)
_WRITE_ROWS = 16
"""Rows a program stores."""


@triton.jit
def _write_pools_kernel(
    k, gate, ape, norm_weight, norm_bias, tail, keys, carry_rows, window_rows, keep_rows, entries,
    k_row, k_dim, gate_row, gate_dim, ape_row, ape_dim, tail_row, keys_row, eps,
    KPOOL: tl.constexpr, MEMBERS: tl.constexpr, DIM: tl.constexpr, NORM: tl.constexpr, PDL: tl.constexpr,
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
    if NORM:
        scale, shift = tl.load(norm_weight + dims).to(tl.float32), tl.load(norm_bias + dims).to(tl.float32)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    own_key, own_gate = tl.load(k + row * k_row + dims * k_dim), tl.load(gate + row * gate_row + dims * gate_dim)
    if NORM:
        wide = own_key.to(tl.float32)
        centred = wide - tl.sum(wide, axis=0) / DIM
        inverse = tl.rsqrt(tl.sum(lone_product(centred, centred), axis=0) / DIM + eps)
        own_key = (centred * inverse * scale + shift).to(k.dtype.element_ty)
    held = tail + ring[:, None] * tail_row + dims[None, :]
    carried = (older & exists)[:, None]
    own = (member == KPOOL - 1)[:, None]
    key = tl.load(held, mask=carried, other=0.0).to(tl.float32)
    score = tl.load(held + DIM, mask=carried, other=0.0).to(tl.float32)
    key = tl.where(own, own_key.to(tl.float32)[None, :], key)
    score = tl.where(own, own_gate.to(tl.float32)[None, :], score) + bias.to(tl.float32)
    score = tl.where((member < KPOOL)[:, None], score, float("-inf"))
    raw = tl.exp(score - tl.max(score, axis=0)[None, :])
    pooled = tl.sum(lone_product(raw / tl.sum(raw, axis=0)[None, :], key), axis=0)
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


@triton.jit
def _normed(place, dims, norm_weight, norm_bias, mask, mean, inverse):
    """Normalised elements [ROWS, DIM] of the keys at ``place``, rounded as layer norm rounds."""
    raw = tl.load(place, mask=mask, other=0.0)
    scale = tl.load(norm_weight + dims).to(tl.float32)
    shift = tl.load(norm_bias + dims).to(tl.float32)
    return ((raw.to(tl.float32) - mean) * inverse * scale + shift).to(raw.dtype)


@triton.jit(do_not_specialize=["count"])
def _write_normed_kernel(
    keys, rows, k, norm_weight, norm_bias, cos, sin,
    keys_row, keys_dim, rows_stride, k_row, k_dim, cos_row, sin_row, eps, count,
    ROWS: tl.constexpr, DIM: tl.constexpr, ROPE: tl.constexpr, INTERLEAVED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    line = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    dims = tl.arange(0, DIM)[None, :]
    there = line < count
    row = tl.load(rows + line * rows_stride, mask=there, other=0)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    place = k + line * k_row + dims * k_dim
    wide = tl.load(place, mask=there, other=0.0).to(tl.float32)
    mean = tl.sum(wide, axis=1, keep_dims=True) / DIM
    inverse = tl.rsqrt(tl.sum((wide - mean) * (wide - mean), axis=1, keep_dims=True) / DIM + eps)
    key = _normed(place, dims, norm_weight, norm_bias, there, mean, inverse)
    if ROPE > 0:
        half: tl.constexpr = ROPE // 2
        inside = dims < ROPE
        if INTERLEAVED:
            pair, first = dims // 2, dims % 2 == 0
            partner = tl.where(first, dims + 1, dims - 1)
        else:
            pair, first = dims % half, dims < half
            partner = tl.where(first, dims + half, dims - half)
        partner = tl.where(inside, partner, dims)
        c = tl.load(cos + line * cos_row + pair, mask=there & inside, other=1.0)
        s = tl.load(sin + line * sin_row + pair, mask=there & inside, other=0.0)
        other = _normed(k + line * k_row + partner * k_dim, partner, norm_weight, norm_bias, there, mean, inverse)
        turned = key.to(tl.float32) * c + other.to(tl.float32) * tl.where(first, -s, s)
        key = turned.to(key.dtype)
    tl.store(keys + row * keys_row + dims * keys_dim, key.to(keys.dtype.element_ty), mask=there)


def takes_normed(
    keys_flat: torch.Tensor, k: torch.Tensor, norm_weight: torch.Tensor, norm_bias: torch.Tensor, *angles: torch.Tensor
) -> bool:
    """Whether ``write_normed_keys`` is made for these: float types, a power of two of channels, dense angles."""
    dim = k.shape[1]
    floats = all(t.dtype in FLOATS for t in (keys_flat, k, norm_weight, norm_bias))
    dense = norm_weight.stride(0) == 1 and norm_bias.stride(0) == 1 and all(angle.stride(1) == 1 for angle in angles)
    return floats and dense and dim >= 16 and dim & (dim - 1) == 0


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
    norm_weight: torch.Tensor | None = None,
    norm_bias: torch.Tensor | None = None,
    norm_eps: float = 0.0,
    launch: KeysPlan = POOLS_PLAN,
) -> None:
    """As ``keys.write_pools``, for what ``takes_pools`` accepts."""
    rows, dim = k.shape
    if rows == 0:
        return
    indices = (plan.carry_rows, plan.window_rows, plan.keep_rows, entries)
    assert all(index.is_contiguous() for index in indices), "index tensors of a step are contiguous"
    norm = (norm_weight, norm_bias) if norm_weight is not None and norm_bias is not None else (ape, ape)
    _write_pools_kernel[(rows,)](
        k, gate, ape, *norm, tail, keys_flat, *indices,
        *k.stride(), *gate.stride(), *ape.stride(), tail.stride(0), keys_flat.stride(0), norm_eps, KPOOL=plan.window,
        MEMBERS=triton.next_power_of_2(plan.window), DIM=dim, NORM=norm_weight is not None, PDL=launch.pdl,
        launch_pdl=launch.pdl, num_warps=launch.warps,
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


def write_normed_keys(
    keys_flat: torch.Tensor,
    rows: torch.Tensor,
    k: torch.Tensor,
    *,
    norm_weight: torch.Tensor,
    norm_bias: torch.Tensor,
    norm_eps: float,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    interleaved: bool,
    launch: KeysPlan = WRITE_PLAN,
) -> None:
    """As ``keys.write_normed_keys``, for what ``takes_normed`` accepts."""
    count, dim = k.shape
    if count == 0:
        return
    together = 1 if count <= 256 else _WRITE_ROWS
    angles = (cos, sin) if cos is not None and sin is not None else (keys_flat, keys_flat)
    _write_normed_kernel[(triton.cdiv(count, together),)](
        keys_flat, rows, k, norm_weight, norm_bias, *angles,
        *keys_flat.stride(), rows.stride(0), *k.stride(), angles[0].stride(0), angles[1].stride(0), norm_eps, count,
        ROWS=together, DIM=dim, ROPE=2 * cos.shape[1] if cos is not None else 0, INTERLEAVED=interleaved,
        PDL=launch.pdl, launch_pdl=launch.pdl, num_warps=launch.warps if together > 1 else 1,
    )  # fmt: skip
