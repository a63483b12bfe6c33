"""A growing conversation on small pools, with others at work beside it: every turn right, nearly all of it shared."""

from __future__ import annotations

import random

import pytest

from tests.engine.harness import random_sequences
from tests.engine.prefix.serving import BLOCK, VOCAB, Serving
from tests.engine.prefix.test_prompts import Model

TURNS = 30


@pytest.fixture(scope="module", params=["next", "kimi", "dsa"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(request.param, tmp_path_factory.mktemp(request.param))


def test_thirty_turns_among_fillers(model: Model) -> None:
    """The conversation grows to 43 blocks; 70 are there, and fillers of up to 8 blocks each come and go meanwhile."""
    serving = Serving(model.folder, num_blocks=70, num_prefix_snapshots=8, max_num_batched_tokens=48)
    rng = random.Random(4)
    turns = random_sequences([rng.randrange(3, 20) for _ in range(TURNS)], vocab=VOCAB, seed=8)
    history = random_sequences((40,), vocab=VOCAB, seed=9)[0]
    shareable = shared = fillers = 0
    for turn, message in enumerate(turns):
        before = len(history)
        for _ in range(rng.randrange(3)):
            fillers += 1
            prompt = random_sequences((rng.randrange(1, 100),), vocab=VOCAB, seed=100 + fillers)[0]
            serving.add(f"filler {fillers}", prompt, max_tokens=rng.randrange(1, 20))
        served = serving.add(f"turn {turn}", [*history, *message], max_tokens=rng.randrange(4, 18))
        while served.finish_reason is None:
            serving.step()
        model.check(served)
        if turn:
            shareable += (before - 1) // BLOCK * BLOCK  # the last token of an answer is not computed in its turn
            shared += served.cached_tokens
        history = served.sequence
    assert fillers > 15
    assert shared > 0.9 * shareable, f"{shared} of {shareable} tokens"
    serving.run()
    for number in range(1, fillers + 1):
        filler = serving.served[f"filler {number}"]
        model.check(filler)
    assert serving.core.scheduler.prefix_stats.blocks_evicted > 0
    assert serving.core.scheduler.num_free_blocks == 70


def test_an_answer_is_found_in_the_middle_of_a_block_too(model: Model) -> None:
    """Whatever the answer's length, the next turn takes over all whole blocks of what was computed."""
    for length in (14, 15, 16, 17, 18, 33):
        serving = Serving(model.folder)
        first = serving.serve("first", range(10, 30), max_tokens=length)
        second = serving.serve("second", [*first.sequence, 7, 8, 9], max_tokens=2)
        assert second.cached_tokens == (20 + length - 1) // BLOCK * BLOCK, length
        model.check(second)
