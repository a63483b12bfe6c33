"""Forms are compiled beside one another, leave no queue when nobody waits, and hold up no exit."""

from __future__ import annotations

import subprocess
import sys
import time
from threading import Event

from sidestream.core.request import Request
from sidestream.core.sampling_params import SamplingParams
from sidestream.engine.form_compiler import FormCompiler

PATIENCE = 60.0


def request(name: str) -> Request:
    return Request(name, (5,), SamplingParams(), 7, 1, frozenset(), ())


class Gated:
    """Work that waits for its request's gate."""

    def __init__(self, *names: str) -> None:
        self.gates = {name: Event() for name in names}
        self.begun = {name: Event() for name in names}

    def prepare(self, request: Request) -> None:
        self.begun[request.request_id].set()
        assert self.gates[request.request_id].wait(PATIENCE)
        if request.request_id == "wrong":
            raise ValueError("no such form")


def take(forms: FormCompiler) -> list[tuple[str, str | None]]:
    """The next that are through."""
    deadline = time.monotonic() + PATIENCE
    while not (through := forms.take()):
        assert time.monotonic() < deadline
        time.sleep(0.001)
    return [(request.request_id, None if error is None else str(error)) for request, error in through]


def test_a_slow_form_does_not_hold_up_the_next() -> None:
    work = Gated("slow", "quick", "wrong")
    forms = FormCompiler(work.prepare)
    for name in work.gates:
        forms.submit(request(name))
    work.gates["quick"].set()
    assert take(forms) == [("quick", None)]
    work.gates["wrong"].set()
    assert take(forms) == [("wrong", "no such form")]
    assert forms.busy
    work.gates["slow"].set()
    assert take(forms) == [("slow", None)]
    assert not forms.busy


def test_what_was_cancelled_is_not_compiled_and_does_not_come_out() -> None:
    work = Gated("running", "queued", "last")
    forms = FormCompiler(work.prepare, threads=1)
    for name in work.gates:
        forms.submit(request(name))
    assert work.begun["running"].wait(PATIENCE)
    assert forms.cancel("queued")
    assert forms.cancel("running")
    assert not forms.cancel("queued")
    work.gates["running"].set()
    work.gates["last"].set()
    assert take(forms) == [("last", None)]
    assert not work.begun["queued"].is_set()
    assert not forms.busy


def test_an_id_that_is_used_again_gets_its_own_form() -> None:
    work = Gated("a")
    forms = FormCompiler(work.prepare, threads=1)
    forms.submit(request("a"))
    assert work.begun["a"].wait(PATIENCE)
    forms.cancel("a")
    second = request("a")
    forms.submit(second)
    work.gates["a"].set()
    deadline = time.monotonic() + PATIENCE
    while not (through := forms.take()):
        assert time.monotonic() < deadline
        time.sleep(0.001)
    assert [found for found, _ in through] == [second]
    assert through[0][0] is second


def test_an_exit_does_not_wait() -> None:
    code = (
        "import threading\n"
        "from sidestream.engine.form_compiler import FormCompiler\n"
        "from tests.engine.test_form_compiler import request\n"
        "begun = threading.Event()\n"
        "forms = FormCompiler(lambda _: (begun.set(), threading.Event().wait()))\n"
        "forms.submit(request('a'))\n"
        "begun.wait()\n"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=PATIENCE, check=False).returncode == 0
