"""The engine's own process: takes requests from a socket, runs steps, sends tokens back. No HTTP work stalls a step.

``AsyncEngine`` starts it by ``start_engine_process``. Commands are taken between steps,
so an abort takes effect before the next one. The process ends when it is told to, when a step fails, or when its parent
is gone.
"""

from __future__ import annotations

import os
import signal
import time
import traceback
from collections.abc import Iterator
from dataclasses import replace

import zmq

from sidestream.config.engine import EngineConfig
from sidestream.core.request import Request
from sidestream.engine.build import BuiltEngine, build_engine
from sidestream.engine.core import EngineCore
from sidestream.engine.form_compiler import FormCompiler
from sidestream.engine.startup_clock import ENGINE_IMPORTS, PhaseProgress, StartupClock
from sidestream.engine.token_masks import TokenMasks, masks_for
from sidestream.engine.tokenizer import load_tokenizer
from sidestream.engine.warm_up import warm_up
from sidestream.engine.wire import (
    Abort,
    Add,
    Command,
    Died,
    EngineState,
    Event,
    Phase,
    Ready,
    Refused,
    Shutdown,
    Start,
    StartFailed,
    StepDone,
    decode_command,
    encode,
)
from sidestream.errors import SidestreamError

IDLE_POLL_MS = 500
"""How often an idle process looks whether its parent is still there."""
COMPILING_POLL_MS = 5
"""How often it looks whether a form has been compiled."""
STATE_SECONDS = 0.1
"""How often a busy process reports its state."""
HIT_SECONDS = 5.0
"""How often, at most, it waits for the device to hear which rows were in hot slots."""
CLOSE_MS = 2000
"""How long the last message may take to leave."""


class EngineProcess:
    """One engine core behind one socket."""

    def __init__(self, channel: Channel, built: BuiltEngine, core: EngineCore, masks: TokenMasks) -> None:
        self._channel = channel
        self._built = built
        self._core = core
        self._masks = masks
        self._warm_up_kernels = len(built.compiled_after_ready())
        self._forms = FormCompiler(masks.prepare, known=masks.known)
        self._reported = 0.0
        self._hits_read = 0.0

    def run(self) -> None:
        """Serve until ``Shutdown`` or until the parent is gone."""
        try:
            self._serve()
        finally:
            self._forms.close()  # or trials would begin again as their process ends, and hold up the end of this one

    def _serve(self) -> None:
        while True:
            for command in self._channel.commands(patience_ms=self._patience()):
                if isinstance(command, Shutdown):
                    return
                self._obey(command)
            if self._channel.orphaned():
                return
            self._add_compiled()
            if self._core.has_work():
                self._step()

    def _obey(self, command: Command) -> None:
        if isinstance(command, Add):
            for request in command.requests:
                if request.params.structured_outputs is None:
                    self._add(request)
                else:
                    self._prepare(request)
        elif isinstance(command, Abort):
            for request_id in command.request_ids:
                if not self._forms.cancel(request_id):
                    self._core.abort(request_id)
        if not self._core.has_work():
            self._channel.send(StepDone([], self.state()))

    def _patience(self) -> int:
        """Milliseconds to wait for commands: none while there are steps to run."""
        if self._core.has_work():
            return 0
        return COMPILING_POLL_MS if self._forms.busy else IDLE_POLL_MS

    def _add(self, request: Request) -> None:
        try:
            self._core.add(request)
        except SidestreamError as error:
            self._refuse(request, error)

    def _prepare(self, request: Request) -> None:
        """Have a request's form compiled first."""
        try:
            self._masks.check(request)
        except SidestreamError as error:
            self._refuse(request, error)
        else:
            self._forms.submit(request)

    def _add_compiled(self) -> None:
        """Requests whose forms have been compiled, in the meantime and beside the steps, go on."""
        for compiled in self._forms.take():
            if compiled.error is None:
                self._masks.expect(compiled.request.request_id, compiled.grammar)
                self._add(compiled.request)
            elif isinstance(compiled.error, SidestreamError):
                self._refuse(compiled.request, compiled.error)
            else:
                raise compiled.error

    def _refuse(self, request: Request, error: SidestreamError) -> None:
        self._channel.send(Refused(request.request_id, type(error).__name__, str(error)))

    def _step(self) -> None:
        outputs = self._core.step()
        now = time.monotonic()
        due = now - self._reported >= STATE_SECONDS or not self._core.has_work()
        if due:
            self._reported = now
        if outputs or due:
            self._channel.send(StepDone(outputs, self.state() if due else None))

    def state(self) -> EngineState:
        """Counters and what is held."""
        scheduler, runner = self._core.scheduler, self._built.runner
        graphs, hisparse = runner.graphs, runner.hisparse
        now = time.monotonic()
        if hisparse is not None and now - self._hits_read >= HIT_SECONDS:
            self._hits_read = now
            with runner.on_device():
                hisparse.stats()
        return EngineState(
            running=scheduler.num_running,
            waiting=scheduler.num_waiting,
            free_blocks=scheduler.num_free_blocks,
            free_slots=scheduler.num_free_slots,
            preemptions=scheduler.num_preemptions,
            recomputed_tokens=scheduler.num_recomputed_tokens,
            paced_steps=scheduler.num_paced_steps,
            prefix_queries=scheduler.prefix_stats.known_tokens,
            prefix_hits=scheduler.prefix_stats.cached_tokens,
            steps={mode.name: n for mode, n in runner.steps.items()},
            step_sizes=dict(self._core.step_sizes),
            num_tokens=self._core.num_tokens,
            fallbacks={} if graphs is None else dict(graphs.dispatcher.fallbacks),
            waits=dict(self._core.waits),
            hisparse={} if hisparse is None else hisparse.counters(),
            late_compilations=len(self._built.compiled_after_ready()) - self._warm_up_kernels,
        )


