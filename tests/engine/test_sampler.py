import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sidestream.core.sampling_params import SamplingParams
from sidestream.engine import sampler as sampler_module
from sidestream.engine.random_stream import uniform
from sidestream.engine.sampler import Sampler, SamplingRow

GREEDY = SamplingParams(temperature=0)


def make_row(
    params: SamplingParams = GREEDY,
    *,
    seed: int = 0,
    prompt: Sequence[int] = (0,),
    outputs: Sequence[int] = (),
    mask: Sequence[int] = (),
) -> SamplingRow:
    return SamplingRow(params, seed, tuple(prompt), list(outputs), tuple(mask))


def random_logits(rows: int, vocab: int, *, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def reference_weights(logits: list[float], row: SamplingRow) -> list[float]:
    """Filtered, unnormalised weights of one row, in plain Python."""
    p = row.params
    if len(row.output_token_ids) < p.min_tokens:
        logits = [-math.inf if t in row.mask_token_ids else x for t, x in enumerate(logits)]
    logits = [x + p.logit_bias.get(t, 0.0) for t, x in enumerate(logits)]
    for t in set(row.prompt_token_ids) | set(row.output_token_ids):
        logits[t] = logits[t] / p.repetition_penalty if logits[t] > 0 else logits[t] * p.repetition_penalty
    for t in set(row.output_token_ids):
        logits[t] -= p.frequency_penalty * list(row.output_token_ids).count(t) + p.presence_penalty
    top = max(logits)
    if p.greedy:
        return [1.0 if t == logits.index(top) else 0.0 for t in range(len(logits))]
    weights = [math.exp((x - top) / p.temperature) for x in logits]
    weights = [w if w >= p.min_p else 0.0 for w in weights]
    order = sorted(range(len(weights)), key=lambda t: (-weights[t], t))
    if p.top_k > 0:
        for t in order[p.top_k :]:
            weights[t] = 0.0
    if p.top_p < 1.0:
        total, before = math.fsum(weights), 0.0
        for t in order:
            before, weights[t] = before + weights[t], weights[t] if before < p.top_p * total else 0.0
    return weights


def reference_token(weights: list[float], u: float) -> tuple[int, float]:
    """The token that a uniform number falls on, and how far it is from a border between tokens."""
    total, done = math.fsum(weights), 0.0
    borders, chosen = [], None
    for t, w in enumerate(weights):
        done += w / total
        borders.append(abs(done - u))
        if chosen is None and u < done:
            chosen = t
    return len(weights) - 1 if chosen is None else chosen, min(borders)


params_strategy = st.builds(
    lambda **kw: SamplingParams(max_tokens=None, **kw),
    temperature=st.sampled_from([0.0, 0.3, 1.0, 1.7]),
    top_k=st.sampled_from([0, -1, 1, 2, 5, 100]),
    top_p=st.sampled_from([1.0, 0.9, 0.5, 1e-9]),
    min_p=st.sampled_from([0.0, 0.05, 1.0]),
    presence_penalty=st.sampled_from([0.0, 0.7, -1.0]),
    frequency_penalty=st.sampled_from([0.0, 0.4]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.8]),
    logit_bias=st.dictionaries(st.integers(0, 10), st.sampled_from([-100.0, 2.5]), max_size=2),
    min_tokens=st.sampled_from([0, 2]),
)
row_strategy = st.builds(
    make_row,
    params_strategy,
    seed=st.integers(-(2**63), 2**63 - 1),
    prompt=st.lists(st.integers(0, 10), min_size=1, max_size=6),
    outputs=st.lists(st.integers(0, 10), max_size=6),
    mask=st.sets(st.integers(0, 10), max_size=3).map(tuple),
)


@settings(deadline=None, max_examples=150)
@given(st.lists(row_strategy, min_size=1, max_size=5), st.integers(0, 2**32))
def test_every_row_draws_what_plain_python_draws(rows: list[SamplingRow], seed: int) -> None:
    logits = random_logits(len(rows), 11, seed=seed, scale=1.5)
    before = logits.clone()
    tokens = Sampler(11).sample(logits, rows).token_ids
    assert torch.equal(logits, before), "the logits were changed"
    for token, values, row in zip(tokens, logits.tolist(), rows, strict=True):
        weights = reference_weights(values, row)
        want, margin = reference_token(weights, uniform(row.seed, len(row.output_token_ids)))
        if row.params.greedy:
            assert weights[token] == 1.0
        else:
            assert weights[token] > 0.0, f"token {token} was filtered out"
            assert token == want or margin < 1e-5  # penalties are applied in fp32


def test_greedy_takes_the_lowest_of_equal_maxima() -> None:
    logits = torch.zeros(3, 1_003)
    logits[1, [7, 500, 1_002]] = 2.0
    logits[2, [1_001, 1_002]] = 2.0
    assert Sampler(1_003).sample(logits, [make_row()] * 3).token_ids == [0, 7, 1_001]
    biased = make_row(SamplingParams(temperature=0, logit_bias={3: 1.0}))
    assert Sampler(1_003).sample(logits, [biased] * 3).token_ids == [3, 7, 1_001]


