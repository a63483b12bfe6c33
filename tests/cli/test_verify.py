"""``sidestream verify`` as a user calls it."""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner, Result

from sidestream.attention.latent import PagedLatentAttention
from sidestream.cli.main import app
from sidestream.cli.verify import show
from sidestream.core.cudagraph_mode import CUDAGraphMode
from sidestream.core.forward_context import get_forward_context
from sidestream.engine.verify import verification
from sidestream.engine.verify.engines import NONE, PIECEWISE, VARIANTS
from sidestream.engine.verify.report import SCHEDULES, Cell, Difference, Place, Report, Rule, Schedule
from sidestream.errors import CheckpointError, SidestreamError
from tests.tiny_models import build_oracle, next_layers, save_checkpoint

SMALL = ("--prompts", "2", "--tokens", "3", "--max-num-seqs", "2")


def run(*args: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "sidestream.cli.main", "verify", *args]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == code, result.stdout + result.stderr
    assert "Traceback" not in result.stderr
    return result


def invoke(*args: str) -> Result:
    """The same without a new process; a known error is what ``main`` would print."""
    return CliRunner().invoke(app, ["verify", *args], env={"COLUMNS": "200"})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    oracle = build_oracle("glm5_next", 3, **next_layers("KDS"))
    return save_checkpoint(oracle, tmp_path_factory.mktemp("tiny"))


def printed(report: Report) -> str:
    out = io.StringIO()
    show(report, Console(file=out, width=1000))
    return out.getvalue()


def rows_of(text: str) -> dict[str, list[str]]:
    """Cells of the printed table's body by their row's name."""
    lines = [line.split("│")[1:-1] for line in text.splitlines() if line.startswith("│")]
    return {line[0].strip(): [cell.strip() for cell in line[1:]] for line in lines}


def rows_from_json(report: Any) -> dict[str, list[str]]:
    """The same cells from the JSON alone."""
    rows: dict[str, list[str]] = {}
    steps: dict[str, dict[str, int]] = {}
    for cell in report["cells"]:
        compared, generated, differing = (
            cell[key] for key in ("compared_tokens", "generated_tokens", "differing_prompts")
        )
        if cell["error"]:
            text = "failed"
        elif cell["difference"]:
            text = f"DIFFERS in {differing} prompt" + ("s" if differing > 1 else "")
        elif cell["rule"] == "reference":
            text = f"reference, {generated} tokens"
        elif cell["rule"] == "bitwise":
            text = f"same bits, {compared} tokens"
        else:
            early = f", {cell['prompts_ended_by_margin']} ended early" if cell["prompts_ended_by_margin"] else ""
            text = f"within {cell['largest_logprob_difference']:.1g}, {compared} of {generated} tokens{early}"
        rows.setdefault(f"{cell['prefill']}, {cell['batching']}", []).append(text)
        counts = steps.setdefault(cell["engine"], {})
        for mode, count in cell["steps"].items():
            counts[mode] = counts.get(mode, 0) + count
    rows["steps"] = [", ".join(f"{n} {mode}" for mode, n in sorted(counts.items())) for counts in steps.values()]
    if report["hazards"]:
        rows["hazards"] = [
            str(len(report["hazards"][engine])) if engine in report["hazards"] else "" for engine in steps
        ]
    return rows


def cells_of(place: int, schedule: Schedule) -> list[Cell]:
    """A row of a matrix in which much went wrong."""
    reference = Cell("NONE", schedule, Rule.REFERENCE, generated=48, steps={"none": 4})
    within = Cell("NONE", schedule, Rule.BOUND, compared=40 + place, generated=48, spread=0.0123, narrow=place)
    difference = Difference(3, 2, (5, 5), (-1.0, -1.5), 0.5, Place("layer 7 [red] did it", 2, 7))
    same = Cell("FULL", schedule, Rule.BITWISE, compared=48, steps={"none": 1, "full": 3}, fallbacks={"odd": 1})
    differs = Cell("FULL", schedule, Rule.BITWISE, differing=place - 1, difference=difference)
    raised = Cell("plain CPU", schedule, Rule.BOUND, error="RuntimeError: [bold]no[/bold] memory")
    return [within if place else reference, differs if place > 1 else same, raised]


MIXED = Report(
    model="a folder",
    device="the device",
    simulated=True,
    dtype="bfloat16",
    tokens=3,
    margin=0.05,
    seed=0,
    max_num_seqs=4,
    chunk=7,
    prompt_lengths=(4, 30),
    index_topk=8,
    selecting=1,
    cells=tuple(cell for place, schedule in enumerate(SCHEDULES) for cell in cells_of(place, schedule)),
    hazards={"NONE": (), "FULL": ("a read", "a write")},
)


def test_table_and_json_say_the_same() -> None:
    text, as_json = printed(MIXED), json.loads(json.dumps(MIXED.as_json()))
    assert rows_of(text) == rows_from_json(as_json)
    assert len(as_json["cells"]) == 12
    assert as_json["cells"][7]["difference"]["first_differing_layer"] == 7
    assert as_json["cells"][7]["difference"]["first_differing_step"] == 2
    assert not as_json["passed"]
    for words in (
        "FULL, chunked, alone: prompt 3, step 2: log-probability of token 5 off by 0.5 (margin 0.5); layer 7 [red]",
        "plain CPU, chunked, batched: RuntimeError: [bold]no[/bold] memory",
        "FULL: hazard: a write",
        "FULL: 2 steps without a graph: odd",
        "1 of them longer than index_topk 8",
        "bound 0.05",
        "8 problems",
    ):
        assert words in text


