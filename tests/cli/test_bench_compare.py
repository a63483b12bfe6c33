"""``sidestream bench compare``: ratios of two result files, and what is refused."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from sidestream.cli.main import app
from sidestream.engine.bench.comparison import compare
from sidestream.errors import ConfigError

SUMMARY = {"count": 4, "mean": 2.0, "min": 1.0, "p50": 2.0, "p90": 3.0, "p99": 4.0, "max": 4.5}
SPREAD = {"median": 8.0, "min": 7.0, "max": 9.0}
LATENCY: dict[str, Any] = {
    "kind": "latency",
    "model": "tiny",
    "decode": [{"batch": 1, "context": 40, "median": 2.0}, {"batch": 3, "context": 40, "median": 4.0}],
    "prefill": [{"tokens": 96, "tokens_per_s": 1000.0}],
}
THROUGHPUT: dict[str, Any] = {
    "kind": "throughput",
    "model": "tiny",
    "workload": {"num_prompts": 8, "input_len": 100},
    "repeats": {
        "requests_per_s": SPREAD,
        "output_tokens_per_s": SPREAD,
        "total_tokens_per_s": SPREAD,
        "ttft_p50_ms": SPREAD,
        "itl_p99_ms": SPREAD,
    },
}
SERVE: dict[str, Any] = {
    "kind": "serve",
    "model": "tiny",
    "failed": 0,
    "workload": {"num_prompts": 8, "request_rate": "inf"},
    "requests_per_s": 5.0,
    "output_tokens_per_s": 320.0,
    "total_tokens_per_s": 900.0,
    "goodput": {"objectives_ms": {"ttft": 200.0}, "requests": 4, "requests_per_s": 2.5},
    "ttft_ms": SUMMARY,
    "tpot_ms": SUMMARY,
    "itl_ms": SUMMARY,
    "e2e_ms": SUMMARY,
}
PREFIX: dict[str, Any] = {
    "kind": "shared-prefix",
    "model": "tiny",
    "rows": [{"cache": True, "first_token_ms": 3.0, "first_token_p90_ms": 4.0, "tokens_a_second": 100.0}],
}


def changed(report: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return copy.deepcopy(report) | changes


def run(first: Path, second: Path, *options: str) -> str:
    result = CliRunner().invoke(app, ["bench", "compare", str(first), str(second), *options])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.stdout


def compared(folder: Path, before: dict[str, Any], after: dict[str, Any], *options: str) -> str:
    """What is printed of two reports, without the table's breaks within a line."""
    (folder / "before.json").write_text(json.dumps(before))
    (folder / "after.json").write_text(json.dumps(after))
    return run(folder / "before.json", folder / "after.json", *options)


def test_slower_is_above_one_for_times_and_for_rates() -> None:
    other = changed(LATENCY)
    other["decode"][0]["median"] = 3.0
    other["prefill"][0]["tokens_per_s"] = 500.0
    found = {row.name: row for row in compare(LATENCY, other).ratios}
    assert found["batch 1, context 40"].slower == 1.5
    assert found["batch 3, context 40"].slower == 1.0
    assert found["prefill of 96"].slower == 2.0
    assert found["prefill of 96"].unit == "tokens/s"


def test_only_what_both_measured() -> None:
    other = changed(LATENCY, decode=LATENCY["decode"][:1], prefill=[])
    assert [row.name for row in compare(LATENCY, other).ratios] == ["batch 1, context 40"]
    nothing = changed(LATENCY, decode=[], prefill=[])
    with pytest.raises(
        ConfigError, match=r"no figure in common; the first has batch 1, context 40, .*; the second has none"
    ):
        compare(LATENCY, nothing)


def test_cases_that_only_one_has_are_named(tmp_path: Path) -> None:
    other = changed(LATENCY, prefill=[{"tokens": 128, "tokens_per_s": 1000.0}])
    found = compare(LATENCY, other)
    assert (found.only_first, found.only_second) == (("prefill of 96",), ("prefill of 128",))
    text = compared(tmp_path, LATENCY, other)
    assert "only before.json has prefill of 96\n" in text
    assert "only after.json has prefill of 128\n" in text


def test_means_are_compared_where_both_have_them() -> None:
    rows = [row | {"mean": 3.0} for row in LATENCY["decode"]]
    with_means = changed(LATENCY, decode=rows)
    assert {row.name for row in compare(with_means, with_means).ratios} >= {"batch 1, context 40, mean"}
    assert "batch 1, context 40, mean" in compare(LATENCY, with_means).only_second
    assert "ttft mean" in {row.name for row in compare(SERVE, SERVE).ratios}
    rows = [PREFIX["rows"][0] | {"first_token_mean_ms": 2.0, "first_token_p99_ms": None}]
    names = [row.name for row in compare(PREFIX | {"rows": rows}, PREFIX | {"rows": rows}).ratios]
    assert names == ["cache on, ttft mean", "cache on, ttft p50", "cache on, ttft p90", "cache on, tokens"]


