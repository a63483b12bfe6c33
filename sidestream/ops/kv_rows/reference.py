"""KV rows one value at a time: the truth for ``layout``'s pack and unpack."""

from __future__ import annotations

import math
import struct

import torch

from sidestream.ops.kv_rows.layout import E4M3_MAX, KVRowLayout

_FLT_MIN = 2.0**-126


def e4m3_value(code: int) -> float:
    """What one E4M3 byte stands for: 4 exponent bits of bias 7, no infinities, 0x7f and 0xff NaN."""
    sign = -1.0 if code & 0x80 else 1.0
    exponent, mantissa = (code >> 3) & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    if exponent == 0:
        return sign * mantissa * 2.0**-9
    return sign * (1 + mantissa / 8) * 2.0 ** (exponent - 7)


def e4m3_code(value: float) -> int:
    """Nearest E4M3 byte of a value in [-448, 448], ties to the even code; NaN gives 0x7f."""
    if math.isnan(value):
        return 0x7F
    size = min(abs(value), E4M3_MAX)
    best = min(range(0x7F), key=lambda code: (abs(e4m3_value(code) - size), code & 1))
    return best | (0x80 if math.copysign(1.0, value) < 0 else 0)


def pack_row(latent: torch.Tensor, rope: torch.Tensor | None, layout: KVRowLayout) -> bytes:
    """Bytes of one quantised row. latent [r] and rope [p] fp32."""
    values, scales = bytearray(), bytearray()
    for tile in torch.split(latent.float(), layout.tile):
        amax = float(tile.abs().max())
        if layout.name == "mxfp8":
            code = 1
            while code < 254 and not amax <= E4M3_MAX * 2.0 ** (code - 127):
                code += 1
            if not math.isfinite(amax):
                code = 255
            scale = 2.0 ** (code - 127) if code != 255 else math.nan
            scales.append(code)
        else:
            scale = max(float(torch.tensor(amax) / E4M3_MAX), _FLT_MIN)
            scale = math.nan if math.isnan(amax) else scale
            scales += struct.pack("<f", scale)
        for value in tile:
            values.append(e4m3_code(float((value / scale).clamp(-E4M3_MAX, E4M3_MAX))))
    tail = b"" if rope is None else rope.to(torch.bfloat16).view(torch.int16).numpy().tobytes()
    return bytes(values) + bytes(scales) + tail


def unpack_row(row: bytes, layout: KVRowLayout) -> torch.Tensor:
    """[r + p] fp32 of one quantised row."""
    r, n = layout.latent_dim, layout.num_scales
    out: list[float] = []
    for i in range(r):
        tile = i // layout.tile
        if layout.name == "mxfp8":
            code = row[r + tile]
            scale = math.nan if code == 255 else 2.0 ** (code - 127)
        else:
            scale = struct.unpack_from("<f", row, r + 4 * tile)[0]
        out.append(e4m3_value(row[i]) * scale)
    start = r + n * (1 if layout.name == "mxfp8" else 4)
    for i in range(layout.rope_dim):
        (bits,) = struct.unpack_from("<H", row, start + 2 * i)
        out.append(struct.unpack("<f", struct.pack("<I", bits << 16))[0])
    return torch.tensor(out, dtype=torch.float32)


def write_rows(
    pool: torch.Tensor,
    rows_index: torch.Tensor,
    latent: torch.Tensor,
    *,
    rope: torch.Tensor | None,
    layout: KVRowLayout,
) -> None:
    """Write rows one by one, in order."""
    for t in range(latent.shape[0]):
        part = None if rope is None else rope[t]
        if layout.tile:
            packed = pack_row(latent[t], part, layout)
            pool[int(rows_index[t])] = torch.frombuffer(bytearray(packed), dtype=torch.uint8)
        else:
            row = latent[t] if part is None else torch.cat([latent[t], part])
            pool[int(rows_index[t])] = row.to(layout.dtype)
