"""Changes to single logits that requests ask for: masked ids, bias, penalties."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from sidestream.core.sampling_params import SamplingParams


class EditedRow(Protocol):
    """What decides a row's edits."""

    @property
    def params(self) -> SamplingParams: ...
    @property
    def prompt_token_ids(self) -> Sequence[int]: ...
    @property
    def output_token_ids(self) -> Sequence[int]: ...
    @property
    def mask_token_ids(self) -> Sequence[int]: ...
    @property
    def masks(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class LogitEdits:
    """Edits of one batch, as entries of the flat logits [S * V], only those that some row asks for.

    Attributes:
        masked: int64 entries set to -inf.
        biased, bias: int64 entries and the fp32 numbers added to them.
        penalised, repetition, subtracted: int64 entries, fp32 repetition penalty of each, and what the frequency and
            presence penalties take off it.
    """

    masked: np.ndarray | None
    biased: np.ndarray | None
    bias: np.ndarray | None
    penalised: np.ndarray | None
    repetition: np.ndarray | None
    subtracted: np.ndarray | None

    @classmethod
    def collect(cls, rows: Sequence[EditedRow], vocab_size: int) -> LogitEdits | None:
        """The rows' edits; None if there are none."""
        masked: list[np.ndarray] = []
        biased: list[np.ndarray] = []
        bias: list[np.ndarray] = []
        penalised: list[np.ndarray] = []
        repetition: list[np.ndarray] = []
        subtracted: list[np.ndarray] = []
        for i, row in enumerate(rows):
            params, base = row.params, i * vocab_size
            if row.masks:
                masked.append(_ids(row.mask_token_ids, vocab_size) + base)
            if params.logit_bias:
                biased.append(_ids(list(params.logit_bias), vocab_size) + base)
                bias.append(np.array(list(params.logit_bias.values()), dtype=np.float32))
            if has_penalties(params):
                tokens, factor, amount = _penalties(row, vocab_size)
                penalised.append(tokens + base)
                repetition.append(factor)
                subtracted.append(amount)
        if not (masked or biased or penalised):
            return None
        return cls(*map(_join, (masked, biased, bias, penalised, repetition, subtracted)))

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """[S, V] fp32 with the edits made, in new memory.

        Penalties as vLLM's: a token of prompt or output has its logit divided by the repetition penalty if positive,
        else multiplied; then ``frequency_penalty`` times its count in the output and, if it is there at all,
        ``presence_penalty`` are taken off.
        """
        edited = logits.clone(memory_format=torch.contiguous_format)
        flat = edited.view(-1)
        if self.masked is not None:
            flat.index_fill_(0, _on(self.masked, logits), -math.inf)
        if self.biased is not None and self.bias is not None:
            flat.index_add_(0, _on(self.biased, logits), _on(self.bias, logits))
        if self.penalised is not None and self.repetition is not None and self.subtracted is not None:
            entries, repetition = _on(self.penalised, logits), _on(self.repetition, logits)
            values = flat[entries]
            values = torch.where(values > 0, values / repetition, values * repetition)
            flat[entries] = values - _on(self.subtracted, logits)
        return edited


def has_penalties(params: SamplingParams) -> bool:
    return params.repetition_penalty != 1.0 or params.frequency_penalty != 0.0 or params.presence_penalty != 0.0


def unpack_bitmask(bitmask: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """[S, V] bool from [S, ceil(V / 32)] int32 words, lowest bit first."""
    words = -(-vocab_size // 32)
    assert bitmask.dtype is torch.int32, f"bitmask is {bitmask.dtype}"
    assert bitmask.shape[1] == words, f"bitmask of {bitmask.shape[1]} words, {vocab_size} tokens need {words}"
    bits = bitmask.unsqueeze(-1) >> torch.arange(32, dtype=torch.int32, device=bitmask.device)
    return (bits & 1).bool().flatten(1)[:, :vocab_size]


def _penalties(row: EditedRow, vocab_size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Distinct tokens of the history, the repetition penalty and the amount taken off for each."""
    params = row.params
    counts = np.bincount(_ids(row.output_token_ids, vocab_size), minlength=vocab_size)
    seen = counts > 0
    if params.repetition_penalty != 1.0:
        seen[_ids(row.prompt_token_ids, vocab_size)] = True
    tokens = np.flatnonzero(seen)
    times = counts[tokens]
    amount = params.frequency_penalty * times + params.presence_penalty * (times > 0)
    factor = np.full(len(tokens), params.repetition_penalty, dtype=np.float32)
    return tokens, factor, amount.astype(np.float32)


def _ids(tokens: Sequence[int], vocab_size: int) -> np.ndarray:
    ids = np.asarray(tokens, dtype=np.int64)
    if len(ids):  # an id beyond the row would change the neighbour's logits
        assert ids.min() >= 0, f"token id {ids.min()} is negative"
        assert ids.max() < vocab_size, f"token id {ids.max()} is not in the vocabulary of {vocab_size}"
    return ids


def _join(parts: list[np.ndarray]) -> np.ndarray | None:
    return np.concatenate(parts) if parts else None


def _on(array: np.ndarray, like: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(array).to(like.device)
