"""Loading from folders: whole models of every architecture, slices, fp8 blocks, ties, and what must be reported."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from sidestream.config.model import Fp8BlockConfig, ModelConfig
from sidestream.errors import CheckpointError
from sidestream.weights import SafetensorsSource, Shard, WeightSource, open_weights
from sidestream.weights import safetensors_source as source_module
from tests.tiny_models import VARIANTS, build_oracle, save_checkpoint, tiny_config
from tests.weights.checkpoints import dequantise, expected_tensors, quantise, write

NAME = "model.layers.0.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def config() -> ModelConfig:
    return ModelConfig.from_hf(tiny_config("glm_moe_dsa").to_dict())


def load(source: WeightSource, name: str, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    out = torch.full(shape, float("nan"), dtype=dtype)
    source.load(name, out)
    return out


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_tensor_of_a_saved_model_is_asked_for_and_equal(variant: str, tmp_path: Path) -> None:
    architecture, overrides = VARIANTS[variant]
    model = build_oracle(architecture, 3, **overrides)
    save_checkpoint(model, tmp_path, max_shard_size="60KB")
    shards = sorted(tmp_path.glob("*.safetensors"))
    assert len(shards) > 3
    stored = {name: tensor for path in shards for name, tensor in load_file(path).items()}
    config = ModelConfig.from_hf(tmp_path)
    source = SafetensorsSource(tmp_path, config)
    loaded = {name: load(source, name, *shape) for name, shape in expected_tensors(config).items()}
    report = source.finish()
    assert report.unexpected == ()
    assert report.loaded == tuple(loaded)
    vision = {name for name in stored if name.startswith("model.visual.")}
    assert set(report.skipped) == vision
    assert bool(vision) == (architecture == "glm5_next")
    assert len(stored) == len(loaded) + len(vision)
    # Values: against the oracle's own modules, whose fused forms undo what saving did.
    state = model.state_dict()
    text = "model.language_model." if architecture == "glm5_next" else "model."
    for i, layer in enumerate(config.layers):
        ours, theirs = f"model.layers.{i}.", f"{text}layers.{i}."
        for name in ("input_layernorm.weight", "self_attn.o_proj.weight"):
            assert torch.equal(loaded[ours + name], state[theirs + name])
        if config.moe is not None and layer.mlp == "sparse":
            for expert in range(config.moe.num_experts):
                parts = [loaded[f"{ours}mlp.experts.{expert}.{p}_proj.weight"] for p in ("gate", "up", "down")]
                assert torch.equal(torch.cat(parts[:2]), state[f"{theirs}mlp.experts.gate_up_proj"][expert])
                assert torch.equal(parts[2], state[f"{theirs}mlp.experts.down_proj"][expert])
        if layer.attention == "kda":
            convs = [loaded[f"{ours}self_attn.{part}_conv1d.weight"] for part in "qkv"]
            assert torch.equal(torch.cat(convs), state[f"{theirs}self_attn.conv1d.weight"].squeeze(1))
            gate = f"{theirs}self_attn.forget_gate."
            assert torch.equal(loaded[f"{ours}self_attn.A_log"], state[f"{gate}A_log"].flatten())
            assert torch.equal(loaded[f"{ours}self_attn.dt_bias"], state[f"{gate}dt_bias"])
        if config.hyper_connection is not None:
            for site in ("attn", "ffn"):
                for part in ("fn", "base", "scale"):
                    assert torch.equal(loaded[f"{ours}hc_{site}_{part}"], state[f"{theirs}{site}_hc.{part}"])
    assert torch.equal(loaded["lm_head.weight"], state["lm_head.weight"])
    assert torch.equal(loaded["model.embed_tokens.weight"], state[f"{text}embed_tokens.weight"])


def test_missing_tensors_are_all_named_and_leave_the_destination(config: ModelConfig, tmp_path: Path) -> None:
    source = SafetensorsSource(write(tmp_path, {"model.norm.weight": torch.ones(4)}), config)
    absent = load(source, "model.layers.2.self_attn.indexer.wk.weight", 2, 2)
    load(source, "model.norm.weight", 4)
    load(source, NAME, 3)
    assert absent.isnan().all()
    with pytest.raises(CheckpointError) as caught:
        source.finish()
    assert f"2 tensors are missing: model.layers.2.self_attn.indexer.wk.weight, {NAME}" in str(caught.value)
    assert "model.norm.weight" not in str(caught.value)


def test_the_report_says_what_was_not_used(config: ModelConfig, tmp_path: Path) -> None:
    tensors = {
        "model.norm.weight": torch.ones(4),
        "model.extra": torch.ones(1),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4),
        "model.layers.1.self_attn.indexer.wk.weight": torch.ones(2, 2),  # layer 1 is a follower
        "model.layers.4.eh_proj.weight": torch.ones(2, 2),  # one past the last layer: multi-token prediction
        "model.layers.3.shared_head.norm.weight": torch.ones(2),
        "model.visual.blocks.0.norm1.weight": torch.ones(2),
    }
    source = SafetensorsSource(write(tmp_path, tensors), config)
    load(source, "model.norm.weight", 4)
    report = source.finish()
    assert report.unexpected == ("model.extra",)
    assert set(report.skipped) == set(tensors) - {"model.norm.weight", "model.extra"}
    assert "layer 1 reuses" in report.skipped["model.layers.1.self_attn.indexer.wk.weight"]
    assert "multi-token" in report.skipped["model.layers.4.eh_proj.weight"]
    assert "vision" in report.skipped["model.visual.blocks.0.norm1.weight"]


def test_a_follower_needs_no_indexer_and_a_leader_does(tmp_path: Path) -> None:
    save_checkpoint(build_oracle("glm_moe_dsa", 0), tmp_path)
    as_saved = ModelConfig.from_hf(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    values["indexer_types"] = ["full"] * 4
    all_full = ModelConfig.from_hf(values)
    for config, names in ((as_saved, []), (all_full, ["model.layers.1.", "model.layers.3."])):
        source = SafetensorsSource(tmp_path, config)
        for name, shape in expected_tensors(config).items():
            load(source, name, *shape)
        if not names:
            assert source.finish().unexpected == ()
            continue
        with pytest.raises(CheckpointError) as caught:
            source.finish()
        for layer in names:
            for tensor in ("wk.weight", "wq_b.weight", "k_norm.weight", "k_norm.bias", "weights_proj.weight"):
                assert f"{layer}self_attn.indexer.{tensor}" in str(caught.value)


def test_shapes_must_agree_but_for_dimensions_of_one(config: ModelConfig, tmp_path: Path) -> None:
    weight = torch.arange(12.0).view(4, 3)
    source = SafetensorsSource(
        write(tmp_path, {"a": weight.view(4, 1, 3).clone(), "b": weight, "c": torch.ones(1)}), config
    )
    assert torch.equal(load(source, "a", 4, 3), weight)
    assert torch.equal(load(source, "b", 1, 4, 3), weight.view(1, 4, 3))
    assert load(source, "c") == 1.0  # a scalar destination
    for shape in ((3, 4), (12,), (4, 4), (2, 3)):
        with pytest.raises(CheckpointError) as caught:
            load(source, "b", *shape)
        message = str(caught.value)
        assert "model.safetensors" in message
        assert "b has shape [4, 3]" in message
        assert f"asks for {list(shape)}" in message


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16, torch.float16])
def test_types_are_converted(config: ModelConfig, tmp_path: Path, stored: torch.dtype, wanted: torch.dtype) -> None:
    weight = torch.randn(7, 5, generator=torch.Generator().manual_seed(0)).to(stored)
    source = SafetensorsSource(write(tmp_path, {NAME: weight}), config)
    assert torch.equal(load(source, NAME, 7, 5, dtype=wanted), weight.to(wanted))


def test_a_file_that_changes_after_the_check_is_named(config: ModelConfig, tmp_path: Path) -> None:
    source = SafetensorsSource(write(tmp_path, {NAME: torch.ones(2, 2)}), config)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(CheckpointError, match=rf"model\.safetensors: ends inside tensor {NAME}"):
        load(source, NAME, 2, 2)
    path.unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors: cannot be read"):
        load(source, NAME, 2, 2)


def test_integers_are_not_weights(config: ModelConfig, tmp_path: Path) -> None:
    source = SafetensorsSource(write(tmp_path, {NAME: torch.ones(2, 2, dtype=torch.int32)}), config)
    with pytest.raises(CheckpointError, match=f"{NAME} has type I32"):
        load(source, NAME, 2, 2)


@settings(max_examples=60, deadline=None)
@given(
    shape=st.lists(st.sampled_from([1, 2, 4, 6, 8]), min_size=1, max_size=3),
    dim=st.integers(0, 2),
    size=st.sampled_from([1, 2, 4]),
    chunk=st.sampled_from([1, 3, 7, 1 << 20]),
    min_run=st.sampled_from([1, 1 << 20]),
)
def test_slices_of_any_dimension_into_strided_views(
    tmp_path_factory: pytest.TempPathFactory, shape: list[int], dim: int, size: int, chunk: int, min_run: int
) -> None:
    dim %= len(shape)
    shape[dim] *= size
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    config = ModelConfig.from_hf(tiny_config("glm_moe_dsa").to_dict())
    source = SafetensorsSource(write(tmp_path_factory.mktemp("w"), {NAME: weight}), config)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(source_module, "_CHUNK_ELEMENTS", chunk)
        patch.setattr("sidestream.weights.safetensors_file._MIN_RUN", min_run)
        for rank in range(size):
            local = list(shape)
            local[dim] //= size
            merged = torch.full([local[0] + 2, *local[1:]], float("nan"))  # rows of a wider parameter
            source.load(NAME, merged[1:-1], shard=Shard(dim, rank, size))
            assert torch.equal(merged[1:-1], weight.tensor_split(size, dim)[rank])
            assert merged[0].isnan().all()
            assert merged[-1].isnan().all()


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 40),
    cols=st.integers(1, 40),
    block=st.tuples(st.integers(1, 16), st.integers(1, 16)),
    dim=st.integers(0, 1),
    size=st.sampled_from([1, 2, 3]),
    min_run=st.sampled_from([1, 1 << 20]),
)
def test_fp8_blocks_in_slices_that_cut_through_them(
    tmp_path_factory: pytest.TempPathFactory,
    rows: int,
    cols: int,
    block: tuple[int, int],
    dim: int,
    size: int,
    min_run: int,
) -> None:
    rows, cols = (rows * size, cols) if dim == 0 else (rows, cols * size)
    weight = torch.randn(rows, cols, generator=torch.Generator().manual_seed(2)) * torch.linspace(0.1, 9.0, cols)
    stored, scales = quantise(weight, *block)
    config = ModelConfig.from_hf(tiny_config("glm_moe_dsa").to_dict())
    config = replace(config, quantization=Fp8BlockConfig(*block))
    folder = write(tmp_path_factory.mktemp("w"), {NAME: stored, f"{NAME}_scale_inv": scales})
    source = SafetensorsSource(folder, config)
    expected = dequantise(stored, scales, *block)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sidestream.weights.safetensors_file._MIN_RUN", min_run)
        for rank in range(size):
            out = torch.full(expected.tensor_split(size, dim)[rank].shape, float("nan"))
            source.load(NAME, out, shard=Shard(dim, rank, size))
            assert torch.equal(out, expected.tensor_split(size, dim)[rank])
    assert source.finish().unexpected == ()  # the scales count as used


def test_fp8_at_the_real_block_size(config: ModelConfig, tmp_path: Path) -> None:
    weight = torch.randn(300, 200, generator=torch.Generator().manual_seed(3))
    stored, scales = quantise(weight, 128, 128)
    assert scales.shape == (3, 2)
    fp8 = replace(config, quantization=Fp8BlockConfig())
    source = SafetensorsSource(write(tmp_path, {NAME: stored, f"{NAME}_scale_inv": scales}), fp8)
    expected = dequantise(stored, scales, 128, 128)
    assert torch.equal(load(source, NAME, 300, 200), expected)
    assert torch.equal(load(source, NAME, 300, 200, dtype=torch.bfloat16), expected.to(torch.bfloat16))
    assert (expected - weight).abs().max() < weight.abs().max() / 16  # a sane quantiser: three bits of fraction


def test_a_whole_fp8_model_loads(tmp_path: Path) -> None:
    """Every projection of a Kimi checkpoint in fp8, under the hub's own expert names."""
    save_checkpoint(build_oracle("kimi_linear", 4), tmp_path)
    path = tmp_path / "model.safetensors"
    tensors, expected = load_file(path), {}
    for name, tensor in list(tensors.items()):
        if tensor.dim() == 2 and name.endswith(("_proj.weight", "w1.weight", "w2.weight", "w3.weight")):
            stored, scales = quantise(tensor, 32, 16)
            tensors[name], tensors[f"{name}_scale_inv"] = stored, scales
            expected[name] = dequantise(stored, scales, 32, 16)
    path.unlink()
    write(tmp_path, tensors)
    values = json.loads((tmp_path / "config.json").read_text())
    values["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [32, 16]}
    config = ModelConfig.from_hf(values)
    source = SafetensorsSource(tmp_path, config)
    loaded = {name: load(source, name, *shape) for name, shape in expected_tensors(config).items()}
    assert source.finish().unexpected == ()
    old = "model.layers.1.block_sparse_moe.experts.5"
    for theirs, ours in (("w1", "gate_proj"), ("w2", "down_proj"), ("w3", "up_proj")):
        wanted = expected[f"{old}.{theirs}.weight"]
        assert torch.equal(loaded[f"model.layers.1.mlp.experts.5.{ours}.weight"], wanted)


def test_fp8_without_fitting_scales_is_refused(config: ModelConfig, tmp_path: Path) -> None:
    stored, scales = quantise(torch.randn(40, 24), 16, 16)
    fp8 = replace(config, quantization=Fp8BlockConfig(16, 16))
    good = {NAME: stored, f"{NAME}_scale_inv": scales}
    with pytest.raises(CheckpointError, match="no quantization_config"):
        load(SafetensorsSource(write(tmp_path / "a", good), config), NAME, 40, 24)
    with pytest.raises(CheckpointError, match=f"{NAME}_scale_inv is missing"):
        load(SafetensorsSource(write(tmp_path / "b", {NAME: stored}), fp8), NAME, 40, 24)
    for i, wrong in enumerate((scales[:2], scales.T.contiguous(), scales.to(torch.bfloat16), scales.flatten())):
        folder = write(tmp_path / f"c{i}", {**good, f"{NAME}_scale_inv": wrong})
        with pytest.raises(CheckpointError, match=r"it must be F32 \[3, 2\]"):
            load(SafetensorsSource(folder, fp8), NAME, 40, 24)
    vector = {"v": stored[0], "v_scale_inv": scales[0]}
    with pytest.raises(CheckpointError, match="v_scale_inv"):
        load(SafetensorsSource(write(tmp_path / "d", vector), fp8), "v", 24)


def test_scales_of_a_plain_tensor_are_unexpected(config: ModelConfig, tmp_path: Path) -> None:
    tensors = {NAME: torch.ones(2, 2), f"{NAME}_scale_inv": torch.ones(1, 1)}
    source = SafetensorsSource(write(tmp_path, tensors), config)
    load(source, NAME, 2, 2)
    assert source.finish().unexpected == (f"{NAME}_scale_inv",)


@pytest.mark.parametrize("architecture", ["glm_moe_dsa", "glm5_next"])
def test_tied_embeddings_as_saved(architecture: str, tmp_path: Path) -> None:
    save_checkpoint(build_oracle(architecture, 5, tie_word_embeddings=True), tmp_path)
    config = ModelConfig.from_hf(tmp_path)
    assert config.tie_word_embeddings
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    source = SafetensorsSource(tmp_path, config)
    head = load(source, "lm_head.weight", config.vocab_size, config.hidden_size)
    assert torch.equal(head, load(source, "model.embed_tokens.weight", config.vocab_size, config.hidden_size))
    source.finish()
    untied = SafetensorsSource(tmp_path, replace(config, tie_word_embeddings=False))
    load(untied, "lm_head.weight", config.vocab_size, config.hidden_size)
    with pytest.raises(CheckpointError, match=r"missing: lm_head\.weight"):
        untied.finish()


def test_a_stored_head_of_a_tied_model(config: ModelConfig, tmp_path: Path) -> None:
    """As transformers: the same values are one tensor; other values are not silently dropped."""
    tied = replace(config, tie_word_embeddings=True)
    embedding = torch.randn(6, 4)
    same = write(tmp_path / "same", {"model.embed_tokens.weight": embedding, "lm_head.weight": embedding.clone()})
    source = SafetensorsSource(same, tied)
    load(source, "model.embed_tokens.weight", 6, 4)
    assert list(source.finish().skipped) == ["lm_head.weight"]
    other = write(tmp_path / "other", {"model.embed_tokens.weight": embedding, "lm_head.weight": embedding + 1})
    source = SafetensorsSource(other, tied)
    load(source, "model.embed_tokens.weight", 6, 4)
    with pytest.raises(CheckpointError, match=r"lm_head\.weight differs .* set tie_word_embeddings to false"):
        source.finish()
    source = SafetensorsSource(other, tied)
    assert torch.equal(load(source, "lm_head.weight", 6, 4), embedding + 1)
    only_head = write(tmp_path / "head", {"lm_head.weight": embedding})
    source = SafetensorsSource(only_head, tied)
    assert torch.equal(load(source, "model.embed_tokens.weight", 6, 4), embedding)


def test_two_names_of_one_tensor_are_refused(tmp_path: Path) -> None:
    config = ModelConfig.from_hf(tiny_config("kimi_linear").to_dict())
    twice = {"model.layers.0.mlp.up_proj.weight": torch.ones(1)}
    twice["model.layers.0.block_sparse_moe.up_proj.weight"] = torch.ones(1)
    with pytest.raises(CheckpointError, match="are the same tensor"):
        SafetensorsSource(write(tmp_path, twice), config)


def test_load_formats(config: ModelConfig, tmp_path: Path) -> None:
    write(tmp_path, {NAME: torch.full((2, 2), 7.0)})
    assert load(open_weights(tmp_path, config), NAME, 2, 2).eq(7.0).all()
    dummy = load(open_weights(tmp_path / "none", config, load_format="dummy", seed=1), NAME, 2, 2)
    assert dummy.abs().max() < 1.0
    with pytest.raises(ValueError, match="load_format is 'pt', allowed are auto, dummy"):
        open_weights(tmp_path, config, load_format="pt")
