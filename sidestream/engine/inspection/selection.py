"""What the indexers of one request chose: recorded where an index group turns it into cache rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from sidestream.attention.index_group import SparseMLAIndexGroup, TopKResolver
from sidestream.core.step_inputs import StepInputs


@dataclass(slots=True)
class Selection:
    """One index group's choices.

    Attributes:
        layers: leader first.
        chosen: position of a query -> positions chosen for it, ascending.
    """

    layers: tuple[int, ...]
    chosen: dict[int, np.ndarray] = field(default_factory=dict)

    def heat(self, columns: int) -> np.ndarray:
        """[queries, columns] float32: share of each column's tokens that a query chose, in order of position.

        A column stands for equally many tokens of the whole sequence; NaN where all of them lie behind the query.
        """
        queries = sorted(self.chosen)
        length = queries[-1] + 1 if queries else 0
        edges = np.linspace(0, length, columns + 1)
        heat = np.full((len(queries), columns), np.nan, dtype=np.float32)
        for row, query in enumerate(queries):
            seen = np.diff(np.minimum(edges, query + 1))
            counts = np.histogram(self.chosen[query], bins=edges)[0] if length else np.zeros(columns)
            heat[row, seen > 0] = np.minimum(counts[seen > 0] / np.maximum(seen[seen > 0], 1.0), 1.0)
        return heat


class RecordingResolver:
    """Stands in for a group's resolver in an engine that runs one request, without graphs."""

    def __init__(self, inner: TopKResolver, selection: Selection) -> None:
        self._inner = inner
        self._selection = selection

    def resolve(
        self, logical: torch.Tensor, inputs: StepInputs, *, physical: torch.Tensor, counts: torch.Tensor
    ) -> None:
        """Record the true rows, then resolve as ever."""
        rows = min(inputs.num_tokens, logical.shape[0])
        positions = inputs.positions[:rows].tolist()
        for position, chosen in zip(positions, logical[:rows].cpu().numpy(), strict=True):
            self._selection.chosen[position] = chosen[chosen >= 0].copy()
        self._inner.resolve(logical, inputs, physical=physical, counts=counts)


def record(groups: Sequence[SparseMLAIndexGroup]) -> list[Selection]:
    """Record every group from now on; the selections fill as steps run."""
    selections = []
    for group in groups:
        selection = Selection(group.layers)
        group.resolver = RecordingResolver(group.resolver, selection)
        selections.append(selection)
    return selections
