"""Chunked prefill of Kimi Delta Attention: all chunks of all sequences at once, then one small product a chunk.

Notation, for one head and one chunk of C tokens: ``c_i`` is the log decay summed from the chunk's start to token i.
With

    A[i, j] = sum over channels of k_i * k_j * exp(c_i - c_j)   for j < i
    P[i, j] = sum over channels of q_i * k_j * exp(c_i - c_j)   for j <= i

what token i writes is row i of ``u - w S``, where ``[u | w] = (1 + beta A)^-1 beta [v | k exp(c)]`` and S is the state
before the chunk. So a chunk maps S to ``(diag(exp(c_C)) - k~^T w) S + k~^T u`` with ``k~ = k exp(c_C - c)``, and that
map is all that has to run chunk after chunk. (Kimi Linear, arXiv 2510.26692, section 3; the WY form of DeltaNet.)

A and P are built by halves: a block of 2s tokens is its two halves, known already, and the square where rows of the
right half look at columns of the left. There ``exp(c_i - c_j)`` is split at the middle m into ``exp(c_i - c_m)`` and
``exp(c_m - c_j)``. Neither exponent is ever positive, so nothing overflows however fast the gate forgets; and both are
summed outwards from the middle, so none loses digits as the difference of two long prefix sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from sidestream.ops.kda.kept_states import Kept, by_sequence, row_of, runs_of
from sidestream.ops.kda.torch_impl import L2_EPS
from sidestream.ops.norm.torch_impl import inverse_l2

MAX_ELEMENTS = 1 << 23
"""Elements of one work tensor [chunks, H, C, K]; heads are taken in groups that stay under it."""


@dataclass(frozen=True, slots=True)
class _Layout:
    """Where chunks stand. Sequences are ranked by chunks, most first; chunk c of rank r is chunk ``first[c] + r``.

    Attributes:
        size: C, tokens a chunk: a power of two.
        ranks: sequence numbers in order of rank.
        active: sequences that have a chunk c, for each c; never growing.
        rows: [T] int64 padded row of each token, None if tokens stand there already.
        total: chunks of all sequences.
        kept: chunks whose first state, which the one before leaves, is kept.
        kept_rows: of the states, one for each of them.
        kept_ends: (rank, row of the states) where the last state of a sequence is kept.
    """

    size: int
    ranks: tuple[int, ...]
    active: tuple[int, ...]
    rows: torch.Tensor | None
    total: int
    kept: tuple[int, ...]
    kept_rows: tuple[int, ...]
    kept_ends: tuple[tuple[int, int], ...]


def chunked(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    slots: Sequence[int],
    starts: Sequence[int],
    lengths: Sequence[int],
    kept: Kept = (),
    chunk_size: int = 64,
) -> torch.Tensor:
    """Prefill chunks of several sequences, flat one behind the other.

    Formula: ``chunk_kimi_delta_attention`` of transformers' ``glm5_next``, with q and k normalised here; fp32 inside.

    Args:
        q, k: [T, H, K], v: [T, H, V], any float dtype; strides are free.
        g: [T, H, K] fp32 log decay, <= 0; beta: [T, H], after its sigmoid.
        state: [slots, versions, H, K, V] fp32, contiguous; read at version ``start % versions`` of the slot unless
            start is 0, written at ``(start + length) % versions`` alone.
        slots: distinct.
        starts: position of each sequence's first token here.
        lengths: >= 1 each, T together.
        kept: states that each sequence leaves on its way, in order: what it knows before a position of its chunk, or
            before the one behind it, goes to version ``position % versions`` of a slot that no sequence here has.
        chunk_size: a power of two; shorter sequences use smaller chunks, and a kept state ends one.
    Returns:
        [T, H, V] in ``v.dtype``.
    """
    T, H, K = q.shape
    assert sum(lengths) == T, f"lengths {list(lengths)} are {sum(lengths)} tokens, not {T}"
    assert chunk_size & (chunk_size - 1) == 0, f"chunk_size {chunk_size} is not a power of two"
    versions = state.shape[1]
    layout = _lay_out(starts, lengths, by_sequence(kept, len(lengths)), chunk_size, versions, q.device)
    continuing = [rank for rank, r in enumerate(layout.ranks) if starts[r] > 0]
    read = [slots[layout.ranks[rank]] * versions + starts[layout.ranks[rank]] % versions for rank in continuing]
    write = [slots[r] * versions + (starts[r] + lengths[r]) % versions for r in layout.ranks]
    memory = state.view(-1, H, K, v.shape[2])
    initial = memory.new_zeros(len(slots), *memory.shape[1:])
    if continuing:
        initial[_indices(continuing, q.device)] = memory[_indices(read, q.device)]
    group = max(1, MAX_ELEMENTS // (layout.total * layout.size * K))
    if group >= H:
        out, final = _run(q, k, v, g, beta, initial, layout)
    else:
        parts = [slice(h, min(h + group, H)) for h in range(0, H, group)]
        runs = [_run(q[:, h], k[:, h], v[:, h], g[:, h], beta[:, h], initial[:, h], layout) for h in parts]
        out, final = torch.cat([run[0] for run in runs], dim=1), torch.cat([run[1] for run in runs], dim=1)
    memory.index_copy_(0, _indices([*write, *layout.kept_rows], q.device), final)
    if layout.kept_ends:
        ranks, rows = zip(*layout.kept_ends, strict=True)
        memory.index_copy_(0, _indices(rows, q.device), final.index_select(0, _indices(ranks, q.device)))
    return out.to(v.dtype)


def _indices(values: Sequence[int], device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64, device=device)


def _lay_out(
    starts: Sequence[int],
    lengths: Sequence[int],
    kept: Kept,
    chunk_size: int,
    versions: int,
    device: torch.device,
) -> _Layout:
    runs = [runs_of(*sequence) for sequence in zip(starts, lengths, kept, strict=True)]
    longest = max(tokens for own in runs for _, tokens, _ in own)
    size = min(chunk_size, 1 << (longest - 1).bit_length())
    begins = [[at for first, tokens, _ in own for at in range(first, first + tokens, size)] for own in runs]
    chunks = [len(own) for own in begins]
    ranks = sorted(range(len(lengths)), key=lambda r: -chunks[r])
    active = [sum(count > c for count in chunks) for c in range(max(chunks))]
    first_of = np.cumsum([0, *active[:-1]])
    rank_of = {r: rank for rank, r in enumerate(ranks)}
    inside: list[tuple[int, int]] = []
    ends: list[tuple[int, int]] = []
    for r, own in enumerate(runs):
        for first, tokens, split in own:
            if split is not None and first + tokens < lengths[r]:
                chunk = first_of[begins[r].index(first + tokens)] + rank_of[r]
                inside.append((int(chunk), row_of(split, versions)))
            elif split is not None:
                ends.append((rank_of[r], row_of(split, versions)))
    parts = []
    for r, length in enumerate(lengths):
        begin = np.array(begins[r])
        number = np.repeat(np.arange(len(begin)), np.diff(begin, append=length))
        parts.append((first_of[number] + rank_of[r]) * size + np.arange(length) - begin[number])
    total = sum(chunks)
    full = len(lengths) == 1 and total * size == lengths[0]
    return _Layout(
        size=size,
        ranks=tuple(ranks),
        active=tuple(active),
        rows=None if full else torch.from_numpy(np.concatenate(parts)).to(device),
        total=total,
        kept=tuple(chunk for chunk, _ in inside),
        kept_rows=tuple(row for _, row in inside),
        kept_ends=tuple(ends),
    )


def _run(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial: torch.Tensor,
    layout: _Layout,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out [T, H, V] fp32, states [R + S, H, K, V]) of some heads: the last ones in order of rank, then those that are
    kept. ``initial`` [R, H, K, V] in order of rank."""
    H, K = q.shape[1:]
    V = v.shape[2]
    N, C = layout.total, layout.size
    kq = torch.stack((k, q), dim=2).float()  # [T, H, 2, K]
    kq.mul_(inverse_l2(kq, L2_EPS))
    kq = _by_chunk(kq, layout)  # [N * H, C, 2, K]
    decay = _by_chunk(g.float(), layout)  # [N * H, C, K]
    gain = _by_chunk(beta.float().unsqueeze(2), layout)  # [N * H, C, 1]
    value = _by_chunk(v.float(), layout)  # [N * H, C, V]
    scores, since, until = _scores(kq, decay)
    key, query = kq.unbind(2)

    reach = since.exp()
    written = torch.cat((value, key * reach), dim=2).mul_(gain)
    written = torch.linalg.solve_triangular(scores[:, :, 0] * gain, written, upper=False, unitriangular=True)
    tail = key * until.exp_()
    added, turned = torch.split(torch.bmm(tail.transpose(1, 2), written), [V, K], dim=2)
    turned = turned.neg()
    turned.diagonal(dim1=1, dim2=2).add_(reach[:, -1])

    before, final = _scan(added.view(N, H, K, V), turned.view(N, H, K, K), initial, layout)
    if layout.kept:
        final = torch.cat((final, before.index_select(0, _indices(layout.kept, q.device))))
    before = before.view(N * H, K, V)
    written = torch.baddbmm(written[:, :, :V], written[:, :, V:], before, alpha=-1)
    out = torch.bmm(query * reach, before).baddbmm_(scores[:, :, 1], written).mul_(K**-0.5)
    out = out.view(N, H, C, V).transpose(1, 2).reshape(N * C, H, V)
    return out if layout.rows is None else out.index_select(0, layout.rows), final


