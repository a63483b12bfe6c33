"""Triton row copies: programs of a few rows read the host's memory through the bus."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl


@dataclass(frozen=True, slots=True)
class CopyPlan:
    """Launch parameters.

    Attributes:
        rows: a program.
        programs: at most so many a request; they share its rows in turns.
    """

    rows: int = 1
    warps: int = 1
    programs: int = 1024


DEFAULT_PLAN = CopyPlan()


@triton.jit
def _copy_kernel(
    pool, host, to, source, counts, pool_row, host_row, list_row, programs,
    WORDS: tl.constexpr, W: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0).to(tl.int64) // programs
    first = tl.program_id(0) % programs
    count = tl.load(counts + request)
    row, word = tl.arange(0, ROWS), tl.arange(0, W)
    inside = word < WORDS
    for start in range(first * ROWS, count, programs * ROWS):
        index = start + row
        listed = index < count
        at = tl.load(source + request * list_row + index, mask=listed, other=0)
        goes = tl.load(to + request * list_row + index, mask=listed, other=0)
        mask = listed[:, None] & inside[None, :]
        value = tl.load(host + at[:, None] * host_row + word[None, :], mask=mask, other=0)
        tl.store(pool + goes[:, None] * pool_row + word[None, :], value, mask=mask)


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
    """As ``torch_impl.copy_rows``; rows are whole words of 4 bytes, lists have rows of unit stride. ``spare`` is not
    touched.

    The grid is as large as the lists could need: a graph cannot know the counts.
    """
    requests, most = to.shape
    if requests == 0 or most == 0:
        return
    words, host_words = pool.view(torch.int32), host.view(torch.int32)
    assert words.stride(1) == host_words.stride(1) == to.stride(1) == 1
    assert to.stride() == source.stride()
    programs = min(triton.cdiv(most, plan.rows), plan.programs)
    width = words.shape[1]
    _copy_kernel[(requests * programs,)](
        words, host_words, to, source, counts, words.stride(0), host_words.stride(0), to.stride(0), programs,
        WORDS=width, W=triton.next_power_of_2(width), ROWS=plan.rows, num_warps=plan.warps,
    )  # fmt: skip
