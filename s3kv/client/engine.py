"""The engine's side of the protocol. Nothing here raises once an engine runs: trouble is counted, and is a miss.

Invariants kept here:
- No call waits longer than the budget of a match plus `agent.call_timeout_s` (invariant 5), and a call that has to
  connect again first gets no more time for that.
- Slots are named together with the epoch of the agent that gave them. A worker keeps an old agent's arena mapped until
  it sees an offer of a newer one, so a promise made by an agent that has died since is still kept from its memory.
  Where leader and worker are in one process (an engine of one rank) they know when nothing is promised any more, and
  the arena of an agent that has ended is unmapped then: the next agent may need the memory to start at all.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from s3kv.client.connection import Connection, close_all
from s3kv.client.holdings import holdings_of
from s3kv.client.protocol import (
    MAX_BLOCKS,
    MAX_SECONDS,
    NO_SLOT,
    Abandon,
    Attach,
    Attached,
    Commit,
    Done,
    Finished,
    Mapped,
    Match,
    Matched,
    Promised,
    PromiseState,
    Release,
    Reply,
    Reserve,
    Reserved,
    join_hashes,
    pack_u32,
    unpack_u32,
)
from s3kv.client.reconnecting import ReconnectingClient
from s3kv.client.trust import has_exited
from s3kv.errors import AgentUnavailable, ProtocolError
from s3kv.identity import REPLICATED, NamespaceSpec
from s3kv.settings import Settings
from s3kv.tier.arena import Arena

MAX_EPOCHS = 8
"""Arenas of so many agents are kept mapped at most. An offer is used within an iteration or two, in which no agent can
be started as often; and without a bound an agent that dies again and again would fill the engine's memory."""


@dataclass(frozen=True, slots=True)
class Offer:
    """`slots[i]` holds block `first_block + i`, pinned until `lease` is released. `lease` 0: nothing is offered."""

    lease: int = 0
    epoch: int = 0
    slots: list[int] = field(default_factory=list)
    pending: int = 0
    """Policy park: blocks that are promised; `slots` is empty then, and `WorkerClient.promised` says when they came."""


@dataclass(frozen=True, slots=True)
class LeaseState:
    ready: bool = False
    failed: bool = False
    slots: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Reservation:
    """`slots[i]` is -1 where block i need not, or cannot, be written."""

    epoch: int = 0
    slots: list[int] = field(default_factory=list)
    tickets: list[int] = field(default_factory=list)


