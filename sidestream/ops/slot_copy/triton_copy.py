"""Slot copies in Triton: one launch a slot, whatever the number of layers and kinds of state.

A slot of eight layers of GLM-5.3-Flash has 26 MB, which take 12 us to read and write at 4.28 TB/s; three strided copies
of torch took 68 us of the host.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

PIECE = 4096
"""Words a program."""
WORDS = ((4, tl.int32), (2, tl.int16), (1, tl.uint8))
"""What slots are copied in: the largest that all of them are a multiple of."""


def takes(states: Sequence[torch.Tensor]) -> bool:
    """Whether the kernel copies slots of these: transposed from contiguous memory of a layer behind the other."""
    return len(states) <= 3 and all(state.dim() > 2 and state.transpose(0, 1).is_contiguous() for state in states)


def copy_slots(*states: torch.Tensor, to: Sequence[int], taken: Sequence[int]) -> None:
    """As ``torch_impl.copy_slots``, for what ``takes`` allows; each copy waits for the one before it."""
    sizes = [state[0, 0].numel() * state.itemsize for state in states]
    size, word = next((size, word) for size, word in WORDS if not any(total % size for total in sizes))
    words = [total // size for total in sizes] + [0] * (3 - len(sizes))
    layers = [state.shape[1] for state in states] + [0] * (3 - len(states))
    programs = [count * triton.cdiv(own, PIECE) for count, own in zip(layers, words, strict=True)]
    tensors = (*states, *states[:1] * (3 - len(states)))
    for place, slot in zip(to, taken, strict=True):
        _copy_slot[(sum(programs),)](
            *tensors, place, slot, states[0].shape[0], programs[0], programs[0] + programs[1],
            *words, WORD=word, PIECE=PIECE, num_warps=4,
        )  # fmt: skip


@triton.jit(do_not_specialize=["to", "taken", "slots", "second_begin", "third_begin"])
def _copy_slot(
    first, second, third, to, taken, slots, second_begin, third_begin,
    FIRST_WORDS: tl.constexpr, SECOND_WORDS: tl.constexpr, THIRD_WORDS: tl.constexpr,
    WORD: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """Programs from ``second_begin`` and ``third_begin`` on are those of the second and third tensor."""
    program = tl.program_id(0)
    if program < second_begin:
        _copy_piece(first, program, to, taken, slots, FIRST_WORDS, WORD, PIECE)
    elif program < third_begin:
        _copy_piece(second, program - second_begin, to, taken, slots, SECOND_WORDS, WORD, PIECE)
    else:
        _copy_piece(third, program - third_begin, to, taken, slots, THIRD_WORDS, WORD, PIECE)


@triton.jit
def _copy_piece(
    state, piece, to, taken, slots, WORDS: tl.constexpr, WORD: tl.constexpr, PIECE: tl.constexpr
):  # fmt: skip
    """Of one slot of one layer."""
    pieces: tl.constexpr = (WORDS + PIECE - 1) // PIECE if WORDS else 1
    first_slot = (piece // pieces).to(tl.int64) * slots
    word = piece % pieces * PIECE + tl.arange(0, PIECE)
    memory = state.to(tl.pointer_type(WORD))
    value = tl.load(memory + (first_slot + taken) * WORDS + word, mask=word < WORDS)
    tl.store(memory + (first_slot + to) * WORDS + word, value, mask=word < WORDS)
