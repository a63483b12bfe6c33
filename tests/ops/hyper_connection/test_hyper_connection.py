"""Hyper-connections against the formula, against transformers, and under garbage in padding rows."""

from __future__ import annotations

import pytest
import torch
from transformers.models.glm5_next.configuration_glm5_next import Glm5NextTextConfig
from transformers.models.glm5_next.modeling_glm5_next import Glm5NextTextHyperConnection, Glm5NextTextRMSNorm

from sidestream.ops.hyper_connection import hyper_connection_post, hyper_connection_pre, reference, torch_impl
from tests.tolerances import BF16_OUTPUT, FP32_ROUNDING

HIDDEN = 24
EPS = {"norm_eps": 1e-5, "eps": 1e-6}


def make(
    tokens: int, *, streams: int = 4, hidden: int = HIDDEN, spread: float = 1.0, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(streams, fn, base, scale); ``spread`` sharpens the mix: large is near a permutation, slow for Sinkhorn."""
    gen = torch.Generator().manual_seed(seed)
    rows = (2 + streams) * streams
    x = torch.randn(tokens, streams, hidden, generator=gen)
    fn = torch.randn(rows, streams * hidden, generator=gen) / (streams * hidden) ** 0.5
    base = torch.randn(rows, generator=gen)
    scale = torch.tensor([0.7, 1.3, 1.0 * spread])
    return x, fn, base, scale


def scaled(fn: torch.Tensor, scale: torch.Tensor, streams: int = 4) -> torch.Tensor:
    """The rows of ``fn`` times the scale of their part, as the operator takes them."""
    return fn * scale.repeat_interleave(torch.tensor([streams, streams, streams**2])).unsqueeze(1)


def inputs(
    tokens: int, *, streams: int = 4, spread: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(streams, scaled fn, base, weight of the norm, twice)."""
    x, fn, base, scale = make(tokens, streams=streams, spread=spread)
    weight = torch.rand(HIDDEN, generator=torch.Generator().manual_seed(5)) + 0.5
    return x, scaled(fn, scale, streams), base, torch.stack((weight, weight))


@pytest.mark.parametrize("tokens", [1, 8, 127, 128, 129, 300])
@pytest.mark.parametrize("spread", [1.0, 8.0])
@pytest.mark.parametrize("iters", [1, 2, 20])
def test_pre_equals_the_formula(tokens: int, spread: float, iters: int) -> None:
    x, fn, base, weight = inputs(tokens, spread=spread)
    got = hyper_connection_pre(x, fn, base, norm_weight=weight, **EPS, iters=iters)
    want = reference.hyper_connection_pre(x, fn, base, norm_weight=weight, **EPS, iters=iters)
    for name, a, b in zip(("input", "post", "mix"), got, want, strict=True):
        bound = FP32_ROUNDING * (4 if name == "input" else spread)  # values up to 4; logits of order spread
        torch.testing.assert_close(a, b, rtol=0, atol=bound, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("size", [1e-3, 1e-2, 30.0, 1e6])
def test_the_norm_is_an_rms_norm_at_any_size(size: float) -> None:
    """Tiny rows are where eps decides, large ones where a mean that is not quite zero would show; both off centre."""
    x, fn, base, weight = inputs(9)
    x = (x + 3) * size
    got = hyper_connection_pre(x, fn, base, norm_weight=weight, **EPS, iters=20)[0]
    want = reference.hyper_connection_pre(x, fn, base, norm_weight=weight, **EPS, iters=20)[0]
    torch.testing.assert_close(got, want, rtol=0, atol=4 * FP32_ROUNDING)


@pytest.mark.parametrize("streams", [2, 3, 4])
def test_sinkhorn_makes_the_mix_doubly_stochastic(streams: int) -> None:
    x, fn, base, weight = inputs(40, streams=streams)
    _, _, mix = hyper_connection_pre(x, fn, base, norm_weight=weight, **EPS, iters=400)
    ones = torch.ones(40, streams)
    torch.testing.assert_close(mix.sum(2), ones, rtol=0, atol=1e-5)  # eps in each sum leaves about 1e-6
    torch.testing.assert_close(mix.sum(1), ones, rtol=0, atol=1e-4)


def test_a_large_eps_counts_in_every_sum() -> None:
    x, fn, base, weight = inputs(8)
    for tokens_limit in (128, 0):  # numpy's loop, torch's loop
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch_impl, "NUMPY_MAX_TOKENS", tokens_limit)
            got = hyper_connection_pre(x, fn, base, norm_weight=weight, norm_eps=1e-2, eps=0.05, iters=7)
        want = reference.hyper_connection_pre(x, fn, base, norm_weight=weight, norm_eps=1e-2, eps=0.05, iters=7)
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=4 * FP32_ROUNDING)


