import random
import struct
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sidestream.cache.block_hashes import block_hashes
from sidestream.cache.block_pool import BlockPool
from sidestream.errors import CapacityError


def test_the_scratch_block_is_never_handed_out() -> None:
    pool = BlockPool(5, 4)
    assert sorted(pool.allocate(4) or []) == [1, 2, 3, 4]
    assert pool.num_free == 0
    assert pool.allocate(1) is None
    assert pool.allocate(0) == []
    with pytest.raises(CapacityError, match=r"1 KV blocks.*num_blocks"):
        BlockPool(1, 4)


def test_a_short_pool_gives_nothing_and_changes_nothing() -> None:
    pool = BlockPool(4, 4)
    held = pool.allocate(2)
    assert held is not None
    assert pool.allocate(2) is None
    assert pool.num_free == 1
    pool.check_integrity({"a": held})


def test_a_shared_block_is_free_when_its_last_owner_lets_go() -> None:
    pool = BlockPool(4, 4)
    blocks = pool.allocate(2) or []
    pool.share(blocks)
    pool.check_integrity({"a": blocks, "b": blocks})
    pool.release(blocks)
    assert pool.num_free == 1
    pool.check_integrity({"b": blocks})
    pool.release(blocks)
    assert pool.num_free == 3
    pool.check_integrity({})
    with pytest.raises(AssertionError, match="nobody owns it"):
        pool.release([blocks[0]])
    with pytest.raises(AssertionError, match="no owner and no content"):
        pool.share([blocks[0]])


def test_published_blocks_are_found_kept_longest_and_evicted_from_the_end_of_a_chain() -> None:
    evicted: list[tuple[int, bytes]] = []
    pool = BlockPool(6, 4, on_evict=lambda block, content: evicted.append((block, content)))
    hashes = block_hashes(range(12), 4)
    chain = pool.allocate(3) or []
    for block, content in zip(chain, hashes, strict=True):
        pool.publish(block, content)
    pool.release(chain)
    assert [pool.lookup(content) for content in hashes] == chain
    other = pool.allocate(2) or []
    assert not set(other) & set(chain), "blocks without content go first"
    assert pool.allocate(1) == [chain[2]]
    assert not evicted, "nobody looked yet"
    assert [pool.lookup(content) for content in hashes] == [*chain[:2], None]
    assert evicted == [(chain[2], hashes[2])]
    pool.share(chain[:2])  # a hit takes them out of the free list
    assert pool.num_free == 0
    pool.check_integrity({"other": other, "third": [chain[2]], "hit": chain[:2]})
    pool.release(chain[1::-1])
    pool.check_integrity({"other": other, "third": [chain[2]]})


@pytest.mark.parametrize("look", ["settle", "lookup", "publish", "release", "check_integrity"])
def test_what_blocks_held_is_forgotten_before_anybody_looks_and_at_once_where_that_is_urgent(look: str) -> None:
    evicted: list[tuple[int, bytes]] = []
    pool = BlockPool(6, 4, on_evict=lambda block, content: evicted.append((block, content)))
    first, second, third, *others = pool.allocate(5) or []
    for block, content in ((first, b"a"), (second, b"b"), (third, b"c")):
        pool.publish(block, content)
    pool.urgent |= {second, third}
    pool.release([second, first])  # first is handed out first
    assert pool.allocate(2) == [first, second]
    assert evicted == [(second, b"b")]
    assert pool.urgent == {third}
    held = [first, second, third, *others]
    looks = {
        "settle": pool.settle,
        "lookup": lambda: pool.lookup(b"a"),
        "publish": lambda: pool.publish(second, b"a"),
        "release": lambda: pool.release([held.pop(0)]),
        "check_integrity": lambda: pool.check_integrity({"all": held}),
    }
    looks[look]()
    assert evicted == [(second, b"b"), (first, b"a")]
    assert pool.lookup(b"a") == (second if look == "publish" else None)
    pool.check_integrity({"all": held})


def test_equal_content_is_published_once() -> None:
    pool = BlockPool(4, 4)
    first, second = pool.allocate(2) or []
    pool.publish(first, b"x")
    pool.publish(second, b"x")
    assert pool.lookup(b"x") == first
    pool.release([second])
    assert pool.allocate(1) == [second], "the copy kept no content"
    pool.check_integrity({"a": [first], "b": [second]})
    with pytest.raises(AssertionError, match="published twice"):
        pool.publish(first, b"y")


