"""What the user asks of a server: plain values."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from sidestream.config.engine import EngineConfig
from sidestream.errors import ConfigError

DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 8000
DEFAULT_MAX_BODY_BYTES = 32 * 1024 * 1024
DEFAULT_MAX_SEQUENCES = 1024
ANSWER_PARSERS = ("auto", "none", "glm", "deepseek_v31", "deepseek_v32")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """Settings of one server.

    Args:
        folder: of the checkpoint.
        model_name: how clients call it.
        engine: of the engine's process.
        host, port: to bind; port 0 takes a free one. Nothing but this machine reaches the default host.
        api_key: callers must send; None asks for none.
        max_body_bytes: of a request's body.
        max_sequences: that one request may start: prompts times ``n``.
        drain_seconds: that running requests may take after a request to stop; None waits for all.
        answer_parser: takes reasoning and tool calls out of chat answers: one of ``ANSWER_PARSERS``; "auto" is the one
            of the checkpoint's architecture.
        cors_origins: origins whose pages may call; none by default.
        access_log: a line for each request that is over.
    Raises:
        ConfigError: naming the value and what is allowed.
    """

    folder: Path
    model_name: str
    engine: EngineConfig
    host: str = DEFAULT_HOST
    port: int = DEFAULT_PORT
    api_key: str | None = None
    max_body_bytes: int = DEFAULT_MAX_BODY_BYTES
    max_sequences: int = DEFAULT_MAX_SEQUENCES
    drain_seconds: int | None = None
    answer_parser: str = "auto"
    cors_origins: tuple[str, ...] = ()
    access_log: bool = True

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port is {self.port}, allowed is 0 to 65535")
        if self.answer_parser not in ANSWER_PARSERS:
            allowed = ", ".join(ANSWER_PARSERS)
            raise ConfigError(f"answer_parser is {self.answer_parser!r}, allowed are {allowed}")
        for name in ("max_body_bytes", "max_sequences"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}, at least 1 is needed")
        if self.drain_seconds is not None and self.drain_seconds < 0:
            raise ConfigError(f"drain_seconds is {self.drain_seconds}, at least 0 is needed")
        if self.api_key is not None and not (self.api_key and self.api_key.isascii()):
            raise ConfigError("the API key must be non-empty ASCII text")
        if not self.model_name:
            raise ConfigError("the model's name is empty; give --served-model-name")
