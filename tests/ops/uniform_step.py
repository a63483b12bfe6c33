"""A uniform decode drawn from a seed: shuffled pages and slots, contexts around the lengths that matter, padding."""

from __future__ import annotations

import torch

from sidestream.core.ring import RingPlan, plan_ring

ROWS, TRUE_ROWS, BLOCK, COLUMNS, SLOTS = 7, 5, 8, 6, 6
TOPK = 16


class Step:
    """ROWS rows, the true ones first; the shapes of all its tensors are the same for every seed."""

    def __init__(self, seed: int) -> None:
        self.gen = torch.Generator().manual_seed(seed)
        longest = COLUMNS * BLOCK
        lengths = [1, TOPK, TOPK + 1 + seed, longest - seed, 2 * TOPK + 3]
        order = torch.randperm(TRUE_ROWS, generator=self.gen).tolist()
        self.context_lens = torch.tensor([lengths[i] for i in order] + [0] * (ROWS - TRUE_ROWS))
        self.positions = (self.context_lens - 1).clamp_min(0)
        self.num_blocks = 1 + TRUE_ROWS * COLUMNS
        pages = torch.randperm(self.num_blocks - 1, generator=self.gen) + 1
        self.block_table = torch.zeros(ROWS, COLUMNS, dtype=torch.int64)
        self.block_table[:TRUE_ROWS] = pages.view(TRUE_ROWS, COLUMNS)
        used = (self.context_lens + BLOCK - 1) // BLOCK
        self.block_table[torch.arange(COLUMNS) >= used[:, None]] = 0
        slots = torch.randperm(SLOTS - 1, generator=self.gen)[:TRUE_ROWS] + 1
        self.slots = torch.cat([slots, torch.zeros(ROWS - TRUE_ROWS, dtype=torch.int64)])

    def randn(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(*shape, generator=self.gen).to(dtype)

    def rand(self, *shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=self.gen)

    def rows(self, row: int, positions: torch.Tensor) -> torch.Tensor:
        return self.block_table[row, positions // BLOCK] * BLOCK + positions % BLOCK

    def pool(self, width: int, *, kpool: int = 1, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """[num_blocks * BLOCK / kpool, width]: NaN where no row sees a whole entry."""
        made = torch.full((self.num_blocks * BLOCK // kpool, width), torch.nan, dtype=dtype)
        for row, length in enumerate(self.context_lens.tolist()):
            seen = self.rows(row, torch.arange(length // kpool) * kpool) // kpool
            made[seen] = self.randn(len(seen), width, dtype=dtype)
        return made

    def ring(self, window: int, ring_length: int) -> RingPlan:
        ones = [1] * ROWS
        return plan_ring(self.positions.tolist(), ones, self.slots.tolist(), window=window, ring_length=ring_length)

    def selection(self) -> torch.Tensor:
        """[ROWS, TOPK + 3] int32: some positions of each context, ascending, -1 behind."""
        chosen = torch.full((ROWS, TOPK + 3), -1, dtype=torch.int32)
        for row, length in enumerate(self.context_lens.tolist()):
            picked = torch.randperm(length, generator=self.gen)[: TOPK + 3 - row].sort().values
            chosen[row, : len(picked)] = picked.int()
        return chosen
