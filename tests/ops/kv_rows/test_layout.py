"""KV row formats: sizes, refusals, bytes against a byte-by-byte reference, error bounds that the formats promise."""

from __future__ import annotations

import math

import pytest
import torch

from sidestream.errors import ConfigError
from sidestream.ops.kv_rows import KVRowLayout, kv_row_layout, pack_rows, reference, unpack_rows

NAN, INF = math.nan, math.inf
E4M3_HALF_STEP = 2**-4
"""Relative: half a step of a 3-bit mantissa. A float that is exactly between two codes reaches it."""
E4M3_HALF_SUBNORMAL = 2**-10
"""Absolute, in units of the scale, below the smallest normal value 2**-6."""


def layout(name: str, r: int, p: int = 0, dtype: torch.dtype = torch.float32) -> KVRowLayout:
    return kv_row_layout(name, latent_dim=r, rope_dim=p, model_dtype=dtype)


def quantised() -> list[KVRowLayout]:
    return [
        layout("fp8_ds_mla", 512, 64),
        layout("fp8_ds_mla", 64, 6),
        layout("fp8_ds_mla", 256),
        layout("mxfp8", 512),
        layout("mxfp8", 32),
    ]


@pytest.mark.parametrize(
    ("name", "r", "p", "dtype", "pool_dtype", "elems", "size"),
    [
        ("auto", 512, 64, torch.bfloat16, torch.bfloat16, 576, 1152),
        ("auto", 64, 0, torch.float32, torch.float32, 64, 256),
        ("bf16", 512, 0, torch.float32, torch.bfloat16, 512, 1024),
        ("fp8_ds_mla", 512, 64, torch.bfloat16, torch.uint8, 656, 656),
        ("fp8_ds_mla", 64, 16, torch.float32, torch.uint8, 100, 100),
        ("fp8_ds_mla", 512, 0, torch.bfloat16, torch.uint8, 528, 528),
        ("mxfp8", 512, 0, torch.bfloat16, torch.uint8, 528, 528),
        ("mxfp8", 64, 0, torch.float32, torch.uint8, 66, 66),
    ],
)
def test_sizes(name: str, r: int, p: int, dtype: torch.dtype, pool_dtype: torch.dtype, elems: int, size: int) -> None:
    made = layout(name, r, p, dtype)
    assert (made.dtype, made.row_elems, made.row_bytes) == (pool_dtype, elems, size)
    rope = torch.randn(3, p) if p else None
    packed = pack_rows(torch.randn(3, r), rope, made)
    assert (packed.dtype, packed.shape) == (pool_dtype, (3, elems))


def test_refusals_name_the_value_and_the_way_out() -> None:
    with pytest.raises(ConfigError, match=r"'fp7'.*auto, bf16, fp8_ds_mla, mxfp8"):
        layout("fp7", 512)
    with pytest.raises(ConfigError, match=r"mxfp8.*qk_rope_head_dim is 64.*fp8_ds_mla"):
        layout("mxfp8", 512, 64)
    with pytest.raises(ConfigError, match=r"tiles of 128 .*192"):
        layout("fp8_ds_mla", 192)
    with pytest.raises(ConfigError, match=r"tiles of 32 .*48"):
        layout("mxfp8", 48)


