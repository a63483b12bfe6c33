"""Drawn tokens against a walk along the vocabulary: torch, and the kernels on the GPU or in the interpreter."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import triton
import triton.language as tl

from sidestream.ops.draw import reference, torch_impl, triton_draw
from sidestream.ops.draw.triton_draw import relative_weights
from tests.ops.triton_mode import DEVICE

Draw = Callable[[torch.Tensor, torch.Tensor | None], tuple[torch.Tensor, torch.Tensor]]


def on_device(logits: torch.Tensor, settings: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    wide = torch.full((logits.shape[0], logits.shape[1] + 3), torch.nan, device=DEVICE)
    wide[:, : logits.shape[1]] = logits.to(DEVICE)
    given = None if settings is None else settings.to(DEVICE)
    tokens, peaks = triton_draw.draw_tokens(wide[:, : logits.shape[1]], given)
    return tokens.cpu(), peaks.cpu()


both = pytest.mark.parametrize("draw", [torch_impl.draw_tokens, on_device], ids=["torch", "triton"])
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # numpy interprets


@pytest.fixture(autouse=True)
def several_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_draw, "PART", 32)


def settings_of(rows: int) -> torch.Tensor:
    temperatures = torch.tensor([0.0, 1.0, 0.3, 4.0]).repeat(rows)[:rows]
    return torch.stack([temperatures.double(), torch.rand(rows, dtype=torch.float64)])


@both
@pytest.mark.parametrize("vocab", [1, 31, 96, 203])
def test_tokens_are_those_of_the_walk(draw: Draw, vocab: int) -> None:
    for _ in range(4):
        logits, settings = torch.randn(13, vocab) * 3, settings_of(13)
        want, peaks = reference.draw_tokens(logits, settings)
        tokens, got_peaks = draw(logits, settings)
        assert tokens.dtype is torch.int64
        assert torch.equal(tokens, want)
        assert torch.equal(got_peaks, peaks)
        assert torch.equal(draw(logits, None)[0], reference.draw_tokens(logits, None)[0])


@both
def test_the_ends_of_the_interval_and_masked_tokens(draw: Draw) -> None:
    """Parts without weight at both ends and in the middle; numbers next to 0, next to 1 and on a border."""
    logits = torch.full((4, 200), -torch.inf)
    logits[:, 40], logits[:, 150] = 0.0, 0.0
    settings = torch.tensor([[1.0] * 4, [0.0, 0.5, 0.5 - 1e-15, 1 - 2**-53]], dtype=torch.float64)
    tokens, peaks = draw(logits, settings)
    assert tokens.tolist() == [40, 150, 40, 150]
    assert peaks.tolist() == [0.0] * 4


@both
def test_equal_logits_give_the_lowest_id(draw: Draw) -> None:
    logits = torch.zeros(2, 100)
    logits[1, [35, 70]] = 1.0
    assert draw(logits, None)[0].tolist() == [0, 35]
    assert draw(logits, torch.zeros(2, 2, dtype=torch.float64))[0].tolist() == [0, 35]


@both
@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_a_broken_row_is_told_and_hurts_no_other(draw: Draw, poison: float) -> None:
    logits, settings = torch.randn(4, 100), settings_of(4)
    clean = draw(logits, settings)
    for row in range(4):
        broken = logits.clone()
        broken[row, 77] = poison
        tokens, peaks = draw(broken, settings)
        others = [i for i in range(4) if i != row]
        assert torch.equal(tokens[others], clean[0][others])
        assert torch.equal(peaks[others], clean[1][others])
        assert not bool(peaks[row].isfinite())
        assert 0 <= int(tokens[row]) < 100
    logits[2] = -torch.inf
    assert draw(logits, settings)[1][2] == -torch.inf


@both
def test_shares_follow_the_distribution(draw: Draw) -> None:
    """Evenly spread numbers find each token as often as it weighs, to one in 150."""
    logits = torch.randn(70)
    count = 150
    numbers = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    settings = torch.stack([torch.full((count,), 0.7, dtype=torch.float64), numbers])
    tokens, _ = draw(logits.expand(count, -1).contiguous(), settings)
    share = torch.bincount(tokens, minlength=70) / count
    want = (logits.double() / 0.7).softmax(0)
    assert float((share - want).abs().max()) <= 1.0 / count


@triton.jit  # type: ignore[untyped-decorator]
def _weights_kernel(logits: tl.tensor, temperature: tl.tensor, out: tl.tensor, COUNT: tl.constexpr) -> None:
    lane = tl.arange(0, COUNT)
    logit = tl.load(logits + lane)
    tl.store(out + lane, relative_weights(logit, tl.max(logit, 0), tl.load(temperature)))


@pytest.mark.parametrize("temperature", [1.0, 0.37, 3.0])
def test_the_exponential_is_right_to_one_in_a_trillion(temperature: float) -> None:
    """Over all powers that count; what lies below is zero, and so is what is impossible."""
    logits = torch.cat(
        [torch.linspace(0.0, -690.0 * temperature, 4094), torch.tensor([-701.0 * temperature, -torch.inf])]
    )
    out = torch.full((4096,), torch.nan, dtype=torch.float64, device=DEVICE)
    given = torch.tensor([temperature], dtype=torch.float64, device=DEVICE)
    _weights_kernel[(1,)](logits.to(DEVICE), given, out, COUNT=4096)
    want = torch.exp(logits.double() / temperature)
    torch.testing.assert_close(out[:4094].cpu(), want[:4094], rtol=1e-12, atol=0.0)
    assert out[4094:].tolist() == [0.0, 0.0]