@pytest.mark.parametrize("tokens", [5, 200])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_transformers(tokens: int, dtype: torch.dtype) -> None:
    config = Glm5NextTextConfig(hidden_size=HIDDEN, hc_mult=4, hc_sinkhorn_iters=20, hc_eps=1e-6, rms_norm_eps=1e-5)
    oracle = Glm5NextTextHyperConnection(config)
    x, fn, base, scale = make(tokens)
    with torch.no_grad():
        oracle.fn.copy_(fn)
        oracle.base.copy_(base)
        oracle.scale.copy_(scale)
        norm = Glm5NextTextRMSNorm(HIDDEN, eps=1e-5)
        norm.weight.copy_(torch.rand(HIDDEN) + 0.5)
        norm.to(dtype)
        x = x.to(dtype)
        post, comb, collapsed = oracle(x[None])
        weight = torch.stack((norm.weight, norm.weight))
        got = hyper_connection_pre(x, scaled(fn, scale), base, norm_weight=weight, **EPS, iters=20)
        output = torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(9)).to(dtype)
        # the residual update of Glm5NextTextDecoderLayer, which is not a function of its own
        want_streams = post.to(dtype).unsqueeze(-1) * output[None].unsqueeze(-2) + torch.matmul(
            comb.to(dtype).transpose(-1, -2), x[None]
        )
        streams = hyper_connection_post(x, output, got[1], mix=got[2])
        want_input = norm(collapsed)[0]
    relative = 0.0 if dtype == torch.float32 else 2 * BF16_OUTPUT
    torch.testing.assert_close(got[0], want_input, rtol=2 * relative, atol=4 * FP32_ROUNDING)
    torch.testing.assert_close(2 * got[1][:, :, 0], post[0], rtol=0, atol=FP32_ROUNDING)
    torch.testing.assert_close(got[2].transpose(1, 2), comb[0], rtol=0, atol=FP32_ROUNDING)
    # bf16: the two products of order 4 are each rounded before they are added
    torch.testing.assert_close(
        streams, want_streams[0], rtol=2 * relative, atol=4 * FP32_ROUNDING if relative == 0 else 4 * BF16_OUTPUT
    )


def test_post_equals_the_formula_and_keeps_its_inputs() -> None:
    x, fn, base, weight = inputs(33)
    _, post, mix = hyper_connection_pre(x, fn, base, norm_weight=weight, **EPS, iters=3)
    output = torch.randn(33, 2 * HIDDEN)[:, ::2]  # strided
    before = x.clone()
    got = hyper_connection_post(x, output, post, mix=mix)
    torch.testing.assert_close(
        got, reference.hyper_connection_post(x, output, post, mix=mix), rtol=0, atol=4 * FP32_ROUNDING
    )
    assert torch.equal(x, before)


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), 1e30])
@pytest.mark.parametrize("tokens", [8, 200])
def test_garbage_in_one_row_stays_there(poison: float, tokens: int) -> None:
    x, fn, base, weight = inputs(tokens)
    clean = hyper_connection_pre(x, fn, base, norm_weight=weight, **EPS, iters=20)
    x[3] = poison
    dirty = hyper_connection_pre(x, fn, base, norm_weight=weight, **EPS, iters=20)
    keep = [t for t in range(tokens) if t != 3]
    for a, b in zip(clean, dirty, strict=True):
        assert torch.equal(a[keep], b[keep])
    streams = hyper_connection_post(x, clean[0], clean[1], mix=clean[2])
    assert bool(streams[keep].isfinite().all())
