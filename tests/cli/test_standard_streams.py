"""Every command with its standard streams closed or broken, as a shell leaves them: one line, or quiet."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from sidestream.cli.main import app, bench

GENERATE = ("generate", "hi", "--max-tokens", "2", "--device", "cpu")
NO_OUTPUT = "cannot write the output: Bad file descriptor\n"
NO_INPUT = "RequestError: cannot read standard input: Bad file descriptor\n"


def run(*arguments: str, streams: str) -> subprocess.CompletedProcess[str]:
    """The command behind a shell's redirections."""
    command = ["sh", "-c", f'exec "$@" {streams}', "sh", sys.executable, "-m", "sidestream.cli.main", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)


@pytest.mark.parametrize(
    "arguments",
    [
        GENERATE,
        (*GENERATE, "--json"),
        ("capacity",),
        ("capacity", "--json"),
        ("doctor", "--device", "cpu"),
        ("--version",),
        *(  # every command there is
            (*group, command.name or command.callback.__name__, "--help")
            for group, typed in (((), app), (("bench",), bench))
            for command in typed.registered_commands
            if command.callback is not None
        ),
    ],
    ids=" ".join,
)
def test_a_closed_output_is_one_line(arguments: tuple[str, ...]) -> None:
    done = run(*arguments, streams=">&-")
    assert (done.stderr.splitlines(keepends=True)[-1], done.returncode) == (NO_OUTPUT, 1)
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr


@pytest.mark.parametrize(
    "arguments",
    [("generate", "-"), ("generate", "--input", "-"), ("inspect", "--prompt", "-")],
    ids=" ".join,
)
def test_a_closed_input_is_one_line(arguments: tuple[str, ...], tmp_path: Path) -> None:
    output = ("--output", str(tmp_path / "page.html"))
    done = run(*arguments, *output, streams="<&-")
    assert (done.stdout, done.stderr, done.returncode) == ("", NO_INPUT, 2)


def test_what_a_command_does_not_use_may_be_closed() -> None:
    done = run(*GENERATE, streams="<&- 2>&-")
    assert (done.stderr, done.returncode) == ("", 0)
    assert done.stdout.strip()
    done = run("capacity", "nowhere", streams="2>&-")
    assert (done.stdout, done.stderr, done.returncode) == ("", "", 2)


@pytest.mark.parametrize("streams", [">/dev/full", "2>/dev/full", "| true"])
def test_a_full_disk_and_a_reader_that_went_away(streams: str) -> None:
    for arguments in (("capacity", "--json"), ("capacity",)):
        done = run(*arguments, streams=streams)
        full = streams == ">/dev/full"
        assert done.stderr == ("cannot write the output: No space left on device\n" if full else "")
        assert done.returncode == (1 if full else 0)