class Channel:
    """The process's end of the socket."""

    def __init__(self, address: str) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.setsockopt(zmq.LINGER, CLOSE_MS)
        for option in (zmq.SNDHWM, zmq.RCVHWM):
            self._socket.setsockopt(option, 0)  # no limit: messages are small, and a lost one would lose a request
        self._socket.connect(address)
        self._parent = os.getppid()

    def send(self, event: Event) -> None:
        self._socket.send(encode(event))

    def commands(self, *, patience_ms: int) -> Iterator[Command]:
        """What has arrived, waiting so long for the first."""
        while self._socket.poll(patience_ms):
            patience_ms = 0
            yield decode_command(self._socket.recv())

    def first(self) -> Command | None:
        """Wait for the first command; None if the parent went away instead."""
        while not self.orphaned():
            for command in self.commands(patience_ms=IDLE_POLL_MS):
                return command
        return None

    def orphaned(self) -> bool:
        """The process that started this one is gone."""
        return os.getppid() != self._parent

    def close(self) -> None:
        self._socket.close()
        self._context.term()


def start(channel: Channel, message: Start, clock: StartupClock) -> EngineProcess:
    """Build and warm up what the first message asks for."""
    built = build_engine(message.folder, for_service(message.config), clock=clock)
    model = built.config.model
    clock.begin("engine's tokenizer")
    tokenizer = load_tokenizer(message.folder)
    masks = masks_for(
        tokenizer,
        vocab_size=model.vocab_size,
        eos_token_ids=model.eos_token_ids,
        max_form_seconds=built.config.max_form_seconds,
    )
    core = EngineCore(built, masks=masks)
    warm_up(built, core, clock=clock)
    engine = EngineProcess(channel, built, core, masks)
    channel.send(ready(built, engine.state()))
    return engine


def for_service(config: EngineConfig) -> EngineConfig:
    """The settings with what the user left open as a server wants it."""
    return config if config.prefill_pacing is not None else replace(config, prefill_pacing=True)


def ready(built: BuiltEngine, state: EngineState) -> Ready:
    """What a built engine says of itself."""
    config, ledger, graphs = built.config, built.ledger, built.runner.graphs
    return Ready(
        device=config.device,
        dtype=config.dtype,
        kv_cache_dtype=config.kv_cache_dtype,
        cudagraph_mode=config.cudagraph_mode,
        max_model_len=built.max_model_len,
        max_num_seqs=config.max_num_seqs,
        block_size=config.block_size,
        num_blocks=built.num_blocks - 1 if config.uses_blocks else 0,
        captured=0 if graphs is None else len(graphs.dispatcher.captures()),
        vocab_size=config.model.vocab_size,
        ledger=ledger.as_json(),
        state=state,
    )


def main(address: str, *, began: float) -> int:
    """Run the process; its exit code.

    Args:
        began: when it began to import this module, in seconds of ``time.monotonic``.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # a terminal sends them to both processes; the parent decides
    channel = Channel(address)
    try:
        first = channel.first()
        if not isinstance(first, Start):
            return 1

        def tell(progress: PhaseProgress) -> None:
            channel.send(Phase(progress.name, progress.done, progress.total, progress.at))

        try:
            engine = start(channel, first, StartupClock(ENGINE_IMPORTS, origin=began, tell=tell))
        except SidestreamError as error:
            channel.send(StartFailed(type(error).__name__, str(error)))
            return 1
        engine.run()
        return 0
    except Exception as error:
        traceback.print_exc()
        channel.send(Died(f"{type(error).__name__}: {error}"))
        raise
    finally:
        channel.close()
