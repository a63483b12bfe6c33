"""Layers cut over two ranks: what the ranks would sum or join equals the whole layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from sidestream.attention.latent import PagedLatentAttention
from sidestream.attention.step_inputs import StepInputsBuilder
from sidestream.cache.groups import plan_cache_groups
from sidestream.cache.pools import CachePools
from sidestream.config.model import ModelConfig
from sidestream.core.batch import Chunk
from sidestream.core.forward_context import ForwardContext, forward_context
from sidestream.errors import ConfigError
from sidestream.layers.embedding import Embedding, Head
from sidestream.layers.kda import KimiDeltaAttention
from sidestream.layers.loader import LayerLoader
from sidestream.layers.mla import LatentAttention
from sidestream.layers.mlp import DenseMlp, MoeMlp
from sidestream.layers.parallel import ParallelGroup
from sidestream.layers.weight_format import DenseFormat
from sidestream.ops.kv_rows import kv_row_layout
from sidestream.weights import open_weights
from tests.tiny_models import build_oracle, save_checkpoint
from tests.tolerances import FP32_GEMM

TOKENS = 24
CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Partial(ParallelGroup):
    """A rank of a group whose sums and joins are left to the test."""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Cut:
    """One tiny checkpoint, and layers of it for any rank."""

    def __init__(self, folder: Path, architecture: str) -> None:
        self.folder = save_checkpoint(build_oracle(architecture, 19), folder)
        self.config = ModelConfig.from_hf(folder)
        self.x = torch.randn(TOKENS, self.config.hidden_size, generator=torch.Generator().manual_seed(1))

    def loader(self, group: ParallelGroup, name: str) -> LayerLoader:
        source = open_weights(self.folder, self.config, load_format="auto", seed=0)
        loader = LayerLoader(source, "", torch.float32, CPU, DenseFormat(torch.float32, CPU), group)
        for part in name.split("."):
            loader = loader.at(part) if part else loader
        return loader

    @torch.inference_mode()
    def run(
        self, make: Callable[[ParallelGroup], Any], group: ParallelGroup, *inputs: torch.Tensor | None
    ) -> torch.Tensor:
        """Run a layer in a step of one fresh prefill."""
        indexer, kda = self.config.indexer, self.config.kda
        kpool = indexer.kpool if indexer is not None else 1
        layout = kv_row_layout(
            "auto",
            latent_dim=self.config.mla.kv_lora_rank,
            rope_dim=self.config.mla.qk_rope_head_dim,
            model_dtype=torch.float32,
        )
        groups = plan_cache_groups(
            self.config,
            block_size=8,
            row_elems=layout.row_elems,
            row_dtype=torch.float32,
            model_dtype=torch.float32,
        )
        pools = CachePools(groups, 8, 2, device=CPU)
        if kda is not None:  # a rank keeps the state of its own heads
            heads = kda.num_heads // group.size
            for layer, state in pools.recurrent.items():
                pools.recurrent[layer] = state[:, :, :heads].clone()
                pools.conv[layer] = pools.conv[layer][:, : 3 * heads * kda.head_dim].clone()
        pools.poison()
        builder = StepInputsBuilder(8, kda.conv_size if kda is not None else 0, kpool, 0)
        step = builder.build([Chunk("r", 0, TOKENS, (1, 2, 3), 1, False, False)], [5] * TOKENS)
        attention = PagedLatentAttention(layout=layout, scale=self.config.mla.softmax_scale, groups=())
        caches = tuple(pools.layer(i) for i in range(self.config.num_layers))
        with forward_context(ForwardContext(step, caches, attention, attention)):
            return make(group)(*inputs)

    def summed(self, make: Callable[[ParallelGroup], Any], *inputs: torch.Tensor | None) -> None:
        whole = self.run(make, ParallelGroup(), *inputs)
        parts = [self.run(make, Partial(rank, 2), *inputs) for rank in range(2)]
        assert not torch.allclose(parts[0], whole, atol=1e-3)
        torch.testing.assert_close(parts[0] + parts[1], whole, atol=FP32_GEMM, rtol=0)


@pytest.fixture(scope="module")
def cut(tmp_path_factory: pytest.TempPathFactory) -> Cut:
    return Cut(tmp_path_factory.mktemp("kimi"), "kimi_linear")


def test_mlp_and_experts(cut: Cut) -> None:
    config = cut.config
    cut.summed(lambda group: DenseMlp(cut.loader(group, "model.layers.0.mlp"), config, config.intermediate_size), cut.x)
    cut.summed(lambda group: MoeMlp(cut.loader(group, "model.layers.1.mlp"), config), cut.x)


def test_kda_heads(cut: Cut) -> None:
    cut.summed(lambda group: KimiDeltaAttention(cut.loader(group, "model.layers.0.self_attn"), cut.config, 0), cut.x)


def test_latent_attention_heads(cut: Cut) -> None:
    cut.summed(lambda group: LatentAttention(cut.loader(group, "model.layers.2.self_attn"), cut.config, 2), cut.x, None)


def test_embedding_and_head(cut: Cut) -> None:
    ids = torch.arange(TOKENS) * 6
    cut.summed(lambda group: Embedding(cut.loader(group, "model"), cut.config), ids)

    def head(group: ParallelGroup) -> Head:
        return Head(cut.loader(group, ""), cut.config, Embedding(cut.loader(group, "model"), cut.config))

    whole = cut.run(head, ParallelGroup(), cut.x)
    joined = torch.cat([cut.run(head, Partial(rank, 2), cut.x) for rank in range(2)], dim=-1)
    torch.testing.assert_close(joined, whole, atol=FP32_GEMM, rtol=0)


def test_a_size_that_does_not_divide_is_named(cut: Cut) -> None:
    with pytest.raises(ConfigError, match=r"linear_num_heads 6 does not divide over 4"):
        KimiDeltaAttention(cut.loader(Partial(0, 4), "model.layers.0.self_attn"), cut.config, 0)
