"""Byte layouts of one KV row: the normalised latent of MLA and the shared rope key of one token.

| name         | elements of a row                                       | bytes at r = 512, p = 64 / 0 |
| ------------ | ------------------------------------------------------- | ---------------------------- |
| `auto`       | r + p of the model's dtype                              | 1,152 / 1,024 in bfloat16    |
| `bf16`       | r + p bfloat16                                          | 1,152 / 1,024                |
| `fp8_ds_mla` | r E4M3, one fp32 scale a tile, p bfloat16               | 656 / 528                    |
| `mxfp8`      | r E4M3, one E8M0 scale a tile of 32 (p must be 0)       | refused / 528                |

Quantised rows are bytes (``torch.uint8``), little-endian, parts in the order of the table, nothing between them.

- *Tiles*: ``fp8_ds_mla`` has a scale for every ``min(128, r)`` latent elements, so a latent shorter than 128 is one
  tile; r must be a whole number of tiles.
- *Scales*: ``fp8_ds_mla`` takes ``amax / 448`` in fp32, at least the smallest normal fp32. ``mxfp8`` takes the smallest
  power of two that brings amax to 448 or less, code 1 (2**-126) at least, so that no decoder that flushes denormals
  reads a zero scale.
- *Rounding*: value / scale, clamped to +-448 and rounded to nearest even; the clamp only ever catches a quotient that
  rounding pushed past 448.
- *Zero tile*: all value bytes 0 and the smallest scale; unpacks to zeros.
- *NaN or infinity*: makes its whole tile NaN (the scale is not finite), no other tile.
- *Packing what was unpacked* gives the same values again. In ``mxfp8`` the bytes of a tile change once if its maximum
  was rounded down to what the next smaller scale holds; in ``fp8_ds_mla`` they never do.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sidestream.errors import ConfigError

E4M3_MAX = 448.0
KV_ROW_LAYOUTS = ("auto", "bf16", "fp8_ds_mla", "mxfp8")
_FP8_TILE = 128
_MX_TILE = 32


@dataclass(frozen=True, slots=True)
class KVRowLayout:
    """One KV row as data.

    Attributes:
        name: one of ``KV_ROW_LAYOUTS``.
        latent_dim: r, elements of the latent.
        rope_dim: p, elements of the rope key; 0 without rope.
        dtype: of a pool element.
        row_elems: pool elements a row.
        row_bytes: bytes a row.
        tile: latent elements that share a scale; 0 where rows are not quantised.
    """

    name: str
    latent_dim: int
    rope_dim: int
    dtype: torch.dtype
    row_elems: int
    row_bytes: int
    tile: int

    @property
    def num_scales(self) -> int:
        return self.latent_dim // self.tile if self.tile else 0


def kv_row_layout(name: str, *, latent_dim: int, rope_dim: int, model_dtype: torch.dtype) -> KVRowLayout:
    """Lay out rows for ``kv_cache_dtype=name``.

    Raises:
        ConfigError: an unknown name, a latent that is no whole number of tiles, or ``mxfp8`` with a rope slice.
    """
    if name not in KV_ROW_LAYOUTS:
        raise ConfigError(f"kv_cache_dtype is {name!r}, allowed are {', '.join(KV_ROW_LAYOUTS)}")
    if name in ("auto", "bf16"):
        dtype = model_dtype if name == "auto" else torch.bfloat16
        elems = latent_dim + rope_dim
        return KVRowLayout(name, latent_dim, rope_dim, dtype, elems, elems * dtype.itemsize, tile=0)
    if name == "mxfp8" and rope_dim:
        raise ConfigError(
            f"kv_cache_dtype 'mxfp8' has no room for a rope key, and the model's qk_rope_head_dim is {rope_dim} "
            "(must be 0): use kv_cache_dtype 'fp8_ds_mla', 'bf16' or 'auto'"
        )
    tile = _MX_TILE if name == "mxfp8" else min(_FP8_TILE, latent_dim)
    if latent_dim % tile:
        raise ConfigError(
            f"kv_cache_dtype {name!r} scales tiles of {tile} latent elements, and the model's kv_lora_rank "
            f"{latent_dim} is no multiple of {tile}: use kv_cache_dtype 'bf16' or 'auto'"
        )
    row_bytes = latent_dim + latent_dim // tile * (1 if name == "mxfp8" else 4) + 2 * rope_dim
    return KVRowLayout(name, latent_dim, rope_dim, torch.uint8, row_bytes, row_bytes, tile)


def pack_rows(latent: torch.Tensor, rope: torch.Tensor | None, layout: KVRowLayout) -> torch.Tensor:
    """Encode rows.

    Args:
        latent: [T, r] float.
        rope: [T, p] float, None exactly where p is 0.
    Returns:
        [T, row_elems] of ``layout.dtype``; may be ``latent`` itself.
    """
    assert latent.shape[1] == layout.latent_dim, f"latent of {latent.shape[1]}, layout has {layout.latent_dim}"
    found = 0 if rope is None else rope.shape[1]
    assert found == layout.rope_dim, f"rope key of {found}, layout has {layout.rope_dim}"
    if not layout.tile:
        row = latent if rope is None else torch.cat([latent, rope.to(latent.dtype)], dim=1)
        return row.to(layout.dtype)
    if not latent.shape[0]:
        return torch.empty(0, layout.row_elems, dtype=torch.uint8, device=latent.device)
    tiles = latent.float().reshape(-1, layout.num_scales, layout.tile)
    amax = tiles.abs().amax(dim=2)
    if layout.name == "mxfp8":
        scale, codes = _power_of_two_scale(amax)
    else:
        scale = (amax / E4M3_MAX).clamp_min_(torch.finfo(torch.float32).tiny)
        codes = scale.view(torch.uint8)
    values = (tiles / scale[:, :, None]).clamp_(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    parts = [values.flatten(1).view(torch.uint8), codes]
    if rope is not None:
        parts.append(rope.to(torch.bfloat16).contiguous().view(torch.uint8))
    return torch.cat(parts, dim=1)


def unpack_rows(rows: torch.Tensor, layout: KVRowLayout, *, dtype: torch.dtype) -> torch.Tensor:
    """Decode rows [..., row_elems] to [..., r + p] of ``dtype``, latent first; no copy where nothing changes."""
    assert rows.shape[-1] == layout.row_elems, f"rows of {rows.shape[-1]} elements, layout has {layout.row_elems}"
    if not layout.tile:
        return rows.to(dtype)
    r, n = layout.latent_dim, layout.num_scales
    scale_end = layout.row_elems - 2 * layout.rope_dim
    values = rows[..., :r].contiguous().view(torch.float8_e4m3fn).to(torch.float32)
    tiles = values.view(*rows.shape[:-1], n, layout.tile)
    codes = rows[..., r:scale_end].contiguous()
    stored = torch.float8_e8m0fnu if layout.name == "mxfp8" else torch.float32
    scale = codes.view(stored).to(torch.float32)
    latent = (tiles * scale.unsqueeze(-1)).flatten(-2).to(dtype)
    if not layout.rope_dim:
        return latent
    rope = rows[..., scale_end:].contiguous().view(torch.bfloat16)
    return torch.cat([latent, rope.to(dtype)], dim=-1)


def _power_of_two_scale(amax: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale and E8M0 code for tile maxima: with amax = m * 2**e and 448 = 0.875 * 2**9, exact without a logarithm."""
    mantissa, exponent = torch.frexp(amax.clamp_min(torch.finfo(torch.float32).tiny))
    code = exponent - 9 + 127 + (mantissa > 0.875).to(torch.int32)
    code = code.clamp_(1, 254).masked_fill_(~torch.isfinite(amax), 255)
    codes = code.to(torch.uint8)
    return codes.view(torch.float8_e8m0fnu).to(torch.float32), codes
