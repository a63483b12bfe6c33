"""lm-eval's own clients against a live server, on tasks that stand beside this file."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sidestream.engine.llm import bundled_model
from tests.server.live_server import LiveServer

TASKS = Path(__file__).parent / "lm_eval_tasks"


def evaluate(server: LiveServer, folder: Path, kind: str, path: str, tasks: str, *options: str) -> dict[str, Any]:
    """Run lm-eval in a process of its own; the results by task."""
    for task in TASKS.glob("*.yaml"):
        text = task.read_text().replace("DATA", str(TASKS / "arithmetic.jsonl"))
        (folder / task.name).write_text(text)
    arguments = {
        "model": "glm5-next-tiny",
        "base_url": server.url + path,
        "num_concurrent": 4,
        "max_retries": 1,
        "tokenizer": str(bundled_model()),
        "tokenizer_backend": "huggingface",
    }
    command = [sys.executable, "-m", "lm_eval", "run", "--model", kind, "--tasks", tasks, "--include_path", str(folder)]
    command += ["--model_args", ",".join(f"{key}={value}" for key, value in arguments.items())]
    command += ["--output_path", str(folder / "results.json"), *options]
    environment = os.environ | {"HF_HOME": str(folder), "HF_HUB_OFFLINE": "1", "OPENAI_API_KEY": "any"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    (written,) = folder.glob("**/results*.json")
    results: dict[str, Any] = json.loads(written.read_text())["results"]
    return results


def test_local_completions_scores_and_generates(server: LiveServer, tmp_path: Path) -> None:
    tasks = "arithmetic_choice,arithmetic_answer"
    results = evaluate(server, tmp_path, "local-completions", "/v1/completions", tasks, "--batch_size", "4")
    assert results["arithmetic_choice"]["acc,none"] == 1.0
    assert results["arithmetic_answer"]["exact_match,none"] == 1.0


def test_local_chat_completions_generates(server: LiveServer, tmp_path: Path) -> None:
    path = "/v1/chat/completions"
    results = evaluate(server, tmp_path, "local-chat-completions", path, "arithmetic_answer", "--apply_chat_template")
    assert results["arithmetic_answer"]["exact_match,none"] == pytest.approx(1.0)