def _by_chunk(x: torch.Tensor, layout: _Layout) -> torch.Tensor:
    """[T, H, ..] -> [chunks * H, C, ..] contiguous, zero where a chunk has no token."""
    if layout.rows is not None:
        padded = x.new_zeros(layout.total * layout.size, *x.shape[1:])
        x = padded.index_copy_(0, layout.rows, x)
    by_chunk = x.reshape(layout.total, layout.size, *x.shape[1:]).transpose(1, 2).contiguous()
    return by_chunk.view(layout.total * x.shape[1], layout.size, *x.shape[2:])


def _scores(kq: torch.Tensor, decay: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A and P of every chunk, and log decay summed from the chunk's start and to its end.

    Args:
        kq: [B, C, 2, K]; decay: [B, C, K] a token, overwritten.
    Returns:
        scores [B, C, 2, C]: row i's A, strictly lower, and its P, lower;
        since [B, C, K]: sum up to the token, itself included; until [B, C, K]: sum of the tokens behind it.
    """
    B, C, _, K = kq.shape
    scores = kq.new_zeros(B, C, 2, C)
    scores[:, :, 1].diagonal(dim1=1, dim2=2).copy_(torch.linalg.vecdot(kq[:, :, 0], kq[:, :, 1]))
    since, until = decay, torch.zeros_like(decay)
    half = 1
    while half < C:
        blocks = B * C // (2 * half)
        tokens = kq.view(blocks, 2, half, 2, K)
        since_left, since_right = since.view(blocks, 2, half, K).unbind(1)
        until_left = until.view(blocks, 2, half, K)[:, 0]
        rows = tokens[:, 1] * since_right.exp().unsqueeze(2)
        columns = tokens[:, 0, :, 0] * until_left.exp()
        square = torch.bmm(rows.view(blocks, 2 * half, K), columns.transpose(1, 2))
        _lower_squares(scores, half).copy_(square.view(B, -1, half, 2, half))
        until_left += since_right[:, -1:]
        since_right += since_left[:, -1:]
        half *= 2
    return scores, since, until


def _lower_squares(scores: torch.Tensor, half: int) -> torch.Tensor:
    """View [B, C / 2s, s, 2, s] of scores [B, C, 2, C]: in each diagonal block of 2s, right rows by left columns."""
    B, C = scores.shape[:2]
    step = 2 * half
    return scores.as_strided(
        (B, C // step, half, 2, half),
        (2 * C * C, step * 2 * C + step, 2 * C, C, 1),
        scores.storage_offset() + half * 2 * C,
    )


def _scan(
    added: torch.Tensor, turned: torch.Tensor, initial: torch.Tensor, layout: _Layout
) -> tuple[torch.Tensor, torch.Tensor]:
    """Carry states through the chunks: ``after = turned @ before + added``.

    Args:
        added: [N, H, K, V], turned: [N, H, K, K], initial: [R, H, K, V] in order of rank.
    Returns:
        (before [N, H, K, V], the state that each chunk starts from; final [R, H, K, V]).
    """
    H, K, V = added.shape[1:]
    before = torch.empty_like(added, memory_format=torch.contiguous_format)
    final = torch.empty_like(initial, memory_format=torch.contiguous_format)
    before[: layout.active[0]] = initial
    first = 0
    for c, count in enumerate(layout.active):
        going = layout.active[c + 1] if c + 1 < len(layout.active) else 0
        here = slice(first, first + count)
        after = torch.baddbmm(
            added[here].reshape(-1, K, V), turned[here].view(-1, K, K), before[here].view(-1, K, V)
        ).view(count, H, K, V)
        first += count
        if going:
            before[first : first + going] = after[:going]
        if going < count:
            final[going:count] = after[going:]
    return before, final
