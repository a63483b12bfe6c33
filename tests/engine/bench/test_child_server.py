"""A server of our own: whatever it says once it is ready is read, and how it ended is told."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from sidestream.engine.bench.load.child_server import child_server
from sidestream.errors import SidestreamError

TALKATIVE = """#!/bin/sh
trap 'exit 3' TERM
echo 'loading' >&2
echo 'ready after 1.0 s: http://127.0.0.1:7/v1, more' >&2
for i in $(seq 2000); do echo '127.0.0.1 "POST /v1/completions" 200, and so on up to a hundred characters' >&2; done
echo done > "$0.done"
while true; do sleep 0.05; done
"""


def stand_in(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = folder / "server"
    path.write_text(script)
    path.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(path))
    return path


def test_a_server_that_says_more_than_a_pipe_holds_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said, codes = list[str](), list[int]()
    path = stand_in(tmp_path, TALKATIVE, monkeypatch)
    with child_server([], on_line=said.append, on_end=codes.append) as address:
        end = time.monotonic() + 60
        while not path.with_name("server.done").exists():
            assert time.monotonic() < end, "it is stuck"
            time.sleep(0.01)
        assert not codes
    assert address == "http://127.0.0.1:7"
    assert said[0] == "loading"
    assert codes == [3]


def test_a_server_that_ends_before_it_is_ready_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(tmp_path, "#!/bin/sh\necho 'no such model' >&2\nexit 1\n", monkeypatch)
    ended = pytest.raises(SidestreamError, match=r"ended with 1 before it was ready:\nno such model")
    with ended, child_server([], on_line=lambda line: None):
        pass
