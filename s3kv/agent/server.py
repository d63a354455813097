"""The socket: who may connect, frames in, answers out.

Invariants kept here:
- Only the agent's own user (and root) may connect; the socket is 0600 besides.
- A length is checked before memory is taken for it; nothing is unpickled (invariant 8).
- One connection's trouble (garbage, lies about lengths, answers never read) ends that connection alone, counted.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import socket
from collections.abc import Awaitable, Callable, Coroutine, Hashable
from typing import Any, TypeVar

from s3kv.agent.node import ClientState, Node, Refusal, Seat
from s3kv.agent.peer import may_connect, open_pidfd
from s3kv.client import protocol as p
from s3kv.client.trust import Peer, has_exited, peer_of
from s3kv.errors import ProtocolError, S3kvError

logger = logging.getLogger("s3kv.agent")

T = TypeVar("T")

HELLO_TIMEOUT_S = 5.0
WRITE_TIMEOUT_S = 10.0
_RECEIVE_BYTES = 1 << 16


class Server:
    """Serves `node` on a listening Unix socket. `on_stop(deadline_s)` is what the Stop message asks for."""

    def __init__(
        self,
        node: Node,
        *,
        version: str,
        max_clients: int,
        on_stop: Callable[[float], Awaitable[tuple[int, int]]],
    ) -> None:
        self._node = node
        self._version = version
        self._max_clients = max_clients
        self._on_stop = on_stop
        self._tasks: set[asyncio.Task[None]] = set()
        self._accepting: asyncio.Task[None] | None = None
        self._watched: dict[Hashable, int] = {}  # holder -> pidfd
        self._unseen = itertools.count(1)
        self.served = 0

    @property
    def clients(self) -> int:
        return len(self._tasks)

    def listen(self, listener: socket.socket) -> None:
        """Accept here from now on, and no longer where it did before."""
        if self._accepting is not None:
            self._accepting.cancel()
        self._accepting = asyncio.create_task(self._accept(listener))

    async def _accept(self, listener: socket.socket) -> None:
        """Until cancelled. When the machine is out of descriptors it waits instead of spinning."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _ = await loop.sock_accept(listener)
            except OSError as error:
                self._count("accept")
                logger.warning("a connection could not be accepted: %s", error)
                await asyncio.sleep(0.1)
                continue
            sock.setblocking(False)
            task = asyncio.create_task(self._serve(sock))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            self._node.r.metrics.clients.set(len(self._tasks))

    async def close(self) -> None:
        loop = asyncio.get_running_loop()
        tasks = [*self._tasks, *([self._accepting] if self._accepting is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for pidfd in self._watched.values():
            loop.remove_reader(pidfd)
            os.close(pidfd)
        self._watched.clear()

    def _count(self, reason: str) -> None:
        self._node.r.metrics.refused_clients.labels(reason).inc()

    async def _serve(self, sock: socket.socket) -> None:
        reason = ""
        try:
            await self._talk(sock)
        except (ProtocolError, Refusal) as error:
            reason = "protocol"
            logger.warning("a client was refused: %s", error)
        except TimeoutError:
            reason = "slow"
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # it went away
        except OSError as error:
            reason = "socket"
            logger.warning("a connection failed: %s", error)
        except Exception:
            reason = "fault"
            logger.exception("a connection ended by a fault")
        finally:
            sock.close()
            if reason:
                self._count(reason)
            self._node.r.metrics.clients.set(len(self._tasks) - 1)

    async def _talk(self, sock: socket.socket) -> None:
        frames = _Frames(sock)
        peer = peer_of(sock)
        async with asyncio.timeout(HELLO_TIMEOUT_S):
            hello = p.decode_request(await frames.next())
        if not isinstance(hello, p.Hello):
            raise ProtocolError("the first message was not Hello")
        if refusal := self._refusal(peer, hello):
            await frames.write(p.Refused(hello.id, refusal, fatal=True))
            raise Refusal(refusal)
        if len(self._tasks) > self._max_clients:
            full = f"more than {self._max_clients} clients (agent.max_clients)"
            await frames.write(p.Refused(hello.id, full, fatal=True, passing=True))
            raise Refusal(full)
        # A process that this PID namespace cannot see has the number 0, like every other such process.
        holder: Hashable = peer.pid or f"unseen {next(self._unseen)}"
        if hello.role != "cli":
            self._watch(sock, holder)
        self.served += 1
        client = ClientState(hello.role, holder)
        self._node.connected(holder)
        try:
            await frames.write(p.Welcome(hello.id, p.PROTOCOL, self._node.epoch, self._version))
            while True:
                request = p.decode_request(await frames.next())
                await self._answer(frames, client, request)
        finally:
            self._node.disconnected(client)

    def _refusal(self, peer: Peer, hello: p.Hello) -> str:
        if not may_connect(peer, os.getuid()):
            return f"user {peer.uid} may not use the agent of user {os.getuid()}"
        if hello.protocol != p.PROTOCOL:
            return (
                f"this agent ({self._version}) speaks protocol {p.PROTOCOL}, the client {hello.protocol}: "
                "install one release of s3kv on the node and restart the agent"
            )
        return ""

    def _watch(self, sock: socket.socket, holder: Hashable) -> None:
        known = self._watched.get(holder)
        if known is not None and not has_exited(known):
            return
        if known is not None:
            self._exited(holder)  # its number was given to another process before the loop came to its end
        pidfd = open_pidfd(sock)
        self._watched[holder] = pidfd
        asyncio.get_running_loop().add_reader(pidfd, self._exited, holder)

    def _exited(self, holder: Hashable) -> None:
        pidfd = self._watched.pop(holder)
        asyncio.get_running_loop().remove_reader(pidfd)
        os.close(pidfd)
        self._node.exited(holder)

    async def _answer(self, frames: _Frames, client: ClientState, request: p.Request) -> None:
        try:
            work = self._carry_out(client, request)
            reply, fds = await (frames.while_open(work) if isinstance(request, p.Prefetch) else work)
        except Refusal as error:
            reply, fds = p.Refused(request.id, str(error)), []  # type: ignore[union-attr]
        except S3kvError as error:
            if isinstance(error, ProtocolError) or not hasattr(request, "id"):
                raise
            reply, fds = p.Refused(request.id, str(error)), []
        if reply is None:
            return
        try:
            await frames.write(reply, fds)
        except ConnectionError:  # not after a time-out: the client may have got all of it at the last moment
            _take_back(client, request, reply)
            raise

    async def _carry_out(self, client: ClientState, request: p.Request) -> tuple[p.Reply | None, list[int]]:
        if isinstance(request, p.OfASeat):
            return await self._move(_seat(client, request.ns), client, request), []
        if isinstance(request, p.Attach):
            if client.role == "cli":
                raise ProtocolError("a command-line client may not attach")
            return self._node.attach(client, request)
        return await self._manage(request), []

    async def _move(self, seat: Seat, client: ClientState, request: p.Request) -> p.Reply | None:
        """What moves blocks: every engine's own calls."""
        namespace = seat.namespace
        match request:
            case p.Match():
                hashes = p.split_hashes(request.hashes)
                return await namespace.match(
                    seat.engine, client.holder, hashes[request.first :], request.wait_s_per_block, request.wait_cap_s,
                    park=request.park, min_blocks=request.min_blocks, identity=request.id,
                )  # fmt: skip
            case p.Reserve():
                _may_write(seat, request.part)
                hashes = p.split_hashes(request.hashes)
                _need_hash(request.parent)
                return namespace.reserve(
                    request.part, request.parent, request.start_block, hashes, client.holder, request.id
                )
            case p.Commit():
                _may_write(seat, request.part)
                namespace.commit(request.part, p.unpack_u32(request.slots), p.unpack_u32(request.tickets))
            case p.Abandon():
                _may_write(seat, request.part)
                namespace.abandon(request.part, p.unpack_u32(request.slots), p.unpack_u32(request.tickets))
            case p.Release():
                namespace.release(request.lease, -1 if seat.leader else seat.rank)
            case p.Finished():
                _need_hash(request.tip)
                namespace.finish(request.tip)
            case p.Promised():
                return namespace.promised(request.id, request.lease)
            case p.Mapped():
                seat.note_mapped()
                return p.Done(request.id)
        return None

    async def _manage(self, request: p.Request) -> p.Reply:
        """What people and their tools ask."""
        node = self._node
        match request:
            case p.Status():
                return p.Report(request.id, node.status({"version": self._version, "pid": os.getpid()}))
            case p.Metrics():
                node.status({})
                return p.Report(request.id, node.r.metrics.text())
            case p.Look():
                resident, stored = node.named(request.namespace).look(p.split_hashes(request.hashes))
                return p.Looked(request.id, resident, stored)
            case p.Prefetch():
                namespace = node.named(request.namespace)
                resident, missing = await namespace.prefetch(p.split_hashes(request.hashes), request.deadline_s)
                return p.Prefetched(request.id, resident, missing)
            case p.Drain():
                return p.Drained(request.id, *await node.drain(request.deadline_s))
            case p.Stop():
                return p.Drained(request.id, *await self._on_stop(request.deadline_s))
            case p.Forget():
                return p.Done(request.id, node.forget(request.namespace))
        raise ProtocolError(f"{type(request).__name__} may not come here")


def _has_ended(sock: socket.socket) -> bool:
    """Whether nothing more will come; takes nothing out of the socket."""
    try:
        return not sock.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        return True


def _seat(client: ClientState, ns: int) -> Seat:
    seat = client.seats.get(ns)
    if seat is None:
        raise ProtocolError(f"namespace {ns} was not attached on this connection")
    return seat


def _take_back(client: ClientState, request: p.Request, reply: p.Reply) -> None:
    """The client is gone and never heard of these slots, so nobody copies: its process may live on for weeks."""
    match request, reply:
        case p.Match(), p.Matched():
            _seat(client, request.ns).namespace.release(reply.lease, -1)
        case p.Reserve(), p.Reserved():
            slots, tickets = p.unpack_u32(reply.slots), p.unpack_u32(reply.tickets)
            _seat(client, request.ns).namespace.abandon(request.part, slots, tickets)


def _may_write(seat: Seat, part: int) -> None:
    if part not in seat.write:
        raise ProtocolError(f"rank {seat.rank} did not attach to write part {part}")


def _need_hash(value: bytes) -> None:
    if len(value) != p.HASH_BYTES:
        raise ProtocolError(f"a block hash has {p.HASH_BYTES} bytes, not {len(value)}")


class _Frames:
    """Frames of one non-blocking socket."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._loop = asyncio.get_running_loop()
        self._buffer = bytearray()

    async def next(self) -> bytes:
        """The next body. Raises ConnectionError at the end, ProtocolError for a length over the limit."""
        await self._fill(p.LENGTH.size)
        end = p.LENGTH.size + p.frame_length(self._buffer)
        await self._fill(end)
        body = bytes(self._buffer[p.LENGTH.size : end])
        del self._buffer[:end]
        return body

    async def _fill(self, size: int) -> None:
        while len(self._buffer) < size:
            data = await self._loop.sock_recv(self._sock, _RECEIVE_BYTES)
            if not data:
                raise ConnectionError("closed by the client")
            self._buffer += data

    async def while_open(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`, which is cancelled when the client has closed its end: ConnectionError then.

        A client that sends more meanwhile is there, and is not watched any further: nothing is read here.
        """
        task = asyncio.create_task(work)
        gone: asyncio.Future[None] = self._loop.create_future()

        def on_readable() -> None:
            self._loop.remove_reader(self._sock)
            if _has_ended(self._sock):
                gone.set_result(None)

        self._loop.add_reader(self._sock, on_readable)
        try:
            await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            raise ConnectionError("closed by the client")
        finally:
            self._loop.remove_reader(self._sock)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def write(self, reply: p.Reply, fds: list[int] | None = None) -> None:
        """Raises TimeoutError when the client does not read: its answers must not pile up here."""
        frame = memoryview(p.encode(reply))
        async with asyncio.timeout(WRITE_TIMEOUT_S):
            if fds:
                # A socket that took nothing yet has room for these few bytes; descriptors ride on the first of them.
                sent = socket.send_fds(self._sock, [frame], fds)
                frame = frame[sent:]
            if frame:
                await self._loop.sock_sendall(self._sock, frame)
