"""Forms are tried in processes that end: at the limit, with whoever waits, and with the engine, however it ends."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Thread
from typing import Any

import psutil
import pytest

from sidestream import LLM, ConfigError, RequestError, SamplingParams, SidestreamError
from sidestream.core.request import Request
from sidestream.core.structured_outputs import StructuredOutputs
from sidestream.engine import form_trials
from sidestream.engine.bundled import bundled_model
from sidestream.engine.form_compiler import FormCompiler
from sidestream.engine.form_trials import Attempt, CancelledAttemptError, TooSlowError
from sidestream.engine.token_masks import GrammarMasks, masks_for
from sidestream.engine.tokenizer import load_tokenizer

PATIENCE = 120.0
HOUR = 3600.0
ENDLESS = " ".join(f"[a-z]{{1,{60000 + i}}} [0-9]{{1,{60000 + i}}}" for i in range(900))
"""Takes minutes to compile."""


def endless(number: int) -> StructuredOutputs:
    return StructuredOutputs(grammar=f'root ::= "{number}" {ENDLESS}')


def make_masks(seconds: float) -> GrammarMasks:
    tokenizer = load_tokenizer(bundled_model())
    assert tokenizer is not None
    masks = masks_for(tokenizer, vocab_size=len(tokenizer), eos_token_ids=[0], max_form_seconds=seconds)
    assert isinstance(masks, GrammarMasks)
    return masks


@pytest.fixture(scope="module")
def masks() -> GrammarMasks:
    """With a limit that is met in no test."""
    return make_masks(HOUR)


def pid_of(masks: GrammarMasks) -> int:
    assert masks._trials is not None
    assert masks._trials.pid is not None
    return masks._trials.pid


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def is_gone(pid: int) -> bool:
    """Ended, and not even left as a zombie of ours."""
    return not psutil.pid_exists(pid)


def trials_of(pid: int) -> list[psutil.Process]:
    return list(psutil.Process(pid).children())


def request(name: str, form: StructuredOutputs) -> Request:
    return Request(name, (5,), SamplingParams(structured_outputs=form), 7, 1, frozenset(), ())


def through(forms: FormCompiler) -> list[tuple[str, Exception | None]]:
    found: list[tuple[str, Exception | None]] = []

    def some() -> bool:
        found.extend((one.request.request_id, one.error) for one in forms.take())
        return bool(found)

    until(some)
    return found


@pytest.fixture
def waiting(masks: GrammarMasks) -> Iterator[Attempt]:
    """A trial that goes on until it is cancelled; ``cancelled`` is where it ends."""
    masks.prepare(StructuredOutputs(regex="warm"), Attempt())
    attempt = Attempt()
    ended: list[type[BaseException]] = []

    def wait() -> None:
        try:
            masks.prepare(endless(0), attempt)
        except CancelledAttemptError as error:
            ended.append(type(error))

    thread = Thread(target=wait)
    thread.start()
    until(lambda: trials_of(pid_of(masks)))
    yield attempt
    attempt.cancel()
    thread.join(PATIENCE)
    assert ended == [CancelledAttemptError]
    masks.prepare(StructuredOutputs(regex="cold"), Attempt())  # there is a process again, if none was left
    until(lambda: not trials_of(pid_of(masks)))


@pytest.mark.parametrize(
    ("form", "what"),
    [
        (endless(1), "structured_outputs grammar"),
        (StructuredOutputs(grammar=f"root ::= {ENDLESS}", source="response_format"), "response_format"),
    ],
)
def test_a_form_that_takes_too_long_is_refused_at_the_limit(form: StructuredOutputs, what: str) -> None:
    masks = make_masks(0.25)
    with pytest.raises(RequestError) as caught:
        masks.prepare(form, Attempt())
    assert str(caught.value) == f"{what} was not compiled and tried within 0.25 seconds, the limit (max_form_seconds)"
    with pytest.raises(TooSlowError):
        masks.prepare(form, Attempt(0.125))
    until(lambda: not trials_of(pid_of(masks)))


def test_slow_forms_are_ended_and_others_served_meanwhile(masks: GrammarMasks) -> None:
    forms = FormCompiler(masks.prepare, quick=0.2)
    slow = [f"slow {i}" for i in range(6)]
    for i, name in enumerate(slow):
        forms.submit(request(name, endless(i)))
    for i in range(3):
        forms.submit(request(f"quick {i}", StructuredOutputs(regex=f"[a-c]{{4}}{i}")))
    found: list[tuple[str, Exception | None]] = []
    while len(found) < 3:
        found += through(forms)
    assert sorted(found) == [(f"quick {i}", None) for i in range(3)]
    for name in slow:
        assert forms.cancel(name)
    until(lambda: not trials_of(pid_of(masks)))
    assert not forms.busy


def test_a_form_that_takes_long_at_each_token_is_refused(masks: GrammarMasks) -> None:
    """It would hold up every request of a step."""
    rules = "\n".join(f"r{i} ::= r{i + 1} [a-z] | r{i + 1}" for i in range(1000))
    with pytest.raises(
        RequestError, match=r"^structured_outputs grammar takes \d+(\.\d+)? seconds .* the limit is 0\.1;"
    ):
        masks.prepare(StructuredOutputs(grammar=f'root ::= r0\n{rules}\nr1000 ::= "x"'), Attempt())


def test_a_form_that_takes_much_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    code = (
        "import sys; from sidestream.engine import trial_process as t; t.FORM_BYTES = 2**22; t.main(int(sys.argv[1]))"
    )
    monkeypatch.setattr(form_trials, "PROGRAM", ("-c", code))
    masks = make_masks(HOUR)
    with pytest.raises(RequestError, match="structured_outputs grammar takes more than 512 MiB of memory to compile"):
        masks.prepare(endless(0), Attempt())
    masks.prepare(StructuredOutputs(regex="[a-c]{4}"), Attempt())


@pytest.mark.usefixtures("waiting")
def test_a_form_that_ends_its_process_is_refused_alone(masks: GrammarMasks) -> None:
    """As a crash of xgrammar would end it."""
    (other,) = trials_of(pid_of(masks))
    said: list[str] = []

    def fail() -> None:
        try:
            masks.prepare(endless(2), Attempt())
        except RequestError as error:
            said.append(str(error))

    thread = Thread(target=fail)
    thread.start()
    until(lambda: len(trials_of(pid_of(masks))) == 2)
    (mine,) = set(trials_of(pid_of(masks))) - {other}
    mine.send_signal(signal.SIGSEGV)
    thread.join(PATIENCE)
    assert said == ["structured_outputs grammar cannot be compiled: xgrammar ended by signal 11"]
    assert trials_of(pid_of(masks)) == [other]


@pytest.mark.usefixtures("waiting")
def test_a_killed_process_is_started_again_and_nobody_notices(masks: GrammarMasks) -> None:
    first = pid_of(masks)
    (trial,) = trials_of(first)
    os.kill(first, signal.SIGKILL)
    until(lambda: not trial.is_running())
    masks.prepare(StructuredOutputs(regex="[a-c]{5}"), Attempt())
    until(lambda: pid_of(masks) != first and trials_of(pid_of(masks)))  # the trial that waits has begun anew
    assert is_gone(first), "it was waited for"


@pytest.mark.usefixtures("waiting")
def test_a_process_that_hangs_is_replaced(masks: GrammarMasks, monkeypatch: pytest.MonkeyPatch) -> None:
    first = pid_of(masks)
    monkeypatch.setattr(form_trials, "GRACE_SECONDS", 0.0)
    os.kill(first, signal.SIGSTOP)
    masks.prepare(StructuredOutputs(regex="[a-c]{6}"), Attempt(5.0))
    assert pid_of(masks) != first
    assert is_gone(first)


def test_a_process_that_cannot_start_is_no_fault_of_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(form_trials, "PROGRAM", ("-c", "raise SystemExit(3)"))
    with pytest.raises(SidestreamError, match="ended at its start: 3") as caught:
        make_masks(HOUR).prepare(StructuredOutputs(regex="a"), Attempt())
    assert type(caught.value) is SidestreamError


def test_tries_end(masks: GrammarMasks, monkeypatch: pytest.MonkeyPatch) -> None:
    masks.prepare(StructuredOutputs(regex="a"), Attempt())
    monkeypatch.setattr(form_trials, "TRIES", 1)
    os.kill(pid_of(masks), signal.SIGKILL)
    with pytest.raises(SidestreamError, match="ended 1 times while it tried structured_outputs regex"):
        masks.prepare(StructuredOutputs(regex="b"), Attempt())


def test_what_was_cancelled_before_does_not_begin(masks: GrammarMasks) -> None:
    attempt = Attempt()
    attempt.cancel()
    with pytest.raises(CancelledAttemptError):
        masks.prepare(endless(4), attempt)


def test_a_form_is_tried_once(masks: GrammarMasks) -> None:
    form = StructuredOutputs(regex="[a-f]{3}")
    masks.prepare(form, Attempt())
    attempt = Attempt()
    attempt.cancel()
    masks.prepare(form, attempt)  # asks nobody


def test_there_is_no_process_without_a_form_and_none_without_its_engine() -> None:
    llm = LLM(device="cpu", max_num_seqs=1, max_num_batched_tokens=64)
    before = set(psutil.Process().children())
    params = SamplingParams(max_tokens=3, temperature=0)
    llm.generate("One", params)
    assert set(psutil.Process().children()) == before
    form = StructuredOutputs(regex="[a-c]{2}")
    llm.generate("One", SamplingParams(max_tokens=3, structured_outputs=form))
    (process,) = set(psutil.Process().children()) - before
    assert "CUDA_VISIBLE_DEVICES" in process.environ()
    assert process.environ()["CUDA_VISIBLE_DEVICES"] == ""
    del llm
    gc.collect()
    assert is_gone(process.pid)


@pytest.mark.parametrize("seconds", [0, -1.0, True, "5", float("nan"), float("inf"), 86401])
def test_the_limit_is_checked(seconds: Any) -> None:
    with pytest.raises(ConfigError, match=r"^max_form_seconds must be a number from 0\.001 to 86400 \(a day\), got "):
        LLM(device="cpu", max_form_seconds=seconds)


KILLED = """
import threading
from sidestream.engine.form_trials import Attempt
from tests.engine.test_form_trials import endless, make_masks, pid_of, trials_of, until, StructuredOutputs
masks = make_masks(3600.0)
masks.prepare(StructuredOutputs(regex="a"), Attempt())
threading.Thread(target=masks.prepare, args=(endless(0), Attempt()), daemon=True).start()
until(lambda: trials_of(pid_of(masks)))
print(pid_of(masks), trials_of(pid_of(masks))[0].pid, flush=True)
{end}
"""


@pytest.mark.parametrize("end", ["import os; os.kill(os.getpid(), 9)", ""])
def test_processes_end_with_the_engine(end: str) -> None:
    """Killed or at its end: a trial that nobody waits for goes too."""
    engine = subprocess.Popen([sys.executable, "-c", KILLED.format(end=end)], stdout=subprocess.PIPE, text=True)
    with engine:
        assert engine.stdout is not None
        pids = [int(pid) for pid in engine.stdout.readline().split()]
        assert len(pids) == 2
        assert engine.wait(PATIENCE) == (-signal.SIGKILL if end else 0)
    until(lambda: all(is_gone(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE for pid in pids))


@pytest.mark.parametrize("closed", [(0, 1), (0, 1, 2)])
def test_a_program_without_standard_streams_can_try_forms(closed: tuple[int, ...], tmp_path: Path) -> None:
    """Sockets get the numbers of its closed streams, which the new process has uses of its own for."""
    code = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "from sidestream.core.structured_outputs import StructuredOutputs\n"
        "from sidestream.engine.form_trials import Attempt\n"
        "from tests.engine.test_form_trials import make_masks\n"
        f"for number in {closed}: os.close(number)\n"
        "try:\n"
        "    make_masks(3600.0).prepare(StructuredOutputs(regex='a'), Attempt())\n"
        "    said = 'compiled'\n"
        "except Exception as error:\n"
        "    said = repr(error)\n"
        "Path(sys.argv[1]).write_text(said)\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "said")], check=True)
    assert (tmp_path / "said").read_text() == "compiled"
