"""The process in which forms are tried before the engine compiles them: it forks a child for each, which can be killed.

``FormTrials`` starts it, by ``python -m sidestream.engine.trial_process DESCRIPTOR`` with a socket that both inherit.
Over that come the tokenizer's data, then one connection a trial. The trial's child reads the form there, writes its
verdict, and is ended by its own alarm when the time is up, or by this process when nobody is at the other end any more.
The process ends with the other end of its socket, so with the engine, however that ends. It uses no device.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import select
import signal
import socket
import struct
import sys
import traceback
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from sidestream.core.structured_outputs import StructuredOutputs
from sidestream.engine.form_grammar import Outcome, Verdict, try_form

READY = b"r"
TRIAL = b"t"
"""Comes with the descriptor of a connection."""
FORM_BYTES = 512 * 2**20
"""Of memory, beyond what the process has, for one form."""
PR_SET_PDEATHSIG = 1
"""Of Linux: a signal for when the parent ends."""
LENGTH = struct.Struct("!Q")


@dataclass(frozen=True, slots=True)
class Child:
    """One trial.

    Attributes:
        connection: to whoever waits for the verdict.
        life: of a pipe whose other end the child alone holds: it hangs up when the child ends.
    """

    pid: int
    connection: socket.socket
    life: int


class TrialProcess:
    """Forks a child for each connection that comes, and buries it.

    Args:
        control: over which connections come.
        info: xgrammar's ``TokenizerInfo``.
    """

    def __init__(self, control: socket.socket, info: Any) -> None:
        self._control = control
        self._info = info
        self._children: dict[int, Child] = {}
        """By both descriptors of each."""
        self._poll = select.poll()
        self._poll.register(control, select.POLLIN)

    def run(self) -> None:
        """Serve until the other end is gone."""
        control = self._control.fileno()
        while True:
            descriptors = [descriptor for descriptor, _ in self._poll.poll()]
            for descriptor in descriptors:
                if (child := self._children.get(descriptor)) is not None:
                    self._attend(child, descriptor)
            if control in descriptors and not self._begin():  # last, for it may reuse the numbers of closed descriptors
                break
        for child in set(self._children.values()):
            os.kill(child.pid, signal.SIGKILL)

    def _begin(self) -> bool:
        """Take a connection and fork; False at the end of all."""
        try:
            data, descriptors, *_ = socket.recv_fds(self._control, 1, 1)
        except ConnectionError:
            return False
        if not data:
            return False
        connection = socket.socket(fileno=descriptors[0])
        life, held = os.pipe()
        pid = os.fork()
        if pid == 0:
            _be_child(connection, self._info, others=[self._control.fileno(), life, *self._children])
        os.close(held)
        child = Child(pid, connection, life)
        self._children |= {life: child, connection.fileno(): child}
        self._poll.register(life, 0)
        self._poll.register(connection, 0)  # hanging up alone: what comes is for the child to read
        return True

    def _attend(self, child: Child, descriptor: int) -> None:
        """One end of a child has hung up: its own, or whoever waited for it."""
        if descriptor != child.life:
            os.kill(child.pid, signal.SIGKILL)
            self._poll.unregister(child.connection)
            return
        _, status = os.waitpid(child.pid, 0)
        if status:
            with suppress(OSError):  # nobody waits
                _say(child.connection, _verdict_of(os.waitstatus_to_exitcode(status)))
        for end in (child.life, child.connection.fileno()):
            del self._children[end]
        self._poll.unregister(child.life)
        with suppress(KeyError):  # it had hung up
            self._poll.unregister(child.connection)
        os.close(child.life)
        child.connection.close()


def _verdict_of(code: int) -> Verdict:
    """By how a child ended that gave none."""
    if code == -signal.SIGALRM:
        return Verdict(Outcome.SLOW)
    return Verdict(Outcome.BROKEN, f"signal {-code}" if code < 0 else f"exit code {code}")


def _say(connection: socket.socket, verdict: Verdict) -> None:
    """One line; if a second follows, since the child was killed behind its own, it is not read."""
    connection.sendall(json.dumps([verdict.outcome, verdict.why]).encode() + b"\n")


def _be_child(connection: socket.socket, info: Any, *, others: list[int]) -> None:
    """Try one form and end this process, or end with its parent. Nothing of other trials stays open in it."""
    code = 1
    try:
        parent = os.getppid()
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            return  # it had ended before
        for descriptor in others:
            os.close(descriptor)
        _try(connection, info)
        code = 0
    except (EOFError, ConnectionError):
        pass  # nobody waits
    except Exception:  # noqa: BLE001  the code says that it failed
        traceback.print_exc()
    finally:
        os._exit(code)


def _try(connection: socket.socket, info: Any) -> None:
    asked = json.loads(receive_message(connection))
    with open("/proc/self/statm") as file:
        held = int(file.read().split()[0]) * resource.getpagesize()
    for limit, size in ((resource.RLIMIT_AS, held + FORM_BYTES), (resource.RLIMIT_CORE, 0)):
        resource.setrlimit(limit, (size, size))
    signal.setitimer(signal.ITIMER_REAL, asked["seconds"])
    verdict = try_form(info, StructuredOutputs(**asked["form"]))
    signal.setitimer(signal.ITIMER_REAL, 0)
    _say(connection, verdict)


def send_message(connection: socket.socket, data: bytes) -> None:
    connection.sendall(LENGTH.pack(len(data)) + data)


def receive_message(connection: socket.socket) -> bytes:
    """What ``send_message`` sent; EOFError if the connection ends before."""
    (length,) = LENGTH.unpack(_receive(connection, LENGTH.size))
    return _receive(connection, length)


def _receive(connection: socket.socket, length: int) -> bytes:
    data = bytearray()
    while len(data) < length:
        part = connection.recv(min(length - len(data), 2**20))
        if not part:
            raise EOFError(f"the connection ended after {len(data)} of {length} bytes")
        data += part
    return bytes(data)


def main(descriptor: int) -> int:
    """Run the process; its exit code."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # a terminal sends them to all processes; the engine decides
    control = socket.socket(fileno=descriptor)
    try:
        data = receive_message(control)
        import xgrammar

        info = xgrammar.TokenizerInfo.deserialize_json(data.decode())
        control.sendall(READY)
        TrialProcess(control, info).run()
    except (EOFError, ConnectionError):
        pass  # the engine is gone
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