def test_reports_of_latency_that_name_no_kind() -> None:
    old = {name: value for name, value in LATENCY.items() if name != "kind"}
    assert len(compare(old, LATENCY).ratios) == 3


def test_throughput() -> None:
    other = changed(THROUGHPUT, workload={"num_prompts": 8, "input_len": 200})
    other["repeats"]["output_tokens_per_s"] = {"median": 16.0, "min": 1.0, "max": 99.0}
    other["repeats"]["itl_p99_ms"] = {"median": 10.0, "min": 1.0, "max": 99.0}
    found = compare(THROUGHPUT, other)
    slower = {row.name: row.slower for row in found.ratios}
    assert slower == {
        "requests/s": 1.0,
        "output tokens/s": 0.5,
        "tokens/s": 1.0,
        "ttft p50": 1.0,
        "itl p99": 1.25,
    }
    assert found.differences == ("input_len: 100 and 200",)


def test_serve() -> None:
    other = changed(SERVE, tpot_ms=None, total_tokens_per_s=None, failed=3)
    other["ttft_ms"] = SUMMARY | {"p90": 6.0}
    other["goodput"] = changed(SERVE["goodput"], requests_per_s=0.0)
    found = compare(SERVE, other)
    slower = {row.name: row.slower for row in found.ratios}
    assert slower["ttft p90"] == 2.0
    assert slower["goodput at ttft 200 ms"] is None
    assert "tokens/s" not in slower
    assert "tpot p50" not in slower
    assert {"requests/s", "output tokens/s", "ttft p50", "ttft p99", "itl p50", "e2e p99"} <= slower.keys()
    assert found.differences == ("3 requests of the second failed, and are in no figure",)


def test_goodput_of_other_objectives_is_no_common_figure() -> None:
    other = changed(SERVE, goodput={"objectives_ms": {"ttft": 300.0}, "requests": 4, "requests_per_s": 2.5})
    assert not any(row.name.startswith("goodput") for row in compare(SERVE, other).ratios)


def test_prefix() -> None:
    other = changed(PREFIX, rows=[PREFIX["rows"][0] | {"first_token_ms": 6.0}, PREFIX["rows"][0] | {"cache": False}])
    assert {row.name: row.slower for row in compare(PREFIX, other).ratios} == {
        "cache on, ttft p50": 2.0,
        "cache on, ttft p90": 1.0,
        "cache on, tokens": 1.0,
    }


def test_kinds_do_not_mix() -> None:
    with pytest.raises(ConfigError, match="the first is a report of `bench throughput`, the second of `bench serve`"):
        compare(THROUGHPUT, SERVE)
    with pytest.raises(ConfigError, match="the first is a report of `bench shared-prefix`, the second of `bench multi"):
        compare(PREFIX, PREFIX | {"kind": "multi-turn"})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "holds no JSON object"),
        ("{", "cannot read the report"),
        ("{}", "its kind is None, known are latency, throughput, serve, shared-prefix, multi-turn"),
        ('{"kind": "eval"}', "its kind is 'eval'"),
        ('{"kind": ["serve"]}', r"its kind is \['serve'\]"),
        ('{"kind": "serve"}', "not a report of `sidestream bench serve --json`: KeyError"),
        ('{"decode": 3}', "not a report of `sidestream bench latency --json`: TypeError"),
    ],
)
def test_what_is_no_report_is_named(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(ConfigError, match=message):
        run(tmp_path / "a.json", tmp_path / "a.json")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read the report .*nowhere\.json"):
        run(tmp_path / "nowhere.json", tmp_path / "nowhere.json")


def test_the_table(tmp_path: Path) -> None:
    other = changed(THROUGHPUT, model="other")
    other["repeats"]["ttft_p50_ms"] = {"median": 19123.4, "min": 1.0, "max": 99.0}
    other["repeats"]["requests_per_s"] = {"median": 20.0, "min": 1.0, "max": 99.0}
    text = compared(tmp_path, THROUGHPUT, other, "--json", str(tmp_path / "ratios.json"))
    assert "bench throughput" in text
    assert "before.json" in text
    assert "after.json" in text
    cells = [[cell.strip() for cell in line.split("│")] for line in text.splitlines()]
    assert ["", "ttft p50", "8 ms", "19,123 ms", "2390.425 x slower", ""] in cells
    assert ["", "requests/s", "8 requests/s", "20 requests/s", "2.500 x faster", ""] in cells
    assert text.count("the same") == 3
    found = json.loads((tmp_path / "ratios.json").read_text())
    assert (found["kind"], found["of"]) == ("compare", "throughput")
    assert [Path(found[side]).name for side in ("first", "second")] == ["before.json", "after.json"]
    slower = {figure["name"]: figure["slower"] for figure in found["figures"]}
    assert slower["requests/s"] == 0.4
    assert slower["ttft p50"] == pytest.approx(2390.425)
    assert found["differences"] == ["model: tiny and other"]
    assert "they differ in model: tiny and other" in text
