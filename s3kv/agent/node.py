"""All that the agent knows of its node: namespaces, and the processes that use them."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

from s3kv.agent.engines import Engine
from s3kv.agent.namespace import Namespace
from s3kv.agent.resources import Resources
from s3kv.client.protocol import ArenaInfo, Attach, Attached
from s3kv.errors import ConfigError, CorruptData
from s3kv.identity import NamespaceSpec

logger = logging.getLogger("s3kv.agent")


class Refusal(Exception):
    """The request is understood and not carried out; the text is one sentence for the client."""


@dataclass(slots=True)
class Seat:
    """What one connection has attached to. `ns` numbers are a connection's own way to name a namespace."""

    ns: int
    namespace: Namespace
    engine: Engine
    rank: int
    leader: bool
    write: tuple[int, ...] = ()
    mapped: bool = False

    def note_mapped(self) -> None:
        """The process has mapped what it was given when it attached."""
        if not self.mapped and not self.leader:
            self.mapped = True
            self.engine.mapped[self.rank] += 1


@dataclass(slots=True)
class ClientState:
    """One connection: `holder` is the process behind it (several connections may share one)."""

    role: str
    holder: Hashable
    seats: dict[int, Seat] = field(default_factory=dict)


class Node:
    def __init__(self, resources: Resources, epoch: int) -> None:
        self.r = resources
        self.epoch = epoch
        self.namespaces: dict[bytes, Namespace] = {}
        self._connections: dict[Hashable, int] = {}

    # ---- attaching

    def attach(self, client: ClientState, message: Attach) -> tuple[Attached, list[int]]:
        """Give a rank its place; returns the reply and the descriptors that ride along. Raises Refusal."""
        try:
            spec = NamespaceSpec.from_json(message.namespace)
            namespace = self._namespace(spec, pinned=message.pinned)
        except (CorruptData, ConfigError, ValueError) as error:
            raise Refusal(str(error)) from error
        unknown = {*message.read, *message.write} - set(namespace.arenas)
        if unknown:
            raise Refusal(f"the namespace has no part {min(unknown)}")
        leader = client.role == "leader"
        try:
            engine = namespace.engines.join(
                message.engine, message.ranks, client.holder, rank=message.rank, leader=leader
            )
        except ValueError as error:
            raise Refusal(str(error)) from error
        may_pin = namespace.directory.attached(pinned_memory=message.pinned, holder=client.holder) and message.pinned
        ns = len(client.seats) + 1
        client.seats[ns] = Seat(ns, namespace, engine, message.rank, leader, message.write)
        parts = sorted({*message.read, *message.write})
        arenas = [namespace.arenas[part] for part in parts]
        infos = tuple(ArenaInfo(part, arena.slots, arena.slot_bytes) for part, arena in zip(parts, arenas, strict=True))
        return Attached(message.id, ns, infos, may_pin), [arena.fd for arena in arenas]

    def _namespace(self, spec: NamespaceSpec, *, pinned: bool) -> Namespace:
        namespace = self.namespaces.get(spec.digest)
        if namespace is None:
            namespace = self.namespaces[spec.digest] = Namespace(spec, self.r, pinned=pinned)
            logger.info("namespace %s: model %s, %d slots", spec.name, spec.model, namespace.directory.counters().slots)
        return namespace

    def named(self, name: str) -> Namespace:
        """By its name, or the only one for an empty name. Raises Refusal."""
        known = list(self.namespaces.values())
        if not name and len(known) == 1:
            return known[0]
        for namespace in known:
            if namespace.spec.name == name:
                return namespace
        raise Refusal(f"the agent serves no namespace {name!r} now; it serves {[n.spec.name for n in known]}")

    # ---- processes

    def connected(self, holder: Hashable) -> None:
        self._connections[holder] = self._connections.get(holder, 0) + 1
        for namespace in self.namespaces.values():
            namespace.directory.holder_back(holder)

    def disconnected(self, client: ClientState) -> None:
        """The connection is gone; its process may still be copying, so what it holds stays until it has exited."""
        for seat in client.seats.values():
            seat.namespace.engines.leave(
                seat.engine.name, client.holder, rank=seat.rank, leader=seat.leader, mapped=seat.mapped
            )
        left = self._connections.get(client.holder, 1) - 1
        self._connections[client.holder] = left
        if not left:
            del self._connections[client.holder]
            for namespace in self.namespaces.values():
                namespace.directory.quarantine_holder(client.holder)

    def exited(self, holder: Hashable) -> None:
        """The process HAS exited: nothing of it copies any more."""
        for namespace in self.namespaces.values():
            namespace.directory.holder_gone(holder)
            namespace.promises.holder_gone(holder)

    # ---- all namespaces

    async def drain(self, deadline_s: float) -> tuple[int, int]:
        """Returns (chunks stored, blocks not stored) of all namespaces."""
        results = await asyncio.gather(*(each.drain(deadline_s) for each in self.namespaces.values()))
        return sum(chunks for chunks, _ in results), sum(blocks for _, blocks in results)

    def forget(self, name: str) -> int:
        """Drop every resident block from the map; returns how many. What reads or uploads them goes on."""
        chosen = [self.named(name)] if name else list(self.namespaces.values())
        return sum(each.directory.drop(list(each.directory.resident())) for each in chosen)

    def status(self, extra: dict[str, Any]) -> bytes:
        metrics = self.r.metrics
        totals = {
            name: metrics.total(getattr(metrics, name))
            for name in (
                "saved_blocks", "uploaded_chunks", "uploaded_blocks", "uploaded_bytes", "raw_bytes", "known_blocks",
                "dropped_blocks", "fetched_blocks", "fetched_bytes", "failed_fetches", "failed_puts", "repairs",
                "troubles", "not_offered", "refused_clients", "matched_blocks",
            )
        }  # fmt: skip
        settings = self.r.settings
        fields = {
            **extra,
            "epoch": self.epoch,
            "store": settings.store.url,
            "capacity_bytes": settings.tier.capacity_bytes,
            "charged_bytes": self.r.budget.charged_bytes,
            "clients": sum(self._connections.values()),
            "totals": totals,
            "namespaces": [namespace.status() for namespace in self.namespaces.values()],
        }
        return json.dumps(fields).encode()

    async def close(self) -> None:
        for namespace in self.namespaces.values():
            await namespace.close()
        self.namespaces.clear()
