"""Latent attention and its index groups: dense layers have none, and touch none."""

from __future__ import annotations

import pytest
import torch

from sidestream.attention.latent import PagedLatentAttention
from sidestream.core.forward_context import ForwardContext, forward_context
from sidestream.core.layer_cache import LayerCache
from sidestream.errors import HandoffError
from sidestream.ops.kv_rows import kv_row_layout
from tests.attention.group_machine import BLOCK, POOL_BLOCKS, GroupMachine, Recorder
from tests.tolerances import FP32_GEMM

LATENT = 6
HEADS = 2
LAYOUT = kv_row_layout("auto", latent_dim=LATENT, rope_dim=0, model_dtype=torch.float32)


class Model:
    """Layer 0 is dense, layers 1 and 2 are one index group; all KV rows start as noise."""

    def __init__(self) -> None:
        self.resolver = Recorder()
        self.machine = GroupMachine(((1, 2),), resolver=self.resolver)
        self.resolver.machine = self.machine
        self.attention = PagedLatentAttention(layout=LAYOUT, scale=0.5, groups=self.machine.groups)
        self.pools = [self.upload(torch.randn(POOL_BLOCKS * BLOCK, LATENT)) for _ in range(3)]

    def upload(self, x: torch.Tensor) -> torch.Tensor:
        made = x.to(self.machine.backend.device)
        self.machine.backend.synchronize()
        return made

    def context(self) -> ForwardContext:
        return ForwardContext(
            inputs=self.machine.step_inputs(),
            caches=tuple(LayerCache(kv=pool) for pool in self.pools),
            attention=self.attention,
            index_sink=self.attention,
        )

    def attend(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The query and what attention made of it, on the host."""
        rows = self.machine.step_inputs().segment_rows
        query, latent = torch.randn(rows, HEADS, LATENT), torch.randn(rows, LATENT)
        with self.machine.on_compute(), forward_context(self.context()):
            out = self.attention.attend(layer, self.upload(query), self.upload(latent), rope_key=None)
            return query, out.cpu()


def test_a_dense_layer_sees_its_whole_context_and_touches_no_group() -> None:
    model = Model()
    machine, group = model.machine, model.machine.groups[0]
    with machine.on_compute():
        machine.begin_decode(4, rows=4, live=3)
        group.logical_topk_indices.fill_(-1)
    query, out = model.attend(0)
    assert model.resolver.calls == []
    assert not group.logical_topk_ready.waits
    assert not group.physical_topk_ready.waits
    assert set(group.logical_topk_indices.cpu().reshape(-1).tolist()) == {-1}
    pool, inputs = model.pools[0].cpu(), machine.step_inputs()
    table, lengths = inputs.block_table.cpu(), inputs.context_lens
    assert lengths is not None
    for row, length in enumerate(lengths.tolist()[: inputs.num_tokens]):
        positions = torch.arange(length)
        rows = pool[table[row, positions // BLOCK] * BLOCK + positions % BLOCK]
        expected = (0.5 * query[row] @ rows.T).softmax(-1) @ rows
        assert float((out[row] - expected).abs().max()) < FP32_GEMM
    assert torch.isfinite(out).all()
    machine.backend.check()


@pytest.mark.parametrize("layer", [1, 2])
def test_a_sparse_layer_needs_its_leader_s_publish(layer: int) -> None:
    model = Model()
    with model.machine.on_compute():
        model.machine.begin_decode(4)
    with pytest.raises(
        HandoffError, match=r"'indexer of layer 1' to 'conversion for layers \(1, 2\)'.*never published"
    ):
        model.attend(layer)
    assert model.resolver.calls == []


def test_a_follower_has_no_top_k_of_its_own() -> None:
    model = Model()
    with model.machine.on_compute():
        model.machine.begin_decode(4)
    assert model.attention.logical_topk_indices(1).shape[0] == 4
    for refused in (model.attention.logical_topk_indices, model.attention.set_logical_topk_ready):
        with pytest.raises(AssertionError, match="layer 2 follows layer 1 and produces no top-k"):
            refused(2)