@pytest.mark.parametrize("vocab", [37, 898, 1_003])
def test_a_row_is_the_same_alone_and_among_others(vocab: int) -> None:
    kinds = [
        GREEDY,
        SamplingParams(),
        SamplingParams(temperature=0.7, top_k=20, logprobs=3),
        SamplingParams(temperature=1.3, top_p=0.9),
        SamplingParams(min_p=0.02, top_p=0.95, top_k=50, logprobs=0),
        SamplingParams(repetition_penalty=1.2, frequency_penalty=0.5, logit_bias={5: 3.0}),
        SamplingParams(temperature=0, presence_penalty=1.0, min_tokens=4, logprobs=5),
    ]
    logits = random_logits(17, vocab, seed=vocab) - 500.0 * torch.arange(17).unsqueeze(1)
    rows = [
        make_row(kinds[i % len(kinds)], seed=i, prompt=range(i + 1), outputs=range(i % 5), mask=(1, 2))
        for i in range(17)
    ]
    sampler = Sampler(vocab)
    alone = [sampler.sample(logits[i : i + 1], [rows[i]]) for i in range(17)]
    order = torch.Generator().manual_seed(1)
    for size in range(1, 18):
        picked = torch.randperm(17, generator=order)[:size].tolist()
        together = sampler.sample(logits[picked], [rows[i] for i in picked])
        assert together.token_ids == [alone[i].token_ids[0] for i in picked]
        assert together.logprobs == [alone[i].logprobs[0] for i in picked]


def test_a_stream_depends_on_seed_and_place_alone() -> None:
    logits = random_logits(1, 100, scale=0.1)
    sampler = Sampler(100)

    def draw(seed: int, place: int) -> int:
        return sampler.sample(logits, [make_row(SamplingParams(), seed=seed, outputs=[0] * place)]).token_ids[0]

    first = [draw(1, i) for i in range(20)]
    assert first == [draw(1, i) for i in range(20)]
    assert first != [draw(2, i) for i in range(20)]
    assert len(set(first)) > 10


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.5),
        SamplingParams(top_k=6),
        SamplingParams(top_p=0.8),
        SamplingParams(min_p=0.1, top_p=0.95, temperature=1.5),
    ],
)
def test_tokens_are_distributed_as_the_probabilities_say(params: SamplingParams) -> None:
    vocab, draws = 16, 20_000
    logits = random_logits(1, vocab, seed=3, scale=1.0)
    rows = [make_row(params, seed=seed) for seed in range(draws)]
    tokens = torch.tensor(Sampler(vocab).sample(logits.expand(draws, vocab), rows).token_ids)
    counts = torch.bincount(tokens, minlength=vocab)
    weights = torch.tensor(reference_weights(logits[0].tolist(), rows[0]), dtype=torch.float64)
    expected = weights / weights.sum() * draws
    assert torch.all(counts[expected == 0] == 0)
    possible = expected > 0
    chi_square = float(((counts[possible] - expected[possible]) ** 2 / expected[possible]).sum())
    freedom = int(possible.sum()) - 1
    assert freedom >= 3
    # Wilson and Hilferty: 0.1 % of right samples pass this
    limit = freedom * (1 - 2 / (9 * freedom) + 3.09 * math.sqrt(2 / (9 * freedom))) ** 3
    assert chi_square < limit


@pytest.mark.parametrize(("u", "want"), [(0.0, 2), (1.0 - 2.0**-53, 7)])
def test_the_ends_of_the_unit_interval_fall_on_possible_tokens(
    monkeypatch: pytest.MonkeyPatch, u: float, want: int
) -> None:
    monkeypatch.setattr(sampler_module, "uniform", lambda seed, index: u)
    logits = random_logits(1, 10)
    logits[0, [0, 1, 8, 9]] = -math.inf
    for params in (SamplingParams(), SamplingParams(top_k=6), SamplingParams(top_p=0.999999, top_k=6)):
        assert Sampler(10).sample(logits, [make_row(params)]).token_ids == [want]


def test_top_k_and_top_p_keep_the_lowest_ids_of_equal_ones() -> None:
    logits = torch.zeros(1, 40).expand(200, 40)
    for params, kept in ((SamplingParams(top_k=3), 3), (SamplingParams(top_p=0.1), 4)):
        tokens = Sampler(40).sample(logits, [make_row(params, seed=seed) for seed in range(200)]).token_ids
        assert set(tokens) == set(range(kept))


