"""The agent's life: the socket's lock, start, signals, drain, end."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import logging
import os
import random
import secrets
import signal
import socket
import stat
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from prometheus_client import start_http_server

from s3kv.agent.former import check_memory
from s3kv.agent.metrics import AgentMetrics
from s3kv.agent.node import Node
from s3kv.agent.resources import Resources
from s3kv.agent.server import Server
from s3kv.agent.weights import ByteSemaphore
from s3kv.client.trust import foreign_folder
from s3kv.errors import ConfigError
from s3kv.settings import Settings
from s3kv.store.base import Store
from s3kv.store.opening import open_store
from s3kv.store.threads import StartedThreads
from s3kv.tier.budget import NodeBudget

logger = logging.getLogger("s3kv.agent")

DISTRIBUTION = "s3kv-cache"
IO_THREADS = 16
"""For asyncio's own use: a store in a folder reads and writes in them."""
GAUGES_EVERY_S = 5.0
SOCKET_CHECK_S = 1.0
"""How often the agent looks whether its socket is still there."""


def release_version() -> str:
    try:
        return version(DISTRIBUTION)
    except PackageNotFoundError:
        return "unknown"


class Listening:
    """The one listening socket at `path`, 0600.

    A lock file decides between two agents: it goes with its holder, however that ends. A socket file without a holder
    is a leftover and is replaced. Files in a temporary folder may be tidied away under a living agent: `again` brings
    them back.
    """

    def __init__(self, path: Path) -> None:
        """Raises ConfigError when another agent has it, it cannot be made, or its folder is another user's trap."""
        self.path = path
        self._lock_path = path.with_suffix(".lock")
        self._lock = self._locked()
        try:
            self.sock, self._inode = self._listen()
        except BaseException:
            os.close(self._lock)
            raise

    def _locked(self) -> int:
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            if (foreign := foreign_folder(self.path.parent)) is not None:
                raise ConfigError(f"agent.socket: folder {foreign} belongs to another user")
            lock = os.open(self._lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(f"agent.socket: {self.path} cannot be made: {error.strerror}") from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(lock)
            raise ConfigError(f"another agent is serving {self.path} (agent.socket)") from error
        return lock

    def _listen(self) -> tuple[socket.socket, int]:
        try:
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        except OSError as error:
            raise ConfigError(f"agent.socket: {self.path}: {error.strerror}") from error
        try:
            self._remove_old()
            _bind(listener, self.path)
            listener.listen(128)
            listener.setblocking(False)
            return listener, self.path.stat().st_ino
        except BaseException:
            listener.close()
            raise

    def _remove_old(self) -> None:
        """The socket of an agent that has ended. Anything else is somebody's."""
        with contextlib.suppress(FileNotFoundError):
            if not stat.S_ISSOCK(self.path.lstat().st_mode):
                raise ConfigError(f"agent.socket: {self.path} is there and is no socket")
            self.path.unlink()

    @property
    def vanished(self) -> bool:
        """Whether clients that connect now reach somebody else, or nobody."""
        return _inode(self.path) != self._inode

    @property
    def replaced(self) -> bool:
        """Whether the lock is another file by now: then another agent serves here, and this one is in the way."""
        return _inode(self._lock_path) not in (-1, os.fstat(self._lock).st_ino)

    def again(self) -> socket.socket:
        """A new listening socket in the place of the one that is gone. Raises ConfigError when another agent is."""
        if _inode(self._lock_path) != os.fstat(self._lock).st_ino:
            lock = self._locked()
            os.close(self._lock)
            self._lock = lock
        old, (self.sock, self._inode) = self.sock, self._listen()
        old.close()
        return self.sock

    def close(self) -> None:
        with contextlib.suppress(OSError):
            if not self.vanished:
                self.path.unlink()
        self.sock.close()
        os.close(self._lock)


def _inode(path: Path) -> int:
    try:
        return path.stat().st_ino
    except OSError:
        return -1


def _bind(listener: socket.socket, path: Path) -> None:
    before = os.umask(0o177)
    try:
        listener.bind(os.fspath(path))
    except OSError as error:
        text = "is too long for a socket" if error.errno in (errno.ENAMETOOLONG, None) else f"{error.strerror or error}"
        raise ConfigError(f"agent.socket: {path}: {text}") from error
    finally:
        os.umask(before)


class Agent:
    """One agent. `run` returns when it was told to stop, or was idle for `agent.idle_exit_s`."""

    def __init__(
        self,
        settings: Settings,
        *,
        store: Store | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,  # noqa: TID251 - the default of an injected clock
        rng: random.Random | None = None,
    ) -> None:
        self.settings = settings
        self.metrics = AgentMetrics()
        self._store = store
        self._clock = clock
        self._wall_clock = wall_clock
        self._rng = rng or random.Random(secrets.randbits(64))
        self._stop = asyncio.Event()
        self._last_drain: tuple[int, int] = (0, 0)
        self.node: Node | None = None

    async def run(self, on_ready: Callable[[], None] = lambda: None) -> tuple[int, int]:
        """Serve until stopped; returns (chunks flushed at the end, blocks that were not). Raises ConfigError."""
        if not self.settings.tier.hugepages:
            check_memory(self.settings.tier.capacity_bytes)
        with contextlib.closing(Listening(self.settings.agent.socket)) as listening:
            asyncio.get_running_loop().set_default_executor(StartedThreads(IO_THREADS, "s3kv-io", "store.url"))
            resources = self._resources()
            node = self.node = Node(resources, epoch=secrets.randbits(63) | 1)
            server = Server(
                node,
                version=release_version(),
                max_clients=self.settings.agent.max_clients,
                on_stop=self.stop,
            )
            end_metrics = self._serve_metrics()
            server.listen(listening.sock)
            chores = [
                asyncio.create_task(self._stop_when_idle(server)),
                asyncio.create_task(self._keep_socket(listening, server)),
                *([asyncio.create_task(_keep_gauges(node))] if end_metrics is not None else []),
            ]
            logger.info("serving %s, store %s", self.settings.agent.socket, self.settings.store.url)
            on_ready()
            try:
                await self._stop.wait()
            finally:
                for task in chores:
                    task.cancel()
                await asyncio.gather(*chores, return_exceptions=True)
                await asyncio.sleep(0)  # lets the answer to Stop leave
                await server.close()
                await node.close()
                await resources.store.close()
                resources.threads.shutdown(wait=True, cancel_futures=True)
                if end_metrics is not None:
                    end_metrics()
        return self._last_drain

    async def stop(self, deadline_s: float) -> tuple[int, int]:
        """Flush within the deadline, then end. Returns (chunks flushed, blocks that were not)."""
        if self.node is not None and not self._stop.is_set():
            self._last_drain = await self.node.drain(deadline_s)
            chunks, unsaved = self._last_drain
            logger.info("drained: %d chunks stored, %d blocks not stored", chunks, unsaved)
        asyncio.get_running_loop().call_later(0.05, self._stop.set)
        return self._last_drain

    def _resources(self) -> Resources:
        settings = self.settings
        index_dir = settings.catalog.index_dir or settings.agent.socket.parent / "index"
        return Resources(
            settings=settings,
            store=self._store or open_store(settings.store, clock=self._clock, rng=self._rng, events=self.metrics),
            budget=NodeBudget(settings.tier.capacity_bytes, namespaces=settings.tier.namespaces),
            metrics=self.metrics,
            threads=StartedThreads(settings.upload.threads, "s3kv-codec", "upload.threads"),
            upload_bytes=ByteSemaphore(settings.upload.inflight_bytes),
            fetch_bytes=ByteSemaphore(settings.fetch.inflight_bytes),
            index_dir=index_dir,
            agent_id=self._rng.getrandbits(32),
            clock=self._clock,
            wall_clock=self._wall_clock,
            rng=self._rng,
        )

    def _serve_metrics(self) -> Callable[[], None] | None:
        port = self.settings.agent.metrics_port
        if port is None:
            return None
        try:
            server, _ = start_http_server(port, addr="127.0.0.1", registry=self.metrics.registry)
        except OSError as error:
            raise ConfigError(f"agent.metrics_port: port {port} cannot be used: {error.strerror}") from error
        return server.shutdown

    async def _keep_socket(self, listening: Listening, server: Server) -> None:
        """Without its file nobody can connect any more, and without a restart nobody ever could."""
        while True:
            await asyncio.sleep(SOCKET_CHECK_S)
            if not listening.vanished:
                continue
            try:
                server.listen(listening.again())
                logger.warning("%s was gone and is back", listening.path)
            except ConfigError as error:
                logger.warning("the socket is gone: %s", error)
                self.metrics.troubles.labels("socket").inc()
                if listening.replaced:
                    await self.stop(self.settings.agent.drain_s)
                    return

    async def _stop_when_idle(self, server: Server) -> None:
        limit = self.settings.agent.idle_exit_s
        if not limit:
            return
        idle_since = self._clock()
        while self._clock() - idle_since < limit:
            await asyncio.sleep(min(1.0, limit / 4))
            if server.clients:
                idle_since = self._clock()
        await self.stop(self.settings.agent.drain_s)


async def _keep_gauges(node: Node) -> None:
    """Who scrapes the port asks a thread, which must not look at what the event loop changes."""
    while True:
        await asyncio.sleep(GAUGES_EVERY_S)
        node.status({})


def run(settings: Settings) -> int:
    """The process `python -m s3kv.agent` and `s3kv agent run`. 1: some blocks could not be flushed at the end."""
    logging.basicConfig(
        level=settings.agent.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )

    async def main() -> tuple[int, int]:
        agent = Agent(settings)
        loop = asyncio.get_running_loop()
        stopping: set[asyncio.Task[object]] = set()

        def begin_stop() -> None:
            task: asyncio.Task[object] = asyncio.create_task(agent.stop(settings.agent.drain_s))
            stopping.add(task)
            task.add_done_callback(stopping.discard)

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, begin_stop)
        return await agent.run()

    _, unsaved = asyncio.run(main())
    return 1 if unsaved else 0
