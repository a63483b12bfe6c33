"""The generator: deterministic, right, and disjoint between the splits."""

import random
import re
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from training import stories
from training.data import END, KINDS, Encode, arithmetic, document, heldout_item, make_batch, retrieval, split_of
from training.tokenizer import CachedEncoder, build_tokenizer
from training.words import NOUNS, UNSEEN

BUNDLED = Path(__file__).parents[2] / "sidestream" / "assets" / "glm5-next-tiny" / "tokenizer.json"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(BUNDLED))


@pytest.fixture(scope="module")
def encode(tokenizer: Tokenizer) -> Encode:
    return CachedEncoder(tokenizer)


def test_batches_depend_on_their_arguments_alone(tokenizer: Tokenizer) -> None:
    first = make_batch(CachedEncoder(tokenizer), 3, 17, 4, 200)
    again = make_batch(CachedEncoder(tokenizer), 3, 17, 4, 200)
    other = make_batch(CachedEncoder(tokenizer), 3, 18, 4, 200)
    assert np.array_equal(first[0], again[0])
    assert np.array_equal(first[1], again[1])
    assert not np.array_equal(first[0], other[0])


def test_worked_steps_are_right() -> None:
    rng = random.Random(0)
    for _ in range(3000):
        story = stories.draw(rng)
        for step in story.steps:
            left, right = step.split(" = ")
            a, operator, b = left.split(" ")
            value = {"+": int(a) + int(b), "-": int(a) - int(b), "*": int(a) * int(b), "/": int(a) / int(b)}[operator]
            assert value == int(right) >= 0, story
        assert story.steps[-1].endswith(f"= {story.answer}")
        given = {int(n) for n in re.findall(r"\d+", story.text)}
        assert given & {int(n) for n in re.findall(r"\d+", story.steps[0])}, story


def test_retrieval_answers_stand_in_the_context(encode: Encode) -> None:
    for seed in range(20):
        context = retrieval(random.Random(seed), 300, lambda text: len(encode(text)), "mixed", "train")
        for question in context.questions:
            value = question.answer_text.strip()
            name = next(w for w in re.findall(r"[a-z]+", question.text)[::-1] if re.search(rf"\b{w}\b", context.text))
            facts = [s for s in re.split(r"[.;]", context.text) if re.search(rf"\b{name}\b", s) and value in s]
            assert facts, (question.text, value)


def test_chains_follow_their_links(encode: Encode) -> None:
    for index in range(20):
        item = heldout_item(encode, 0, index, "chain", 300, steps=4)
        links = dict(
            re.findall(r" (\w+) > (\w+);", item.prompt) or re.findall(r"From (\w+) go to (\w+)\.", item.prompt)
        )
        path = item.answer_text.split()
        assert len(path) == 5
        assert all(links[a] == b for a, b in pairwise(path))
        assert f"Start at {path[0]} " in item.prompt


def test_splits_are_disjoint() -> None:
    rng = random.Random(1)
    keys = {story.key for story in (stories.draw(rng) for _ in range(3000))}
    held = {key for key in keys if split_of(key) == "heldout"}
    assert 0.02 < len(held) / len(keys) < 0.12
    train = {arithmetic(rng, "train").text for _ in range(2000)}
    heldout = {arithmetic(rng, "heldout").text for _ in range(500)}
    assert not train & heldout


def test_unseen_words_never_occur_in_training_text() -> None:
    rng = random.Random(2)
    text = " ".join(
        segment.text for i in range(60) for segment in document(rng, KINDS[i % 3], 400, lambda text: len(text) // 4)
    )
    words = set(re.findall(r"[a-z]+", text))
    assert not words & set(UNSEEN)
    assert not set(NOUNS) & set(UNSEEN)


def test_cached_encoder_equals_the_tokenizer(tokenizer: Tokenizer, encode: Encode) -> None:
    rng = random.Random(3)
    for kind in KINDS:
        text = "".join(segment.text for segment in document(rng, kind, 300, lambda text: len(text) // 4))
        assert encode(text) == tokenizer.encode(text).ids
        assert tokenizer.decode(encode(text), skip_special_tokens=False) == text
    assert tokenizer.token_to_id(END) == 1
    assert len(encode("4719")) == 4
    assert all(len(encode(" " + noun)) == 1 for noun in NOUNS)


def test_bundled_tokenizer_is_the_one_the_script_builds(tokenizer: Tokenizer) -> None:
    assert build_tokenizer().to_str() == tokenizer.to_str()