@pytest.mark.parametrize("spoil", ["difference", "error", "hazards"])
def test_anything_wrong_alone_fails_the_report(spoil: str) -> None:
    good = replace(
        MIXED, cells=tuple(replace(c, difference=None, error=None) for c in MIXED.cells), hazards={"FULL": ()}
    )
    assert good.passed
    assert "the same tokens in every mode" in printed(good)
    if spoil == "hazards":
        bad = replace(good, hazards=MIXED.hazards)
    else:
        worst = replace(good.cells[-1], **{spoil: getattr(MIXED.cells[7 if spoil == "difference" else 2], spoil)})
        bad = replace(good, cells=(*good.cells[:-1], worst))
    assert not bad.passed
    assert "the same tokens in every mode" not in printed(bad)


def test_json_alone_on_standard_output(folder: Path) -> None:
    result = run(str(folder), "--device", "cpu", "--seed", "5", "--margin", "0.002", *SMALL, "--json")
    report = json.loads(result.stdout)
    assert report["passed"] is True
    assert (report["simulated"], report["dtype"], report["seed"]) == (False, "float32", 5)
    assert (report["tokens"], report["margin"], report["max_num_seqs"]) == (3, 0.002, 2)
    assert (len(report["prompt_lengths"]), report["prompts_longer_than_index_topk"]) == (2, 1)
    assert [cell["compared_tokens"] for cell in report["cells"]] == [0, 6, 6, 6]
    assert all(cell["largest_logprob_difference"] < 1e-4 for cell in report["cells"])
    assert "NONE, chunked, batched" in result.stderr
    assert "more" in result.stderr


def test_the_table_of_the_bundled_checkpoint() -> None:
    text = invoke("--device", "cpu", *SMALL).stdout
    rows = rows_of(text)
    assert list(rows) == [*(str(schedule) for schedule in SCHEDULES), "steps"]
    assert rows["one shot, alone"] == ["reference, 6 tokens"]
    assert "glm5-next-tiny" in text
    assert "1 of them longer than index_topk 64" in text
    assert text.endswith("the same tokens under every schedule\n")


def test_a_config_alone_is_enough_with_dummy_weights(folder: Path, tmp_path: Path) -> None:
    shutil.copy(folder / "config.json", tmp_path)
    command = (str(tmp_path), "--device", "cpu", "--dtype", "bfloat16", *SMALL, "--json")
    assert isinstance(invoke(*command).exception, CheckpointError)
    report = json.loads(invoke(*command, "--load-format", "dummy").stdout)
    assert (report["passed"], report["dtype"], report["margin"]) == (True, "bfloat16", 0.125)


def test_a_seeded_fault_exits_with_one_and_names_step_and_layer(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    attend = PagedLatentAttention.attend

    def wrong(self: PagedLatentAttention, layer: int, *args: Any, **kw: Any) -> torch.Tensor:
        out, context = attend(self, layer, *args, **kw), get_forward_context()
        decode_in_pieces = context.mode is CUDAGraphMode.PIECEWISE and context.inputs.uniform
        return out * 1.5 if layer == 1 and decode_in_pieces else out

    monkeypatch.setattr(PagedLatentAttention, "attend", wrong)
    monkeypatch.setitem(VARIANTS, "sim", (NONE, PIECEWISE))
    monkeypatch.setattr(verification, "SCHEDULES", SCHEDULES[:1])
    monkeypatch.setattr("sidestream.cli.verify.SCHEDULES", SCHEDULES[:1])
    result = invoke(str(folder), "--device", "sim", *SMALL, "--tokens", "2")
    assert result.exit_code == 1
    assert "PIECEWISE, one shot, alone: prompt 0, step 1: " in result.stdout
    assert "layer 1 (sparse mla, leader) is the first that differs, at step 1" in result.stdout
    assert "1 problem\n" in result.stdout
    assert "running it again to find the layer" in result.stderr


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--tokens", "0"), "tokens is 0, at least 1 is needed"),
        (("--prompts", "1"), "prompts is 1, at least 2"),
        (("--margin", "-1"), "margin is -1.0, it must be a finite number of nats above 0"),
        (("--dtype", "float16"), "dtype is 'float16', allowed are"),
        (("--load-format", "x"), "load_format is 'x', allowed are"),
        (("--tokens", "40000"), "max_position_embeddings 32768; lower --tokens"),
        (("nowhere",), "'nowhere' is not a folder"),
    ],
)
def test_bad_options_are_refused(options: tuple[str, ...], words: str) -> None:
    result = invoke(*options)
    assert isinstance(result.exception, SidestreamError)
    assert words in str(result.exception)
    assert result.stdout == ""


def test_a_refusal_is_one_line_and_exit_code_2() -> None:
    assert "'tpu' is not one of" in " ".join(invoke("--device", "tpu").stderr.replace("│", " ").split())
    result = run("--tokens", "0", code=2)
    assert result.stderr == "ConfigError: tokens is 0, at least 1 is needed\n"
    assert result.stdout == ""


def test_help_teaches() -> None:
    text = " ".join(invoke("--help").stdout.split())
    for word in ("--device", "--margin", "--json", "Examples", "exit code is 1", "index_topk"):
        assert word in text