@pytest.mark.parametrize("made", quantised(), ids=lambda x: f"{x.name}-{x.latent_dim}-{x.rope_dim}")
def test_bytes_equal_the_reference(made: KVRowLayout) -> None:
    latent = torch.randn(5, made.latent_dim) * torch.tensor([1.0, 1e-3, 300.0, 1e-30, 1e30])[:, None]
    latent[1, : made.tile // 2] = 0
    latent[2, 0], latent[2, 1], latent[2, 2] = 448.0, 448.0 * 1.0625, -0.0
    rope = torch.randn(5, made.rope_dim) if made.rope_dim else None
    packed = pack_rows(latent, rope, made)
    for t in range(5):
        want = reference.pack_row(latent[t], None if rope is None else rope[t], made)
        assert bytes(packed[t].tolist()) == want, t
        unpacked = unpack_rows(packed[t], made, dtype=torch.float32)
        assert torch.equal(unpacked, reference.unpack_row(want, made))


@pytest.mark.parametrize("made", quantised(), ids=lambda x: f"{x.name}-{x.latent_dim}-{x.rope_dim}")
def test_error_is_what_the_format_explains(made: KVRowLayout) -> None:
    latent = torch.randn(64, made.latent_dim) * torch.logspace(-6, 6, 64)[:, None]
    rope = torch.randn(64, made.rope_dim) if made.rope_dim else None
    packed = pack_rows(latent, rope, made)
    got = unpack_rows(packed, made, dtype=torch.float32)
    tiles = latent.view(64, -1, made.tile)
    # A scale is at most amax / 448, or twice that where it is a power of two.
    scale = tiles.abs().amax(dim=2, keepdim=True) / 448 * (2 if made.name == "mxfp8" else 1)
    bound = torch.maximum(tiles.abs() * E4M3_HALF_STEP, scale * E4M3_HALF_SUBNORMAL) * (1 + 1e-6)
    error = (got[:, : made.latent_dim].view_as(tiles) - tiles).abs()
    assert (error <= bound).all()
    assert error.max() > 0
    if rope is not None:
        assert torch.equal(got[:, made.latent_dim :], rope.to(torch.bfloat16).float())


@pytest.mark.parametrize("made", quantised(), ids=lambda x: f"{x.name}-{x.latent_dim}-{x.rope_dim}")
def test_packing_what_was_unpacked_changes_no_value(made: KVRowLayout) -> None:
    def pack_again(unpacked: torch.Tensor) -> torch.Tensor:
        latent, rope = unpacked.split([made.latent_dim, made.rope_dim], dim=1)
        return pack_rows(latent, rope if made.rope_dim else None, made)

    rope = torch.randn(50, made.rope_dim) if made.rope_dim else None
    packed = pack_rows(torch.randn(50, made.latent_dim), rope, made)
    once = unpack_rows(packed, made, dtype=torch.float32)
    again = pack_again(once)
    twice = unpack_rows(again, made, dtype=torch.float32)
    assert torch.equal(twice, once)
    assert torch.equal(pack_again(twice), again)
    if made.name == "fp8_ds_mla":
        assert torch.equal(again, packed)


@pytest.mark.parametrize("made", quantised(), ids=lambda x: f"{x.name}-{x.latent_dim}-{x.rope_dim}")
def test_zero_rows_and_bad_values(made: KVRowLayout) -> None:
    latent = torch.zeros(4, made.latent_dim)
    rope = torch.zeros(4, made.rope_dim) if made.rope_dim else None
    latent[1, -1] = NAN
    latent[2, -1] = INF
    latent[3, 0] = 3e38
    packed = pack_rows(latent, rope, made)
    assert not packed[0, : made.latent_dim].any()
    got = unpack_rows(packed, made, dtype=torch.float32)[:, : made.latent_dim]
    assert torch.equal(got[0], torch.zeros(made.latent_dim))
    for t in (1, 2):
        assert got[t, -made.tile :].isnan().all()
        assert not got[t, : -made.tile].isnan().any()
    assert got[3].isfinite().all()
    assert abs(float(got[3, 0]) - 3e38) <= 3e38 * E4M3_HALF_STEP


def test_smallest_scales() -> None:
    fp8, mx = layout("fp8_ds_mla", 64), layout("mxfp8", 32)
    assert pack_rows(torch.zeros(1, 64), None, fp8)[0, 64:].view(torch.float32).item() == 2.0**-126
    assert pack_rows(torch.zeros(1, 32), None, mx)[0, 32].item() == 1
    tiny = torch.full((1, 32), 1e-44)  # a denormal
    assert pack_rows(tiny, None, mx)[0, 32].item() == 1


def test_power_of_two_scales_are_exact() -> None:
    mx = layout("mxfp8", 32)
    for amax, code in ((448.0, 127), (448.0000305, 128), (224.0, 126), (1.0, 119), (0.875, 118), (0.8750001, 119)):
        latent = torch.zeros(1, 32)
        latent[0, 3] = -amax
        assert pack_rows(latent, None, mx)[0, 32].item() == code, amax


@pytest.mark.parametrize("made", quantised(), ids=lambda x: f"{x.name}-{x.latent_dim}-{x.rope_dim}")
def test_strided_and_batched_rows(made: KVRowLayout) -> None:
    wide = torch.randn(6, 2 * made.latent_dim, dtype=torch.bfloat16)
    latent = wide[::2, ::2]
    rope = torch.randn(made.rope_dim, 3).t() if made.rope_dim else None
    packed = pack_rows(latent, rope, made)
    dense = pack_rows(latent.contiguous(), None if rope is None else rope.contiguous(), made)
    assert torch.equal(packed, dense)
    holder = torch.full((2, 3, made.row_elems + 3), 0x7F, dtype=torch.uint8)
    holder[:, :, 1 : 1 + made.row_elems] = packed
    got = unpack_rows(holder[:, :, 1 : 1 + made.row_elems], made, dtype=torch.bfloat16)
    assert got.shape == (2, 3, made.latent_dim + made.rope_dim)
    assert torch.equal(got[1], unpack_rows(packed, made, dtype=torch.bfloat16))


def test_plain_rows_round_trip() -> None:
    latent, rope = torch.randn(4, 8), torch.randn(4, 2)
    same = layout("auto", 8, 2)
    assert torch.equal(
        unpack_rows(pack_rows(latent, rope, same), same, dtype=torch.float32), torch.cat([latent, rope], 1)
    )
    short = layout("bf16", 8, 2)
    packed = pack_rows(latent, rope, short)
    assert torch.equal(packed, torch.cat([latent, rope], 1).bfloat16())


def test_rope_must_fit_the_layout() -> None:
    with pytest.raises(AssertionError, match="rope key of 0, layout has 2"):
        pack_rows(torch.randn(1, 8), None, layout("auto", 8, 2))
    with pytest.raises(AssertionError, match="latent of 7, layout has 8"):
        pack_rows(torch.randn(1, 7), None, layout("auto", 8))
