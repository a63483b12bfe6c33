"""The bundled checkpoint's held-out questions through every way to ask them: one score, and the same answers.

    python benchmarks/eval_modes.py --json benchmarks/results/eval-DATE.json

The plain CPU engine and a live server get every question; the simulated device, many times slower, the first ones in
each graph mode. The result is written again after each part; the exit code is 1 if any answer differs.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

import torch

from sidestream import __version__
from sidestream.engine.bench.load.child_server import child_server

COMMAND = [sys.executable, "-m", "sidestream.cli.main"]
MODES = ("none", "piecewise", "full", "full_and_piecewise")


def ask(*options: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """One run of ``sidestream eval``: its score, and its answers in order of the questions."""
    with tempfile.TemporaryDirectory() as folder:
        score, answers = Path(folder) / "score.json", Path(folder) / "answers.jsonl"
        began = time.perf_counter()
        subprocess.run([*COMMAND, "eval", "--json", str(score), "--output", str(answers), *options], check=True)
        found = json.loads(score.read_text()) | {"seconds": round(time.perf_counter() - began, 1)}
        lines = [json.loads(line) for line in answers.read_text().splitlines()]
    return found, sorted(lines, key=lambda line: int(line["index"]))


def runs(simulated: int, sequences: int) -> Iterator[tuple[str, dict[str, Any], list[dict[str, Any]]]]:
    """Name, score and answers of each part, the reference first."""
    yield "engine, CPU", *ask("--device", "cpu")
    with child_server(["--device", "cpu"], on_line=print) as address:
        yield "server, CPU, 16 requests at once", *ask("--url", address)
        yield "server, CPU, one request at a time", *ask("--url", address, "--concurrency", "1")
    for mode in MODES if simulated else ():
        options = ("--device", "sim", "--cudagraph-mode", mode, "--max-num-seqs", str(sequences))
        yield f"engine, simulated device, {mode.upper()}", *ask(*options, "--limit", str(simulated))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--json", type=Path, help="write the result there")
    parser.add_argument("--simulated", type=int, default=8, help="questions in each graph mode (default %(default)s)")
    parser.add_argument(
        "--sequences", type=int, default=8, help="at once on the simulated device (default %(default)s)"
    )
    options = parser.parse_args()
    result: dict[str, Any] = {
        "date": date.today().isoformat(),
        "command": " ".join(["python", *sys.argv]),
        "sidestream": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "model": "glm5-next-tiny, held-out arithmetic (sidestream/assets/arithmetic.jsonl)",
        "runs": {},
    }
    texts: list[str] | None = None
    for name, score, answers in runs(options.simulated, options.sequences):
        found = [answer["text"] for answer in answers]
        texts = found if texts is None else texts
        kept = ("items", "correct", "invalid", "accuracy", "invalid_rate", "seconds")
        same = sum(mine == reference for mine, reference in zip(found, texts, strict=False))
        result["runs"][name] = {key: score[key] for key in kept} | {"same_text_as_engine": same}
        print(f"{name}: {score['correct']} of {score['items']} right, {same} texts as the engine's", flush=True)
        if options.json is not None:
            options.json.write_text(json.dumps(result, indent=1) + "\n")
    if any(run["same_text_as_engine"] != run["items"] for run in result["runs"].values()):
        sys.exit("answers differ")


if __name__ == "__main__":
    main()
