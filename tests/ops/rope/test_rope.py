"""The rope table and both rotations, against transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DeepseekV32Config
from transformers.models.deepseek_v32.modeling_deepseek_v32 import (
    DeepseekV32RotaryEmbedding,
    apply_rotary_pos_emb,
    apply_rotary_pos_emb_interleave,
)

from sidestream.config.model import RopeConfig
from sidestream.ops.rope import apply_rope, reference, rope_table
from tests.tolerances import BF16_OUTPUT, FP32_ROUNDING

DIM = 16


def oracle_table(parameters: dict[str, Any], positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """transformers' cos and sin, [P, DIM]: each angle twice."""
    config = DeepseekV32Config(
        hidden_size=64, num_attention_heads=4, qk_rope_head_dim=DIM, qk_nope_head_dim=8, rope_parameters=parameters
    )
    cos, sin = DeepseekV32RotaryEmbedding(config)(torch.zeros(1), positions[None])
    assert cos.shape[-1] == DIM
    return cos[0], sin[0]


@pytest.mark.parametrize("theta", [1e4, 8e6])
def test_default_table_equals_transformers(theta: float) -> None:
    cos, sin = oracle_table({"rope_type": "default", "rope_theta": theta}, torch.arange(3000))
    got = rope_table(RopeConfig("default", theta), DIM, 3000)
    assert torch.equal(got[0], cos[:, : DIM // 2])
    assert torch.equal(got[1], sin[:, : DIM // 2])


@pytest.mark.parametrize("truncate", [True, False])
@pytest.mark.parametrize(("original", "factor"), [(64, 32.0), (4096, 40.0)])
@pytest.mark.parametrize("attention_factor", [1.0, 1.21])
def test_yarn_table_equals_transformers(truncate: bool, original: int, factor: float, attention_factor: float) -> None:
    parameters = {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": factor,
        "original_max_position_embeddings": original,
        "beta_fast": 30.0,
        "beta_slow": 2.0,
        "attention_factor": attention_factor,
        "truncate": truncate,
    }
    cos, sin = oracle_table(parameters, torch.arange(3000))
    rope = RopeConfig("yarn", 1e4, factor, original, 30.0, 2.0, attention_factor, truncate)
    got = rope_table(rope, DIM, 3000)
    # frequencies agree to an ulp, and angles of up to 3,000 carry that: 3000 * 2 ** -24
    torch.testing.assert_close(got[0], cos[:, : DIM // 2], rtol=0, atol=3e-4)
    torch.testing.assert_close(got[1], sin[:, : DIM // 2], rtol=0, atol=3e-4)
    torch.testing.assert_close(got[0][:64], cos[:64, : DIM // 2], rtol=0, atol=2 * FP32_ROUNDING)
    plain = rope_table(RopeConfig("default", 1e4), DIM, 64)
    assert not torch.allclose(got[1][:64], plain[1] * attention_factor, atol=1e-2), "yarn changed nothing"


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", [None, 1, 3])
def test_rotation_equals_transformers(interleaved: bool, dtype: torch.dtype, heads: int | None) -> None:
    tokens = 9
    cos, sin = rope_table(RopeConfig("default", 100.0), DIM, tokens)
    shape = (tokens, DIM) if heads is None else (tokens, heads, DIM)
    x = torch.randn(shape).to(dtype)
    rows = x.float() if heads is not None else x.float()[:, None]  # [T, H, D], rotated in fp32 as the fast path does
    rotate = apply_rotary_pos_emb_interleave if interleaved else apply_rotary_pos_emb
    want = rotate(rows, rows, cos.repeat(1, 2), sin.repeat(1, 2), unsqueeze_dim=1)[0].view(shape)
    if interleaved:  # transformers returns [first elements, second elements]
        want = torch.stack((want[..., : DIM // 2], want[..., DIM // 2 :]), -1).flatten(-2)
    got = apply_rope(x, cos, sin, interleaved=interleaved)
    assert got.dtype == dtype
    relative = 0.0 if dtype == torch.float32 else BF16_OUTPUT
    torch.testing.assert_close(got.float(), want, rtol=relative, atol=FP32_ROUNDING)
    torch.testing.assert_close(
        got, reference.apply_rope(x, cos, sin, interleaved=interleaved), rtol=2 * relative, atol=FP32_ROUNDING
    )


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize(("offset", "width"), [(5, 31), (6, 32), (0, 17), (3, 40)])
def test_a_slice_of_a_wider_row_is_rotated_alone(interleaved: bool, offset: int, width: int) -> None:
    """The rope slice of a head lies behind its other dimensions, at any offset, odd ones too."""
    cos, sin = rope_table(RopeConfig("default", 100.0), DIM, 4)
    whole = torch.full((4, 2, width), float("nan"))
    x = whole[..., offset : offset + DIM]
    x.copy_(torch.randn(4, 2, DIM))
    before = x.clone()
    got = apply_rope(x, cos, sin, interleaved=interleaved)
    want = reference.apply_rope(before, cos, sin, interleaved=interleaved)
    torch.testing.assert_close(got, want, rtol=0, atol=FP32_ROUNDING)
    assert torch.equal(x, before), "the input was changed"


@pytest.mark.parametrize("interleaved", [True, False])
def test_scores_depend_on_the_distance_alone(interleaved: bool) -> None:
    cos, sin = rope_table(RopeConfig("default", 50.0), DIM, 40)
    q, k = torch.randn(1, DIM).expand(40, DIM), torch.randn(1, DIM).expand(40, DIM)
    q_turned = apply_rope(q, cos, sin, interleaved=interleaved)
    k_turned = apply_rope(k, cos, sin, interleaved=interleaved)
    scores = q_turned @ k_turned.T
    for distance in (0, 3, 17):
        line = scores.diagonal(-distance)
        torch.testing.assert_close(line, line[:1].expand_as(line), rtol=0, atol=2e-5)


def test_one_token_from_an_odd_place_in_memory() -> None:
    cos, sin = rope_table(RopeConfig("default", 50.0), DIM, 1)
    x = torch.randn(DIM + 1)[1:].view(1, DIM)
    torch.testing.assert_close(
        apply_rope(x, cos, sin, interleaved=True),
        reference.apply_rope(x, cos, sin, interleaved=True),
        rtol=0,
        atol=FP32_ROUNDING,
    )
