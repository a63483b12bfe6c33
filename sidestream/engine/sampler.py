"""Chooses the next token of each sequence from its logits.

In vLLM's order: bitmask, ids masked until ``min_tokens``, logit bias; penalties; temperature; min-p, top-k, top-p; one
draw. Each row is worked on alone: a token is a function of its row's logits, parameters, history and seed, whatever
else is in the batch. The draw turns one uniform number into a token through the cumulative distribution in token id
order, in fp64, so that neither rounding nor the order of a sort decides.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sidestream.core.outputs import TopLogprobs
from sidestream.core.sampling_params import SamplingParams
from sidestream.engine.logit_edits import LogitEdits, unpack_bitmask
from sidestream.engine.logprobs import top_logprobs
from sidestream.engine.random_stream import uniform
from sidestream.ops.draw import draw_tokens


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """What the sampler must know of one sequence."""

    params: SamplingParams
    seed: int
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]
    """Looked at only under penalties."""
    mask_token_ids: Sequence[int] = ()
    """Ids that cannot be chosen before ``min_tokens``."""
    num_outputs: int | None = None
    """Tokens so far, the place in the random stream; None counts ``output_token_ids``."""

    @property
    def place(self) -> int:
        return len(self.output_token_ids) if self.num_outputs is None else self.num_outputs

    @property
    def masks(self) -> bool:
        return bool(self.mask_token_ids) and self.place < self.params.min_tokens


@dataclass(frozen=True, slots=True)
class SampleResult:
    """One token a row, and the log-probabilities of the rows that asked."""

    token_ids: list[int]
    logprobs: list[TopLogprobs | None]


@dataclass(frozen=True, slots=True)
class Choice:
    """Tokens that the host has not read.

    Attributes:
        tokens: [S] int64.
        peaks: [S] fp32, each row's largest logit.
        allowed: the same after masks; None without them.
    """

    tokens: torch.Tensor
    peaks: torch.Tensor
    allowed: torch.Tensor | None


class Sampler:
    """Sampler of a vocabulary; keeps nothing between calls."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def sample(
        self, logits: torch.Tensor, rows: Sequence[SamplingRow], *, bitmask: torch.Tensor | None = None
    ) -> SampleResult:
        """Choose one token a row.

        Args:
            logits: [S, V] fp32, not changed.
            bitmask: [S, ceil(V / 32)] int32; bit b of word w allows token 32 w + b.
        Raises:
            AssertionError: a row of logits holds NaN or +inf, or nothing finite: only a fault of the model's can do
                that, and no token would be right.
        """
        choice = self.choose(logits, rows, bitmask=bitmask)
        check_peaks(choice.peaks.tolist(), None if choice.allowed is None else choice.allowed.tolist())
        token_ids: list[int] = choice.tokens.tolist()
        return SampleResult(token_ids, self.logprobs(logits, rows, token_ids))

    def choose(
        self, logits: torch.Tensor, rows: Sequence[SamplingRow], *, bitmask: torch.Tensor | None = None
    ) -> Choice:
        """``sample`` without reading anything on the host; ``check_peaks`` must follow once something was read."""
        assert logits.shape == (len(rows), self.vocab_size), f"logits {tuple(logits.shape)} for {len(rows)} rows"
        assert logits.dtype is torch.float32, f"logits are {logits.dtype}"
        edits = LogitEdits.collect(rows, self.vocab_size)
        if edits is None and bitmask is None:
            return Choice(*_tokens_of(logits, rows), None)
        peaks, edited = logits.amax(dim=-1), logits
        if bitmask is not None:
            edited = edited.masked_fill(~unpack_bitmask(bitmask, self.vocab_size), -math.inf)
        if edits is not None:
            edited = edits.apply(edited)
        tokens, allowed = _tokens_of(edited, rows)
        return Choice(tokens, peaks, allowed)

    def logprobs(
        self, logits: torch.Tensor, rows: Sequence[SamplingRow], token_ids: Sequence[int]
    ) -> list[TopLogprobs | None]:
        result: list[TopLogprobs | None] = [None] * len(rows)
        wanted = {i: row.params.logprobs for i, row in enumerate(rows) if row.params.logprobs is not None}
        if wanted:
            asked = list(wanted)
            chosen = [token_ids[i] for i in asked]
            source = logits if len(asked) == len(rows) else logits[to_device(asked, torch.int64, logits.device)]
            for i, top in zip(asked, top_logprobs(source, chosen, list(wanted.values())), strict=True):
                result[i] = top
        return result


