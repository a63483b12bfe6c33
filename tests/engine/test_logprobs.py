import math

import pytest
import torch

from sidestream.engine import logprobs as module
from sidestream.engine.logprobs import top_logprobs


def test_the_chosen_token_comes_first_and_the_top_by_rank() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0, 2.0], [5.0, 1.0, 1.5, 1.0]])
    first, second = top_logprobs(logits, [2, 0], 2)
    want = torch.log_softmax(logits.double(), -1)
    assert [(token, rank) for token, _, rank in first] == [(2, 3), (1, 1), (3, 2)]
    assert [(token, rank) for token, _, rank in second] == [(0, 1), (2, 2)]
    for row, entries in ((0, first), (1, second)):
        for token, value, _ in entries:
            assert value == pytest.approx(float(want[row, token]), abs=1e-6)


def test_a_count_for_each_row() -> None:
    logits = torch.randn(4, 9, generator=torch.Generator().manual_seed(0))
    chosen = [0, 1, 2, 3]
    together = top_logprobs(logits, chosen, [0, 3, 20, 1])
    alone = [top_logprobs(logits[i : i + 1], [chosen[i]], n)[0] for i, n in enumerate([0, 3, 20, 1])]
    assert together == alone
    assert len(together[0]) == 1
    assert len(together[2]) == 9, "the whole vocabulary, the chosen token once"


def test_equal_logits_rank_by_token_id() -> None:
    logits = torch.zeros(1, 2_000)
    (row,) = top_logprobs(logits, [1_500], 4)
    assert [(token, rank) for token, _, rank in row] == [(1_500, 1_501), (0, 1), (1, 2), (2, 3), (3, 4)]
    (row,) = top_logprobs(logits, [2], 4)
    assert [(token, rank) for token, _, rank in row] == [(2, 3), (0, 1), (1, 2), (3, 4)]


def test_a_certain_token_and_impossible_ones() -> None:
    logits = torch.tensor([[-math.inf, 0.0, -math.inf]])
    (row,) = top_logprobs(logits, [2], 3)
    assert row == ((2, -math.inf, 3), (1, 0.0, 1), (0, -math.inf, 2))


def test_slices_of_scratch_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(7, 50, generator=torch.Generator().manual_seed(0))
    whole = top_logprobs(logits, list(range(7)), 5)
    monkeypatch.setattr(module, "SCRATCH_ELEMENTS", 100)
    assert top_logprobs(logits, list(range(7)), 5) == whole
