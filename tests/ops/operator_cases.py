"""One call or more of every operator: for tests that hold for all of them.

Arguments of one case and different seeds differ in values only, so that one capture can run them all. What no row may
see is NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from sidestream.core.batch import Split
from sidestream.core.ring import plan_ring
from sidestream.core.segment import Segment
from sidestream.ops import (
    dense_mla,
    draw,
    embedding,
    hyper_connection,
    index_map,
    indexer,
    kda,
    kv_rows,
    linear,
    moe,
    norm,
    residency,
    rope,
    row_copy,
    sampled_tokens,
    slot_copy,
    sparse_mla,
)
from sidestream.ops import topk as topk_ops
from tests.ops.operator_case import Arguments, Case
from tests.ops.uniform_step import BLOCK, COLUMNS, ROWS, SLOTS, TOPK, TRUE_ROWS, Step

HEADS, DIM, LATENT, HIDDEN = 3, 12, 32, 24
MODULES = (
    draw,
    dense_mla,
    embedding,
    hyper_connection,
    index_map,
    indexer,
    kda,
    kv_rows,
    linear,
    moe,
    norm,
    residency,
    rope,
    row_copy,
    sampled_tokens,
    slot_copy,
    sparse_mla,
    topk_ops,
)
"""Importing them is what fills ``OPERATORS``."""


def norm_case(name: str, dtype: torch.dtype) -> Callable[[int], Arguments]:
    def make(seed: int) -> Arguments:
        step = Step(seed)
        x, weight = step.randn(ROWS, HEADS, DIM, dtype=dtype), step.randn(DIM, dtype=dtype)
        if name == "layer_norm":
            return {"x": x, "weight": weight, "bias": step.randn(DIM, dtype=dtype), "eps": 1e-5}
        if name == "gated_rms_norm":
            return {"x": x, "gate": step.randn(ROWS, HEADS, DIM, dtype=dtype), "weight": weight, "eps": 1e-5}
        if name == "add_rms_norm":
            return {"x": x[:, 0], "output": step.randn(ROWS, DIM, dtype=dtype), "weight": weight, "eps": 1e-5}
        return {"streams" if name == "mean_rms_norm" else "x": x, "weight": weight, "eps": 1e-5}

    return make


def norm_pair_case(dtype: torch.dtype) -> Callable[[int], Arguments]:
    def make(seed: int) -> Arguments:
        step = Step(seed)
        wide = step.randn(ROWS, DIM + HIDDEN, dtype=dtype)
        weights = {"weight": step.randn(DIM, dtype=dtype), "other_weight": step.randn(HIDDEN, dtype=dtype)}
        return {"x": wide[:, :DIM].clone(), "other": wide[:TRUE_ROWS, DIM:].clone(), **weights, "eps": 1e-5}

    return make


def rope_case(interleaved: bool, dtype: torch.dtype) -> Callable[[int], Arguments]:
    def make(seed: int) -> Arguments:
        step = Step(seed)
        angles = step.positions[:, None] * torch.tensor([1.0, 0.3, 0.02])
        x = step.randn(ROWS, HEADS, 6, dtype=dtype)
        return {"x": x, "cos": angles.cos(), "sin": angles.sin(), "interleaved": interleaved}

    return make


def rope_pair_case(interleaved: bool, dtype: torch.dtype) -> Callable[[int], Arguments]:
    def make(seed: int) -> Arguments:
        made = rope_case(interleaved, dtype)(seed)
        made = {"query": made.pop("x"), "key": Step(seed + 7).randn(ROWS, 6, dtype=dtype), **made}
        return {**made, "out": torch.full((ROWS, HEADS, 6), torch.nan, dtype=dtype)}

    return make


def pre_case(dtype: torch.dtype) -> Callable[[int], Arguments]:
    def make(seed: int) -> Arguments:
        step, streams = Step(seed), 4
        rows = (2 + streams) * streams
        return {
            "streams": step.randn(ROWS, streams, HIDDEN, dtype=dtype),
            "fn": step.randn(rows, streams * HIDDEN) / 10,
            "base": step.randn(rows),
            "norm_weight": step.randn(2, HIDDEN).to(dtype),
            "norm_eps": 1e-5,
            "eps": 1e-6,
            "iters": 4,
        }

    return make


def post_pre_case(dtype: torch.dtype) -> Callable[[int], Arguments]:
    def make(seed: int) -> Arguments:
        pre, post = pre_case(dtype)(seed), post_case(dtype)(seed)
        return {**post, **{name: value for name, value in pre.items() if name != "streams"}}

    return make


def post_case(dtype: torch.dtype) -> Callable[[int], Arguments]:
    def make(seed: int) -> Arguments:
        step = Step(seed)
        streams, output = step.randn(ROWS, 4, HIDDEN, dtype=dtype), step.randn(ROWS, HIDDEN, dtype=dtype)
        return {"streams": streams, "output": output, "post": step.rand(ROWS, 4, 1), "mix": step.rand(ROWS, 4, 4)}

    return make


def pending_sum(step: Step, dtype: torch.dtype, num_shared: int = 1) -> moe.ExpertSum:
    ids = step.rand(ROWS, 8).argsort(dim=1)[:, :3].contiguous()
    ids[TRUE_ROWS:] = -1
    partial = step.randn(ROWS * (3 + num_shared), HIDDEN)
    partial[: ROWS * 3][ids.flatten() < 0] = torch.nan
    return moe.ExpertSum(partial, step.rand(ROWS, 3), ids, num_shared, dtype)


def pending(make: Callable[[int], Arguments]) -> Callable[[int], Arguments]:
    """The same call, the output yet to be summed."""

    def made(seed: int) -> Arguments:
        arguments = make(seed)
        return {**arguments, "output": pending_sum(Step(seed), arguments["output"].dtype)}

    return made


def conv_case(rollback: int, dtype: torch.dtype) -> Callable[[int], Arguments]:
    def make(seed: int) -> Arguments:
        step, length = Step(seed), 3 + rollback
        state = step.randn(SLOTS * length, DIM, dtype=dtype)
        state[:length] = torch.nan  # scratch
        weight = step.randn(4, DIM).t()
        return {"x": step.randn(ROWS, DIM, dtype=dtype), "state": state, "weight": weight, "plan": step.ring(4, length)}

    return make


def gate_case(lower_bound: float | None) -> Callable[[int], Arguments]:
    def make(seed: int) -> Arguments:
        step = Step(seed)
        bias, rate = step.randn(HEADS * DIM), step.randn(HEADS)
        return {"f": step.randn(ROWS, HEADS * DIM), "dt_bias": bias, "A_log": rate, "lower_bound": lower_bound}

    return make


def recurrent_case(tokens: int, versions: int) -> Callable[[int], Arguments]:
    def make(seed: int) -> Arguments:
        step, width = Step(seed), 8
        q, k = step.randn(2, ROWS, tokens, HEADS, DIM).unbind(0)
        state = step.randn(SLOTS, versions, HEADS, DIM, width)
        state[0] = torch.nan
        return {
            "q": q,
            "k": k,
            "v": step.randn(ROWS, tokens, HEADS, width),
            "g": -step.rand(ROWS, tokens, HEADS, DIM),
            "beta": step.rand(ROWS, tokens, HEADS),
            "state": state,
            "slots": step.slots,
            "start": step.positions,
        }

    return make


def decode_step_case(rollback: int, dtype: torch.dtype) -> Callable[[int], Arguments]:
    def make(seed: int) -> Arguments:
        step, length, dim = Step(seed), 3 + rollback, 16
        width = HEADS * dim
        conv_state = step.randn(SLOTS * length, 3 * width, dtype=dtype)
        state = step.randn(SLOTS, 1 + rollback, HEADS, dim, dim)
        conv_state[:length], state[0] = torch.nan, torch.nan
        return {
            "projected": step.randn(ROWS, 3 * width + 2 * dim + HEADS, dtype=dtype),
            "conv_state": conv_state,
            "state": state,
            "conv_weight": step.randn(4, 3 * width).t(),
            "plan": step.ring(4, length),
            "expand": step.randn(2, width, dim, dtype=dtype),
            "dt_bias": step.randn(width),
            "A_log": step.randn(HEADS),
            "lower_bound": -5.0 if rollback else None,
            "norm_weight": step.randn(dim, dtype=dtype),
            "norm_eps": 1e-5,
            "slots": step.slots,
            "start": step.positions,
        }

    return make


def chunked_case(seed: int) -> Arguments:
    step, lengths = Step(seed), (9, 2)
    tokens = sum(lengths)
    q, k = step.randn(2, tokens, HEADS, DIM).unbind(0)
    made = {"q": q, "k": k, "v": step.randn(tokens, HEADS, 8), "g": -step.rand(tokens, HEADS, DIM)}
    beta, state = step.rand(tokens, HEADS), step.randn(SLOTS, 1, HEADS, DIM, 8)
    state[[1, 3]] = torch.nan
    where = {"slots": (4, 2), "starts": (3, 0), "lengths": lengths, "kept": ((Split(5, 3), Split(12, 1)), ())}
    return {**made, "beta": beta, "state": state, **where}


def mixed_step_case(seed: int) -> Arguments:
    """Two decodes beside a chunk of nine and a fresh one of two tokens, and three rows of padding. A state of the first
    chunk is kept, whose ring an earlier step left in part."""
    dim, slots, starts, lengths = 16, [5, 3, 4, 2], [7, 4, 3, 0], [1, 1, 9, 2]
    step, made, rows = Step(seed), decode_step_case(0, torch.float32)(seed), sum(lengths)
    made["projected"] = step.randn(rows + 3, 3 * HEADS * dim + 2 * dim + HEADS)
    kept = ((), (), (Split(5, 1),), ())
    made["state"][1], made["conv_state"][3:6] = torch.nan, torch.nan
    made["plan"] = plan_ring(starts, lengths, slots, window=4, ring_length=3).with_kept(starts, lengths, slots, kept)
    made |= {"slots": torch.tensor(slots), "start": torch.tensor(starts)}
    return {**made, "host_slots": slots, "starts": starts, "lengths": lengths, "decodes": 2, "kept": kept}


def entries_of(step: Step, kpool: int) -> torch.Tensor:
    """Where each row's pool key goes; scratch for rows that complete none."""
    complete = (step.context_lens % kpool == 0) & (step.context_lens > 0)
    place = step.block_table[torch.arange(ROWS), step.positions // BLOCK] * BLOCK + step.positions % BLOCK
    return torch.where(complete, place // kpool, 0)


def write_keys_case(seed: int) -> Arguments:
    step = Step(seed)
    return {"keys_flat": step.pool(DIM, kpool=4), "rows": entries_of(step, 4), "k": step.randn(ROWS, DIM)}


def pool_keys_case(seed: int) -> Arguments:
    step = Step(seed)
    k, gate = step.randn(2, ROWS, DIM).unbind(0)
    tail = step.randn(SLOTS * 3, 2 * DIM)
    tail[:3] = torch.nan
    made = {"k": k, "gate": gate, "ape": step.randn(4, DIM), "tail": tail}
    return {**made, "plan": step.ring(4, 3), "pools": torch.arange(ROWS)}


def quarter_turns(step: Step, pairs: int) -> Arguments:
    """Angles of whole right angles, whose cosines and sines are -1, 0 or 1."""
    angles = step.positions[:, None] * torch.arange(1, pairs + 1)
    return {"cos": (angles * torch.pi / 2).cos().round(), "sin": (angles * torch.pi / 2).sin().round()}


def write_normed_keys_case(interleaved: bool, dtype: torch.dtype, dim: int) -> Callable[[int], Arguments]:
    def make(seed: int) -> Arguments:
        step = Step(seed)
        norm = {
            "norm_weight": step.randn(dim, dtype=dtype),
            "norm_bias": step.randn(dim, dtype=dtype),
            "norm_eps": 1e-5,
        }
        turn = {**quarter_turns(step, dim // 4), "interleaved": interleaved}
        pool = {"keys_flat": step.pool(dim, dtype=dtype), "rows": entries_of(step, 1)}
        return {**pool, "k": step.randn(ROWS, dim, dtype=dtype), **norm, **turn}

    return make


def write_pools_case(dtype: torch.dtype, dim: int = DIM) -> Callable[[int], Arguments]:
    def make(seed: int) -> Arguments:
        step = Step(seed)
        k, gate = step.randn(2, ROWS, dim, dtype=dtype).unbind(0)
        tail = step.randn(SLOTS * 3, 2 * dim, dtype=dtype)
        tail[:3] = torch.nan
        pool = {"keys_flat": step.pool(dim, kpool=4, dtype=dtype), "entries": entries_of(step, 4)}
        norm = {
            "norm_weight": step.randn(dim, dtype=dtype),
            "norm_bias": step.randn(dim, dtype=dtype),
            "norm_eps": 1e-5,
        }
        return {"k": k, "gate": gate, "ape": step.randn(4, dim), "tail": tail, "plan": step.ring(4, 3), **pool, **norm}

    return make


def scores_case(seed: int) -> Arguments:
    step = Step(seed)
    q, weights, keys = step.randn(ROWS, 4, DIM), step.randn(ROWS, 4), step.randn(30, DIM)
    return {"q": q, "weights": weights, "keys": keys, "scale": 0.3}


def topk_case(size: int) -> Callable[[int], Arguments]:
    def make(seed: int) -> Arguments:
        step = Step(seed)
        scores = step.randn(ROWS, size).round(decimals=1)
        return {"scores": scores, "valid": step.context_lens * size // (COLUMNS * BLOCK), "k": TOPK}

    return make


def select_case(kpool: int, dtype: torch.dtype, dim: int = DIM) -> Callable[[int], Arguments]:
    def make(seed: int) -> Arguments:
        step = Step(seed)
        return {
            "q": step.randn(ROWS, 16, dim, dtype=dtype),
            "weights": step.randn(ROWS, 16),
            "keys": step.pool(dim, kpool=kpool, dtype=dtype).view(step.num_blocks, -1, dim),
            "block_table": step.block_table,
            "context_lens": step.context_lens,
            "topk": TOPK,
            "kpool": kpool,
            "scale": 0.3,
            "out": torch.zeros(ROWS, TOPK + kpool - 1, dtype=torch.int32),
            **quarter_turns(step, dim // 4),
            "interleaved": True,
        }

    return make


def segments_of(step: Step) -> tuple[Segment, ...]:
    return tuple(Segment(i, 1, i, int(step.positions[i])) for i in range(TRUE_ROWS))


def select_mixed_case(seed: int) -> Arguments:
    step, made = Step(seed), select_case(4, torch.float32)(seed)
    del made["context_lens"]
    out = made.pop("out")
    positions = step.positions[:TRUE_ROWS]
    made |= {name: made[name][:TRUE_ROWS] for name in ("q", "weights", "cos", "sin")} | {"positions": positions}
    return {**made, "segments": segments_of(step), "num_decode": TRUE_ROWS, "out": out}


def map_case(seed: int) -> Arguments:
    step = Step(seed)
    logical = step.selection()
    return {
        "logical": logical,
        "block_table": step.block_table,
        "token_rows": torch.arange(ROWS),
        "block_size": BLOCK,
        "out": torch.zeros(*logical.shape, dtype=torch.int64),
        "counts": torch.full((ROWS,), 99, dtype=torch.int32),
    }


def resolve_case(rows_each: int) -> Callable[[int], Arguments]:
    """Two requests of which every second block is in the host pool, and seats that held other rows before."""

    def make(seed: int) -> Arguments:
        step, requests, width, blocks = Step(seed), 2, 6, 8
        tokens, num_slots = requests * rows_each, rows_each * width
        slot_of, slots = residency.new_state(5, num_slots, blocks * BLOCK, device="cpu")
        held = torch.stack([torch.randperm(blocks * BLOCK, generator=step.gen)[:num_slots] for _ in range(5)]).int()
        slots[:, 0] = held
        slot_of.scatter_(1, held.long(), torch.arange(num_slots).int().expand(5, -1))
        asked = [torch.randperm(blocks * BLOCK, generator=step.gen)[:width].sort().values for _ in range(tokens)]
        host = torch.arange(blocks) % 2 == seed % 2
        page = torch.arange(requests * blocks).view(requests, blocks)
        lists = torch.zeros(2, requests, num_slots, dtype=torch.int64)
        return {
            "logical": torch.stack(asked).int(),
            "block_table": torch.where(host, -1 - page, page),
            "slot_of": slot_of,
            "slots": slots,
            "seats": torch.tensor([3, 1]),
            "positions": torch.arange(tokens) * 2 + seed,
            "table_rows": torch.arange(requests).repeat_interleave(rows_each),
            "block_size": BLOCK,
            "hot_base": 500,
            "out": torch.zeros(tokens, width, dtype=torch.int64),
            "counts": torch.full((tokens,), 99, dtype=torch.int32),
            "host_rows": lists[0],
            "hot_rows": lists[1],
            "misses": torch.full((requests,), 99, dtype=torch.int32),
            "totals": torch.ones(5, 2, dtype=torch.int64),
        }

    return make


def copy_case(seed: int) -> Arguments:
    step = Step(seed)
    to = torch.randperm(20, generator=step.gen)[:10].view(2, 5)
    source = torch.randperm(30, generator=step.gen)[:10].view(2, 5)
    counts = torch.tensor([3 - seed % 2, 5], dtype=torch.int32)
    return {
        "pool": step.randn(21, DIM),
        "host": step.randn(30, DIM),
        "to": to,
        "source": source,
        "counts": counts,
        "spare": (20, 0),
    }


def slot_copy_case(seed: int) -> Arguments:
    step = Step(seed)
    kinds = {"first": (3, SLOTS, DIM), "second": (2, SLOTS, 2, 5), "third": (1, SLOTS, 3)}
    states = {name: step.randn(*shape).transpose(0, 1) for name, shape in kinds.items()}
    return {**states, "to": (1, 5), "taken": (3, 1)}


def sampled_case(seed: int) -> Arguments:
    step = Step(seed)
    sources = torch.where(torch.arange(ROWS) % 3 == seed % 3, -1, torch.arange(ROWS).flip(0))
    return {
        "token_ids": torch.arange(100, 100 + ROWS),
        "sources": sources,
        "sampled": (step.randn(ROWS) * 1000).long(),
    }


def layout_of(name: str) -> kv_rows.KVRowLayout:
    rope_dim = 0 if name == "mxfp8" else 4
    return kv_rows.kv_row_layout(name, latent_dim=LATENT, rope_dim=rope_dim, model_dtype=torch.float32)


def packed_pool(step: Step, layout: kv_rows.KVRowLayout) -> torch.Tensor:
    plain = step.pool(LATENT + layout.rope_dim)
    return kv_rows.pack_rows(plain[:, :LATENT], plain[:, LATENT:] if layout.rope_dim else None, layout)


def write_rows_case(name: str) -> Callable[[int], Arguments]:
    def make(seed: int) -> Arguments:
        step, layout = Step(seed), layout_of(name)
        place = step.block_table[torch.arange(ROWS), step.positions // BLOCK] * BLOCK + step.positions % BLOCK
        rope_key = step.randn(ROWS, layout.rope_dim) if layout.rope_dim else None
        pool, latent = packed_pool(step, layout), step.randn(ROWS, LATENT)
        return {"pool": pool, "rows_index": place, "latent": latent, "rope": rope_key, "layout": layout}

    return make


def sparse_case(name: str) -> Callable[[int], Arguments]:
    def make(seed: int) -> Arguments:
        step, layout = Step(seed), layout_of(name)
        chosen = step.selection()
        rows = torch.full(chosen.shape, -1, dtype=torch.int64)
        for row in range(ROWS):
            count = int((chosen[row] >= 0).sum())
            rows[row, :count] = step.rows(row, chosen[row, :count].long())
        q = step.randn(ROWS, HEADS, LATENT + layout.rope_dim)
        counts, pool = (rows >= 0).sum(dim=1, dtype=torch.int32), packed_pool(step, layout)
        return {"q": q, "pool": pool, "rows": rows, "counts": counts, "scale": 0.2, "layout": layout}

    return make


def dense_case(name: str) -> Callable[[int], Arguments]:
    def make(seed: int) -> Arguments:
        step, layout = Step(seed), layout_of(name)
        q, pool = step.randn(ROWS, HEADS, LATENT + layout.rope_dim), packed_pool(step, layout)
        made = {"q": q, "pool": pool, "block_table": step.block_table, "context_lens": step.context_lens}
        return {**made, "block_size": BLOCK, "scale": 0.2, "layout": layout}

    return make


def dense_mixed_case(seed: int) -> Arguments:
    made = dense_case("auto")(seed)
    del made["context_lens"]
    return {**made, "q": made["q"][:TRUE_ROWS], "segments": segments_of(Step(seed)), "num_decode": TRUE_ROWS}


def route_case(num_groups: int, topk_groups: int) -> Callable[[int], Arguments]:
    def make(seed: int) -> Arguments:
        step = Step(seed)
        choice = {"top_k": 3, "num_groups": num_groups, "topk_groups": topk_groups}
        x, weight, bias = step.randn(ROWS, HIDDEN), step.randn(8, HIDDEN), step.randn(8).round(decimals=1)
        live = torch.arange(ROWS) % (2 + seed)  # with rows that are padding
        return {"x": x, "weight": weight, "bias": bias, **choice, "norm_topk_prob": True, "scale": 2.5, "live": live}

    return make


def experts_case(dtype: torch.dtype, num_shared: int) -> Callable[[int], Arguments]:
    def make(seed: int) -> Arguments:
        step, total = Step(seed), 8 + num_shared
        ids = step.rand(ROWS, 8).argsort(dim=1)[:, :3].contiguous()
        return {
            "x": step.randn(ROWS, HIDDEN, dtype=dtype),
            "w13": step.randn(total, 32, HIDDEN, dtype=dtype),
            "w2": step.randn(total, HIDDEN, 16, dtype=dtype),
            "weights": step.rand(ROWS, 3),
            "ids": ids,
            "num_shared": num_shared,
            "swiglu_limit": 2.0,
        }

    return make


def draw_case(seed: int) -> Arguments:
    step = Step(seed)
    temperatures = torch.arange(ROWS, dtype=torch.float64) % 2  # greedy rows and others in turn
    numbers = torch.rand(ROWS, generator=step.gen, dtype=torch.float64)
    return {"logits": step.randn(ROWS, 40) * 2, "settings": torch.stack([temperatures, numbers])}


def linear_case(bias: bool) -> Callable[[int], Arguments]:
    def make(seed: int) -> Arguments:
        step = Step(seed)
        given = step.randn(12) if bias else None
        return {"x": step.randn(ROWS, HIDDEN), "weight": step.randn(12, HIDDEN), "bias": given}

    return make


def logits_case(dtype: torch.dtype) -> Callable[[int], Arguments]:
    def make(seed: int) -> Arguments:
        step = Step(seed)
        x, weight = step.randn(ROWS, HIDDEN, dtype=dtype), step.randn(12, HIDDEN, dtype=dtype)
        return {"x": x, "weight": weight, "out": torch.full((ROWS, 12), torch.nan)}

    return make


def by_head_case(dtype: torch.dtype) -> Callable[[int], Arguments]:
    def make(seed: int) -> Arguments:
        step = Step(seed)
        wide = step.randn(ROWS, HEADS * DIM + 8, dtype=dtype)
        x = wide[:, : HEADS * DIM].view(ROWS, HEADS, DIM)
        return {"x": x, "weight": step.randn(HEADS, DIM, LATENT, dtype=dtype)}

    return make


def by_head_into_case(dtype: torch.dtype) -> Callable[[int], Arguments]:
    def make(seed: int) -> Arguments:
        return {**by_head_case(dtype)(seed), "out": torch.full((ROWS, HEADS, LATENT), torch.nan, dtype=dtype)}

    return make


def embed_case(copies: int) -> Callable[[int], Arguments]:
    def make(seed: int) -> Arguments:
        step = Step(seed)
        return {"token_ids": (step.rand(ROWS) * 9).long(), "table": step.randn(9, HIDDEN), "copies": copies}

    return make


def swiglu_case(limit: float | None) -> Callable[[int], Arguments]:
    return lambda seed: {"gate_up": Step(seed).randn(ROWS, 2 * DIM), "limit": limit}


def _cases() -> Iterator[Case]:
    short = {torch.float32: "fp32", torch.bfloat16: "bf16"}
    for dtype, name in short.items():
        for which in ("rms_norm", "add_rms_norm", "mean_rms_norm", "layer_norm", "gated_rms_norm"):
            yield Case(f"norm.{which}", name, norm_case(which, dtype))
        for interleaved in (True, False):
            variant = f"{name}-{'pairs' if interleaved else 'halves'}"
            yield Case("rope.apply_rope", variant, rope_case(interleaved, dtype))
            yield Case("rope.apply_rope_pair", variant, rope_pair_case(interleaved, dtype))
        yield Case("hyper_connection.hyper_connection_pre", name, pre_case(dtype))
        yield Case("hyper_connection.hyper_connection_post", name, post_case(dtype))
        yield Case("hyper_connection.hyper_connection_post_pre", name, post_pre_case(dtype))
        for operator, plain in (("hyper_connection_post", post_case), ("hyper_connection_post_pre", post_pre_case)):
            yield Case(f"hyper_connection.{operator}", f"{name}-pending", pending(plain(dtype)))
        for dim in (DIM, 32):  # matrix units take the second
            for kpool in (1, 4):
                yield Case("indexer.select_topk_decode", f"{name}-kpool{kpool}-{dim}", select_case(kpool, dtype, dim))
            yield Case("indexer.write_pools", f"{name}-{dim}", write_pools_case(dtype, dim))
            for interleaved in (False, True):
                case = write_normed_keys_case(interleaved, dtype, dim)
                yield Case("indexer.write_normed_keys", f"{name}-{dim}-{interleaved}", case)
        for num_shared in (0, 1, 2):
            for operator in ("experts", "unsummed_experts"):
                yield Case(f"moe.{operator}", f"{name}-shared{num_shared}", experts_case(dtype, num_shared))
        for rollback in (0, 2):
            yield Case("kda.short_conv", f"{name}-rollback{rollback}", conv_case(rollback, dtype))
            yield Case("kda.decode_step", f"{name}-rollback{rollback}", decode_step_case(rollback, dtype))
    for bound in (None, -5.0):
        yield Case("kda.gate", f"bound{bound}", gate_case(bound))
    for tokens, versions in ((1, 1), (1, 3), (2, 3)):
        yield Case("kda.recurrent", f"{tokens}of{versions}", recurrent_case(tokens, versions))
    yield Case("kda.chunked", "", chunked_case, captured=False)
    yield Case("kda.mixed_step", "", mixed_step_case, captured=False)
    yield Case("indexer.write_keys", "", write_keys_case)
    yield Case("indexer.pool_keys", "", pool_keys_case)
    yield Case("indexer.index_scores", "", scores_case)
    yield Case("indexer.select_topk", "", select_mixed_case, captured=False)
    for size in (40, 400):
        yield Case("topk.topk_ascending", str(size), topk_case(size))
    yield Case("index_map.logical_to_physical", "", map_case)
    for rows_each in (1, 2):
        yield Case("residency.resolve", f"{rows_each}", resolve_case(rows_each))
    yield Case("row_copy.copy_rows", "", copy_case)
    yield Case("slot_copy.copy_slots", "", slot_copy_case, captured=False)
    yield Case("sampled_tokens.fill_sampled", "", sampled_case)
    for layout in kv_rows.KV_ROW_LAYOUTS:
        yield Case("kv_rows.write_rows", layout, write_rows_case(layout))
        yield Case("sparse_mla.sparse_mla", layout, sparse_case(layout))
        yield Case("dense_mla.dense_mla_decode", layout, dense_case(layout))
    yield Case("dense_mla.dense_mla", "", dense_mixed_case, captured=False)
    for num_groups, topk_groups in ((1, 1), (4, 2)):
        yield Case("moe.route", f"{num_groups}-{topk_groups}", route_case(num_groups, topk_groups))
    yield Case("draw.draw_tokens", "", draw_case)
    for bias in (False, True):
        yield Case("linear.linear", f"bias{bias}", linear_case(bias))
    for dtype, name in short.items():
        yield Case("norm.rms_norm_pair", name, norm_pair_case(dtype))
        yield Case("linear.logits", name, logits_case(dtype))
        yield Case("linear.by_head", name, by_head_case(dtype))
        yield Case("linear.by_head_into", name, by_head_into_case(dtype))
    for copies in (1, 4):
        yield Case("embedding.embed", f"{copies}", embed_case(copies))
    for limit in (None, 0.7):
        yield Case("moe.swiglu", f"limit{limit}", swiglu_case(limit))


CASES = tuple(_cases())
