"""Harm that a chaos run does from outside: to the bucket behind everybody's back, at the socket, over HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import random
import resource
import shutil
import socket
import struct
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from support.faulty_proxy import SLOW_DOWN, Fault, Request, s3_error

from s3kv.client import protocol as p
from s3kv.errors import S3kvError
from s3kv.format import keys
from s3kv.store.base import Store

HTTP_FAULTS: tuple[tuple[str, Fault, str], ...] = (
    ("503 SlowDown", SLOW_DOWN, ""),
    ("500", s3_error(500, "InternalError"), ""),
    ("501", s3_error(501, "NotImplemented"), "PUT"),
    ("429", s3_error(429, "TooManyRequests"), ""),
    ("403", s3_error(403, "AccessDenied"), ""),
    ("expired credentials", s3_error(400, "ExpiredToken", "The provided token has expired."), ""),
    ("404", s3_error(404, "NoSuchKey"), "GET"),
    ("409", s3_error(409, "ConditionalRequestConflict"), "PUT"),
    ("412", s3_error(412, "PreconditionFailed"), "PUT"),
    ("stall", Fault("stall"), ""),
    ("stalled body", Fault("stall_body", count=100), "GET"),
    ("reset", Fault("reset"), ""),
    ("reset in the body", Fault("reset_body", count=300), "GET"),
    ("answer lost", Fault("lose"), ""),
    ("truncated", Fault("truncate", count=200), "GET"),
    ("wrong byte", Fault("corrupt", count=700), "GET"),
    ("longer", Fault("longer", count=5), "GET"),
    ("shorter", Fault("shorter", count=5), "GET"),
    ("delay", Fault("delay", seconds=0.1), ""),
)


def http_rule(seed: int, rate: float, counts: Counter[str]) -> Callable[[Request], Fault | None]:
    """Harms about `rate` of all requests; bursts of SlowDown take the place of single ones now and then."""
    rng = random.Random(f"http {seed}")
    burst = [0]

    def rule(request: Request) -> Fault | None:
        if burst[0]:
            burst[0] -= 1
            counts["http 503 SlowDown"] += 1
            return SLOW_DOWN
        if rng.random() >= rate:
            return None
        fitting = [each for each in HTTP_FAULTS if each[2] in ("", request.method)]
        name, fault, _ = rng.choice(fitting)
        if fault is SLOW_DOWN:
            burst[0] = rng.randrange(6)
        counts[f"http {name}"] += 1
        return fault

    return rule


class BucketHarm:
    """Deletes, flips and cuts chunk objects. `damaged` are the keys that may be found damaged afterwards."""

    def __init__(self, store: Store, rng: random.Random) -> None:
        self._store = store
        self._rng = rng
        self.damaged: set[str] = set()

    async def chunk_keys(self) -> list[str]:
        return [meta.key async for page in self._store.list("ns/") for meta in page if keys.parse_chunk_key(meta.key)]

    async def harm(self, kind: str) -> bool:
        found = await self.chunk_keys()
        if not found:
            return False
        key = self._rng.choice(found)
        with contextlib.suppress(S3kvError):
            if kind == "delete_object":
                await self._store.delete([key])
                return True
            data = bytearray(await self._store.get(key, 64 << 20))
            if kind == "cut_object":
                del data[self._rng.randrange(len(data)) :]
            else:
                data[self._rng.randrange(len(data))] ^= 1 << self._rng.randrange(8)
            self.damaged.add(key)
            await self._store.put(key, bytes(data))
            return True
        return False


# ---- at the socket


def _connected(path: Path) -> socket.socket | None:
    client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    client.settimeout(0.2)
    try:
        client.connect(str(path))
    except OSError:
        client.close()
        return None
    return client


def garbage_client(path: Path, rng: random.Random) -> None:
    """Random bytes, with and without a plausible length before them."""
    for _ in range(5):
        if (client := _connected(path)) is None:
            return
        noise = rng.randbytes(rng.randrange(1, 200))
        with client, contextlib.suppress(OSError):
            client.sendall(noise if rng.random() < 0.5 else struct.pack("<I", len(noise)) + noise)
            client.recv(1)


def lying_client(path: Path, namespace: bytes | None, rng: random.Random) -> None:
    """Attaches like an engine, then commits, releases and abandons what is not its own, with wrong lengths."""
    if (client := _connected(path)) is None:
        return
    with client, contextlib.suppress(OSError):
        client.sendall(p.encode(p.Hello(1, p.PROTOCOL, "worker")))
        client.recv(4096)
        if namespace is not None:
            parts = rng.choice(((0,), (255,), (0, 255)))
            client.sendall(p.encode(p.Attach(2, namespace, "liar", 0, rng.choice((1, 2, 1 << 40)), parts, parts)))
            client.recv(4096)
        for _ in range(40):
            slot, ticket = rng.randrange(300), rng.randrange(1 << 20)
            part = rng.choice((0, 255))
            client.sendall(p.encode(p.Commit(1, part, p.pack_u32([slot]), p.pack_u32([ticket, ticket]))))
            client.sendall(p.encode(p.Abandon(1, part, p.pack_u32([slot] * 3), p.pack_u32([ticket]))))
            client.sendall(p.encode(p.Release(1, rng.randrange(1 << 62), rng.randrange(-1, 3))))
        client.sendall(p.encode(p.Reserve(3, 1, 0, rng.randbytes(16), 0, rng.randbytes(16 * 3 + 1))))
        client.recv(4096)


def mute_client(path: Path) -> None:
    """Asks a thousand things and reads no answer."""
    if (client := _connected(path)) is None:
        return
    with client, contextlib.suppress(OSError):
        client.sendall(p.encode(p.Hello(1, p.PROTOCOL, "cli")))
        for number in range(1000):
            client.sendall(p.encode(p.Metrics(number)))


class OtherVersion:
    """An agent of another release: whoever connects is told so, once for each connection."""

    def __init__(self, path: Path) -> None:
        path.unlink(missing_ok=True)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(path))
        self._listener.listen(16)
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                with client, contextlib.suppress(OSError):
                    client.settimeout(0.2)
                    client.recv(4096)
                    client.sendall(p.encode(p.Refused(1, "this agent speaks protocol 99, the client 1", fatal=True)))

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


# ---- limits of the machine


def squeeze_descriptors(pid: int) -> Callable[[], None]:
    """No descriptor more than it has now. Returns what lifts the limit."""
    used = max((int(path.name) for path in Path(f"/proc/{pid}/fd").iterdir()), default=0)
    return _squeeze(pid, resource.RLIMIT_NOFILE, used + 2)


def fill_disk(pid: int) -> Callable[[], None]:
    """No file of it may grow beyond what it has: the index, and a store in a folder, are full."""
    return _squeeze(pid, resource.RLIMIT_FSIZE, 4096)


def _squeeze(pid: int, limit: int, value: int) -> Callable[[], None]:
    before = resource.prlimit(pid, limit)
    resource.prlimit(pid, limit, (value, before[1]))

    def lift() -> None:
        with contextlib.suppress(OSError):
            resource.prlimit(pid, limit, before)

    return lift


def wipe(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)


def run_now(work: Any, timeout_s: float = 5.0) -> Any:
    """The result of a coroutine, in an event loop of its own."""

    async def bounded() -> Any:
        async with asyncio.timeout(timeout_s):
            return await work

    return asyncio.run(bounded())
