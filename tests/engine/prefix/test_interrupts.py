"""An interrupt anywhere within ``add``: the request is there whole or not at all, and nobody else notices. Or while a
step is published: it is computed anew."""

from __future__ import annotations

from pathlib import Path

import pytest

from sidestream.core.request import Request
from sidestream.core.sampling_params import SamplingParams
from tests.engine.harness import random_sequences
from tests.engine.interrupts import InterruptAt
from tests.engine.prefix.serving import VOCAB, Serving
from tests.tiny_models import VARIANTS, build_oracle, save_checkpoint

STEM, TAIL, OTHER = random_sequences((40, 30, 20), vocab=VOCAB, seed=3)


def make_request(name: str, prompt: list[int]) -> Request:
    return Request(name, tuple(prompt), SamplingParams(temperature=0.0), 0, 3, frozenset(), ())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    architecture, overrides = VARIANTS["next"]
    return save_checkpoint(build_oracle(architecture, 11, **overrides), tmp_path_factory.mktemp("next"))


@pytest.mark.parametrize(
    ("other", "prompt"),
    [([*STEM[:32], *OTHER], [*STEM, *TAIL]), ([*STEM[:32], *OTHER, *TAIL, *TAIL], [*STEM[:32], *OTHER, *TAIL, *OTHER])],
    ids=["continues what is cached", "goes with one that waits"],
)
def test_a_request_is_added_whole_or_not_at_all(folder: Path, other: list[int], prompt: list[int]) -> None:
    """Beside one that waits with half of its prompt, one that is cached, and one that continues a cached one."""
    serving = Serving(folder, recorded=False)
    serving.serve("cached", [*STEM, 5], max_tokens=1)
    waiting = serving.add("waiting", other, max_tokens=3)
    core = serving.core
    cache = core.scheduler._prefixes._cache
    assert cache is not None
    nodes = set(cache.tree.nodes)
    path = core.scheduler._sequences["waiting"].prefix
    assert path is not None
    request = make_request("new", prompt)
    outcomes = {True: 0, False: 0}
    number = 0
    while True:
        with InterruptAt(number) as interrupt:
            try:
                core.add(request)
            except KeyboardInterrupt:
                assert interrupt.reached
        if not interrupt.reached:
            break
        added = "new" in core._unfinished
        assert added == ("new" in core.scheduler._sequences), number
        core.scheduler.check_integrity()
        outcomes[added] += 1
        if added:
            assert core.abort("new")
        assert set(cache.tree.nodes) == nodes.union(node.content for node in path.path), number
        number += 1
    assert outcomes[False] > 50, "there are so many points, at least"
    assert outcomes[True] < 10, "what comes behind the last change"
    serving.served["new"] = serving.served["waiting"]
    assert core.abort("new")
    serving.run()
    assert len(waiting.tokens) == 3
    assert waiting.tokens == Serving(folder, recorded=False).serve("alone", waiting.prompt, max_tokens=3).tokens


def test_what_a_step_computes_is_published_whole_or_computed_anew(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And whoever comes then takes over what was published."""
    serving = Serving(folder, recorded=False)
    expected = serving.serve("alone", [*STEM, *TAIL], max_tokens=2, salt="alone").tokens
    core, number, reached = serving.core, 0, True
    real = core.scheduler.remember

    def remember() -> None:
        nonlocal reached
        cache = core.scheduler._prefixes._cache
        if reached or cache is None or not cache._unpublished:
            return real()
        with InterruptAt(number) as interrupt:
            try:
                real()
            finally:
                reached = interrupt.reached
        return None

    monkeypatch.setattr(core.scheduler, "remember", remember)
    while True:
        served, reached = serving.add(f"{number}", [*STEM, *TAIL], max_tokens=2, salt=f"{number}"), False
        try:
            serving.step()
        except KeyboardInterrupt:
            core.scheduler.check_integrity()
        interrupted, reached = reached, True
        serving.run()
        assert served.tokens == expected, number
        follower = serving.serve(f"{number} again", [*STEM, *TAIL, 5], max_tokens=1, salt=f"{number}")
        assert follower.cached_tokens == 64, number
        if not interrupted:
            break
        number += 1
    assert number > 30


def test_an_id_in_use_stays_with_its_owner(folder: Path) -> None:
    """Adding it again, interrupted anywhere, ends neither the one that has it nor what it waits for."""
    serving = Serving(folder, recorded=False)
    waiting = serving.add("same", [*STEM, *OTHER], max_tokens=3)
    number = 0
    while True:
        with InterruptAt(number) as interrupt, pytest.raises((KeyboardInterrupt, Exception)) as failure:
            serving.core.add(make_request("same", TAIL))
        serving.core.scheduler.check_integrity()
        assert "same" in serving.core._unfinished
        if not interrupt.reached:
            assert "is in use" in str(failure.value)
            break
        number += 1
    assert number > 10
    serving.run()
    assert len(waiting.tokens) == 3
