"""Every error a user of Sidestream can cause, as one tree.

    SidestreamError
    ├── ConfigError          (ValueError)   a model or engine setting is wrong or not supported
    ├── CheckpointError      (ValueError)   files of a checkpoint are missing, broken or do not fit the config
    ├── RequestError         (ValueError)   one request asks for something impossible; nothing else changes
    ├── CapacityError        (MemoryError)  memory or a pool is too small for what was asked
    ├── EngineDeadError      (RuntimeError) the engine's process has ended; nothing can be served any more
    ├── HandoffError         (RuntimeError) one stream waits for another without its counterpart, or in the wrong step
    └── GraphError           (RuntimeError) a graph is captured or replayed where, or with what, it cannot be

A message states the value, the limit, where the limit comes from, and the knob that moves it. What only a bug in
Sidestream can cause is an ``assert``, not one of these.
"""


class SidestreamError(Exception):
    """Base of all errors that Sidestream raises on purpose."""


class ConfigError(SidestreamError, ValueError):
    """A model or engine setting is wrong, contradictory or not supported."""


class CheckpointError(SidestreamError, ValueError):
    """A checkpoint's files are missing, truncated, unreadable or do not fit its config."""


class RequestError(SidestreamError, ValueError):
    """A request cannot be served as asked; no other request is affected.

    Args:
        param: the request's field at fault, where the message does not begin with its name.
        code: of the fault, for programs: OpenAI's where there is one.
    """

    def __init__(self, message: str = "", *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class CapacityError(SidestreamError, MemoryError):
    """Something does not fit: weights, a cache pool, or a request into the pools."""


class EngineDeadError(SidestreamError, RuntimeError):
    """The engine's process has ended, or was ended; every open request fails with this."""


class HandoffError(SidestreamError, RuntimeError):
    """A wait without its publish, or a publish without its wait's terms; the message names both sides."""


class GraphError(SidestreamError, RuntimeError):
    """A graph is captured or replayed in a wrong place, or would use memory that this step does not."""
