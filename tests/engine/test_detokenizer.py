import random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sidestream.core.request import FinishReason
from sidestream.core.sampling_params import SamplingParams
from sidestream.engine.detokenizer import REPLACEMENT, IncrementalDetokenizer
from tests.engine.tiny_tokenizers import CORPUS, byte_fallback, byte_level

TEXTS = st.lists(
    st.one_of(st.sampled_from(CORPUS), st.text(alphabet="ab STOP\n🙂é北👩\u200dש<>", max_size=12)), max_size=4
).map("".join)


def run(detokenizer: IncrementalDetokenizer, ids: list[int]) -> list[str]:
    """Pieces up to a stop string or the end, the rest last."""
    pieces = []
    for token in ids:
        pieces.append(detokenizer.push(token))
        if detokenizer.stop_string is not None:
            return [*pieces, detokenizer.finish(FinishReason.STOP)]
    return [*pieces, detokenizer.finish(FinishReason.LENGTH)]


@settings(deadline=None)
@given(TEXTS)
def test_stream_joined_is_the_text_and_shows_no_broken_character(text: str) -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode(text)
    pieces = run(IncrementalDetokenizer(tokenizer, SamplingParams()), ids)
    assert "".join(pieces) == text == tokenizer.decode(ids)
    assert pieces[-1] == "" or text.endswith(REPLACEMENT)
    assert not any(REPLACEMENT in piece for piece in pieces)


@settings(deadline=None)
@given(st.lists(st.integers(0, 299), max_size=60), st.booleans())
def test_any_tokens_give_the_tokenizer_s_own_decoding(ids: list[int], skip: bool) -> None:
    tokenizer = byte_level()
    pieces = run(IncrementalDetokenizer(tokenizer, SamplingParams(skip_special_tokens=skip)), ids)
    whole = tokenizer.decode(ids, skip_special_tokens=skip)
    text = "".join(pieces)
    if text != whole:  # only a long run of broken bytes may be counted differently
        assert text.replace(REPLACEMENT, "") == whole.replace(REPLACEMENT, "")
        assert REPLACEMENT * 8 in whole


def test_each_character_appears_with_its_last_byte() -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode("🙂")
    assert len(ids) > 1
    detokenizer = IncrementalDetokenizer(tokenizer, SamplingParams())
    assert [detokenizer.push(token) for token in ids] == [""] * (len(ids) - 1) + ["🙂"]


def test_text_before_an_unfinished_character_is_not_held() -> None:
    tokenizer = byte_level()
    part = tokenizer.encode("🙂")[0]
    detokenizer = IncrementalDetokenizer(tokenizer, SamplingParams())
    assert [detokenizer.push(token) for token in (*tokenizer.encode("a"), part)] == ["a", ""]
    assert detokenizer.finish(FinishReason.LENGTH) == REPLACEMENT == tokenizer.decode([part])


def test_a_real_character_survives_after_a_long_run_of_broken_bytes() -> None:
    tokenizer = byte_level()
    broken = tokenizer.convert_tokens_to_ids(pre_byte(0xFF))
    ids = [broken] * 100 + tokenizer.encode("🙂 a")
    text = "".join(run(IncrementalDetokenizer(tokenizer, SamplingParams()), ids))
    assert text.endswith("🙂 a")
    assert text.count(REPLACEMENT) == 100