def check_peaks(peaks: Sequence[float], allowed: Sequence[float] | None) -> None:
    """The largest logit of each row, before and after masks: AssertionError where no token would be right."""
    broken = [row for row, peak in enumerate(peaks) if not math.isfinite(peak)]
    assert not broken, f"logits of rows {broken} are not finite; the model computed them wrongly"
    empty = [row for row, peak in enumerate(allowed or ()) if peak == -math.inf]
    assert not empty, f"masks leave no token to rows {empty}"


def _tokens_of(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> tuple[torch.Tensor, torch.Tensor]:
    """(tokens [S] int64, largest logits [S]); all rows at once but those whose distribution is cut first."""
    cut = [i for i, row in enumerate(rows) if _is_cut(row.params)]
    if len(cut) == len(rows):
        return _draw(logits, rows), logits.amax(dim=-1)
    settings = None
    if not all(row.params.greedy or _is_cut(row.params) for row in rows):
        plain = [(0.0, 0.0) if row.params.greedy or _is_cut(row.params) else _setting(row) for row in rows]
        settings = to_device(list(zip(*plain, strict=True)), torch.float64, logits.device)
    tokens, peaks = draw_tokens(logits, settings)
    if cut:
        index = to_device(cut, torch.int64, logits.device)
        tokens.index_copy_(0, index, _draw(logits.index_select(0, index), [rows[i] for i in cut]))
    return tokens, peaks


def _is_cut(params: SamplingParams) -> bool:
    """Drawn from a part of the distribution, which must be found first."""
    return not params.greedy and (params.min_p > 0.0 or params.top_k > 0 or params.top_p < 1.0)


def _setting(row: SamplingRow) -> tuple[float, float]:
    """Temperature and uniform number."""
    return row.params.temperature, uniform(row.seed, row.place)


def _draw(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    """[N] int64 tokens drawn from the filtered distributions of [N, V] logits."""
    params = [row.params for row in rows]
    weights = logits.double()
    weights -= weights.amax(dim=-1, keepdim=True)
    weights /= _column([p.temperature for p in params], logits.device)
    weights.exp_()  # 1 for the most likely token
    if any(p.min_p > 0.0 for p in params):
        weights.masked_fill_(weights < _column([p.min_p for p in params], logits.device), 0.0)
    for filtered in (
        [i for i, p in enumerate(params) if p.top_k > 0],
        [i for i, p in enumerate(params) if p.top_k <= 0 and p.top_p < 1.0],  # these alone need a whole sort
    ):
        if len(filtered) == len(rows):
            weights = _keep_top(weights, params)
        elif filtered:
            index = to_device(filtered, torch.int64, logits.device)
            kept = _keep_top(weights.index_select(0, index), [params[i] for i in filtered])
            weights.index_copy_(0, index, kept)
    cumulative = weights.cumsum(dim=-1)
    uniforms = [uniform(row.seed, row.place) for row in rows]
    target = cumulative[:, -1:] * _column(uniforms, logits.device)
    # the first token whose cumulative weight passes the target; it has weight, since the target is below the total
    return torch.searchsorted(cumulative, target, right=True).squeeze(1).clamp_max_(logits.shape[1] - 1)


def _keep_top(weights: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """Zero all but the top k, then all but the top p of what is left; among equal weights the lower ids stay."""
    vocab = weights.shape[1]
    most = [min(p.top_k, vocab) if p.top_k > 0 else vocab for p in params]
    width = max(most)
    ordered = (weights.topk(width) if width < vocab else weights.sort(descending=True)).values
    place = torch.arange(width, device=weights.device)
    ordered.masked_fill_(place >= to_device(most, torch.int64, weights.device).unsqueeze(1), 0.0)
    cumulative = ordered.cumsum(dim=-1)
    share = _column([p.top_p if p.top_p < 1.0 else math.inf for p in params], weights.device)
    kept = (cumulative - ordered < share * cumulative[:, -1:]) & (ordered > 0.0)
    count = kept.sum(dim=-1, keepdim=True).clamp_min_(1)  # 0 only for a row that is not finite
    least = ordered.gather(-1, count - 1)
    above, equal = weights > least, weights == least
    equal &= equal.cumsum(dim=-1) <= count - above.sum(dim=-1, keepdim=True)
    return weights.masked_fill_(~(above | equal), 0.0)


def _column(values: Sequence[float], device: torch.device) -> torch.Tensor:
    return to_device(values, torch.float64, device).unsqueeze(1)


def to_device(
    values: Sequence[float] | Sequence[Sequence[float]], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """A short list as a tensor; from page-locked memory where a plain copy would make the host wait for the stream."""
    if device.type == "cuda":
        return torch.tensor(values, dtype=dtype, pin_memory=True).to(device, non_blocking=True)
    return torch.tensor(values, dtype=dtype, device=device)
