"""A small HTTP/1.1 client on asyncio's streams: one request a connection, bodies as they arrive with their time."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from functools import cache
from urllib.parse import urlsplit

from sidestream.engine.bench.load.http_body import Body, HttpError, OpenBody, body_for
from sidestream.errors import ConfigError

READ_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server is.

    Attributes:
        base: of every path, without a slash at its end.
        ip: that the host's name stands for, where it was looked up before.
    """

    host: str
    port: int
    base: str = ""
    secure: bool = False
    ip: str | None = None

    @classmethod
    def of(cls, url: str) -> Address:
        """``http://host:port``, with or without ``/v1`` behind it.

        Raises:
            ConfigError: it is no such URL.
        """
        if "@" in url:
            raise ConfigError("url holds a user or a password; a key goes into --api-key")
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise ConfigError(f"url is {url!r}: {error}") from None
        if parts.query or parts.fragment:
            raise ConfigError(f"url is {url!r}; a server's address has no query and no fragment")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"url is {url!r}; it must be like http://127.0.0.1:8000")
        secure = parts.scheme == "https"
        base = parts.path.rstrip("/").removesuffix("/v1")
        return cls(parts.hostname, port or (443 if secure else 80), base, secure)

    @property
    def netloc(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def __str__(self) -> str:
        return f"{'https' if self.secure else 'http'}://{self.netloc}{self.base}"


class Response:
    """Status, headers (names in lower case), and a body still to come."""

    def __init__(self, status: int, headers: Mapping[str, str], reader: asyncio.StreamReader) -> None:
        self.status = status
        self.headers = headers
        self._body: Body = body_for(status, headers)
        self._reader = reader

    async def pieces(self) -> AsyncGenerator[tuple[float, bytes], None]:
        """Parts of the body, each with the ``perf_counter`` of its arrival.

        Raises:
            HttpError: the body is malformed, or the connection closed before its end.
        """
        while not self._body.done:
            piece = await self._reader.read(READ_BYTES)
            now = time.perf_counter()
            if not piece:
                if isinstance(self._body, OpenBody):
                    return
                raise HttpError("the connection closed before the end of the answer")
            if part := self._body.feed(piece):
                yield now, part

    async def read(self, limit: int) -> bytes:
        """The body, or as much of it as ``limit`` allows."""
        found = b""
        async with aclosing(self.pieces()) as pieces:
            async for _, part in pieces:
                found += part
                if len(found) >= limit:
                    break
        return found[:limit]


class Connection:
    """An open connection, for one request."""

    def __init__(self, address: Address, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._address = address
        self._reader = reader
        self._writer = writer

    @property
    def ip(self) -> str:
        """Of the server."""
        return str(self._writer.get_extra_info("peername")[0])

    async def ask(self, method: str, path: str, headers: Mapping[str, str], body: bytes = b"") -> Response:
        """Send a request and read the head of its answer.

        Raises:
            HttpError: the answer is malformed, or there is none.
        """
        fields = {"host": self._address.netloc, "connection": "close", "content-length": str(len(body)), **headers}
        lines = [f"{method} {self._address.base}{path} HTTP/1.1", *(f"{name}: {fields[name]}" for name in fields)]
        self._writer.write("\r\n".join([*lines, "", ""]).encode("latin-1") + body)
        await self._writer.drain()
        status = 100
        while 100 <= status < 200:  # interim answers, as "100 Continue"
            try:
                head = await self._reader.readuntil(b"\r\n\r\n")
            except asyncio.IncompleteReadError as error:
                there = "in the head of" if error.partial else "without"
                raise HttpError(f"the connection closed {there} an answer") from None
            except asyncio.LimitOverrunError:
                raise HttpError("the head of the answer does not end") from None
            status, found = _parse_head(head)
        return Response(status, found, self._reader)


@asynccontextmanager
async def connect(address: Address) -> AsyncIterator[Connection]:
    """A connection that is closed with the block; OSError if there is no way to the server."""
    reader, writer = await asyncio.open_connection(
        address.ip or address.host,
        address.port,
        ssl=_certificates() if address.secure else None,
        server_hostname=address.host if address.secure else None,
    )
    try:
        yield Connection(address, reader, writer)
    finally:
        writer.transport.abort()


async def looked_up(address: Address) -> Address:
    """The address with the IP that answers, so that no request has to look for it; OSError if none does."""
    async with connect(address) as connection:
        return replace(address, ip=connection.ip)


@cache
def _certificates() -> ssl.SSLContext:
    return ssl.create_default_context()


def _parse_head(head: bytes) -> tuple[int, dict[str, str]]:
    first, *rest = head.decode("latin-1").split("\r\n")
    version, _, status = first.partition(" ")
    if not version.startswith("HTTP/1.") or not status[:3].isdecimal():
        raise HttpError(f"the answer begins with {first[:60]!r}")
    pairs = (line.partition(":") for line in rest if line)
    return int(status[:3]), {name.strip().lower(): value.strip() for name, _, value in pairs}
