"""Deterministic generator of the training and held-out text.

Three kinds of document: arithmetic word problems with their steps, key-value retrieval, and link chains. A document is
a list of `Segment`s, text with a mark: 0 context, 1 an answer token, 2 an answer that can only be looked up far back in
the context. `make_batch(encode, seed, step, ...)` depends on its arguments alone, so any number of workers gives the
same stream. The splits are disjoint by construction: `split_of` hashes what a question asks, and a generator redraws
until the hash fits.
"""

import random
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from training import stories
from training.words import ADJECTIVES, CITIES, CODAS, COLOURS, NOUNS, ONSETS, PEOPLE, PLACES, UNSEEN, VERBS, VOWELS

Kind = Literal["arithmetic", "retrieval", "chain"]
Names = Literal["mixed", "words", "pseudo", "unseen"]
Split = Literal["train", "heldout"]

USER, ASSISTANT, SYSTEM, END, PAD, MEDIA = "<|user|>", "<|assistant|>", "<|system|>", "<|end|>", "<|pad|>", "<|media|>"
SYSTEMS = ("You are a helpful assistant.", "Answer the question.", "You answer briefly.", "Read the notes with care.")


class Segment(NamedTuple):
    """A piece of text and its mark: 0 context, 1 answer, 2 answer looked up far back."""

    text: str
    mark: int


class Question(NamedTuple):
    """What is asked, and the answer as marked pieces, each piece beginning with its own space."""

    text: str
    answer: list[Segment]

    @property
    def answer_text(self) -> str:
        return "".join(piece.text for piece in self.answer)


@dataclass(frozen=True)
class Context:
    """A text with facts, and the questions that it answers in the order in which they should be asked."""

    text: str
    questions: list[Question]


Encode = Callable[[str], list[int]]


def split_of(key: str) -> Split:
    """One question in 16 is held out, by a hash of what it asks."""
    return "heldout" if zlib.crc32(key.encode()) % 16 == 0 else "train"


def pseudo_word(rng: random.Random) -> str:
    """A pronounceable word of two or three syllables, about 10^7 possible."""
    count = 2 if rng.random() < 0.7 else 3
    return "".join(rng.choice(ONSETS) + rng.choice(VOWELS) for _ in range(count)) + rng.choice(CODAS)


def draw_names(rng: random.Random, count: int, names: Names) -> list[str]:
    """`count` distinct names in random order; a mixed document runs from listed words only to pseudo-words only."""
    listed = list(UNSEEN if names == "unseen" else NOUNS)
    share = {"mixed": rng.choice((0.0, 0.3, 0.7, 1.0)), "words": 1.0, "pseudo": 0.0, "unseen": 0.5}[names]
    chosen = rng.sample(listed, min(len(listed), round(count * share)))
    taken, avoid = set(chosen), set(NOUNS) | set(UNSEEN)
    while len(chosen) < count:
        name = pseudo_word(rng)
        if names == "mixed" and rng.random() < 0.05:
            name = "".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(3, 5)))
        if name not in taken and name not in avoid:
            taken.add(name)
            chosen.append(name)
    rng.shuffle(chosen)
    return chosen


FACTS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "code": (
        (
            " The code of {n} is {v}.",
            " The {n} code is {v}.",
            " For {n} use code {v}.",
            " Someone gave {n} the code {v}.",
        ),
        ("What is the code of {n}?", "Which code belongs to {n}?", "Tell me the {n} code."),
    ),
    "city": (
        (" The {n} was sent to {v}.", " You find the {n} in {v}.", " They keep the {n} in {v}."),
        ("Where is the {n}?", "In which city is the {n}?"),
    ),
    "colour": (
        (" The {n} is {v}.", " Someone painted the {n} {v}.", " On the {n} is a {v} mark."),
        ("What colour is the {n}?", "Which colour has the {n}?"),
    ),
    "owner": (
        (" The {n} belongs to {v}.", " The {n} was bought by {v}.", " The owner of the {n} is {v}."),
        ("Who has the {n}?", "Whose is the {n}?"),
    ),
}
"""Per attribute: how a fact is told, value after name, and how it is asked."""
COMPACT = ((" {n} = {v};",), ("What is the value of {n}?", "{v0} {n} = ?"))


