"""Forms are compiled beside one another, leave no queue when nobody waits, and hold up no exit."""

from __future__ import annotations

import subprocess
import sys
import time
from threading import Event

from sidestream.core.request import Request
from sidestream.core.sampling_params import SamplingParams
from sidestream.core.structured_outputs import StructuredOutputs
from sidestream.engine.form_compiler import Compiled, FormCompiler
from sidestream.engine.form_trials import Attempt, CancelledAttemptError, TooSlowError

PATIENCE = 60.0


def request(name: str, form: str | None = None) -> Request:
    """Of its own form, unless another is named."""
    params = SamplingParams(structured_outputs=StructuredOutputs(regex=form or name))
    return Request(name, (5,), params, 7, 1, frozenset(), ())


class Gated:
    """Work that waits for its form's gate; among quick forms ``slow`` ones give up at once."""

    def __init__(self, *names: str) -> None:
        self.gates = {name: Event() for name in names}
        self.begun = {name: Event() for name in names}
        self.attempts: list[tuple[str, float | None]] = []

    def prepare(self, form: StructuredOutputs, attempt: Attempt) -> str:
        name = str(form.regex)
        self.attempts.append((name, attempt.seconds))
        if name.startswith("slow") and attempt.seconds is not None:
            raise TooSlowError
        self.begun[name].set()
        assert self.gates[name].wait(PATIENCE)
        attempt.check()
        if name == "wrong":
            raise ValueError("no such form")
        return f"grammar of {name}"


def take(forms: FormCompiler, count: int) -> list[Compiled]:
    """The next that are through."""
    through: list[Compiled] = []
    deadline = time.monotonic() + PATIENCE
    while len(through) < count:
        through += forms.take()
        assert time.monotonic() < deadline
        time.sleep(0.001)
    return through


def said(forms: FormCompiler, count: int = 1) -> list[tuple[str, str]]:
    return [(one.request.request_id, str(one.error or one.grammar)) for one in take(forms, count)]


def test_slow_forms_do_not_hold_up_the_next() -> None:
    """However many there are: they wait for one another, and begin anew apart from the quick ones."""
    slow = [f"slow {i}" for i in range(5)]
    work = Gated(*slow, "quick", "wrong")
    forms = FormCompiler(work.prepare, threads=1, quick=0.5)
    for name in slow:
        forms.submit(request(name))
    assert work.begun["slow 0"].wait(PATIENCE)
    for name in ("quick", "wrong"):
        work.gates[name].set()
        forms.submit(request(name))
    assert sorted(said(forms, 2)) == [("quick", "grammar of quick"), ("wrong", "no such form")]
    assert forms.busy
    for name in slow:
        work.gates[name].set()
        assert said(forms) == [(name, f"grammar of {name}")]
    assert not forms.busy
    assert [one for one in work.attempts if one[1] is None] == [(name, None) for name in slow]
    assert [one for one in work.attempts if one[1] is not None] == [(n, 0.5) for n in (*slow, "quick", "wrong")]


def test_requests_of_one_form_wait_for_the_same_work() -> None:
    work = Gated("shared")
    forms = FormCompiler(work.prepare)
    forms.submit(request("a", "shared"))
    assert work.begun["shared"].wait(PATIENCE)
    for name in ("b", "c"):
        forms.submit(request(name, "shared"))
    assert forms.cancel("b")
    work.gates["shared"].set()
    assert said(forms, 2) == [("a", "grammar of shared"), ("c", "grammar of shared")]
    assert work.attempts == [("shared", 1.0)]


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
    assert said(forms) == [("last", "grammar of last")]
    assert not work.begun["queued"].is_set()
    assert not forms.busy


def test_work_ends_when_nobody_waits_for_it() -> None:
    """Among quick forms, among slow ones, and in the queue of the slow."""
    ended: list[str] = []
    begun = {name: Event() for name in ("quick", "slow", "slow too")}

    def prepare(form: StructuredOutputs, attempt: Attempt) -> None:
        name = str(form.regex)
        if name.startswith("slow") and attempt.seconds is not None:
            raise TooSlowError
        begun[name].set()
        while True:
            time.sleep(0.001)
            try:
                attempt.check()
            except CancelledAttemptError:
                ended.append(name)
                raise

    forms = FormCompiler(prepare, threads=1)
    for name in ("slow", "slow too", "quick"):
        forms.submit(request(name))
    assert begun["slow"].wait(PATIENCE)
    assert begun["quick"].wait(PATIENCE)
    for name in begun:
        assert forms.cancel(name)
    assert not forms.busy
    forms.submit(request("slow too"))  # whose thread must be free for it
    assert begun["slow too"].wait(PATIENCE)
    assert sorted(ended) == ["quick", "slow"]


def test_an_id_that_is_used_again_gets_its_own_form() -> None:
    work = Gated("a")
    forms = FormCompiler(work.prepare, threads=1)
    forms.submit(request("a"))
    assert work.begun["a"].wait(PATIENCE)
    forms.cancel("a")
    second = request("a")
    forms.submit(second)
    work.gates["a"].set()
    (through,) = take(forms, 1)
    assert through.request is second
    assert len(work.attempts) == 2


def test_a_known_form_waits_for_no_trial_of_others() -> None:
    slow = [f"slow {i}" for i in range(3)]
    work = Gated(*slow, "known")
    forms = FormCompiler(work.prepare, threads=1, known=lambda form: form.regex == "known")
    for name in (*slow, "known"):
        forms.submit(request(name))
    work.gates["known"].set()
    assert said(forms) == [("known", "grammar of known")]
    assert [one for one in work.attempts if one[0] == "known"] == [("known", None)]
    for gate in work.gates.values():
        gate.set()


def test_nothing_is_begun_behind_the_end() -> None:
    work = Gated("running", "queued")
    forms = FormCompiler(work.prepare, threads=1)
    for name in work.gates:
        forms.submit(request(name))
    assert work.begun["running"].wait(PATIENCE)
    forms.close()
    for gate in work.gates.values():
        gate.set()
    assert not forms.busy
    assert not work.begun["queued"].wait(0.2)


def test_an_exit_does_not_wait() -> None:
    code = (
        "import threading\n"
        "from sidestream.engine.form_compiler import FormCompiler\n"
        "from tests.engine.test_form_compiler import request\n"
        "begun = threading.Event()\n"
        "forms = FormCompiler(lambda *_: (begun.set(), threading.Event().wait()))\n"
        "forms.submit(request('a'))\n"
        "begun.wait()\n"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=PATIENCE, check=False).returncode == 0