def test_penalties_follow_their_formulas_in_the_logits() -> None:
    """Seen through greedy choices: the penalised logit is compared with a probe just under and just over it."""
    vocab = 8
    params = SamplingParams(
        temperature=0, repetition_penalty=2.0, frequency_penalty=0.25, presence_penalty=0.5, max_tokens=None
    )
    row = make_row(params, prompt=[1, 2, 2], outputs=[3, 3, 3, 2])
    cases = {  # token: (logit, penalised logit)
        1: (4.0, 4.0 / 2),
        2: (4.0, 4.0 / 2 - 0.25 - 0.5),
        3: (4.0, 4.0 / 2 - 0.75 - 0.5),
        4: (4.0, 4.0),
    }
    for token, (logit, want) in cases.items():
        for shift, chosen in ((-0.01, token), (0.01, 0)):
            logits = torch.full((1, vocab), -50.0)
            logits[0, token], logits[0, 0] = logit, want + shift
            assert Sampler(vocab).sample(logits, [row]).token_ids == [chosen]
    logits = torch.full((1, vocab), -50.0)
    logits[0, 1], logits[0, 0] = -1.0, -1.99
    assert Sampler(vocab).sample(logits, [row]).token_ids == [0], "a negative logit is multiplied"


def test_a_bitmask_allows_only_its_bits_in_every_mode() -> None:
    vocab = 70
    allowed = [{0, 31, 32, 69}, {5}, set(range(70))]
    words = [[sum(1 << b for b in range(32) if 32 * w + b in bits) for w in range(3)] for bits in allowed]
    signed = [[word - (1 << 32) if word >> 31 else word for word in row] for row in words]
    bitmask = torch.tensor(signed, dtype=torch.int32)
    for params in (GREEDY, SamplingParams(temperature=3.0), SamplingParams(top_k=4, logit_bias={1: 50.0})):
        for seed in range(40):
            rows = [make_row(params, seed=seed + i) for i in range(3)]
            tokens = Sampler(vocab).sample(random_logits(3, vocab, seed=seed), rows, bitmask=bitmask).token_ids
            assert all(token in bits for token, bits in zip(tokens, allowed, strict=True))
    with pytest.raises(AssertionError, match="bitmask of 2 words, 70 tokens need 3"):
        Sampler(vocab).sample(random_logits(3, vocab), [make_row()] * 3, bitmask=bitmask[:, :2])


def test_stop_ids_are_masked_until_min_tokens() -> None:
    logits = torch.tensor([[0.0, 9.0, 5.0, 1.0]])
    params = SamplingParams(temperature=0, min_tokens=2)
    sampler = Sampler(4)
    assert [
        sampler.sample(logits, [make_row(params, outputs=[3] * done, mask=(1, 2))]).token_ids[0] for done in range(4)
    ] == [3, 3, 1, 1]


def test_logprobs_are_of_the_raw_logits() -> None:
    logits = random_logits(2, 30)
    params = SamplingParams(temperature=5.0, top_k=3, logit_bias={4: 80.0}, repetition_penalty=1.5, logprobs=2)
    result = Sampler(30).sample(logits, [make_row(params), make_row()])
    want = torch.log_softmax(logits[0], -1)
    assert result.token_ids[0] == 4
    assert result.logprobs[1] is None
    entries = result.logprobs[0]
    assert entries is not None
    assert entries[0] == (4, float(want[4]), int((want > want[4]).sum()) + 1)
    assert [token for token, _, _ in entries[1:]] == want.topk(2).indices.tolist()


@pytest.mark.parametrize("temperature", [1e-300, 5e-324, 1e-9])
def test_a_tiny_temperature_is_greedy(temperature: float) -> None:
    logits = random_logits(50, 33)
    rows = [make_row(SamplingParams(temperature=temperature), seed=i) for i in range(50)]
    assert Sampler(33).sample(logits, rows).token_ids == logits.argmax(-1).tolist()


def test_extreme_logits_and_temperatures_stay_inside_the_vocabulary() -> None:
    logits = torch.tensor([[3e38, -3e38, 3e38, -math.inf]])
    for params in (SamplingParams(), SamplingParams(temperature=1e308), SamplingParams(top_p=1e-300)):
        tokens = {Sampler(4).sample(logits, [make_row(params, seed=s)]).token_ids[0] for s in range(50)}
        assert tokens <= {0, 1, 2}


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(), SamplingParams(temperature=0, logit_bias={0: 1.0})])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_broken_logits_are_an_error_that_names_the_rows(params: SamplingParams, value: float) -> None:
    logits = random_logits(4, 20)
    logits[1, 7] = value
    logits[3] = -math.inf
    with pytest.raises(AssertionError, match=r"rows \[1, 3\]"):
        Sampler(20).sample(logits, [make_row(params)] * 4)


def test_an_id_outside_the_vocabulary_never_reaches_a_neighbour() -> None:
    logits = random_logits(2, 20)
    for params, mask in (
        (SamplingParams(logit_bias={20: 1.0}), ()),
        (SamplingParams(min_tokens=1), (20,)),
    ):
        with pytest.raises(AssertionError, match="token id 20 is not in the vocabulary of 20"):
            Sampler(20).sample(logits, [make_row(params, mask=mask), make_row()])


def test_strided_logits_and_views_are_read_right() -> None:
    wide = torch.full((6, 64), math.nan)
    wide[::2, :20] = random_logits(3, 20)
    view = wide[::2, :20]
    rows = [make_row(SamplingParams(repetition_penalty=1.1, logprobs=1), seed=i) for i in range(3)]
    assert Sampler(20).sample(view, rows) == Sampler(20).sample(view.contiguous(), rows)
