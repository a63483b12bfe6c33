"""``sidestream bench throughput`` as a user calls it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from sidestream import LLM
from sidestream.cli.main import app
from sidestream.engine.bench.comparison import compare
from sidestream.engine.bench.throughput import run as run_jobs
from sidestream.engine.bench.workload import Job
from sidestream.engine.llm import bundled_model
from sidestream.errors import ConfigError, RequestError

SMALL = ("--device", "cpu", "--num-prompts", "5", "--input-len", "40", "--output-len", "6", "--num-warmups", "1")
CONFIG = str(bundled_model() / "config.json")


def run(*options: str) -> str:
    result = CliRunner().invoke(app, ["bench", "throughput", *options])
    if result.exception is not None:
        raise result.exception
    return result.stdout


def measured(folder: Path, *options: str) -> dict[str, Any]:
    text = run(*options, *SMALL, "--json", str(folder / "out.json"))
    found: dict[str, Any] = json.loads((folder / "out.json").read_text())
    assert text.count("requests in") == len(found["runs"])
    return found


def test_the_bundled_model(tmp_path: Path) -> None:
    found = measured(tmp_path, "--repeats", "3", "--max-num-seqs", "2")
    assert found["kind"] == "throughput"
    assert len(found["runs"]) == 3
    for each in found["runs"]:
        assert (each["requests"], each["completion_tokens"]) == (5, 30)
        assert 5 * 37 <= each["prompt_tokens"] <= 5 * 40
        assert each["output_tokens_per_s"] == pytest.approx(30 / each["seconds"])
        assert each["total_tokens_per_s"] == pytest.approx((30 + each["prompt_tokens"]) / each["seconds"])
        assert each["itl_ms"]["count"] == 5 * 5, "every token is seen"
        assert each["ttft_ms"]["max"] <= each["e2e_ms"]["max"] <= 1e3 * each["seconds"]
    rates = sorted(each["requests_per_s"] for each in found["runs"])
    assert found["repeats"]["requests_per_s"] == {"median": rates[1], "min": rates[0], "max": rates[2]}
    assert found["repeats"]["tpot_p90_ms"]["max"] == max(each["tpot_ms"]["p90"] for each in found["runs"])
    assert found["workload"]["dataset"] == "prose"
    assert found["workload"]["num_warmups"] == 1, "as bench serve spells it"
    assert found["compiled_after_ready"] == []
    assert {row.slower for row in compare(found, found).ratios} == {1.0}


@pytest.mark.parametrize("options", [("--dataset", "random-ids"), ("--tokenizer", str(bundled_model()))])
def test_a_config_alone(tmp_path: Path, options: tuple[str, ...]) -> None:
    found = measured(tmp_path, CONFIG, *options, "--repeats", "1", "--range-ratio", "0.5")
    (each,) = found["runs"]
    assert each["requests"] == 5
    assert 5 * 3 <= each["completion_tokens"] <= 5 * 9
    assert each["itl_ms"]["count"] == each["completion_tokens"] - 5


def test_answers_have_their_length_whatever_the_model_says() -> None:
    """A question that the bundled model answers in a few tokens; lengths of their own for each."""
    llm = LLM(device="cpu", enable_prefix_caching=False)
    found = run_jobs(llm, [Job("Question: What is 12 + 30?\nAnswer:", 40), Job((7, 8, 9), 3)])
    assert found.rates.completion_tokens == 43
    assert found.latencies.itl is not None
    assert found.latencies.itl.count == 41


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--num-prompts", "0"), "num_prompts is 0, at least 1"),
        (("--repeats", "0"), "repeats is 0, at least 1"),
        (("--num-warmups", "-1"), "num_warmups is -1, at least 0"),
        (("--range-ratio", "1"), "range_ratio is 1.0, allowed is 0 up to"),
        (("--dataset", "sharegpt"), "dataset is 'sharegpt'; allowed are prose, synthetic, random-ids"),
        (("--input-len", "1000000"), "max_position_embeddings"),
        (("--json", "no/such/a.json"), "cannot write the report no/such/a.json"),
        (("--tokenizer", "."), "tokenizer is ., and there is none in that folder"),
        ((CONFIG, "--device", "cpu"), "give --tokenizer FOLDER, or --dataset random-ids"),
    ],
)
def test_mistakes_are_named(options: tuple[str, ...], message: str) -> None:
    with pytest.raises((ConfigError, RequestError), match=message):
        run(*options)
