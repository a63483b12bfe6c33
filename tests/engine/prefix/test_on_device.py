"""The prefix cache on the simulated device: steps planned ahead, graphs, and every copy of state in order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from sidestream.streams.simulated import Order
from tests.engine.harness import random_sequences
from tests.engine.prefix.serving import VOCAB, Serving
from tests.engine.sim.harness import captured_sizes, make_model, open_sim

STEM, ONE, TWO, THREE = random_sequences((32, 20, 7, 18), vocab=VOCAB, seed=12)
SETTINGS: dict[str, Any] = {"max_num_batched_tokens": 32, "max_num_seqs": 3, "num_blocks": 24}
MODES = ("none", "piecewise", "full_and_piecewise")


@pytest.fixture(scope="module", params=["glm5_next", "kimi_linear", "glm_moe_dsa"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param)
    make_model(request.param, path)
    return path


def serve(serving: Serving) -> dict[str, list[int]]:
    """Prompts that share a stem, two of them at once; then the next turn of one of them, and one of them again."""
    serving.serve("first", [*STEM, *ONE], max_tokens=3)
    for name, tail in (("two", TWO), ("three", THREE)):
        serving.add(name, [*STEM, *tail], max_tokens=20)
    serving.run()
    serving.serve("turn", [*serving.served["two"].sequence, 9, 10], max_tokens=3)
    serving.serve("again", [*STEM, *ONE], max_tokens=3)
    return {name: served.tokens for name, served in serving.served.items()}


def on_device(folder: Path, mode: str, order: Order, *, recorded: bool = False, **settings: Any) -> Serving:
    with captured_sizes(1, 8):
        return Serving(
            folder,
            backend=open_sim(order, seed=5),
            recorded=recorded,
            device="sim",
            cudagraph_mode=mode,
            graph_debug=True,
            max_capture_tokens=8,
            **(SETTINGS | settings),
        )


@pytest.mark.parametrize(
    ("mode", "order"),
    [("none", Order.LAZY), ("piecewise", Order.RANDOM), ("full_and_piecewise", Order.LAZY)],
)
def test_tokens_are_those_of_a_cpu_and_nothing_is_out_of_order(folder: Path, mode: str, order: Order) -> None:
    expected = serve(Serving(folder, recorded=False, enable_prefix_caching=False, **SETTINGS))
    serving = on_device(folder, mode, order)
    assert serve(serving) == expected
    backend: Any = serving.built.runner.streams.backend
    backend.check()
    cached = {name: served.cached_tokens for name, served in serving.served.items()}
    hybrid = serving.built.config.needs_snapshots
    assert cached["two"] == (0 if hybrid else 32), "only now it shows that prompts part behind the stem"
    assert cached["three"] == 32
    assert cached["turn"] == 48
    assert cached["again"] == 48


@pytest.mark.parametrize(("mode", "budget"), [("none", 80), ("piecewise", 80), ("piecewise", 7)])
def test_states_within_chunks_are_kept_in_order(folder: Path, mode: str, budget: int) -> None:
    """Two prompts in one step with a state kept in each. Both are continued. Steps of seven tokens are replayed, padded
    to eight."""
    settings = SETTINGS | {"max_num_batched_tokens": budget}
    prompts = {"a": [*STEM, *TWO], "b": [*THREE, *STEM[:20]]}

    def together(serving: Serving) -> dict[str, list[int]]:
        for name, prompt in prompts.items():
            serving.add(name, prompt, max_tokens=3)
        serving.run()
        for name, prompt in prompts.items():
            serving.serve(f"{name} again", [*prompt[:35], 9], max_tokens=3)
        return {name: served.tokens for name, served in serving.served.items()}

    expected = together(Serving(folder, recorded=False, enable_prefix_caching=False, **settings))
    serving = on_device(folder, mode, Order.RANDOM, **settings)
    forward, splits = serving.built.runner.forward, 0

    def counting(chunks: Any, *args: Any, **kw: Any) -> Any:
        nonlocal splits
        splits += sum(len(chunk.splits) for chunk in chunks)
        return forward(chunks, *args, **kw)

    serving.built.runner.forward = counting  # type: ignore[method-assign]
    assert together(serving) == expected
    assert (splits > 1) == serving.built.config.needs_snapshots
    backend: Any = serving.built.runner.streams.backend
    backend.check()
    cached = {name: served.cached_tokens for name, served in serving.served.items()}
    assert cached == {"a": 0, "b": 0, "a again": 32, "b again": 32}


def test_modes_have_the_same_bits(folder: Path) -> None:
    rows = {}
    for mode in MODES:
        serving = on_device(folder, mode, Order.RANDOM, recorded=True)
        serve(serving)
        rows[mode] = {name: served.rows for name, served in serving.served.items()}
    for mode in MODES[1:]:
        for name, expected in rows["none"].items():
            assert rows[mode][name].keys() == expected.keys()
            for position, row in expected.items():
                assert torch.equal(rows[mode][name][position], row), f"{mode}: position {position} of {name}"


def test_a_failed_step_empties_the_cache(folder: Path) -> None:
    """What it wrote is not known, so nothing is taken over from it; the request is computed anew."""
    serving = Serving(folder, recorded=False, **SETTINGS)
    first = serving.serve("first", [*STEM, *ONE], max_tokens=3)
    real = serving.built.runner.forward
    again = serving.add("again", [*STEM, *ONE], max_tokens=3)

    def fails(*args: Any, **kw: Any) -> Any:
        real(*args, **kw)
        raise KeyboardInterrupt

    serving.built.runner.forward = fails  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        serving.step()
    serving.built.runner.forward = real  # type: ignore[method-assign]
    serving.run()
    assert again.cached_tokens == 0
    assert again.tokens == first.tokens
    assert serving.serve("once more", [*STEM, *ONE], max_tokens=3).cached_tokens == 48


def test_a_step_leaves_nothing_to_be_remembered(folder: Path) -> None:
    """Or else an interrupt within ``add`` could leave that half done, in flight as the step is."""
    serving = on_device(folder, "none", Order.LAZY)
    core = serving.core
    cache = core.scheduler._prefixes._cache
    assert cache is not None
    steps = 0
    for prompts in ([[*STEM, *ONE], TWO], [TWO[:5]]):  # the last fills no block, and takes one that may hold something
        for prompt in prompts:
            serving.add(f"of {len(prompt)}", prompt, max_tokens=3)
        while core.has_work():
            core.advance()
            core.outbox.clear()
            assert not cache._unpublished, f"after step {steps}"
            assert not cache.blocks._unsettled, f"after step {steps}"
            steps += 1
    assert steps > 6