class LeaderClient(ReconnectingClient):
    """The scheduler's client: asks, and gives back. One thread at a time."""

    def __init__(
        self,
        settings: Settings,
        namespace: NamespaceSpec,
        *,
        ranks: int,
        engine_id: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(settings, namespace, role="leader", rank=0, ranks=ranks, engine_id=engine_id, clock=clock)
        self._holdings = holdings_of(engine_id, namespace, ranks)
        self._holdings.led = True
        load = settings.load
        self._wait_s_per_block = min(load.wait_ms_per_1k_tokens * namespace.tokens_per_block / 1e6, MAX_SECONDS)
        self._wait_cap_s = min(load.wait_cap_ms / 1e3, MAX_SECONDS)
        if load.policy != "wait":
            self._wait_s_per_block = self._wait_cap_s = 0.0
        self._park = load.policy == "park"
        self._min_blocks = max(1, -(-load.min_tokens // namespace.tokens_per_block))

    def match(self, hashes: Sequence[bytes], *, first_block: int = 0) -> Offer:
        """Pin what can be loaded of `hashes[first_block:]`; `hashes[:first_block]` are on the device already.

        Waits at most min(load.wait_cap_ms, load.wait_ms_per_1k_tokens × tokens in storage), then offers what is there.
        """
        if first_block >= len(hashes) or (usable := self._usable()) is None:
            return Offer()
        connection, ns, deadline = usable
        wanted = hashes[first_block : first_block + MAX_BLOCKS]
        message = Match(
            connection.next_id(), ns, join_hashes(wanted), 0,
            self._wait_s_per_block, self._wait_cap_s, self._park, self._min_blocks,
        )  # fmt: skip
        try:
            with self._holdings.asking(connection.epoch):
                reply = self._call(
                    connection,
                    message,
                    Matched,
                    deadline + self._wait_cap_s,
                    on_late=lambda late: self._give_back(ns, connection.epoch, late),
                )
                slots = self._slots_of(connection, reply.slots).tolist()
                if reply.lease:
                    self._holdings.leased(connection.epoch, reply.lease)
        except AgentUnavailable:
            return Offer()
        if reply.reason:
            self.stats.trouble("not_offered", reply.reason)
        self.stats.count("matched_blocks", len(slots))
        return Offer(reply.lease, connection.epoch, slots, reply.pending)

    def release(self, lease: int, epoch: int) -> None:
        """Give the whole lease back: no worker was told of it, or none will read it."""
        if lease:
            self._holdings.released(epoch, lease)
            self._tell(Release(self._ns, lease, -1), epoch)

    def finished(self, tip: bytes) -> None:
        """A request has ended at block `tip`: its run may be sealed once its blocks are committed."""
        self._tell(Finished(self._ns, tip), self.epoch)

    def _give_back(self, ns: int, epoch: int, late: Reply) -> None:
        if isinstance(late, Matched) and late.lease:
            self.stats.count("late_matches")
            self._tell(Release(ns, late.lease, -1), epoch)


def parts_of_rank(namespace: NamespaceSpec, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The parts that `rank` reads and those it writes: its own shard, and the replicated part, which rank 0 writes."""
    shards = [part.shard for part in namespace.parts]
    own = tuple(shard for shard in shards if shard != REPLICATED and shard == rank % namespace.shards)
    shared = tuple(shard for shard in shards if shard == REPLICATED)
    return own + shared, own + (shared if rank == 0 else ())


class WorkerClient(ReconnectingClient):
    """One rank's client. `release` may come from another thread than the savers' calls."""

    def __init__(
        self,
        settings: Settings,
        namespace: NamespaceSpec,
        *,
        rank: int,
        ranks: int,
        engine_id: str,
        pinned: bool = False,
        clock: Callable[[], float] = time.monotonic,
        on_arena: Callable[[Arena, bool], None] = lambda arena, may_pin: None,
        on_arena_gone: Callable[[Arena], None] = lambda arena: None,
    ) -> None:
        """`on_arena(arena, may_pin)` is called for each arena mapped, `on_arena_gone` before it is unmapped.

        pinned: ask for memory that may be registered with CUDA whole. `may_pin` says whether the node's budget has it.
        """
        super().__init__(settings, namespace, role="worker", rank=rank, ranks=ranks, engine_id=engine_id, clock=clock)
        self.read_parts, self.write_parts = parts_of_rank(namespace, rank)
        self._pinned = pinned
        self._on_arena = on_arena
        self._on_arena_gone = on_arena_gone
        self._arenas: dict[int, dict[int, Arena]] = {}
        # epoch -> part -> arena; several threads put and take whole epochs, each in one step, so there is no lock
        self._runs: dict[int, int] = {}  # epoch -> pidfd of its agent
        self._holdings = holdings_of(engine_id, namespace, ranks)

    def connect(self) -> bool:
        """As the leader's. Arenas that nobody will read or write any more are unmapped first."""
        for epoch in list(self._arenas):
            if self._holdings.led and has_exited(self._runs.get(epoch, -1)) and self._holdings.nothing_of(epoch):
                self._unmap(epoch)
        return super().connect()

    def arena(self, epoch: int, part: int) -> Arena | None:
        return self._arenas.get(epoch, {}).get(part)

    def forget_epochs_before(self, epoch: int) -> None:
        """An offer of `epoch` has come: arenas of agents before it are read no more."""
        order = list(self._arenas)
        if epoch not in order or order[0] == epoch:
            return
        for old in order[: order.index(epoch)]:
            self._unmap(old)

    def reserve(self, part: int, parent: bytes, start_block: int, hashes: Sequence[bytes]) -> Reservation:
        """Places for the blocks `hashes`, which follow `parent` in their chain from ordinal `start_block` on.

        One message names MAX_BLOCKS of them; the rest get no place.
        """
        if not hashes or (usable := self._usable()) is None:
            return Reservation(0, [-1] * len(hashes), [0] * len(hashes))
        connection, ns, deadline = usable
        wanted = hashes[:MAX_BLOCKS]
        beyond = len(hashes) - len(wanted)
        message = Reserve(connection.next_id(), ns, part, parent, start_block, join_hashes(wanted))
        try:
            with self._holdings.asking(connection.epoch):
                reply = self._call(
                    connection,
                    message,
                    Reserved,
                    deadline,
                    on_late=lambda late: self._abandon_late(connection.epoch, ns, part, late),
                )
                slots, tickets = self._slots_of(connection, reply.slots), self._slots_of(connection, reply.tickets)
                if not len(slots) == len(tickets) == len(wanted):
                    connection.close()
                    raise AgentUnavailable("the agent reserved another number of slots than asked")
                self._holdings.reserved(connection.epoch, len(slots) - slots.count(NO_SLOT))
        except AgentUnavailable:
            return Reservation(0, [-1] * len(hashes), [0] * len(hashes))
        places = [-1 if slot == NO_SLOT else slot for slot in slots]
        return Reservation(connection.epoch, places + [-1] * beyond, tickets.tolist() + [0] * beyond)

    def promised(self, lease: int, epoch: int) -> LeaseState:
        """Policy park: how far the fetches of a lease are.

        A connection that broke says nothing of the agent behind it, so that is "not yet". Another run of the agent is a
        failure: the promise went with the one that gave it.
        """
        if (usable := self._usable()) is None:
            return LeaseState()
        connection, ns, deadline = usable
        if connection.epoch != epoch:
            return LeaseState(failed=True)
        try:
            reply = self._call(connection, Promised(connection.next_id(), ns, lease), PromiseState, deadline)
            return LeaseState(reply.ready, reply.failed, self._slots_of(connection, reply.slots).tolist())
        except AgentUnavailable:
            return LeaseState()

    def commit(self, part: int, reservation: Reservation, indices: Sequence[int]) -> None:
        """Blocks `indices` of the reservation are written."""
        self._answer(Commit, part, reservation, indices)

    def abandon(self, part: int, reservation: Reservation, indices: Sequence[int]) -> None:
        """Blocks `indices` of the reservation will not be written, and no copy into them is under way."""
        self._answer(Abandon, part, reservation, indices)

    def release(self, lease: int, epoch: int) -> None:
        """This rank's copies out of the lease's slots are complete."""
        if lease:
            self._holdings.released(epoch, lease)
            self._tell(Release(self._ns, lease, self._rank), epoch)

    def close(self) -> None:
        super().close()
        for epoch in list(self._arenas):
            self._unmap(epoch)

    def _answer(
        self, kind: type[Commit] | type[Abandon], part: int, reservation: Reservation, indices: Sequence[int]
    ) -> None:
        slots = pack_u32(reservation.slots[index] for index in indices)
        tickets = pack_u32(reservation.tickets[index] for index in indices)
        if slots:
            self._holdings.reserved(reservation.epoch, -len(indices))
            self._tell(kind(self._ns, part, slots, tickets), reservation.epoch)

    def _abandon_late(self, epoch: int, ns: int, part: int, late: Reply) -> None:
        if isinstance(late, Reserved):
            self.stats.count("late_reservations")
            pairs = zip(unpack_u32(late.slots), unpack_u32(late.tickets), strict=False)
            kept = [(slot, ticket) for slot, ticket in pairs if slot != NO_SLOT]
            slots, tickets = pack_u32(slot for slot, _ in kept), pack_u32(ticket for _, ticket in kept)
            self._tell(Abandon(ns, part, slots, tickets), epoch)

    def _attach_message(self, identity: int) -> Attach:
        return Attach(
            identity, self._namespace.to_json(), self._engine_id, self._rank, self._ranks,
            self.read_parts, self.write_parts, self._pinned,
        )  # fmt: skip

    def _attach(self, connection: Connection, timeout_s: float) -> float:
        left_s = super()._attach(connection, timeout_s)
        if connection.epoch not in self._runs:
            self._runs[connection.epoch] = connection.open_pidfd()
        connection.call(Mapped(connection.next_id(), self._ns), Done, timeout_s=left_s)
        return left_s

    def _map(self, epoch: int, attached: Attached, fds: list[int]) -> None:
        if epoch in self._arenas:  # only the connection is new
            close_all(fds)
            return
        try:
            if len(fds) != len(attached.arenas):
                raise ProtocolError(f"{len(fds)} descriptors came for {len(attached.arenas)} arenas")
            arenas = {
                info.part: Arena.attach(fd, info.slots, info.slot_bytes)
                for info, fd in zip(attached.arenas, fds, strict=True)
            }
        finally:
            close_all(fds)
        for arena in arenas.values():
            self._on_arena(arena, attached.may_pin)
        self._arenas[epoch] = arenas
        for old in list(self._arenas)[:-MAX_EPOCHS]:
            self._unmap(old)

    def _unmap(self, epoch: int) -> None:
        for arena in self._arenas.pop(epoch, {}).values():
            self._on_arena_gone(arena)
            arena.close()
        if (pidfd := self._runs.pop(epoch, -1)) >= 0:
            os.close(pidfd)
        self._holdings.forget(epoch)