class BytesTokenizer:
    """A tokenizer without a fast backend, whose tokens are any bytes."""

    def __init__(self, *tokens: bytes) -> None:
        self.tokens = tokens

    def decode(self, ids: list[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> str:
        assert not clean_up_tokenization_spaces
        return b"".join(self.tokens[i] for i in ids).decode("utf-8", errors="replace")


@settings(deadline=None)
@given(st.lists(st.integers(0, 4), max_size=80))
@example([0] * 60)
@example([0, 4] * 40 + [1, 2, 3])
def test_tokens_of_letters_and_broken_bytes_show_each_letter_once(ids: list[int]) -> None:
    tokenizer = BytesTokenizer(b"a\xf0", b"\xf0", b"\x9f\x99\x82", b"b", b"")
    pieces = run(IncrementalDetokenizer(tokenizer, SamplingParams()), ids)
    whole = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert "".join(pieces) == whole


def pre_byte(byte: int) -> str:
    """The printable character that stands for a byte in a byte-level vocabulary (0xA1 to 0xFF: itself)."""
    return chr(byte)


def test_special_tokens_are_skipped_or_shown() -> None:
    tokenizer = byte_level()
    ids = [*tokenizer.encode("a"), *[tokenizer.eos_token_id] * 40, *tokenizer.encode("b")]
    assert "".join(run(IncrementalDetokenizer(tokenizer, SamplingParams()), ids)) == "ab"
    shown = run(IncrementalDetokenizer(tokenizer, SamplingParams(skip_special_tokens=False)), ids)
    assert "".join(shown) == "a" + "<eos>" * 40 + "b"


@settings(deadline=None)
@given(
    TEXTS,
    st.lists(st.text(alphabet="ab STOP🙂é", min_size=1, max_size=5), min_size=1, max_size=3),
    st.booleans(),
    st.integers(0, 6),
)
def test_stop_strings_cut_where_the_first_token_completes_one(
    text: str, stops: list[str], include: bool, min_tokens: int
) -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode(text)
    params = SamplingParams(stop=stops, include_stop_str_in_output=include, min_tokens=min_tokens, max_tokens=None)
    detokenizer = IncrementalDetokenizer(tokenizer, params)
    shown = "".join(run(detokenizer, ids))

    done = ""
    for count in range(1, len(ids) + 1):
        before, done = done, tokenizer.decode(ids[:count]).rstrip(REPLACEMENT)
        found = [
            (done.find(stop, max(0, len(before) - len(stop) + 1)), order, stop) for order, stop in enumerate(stops)
        ]
        found = [match for match in found if match[0] >= 0]
        if found and count > min_tokens:
            start, _, stop = min(found)
            assert shown == done[: start + len(stop) if include else start]
            assert detokenizer.stop_string == stop
            return
    assert detokenizer.stop_string is None
    assert shown == text


def test_text_held_for_a_stop_string_is_flushed_when_it_does_not_come() -> None:
    tokenizer = byte_level()
    detokenizer = IncrementalDetokenizer(tokenizer, SamplingParams(stop=["STOP"]))
    ids = tokenizer.encode("so STO")
    pieces = [detokenizer.push(token) for token in ids]
    assert "".join(pieces) == "so "
    assert detokenizer.finish(FinishReason.LENGTH) == "STO"


@pytest.mark.parametrize(("min_tokens", "text"), [(0, " is L"), (3, " is Lees")])
def test_a_stop_string_within_min_tokens_is_passed_by(min_tokens: int, text: str) -> None:
    tokenizer = byte_fallback()
    ids = tokenizer.convert_tokens_to_ids(["▁is", "▁Lee", "s", "e", "e"])
    prompt = tokenizer.convert_tokens_to_ids(["▁Lee"])
    params = SamplingParams(stop="e", min_tokens=min_tokens)
    detokenizer = IncrementalDetokenizer(tokenizer, params, prompt_token_ids=prompt)
    assert "".join(run(detokenizer, ids)) == text


def test_a_leading_space_depends_on_whether_there_is_a_prompt() -> None:
    tokenizer = byte_fallback()
    ids = tokenizer.convert_tokens_to_ids(["▁is", "▁Lee", "."])
    alone = run(IncrementalDetokenizer(tokenizer, SamplingParams()), ids)
    assert "".join(alone) == "is Lee." == tokenizer.decode(ids)
    after = IncrementalDetokenizer(tokenizer, SamplingParams(), prompt_token_ids=ids)
    assert "".join(run(after, ids)) == " is Lee."


def test_byte_fallback_keeps_spaces_and_characters_over_any_window() -> None:
    tokenizer = byte_fallback()
    rng = random.Random(0)
    for _ in range(50):
        text = "".join(rng.choice([" is", " Lee", "a", "é", "北", "🙂", " ", "."]) for _ in range(60)).strip()
        ids = tokenizer.encode(text, add_special_tokens=False)
        ids = [t for token in ids for t in ([token, tokenizer.eos_token_id] if rng.random() < 0.1 else [token])]
        pieces = run(IncrementalDetokenizer(tokenizer, SamplingParams()), ids)
        assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("kind", ["text", "special", "broken"])
def test_cost_is_linear_in_the_output(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = byte_level()
    repeated = {"special": tokenizer.eos_token_id, "broken": tokenizer.convert_tokens_to_ids(pre_byte(0xFF))}
    ids = [repeated[kind]] * 8_000 if kind in repeated else tokenizer.encode(CORPUS[0] * 400)
    assert len(ids) >= 8_000

    def tokens_decoded(count: int) -> int:
        detokenizer = IncrementalDetokenizer(tokenizer, SamplingParams(stop=["never"]))
        decode, decoded = detokenizer._decode, 0

        def counting(tokens: list[int]) -> str:
            nonlocal decoded
            decoded += len(tokens)
            return decode(tokens)

        monkeypatch.setattr(detokenizer, "_decode", counting)
        for token in ids[:count]:
            detokenizer.push(token)
        return decoded

    assert tokens_decoded(8_000) < 10 * tokens_decoded(1_000), "decoding everything anew would be 64 times as many"