def test_hashes_depend_on_all_earlier_tokens_and_the_salt() -> None:
    tokens = [5, 6, 7, 8, 9, 10, 11, 2**31 - 1]
    hashes = block_hashes(tokens, 4)
    assert len(hashes) == 2
    assert len(block_hashes(tokens[:7], 4)) == 1
    assert block_hashes(tokens[:7], 4) == hashes[:1]
    changed = block_hashes([4, *tokens[1:]], 4)
    assert not set(changed) & set(hashes)
    assert not set(block_hashes(tokens, 4, salt=b"tenant")) & set(hashes)
    assert block_hashes(tokens[4:], 4)[0] != hashes[1]
    with pytest.raises(struct.error):  # never cut off to fewer bytes
        block_hashes([5, 6, 7, 2**32 + 8], 4)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (lambda pool, held: pool._references.__setitem__(held[0], 2), "counts 2 references"),
        (lambda pool, held: pool._free.__setitem__(held[0], None), "has 1 references and is free"),
        (lambda pool, held: pool._free.popitem(), "has 0 references and is not free"),
        (lambda pool, held: held.append(0), "the scratch block is owned"),
        (lambda pool, held: held.append(held[0]), "owns a block twice"),
        (lambda pool, held: pool._block_of.__setitem__(b"z", 1), "hash maps disagree"),
    ],
)
def test_integrity_check_finds_each_kind_of_fault(fault, message) -> None:  # type: ignore[no-untyped-def]
    pool = BlockPool(6, 4)
    held = pool.allocate(2) or []
    pool.check_integrity({"a": held})
    fault(pool, held)
    with pytest.raises(AssertionError, match=message):
        pool.check_integrity({"a": held})


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(2, 12))
def test_random_use_against_a_plain_model(seed: int, num_blocks: int) -> None:
    rng = random.Random(seed)
    owned: dict[str, list[int]] = {}
    contents: dict[int, bytes] = {}  # the model: what each published block holds
    due: list[tuple[int, bytes]] = []  # what was evicted, and
    told: list[tuple[int, bytes]] = []  # what the pool has said of it
    pool = BlockPool(num_blocks, 4, on_evict=lambda block, content: told.append((block, content)))
    for step in range(60):
        action = rng.choice(["allocate", "share", "release", "publish", "hit"])
        name = rng.choice(list(owned)) if owned else None
        if action == "allocate":
            count, urgent = rng.randint(0, 4), set(pool.urgent)
            blocks = pool.allocate(count)
            in_use = {block for held in owned.values() for block in held}
            assert (blocks is None) == (count > num_blocks - 1 - len(in_use))
            if blocks:
                assert not set(blocks) & in_use
                due += [(block, contents.pop(block)) for block in blocks if block in contents]
                assert set(told) >= {(block, content) for block, content in due if block in urgent & set(blocks)}
                owned[f"s{step}"] = blocks
        elif action == "share" and name:
            pool.share(owned[name])
            owned[f"s{step}"] = list(owned[name])
        elif action == "release" and name:
            pool.release(owned.pop(name))
        elif action == "publish" and name:
            block = rng.choice(owned[name])
            if block not in contents:
                content = bytes([rng.randint(0, 5)])
                before = next((b for b, c in contents.items() if c == content), None)
                if before is None or not any(before in held for held in owned.values()):
                    contents.pop(before or 0, None)
                    contents[block] = content
                found = pool.publish(block, content)
                assert contents.get(found) == content
                pool.urgent |= {found} if rng.random() < 0.5 else set()
        elif action == "hit" and contents:
            block, content = rng.choice(list(contents.items()))
            assert pool.lookup(content) == block
            pool.share([block])
            owned[f"s{step}"] = [block]
        counts = Counter(block for held in owned.values() for block in held)
        assert pool.num_free == num_blocks - 1 - len(counts)
        if rng.random() < 0.5:
            continue
        pool.check_integrity(owned)
        assert sorted(told) == sorted(due)
        for content in (bytes([i]) for i in range(6)):
            assert pool.lookup(content) == next((b for b, c in contents.items() if c == content), None)
