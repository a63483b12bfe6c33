"""Messages between the engine's own process and the process that talks to users: plain data as msgpack."""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec

from sidestream.config.engine import EngineConfig
from sidestream.core.outputs import EngineOutput
from sidestream.core.request import Request


class Start(msgspec.Struct, frozen=True, tag=True):
    """The first message: which checkpoint, with which settings."""

    folder: str
    config: EngineConfig


class Add(msgspec.Struct, frozen=True, tag=True):
    """New requests; each is answered by outputs or by ``Refused``."""

    requests: tuple[Request, ...]


class Abort(msgspec.Struct, frozen=True, tag=True):
    """Requests to end; those that have ended by themselves are passed over."""

    request_ids: tuple[str, ...]


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """End the process after the current step."""


Command: TypeAlias = Start | Add | Abort | Shutdown


class Phase(msgspec.Struct, frozen=True, tag=True):
    """How far the start is, as ``PhaseProgress`` has it."""

    name: str
    done: int
    total: int
    at: float


class EngineState(msgspec.Struct, frozen=True):
    """Counters since the start, and what is held now.

    Attributes:
        paced_steps: steps that would have prefilled more, had that not made decodes wait too long.
        prefix_queries, prefix_hits: tokens of admitted sequences, and those of them that came from the prefix cache.
        steps: graph mode -> steps run in it.
        step_sizes, num_tokens: as ``EngineCore`` counts them.
        fallbacks: reason -> steps that ran without the graph that the settings ask for.
        hisparse: blocks and bytes that left the device, bytes staged, places free; empty without a host pool.
        waits: reason -> steps that the host waited for before it launched the next.
        late_compilations: kernels that no warm-up met, so that a request had to wait for them.
    """

    running: int = 0
    waiting: int = 0
    free_blocks: int = 0
    free_slots: int = 0
    preemptions: int = 0
    recomputed_tokens: int = 0
    paced_steps: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    steps: dict[str, int] = {}
    step_sizes: dict[int, int] = {}
    num_tokens: int = 0
    fallbacks: dict[str, int] = {}
    waits: dict[str, int] = {}
    hisparse: dict[str, int] = {}
    late_compilations: int = 0


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The engine has served its own requests and takes others.

    Attributes:
        num_blocks: KV blocks that requests can own.
        captured: graphs captured; each was replayed by a request.
        ledger: the memory ledger as plain data, in bytes.
    """

    device: str
    dtype: str
    kv_cache_dtype: str
    cudagraph_mode: str
    max_model_len: int
    max_num_seqs: int
    block_size: int
    num_blocks: int
    captured: int
    vocab_size: int
    ledger: dict[str, Any]
    state: EngineState


class StartFailed(msgspec.Struct, frozen=True, tag=True):
    """A known error ended the start; ``kind`` is its class in ``errors.py``."""

    kind: str
    message: str


class StepDone(msgspec.Struct, frozen=True, tag=True):
    """What one step gave; ``state`` now and then, and always when nothing is left to do."""

    outputs: list[EngineOutput]
    state: EngineState | None = None


class Refused(msgspec.Struct, frozen=True, tag=True):
    """A request that can never run."""

    request_id: str
    kind: str
    message: str


class Died(msgspec.Struct, frozen=True, tag=True):
    """A step failed in a way that no request caused; the process ends."""

    message: str


Event: TypeAlias = Phase | Ready | StartFailed | StepDone | Refused | Died

encode = msgspec.msgpack.Encoder().encode
decode_command = msgspec.msgpack.Decoder(Command).decode
decode_event = msgspec.msgpack.Decoder(Event).decode
