"""HiSparse where it may break: everything poisoned, aborts and errors anywhere, smallest and oddest sizes, two engines
at once, prompts ten times as long as the device's pool."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from sidestream.cache import hisparse
from sidestream.cache.placement import BlockPlacement
from sidestream.engine.build import BuiltEngine
from tests.engine.harness import Harness, oracle_logprobs, random_sequences
from tests.engine.hisparse.pressed import PRESSED, host_memory, long_and_short, open_blocks, placement_of
from tests.engine.hisparse.test_serving import HOSTED, PLACES, SETTINGS, act, prompt, same
from tests.engine.prefix.serving import Serving
from tests.engine.sim.harness import VOCAB, make_model
from tests.tolerances import PARITY_LOGPROB

Both = tuple[Serving, Serving]


@pytest.fixture(scope="module", params=["glm5_next", "glm_moe_dsa"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp(request.param)
    make_model(request.param, made)
    return made


def poison_host(built: BuiltEngine) -> None:
    """The host pool too begins as NaN; hot slots and staging places do with the arena."""
    assert built.pools.hosted is not None
    for layer in built.pools.groups.kv.layers:
        built.pools.hosted.host.layer(layer).fill_(float("nan"))


def pair(folder: Path, *, host: int = HOSTED, **settings: Any) -> Both:
    """An engine under pressure, all its memory poisoned, and one with as many blocks on its device."""
    chosen: dict[str, Any] = SETTINGS | {"enable_prefix_caching": False} | settings
    block = int(chosen["block_size"])
    pressed = Serving(folder, **chosen, hisparse_host_memory=host_memory(folder, host * block // 8 + host * block % 8))
    assert pressed.built.pools.hosted is not None
    poison_host(pressed.built)
    more = pressed.built.pools.hosted.sizes.host_blocks
    roomy: dict[str, Any] = {"num_blocks": int(chosen["num_blocks"]) + more, "hisparse_hot_factor": 2}
    return pressed, Serving(folder, **chosen | roomy)


def free_again(both: Both) -> None:
    """Nothing runs, and every block is free or cached."""
    for serving in both:
        assert not serving.core.has_work()
        assert serving.core.scheduler.num_free_blocks == serving.built.num_blocks - 1
    placement_of(both[0].built).check_integrity()


def step_both(both: Both) -> Iterator[int]:
    """Steps until the pressed engine has no work; both run the same."""
    index = 0
    while both[0].core.has_work():
        yield index
        act(both, lambda s: s.step())
        placement_of(both[0].built).check_integrity()
        index += 1


@pytest.mark.parametrize("factor", [1, 2, 4])
def test_prompts_ten_times_as_long_as_the_pool(factor: int, tmp_path: Path) -> None:
    """Nine places of eight tokens; prompts of 730 and 97, decodes of both."""
    oracle = make_model("glm_moe_dsa", tmp_path)
    lengths = [740, 110]
    settings = PRESSED | {"max_model_len": 760, "max_num_seqs": 2}
    sequences = random_sequences(lengths, vocab=VOCAB, seed=15)
    schedule = long_and_short(lengths, 730)
    want = Harness(tmp_path, **settings | {"num_blocks": 200}).run(sequences, schedule)
    pressed = Harness(tmp_path, **settings, hisparse_host_memory=host_memory(tmp_path, 110), hisparse_hot_factor=factor)
    poison_host(pressed.built)
    open_blocks(pressed, factor)
    got = pressed.run(sequences, schedule)
    assert placement_of(pressed.built).num_spilled > 80
    for sequence, a, b in zip(sequences, got, want, strict=True):
        assert torch.equal(a, b)
        assert (a - oracle_logprobs(oracle, sequence)).abs().max() < PARITY_LOGPROB


def test_an_abort_at_any_step(folder: Path) -> None:
    """Three requests; in each round another step ends another of them, while it waits, prefills or decodes."""
    both = pair(folder, num_blocks=10, max_num_batched_tokens=16, max_num_seqs=2)
    length = 0
    for at in range(0, 100, 3):
        names = [f"{at}:{i}" for i in range(3)]
        for i, name in enumerate(names):
            act(both, lambda s, i=i, name=name: s.add(name, prompt(50 + 9 * i, i), max_tokens=6))  # type: ignore[misc]
        for index in step_both(both):
            if index == at:
                act(both, lambda s, name=names[at // 3 % 3]: s.core.abort(name))  # type: ignore[misc]
            length = max(length, index)
        free_again(both)
        if at > length:
            break
    assert length > 12
    assert placement_of(both[0].built).num_spilled > 60
    same(*both)


FAILING: dict[str, tuple[Any, str]] = {
    "blocks leave": (hisparse.HiSparseRuntime, "_copy_out"),
    "rows are resolved": (hisparse.HiSparseTopK, "resolve"),
    "rows are fetched": (hisparse.HiSparseTopK, "fetch"),
    "blocks are staged": (hisparse.HiSparseRuntime, "stage_layer"),
    "a step ends": (hisparse.HiSparseRuntime, "end_step"),
    "places are planned": (BlockPlacement, "plan"),
}


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("where", FAILING)
def test_an_error_in_the_middle_of_a_step(where: str, after: bool, folder: Path) -> None:
    """Every unfinished request is computed anew and gives the tokens it would have given."""
    owner, method = FAILING[where]
    real: Callable[..., Any] = getattr(owner, method)
    pressed, roomy = pair(folder, num_blocks=10, max_num_batched_tokens=16, max_num_seqs=2)
    for i in range(2):
        act((pressed, roomy), lambda s, i=i: s.add(f"r{i}", prompt(66 + i, i), max_tokens=8))  # type: ignore[misc]
    roomy.run()
    failed = 0
    for at in (3, 10, 17):
        calls = 0

        def failing(*args: Any, at: int = at, **named: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == at and not after:
                raise KeyboardInterrupt
            result = real(*args, **named)
            if calls == at:
                raise KeyboardInterrupt
            return result

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(owner, method, failing)
            try:
                while pressed.core.has_work() and calls < at:
                    pressed.step()
            except KeyboardInterrupt:
                failed += 1
                placement = placement_of(pressed.built)
                assert placement.num_free_device == placement.num_device - 1, "nothing is known to be anywhere"
                assert placement.num_free_host == placement.num_host
        placement_of(pressed.built).check_integrity()
        pressed.core.scheduler.check_integrity()
    pressed.run()
    assert failed >= 1
    for name, served in pressed.served.items():
        assert served.tokens == roomy.served[name].tokens
    free_again((pressed, roomy))


def test_a_host_pool_of_one_block(folder: Path) -> None:
    both = pair(folder, host=1, num_blocks=13, max_num_batched_tokens=8, max_num_seqs=2, max_model_len=112)
    assert placement_of(both[0].built).num_host == 1
    act(both, lambda s: s.add("fills it", prompt(106, 1), max_tokens=6))
    act(both, lambda s: s.add("waits", prompt(60, 2), max_tokens=6))
    for _ in step_both(both):
        pass
    assert placement_of(both[0].built).num_spilled >= 1
    same(*both)
    free_again(both)


@pytest.mark.parametrize(
    "odd",
    [
        {"block_size": 4, "num_blocks": 13, "max_num_batched_tokens": 7, "hisparse_hot_factor": 1},
        {"block_size": 12, "num_blocks": 9, "max_num_batched_tokens": 13, "hisparse_hot_factor": 3},
        {"block_size": 20, "num_blocks": 7, "max_num_batched_tokens": 5, "hisparse_watermark": 1.0},
        {"block_size": 8, "num_blocks": 8, "max_num_batched_tokens": 3, "max_num_seqs": 3, "hisparse_watermark": 0},
        {"block_size": 8, "num_blocks": 11, "max_model_len": 157, "hisparse_hot_factor": 50},
    ],
    ids=str,
)
def test_odd_sizes(odd: dict[str, Any], folder: Path) -> None:
    """Hot slots of exactly top_k, or more than a sequence has rows; no block divides anything."""
    both = pair(folder, **odd)
    for i in range(3):
        act(both, lambda s, i=i: s.add(f"r{i}", prompt(61 + 23 * i, i), max_tokens=7 + i))  # type: ignore[misc]
    for _ in step_both(both):
        pass
    assert placement_of(both[0].built).num_spilled >= 3
    same(*both)
    free_again(both)


def test_two_engines_at_once(folder: Path) -> None:
    """Their steps alternate; each gives what it gives alone."""
    first, roomy = pair(folder, num_blocks=10, max_num_batched_tokens=16)
    second, _ = pair(folder, num_blocks=9, max_num_batched_tokens=16, hisparse_hot_factor=1, max_num_seqs=3)
    for serving in (first, second, roomy):
        for i in range(3):
            serving.add(f"r{i}", prompt(70 + i, i), max_tokens=9)
    while first.core.has_work() or second.core.has_work():
        for serving in (first, second):
            if serving.core.has_work():
                serving.step()
    roomy.run()
    same(first, roomy)
    same(second, roomy)
    for serving in (first, second):
        assert placement_of(serving.built).num_spilled > 10


def test_a_device_just_large_enough_to_work_in(folder: Path) -> None:
    """As many places as one step may write to, and no watermark: every full block leaves at once."""
    both = pair(folder, num_blocks=8, max_num_batched_tokens=16, max_num_seqs=3, hisparse_watermark=0.0)
    for i in range(5):
        act(both, lambda s, i=i: s.add(f"r{i}", prompt(90 + i, i), max_tokens=5))  # type: ignore[misc]
    for _ in step_both(both):
        pass
    assert PLACES > 8
    same(*both)
    free_again(both)
