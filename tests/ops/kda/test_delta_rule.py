"""Recurrent and chunked Kimi Delta Attention against transformers, against each other, with poisoned states.

K and V differ everywhere here: a transposed state is invisible otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.glm5_next.modeling_glm5_next import (
    chunk_kimi_delta_attention,
    recurrent_kimi_delta_attention,
)

from sidestream.ops.kda import chunked, recurrent, reference, torch_chunked
from tests.tolerances import BF16_OUTPUT, FP32_RECURRENCE, FP32_ROUNDING

H, K, V = 3, 8, 12
NAN = float("nan")


@dataclass(frozen=True)
class Inputs:
    """Tokens [T, H, ..]; decay strength is the largest forgetting a token, in log units."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor

    @classmethod
    def random(cls, tokens: int, *, strength: float = 1.0, seed: int = 0) -> Inputs:
        gen = torch.Generator().manual_seed(seed)
        q, k = torch.randn(2, tokens, H, K, generator=gen).unbind(0)
        v = torch.randn(tokens, H, V, generator=gen)
        g = -torch.rand(tokens, H, K, generator=gen) * strength
        return cls(q, k, v, g, torch.rand(tokens, H, generator=gen))

    def __getitem__(self, rows: slice) -> Inputs:
        return Inputs(self.q[rows], self.k[rows], self.v[rows], self.g[rows], self.beta[rows])

    def oracle(self, initial: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Token by token in transformers: (out [T, H, V], state [H, K, V])."""
        out, state = recurrent_kimi_delta_attention(
            self.q[None],
            self.k[None],
            self.v[None],
            self.g[None],
            self.beta[None],
            initial_state=None if initial is None else initial[None],
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )
        return out[0], state[0]

    def prefill(
        self, state: torch.Tensor, slots: list[int], starts: list[int], lengths: list[int], chunk_size: int = 64
    ) -> torch.Tensor:
        return chunked(
            self.q,
            self.k,
            self.v,
            g=self.g,
            beta=self.beta,
            state=state,
            slots=slots,
            starts=starts,
            lengths=lengths,
            chunk_size=chunk_size,
        )

    def decode(self, state: torch.Tensor, slots: list[int], starts: list[int]) -> torch.Tensor:
        """Rows as [R, n, H, ..] with R = len(slots); out [T, H, V]."""
        R = len(slots)

        def rows(x: torch.Tensor) -> torch.Tensor:
            return x.view(R, -1, *x.shape[1:])

        out = recurrent(
            rows(self.q),
            rows(self.k),
            rows(self.v),
            g=rows(self.g),
            beta=rows(self.beta),
            state=state,
            slots=torch.tensor(slots),
            start=torch.tensor(starts),
        )
        assert out.shape == (R, self.q.shape[0] // R, H, V)
        return out.reshape(-1, H, V)


def poisoned(slots: int, versions: int = 1) -> torch.Tensor:
    return torch.full((slots, versions, H, K, V), NAN)


def close(got: torch.Tensor, want: torch.Tensor, bound: float = FP32_RECURRENCE) -> None:
    torch.testing.assert_close(got, want, rtol=0, atol=bound)


@pytest.mark.parametrize("tokens", [1, 2, 3, 16, 63, 64, 65, 130, 200])
@pytest.mark.parametrize("strength", [0.0, 0.05, 5.0, 300.0])
def test_fresh_prefill_equals_transformers(tokens: int, strength: float) -> None:
    """Also where the gate forgets everything at once: no product of decays may overflow or lose its small factor."""
    x = Inputs.random(tokens, strength=strength)
    state = poisoned(3)
    got = x.prefill(state, [1], [0], [tokens])
    want, final = x.oracle()
    close(got, want)
    close(state[1, 0], final)
    assert bool(state[[0, 2]].isnan().all())
    if strength > 100:
        return  # transformers' chunks subtract long prefix sums there, and are off by 1e-5 themselves
    by_chunk = chunk_kimi_delta_attention(
        x.q[None], x.k[None], x.v[None], x.g[None], x.beta[None], use_qk_l2norm_in_kernel=True
    )[0][0]
    close(got, by_chunk)


def test_a_gate_that_closes_and_opens_within_a_chunk() -> None:
    x = Inputs.random(130, strength=0.01)
    for token in (0, 5, 31, 32, 63, 64, 100):
        x.g[token, 1] = -1e4
    x.g[40:50, 2, ::2] = -90.0
    state = poisoned(2)
    got = x.prefill(state, [1], [0], [130])
    want, final = x.oracle()
    close(got, want)
    close(state[1, 0], final)


@pytest.mark.parametrize("chunk_size", [1, 2, 16, 64, 128])
@pytest.mark.parametrize("lengths", [[65], [1, 130, 64], [7, 7, 7], [3, 200, 1, 64, 65], [128, 64]])
def test_a_mixed_batch_equals_each_alone(lengths: list[int], chunk_size: int) -> None:
    """Fresh ones (their slots hold NaN) and continuing ones, in slots out of order, in rings of three versions."""
    R = len(lengths)
    x = Inputs.random(sum(lengths), strength=0.5, seed=R)
    starts = [0 if r % 2 else 4 + 7 * r for r in range(R)]
    slots = [R - r for r in range(R)]
    state = poisoned(R + 2, 3)
    initial = torch.randn(R, H, K, V)
    for r in range(R):
        if starts[r]:
            state[slots[r], starts[r] % 3] = initial[r]
    before = state.clone()
    got = x.prefill(state, slots, starts, lengths, chunk_size)
    first = 0
    for r, length in enumerate(lengths):
        want, final = x[slice(first, first + length)].oracle(initial[r] if starts[r] else None)
        close(got[first : first + length], want)
        written = (starts[r] + length) % 3
        close(state[slots[r], written], final)
        for version in {0, 1, 2} - {written}:
            assert torch.equal(state[slots[r], version].nan_to_num(5.0), before[slots[r], version].nan_to_num(5.0)), (
                "another version was written"
            )
        first += length
    assert bool(state[[0, R + 1]].isnan().all())


@pytest.mark.parametrize("step", [1, 2, 3, 5, 63, 64, 65])
def test_prefill_in_steps_equals_one_prefill(step: int) -> None:
    x = Inputs.random(131, strength=0.3)
    whole, pieces = poisoned(2), poisoned(2)
    want = x.prefill(whole, [1], [0], [131])
    got = [x[slice(at, at + step)].prefill(pieces, [1], [at], [min(step, 131 - at)]) for at in range(0, 131, step)]
    close(torch.cat(got), want)
    close(pieces[1, 0], whole[1, 0])


def test_reference_equals_transformers() -> None:
    x = Inputs.random(20)
    state = poisoned(2)
    want, final = x.oracle()
    got = reference.chunked(x.q, x.k, x.v, g=x.g, beta=x.beta, state=state, slots=[1], starts=[0], lengths=[20])
    close(got, want, FP32_ROUNDING)
    close(state[1, 0], final, FP32_ROUNDING)


@pytest.mark.parametrize("requests", [1, 3, 8])
@pytest.mark.parametrize(("tokens", "versions"), [(1, 1), (1, 2), (3, 3), (4, 6)])
def test_decode_equals_the_formula(requests: int, tokens: int, versions: int) -> None:
    x = Inputs.random(requests * tokens, seed=requests)
    slots = [requests - r for r in range(requests)]
    starts = [0 if r == 1 else 3 + 5 * r for r in range(requests)]
    state = poisoned(requests + 2, versions)
    for r in range(requests):
        if starts[r]:
            state[slots[r], starts[r] % versions] = torch.randn(H, K, V)
    truth = state.clone()
    got = x.decode(state, slots, starts)
    shape = (requests, tokens, H)
    want = reference.recurrent(
        x.q.view(*shape, K),
        x.k.view(*shape, K),
        x.v.view(*shape, V),
        g=x.g.view(*shape, K),
        beta=x.beta.view(shape),
        state=truth,
        slots=torch.tensor(slots),
        start=torch.tensor(starts),
    )
    close(got, want.reshape(-1, H, V), FP32_ROUNDING)
    close(state.nan_to_num(7.0), truth.nan_to_num(7.0), FP32_ROUNDING)
    assert bool(got.isfinite().all())


def test_decode_after_prefill_equals_transformers() -> None:
    x = Inputs.random(80, strength=0.2)
    want, final = x.oracle()
    state = poisoned(2)
    got = [x[slice(0, 60)].prefill(state, [1], [0], [60])]
    got += [x[slice(t, t + 1)].decode(state, [1], [t]) for t in range(60, 80)]
    close(torch.cat(got), want)
    close(state[1, 0], final)


@settings(max_examples=25, deadline=None)
@given(first=st.integers(1, 70), kept=st.integers(0, 3), after=st.integers(1, 70))
def test_tokens_taken_back_leave_no_trace(first: int, kept: int, after: int) -> None:
    """Prefill, four tokens as one decode of which ``kept`` hold, then on from there by prefill: five versions."""
    x = Inputs.random(first + kept + after, strength=0.3, seed=first)
    want, final = x.oracle()
    state = poisoned(2, 5)
    x[slice(0, first)].prefill(state, [1], [0], [first])
    guess = Inputs.random(4, seed=99)
    held = x[slice(first, first + kept)]
    for name in ("q", "k", "v", "g", "beta"):
        getattr(guess, name)[:kept] = getattr(held, name)
    out = guess.decode(state, [1], [first])
    close(out[:kept], want[first : first + kept])
    rest = x[slice(first + kept, first + kept + after)]
    close(rest.prefill(state, [1], [first + kept], [after]), want[first + kept :])
    close(state[1, (first + kept + after) % 5], final)


@pytest.mark.parametrize("fresh", [False, True])
@pytest.mark.parametrize("versions", [1, 2])
def test_neighbouring_slots_decode_as_scattered_ones(versions: int, fresh: bool) -> None:
    """States that stand together are changed in place; the bits are those of copies, and nobody else's change."""
    x = Inputs.random(3, strength=1.0)
    states = torch.randn(3, versions, H, K, V)
    starts = [5, 0 if fresh else 6, 7]
    outputs, after = [], []
    for slots in ([2, 3, 4], [4, 1, 6]):
        state = poisoned(8, versions)
        state[slots] = states
        if fresh:
            state[slots[1]] = NAN
        outputs.append(x.decode(state, slots, starts))
        after.append(state[slots])
        others = [slot for slot in range(8) if slot not in slots]
        assert bool(state[others].isnan().all()), "a slot of nobody was written"
    assert bool(outputs[0].isfinite().all())
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(after[0].nan_to_num(9.0), after[1].nan_to_num(9.0))


def test_padding_rows_share_the_scratch_slot() -> None:
    """Rows of slot 0 at position 0 start from zero whatever it holds, stay finite, and touch nobody."""
    x = Inputs.random(5)
    state = poisoned(4)
    state[2] = torch.randn(1, H, K, V)
    solo = state.clone()
    got = x.decode(state, [2, 0, 0, 0, 0], [9, 0, 0, 0, 0])
    assert bool(got.isfinite().all())
    assert bool(state[0].isfinite().all())
    assert bool(state[[1, 3]].isnan().all())
    close(got[:1], x[slice(0, 1)].decode(solo, [2], [9]), FP32_ROUNDING)
    close(state[2], solo[2], FP32_ROUNDING)


def test_garbage_in_one_request_stays_there() -> None:
    lengths = [70, 5, 130]
    x = Inputs.random(sum(lengths))
    clean, dirty = poisoned(5), poisoned(5)
    want = x.prefill(clean, [1, 2, 3], [0, 0, 0], lengths)
    for tensor in (x.q, x.k, x.v, x.g, x.beta):
        tensor[70:75] = NAN
    got = x.prefill(dirty, [1, 2, 3], [0, 0, 0], lengths)
    keep = [*range(70), *range(75, 205)]
    assert torch.equal(got[keep], want[keep])
    assert torch.equal(dirty[[1, 3]], clean[[1, 3]])

    decoded, spoiled = clean.clone(), clean.clone()
    want = x[slice(0, 2)].decode(decoded, [1, 3], [70, 130])
    x.q[1], x.v[1] = NAN, NAN
    got = x[slice(0, 2)].decode(spoiled, [1, 3], [70, 130])
    assert torch.equal(got[0], want[0])
    assert torch.equal(spoiled[1], decoded[1])


def test_heads_in_groups_equal_heads_together(monkeypatch: pytest.MonkeyPatch) -> None:
    x = Inputs.random(200)
    together, apart = poisoned(3), poisoned(3)
    together[1] = apart[1] = torch.randn(1, H, K, V)
    want = x.prefill(together, [1, 2], [6, 0], [150, 50])
    monkeypatch.setattr(torch_chunked, "MAX_ELEMENTS", 2 * 4 * 64 * K)
    got = x.prefill(apart, [1, 2], [6, 0], [150, 50])
    close(got, want, FP32_ROUNDING)
    close(apart[1:], together[1:], FP32_ROUNDING)


@pytest.mark.parametrize("tokens", [1, 70])
def test_bf16_strided_inputs_compute_in_fp32(tokens: int) -> None:
    """q, k and v as the layer passes them: slices of one wider bf16 row."""
    width = H * (2 * K + V)
    wide = torch.randn(tokens, width).bfloat16()
    q = wide[:, : H * K].view(tokens, H, K)
    k = wide[:, H * K : 2 * H * K].view(tokens, H, K)
    v = wide[:, 2 * H * K :].view(tokens, H, V)
    g, beta = -torch.rand(tokens, H, K), torch.rand(tokens, H).bfloat16()
    exact = Inputs(q.float(), k.float(), v.float(), g, beta.float())
    want, final = exact.oracle()
    before = wide.clone()
    prefilled, decoded = poisoned(2), poisoned(2)
    out = Inputs(q, k, v, g, beta).prefill(prefilled, [1], [0], [tokens])
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), want, rtol=BF16_OUTPUT, atol=FP32_RECURRENCE)
    close(prefilled[1, 0], final)
    out = torch.cat([Inputs(q, k, v, g, beta)[slice(t, t + 1)].decode(decoded, [1], [t]) for t in range(tokens)])
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), want, rtol=BF16_OUTPUT, atol=FP32_RECURRENCE)
    close(decoded[1, 0], final)
    assert torch.equal(wide, before)
