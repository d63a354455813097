"""An agent in this process: slots in a bytearray, a dict of blocks, leases, and a bucket that is a dict.

It keeps the promises that the real agent keeps and checks what its clients owe it: a slot is never given away while a
lease or a reservation is on it, freed slots are filled with garbage, and `check_at_rest` finds pins that were left.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from s3kv.client.engine import LeaseState, Offer, Reservation
from s3kv.client.engine import parts_of_rank as parts_for
from s3kv.identity import NamespaceSpec

GARBAGE = 0xEE


class FakeArena:
    def __init__(self, slots: int, slot_bytes: int) -> None:
        self.slots, self.slot_bytes = slots, slot_bytes
        self.memory = bytearray([GARBAGE]) * (slots * slot_bytes)

    @property
    def buffer(self) -> memoryview:
        return memoryview(self.memory)

    def view(self, slot: int) -> memoryview:
        return self.buffer[slot * self.slot_bytes : (slot + 1) * self.slot_bytes]


@dataclass
class Block:
    slot: int
    parent: bytes
    start: int
    waiting_for: set[int]
    writing: set[int] = field(default_factory=set)
    pins: int = 0
    fetched_after: int = 0

    @property
    def resident(self) -> bool:
        return not self.waiting_for and not self.fetched_after


@dataclass
class Lease:
    hashes: list[bytes]
    shares: set[int]


@dataclass
class Directory:
    """The blocks of one namespace."""

    namespace: NamespaceSpec
    slots: int
    arenas: dict[int, FakeArena] = field(default_factory=dict)
    blocks: OrderedDict[bytes, Block] = field(default_factory=OrderedDict)
    free: list[int] = field(default_factory=list)
    bucket: dict[bytes, dict[int, bytes]] = field(default_factory=dict)
    leases: dict[int, Lease] = field(default_factory=dict)
    ever_saved: dict[bytes, tuple[bytes, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.arenas = {part.shard: FakeArena(self.slots, part.slot_bytes) for part in self.namespace.parts}
        self.free = list(range(self.slots))


class FakeAgent:
    """`fetch_polls`: how often `promised` says "not yet" for a block from the bucket. `broken`: fetches fail then."""

    def __init__(self, slots: int = 64, *, fetch_polls: int = 0, upload: bool = True) -> None:
        self.slots, self.fetch_polls, self.upload = slots, fetch_polls, upload
        self.epoch = 1
        self.alive = True
        self.broken_fetches = False
        self.refuse_reservations = False
        self.lock = threading.RLock()
        self.directories: dict[bytes, Directory] = {}
        self.finished: list[bytes] = []
        self.clients: list[Any] = []
        self._next_lease = 0
        self.on_match: Callable[[Directory], None] = lambda directory: None

    # ---- factories, as the connector's client_factory ----

    def leader(self, settings: Any, namespace: NamespaceSpec, *, ranks: int, engine_id: str) -> FakeLeader:
        return self._keep(FakeLeader(self, settings, namespace, ranks, engine_id))

    def worker(
        self,
        settings: Any,
        namespace: NamespaceSpec,
        *,
        rank: int,
        ranks: int,
        engine_id: str,
        pinned: bool,
        on_arena: Callable[[Any], None],
        on_arena_gone: Callable[[Any], None],
    ) -> FakeWorker:
        return self._keep(FakeWorker(self, namespace, rank, ranks, engine_id, on_arena, on_arena_gone))

    def _keep(self, client: Any) -> Any:
        self.clients.append(client)
        return client

    def directory(self, namespace: NamespaceSpec) -> Directory:
        with self.lock:
            if namespace.digest not in self.directories:
                self.directories[namespace.digest] = Directory(namespace, self.slots)
            return self.directories[namespace.digest]

    def restart(self) -> None:
        """Another run: the tier is empty and leases mean nothing; the bucket stays."""
        with self.lock:
            self.epoch += 1
            old, self.directories = self.directories, {}
            for digest, directory in old.items():
                self.directories[digest] = Directory(directory.namespace, self.slots, bucket=directory.bucket)

    def forget_tier(self) -> None:
        """Everything unpinned leaves the tier for the bucket."""
        with self.lock:
            for directory in self.directories.values():
                while self._evict_one(directory):
                    pass

    def check_at_rest(self) -> None:
        """No lease, pin or reservation is left."""
        with self.lock:
            for directory in self.directories.values():
                assert directory.leases == {}
                assert [block for block in directory.blocks.values() if block.pins] == []
                assert [block for block in directory.blocks.values() if block.writing] == []
                assert len(directory.free) + len(directory.blocks) == directory.slots

    def blocks_saved(self) -> dict[bytes, tuple[bytes, int]]:
        """hash -> (parent, ordinal) of every block that was ever resident."""
        return {key: value for each in self.directories.values() for key, value in each.ever_saved.items()}

    # ---- what the clients ask ----

    def match(self, directory: Directory, hashes: Sequence[bytes], first: int, ranks: int, park: bool) -> Offer:
        with self.lock:
            self.on_match(directory)
            for name in hashes[:first]:
                if name in directory.blocks:
                    directory.blocks.move_to_end(name)
            chosen: list[bytes] = []
            pending = 0
            for name in hashes[first:]:
                block = directory.blocks.get(name)
                if block is None and name in directory.bucket and not self.broken_fetches:
                    block = self._fetch(directory, name, self.fetch_polls if park else 0, {*hashes[:first], *chosen})
                if block is None or not (block.resident or (park and block.fetched_after)):
                    break
                pending += not block.resident
                directory.blocks.move_to_end(name)
                block.pins += 1
                chosen.append(name)
            if not chosen:
                return Offer()
            self._next_lease += 1
            directory.leases[self._next_lease] = Lease(chosen, set(range(ranks)))
            if pending:
                return Offer(self._next_lease, self.epoch, [], len(chosen))
            return Offer(self._next_lease, self.epoch, [directory.blocks[name].slot for name in chosen])

    def release(self, directory: Directory, lease_id: int, epoch: int, rank: int | None) -> None:
        with self.lock:
            lease = directory.leases.get(lease_id) if epoch == self.epoch else None
            if lease is None:
                return
            lease.shares = set() if rank is None else lease.shares - {rank}
            if not lease.shares:
                del directory.leases[lease_id]
                for name in lease.hashes:
                    directory.blocks[name].pins -= 1

    def promised(self, directory: Directory, lease_id: int, epoch: int) -> LeaseState:
        with self.lock:
            lease = directory.leases.get(lease_id) if epoch == self.epoch else None
            if lease is None or self.broken_fetches:
                return LeaseState(failed=True)
            blocks = [directory.blocks[name] for name in lease.hashes]
            for name, block in zip(lease.hashes, blocks, strict=True):
                if block.fetched_after:
                    block.fetched_after -= 1
                    if not block.fetched_after:
                        self._fill(directory, name, block)
            return LeaseState(all(block.resident for block in blocks), False, [block.slot for block in blocks])

    def reserve(
        self, directory: Directory, part: int, parent: bytes, start: int, hashes: Sequence[bytes]
    ) -> Reservation:
        with self.lock:
            if not self.alive or self.refuse_reservations:
                return Reservation(0, [-1] * len(hashes), [0] * len(hashes))
            slots = []
            for offset, name in enumerate(hashes):
                block = directory.blocks.get(name)
                if block is None and (slot := self._take_slot(directory)) is not None:
                    before = parent if offset == 0 else hashes[offset - 1]
                    block = Block(slot, before, start + offset, set(directory.arenas))
                    directory.blocks[name] = block
                wanted = block is not None and part in block.waiting_for - block.writing
                slots.append(block.slot if block is not None and wanted else -1)
                if block is not None and wanted:
                    block.writing.add(part)
            return Reservation(self.epoch, slots, [0] * len(hashes))

    def commit(self, directory: Directory, part: int, reservation: Reservation, indices: Sequence[int]) -> None:
        with self.lock:
            by_slot = {block.slot: (name, block) for name, block in directory.blocks.items()}
            for index in indices if reservation.epoch == self.epoch else ():
                name, block = by_slot[reservation.slots[index]]
                block.waiting_for.discard(part)
                block.writing.discard(part)
                if block.resident:
                    directory.ever_saved[name] = (block.parent, block.start)

    def abandon(self, directory: Directory, part: int, reservation: Reservation, indices: Sequence[int]) -> None:
        with self.lock:
            by_slot = {block.slot: name for name, block in directory.blocks.items()}
            for index in indices if reservation.epoch == self.epoch else ():
                name = by_slot.get(reservation.slots[index])
                if name is not None:
                    directory.blocks[name].writing.discard(part)

    def _fetch(self, directory: Directory, name: bytes, polls: int, keep: set[bytes]) -> Block | None:
        slot = self._take_slot(directory, keep)
        if slot is None:
            return None
        parent, start = directory.ever_saved[name]
        block = Block(slot, parent, start, set(), fetched_after=polls)
        directory.blocks[name] = block
        if not polls:
            self._fill(directory, name, block)
        return block

    def _fill(self, directory: Directory, name: bytes, block: Block) -> None:
        for part, data in directory.bucket[name].items():
            directory.arenas[part].view(block.slot)[:] = data

    def _take_slot(self, directory: Directory, keep: set[bytes] = frozenset()) -> int | None:  # type: ignore[assignment]
        if not directory.free and not self._evict_one(directory, keep):
            return None
        return directory.free.pop()

    def _evict_one(self, directory: Directory, keep: set[bytes] = frozenset()) -> bool:  # type: ignore[assignment]
        for name, block in directory.blocks.items():
            # A block that some rank never wrote, and that nobody writes now, goes like any other.
            if not (block.pins or block.writing or block.fetched_after or name in keep):
                if self.upload and block.resident:
                    directory.bucket[name] = {
                        part: bytes(arena.view(block.slot)) for part, arena in directory.arenas.items()
                    }
                for arena in directory.arenas.values():
                    arena.view(block.slot)[:] = bytes([GARBAGE]) * arena.slot_bytes
                del directory.blocks[name]
                directory.free.append(block.slot)
                return True
        return False


class FakeLeader:
    def __init__(self, agent: FakeAgent, settings: Any, namespace: NamespaceSpec, ranks: int, engine_id: str) -> None:
        self.agent, self.namespace, self.ranks, self.engine_id = agent, namespace, ranks, engine_id
        self.park = settings.load.policy == "park"
        self.connected = False
        self.closed = False
        self.matches = 0

    @property
    def epoch(self) -> int:
        return self.agent.epoch if self.agent.alive and self.connected else 0

    def connect(self) -> bool:
        self.connected = True
        return self.agent.alive

    def match(self, hashes: Sequence[bytes], *, first_block: int = 0) -> Offer:
        self.matches += 1
        if not self.agent.alive:
            return Offer()
        directory = self.agent.directory(self.namespace)
        return self.agent.match(directory, hashes, first_block, self.ranks, self.park)

    def release(self, lease: int, epoch: int) -> None:
        self.agent.release(self.agent.directory(self.namespace), lease, epoch, None)

    def finished(self, tip: bytes) -> None:
        self.agent.finished.append(tip)

    def close(self) -> None:
        self.closed = True


class FakeWorker:
    def __init__(
        self,
        agent: FakeAgent,
        namespace: NamespaceSpec,
        rank: int,
        ranks: int,
        engine_id: str,
        on_arena: Callable[[Any], None],
        on_arena_gone: Callable[[Any], None],
    ) -> None:
        self.agent, self.namespace, self.rank, self.ranks, self.engine_id = agent, namespace, rank, ranks, engine_id
        self.read_parts, self.write_parts = parts_for(namespace, rank)
        self._on_arena, self._on_arena_gone = on_arena, on_arena_gone
        self.arenas: dict[int, dict[int, FakeArena]] = {}
        self.forgotten: list[int] = []

    @property
    def epoch(self) -> int:
        return self.agent.epoch if self.agent.alive and self.agent.epoch in self.arenas else 0

    def attached(self) -> bool:
        return bool(self.epoch)

    def connect(self) -> bool:
        with self.agent.lock:
            if self.agent.alive and self.agent.epoch not in self.arenas:
                self.arenas[self.agent.epoch] = dict(self.agent.directory(self.namespace).arenas)
                for arena in self.arenas[self.agent.epoch].values():
                    self._on_arena(arena)
            return self.agent.alive

    def arena(self, epoch: int, part: int) -> FakeArena | None:
        return self.arenas.get(epoch, {}).get(part)

    def forget_epochs_before(self, epoch: int) -> None:
        self.forgotten.append(epoch)
        for old in [known for known in self.arenas if known < epoch]:
            for arena in self.arenas.pop(old).values():
                self._on_arena_gone(arena)

    def reserve(self, part: int, parent: bytes, start_block: int, hashes: Sequence[bytes]) -> Reservation:
        return self.agent.reserve(self.agent.directory(self.namespace), part, parent, start_block, hashes)

    def commit(self, part: int, reservation: Reservation, indices: Sequence[int]) -> None:
        self.agent.commit(self.agent.directory(self.namespace), part, reservation, indices)

    def abandon(self, part: int, reservation: Reservation, indices: Sequence[int]) -> None:
        self.agent.abandon(self.agent.directory(self.namespace), part, reservation, indices)

    def promised(self, lease: int, epoch: int) -> LeaseState:
        return self.agent.promised(self.agent.directory(self.namespace), lease, epoch)

    def release(self, lease: int, epoch: int) -> None:
        self.agent.release(self.agent.directory(self.namespace), lease, epoch, self.rank)

    def close(self) -> None:
        for arenas in self.arenas.values():
            for arena in arenas.values():
                self._on_arena_gone(arena)
        self.arenas = {}
