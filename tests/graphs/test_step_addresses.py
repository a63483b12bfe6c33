"""Steps of one shape lie at one address whatever they hold, and every step fits the upload that is set aside for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sidestream.attention import step_inputs
from sidestream.attention.step_inputs import StepInputsBuilder
from sidestream.core.step_inputs import StepInputs
from sidestream.streams import InlineBackend
from tests.graphs.steps import BLOCK_SIZE, chunk, decodes, step_builder

MAX_BLOCKS = 4
POSITIONS = st.lists(st.integers(0, MAX_BLOCKS * BLOCK_SIZE - 1), min_size=1, max_size=6)
WINDOWS = st.sampled_from([(4, 4), (4, 2), (4, 1), (0, 4), (0, 1)])


@contextmanager
def tables(*, narrow: bool) -> Iterator[None]:
    """Block tables of uniform steps travel without the columns that no sequence has, or whole."""
    with patch.object(step_inputs, "WIDE_TABLE", 1 if narrow else 1 << 40):
        yield


BOTH = pytest.mark.parametrize("narrow", [False, True], ids=["whole", "narrow"])


def addresses(step: StepInputs) -> dict[str, tuple[int, tuple[int, ...]]]:
    return {name: (tensor.data_ptr(), tuple(tensor.shape)) for name, tensor in step.static_tensors().items()}


@BOTH
@given(POSITIONS, POSITIONS, WINDOWS)
def test_uniform_steps_of_one_size_are_alike(
    narrow: bool, first: list[int], second: list[int], windows: tuple[int, int]
) -> None:
    """Also the scratch step that the graph is captured on, which has no true row at all."""
    conv_size, kpool = windows
    with tables(narrow=narrow):
        builder = step_builder(InlineBackend(), max_seqs=6, max_tokens=16, conv_size=conv_size, kpool=kpool)
        captured = addresses(builder.scratch(rows=6, uniform=True))
        for starts in (first, second):
            step = builder.build_uniform(decodes(starts), list(range(len(starts))), rows=6)
            assert addresses(step) == captured
    assert {"token_ids", "positions", "block_table", "context_lens", "slots"} <= set(captured)
    assert ("conv.0" in captured, "pools.0" in captured) == (conv_size > 0, kpool > 1)


@given(st.lists(st.integers(1, 8), min_size=1, max_size=4), WINDOWS)
def test_mixed_steps_of_one_size_share_ids_and_positions(lengths: list[int], windows: tuple[int, int]) -> None:
    conv_size, kpool = windows
    builder = step_builder(InlineBackend(), max_seqs=4, max_tokens=32, conv_size=conv_size, kpool=kpool)
    captured = addresses(builder.scratch(rows=32, uniform=False))
    chunks = [chunk(row, 0, length) for row, length in enumerate(lengths)]
    step = builder.build(chunks, [1] * sum(lengths), rows=32)
    assert addresses(step) == captured
    assert set(captured) == {"token_ids", "positions"}


@given(st.lists(st.tuples(POSITIONS, st.booleans()), min_size=1, max_size=5), WINDOWS)
def test_what_a_uniform_step_holds_does_not_depend_on_how_its_table_travels(
    turns: list[tuple[list[int], bool]], windows: tuple[int, int]
) -> None:
    """Behind steps with longer sequences, and behind others that lie where its table does."""
    seen = []
    for narrow in (False, True):
        with tables(narrow=narrow):
            builder = step_builder(InlineBackend(), max_seqs=6, max_tokens=16, conv_size=windows[0], kpool=windows[1])
            for starts, mixed in turns:
                step = builder.build_uniform(decodes(starts), list(range(len(starts))), rows=6)
                seen.append({name: tensor.clone() for name, tensor in step.static_tensors().items()})
                if mixed:
                    builder.build([chunk(0, 0, 16)], [1] * 16, rows=16)
    for plain, other in zip(seen[: len(turns)], seen[len(turns) :], strict=True):
        assert plain.keys() == other.keys()
        assert all(torch.equal(plain[name], other[name]) for name in plain)


@BOTH
@given(st.data(), WINDOWS)
def test_every_step_fits_the_upload(narrow: bool, data: st.DataObject, windows: tuple[int, int]) -> None:
    with tables(narrow=narrow):
        check_that_steps_fit(data, windows)


def check_that_steps_fit(data: st.DataObject, windows: tuple[int, int]) -> None:
    conv_size, kpool = windows
    max_seqs = data.draw(st.integers(1, 5))
    max_tokens = data.draw(st.integers(max_seqs, 40))
    builder = step_builder(
        InlineBackend(), max_seqs=max_seqs, max_tokens=max_tokens, max_blocks=8, conv_size=conv_size, kpool=kpool
    )
    chunks, left = [], max_tokens
    for row in range(data.draw(st.integers(1, max_seqs))):
        if left:
            length = data.draw(st.integers(1, left))
            chunks.append(chunk(row, data.draw(st.integers(0, 8 * BLOCK_SIZE - length)), length))
            left -= length
    tokens = sum(c.length for c in chunks)
    step = builder.build(chunks, [1] * tokens, rows=max_tokens)
    assert step.num_tokens == tokens
    uniform = builder.build_uniform(decodes([8 * BLOCK_SIZE - 1] * max_seqs), [1] * max_seqs, rows=max_seqs)
    assert uniform.num_padded_tokens == max_seqs


def test_scratch_decodes_have_the_blocks_of_two_tokens() -> None:
    """Also where every token is a block of its own, and no sequence has more of them."""
    builder = StepInputsBuilder(block_size=1, conv_size=0, kpool=1, rollback=0, max_blocks=2, capturable=True)
    for rows in (2, 3, 4):
        assert builder.scratch(rows=rows, uniform=False, decode=True).num_decode == 1
