"""KV rows of all layers in one piece of memory, so that a layer's rows can be named beside those that all share."""

from __future__ import annotations

import torch

from sidestream.cache.groups import CacheGroup


class KVArena:
    """Each layer's blocks and hot slots, then staging places that one layer after another uses.

    A layer's view begins at its own first row and reaches to the end, so a row number of that view may be one of the
    layer's own, or of a staging place.

    Args:
        group: of the KV rows.
        places: blocks of each layer, scratch included.
        hot_rows: rows behind them.
        staged: places shared by all layers.
    Attributes:
        hot_base: first hot row, in every layer's view.
        staging: [staged * rows_per_block, row_elems].
    """

    def __init__(
        self, group: CacheGroup, *, places: int, hot_rows: int, staged: int, device: torch.device | str
    ) -> None:
        self._layers = group.layers
        self._rows = group.rows_per_block
        self.hot_base = places * self._rows
        self._region = self.region_rows(group, places=places, hot_rows=hot_rows)
        total = len(self._layers) * self._region + staged * self._rows
        self._memory = torch.empty((total, group.row_elems), dtype=group.dtype, device=device)
        self.staging = self._memory[len(self._layers) * self._region :]

    @staticmethod
    def region_rows(group: CacheGroup, *, places: int, hot_rows: int) -> int:
        """Rows of a layer's own: whole blocks, so that staging places have whole numbers."""
        return (places + -(-hot_rows // group.rows_per_block)) * group.rows_per_block

    @property
    def nbytes(self) -> int:
        return self._memory.numel() * self._memory.itemsize

    @property
    def memory(self) -> torch.Tensor:
        """All of it, for tests."""
        return self._memory

    def layer(self, layer: int) -> torch.Tensor:
        """[rows, row_elems]: the layer's own rows and whatever lies behind them."""
        return self._memory[self._layers.index(layer) * self._region :]

    def own_rows(self, layer: int) -> torch.Tensor:
        """[rows, row_elems]: the layer's blocks and hot slots alone."""
        return self.layer(layer)[: self._region]

    def first_staged(self, layer: int) -> int:
        """Number of the first staging place in the layer's view."""
        return (len(self._layers) - self._layers.index(layer)) * self._region // self._rows
