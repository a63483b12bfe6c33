"""Random steps of residency, and the plain-Python model that says what must come of them."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch

from sidestream.ops.residency import clear_seats, invalidate, new_state
from sidestream.ops.residency.reference import HotSlots
from sidestream.ops.residency.torch_impl import MARK, ORDER, OWNER

SEATS, SLOTS, BLOCK, BLOCKS, WIDTH = 6, 13, 4, 12, 6
HOT_BASE = 1000


class Steps:
    """Requests that come and go, whose blocks move between device and host, beside a model of each seat."""

    def __init__(
        self, resolve: Callable[..., None], device: str, *, rows_each: int, seed: int, num_slots: int = SLOTS
    ) -> None:
        self.resolve, self.device, self.rows_each, self.num_slots = resolve, device, rows_each, num_slots
        self.draw = random.Random(seed)
        self.slot_of, self.slots = new_state(SEATS, num_slots, BLOCK * BLOCKS, device=device)
        self.models = [HotSlots(num_slots) for _ in range(SEATS)]
        self.tables = [self._fresh_table() for _ in range(SEATS)]
        self.totals = torch.zeros(SEATS, 2, dtype=torch.int64, device=device)
        self.missed = self.hits = 0

    def _fresh_table(self) -> list[int]:
        pressed = self.draw.random() < 0.8
        return [self._block(pressed and self.draw.random() < 0.7) for _ in range(BLOCKS)]

    def _block(self, on_host: bool) -> int:
        return -1 - self.draw.randrange(90) if on_host else self.draw.randrange(90)

    def between(self) -> None:
        """What happens between two steps: other owners, blocks that move, rows that were written again."""
        for seat in range(1, SEATS):
            event = self.draw.random()
            if event < 0.05:
                self.tables[seat], self.models[seat] = self._fresh_table(), HotSlots(self.num_slots)
                clear_seats(self.slots, torch.tensor([seat], device=self.device))
            elif event < 0.2:
                index = self.draw.randrange(BLOCKS)
                block = self.tables[seat][index]
                if block < 0:  # restored: its hot copies are dropped, since its rows may be written now
                    positions = list(range(index * BLOCK, (index + 1) * BLOCK))
                    self.models[seat].invalidate(positions)
                    at = torch.tensor([positions], device=self.device)
                    one = torch.tensor([seat], device=self.device)
                    invalidate(self.slot_of, self.slots, seats=one, positions=at)
                self.tables[seat][index] = self._block(block >= 0)

    def step(self) -> None:
        """One step of some seats and some padding, compared with the model in every value."""
        seats = self.draw.sample(range(1, SEATS), self.draw.randrange(1, SEATS))
        padding = self.draw.randrange(3)
        requests, q = len(seats) + padding, self.rows_each
        tokens = requests * q
        logical = torch.full((tokens, WIDTH), -1, dtype=torch.int32)
        positions = torch.zeros(tokens, dtype=torch.int64)
        wanted: list[list[list[int]]] = []
        for r in range(len(seats)):
            # Rows of one request overlap and never need more slots than there are.
            pool = self.draw.sample(range(BLOCK * BLOCKS), self.num_slots - 1)
            rows = [sorted(self.draw.sample(pool, self.draw.randrange(1, WIDTH + 1))) for _ in range(q)]
            wanted.append(rows)
            for t, row in enumerate(rows):
                logical[r * q + t, : len(row)] = torch.tensor(row, dtype=torch.int32)
                positions[r * q + t] = self.draw.randrange(BLOCK * BLOCKS)
        table = torch.tensor([self.tables[seat] for seat in seats] + [[0] * BLOCKS])
        table_rows = torch.tensor([min(t // q, len(seats)) for t in range(tokens)])
        all_seats = torch.tensor(seats + [0] * padding)
        poison = {"dtype": torch.int64, "device": self.device}
        out = torch.full((tokens, WIDTH), 0x7F7F, **poison)  # type: ignore[call-overload]
        counts, misses = (torch.full((n,), 0x7F7F, dtype=torch.int32, device=self.device) for n in (tokens, requests))
        host_rows, hot_rows = (torch.full((requests, self.num_slots), 0x7F7F, **poison) for _ in range(2))  # type: ignore[call-overload]
        self.resolve(
            logical.to(self.device), table.to(self.device), self.slot_of, self.slots,
            seats=all_seats.to(self.device), positions=positions.to(self.device),
            table_rows=table_rows.to(self.device), block_size=BLOCK, hot_base=HOT_BASE,
            out=out, counts=counts, host_rows=host_rows, hot_rows=hot_rows, misses=misses,
            totals=self.totals,
        )  # fmt: skip
        for r, seat in enumerate(seats):
            model, block_table = self.models[seat], self.tables[seat]
            model.invalidate(positions[r * q : (r + 1) * q].tolist())
            selected = model.select(wanted[r], block_table, BLOCK)
            base = HOT_BASE + seat * self.num_slots
            for t, found in enumerate(selected.rows):
                rows = [base + place[1] if len(place) == 2 else place[1] * BLOCK + place[2] for place in found]
                assert out[r * q + t].tolist() == rows + [-1] * (WIDTH - len(rows))
                assert int(counts[r * q + t]) == len(rows)
            n = len(selected.misses)
            host = [(-1 - block_table[p // BLOCK]) * BLOCK + p % BLOCK for p, _ in selected.misses]
            assert int(misses[r]) == n
            assert host_rows[r, :n].tolist() == host
            assert hot_rows[r, :n].tolist() == [base + slot for _, slot in selected.misses]
            assert (hot_rows[r, n:] == 0x7F7F).all()
            assert (host_rows[r, n:] == 0x7F7F).all()
            self.missed += n
            self.hits += sum(len(place) == 2 for found in selected.rows for place in found) - n
        for t in range(len(seats) * q, tokens):
            assert out[t].tolist() == [-1] * WIDTH
            assert int(counts[t]) == 0
        assert misses[len(seats) :].tolist() == [0] * padding
        for model, state in zip(self.models, self.slots.tolist(), strict=True):
            assert state[OWNER] == [model.owner.get(slot, -1) for slot in range(self.num_slots)]
            assert state[ORDER] == model.order
            assert not any(state[MARK])

    def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.between()
            self.step()
        assert self.totals.sum(dim=0).tolist() == [self.missed + self.hits, self.missed]
        assert min(self.missed, self.hits) > num_steps // 2, "the draw must meet both"
