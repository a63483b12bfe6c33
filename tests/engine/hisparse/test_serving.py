"""A server under pressure: requests of which a third fits the device, aborts, preemptions, and prefixes that left it.

The engine beside it has as many blocks, all on its device, so both plan the same steps and must give the same bits.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from sidestream.errors import CapacityError, ConfigError
from tests.engine.hisparse.pressed import host_memory, placement_of
from tests.engine.prefix.serving import VOCAB, Serving
from tests.engine.sim.harness import make_model, open_sim

BLOCK, PLACES, HOSTED = 8, 12, 40
SETTINGS: dict[str, Any] = {
    "block_size": BLOCK,
    "max_num_seqs": 3,
    "max_num_batched_tokens": 24,
    "max_model_len": 160,
    "num_blocks": PLACES,
}


@pytest.fixture(scope="module", params=["glm5_next", "glm_moe_dsa"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp(request.param)
    make_model(request.param, made)
    return made


def both(folder: Path, **settings: Any) -> tuple[Serving, Serving]:
    """An engine under pressure, and one with as many blocks on its device."""
    hosted = Serving(folder, **SETTINGS | settings, hisparse_host_memory=host_memory(folder, HOSTED))
    return hosted, Serving(folder, **SETTINGS | {"num_blocks": PLACES + HOSTED} | settings)


def prompt(length: int, seed: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(3, VOCAB) for _ in range(length)]


def same(hosted: Serving, resident: Serving) -> None:
    assert hosted.served.keys() == resident.served.keys()
    for name, served in hosted.served.items():
        other = resident.served[name]
        assert served.tokens == other.tokens
        assert served.finish_reason == other.finish_reason
        assert served.cached_tokens == other.cached_tokens
        assert served.rows.keys() == other.rows.keys()
        for position, row in served.rows.items():
            assert torch.equal(row, other.rows[position]), f"{name} differs at position {position}"


def act(servings: tuple[Serving, Serving], what: Callable[[Serving], object]) -> None:
    for serving in servings:
        what(serving)


def test_six_long_requests_where_two_fit(folder: Path) -> None:
    """The logical pool holds fewer than all of them too, so that some are preempted; one is aborted while it runs, one
    while it waits."""
    servings = both(folder, enable_prefix_caching=False)
    for i in range(6):
        act(servings, lambda s, i=i: s.add(f"r{i}", prompt(100 + 7 * i, i), max_tokens=14))  # type: ignore[misc]
    for step in range(400):
        if step == 9:
            act(servings, lambda s: s.core.abort("r1"))
            act(servings, lambda s: s.core.abort("r5"))
        if not servings[0].core.has_work():
            break
        act(servings, lambda s: s.step())
        placement_of(servings[0].built).check_integrity()
    assert not servings[0].core.has_work()
    same(*servings)
    hosted = servings[0]
    assert placement_of(hosted.built).num_spilled > 20
    for name in ("r0", "r2", "r3", "r4"):
        assert len(hosted.served[name].tokens) == 14
    assert hosted.core.scheduler.num_free_blocks == PLACES + HOSTED
    # Everything is given back: as many new requests find the same room.
    act(servings, lambda s: s.add("again", prompt(120, 9), max_tokens=20))
    act(servings, lambda s: s.run())
    same(*servings)


def test_a_preempted_sequence_comes_back_with_the_same_bits(folder: Path) -> None:
    servings = both(folder, enable_prefix_caching=False)
    for i in range(3):
        act(servings, lambda s, i=i: s.add(f"r{i}", prompt(120, 20 + i), max_tokens=39))  # type: ignore[misc]
    act(servings, lambda s: s.run())
    assert servings[0].core.scheduler.num_preemptions == servings[1].core.scheduler.num_preemptions > 0
    same(*servings)


def test_a_prefix_that_left_the_device_is_hit_without_being_computed_again(folder: Path) -> None:
    servings = both(folder)
    shared = prompt(96, 40)
    act(servings, lambda s: s.add("first", shared + prompt(5, 41), max_tokens=3))
    act(servings, lambda s: s.run())
    for i in range(2):
        act(servings, lambda s, i=i: s.add(f"filler{i}", prompt(100, 50 + i), max_tokens=12))  # type: ignore[misc]
        act(servings, lambda s: s.run())
    placement = placement_of(servings[0].built)
    assert placement.num_spilled >= 10
    before = placement.num_spilled
    act(servings, lambda s: s.add("second", shared + prompt(9, 42), max_tokens=6))
    act(servings, lambda s: s.run())
    assert servings[0].served["second"].cached_tokens >= 88
    assert placement.num_spilled < before + 12
    same(*servings)


def test_the_ledger_lists_everything_that_a_host_pool_adds(folder: Path) -> None:
    hosted, resident = both(folder)
    parts = {part.name: part for part in hosted.built.ledger.parts}
    assert {"hot rows", "staged rows", "tables of hot slots"} <= parts.keys()
    assert all(
        part.predicted == part.measured > 0 for part in parts.values() if part.name != "index_keys of host blocks"
    )
    more = hosted.built.ledger.total - resident.built.ledger.total
    rows = hosted.built.pools.groups.kv.bytes_per_block * HOSTED
    added = sum(parts[name].measured for name in ("hot rows", "staged rows", "tables of hot slots"))
    assert more == added - rows


def test_a_request_larger_than_both_pools_is_refused(folder: Path) -> None:
    small = {"max_model_len": 160, "hisparse_host_memory": host_memory(folder, 4)}
    with pytest.raises(CapacityError, match=r"max_model_len 160 needs 20 KV blocks .* there are 16"):
        Serving(folder, **SETTINGS | small)


def test_a_device_without_room_to_work_in_is_refused(folder: Path) -> None:
    with pytest.raises(CapacityError, match=r"5 KV blocks on the device .* the 9 that one step .* max_num_seqs 3"):
        Serving(folder, **SETTINGS | {"num_blocks": 5, "hisparse_host_memory": host_memory(folder, HOSTED)})


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"hisparse_host_memory": "lots"}, "hisparse_host_memory is 'lots'; give bytes"),
        ({"hisparse_host_memory": 10}, "a host pool of 10 bytes holds no KV block"),
        ({"hisparse_host_memory": "1MiB", "hisparse_hot_factor": 0}, "hisparse_hot_factor must be a positive integer"),
    ],
)
def test_wrong_settings_name_themselves(folder: Path, setting: dict[str, Any], message: str) -> None:
    with pytest.raises((ConfigError, CapacityError), match=message):
        Serving(folder, **SETTINGS | setting)


def test_a_model_that_reads_its_whole_context_is_refused(tmp_path: Path) -> None:
    make_model("kimi_linear", tmp_path)
    with pytest.raises(ConfigError, match=r"layers \(1,\) read their whole context, so nothing of it is cold"):
        Serving(tmp_path, **SETTINGS, hisparse_host_memory="1MiB")


@pytest.mark.parametrize("mode", ["piecewise", "full"])
def test_steps_launched_one_ahead_give_the_same_tokens(folder: Path, mode: str) -> None:
    """On a device the next step is planned, and its blocks moved, before the tokens of this one are read."""
    short = {"max_num_batched_tokens": 16, "max_num_seqs": 2, "num_blocks": 8, "max_capture_tokens": 4}
    hosted, resident = (
        Serving(
            folder,
            recorded=False,
            backend=open_sim(seed=3) if device == "sim" else None,
            **SETTINGS | short | pools,
            device=device,
            cudagraph_mode=mode if device == "sim" else "none",
        )
        for device, pools in (
            ("sim", {"hisparse_host_memory": host_memory(folder, HOSTED)}),
            ("cpu", {"num_blocks": 8 + HOSTED}),
        )
    )
    servings = (hosted, resident)
    for i, length in enumerate((70, 41, 55)):
        act(servings, lambda s, i=i, length=length: s.add(f"r{i}", prompt(length, i), max_tokens=9))  # type: ignore[misc]
    act(servings, lambda s: s.run())
    assert placement_of(hosted.built).num_spilled > 8
    for name, served in hosted.served.items():
        assert served.tokens == resident.served[name].tokens
    hosted.built.runner.streams.backend.check()  # type: ignore[attr-defined]
