"""Writing KV rows with one Triton kernel for every layout, byte for byte what ``reference.write_rows`` writes."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# Triton reads annotations as types of kernel arguments, so tensors and numbers stay without one.

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sidestream.ops.kv_rows.layout import KVRowLayout, pack_rows

INTERPRETED: bool = triton.knobs.runtime.interpret
_PLAIN, _MX, _FP32_SCALES = 0, 1, 2


@triton.jit
def _e4m3_codes(value):
    """E4M3 bytes of fp32 values in [-448, 448], to nearest even; NaN gives 0x7f.

    Integer arithmetic, so that every device and the interpreter round alike. Below 2**-6 the step is 2**-9, which is
    the step of fp32 at 2**14: adding that rounds.
    """
    bits = value.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)
    small = (tl.abs(value) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(size < 0x3C800000, small, normal) | ((bits >> 24) & 0x80)
    return tl.where(size > 0x7F800000, 0x7F, code).to(tl.uint8)


@triton.jit
def _bf16(value):
    """bf16 of a float, to nearest even: the interpreter's own conversion cuts."""
    if value.dtype == tl.float32:
        bits = value.to(tl.int32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        rounded = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FC0, rounded)
        return rounded.to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        return value.to(tl.bfloat16)


@triton.jit
def _fp32(value):
    """A float as fp32: the interpreter's own conversion from bf16 flushes denormals."""
    if value.dtype == tl.bfloat16:
        return (value.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        return value.to(tl.float32)


@triton.jit
def _stored(value, dtype: tl.constexpr):
    """A value as a pool of ``dtype`` holds it."""
    if dtype == tl.bfloat16:
        return _bf16(value)
    else:
        return value.to(dtype)


@triton.jit
def _write(
    pool,
    scales,
    ropes,
    rows_index,
    latents,
    rope_keys,
    latent_stride_t,
    latent_stride_r,
    rope_stride_t,
    rope_stride_p,
    latent: tl.constexpr,
    rope: tl.constexpr,
    tile: tl.constexpr,
    kind: tl.constexpr,
    row_elems: tl.constexpr,
    rope_elems: tl.constexpr,
):
    """One token; ``pool``, ``scales`` and ``ropes`` are one memory as values, scales and rope keys."""
    token = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_index + token).to(tl.int64)
    column = tl.arange(0, latent)
    if kind == 0:
        value = tl.load(latents + token * latent_stride_t + column * latent_stride_r)
        tl.store(pool + row * row_elems + column, _stored(value, pool.dtype.element_ty))
    else:
        count: tl.constexpr = latent // tile
        part = tl.arange(0, count)
        element = part[:, None] * tile + tl.arange(0, tile)[None, :]
        value = _fp32(tl.load(latents + token * latent_stride_t + element * latent_stride_r))
        # As integers, magnitudes order like floats and NaN is the largest: a maximum that keeps it.
        largest = tl.max(value.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)
        if kind == 1:
            # 448 = 1.75 * 2**8: the exponent less 8, one more where the significand is larger.
            code = (largest >> 23) - 8 + ((largest & 0x7FFFFF) > 0x600000).to(tl.int32)
            code = tl.minimum(tl.maximum(code, 1), 254)
            code = tl.where(largest >= 0x7F800000, 255, code)
            scale = tl.where(code == 255, 0x7FC00000, code << 23).to(tl.float32, bitcast=True)
            tl.store(scales + row * row_elems + latent + part, code.to(tl.uint8))
        else:
            amax = largest.to(tl.float32, bitcast=True)
            scale = tl.div_rn(amax, tl.full((count,), 448.0, tl.float32))
            tiny = tl.full((count,), 0x00800000, tl.int32).to(tl.float32, bitcast=True)
            bits = tl.where(scale > tiny, scale, tiny).to(tl.int32, bitcast=True)
            scale = tl.where(largest > 0x7F800000, 0x7FC00000, bits).to(tl.float32, bitcast=True)
            tl.store(scales + row * (row_elems // 4) + latent // 4 + part, scale)
        wide = tl.broadcast_to(scale[:, None], (count, tile))
        ratio = tl.div_rn(value, wide)
        # Comparisons with NaN are false, so it passes the clamp.
        ratio = tl.where(ratio > 448.0, 448.0, ratio)
        ratio = tl.where(ratio < -448.0, -448.0, ratio)
        tl.store(pool + row * row_elems + element, _e4m3_codes(ratio))
    if rope > 0:
        rope_column = tl.arange(0, rope)
        key = tl.load(rope_keys + token * rope_stride_t + rope_column * rope_stride_p)
        if kind == 0:
            key = _stored(key, latents.dtype.element_ty)
        tl.store(ropes + row * rope_elems + rope_elems - rope + rope_column, _stored(key, ropes.dtype.element_ty))


def _power_of_two(size: int) -> bool:
    return size & (size - 1) == 0


def write_rows(
    pool: torch.Tensor,
    rows_index: torch.Tensor,
    latent: torch.Tensor,
    *,
    rope: torch.Tensor | None,
    layout: KVRowLayout,
) -> None:
    """The operator; sizes that are no powers of two, and pools with gaps, go through ``pack_rows``.

    Of a row named twice, bytes of either token may stay.
    """
    found = 0 if rope is None else rope.shape[1]
    assert latent.shape[1] == layout.latent_dim, f"latent of {latent.shape[1]}, layout has {layout.latent_dim}"
    assert found == layout.rope_dim, f"rope key of {found}, layout has {layout.rope_dim}"
    tokens = latent.shape[0]
    if not tokens:
        return
    sizes = _power_of_two(layout.latent_dim) and _power_of_two(layout.rope_dim)
    if not (sizes and pool.is_contiguous() and (pool.is_cuda or INTERPRETED)):
        pool.index_copy_(0, rows_index, pack_rows(latent, rope, layout))
        return
    kind = _PLAIN if not layout.tile else _MX if layout.name == "mxfp8" else _FP32_SCALES
    scales = pool.view(torch.float32) if kind == _FP32_SCALES else pool
    ropes = pool.view(torch.bfloat16) if layout.tile and layout.rope_dim else pool
    key = latent if rope is None else rope
    _write[(tokens,)](
        pool,
        scales,
        ropes,
        rows_index.contiguous(),
        latent,
        key,
        latent.stride(0),
        latent.stride(1),
        key.stride(0),
        key.stride(1),
        latent=layout.latent_dim,
        rope=layout.rope_dim,
        tile=layout.tile,
        kind=kind,
        row_elems=layout.row_elems,
        rope_elems=ropes.shape[1],
        num_warps=4,
    )
