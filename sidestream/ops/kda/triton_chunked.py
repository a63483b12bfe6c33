"""Chunked Kimi Delta Attention as two Triton kernels: all chunks at once, then one program a head that carries states.

The notation is that of ``torch_chunked``. Both triangles A and P and the inverse of ``1 + beta A`` are built by halves:
in blocks of 2s tokens, rows of the right half look at columns of the left, with decays split at the middle so that no
exponent is positive. A token is in one half only, so that one exponential a token and level serves rows and columns. If
X is the inverse within blocks of s and B the new squares of ``beta A``, the inverse within blocks of 2s is
``X - X B X``. Products take bf16 on tensor cores (fp32 for fp32 models), sums and states are fp32. Against fp32 that
makes 0.4 % of the result in norm with random keys and 1 % with nearly equal ones, were the inverse exact or not.
Where the gate has a gentle lower bound and heads are of 128, ``triton_blocks`` takes the first kernel's place.

At 64 heads of 128 the first kernel reads 66 KB a token and writes 104 KB (by blocks 88), the second reads 72 KB and
writes 16: 0.49 ms for 8,192 tokens at 4.28 TB/s. Products are 28 MFLOP a chunk and head, 0.29 ms at 790 TFLOP/s.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl

from sidestream.core.batch import Split
from sidestream.ops.kda import triton_blocks
from sidestream.ops.kda.kept_states import Kept, by_sequence, row_of, runs_of
from sidestream.ops.kda.torch_impl import ForgetGate
from sidestream.ops.kda.triton_blocks import BLOCK, LEAST_CHANNELS, gentle, product, within_blocks
from sidestream.ops.kda.triton_conv import log_decay

CHUNK = 64
"""Tokens a chunk."""
LEAST = tl.constexpr(-104.0)
"""Log decay of a token below which nothing is left in fp32. Smaller ones would only cost the sums their digits: those
of a chunk stay above 64 times this, so that a difference of two is off by at most 6,656 * 2**-24 = 4e-4."""
MAX_BYTES = 1 << 30
"""Of scratch: heads are taken in groups that stay under it."""


@dataclass(frozen=True, slots=True)
class Launch:
    """Warps of the first kernel, the registers that a thread of it may have (128: two programs a multiprocessor) and
    the channels that it takes at once; columns of a state that a program of the second takes, its warps and stages.
    With ``blocks`` the first kernel is ``triton_blocks``, where the gate and the size of heads allow it; None where K
    and V are 128."""

    chunk_warps: int = 8
    chunk_registers: int = 128
    piece: int = 32
    columns: int = 64
    scan_warps: int = 4
    stages: int = 3
    blocks: bool | None = None


@lru_cache(maxsize=16)
def _tables(
    slots: tuple[int, ...],
    starts: tuple[int, ...],
    lengths: tuple[int, ...],
    kept: tuple[tuple[Split, ...], ...],
    versions: int,
    device: torch.device,
) -> tuple[torch.Tensor, torch.Tensor]:
    """int64 on the device. All layers of a step ask for the same.

    Returns:
        chunks [N, 3]: first token, tokens, row of the states [slots * versions] that the state behind it goes to as
        well, or -1; sequences [R, 4]: first chunk, chunks, row of the states that is read or -1, row written.
    """
    entries: list[int] = []  # of chunks; a few hundred numbers, so that plain Python is faster than numpy
    spans: list[int] = []
    first = 0
    for slot, start, length, splits in zip(slots, starts, lengths, kept, strict=True):
        begun = len(entries) // 3
        for at, tokens, split in runs_of(start, length, splits):
            count = -(-tokens // CHUNK)
            run = [-1] * (3 * count)
            run[::3] = range(first + at, first + at + tokens, CHUNK)
            run[1::3] = [CHUNK] * count
            run[-2] = tokens - (count - 1) * CHUNK
            if split is not None:
                run[-1] = row_of(split, versions)
            entries += run
        before = slot * versions + start % versions if start > 0 else -1
        spans += (begun, len(entries) // 3 - begun, before, slot * versions + (start + length) % versions)
        first += length
    # Sequences first: so both begin at 16 bytes. Kept states go to other slots each time, so no step may wait for this.
    packed = torch.tensor(spans + entries, dtype=torch.int64, pin_memory=device.type == "cuda")
    placed = packed.to(device, non_blocking=True)
    return placed[len(spans) :].view(-1, 3), placed[: len(spans)].view(-1, 4)


def chunked(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    forget: torch.Tensor,
    beta: torch.Tensor,
    gate: ForgetGate,
    state: torch.Tensor,
    slots: Sequence[int],
    starts: Sequence[int],
    lengths: Sequence[int],
    kept: Kept = (),
    launch: Launch | None = None,
) -> torch.Tensor:
    """Chunks of several sequences, flat one behind the other, as ``torch_chunked.chunked``.

    Args:
        q, k: [T, H, K] of unit length, v: [T, H, V], contiguous, one dtype; K and V 16, 32, 64 or 128.
        forget: [T, H, K], contiguous; beta: [T, H]; both before their gates.
        state: [slots, versions, H, K, V] fp32, contiguous; read and written as ``torch_chunked.chunked`` says.
    Returns:
        [T, H, V] in ``v.dtype``.
    """
    _, H, K = q.shape
    V = v.shape[2]
    launch = launch or Launch()
    leaves = tuple(tuple(splits) for splits in by_sequence(kept, len(lengths)))
    chunks, sequences = _tables(tuple(slots), tuple(starts), tuple(lengths), leaves, state.shape[1], q.device)
    out, N = torch.empty_like(v), chunks.shape[0]
    a_head = N * (CHUNK * (3 * K + V + CHUNK) * q.element_size() + 4 * (CHUNK + 1) * K)
    group = max(1, min(H, MAX_BYTES // a_head))
    made = q.new_empty(N * group * CHUNK * (K + V))
    narrow = q.is_cuda and q.dtype != torch.float32  # Triton's interpreter multiplies fp32 alone
    blocks = K == V == 128 if launch.blocks is None else launch.blocks  # tried on a GPU at this size alone
    suits = min(K, V) >= LEAST_CHANNELS if narrow else not q.is_cuda  # unrolled fp32 takes minutes to compile
    blocks = blocks and gentle(gate) and suits
    marks = N * group * CHUNK // BLOCK * K
    sums = q.new_empty(marks) if blocks else q.new_empty(BLOCK * marks, dtype=torch.float32)
    reach, until = q.new_empty(2, N * group * CHUNK * K).unbind(0)
    scores = q.new_empty(N * group * CHUNK * CHUNK)
    total = torch.empty(N * group * K, dtype=torch.float32, device=q.device)
    columns = min(launch.columns, V)
    first, how = (within_blocks, {"BLOCK": BLOCK}) if blocks else (_within, {"BOUNDED": gate.lower_bound is not None})
    warps, registers, piece = (launch.chunk_warps, launch.chunk_registers, launch.piece)
    if blocks:
        warps, registers, piece = triton_blocks.WARPS, triton_blocks.REGISTERS, triton_blocks.PIECE
    for head in range(0, H, group):
        heads = min(group, H - head)
        first[(heads, N)](
            q,
            k,
            v,
            forget,
            beta,
            gate.dt_bias,
            gate.A_log,
            chunks,
            made,
            sums,
            reach,
            until,
            scores,
            total,
            0.0 if gate.lower_bound is None else gate.lower_bound,
            beta.stride(0),
            head,
            H,
            group,
            K=K,
            V=V,
            C=CHUNK,
            LEVELS=CHUNK.bit_length() - 1,
            NARROW=narrow,
            PIECE=min(piece, K, V),
            num_warps=warps,
            maxnreg=registers,
            **how,
        )
        _carry[(V // columns, heads, len(lengths))](
            made,
            reach,
            until,
            scores,
            total,
            state,
            out,
            chunks,
            sequences,
            head,
            H,
            group,
            K=K,
            V=V,
            C=CHUNK,
            COLUMNS=columns,
            STAGES=launch.stages if q.element_size() == 2 else 2,  # shared memory holds no more of fp32
            NARROW=narrow,
            num_warps=launch.scan_warps if narrow else 8,  # fp32 spills, with 4 most of all
        )
    return out


@triton.jit(do_not_specialize=["head", "group"])  # type: ignore[untyped-decorator]
def _within(
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    forget: tl.tensor,
    beta: tl.tensor,
    dt_bias: tl.tensor,
    a_log: tl.tensor,
    chunks: tl.tensor,
    made: tl.tensor,
    sums: tl.tensor,
    reach: tl.tensor,
    until: tl.tensor,
    scores: tl.tensor,
    total: tl.tensor,
    lower_bound: tl.tensor,
    beta_row: tl.tensor,
    head: tl.tensor,
    H: tl.tensor,
    group: tl.tensor,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    LEVELS: tl.constexpr,
    BOUNDED: tl.constexpr,
    NARROW: tl.constexpr,
    PIECE: tl.constexpr,
) -> None:
    """One chunk of one head, ``PIECE`` channels at a time: registers hold the squares and little else, and what a level
    needs is read anew from the first cache."""
    n = tl.program_id(1).to(tl.int64)  # heads of a token stand together, so they run together
    h = head + tl.program_id(0)
    tile = n * group + tl.program_id(0)
    i = tl.arange(0, C)
    token = tl.load(chunks + 3 * n) + i
    real = i < tl.load(chunks + 3 * n + 1)
    shown = real[:, None]
    row = (token * H + h)[:, None]
    gain = tl.load(beta + token * beta_row + h, mask=real, other=0.0).to(tl.float32)
    gain = tl.where(real, tl.sigmoid(gain), 0.0)
    rate = tl.exp(tl.load(a_log + h).to(tl.float32))
    sums += tile * (C * K) + i[:, None] * K

    diagonal = tl.zeros((C,), dtype=tl.float32)
    for first in tl.range(0, K, PIECE, num_stages=1):
        some = first + tl.arange(0, PIECE)[None, :]
        raw = tl.load(forget + row * K + some, mask=shown, other=0.0).to(tl.float32)
        raw += tl.load(dt_bias + h * K + some).to(tl.float32)
        decay = tl.maximum(log_decay(raw, rate, lower_bound, BOUNDED), LEAST)
        tl.store(sums + some, tl.cumsum(tl.where(shown, decay, 0.0), axis=0))
        key = tl.load(k + row * K + some, mask=shown, other=0.0).to(tl.float32)
        query = tl.load(q + row * K + some, mask=shown, other=0.0).to(tl.float32)
        diagonal += tl.sum(query * key, axis=1)
    tl.debug_barrier()  # other threads' sums are read below

    same = i[:, None] == i[None, :]
    score = tl.where(same, diagonal[:, None], 0.0)
    inverse = tl.where(same, 1.0, 0.0)
    for level in tl.range(0, LEVELS, num_stages=1):
        block = i >> (level + 1)
        right = ((i >> level) & 1) == 1
        seen = (block[:, None] == block[None, :]) & (right[:, None] & (right == 0)[None, :])
        middle = ((block << (level + 1)) + (1 << level) - 1 - i)[:, None] * K
        looked = tl.zeros((C, C), dtype=tl.float32)
        below = tl.zeros((C, C), dtype=tl.float32)
        for first in tl.range(0, K, PIECE, num_stages=1):
            some = first + tl.arange(0, PIECE)[None, :]
            gap = tl.load(sums + some) - tl.load(sums + middle + some)
            factor = tl.exp(tl.where(right[:, None], gap, -gap))
            key = tl.load(k + row * K + some, mask=shown, other=0.0).to(tl.float32) * factor
            query = tl.load(q + row * K + some, mask=shown, other=0.0).to(tl.float32) * factor
            columns = tl.trans(key)
            looked += product(query, columns, NARROW)
            below += product(key, columns, NARROW)
        score += tl.where(seen, looked, 0.0)
        below = tl.where(seen, below * gain[:, None], 0.0)
        inverse -= product(product(inverse, below, NARROW), inverse, NARROW)
    tl.store(scores + tile * (C * C) + i[:, None] * C + i[None, :], score.to(scores.dtype.element_ty))

    flat = tile * (C * K) + i[:, None] * K
    made += tile * (C * (K + V))
    for first in tl.range(0, K, PIECE, num_stages=1):
        some = first + tl.arange(0, PIECE)[None, :]
        since = tl.load(sums + some)
        last = tl.load(sums + (C - 1 - i)[:, None] * K + some)
        key = tl.load(k + row * K + some, mask=shown, other=0.0).to(tl.float32)
        query = tl.load(q + row * K + some, mask=shown, other=0.0).to(tl.float32)
        opened = tl.exp(since)
        tl.store(reach + flat + some, (query * opened).to(reach.dtype.element_ty))
        tl.store(until + flat + some, (key * tl.exp(last - since)).to(until.dtype.element_ty))
        tl.store(total + tile * K + some + (i * 0)[:, None], opened, mask=(i == C - 1)[:, None])
        turned = product(inverse, key * opened * gain[:, None], NARROW)
        tl.store(made + i[:, None] * K + some, turned.to(made.dtype.element_ty))
    for first in tl.range(0, V, PIECE, num_stages=1):
        some = first + tl.arange(0, PIECE)[None, :]
        value = tl.load(v + row * V + some, mask=shown, other=0.0).to(tl.float32)
        added = product(inverse, value * gain[:, None], NARROW)
        tl.store(made + C * K + i[:, None] * V + some, added.to(made.dtype.element_ty))


@triton.jit(do_not_specialize=["head", "group"])  # type: ignore[untyped-decorator]
def _carry(
    made: tl.tensor,
    reach: tl.tensor,
    until: tl.tensor,
    scores: tl.tensor,
    total: tl.tensor,
    state: tl.tensor,
    out: tl.tensor,
    chunks: tl.tensor,
    sequences: tl.tensor,
    head: tl.tensor,
    H: tl.tensor,
    group: tl.tensor,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
    NARROW: tl.constexpr,
) -> None:
    """Some columns of one head's state, from the first chunk of a sequence to its last; written wherever it is kept."""
    h = head + tl.program_id(1)
    sequence = sequences + tl.program_id(2) * 4
    chunk, count = tl.load(sequence), tl.load(sequence + 1)
    before, after = tl.load(sequence + 2), tl.load(sequence + 3)
    i = tl.arange(0, C)
    channel = tl.arange(0, K)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    square = channel[:, None] * V + column[None, :]
    memory = tl.load(state + (before * H + h) * (K * V) + square, mask=before >= 0, other=0.0)
    for c in tl.range(0, count, num_stages=STAGES):
        tile = (chunk + c) * group + tl.program_id(1)
        flat = tile * (C * K) + i[:, None] * K + channel[None, :]
        own = made + tile * (C * (K + V))
        turned = tl.load(own + i[:, None] * K + channel[None, :])
        added = tl.load(own + C * K + i[:, None] * V + column[None, :])
        query = tl.load(reach + flat)
        key = tl.load(until + tile * (C * K) + i[None, :] * K + channel[:, None])
        score = tl.load(scores + tile * (C * C) + i[:, None] * C + i[None, :])
        kept = tl.load(total + tile * K + channel)
        written = added.to(tl.float32) - product(turned, memory, NARROW)
        mixed = product(query, memory, NARROW) + product(score, written, NARROW)
        memory = memory * kept[:, None] + product(key, written, NARROW)
        entry = chunks + (chunk + c) * 3
        place = ((tl.load(entry) + i) * H + h)[:, None] * V + column[None, :]
        real = i < tl.load(entry + 1)
        tl.store(out + place, (mixed * K**-0.5).to(out.dtype.element_ty), mask=real[:, None])
        leaves = tl.load(entry + 2)
        if leaves >= 0:
            tl.store(state + (leaves * H + h) * (K * V) + square, memory)
    tl.store(state + (after * H + h) * (K * V) + square, memory)
