"""``sidestream eval`` with a server of a few lines: which examples stand before which question, and what is written."""

from __future__ import annotations

import json
import re
import socket
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from sidestream.cli.main import app
from sidestream.errors import ConfigError, RequestError, SidestreamError

PEOPLE = ("Ann", "Bob", "Cid", "Dee", "Eve")


class Answering(ThreadingHTTPServer):
    """Answers ``#### 5`` to everything, nothing to Dee and an error to Eve; keeps what it was asked."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.bodies: list[dict[str, Any]] = []
        self.failing = False

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def prompts(self) -> list[str]:
        return [body["prompt"] for body in self.bodies]


class Handler(BaseHTTPRequestHandler):
    server: Answering

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.bodies.append(body)
        asked = body["prompt"].rpartition("Question: ")[2]
        text = "who?" if asked.startswith("Dee") else " 2 + 3 = 5\n#### 5"
        choice = {"text": text, "finish_reason": "length" if text == "who?" else "stop"}
        answer = {"choices": [choice], "usage": {"completion_tokens": len(text)}}
        self._send(503 if self.server.failing and asked.startswith("Eve") else 200, answer)

    def do_GET(self) -> None:
        known = self.path == "/v1/models"
        self._send(200 if known else 404, {"data": [{"id": "small"}]} if known else {"detail": "Not Found"})

    def _send(self, status: int, body: dict[str, Any]) -> None:
        answer = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *args: object) -> None:
        return None


@pytest.fixture
def server() -> Iterator[Answering]:
    with Answering() as answering:
        thread = threading.Thread(target=answering.serve_forever)
        thread.start()
        yield answering
        answering.shutdown()
        thread.join()


def write(path: Path, people: tuple[str, ...]) -> Path:
    lines = [json.dumps({"question": f"{who} has?", "answer": f"{who}.\n#### 5"}) for who in people]
    path.write_text("\n".join(lines) + "\n")
    return path


def run(server: Answering, file: Path, *options: str) -> Result:
    result = CliRunner().invoke(app, ["eval", str(file), "--url", server.url, "--concurrency", "1", *options])
    if result.exception is not None:
        raise result.exception
    return result


def test_examples_from_the_front_are_not_asked(
    server: Answering, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["sidestream", "eval", "q.jsonl", "--api-key", "secret"])
    file, score = write(tmp_path / "q.jsonl", PEOPLE), tmp_path / "score.json"
    result = run(server, file, "--shots", "2", "--json", str(score))
    front = "Question: Ann has?\nAnswer: Ann.\n#### 5\n\nQuestion: Bob has?\nAnswer: Bob.\n#### 5\n\n"
    assert server.prompts() == [f"{front}Question: {who} has?\nAnswer:" for who in ("Cid", "Dee", "Eve")]
    assert f"examples: the first 2 of {file}, which are not asked; 3 questions" in result.stderr
    assert "2 of 3 right, accuracy 0.6667; 1 without a final answer, invalid rate 0.3333" in result.stdout
    found = json.loads(score.read_text())
    assert {"sidestream", "torch", "python"} <= set(found.pop("versions"))
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", found.pop("date"))
    assert found.pop("command") == "sidestream eval q.jsonl --api-key ..."
    assert {body["model"] for body in server.bodies} == {"small"}
    assert found == {
        "file": "q.jsonl",
        "max_tokens": 256,
        "chat": False,
        "shots": 2,
        "shots_file": "q.jsonl",
        "url": server.url,
        "model": "small",
        "items": 3,
        "correct": 2,
        "invalid": 1,
        "accuracy": 2 / 3,
        "invalid_rate": 1 / 3,
    }


def test_a_question_that_its_examples_hold_gets_another(server: Answering, tmp_path: Path) -> None:
    file, examples = write(tmp_path / "q.jsonl", ("Ann", "Eve")), write(tmp_path / "e.jsonl", ("Ann", "Bob", "Cid"))
    result = run(server, file, "--shots", "2", "--shots-file", str(examples))
    before = [[who for who in PEOPLE if f"Answer: {who}." in prompt] for prompt in server.prompts()]
    assert before == [["Bob", "Cid"], ["Ann", "Bob"]]
    assert "not asked" not in result.stderr
    with pytest.raises(RequestError, match="shots is 3, the limit is 2, the examples beside the question 'Ann has"):
        run(server, file, "--shots", "3", "--shots-file", str(examples))
    with pytest.raises(RequestError, match="leaves no question to ask; give --shots-file"):
        run(server, file, "--shots", "2")


def test_answers_are_written_as_they_come(server: Answering, tmp_path: Path) -> None:
    server.failing = True
    file, output = write(tmp_path / "q.jsonl", PEOPLE), tmp_path / "answers.jsonl"
    with pytest.raises(SidestreamError, match="answered 503"):
        run(server, file, "--output", str(output))
    kept = [json.loads(line) for line in output.read_text().splitlines()]
    keys = ("index", "correct", "found", "finish_reason", "tokens")
    assert [tuple(item[key] for key in keys) for item in kept] == [
        (0, True, "5", "stop", 17),
        (1, True, "5", "stop", 17),
        (2, True, "5", "stop", 17),
        (3, False, None, "length", 4),
    ]
    with pytest.raises(RequestError, match="cannot write"):
        run(server, file, "--output", str(tmp_path / "missing" / "answers.jsonl"))


def test_progress_is_told_without_a_terminal(server: Answering, tmp_path: Path) -> None:
    result = run(server, write(tmp_path / "q.jsonl", PEOPLE))
    assert result.stderr.splitlines()[-1] == "5 of 5 asked, 4 right"
    assert len(result.stderr.splitlines()) == 5


def test_an_engines_score_says_what_auto_became(tmp_path: Path) -> None:
    score, output = tmp_path / "score.json", tmp_path / "answers.jsonl"
    options = ["--limit", "1", "--max-tokens", "3", "--device", "cpu", "--json", str(score), "--output", str(output)]
    result = CliRunner().invoke(app, ["eval", *options])
    assert result.exit_code == 0, result.output
    found = json.loads(score.read_text())
    resolved = {key: found[key] for key in ("model", "device", "dtype", "cudagraph_mode")}
    assert resolved == {"model": "glm5-next-tiny", "device": "cpu", "dtype": "float32", "cudagraph_mode": "none"}
    (item,) = map(json.loads, output.read_text().splitlines())
    assert (item["finish_reason"], item["tokens"]) == ("length", 3)


def test_a_name_given_is_the_one_that_is_sent(server: Answering, tmp_path: Path) -> None:
    run(server, write(tmp_path / "q.jsonl", ("Ann",)), "--model", "org/large")
    assert [body["model"] for body in server.bodies] == ["org/large"]


def test_addresses_that_are_none_are_told_so(server: Answering, tmp_path: Path) -> None:
    file = write(tmp_path / "q.jsonl", PEOPLE)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    for url, error, says in (
        ("localhost:8000", ConfigError, "url is 'localhost:8000'; it must be like http://127.0.0.1:8000"),
        ("ftp://host", ConfigError, "url is 'ftp://host'; it must be like http://"),
        (f"http://127.0.0.1:{port}", SidestreamError, f"cannot connect to http://127.0.0.1:{port}: .*refused"),
        (
            f"{server.url}/api",
            SidestreamError,
            "answered 404: .*Not Found.*; is .*/api the address of an OpenAI server",
        ),
    ):
        with pytest.raises(error, match=says):
            run(server, file, "--url", url)
    assert server.bodies == []


@pytest.mark.parametrize("option", ["--output", "--json"])
@pytest.mark.parametrize("read", ["q.jsonl", "e.jsonl"])
def test_what_is_read_is_not_written_over(server: Answering, tmp_path: Path, option: str, read: str) -> None:
    questions, examples = write(tmp_path / "q.jsonl", PEOPLE), write(tmp_path / "e.jsonl", PEOPLE)
    before = (tmp_path / read).read_bytes()
    (tmp_path / "link").symlink_to(tmp_path / read)
    with pytest.raises(RequestError, match=rf"{option} is .*link, which is read; give another file"):
        run(server, questions, "--shots-file", str(examples), option, str(tmp_path / "link"))
    assert (tmp_path / read).read_bytes() == before
    with pytest.raises(RequestError, match=r"--json is .*new, which --output writes too"):
        run(server, questions, "--output", str(tmp_path / "new"), "--json", str(tmp_path / "new"))
    assert server.bodies == []


def test_nothing_at_once_is_refused(server: Answering, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="concurrency is 0, at least 1 is needed"):
        run(server, write(tmp_path / "q.jsonl", PEOPLE), "--concurrency", "0")
