"""Random weights: repeatable, the same in any slicing, and with the values that keep activations finite."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from sidestream.config.model import ModelConfig
from sidestream.weights import DummySource, Shard
from sidestream.weights import dummy_source as module
from tests.tiny_models import VARIANTS, build_oracle, tiny_config
from tests.weights.checkpoints import expected_tensors

CONFIG = ModelConfig.from_hf(tiny_config("glm5_next").to_dict())


def draw(name: str, *shape: int, seed: int = 7, shard: Shard | None = None, dtype: torch.dtype = torch.float32):
    out = torch.full(shape, float("nan"), dtype=dtype)
    DummySource(CONFIG, seed).load(name, out, shard=shard)
    return out


@pytest.mark.parametrize("chunk", [1, 10, 1 << 20])
def test_slices_are_slices_of_the_whole(monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    monkeypatch.setattr(module, "_CHUNK_ELEMENTS", chunk)
    for shape in ((12,), (12, 8), (4, 8, 4)):
        full = draw("model.layers.0.mlp.up_proj.weight", *shape)
        assert not full.isnan().any()
        assert full.unique().numel() == full.numel()
        for dim in range(len(shape)):
            for rank in range(4):
                local = [n // 4 if d == dim else n for d, n in enumerate(shape)]
                part = draw("model.layers.0.mlp.up_proj.weight", *local, shard=Shard(dim, rank, 4))
                assert torch.equal(part, full.tensor_split(4, dim)[rank])


def test_values_follow_from_seed_and_name_alone() -> None:
    first, second = DummySource(CONFIG, 1), DummySource(CONFIG, 1)
    a, b, c = torch.empty(5, 5), torch.empty(5, 5), torch.empty(5, 5)
    first.load("x", a)
    first.load("y", b)
    second.load("y", c)
    assert torch.equal(b, c)
    assert not torch.equal(a, b)
    assert not torch.equal(a, draw("x", 5, 5, seed=2))
    merged = torch.full((5, 9), float("nan"))
    first.load("x", merged[:, 2:7])  # a strided destination
    assert torch.equal(merged[:, 2:7], a)
    assert merged[:, :2].isnan().all()
    assert torch.equal(draw("x", 5, 5, seed=1, dtype=torch.bfloat16), a.to(torch.bfloat16))
    assert first.finish().loaded == ("x", "y", "x")


def test_weights_are_normal_with_a_small_deviation() -> None:
    weight = draw("model.layers.0.self_attn.q_proj.weight", 400, 400)
    assert weight.mean().abs() < 2e-4
    assert weight.std() == pytest.approx(0.02, rel=0.02)
    assert (weight.abs() < 0.02).float().mean() == pytest.approx(0.669, abs=0.006)  # 5 deviations; normal: 0.683


def test_neighbouring_keys_give_unrelated_weights() -> None:
    a, b = (module._normal(1 << 14, key, torch.device("cpu")) for key in (1000, 1001))
    for shift in range(-3, 4):
        left, right = a[3:-3], b[3 + shift : b.numel() - 3 + shift]
        # the correlation of independent samples has a deviation of 1/128 here; five of them
        assert abs(torch.corrcoef(torch.stack([left, right]))[0, 1]) < 5 / 128


def test_weights_do_not_change_between_releases() -> None:
    """Integer arithmetic alone decides them, so every device gives these."""
    scaled = module._normal(4, 12345, torch.device("cpu")).double() / 0.02 * ((2**32 - 1) / 3) ** 0.5
    assert torch.equal(scaled.round().long(), torch.tensor([-47737, -6382, 19029, 50017]))


@pytest.mark.parametrize("variant", VARIANTS)
def test_named_constants(variant: str) -> None:
    architecture, overrides = VARIANTS[variant]
    config = ModelConfig.from_hf(tiny_config(architecture, **overrides).to_dict())
    source = DummySource(config, 0)
    ones, zeros = set(), set()
    for name, shape in expected_tensors(config).items():
        out = torch.full(shape, float("nan"))
        source.load(name, out)
        assert out.isfinite().all()
        leaf = name.split("layers.")[-1].partition(".")[2]
        if out.eq(1).all():
            ones.add(leaf)
        if out.eq(0).all():
            zeros.add(leaf)
    norms = {"input_layernorm.weight", "post_attention_layernorm.weight"}
    assert norms <= ones
    assert {"hc_attn_scale", "hc_ffn_scale", "self_attn.o_norm.weight", "self_attn.indexer.k_norm.weight"} >= (
        {leaf for leaf in ones if "layernorm" not in leaf and leaf != "norm.weight"}
    )
    if architecture == "glm5_next":
        assert {"hc_attn_scale", "hc_ffn_scale", "self_attn.o_norm.weight"} <= ones
        assert {"hc_attn_base", "hc_ffn_base", "self_attn.A_log", "self_attn.dt_bias"} <= zeros
        assert {"self_attn.indexer.index_kpool_compress_ape", "self_attn.indexer.k_norm.bias"} <= zeros
    assert "mlp.gate.e_score_correction_bias" in zeros


def test_a_tied_head_is_the_embedding() -> None:
    source = DummySource(replace(CONFIG, tie_word_embeddings=True), 3)
    head, embedding, own = torch.empty(6, 4), torch.empty(6, 4), torch.empty(6, 4)
    source.load("lm_head.weight", head)
    source.load("model.embed_tokens.weight", embedding)
    DummySource(CONFIG, 3).load("lm_head.weight", own)
    assert torch.equal(head, embedding)
    assert not torch.equal(own, embedding)


def test_activations_are_finite_in_the_oracle() -> None:
    """The weights of a dummy model, put into transformers' own module, give finite and non-constant logits."""
    model = build_oracle("glm_moe_dsa", 0)
    source = DummySource(ModelConfig.from_hf(model.config.to_dict()), 0)
    for name, tensor in model.state_dict().items():
        source.load(name, tensor)
    with torch.no_grad():
        logits = model(input_ids=torch.arange(20).unsqueeze(0), use_cache=False).logits
    assert logits.isfinite().all()
    assert logits.std() > 1e-3
