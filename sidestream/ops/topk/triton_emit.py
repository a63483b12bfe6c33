"""Triton writing of selected entries: their tokens, the unfinished pool's, and the physical rows of both if asked.

``to`` holds out, block table and physical rows with their strides by row and by column.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def emit(chosen, places, entries, row, to, KPOOL: tl.constexpr, PER_BLOCK: tl.constexpr, MAP: tl.constexpr):
    """Write the tokens of chosen entries at their places and, if asked, their physical rows."""
    out, table, physical, out_row, out_col, table_row, table_col, rows_row, rows_col = to
    place = places * KPOOL
    for j in tl.static_range(KPOOL):
        tl.store(out + row * out_row + (place + j) * out_col, entries * KPOOL + j, mask=chosen)
    if MAP:
        page = tl.load(table + row * table_row + (entries // PER_BLOCK) * table_col, mask=chosen, other=0)
        first = (page.to(tl.int64) * PER_BLOCK + entries % PER_BLOCK) * KPOOL
        for j in tl.static_range(KPOOL):
            tl.store(physical + row * rows_row + (place + j) * rows_col, first + j, mask=chosen)


@triton.jit
def everything(row, length, to, KPOOL: tl.constexpr, PER_BLOCK: tl.constexpr, WIDTH: tl.constexpr, MAP: tl.constexpr):
    """All positions of a short row, -1 behind them."""
    out, table, physical, out_row, out_col, table_row, table_col, rows_row, rows_col = to
    tokens: tl.constexpr = PER_BLOCK * KPOOL
    for start in tl.static_range(0, WIDTH, 1024):
        column = start + tl.arange(0, 1024)
        inside, true = column < WIDTH, column < length
        tl.store(out + row * out_row + column.to(tl.int64) * out_col, tl.where(true, column, -1), mask=inside)
        if MAP:
            page = tl.load(table + row * table_row + (column // tokens) * table_col, mask=true & inside, other=0)
            rows = page.to(tl.int64) * tokens + column % tokens
            place = physical + row * rows_row + column.to(tl.int64) * rows_col
            tl.store(place, tl.where(true, rows, -1), mask=inside)


@triton.jit
def unfinished(
    row, length, picks, to, KPOOL: tl.constexpr, PER_BLOCK: tl.constexpr, TAIL: tl.constexpr, MAP: tl.constexpr
):
    """The row's own unfinished pool behind what is picked, -1 behind that."""
    out, table, physical, out_row, out_col, table_row, table_col, rows_row, rows_col = to
    valid, step = length // KPOOL, tl.arange(0, TAIL)
    position, column = valid * KPOOL + step, (picks * KPOOL + step).to(tl.int64)
    inside, true = step < KPOOL - 1, position < length
    tl.store(out + row * out_row + column * out_col, tl.where(true, position, -1), mask=inside)
    if MAP:
        where = table + row * table_row + (valid // PER_BLOCK + step * 0) * table_col
        page = tl.load(where, mask=true & inside, other=0)
        rows = (page.to(tl.int64) * PER_BLOCK + valid % PER_BLOCK) * KPOOL + step
        tl.store(physical + row * rows_row + column * rows_col, tl.where(true, rows, -1), mask=inside)