def draw_value(rng: random.Random, attribute: str) -> str:
    """A four-digit code, or a word of the attribute's list."""
    lists = {"city": CITIES, "colour": COLOURS, "owner": PEOPLE}
    return rng.choice(lists[attribute]) if attribute in lists else f"{rng.randrange(10000):04d}"


def filler(rng: random.Random) -> str:
    """A sentence without a fact."""
    form = rng.randrange(4)
    if form == 0:
        return f" The {rng.choice(ADJECTIVES)} {rng.choice(NOUNS)} stood near the {rng.choice(PLACES)}."
    if form == 1:
        return f" {rng.choice(PEOPLE)} {rng.choice(VERBS)} at the {rng.choice(PLACES)} all day."
    if form == 2:
        adjective, city = rng.choice(ADJECTIVES), rng.choice(CITIES)
        return f" It was a {adjective} day in {city}, and {rng.choice(PEOPLE)} {rng.choice(VERBS)}."
    return f" Nobody saw the {rng.choice(ADJECTIVES)} {rng.choice(NOUNS)} near the {rng.choice(PLACES)}."


def value_segments(value: str) -> list[Segment]:
    return [Segment(" ", 1), *(Segment(d, 2) for d in value)] if value.isdigit() else [Segment(" " + value, 2)]


