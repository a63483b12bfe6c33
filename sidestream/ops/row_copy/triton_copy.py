"""Triton row copies: programs of a few rows read the host's memory through the bus."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@dataclass(frozen=True, slots=True)
class CopyPlan:
    """Launch parameters.

    Attributes:
        rows: a program.
        programs: a request, no more than its list has places for; they share its rows in turns.
        turns: more programs than that where a full list would take a program more than so many turns.
        total: at most so many of all requests, but one each: the lists are as long as a step could need, and most of
            the programs for them would find nothing to do.
        early: read a row's place in the lists before it is known whether it counts, and the next one's before this one
            is stored: one trip to memory less before the first byte is asked for.
        vectors: 16 bytes an access wherever rows are a multiple of that. Without it only rows of a multiple of 64 bytes
            are read so, the others (528, 656 bytes) in words.
        pdl: launch while the kernel before still runs (programmatic dependent launch), and wait for it there.
    """

    rows: int = 1
    warps: int = 1
    programs: int = 1024
    turns: int = 64
    total: int = 4096
    early: bool = False
    vectors: bool = False
    pdl: bool = False

    def programs_of(self, requests: int, most: int) -> int:
        """Programs of each request, whose lists have ``most`` places."""
        turns = -(-most // self.rows)
        return min(turns, max(self.programs, -(-turns // self.turns)), max(self.total // requests, 1))


WORDS = (torch.int32, torch.int16, torch.uint8)
"""What rows are copied in: the largest that they are a multiple of."""
COMPILED = not triton.knobs.runtime.interpret
DEFAULT_PLAN = CopyPlan(programs=1024, turns=8, total=2048, early=True, vectors=True, pdl=COMPILED)
"""2,048 programs cost 1.3 us more than 1,024 where no row is missing, 4,096 take 2.6 more again. They are no faster for
2,048 rows of a request; 16,384 rows take 0.6 % less with 2,048."""


@triton.jit
def _copy_rows_kernel(
    pool, host, to, source, counts, pool_pieces, host_pieces, list_row, most, programs,
    WORDS: tl.constexpr, W: tl.constexpr, ROWS: tl.constexpr, PIECE: tl.constexpr, EARLY: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0).to(tl.int64) // programs
    first = tl.program_id(0) % programs
    row, word = tl.arange(0, ROWS), tl.arange(0, W)
    inside = word < WORDS
    source += request * list_row
    to += request * list_row
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    if EARLY:
        index = first * ROWS + row
        at = tl.load(source + index, mask=index < most, other=0)
        goes = tl.load(to + index, mask=index < most, other=0)
    count = tl.load(counts + request)
    for start in range(first * ROWS, count, programs * ROWS):
        index = start + row
        listed = index < count
        if not EARLY:
            at = tl.load(source + index, mask=listed, other=0)
            goes = tl.load(to + index, mask=listed, other=0)
        mask = listed[:, None] & inside[None, :]
        value = tl.load(host + at[:, None] * (host_pieces * PIECE) + word[None, :], mask=mask, other=0)
        target = pool + goes[:, None] * (pool_pieces * PIECE) + word[None, :]
        if EARLY:
            index += programs * ROWS
            at = tl.load(source + index, mask=index < most, other=0)
            goes = tl.load(to + index, mask=index < most, other=0)
        tl.store(target, value, mask=mask)


def copy_rows(
    pool: torch.Tensor,
    host: torch.Tensor,
    *,
    to: torch.Tensor,
    source: torch.Tensor,
    counts: torch.Tensor,
    spare: tuple[int, int] = (0, 0),
    plan: CopyPlan = DEFAULT_PLAN,
) -> None:
    """As ``torch_impl.copy_rows``; lists have rows of unit stride. ``spare`` is not touched.

    The grid is as large as the lists could need: a graph cannot know the counts.
    """
    requests, most = to.shape
    if requests == 0 or most == 0:
        return
    programs = plan.programs_of(requests, most)
    sizes = [count * pool.itemsize for count in (pool.shape[1], pool.stride(0), host.stride(0))]
    word = next(word for word in WORDS if not any(size % word.itemsize for size in sizes))
    words, host_words = pool.view(word), host.view(word)
    assert words.stride(1) == host_words.stride(1) == to.stride(1) == 1
    assert to.stride() == source.stride()
    width, strides = words.shape[1], (words.stride(0), host_words.stride(0))
    piece = 4 if plan.vectors and word is WORDS[0] and not any(count % 4 for count in (width, *strides)) else 1
    _copy_rows_kernel[(requests * programs,)](
        words, host_words, to, source, counts, strides[0] // piece, strides[1] // piece, to.stride(0), most, programs,
        WORDS=width, W=triton.next_power_of_2(width), ROWS=plan.rows, PIECE=piece, EARLY=plan.early,
        PDL=plan.pdl, launch_pdl=plan.pdl, num_warps=plan.warps,
    )  # fmt: skip
