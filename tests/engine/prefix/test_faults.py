"""Faults of the prefix cache that the tests beside this one must notice: one of each kind is made, and shows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sidestream.cache.prefix_cache import PrefixCache
from sidestream.cache.prefix_tree import PrefixNode
from sidestream.core.batch import SlotCopy
from sidestream.core.ring import RingPlan
from sidestream.layers import kda
from tests.engine.prefix.serving import Served, Serving
from tests.engine.prefix.test_prompts import SUFFIX, Model, P


def no_copies(patch: pytest.MonkeyPatch, serving: Serving) -> None:
    """State is neither taken nor restored."""
    patch.setattr(serving.core._pools, "copy_slots", lambda copies: None)


def state_of_the_chunks_end(patch: pytest.MonkeyPatch, serving: Serving) -> None:
    """The state behind the whole chunk is kept for a boundary within it."""
    prefixes = serving.core.scheduler._prefixes
    real = prefixes.computed

    def computed(sequence: Any, *, decode: bool) -> tuple[tuple[()], list[SlotCopy]]:
        splits, copies = real(sequence, decode=decode)
        return (), [*copies, *(SlotCopy(sequence.slot, split.slot) for split in splits)]

    patch.setattr(prefixes, "computed", computed)


def states_without_rings(patch: pytest.MonkeyPatch, serving: Serving) -> None:
    """Within a chunk the inputs of the convolution are not kept."""
    patch.setattr(RingPlan, "with_kept", lambda self, *args: self)


def rings_without_states(patch: pytest.MonkeyPatch, serving: Serving) -> None:
    """Within a chunk the inputs of the convolution are all that is kept."""
    real = kda.mixed_step
    patch.setattr(kda, "mixed_step", lambda *args, **kw: real(*args, **(kw | {"kept": ()})))


def blocks_of_equal_tokens_behind_other_prefixes(patch: pytest.MonkeyPatch, serving: Serving) -> None:
    """A hash over a block's own tokens alone."""
    from sidestream.cache import block_hashes

    real = block_hashes.hash_block
    patch.setattr(block_hashes, "hash_block", lambda data=b"": real(data[16:] if len(data) > 16 else data))


def a_hit_without_its_state(patch: pytest.MonkeyPatch, serving: Serving) -> None:
    """Blocks are enough, whether there is a snapshot or not."""
    real = PrefixCache.find

    def find(self: PrefixCache, sequence: Any, num_known: int) -> Any:
        held: list[PrefixNode] = [n for n in sequence.path if n.block is not None and n.snapshot is None]
        for node in held:
            node.snapshot = serving.built.num_slots
        hit = real(self, sequence, num_known)
        for node in held:
            node.snapshot = None
        return hit

    patch.setattr(PrefixCache, "find", find)


FAULTS: tuple[tuple[Callable[[pytest.MonkeyPatch, Serving], None], str], ...] = (
    (no_copies, "position|behind the best|not finite"),
    (state_of_the_chunks_end, "position|behind the best"),
    (states_without_rings, "position|behind the best|not finite"),
    (rings_without_states, "position|behind the best|not finite"),
    (blocks_of_equal_tokens_behind_other_prefixes, "of a path has depth"),
    (a_hit_without_its_state, "position|behind the best|not finite"),
)
"""Each with what the check says of it."""


def serve(model: Model, patch: pytest.MonkeyPatch, fault: Callable[..., None] | None) -> list[Served]:
    serving = Serving(model.folder)
    if fault is not None:
        fault(patch, serving)
    prompts = (P, [*P, *SUFFIX], [*P[:100], *SUFFIX], [*P[64:96], *P[32:64], *SUFFIX])
    return [serving.serve(str(i), prompt, max_tokens=2) for i, prompt in enumerate(prompts)]


def check(model: Model, patch: pytest.MonkeyPatch, fault: Callable[..., None] | None) -> None:
    for served in serve(model, patch, fault):
        model.check(served)


@pytest.mark.parametrize(("fault", "message"), FAULTS, ids=lambda item: getattr(item, "__name__", ""))
def test_a_fault_shows(
    fault: Callable[..., None], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(AssertionError, match=message):
        check(Model("next", tmp_path), monkeypatch, fault)


def test_without_a_fault_nothing_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check(Model("next", tmp_path), monkeypatch, None)