def retrieval(rng: random.Random, budget: int, count: Callable[[str], int], names: Names, split: Split) -> Context:
    """Facts (sentences, compact pairs, or a few among filler) of about `budget` tokens, and questions about them."""
    style = rng.choice(("sentences", "codes", "compact", "needles"))
    pool = iter(draw_names(rng, budget // 3 + 8, names))
    lines: list[str] = []
    asked: list[Question] = []
    used = 0
    while used < budget:
        if style == "needles" and rng.random() < 0.7:
            line = filler(rng)
        else:
            name = next(pool)
            attribute = rng.choice(list(FACTS)) if style in ("sentences", "needles") else "code"
            value = draw_value(rng, attribute)
            facts, questions = COMPACT if style == "compact" else FACTS[attribute]
            line = rng.choice(facts).format(n=name, v=value)
            if split_of(f"{name}={value}") == split:
                text = rng.choice(questions).format(n=name, v0="Find")
                asked.append(Question(text, value_segments(value)))
        lines.append(line)
        used += count(line)
    rng.shuffle(asked)
    return Context("Notes:" + "".join(lines), asked)


def chain(
    rng: random.Random,
    budget: int,
    count: Callable[[str], int],
    names: Names,
    split: Split,
    steps: int | None = None,
) -> Context:
    """Links that form one ring, in random order, and walks along it, one link an answer word."""
    short = rng.random() < 0.7
    pool = draw_names(rng, budget // 4 + 2, names)
    ring: list[str] = []
    used = 0
    for name in pool:
        ring.append(name)
        used += 2 * count(" " + name) + (2 if short else 4)
        if used >= budget and len(ring) > 3:
            break
    size = len(ring)
    order = list(range(size))
    rng.shuffle(order)
    links = [(ring[i], ring[(i + 1) % size]) for i in order]
    text = "".join(f" {a} > {b};" for a, b in links) if short else "".join(f" From {a} go to {b}." for a, b in links)
    asked: list[Question] = []
    rng.shuffle(order)
    for start in order:
        length = steps if steps is not None else rng.randint(1, 6)
        if split_of(f"{ring[start]}>{ring[(start + 1) % size]}/{length}") != split:
            continue
        path = [ring[(start + j) % size] for j in range(length + 1)]
        plural = "" if length == 1 else "s"
        question = f"Start at {path[0]} and go {length} step{plural}."
        asked.append(Question(question, [Segment(" " + path[0], 1), *(Segment(" " + name, 2) for name in path[1:])]))
    return Context("Links:" + text, asked)


def arithmetic(rng: random.Random, split: Split) -> Question:
    """A word problem and its worked steps."""
    while True:
        story = stories.draw(rng)
        if split_of(story.key) == split:
            return Question(story.text, [Segment(" " + "\n".join([*story.steps, f"#### {story.answer}"]), 1)])


def plain_turn(question: Question) -> list[Segment]:
    return [Segment(f"Question: {question.text}\nAnswer:", 0), *question.answer, Segment(END, 1), Segment("\n", 0)]


def chat_turn(question: Question, before: str = "") -> list[Segment]:
    return [Segment(f"{USER}\n{before}{question.text}{ASSISTANT}", 0), *question.answer, Segment(END, 1)]


def document(rng: random.Random, kind: Kind, length: int, count: Callable[[str], int]) -> list[Segment]:
    """A training document of at least `length` tokens, unless its questions run out first."""
    chat = rng.random() < 0.4
    segments: list[Segment] = []
    if chat and rng.random() < 0.2:
        segments.append(Segment(f"{SYSTEM}\n{rng.choice(SYSTEMS)}", 0))
    if kind == "arithmetic":
        questions = [arithmetic(rng, "train") for _ in range(length // 50 + 2)]
        return segments + [s for q in questions for s in (chat_turn(q) if chat else plain_turn(q))]
    budget = int(length * rng.uniform(0.4, 0.75 if length < 4096 else 0.9))
    if kind == "retrieval":
        context = retrieval(rng, budget, count, "mixed", "train")
    else:
        context = chain(rng, budget, count, "mixed", "train")
    if not chat:
        segments.append(Segment(context.text + "\n", 0))
    for i, question in enumerate(context.questions[: length // 8]):
        segments += chat_turn(question, context.text + "\n" if i == 0 else "") if chat else plain_turn(question)
    return segments


KINDS: tuple[Kind, ...] = ("arithmetic", "retrieval", "chain")


def make_batch(
    encode: Encode, seed: int, step: int, rows: int, length: int, weights: tuple[float, ...] = (0.2, 0.4, 0.4)
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.uint8]]:
    """Token ids and marks, each [rows, length + 1]; short documents are padded with id 0, mark 0."""
    rng = random.Random(f"{seed}/{step}/{length}")
    ids = np.zeros((rows, length + 1), dtype=np.int32)
    marks = np.zeros((rows, length + 1), dtype=np.uint8)
    for row in range(rows):
        kind = rng.choices(KINDS, weights)[0]
        position = 0
        while position < length + 1:
            segments = document(rng, kind, length + 1, lambda text: len(encode(text)))
            for segment in segments:
                piece = encode(segment.text)[: length + 1 - position]
                ids[row, position : position + len(piece)] = piece
                marks[row, position : position + len(piece)] = segment.mark
                position += len(piece)
            if kind != "arithmetic":
                break
    return ids, marks


@dataclass(frozen=True)
class Item:
    """A held-out prompt and the text that must follow it, up to the end-of-turn token."""

    kind: Kind
    prompt: str
    answer: list[Segment]

    @property
    def answer_text(self) -> str:
        return "".join(piece.text for piece in self.answer)


def heldout_item(
    encode: Encode,
    seed: int,
    index: int,
    kind: Kind,
    length: int,
    *,
    names: Names = "mixed",
    chat: bool = False,
    steps: int = 3,
) -> Item:
    """One held-out question behind a context of about `length` tokens (arithmetic has no context)."""
    rng = random.Random(f"heldout/{seed}/{index}/{kind}/{length}/{names}")
    if kind == "arithmetic":
        context, question = "", arithmetic(rng, "heldout")
    else:
        while True:
            budget = max(16, length - 24)
            drawn = (
                retrieval(rng, budget, lambda text: len(encode(text)), names, "heldout")
                if kind == "retrieval"
                else chain(rng, budget, lambda text: len(encode(text)), names, "heldout", steps)
            )
            if drawn.questions:
                context, question = drawn.text + "\n", drawn.questions[0]
                break
    if chat:
        prompt = f"{USER}\n{context}{question.text}{ASSISTANT}"
    else:
        prompt = f"{context}Question: {question.text}\nAnswer:"
    return Item(kind, prompt, question.answer)
