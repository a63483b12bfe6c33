"""Workloads: lengths as asked, the same for the same seed, and prompts that begin differently."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from sidestream.engine.bench.cutters import RatioCutter, TokenizerCutter
from sidestream.engine.bench.text_source import MadeUpWords, Prose, bundled_text
from sidestream.engine.bench.workload import FIRST_TOKEN, Workload
from sidestream.engine.llm import bundled_model
from sidestream.engine.tokenizer import load_tokenizer
from sidestream.errors import ConfigError

WORDS = load_tokenizer(bundled_model())


def count(text: str) -> int:
    assert WORDS is not None
    return len(WORDS(text).input_ids)


@pytest.mark.parametrize("dataset", ["prose", "synthetic"])
def test_text_is_cut_to_its_tokens(dataset: str) -> None:
    work = Workload(dataset=dataset, num_prompts=12, input_len=100, output_len=7)
    warm, jobs = work.jobs(cutter=TokenizerCutter(WORDS), vocab_size=None, warm_ups=3)
    assert (len(warm), len(jobs)) == (3, 12)
    for job in [*warm, *jobs]:
        assert isinstance(job.prompt, str)
        assert 97 <= count(job.prompt) <= 100
        assert job.output_len == 7
    beginnings = {str(job.prompt)[:30] for job in [*warm, *jobs]}
    assert len(beginnings) == 15, "prompts that begin alike would be found in a prefix cache"


def test_text_longer_than_its_source(tmp_path: Path) -> None:
    file = tmp_path / "short.txt"
    file.write_text("One two three four.\nFünf sechs sieben.\n", encoding="utf-8")
    work = Workload(dataset=str(file), num_prompts=9, input_len=64)
    _, jobs = work.jobs(cutter=TokenizerCutter(WORDS), vocab_size=None)
    for job in jobs:
        assert isinstance(job.prompt, str)
        assert 60 <= count(job.prompt) <= 64
        assert "\ufffd" not in job.prompt
        assert job.prompt.count("sieben") >= 1
    assert work.as_json()["dataset"] == "short.txt"


@pytest.mark.parametrize("dataset", ["prose", "synthetic", "random-ids"])
def test_seeds(dataset: str) -> None:
    def drawn(seed: int, warm_ups: int = 0) -> list[object]:
        work = Workload(dataset=dataset, num_prompts=5, input_len=40, output_len=20, range_ratio=0.5, seed=seed)
        return list(work.jobs(cutter=TokenizerCutter(WORDS), vocab_size=1000, warm_ups=warm_ups)[1])

    assert drawn(1) == drawn(1)
    assert drawn(1) == drawn(1, warm_ups=4), "a warm-up must not change what is measured"
    assert drawn(1) != drawn(2)


def test_lengths_are_spread_evenly() -> None:
    work = Workload(dataset="random-ids", num_prompts=2000, input_len=100, output_len=10, range_ratio=0.2)
    _, jobs = work.jobs(cutter=None, vocab_size=50)
    inputs, outputs = {len(job.prompt) for job in jobs}, {job.output_len for job in jobs}
    assert inputs == set(range(80, 121))
    assert outputs == {8, 9, 10, 11, 12}
    assert (work.longest_input, work.longest_output) == (120, 12)
    tokens = {token for job in jobs for token in job.prompt}
    assert tokens == set(range(FIRST_TOKEN, 50))


def test_passages_grow_at_their_end() -> None:
    for source in (Prose(bundled_text(), name="prose", seed=4), MadeUpWords(seed=4)):
        for number in (0, 7, 10**6):
            short, long = source.passage(number, 50), source.passage(number, 60_000)
            assert len(short) >= 50
            assert len(long) >= 60_000
            assert long.startswith(short)


def test_prose_begins_at_words() -> None:
    source = Prose("alpha beta\n gamma  delta", name="four", seed=0)
    assert {source.passage(n, 4) for n in range(4)} == {"alph", "beta", "gamm", "delt"}
    assert source.passage(0, 9) == source.passage(4, 9)


def test_synthetic_words_can_be_pronounced() -> None:
    text = MadeUpWords(seed=0).passage(0, 2000)
    words = re.findall(r"[a-z]+", text.lower())
    assert len(set(words)) > 100
    assert all(re.search("[aeiou]", word) for word in words)
    assert not any(re.search("[bcdfghjklmnpqrstvwxz]{5}", word) for word in words)


def test_ratio_cutter_follows_the_server() -> None:
    """A server that adds 12 tokens to every prompt and counts one for four characters."""
    cutter = RatioCutter.fitted((200, 62), (1000, 262))
    assert (cutter.tokens_a_character, cutter.extra) == (0.25, 12)
    text = cutter.cut(Prose(bundled_text(), name="prose", seed=0), 0, 112)
    assert 350 < len(text) <= 400
    assert cutter.cut(Prose("x" * 1000, name="no blanks", seed=0), 0, 112) == "x" * 400
    with pytest.raises(ConfigError, match="input_len is 12; this server adds about 12 tokens"):
        cutter.cut(MadeUpWords(seed=0), 0, 12)
    with pytest.raises(ConfigError, match="counts 5 tokens for 200 characters and 5 for 1000"):
        RatioCutter.fitted((200, 5), (1000, 5))


class _OneSpecial:
    """A tokenizer of one token a word behind a special one."""

    def __call__(self, text: str) -> object:
        class Ids:
            input_ids = (1, *(2 for _ in text.split()))

        return Ids()

    def decode(self, ids: tuple[int, ...], *, skip_special_tokens: bool) -> str:
        assert skip_special_tokens
        return " ".join("word" for token in ids if token == 2)


def test_special_tokens_count() -> None:
    cutter = TokenizerCutter(_OneSpecial())
    assert cutter.cut(MadeUpWords(seed=0), 0, 5) == "word word word word"
    with pytest.raises(ConfigError, match="input_len is 1, and no text has so few tokens"):
        cutter.cut(MadeUpWords(seed=0), 0, 1)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_prompts": 0}, "num_prompts is 0, at least 1"),
        ({"input_len": 0}, "input_len is 0, at least 1"),
        ({"output_len": -3}, "output_len is -3, at least 1"),
        ({"range_ratio": 1.0}, "range_ratio is 1.0, allowed is 0 up to"),
        ({"range_ratio": -0.1}, "range_ratio is -0.1"),
        ({"range_ratio": float("nan")}, "range_ratio is nan"),
        ({"dataset": "no such"}, "dataset is 'no such'; allowed are prose, synthetic, random-ids, or a text file"),
    ],
)
def test_bad_settings_are_named(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Workload(**settings)  # type: ignore[arg-type]


def test_bad_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text(" \n")
    (tmp_path / "bytes.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"empty\.txt holds no words"):
        Workload(dataset=str(tmp_path / "empty.txt")).source()
    with pytest.raises(ConfigError, match=r"cannot read the dataset .*bytes\.txt as UTF-8 text"):
        Workload(dataset=str(tmp_path / "bytes.txt")).source()
    with pytest.raises(ConfigError, match="vocab_size is 5, more than 5"):
        Workload(dataset="random-ids").jobs(cutter=None, vocab_size=5)
