"""An HTTP/1.1 proxy on loopback, in front of an S3 server, that does harm by a script.

It runs in a thread with an event loop of its own, so that synchronous tests and other processes can use it. One request
is answered at a time on each connection, as clients without pipelining expect. `Host` is passed on as it came, so
signatures stay valid.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import struct
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Literal
from urllib.parse import urlsplit

Kind = Literal[
    "status",  # answer with `status` and `body`; the server is not asked
    "stall",  # read the request, never answer
    "reset",  # drop the connection; the server is not asked
    "lose",  # the server does it, its answer is dropped
    "truncate",  # true headers, `count` bytes of the body, then an orderly close
    "reset_body",  # true headers, `count` bytes of the body, then a reset
    "stall_body",  # true headers, `count` bytes of the body, then nothing
    "corrupt",  # one byte of the body flipped, at `count`
    "longer",  # Content-Length says `count` more than there is
    "shorter",  # Content-Length says `count` less than there is
    "delay",  # `seconds` before the request goes on
    "replace",  # the server does it; the answer's body is replaced by `body`, status by `status`
]
HEAD_LIMIT = 64 << 10


@dataclass(frozen=True)
class Fault:
    """What happens to one request. Sizes are bytes, `seconds` real time."""

    kind: Kind
    status: int = 503
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)
    count: int = 0
    seconds: float = 0.0


def s3_error(status: int, code: str, message: str = "scripted", headers: Mapping[str, str] | None = None) -> Fault:
    """An error answer as S3 words it."""
    xml = f'<?xml version="1.0" encoding="UTF-8"?><Error><Code>{code}</Code><Message>{message}</Message></Error>'
    return Fault("status", status, xml.encode(), {"content-type": "application/xml", **(headers or {})})


SLOW_DOWN = s3_error(503, "SlowDown", "Please reduce your request rate.")


@dataclass
class Request:
    """A request as it was seen. `target` is the raw path and query; header names are lower case."""

    method: str
    target: str
    headers: dict[str, str]
    body: bytes

    @property
    def path(self) -> str:
        return self.target.partition("?")[0]


Rule = Callable[[Request], Fault | None]


class FaultyProxy:
    """Thread-safe: tests add rules while requests run. The first rule that gives a fault decides."""

    def __init__(self, upstream: str, tls: ssl.SSLContext | None = None) -> None:
        parts = urlsplit(upstream)
        assert parts.hostname is not None and parts.port is not None
        self._upstream = (parts.hostname, parts.port)
        self._tls = tls
        self._lock = threading.Lock()
        self._rules: list[Rule] = []
        self.seen: list[Request] = []
        self.outage = False
        """While True every connection is dropped at its next request."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="faulty-proxy", daemon=True)
        self._tasks: set[asyncio.Task[None]] = set()
        self.port = 0
        self.open_connections = 0
        self.peak_connections = 0

    @property
    def endpoint(self) -> str:
        return f"{'https' if self._tls else 'http'}://127.0.0.1:{self.port}"

    def rule(self, rule: Rule) -> None:
        with self._lock:
            self._rules.append(rule)

    def inject(self, fault: Fault, *, times: int | None = 1, method: str | None = None, contains: str = "") -> None:
        """The next `times` matching requests (None: all) meet `fault`."""
        left = [times]

        def rule(request: Request) -> Fault | None:
            if (method and request.method != method) or contains not in request.target or left[0] == 0:
                return None
            if left[0] is not None:
                left[0] -= 1
            return fault

        self.rule(rule)

    def clear(self) -> None:
        """No faults from now on; what was seen is forgotten too."""
        with self._lock:
            self._rules.clear()
            self.seen.clear()
        self.outage = False

    def count(self, method: str | None = None) -> int:
        with self._lock:
            return sum(method is None or request.method == method for request in self.seen)

    def start(self) -> None:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result(10)

    def stop(self) -> None:
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    async def _listen(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0, ssl=self._tls, limit=HEAD_LIMIT)
        self.port = self._server.sockets[0].getsockname()[1]

    async def _close(self) -> None:
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.open_connections += 1
        self.peak_connections = max(self.peak_connections, self.open_connections)
        try:
            with suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError, ssl.SSLError):
                while await self._serve_one(reader, writer):
                    pass
        finally:
            self.open_connections -= 1
            self._tasks.discard(task)
            with suppress(Exception):
                writer.close()

    async def _serve_one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Answer one request. Returns whether the connection stays open."""
        request = await _read_request(reader, writer)
        if request is None or self.outage:
            _reset(writer)
            return False
        with self._lock:
            self.seen.append(request)
            fault = next((found for rule in self._rules if (found := rule(request))), None)
        if fault is None:
            return await self._forward(request, writer)
        return await self._harm(fault, request, writer)

    async def _harm(self, fault: Fault, request: Request, writer: asyncio.StreamWriter) -> bool:
        match fault.kind:
            case "status":
                body = b"" if request.method == "HEAD" else fault.body
                writer.write(_head(fault.status, {**fault.headers, "content-length": str(len(fault.body))}) + body)
                await writer.drain()
                return True
            case "stall":
                await asyncio.Event().wait()
            case "reset":
                _reset(writer)
            case "delay":
                await asyncio.sleep(fault.seconds)
                return await self._forward(request, writer)
            case _:
                return await self._harm_answer(fault, request, writer)
        return False

    async def _harm_answer(self, fault: Fault, request: Request, writer: asyncio.StreamWriter) -> bool:
        status, headers, body = await self._ask(request)
        size = len(body)
        match fault.kind:
            case "lose":
                _reset(writer)
                return False
            case "corrupt":
                at = min(fault.count, size - 1)
                body = body[:at] + bytes([body[at] ^ 0x40]) + body[at + 1 :]
            case "longer":
                size += fault.count
            case "shorter":
                size -= fault.count
            case "replace":
                status, body, size = fault.status, fault.body, len(fault.body)
            case _:
                body = body[: fault.count]
        headers["content-length"] = str(size)
        writer.write(_head(status, headers) + body)
        await writer.drain()
        if fault.kind == "stall_body":
            await asyncio.Event().wait()
        if fault.kind == "reset_body":
            _reset(writer)
        return fault.kind in ("corrupt", "replace")

    async def _forward(self, request: Request, writer: asyncio.StreamWriter) -> bool:
        status, headers, body = await self._ask(request)
        if request.method != "HEAD" and "content-length" not in headers:
            headers["content-length"] = str(len(body))
        writer.write(_head(status, headers) + body)
        await writer.drain()
        return True

    async def _ask(self, request: Request) -> tuple[int, dict[str, str], bytes]:
        """The server's answer; a connection each, so that one request's harm never reaches another."""
        reader, writer = await asyncio.open_connection(*self._upstream, limit=HEAD_LIMIT)
        try:
            dropped = ("connection", "expect", "transfer-encoding", "content-length")
            headers = {name: value for name, value in request.headers.items() if name not in dropped}
            headers |= {"connection": "close", "content-length": str(len(request.body))}
            lines = [f"{request.method} {request.target} HTTP/1.1", *(f"{n}: {v}" for n, v in headers.items())]
            writer.write("\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + request.body)
            await writer.drain()
            status, answer = _parse_head(await reader.readuntil(b"\r\n\r\n"))
            empty = request.method == "HEAD" or status in ("204", "304")
            body = b"" if empty else await _read_body(reader, answer, until_close=True)
            answer.pop("transfer-encoding", None)
            answer.pop("connection", None)
            return int(status), answer, body
        finally:
            writer.close()


async def _read_request(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Request | None:
    raw = await reader.readuntil(b"\r\n\r\n")
    line, _, rest = raw.partition(b"\r\n")
    method, target, _ = line.decode("latin-1").split(" ", 2)
    headers = _parse_headers(rest)
    if headers.get("expect", "").lower() == "100-continue":
        writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    return Request(method, target, headers, await _read_body(reader, headers, until_close=False))


async def _read_body(reader: asyncio.StreamReader, headers: Mapping[str, str], *, until_close: bool) -> bytes:
    if headers.get("transfer-encoding", "").lower() == "chunked":
        parts = []
        while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
            parts.append((await reader.readexactly(size + 2))[:-2])
        await reader.readuntil(b"\r\n")
        return b"".join(parts)
    if "content-length" in headers:
        return await reader.readexactly(int(headers["content-length"]))
    return await reader.read() if until_close else b""


def _parse_head(raw: bytes) -> tuple[str, dict[str, str]]:
    line, _, rest = raw.partition(b"\r\n")
    return line.decode("latin-1").split(" ", 2)[1], _parse_headers(rest)


def _parse_headers(raw: bytes) -> dict[str, str]:
    pairs = (line.partition(":") for line in raw.decode("latin-1").split("\r\n") if line)
    return {name.strip().lower(): value.strip() for name, _, value in pairs}


def _head(status: int, headers: Mapping[str, str]) -> bytes:
    lines = [f"HTTP/1.1 {status} Scripted", *(f"{name}: {value}" for name, value in headers.items())]
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n"


def _reset(writer: asyncio.StreamWriter) -> None:
    """Close so that the peer sees a reset, not an orderly end."""
    raw = writer.get_extra_info("socket")
    with suppress(OSError):
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


@contextmanager
def faulty_proxy(upstream: str, tls: ssl.SSLContext | None = None) -> Iterator[FaultyProxy]:
    proxy = FaultyProxy(upstream, tls)
    proxy.start()
    try:
        yield proxy
    finally:
        proxy.stop()
