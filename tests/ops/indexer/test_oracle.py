"""The indexer operators against the indexers of transformers, in chunks, over shuffled poisoned pages.

Selections are compared as sets. Where two scores at the threshold are closer than fp32 explains, either is right; such
rows are counted and must stay rare.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import nn
from transformers import DynamicCache
from transformers.models.deepseek_v32.modeling_deepseek_v32 import DeepseekV32Indexer, apply_rotary_pos_emb
from transformers.models.glm5_next.modeling_glm5_next import Glm5NextTextIndexer
from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import GlmMoeDsaIndexer, apply_rotary_pos_emb_interleave

from sidestream.core.ring import plan_ring
from sidestream.core.segment import Segment
from sidestream.ops.indexer import pool_keys, reference, select_topk, write_keys
from tests.ops.paged import Paged, make_paged
from tests.tiny_models import tiny_config
from tests.tolerances import FP32_GEMM, FP32_ROUNDING

LENGTH, BLOCK_SIZE, KPOOL = 61, 8, 4
CHUNKS = [[61], [1] * 61, [3] * 20 + [1], [7] * 8 + [5], [20, 1, 1, 1, 17, 21], [5, 56]]


def redraw(module: nn.Module) -> None:
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            noise = torch.randn(parameter.shape)
            if name == "k_norm.weight":
                noise = 1 + 0.2 * noise
            elif parameter.dim() > 1 and "ape" not in name:
                noise *= parameter.shape[-1] ** -0.5
            parameter.copy_(noise)


def one_sequence_step(paged: Paged, start: int, length: int) -> tuple[Segment, torch.Tensor]:
    return Segment(0, length, 0, start), torch.arange(start, start + length)


def assert_same_sets(got: torch.Tensor, want: torch.Tensor, scores: torch.Tensor, *, picks: int, kpool: int) -> None:
    """``scores`` [L, E] fp64, -inf where an entry is not visible."""
    excused = 0
    for t in range(got.shape[0]):
        mine, theirs = ({x for x in row[t].tolist() if x >= 0} for row in (got, want))
        assert len(mine) == int((got[t] >= 0).sum()), f"duplicates in row {t}"
        assert len(mine) == len(theirs), t
        if mine != theirs:
            entries = sorted({x // kpool for x in mine ^ theirs})
            threshold = scores[t].sort(descending=True).values[picks - 1]
            assert (scores[t, entries] - threshold).abs().max() < FP32_GEMM, (t, mine ^ theirs)
            excused += 1
    assert excused <= got.shape[0] // 50, f"{excused} rows with scores too close to tell apart"


def ours(
    chunks: Sequence[int],
    q: torch.Tensor,
    weights: torch.Tensor,
    k: torch.Tensor,
    *,
    pooling: tuple[torch.Tensor, torch.Tensor] | None,
    topk: int,
    scale: float,
) -> torch.Tensor:
    """[L, W] of one sequence that arrives in ``chunks``; one-token chunks run as decodes. q [L, Hi, D], k [L, D]."""
    kpool = 1 if pooling is None else KPOOL
    paged = make_paged([(0, LENGTH)], block_size=BLOCK_SIZE)
    keys = torch.full((paged.num_blocks, BLOCK_SIZE // kpool, k.shape[1]), torch.nan)
    tail = torch.full((2 * (KPOOL - 1), 2 * k.shape[1]), torch.nan)
    rows, start = [], 0
    for length in chunks:
        part = slice(start, start + length)
        segment, positions = one_sequence_step(paged, start, length)
        flat = keys.view(-1, k.shape[1])
        if pooling is None:
            write_keys(flat, paged.rows(0, positions), k[part])
        else:
            gate, ape = pooling
            plan = plan_ring([start], [length], [1], window=KPOOL, ring_length=KPOOL - 1)
            ends = torch.nonzero((positions + 1) % KPOOL == 0).flatten()
            pooled = pool_keys(k[part], gate[part], ape, tail=tail, plan=plan, pools=ends)
            write_keys(flat, paged.entry_rows(0, positions[ends] // KPOOL, KPOOL), pooled)
        out = torch.full((length, topk + kpool - 1), 0x7F7F7F7F, dtype=torch.int32)
        select_topk(
            q[part],
            weights[part],
            keys,
            block_table=paged.block_table,
            positions=positions,
            segments=[segment],
            num_decode=int(length == 1),
            topk=topk,
            kpool=kpool,
            scale=scale,
            out=out,
        )
        rows.append(out)
        start += length
    assert start == LENGTH
    return torch.cat(rows)


def exact_scores(
    q: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor, *, scale: float, kpool: int
) -> torch.Tensor:
    similarity = torch.relu(torch.einsum("thd,ed->the", q.double(), keys.double()) * scale)
    scores = torch.einsum("the,th->te", similarity, weights.double())
    visible = (torch.arange(q.shape[0]) + 1) // kpool
    return scores.masked_fill(torch.arange(keys.shape[0]) >= visible[:, None], -torch.inf)


@pytest.mark.parametrize("chunks", CHUNKS, ids=lambda c: f"{len(c)}x{c[0]}")
def test_glm5_next(chunks: Sequence[int]) -> None:
    config = tiny_config("glm5_next").text_config
    layer = 2
    oracle = Glm5NextTextIndexer(config, layer)
    redraw(oracle)
    hidden, q_resid = torch.randn(1, LENGTH, config.hidden_size), torch.randn(1, LENGTH, config.q_lora_rank)
    cache, theirs, start = DynamicCache(config=config), [], 0
    for length in chunks:
        part = slice(start, start + length)
        unused = torch.zeros(1, 1, length, 1)
        cache.update(unused, unused, layer)  # its length is what the oracle's causal mask goes by
        mask = torch.ones(1, length, dtype=torch.bool)
        theirs.append(oracle(hidden[:, part], q_resid[:, part], mask, cache)[0])
        start += length

    heads, dim = config.index_n_heads, config.index_head_dim
    with torch.no_grad():
        k = oracle.k_norm(oracle.wk(hidden))[0]
        gate = nn.functional.linear(hidden, oracle.index_kpool_compress_gate)[0]
        q = oracle.wq_b(q_resid).view(LENGTH, heads, dim)
        weights = oracle.weights_proj(hidden)[0] * heads**-0.5
        ape = oracle.index_kpool_compress_ape.clone()
        packed = torch.cat([k, gate, torch.ones(LENGTH, 1)], dim=-1)[None]
        pooled = oracle.get_pooled_states(packed)[0][0]
    torch.testing.assert_close(reference.pooled_keys(k, gate, ape), pooled, rtol=0, atol=FP32_ROUNDING)

    got = ours(chunks, q, weights, k, pooling=(gate, ape), topk=config.index_topk, scale=dim**-0.5)
    scores = exact_scores(q, weights, pooled, scale=dim**-0.5, kpool=KPOOL)
    want = torch.cat(theirs)
    assert want.shape == got.shape
    assert_same_sets(got, want, scores, picks=config.index_topk // KPOOL, kpool=KPOOL)
    blind = ours(chunks, q, weights, k, pooling=(gate, ape * 0), topk=config.index_topk, scale=dim**-0.5)
    assert not torch.equal(blind, got), "the pool bias does not matter here, so this test proves too little"


@pytest.mark.parametrize("chunks", CHUNKS, ids=lambda c: f"{len(c)}x{c[0]}")
@pytest.mark.parametrize("architecture", ["deepseek_v32", "glm_moe_dsa"])
def test_token_granularity(architecture: str, chunks: Sequence[int]) -> None:
    config = tiny_config(architecture)
    oracle = (DeepseekV32Indexer if architecture == "deepseek_v32" else GlmMoeDsaIndexer)(config, 0)
    redraw(oracle)
    hidden, q_resid = torch.randn(1, LENGTH, config.hidden_size), torch.randn(1, LENGTH, config.q_lora_rank)
    rope = config.qk_rope_head_dim
    angle = torch.outer(torch.arange(LENGTH), 100.0 ** -torch.linspace(0, 1, rope // 2)).repeat(1, 2)[None]
    cos, sin = angle.cos(), angle.sin()
    causal = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()[None]
    want = oracle(hidden, q_resid, (cos, sin), causal, torch.arange(LENGTH)[None])[0]
    # Where fewer tokens are visible than are taken, the oracle's rest is masked entries.
    want = want.masked_fill(want > torch.arange(LENGTH)[:, None], -1)

    heads, dim = config.index_n_heads, config.index_head_dim
    rotate = apply_rotary_pos_emb if architecture == "deepseek_v32" else apply_rotary_pos_emb_interleave
    with torch.no_grad():
        q = oracle.wq_b(q_resid).view(1, LENGTH, heads, dim)
        k = oracle.k_norm(oracle.wk(hidden)).view(1, LENGTH, 1, dim)
        q_rot, k_rot = rotate(q[..., :rope], k[..., :rope], cos, sin, unsqueeze_dim=2)
        q = torch.cat([q_rot, q[..., rope:]], dim=-1)[0]
        k = torch.cat([k_rot, k[..., rope:]], dim=-1)[0, :, 0]
        weights = oracle.weights_proj(hidden)[0] * heads**-0.5
    got = ours(chunks, q, weights, k, pooling=None, topk=config.index_topk, scale=dim**-0.5)
    scores = exact_scores(q, weights, k, scale=dim**-0.5, kpool=1)
    assert_same_sets(got, want, scores, picks=config.index_topk, kpool=1)
