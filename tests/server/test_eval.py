"""``sidestream eval``: one score, whatever answers: an engine here, in every graph mode, or a server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from sidestream.cli.main import app
from sidestream.engine.bundled import bundled_questions
from sidestream.errors import RequestError, SidestreamError
from tests.server.live_server import LiveServer

ITEMS = 24


def run(folder: Path, *options: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The score and the answers."""
    result = CliRunner().invoke(
        app, ["eval", "--json", str(folder / "score.json"), "--output", str(folder / "items.jsonl"), *options]
    )
    if result.exception is not None:
        raise result.exception
    score = json.loads((folder / "score.json").read_text())
    lines = (folder / "items.jsonl").read_text().splitlines()
    assert f"{score['correct']} of {score['items']} right" in result.output
    return score, sorted(map(json.loads, lines), key=lambda item: item["index"])


@pytest.fixture(scope="module")
def offline(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    return run(tmp_path_factory.mktemp("offline"), "--limit", str(ITEMS), "--device", "cpu")


def test_the_bundled_model_knows_its_subject(offline: tuple[dict[str, Any], list[dict[str, Any]]]) -> None:
    score, items = offline
    assert score["items"] == ITEMS == len(items)
    assert score["accuracy"] >= 0.9
    assert score["correct"] == sum(item["correct"] for item in items)
    assert score["invalid"] == sum(item["found"] is None for item in items)


@pytest.mark.parametrize("options", [(), ("--concurrency", "1", "--limit", "6")])
def test_the_server_gives_the_same_answers(
    server: LiveServer, tmp_path: Path, offline: tuple[Any, list[dict[str, Any]]], options: tuple[str, ...]
) -> None:
    _, items = run(tmp_path, "--limit", str(ITEMS), "--url", server.url, *options)
    assert items == offline[1][: len(items)]
    assert len(items) == (6 if options else ITEMS)


@pytest.mark.parametrize("mode", ["none", "piecewise", "full"])
def test_every_graph_mode_gives_the_same_answers(
    tmp_path: Path, offline: tuple[Any, list[dict[str, Any]]], mode: str
) -> None:
    """Whole answers, so the same score; ``benchmarks/eval_modes.py`` asks more of the set."""
    options = ("--limit", "2", "--device", "sim", "--cudagraph-mode", mode, "--max-num-seqs", "2")
    score, items = run(tmp_path, *options)
    assert items == offline[1][:2]
    assert (score["items"], score["correct"]) == (2, sum(item["correct"] for item in offline[1][:2]))
    assert score["cudagraph_mode"] == mode


def test_examples_and_chats_are_asked_as_such(server: LiveServer, tmp_path: Path) -> None:
    score, items = run(tmp_path, "--limit", "4", "--shots", "2", "--url", server.url + "/v1")
    assert score["items"] == len(items) == 4
    third = json.loads(bundled_questions().read_text().splitlines()[2])
    assert items[0]["question"] == third["question"], "examples are not asked"
    assert (score["shots"], score["shots_file"]) == (2, "arithmetic.jsonl")
    score, _ = run(tmp_path, "--limit", "4", "--chat", "--url", server.url)
    assert score["correct"] >= 3


def test_what_cannot_be_asked_is_said(server: LiveServer, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="leaves no question"):
        run(tmp_path, "--shots", "100")
    with pytest.raises(RequestError, match="the limit is 100, the examples in "):
        run(tmp_path, "--shots", "101")
    with pytest.raises(SidestreamError, match=r"answered 400.*max_model_len"):
        run(
            tmp_path,
            "--limit",
            "1",
            "--url",
            server.url,
            "--max-tokens",
            "1",
            "--concurrency",
            "1",
            "--shots",
            "0",
            "--chat",
            *_too_long(tmp_path),
        )
    with pytest.raises(SidestreamError, match=r"cannot connect to http://127\.0\.0\.1:9"):
        run(tmp_path, "--limit", "1", "--url", "http://127.0.0.1:9")


def _too_long(folder: Path) -> tuple[str, ...]:
    """A question that no sequence can hold."""
    path = folder / "long.jsonl"
    path.write_text(json.dumps({"question": "a b " * 40000, "answer": "#### 1"}))
    return (str(path),)
