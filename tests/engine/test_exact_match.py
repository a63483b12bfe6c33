"""The pieces of few-shot exact match, without an engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from sidestream import RequestError
from sidestream.engine.exact_match import (
    Item,
    chat_prompt,
    examples_for,
    final_answer,
    judge,
    plain_prompt,
    read_items,
    score,
)
from training.questions import questions


@pytest.mark.parametrize(
    ("text", "final"),
    [
        ("12 + 30 = 42\n#### 42", "42"),
        ("#### 1,234", "1234"),
        ("#### -7 apples", "-7"),
        ("#### $5.00", "5"),
        ("#### 2.50.", "2.5"),
        ("####42\n\nQuestion: more #### 7", "42"),
        ("the answer is 42", None),
        ("#### none", None),
        ("####", None),
        ("", None),
    ],
)
def test_the_number_behind_the_mark_is_the_answer(text: str, final: str | None) -> None:
    assert final_answer(text) == final


def test_wrong_and_invalid_answers_are_told_apart() -> None:
    item = Item("q", "#### 42", "42")
    judged = [judge(item, text) for text in ("#### 42", "#### 42.0", "#### 41", "42", "#### forty")]
    result = score(judged)
    assert (result.items, result.correct, result.invalid) == (5, 2, 2)
    assert (result.accuracy, result.invalid_rate) == (0.4, 0.4)


def test_examples_stand_before_the_question() -> None:
    shots = [Item("a?", "1\n#### 1", "1"), Item("b?", "#### 2", "2")]
    assert plain_prompt(shots, "c?") == (
        "Question: a?\nAnswer: 1\n#### 1\n\nQuestion: b?\nAnswer: #### 2\n\nQuestion: c?\nAnswer:"
    )
    assert [message["role"] for message in chat_prompt(shots, "c?")] == [
        "user",
        "assistant",
        "user",
        "assistant",
        "user",
    ]


def test_a_question_is_never_its_own_example() -> None:
    items = [Item(name, "#### 1", "1") for name in ("a?", "B  b?", "c?", "b b?")]
    assert [item.question for item in examples_for("a?", items, 2)] == ["B  b?", "c?"]
    assert [item.question for item in examples_for("b b?", items, 2)] == ["a?", "c?"]
    assert [item.question for item in examples_for("d?", items, 3)] == ["a?", "B  b?", "c?"]
    assert examples_for("a?", items, 0) == []
    with pytest.raises(RequestError, match="shots is 3, the limit is 2, the examples beside the question 'b B"):
        examples_for("b B?", items, 3)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "holds no questions"),
        ("{", "line 1 is not JSON"),
        ('{"question": "q", "answer": "#### 1"}\n[]', "line 2 needs"),
        ('{"question": "", "answer": "#### 1"}', "line 1 needs"),
        ('{"question": "q", "answer": 5}', "line 1 needs"),
        ('\n{"question": "q", "answer": "5"}', "line 2: no number"),
    ],
)
def test_broken_files_are_refused_by_line(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "items.jsonl"
    path.write_text(text)
    with pytest.raises(RequestError, match=says):
        read_items(path)
    with pytest.raises(RequestError, match="cannot read"):
        read_items(tmp_path / "missing.jsonl")


def test_the_bundled_questions_are_those_that_the_generator_holds_out() -> None:
    import sidestream

    items = read_items(Path(sidestream.__file__).parent / "assets" / "arithmetic.jsonl")
    made = questions()
    assert [(item.question, item.answer) for item in items] == [(q["question"], q["answer"]) for q in made]
    assert len({item.question for item in items}) == len(items) == 100
