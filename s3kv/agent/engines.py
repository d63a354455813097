"""Which ranks make up an engine, and whether it may be offered anything.

A lease has a share for every rank; it may be given only while each rank is attached to this agent, in this run, by
exactly one process, and can read what is offered: mapping an arena takes a minute where its memory is registered. Two
engines under one name are noticed by a second leader or a second process for one rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass, field

Holder = Hashable
MAX_RANKS = 1024
"""More than any node has; a client's word is not a reason to count further."""


@dataclass(slots=True)
class Engine:
    name: str
    ranks: int
    leaders: Counter[Holder] = field(default_factory=Counter)
    members: dict[int, Counter[Holder]] = field(default_factory=dict)
    """Processes by rank, with their connections: an old one may end after its process has come back on another."""
    mapped: Counter[int] = field(default_factory=Counter)
    """Connections by rank whose process has mapped the arenas."""

    def trouble(self) -> str:
        """Why nothing may be offered; empty when all is well."""
        if len(self.leaders) > 1 or any(len(holders) > 1 for holders in self.members.values()):
            return "two engines share one name: set S3KV_ENGINE_ID, different for each engine and equal on its ranks"
        missing = next((rank for rank in range(self.ranks) if not self.mapped[rank]), None)
        if missing is None:
            return ""
        lacks = "has not mapped the agent's memory yet" if self.members.get(missing) else "is not attached"
        return f"rank {missing} of {self.ranks} {lacks}"

    def readers(self) -> dict[Hashable, Holder]:
        return {rank: next(iter(holders)) for rank, holders in self.members.items()}

    @property
    def empty(self) -> bool:
        return not self.leaders and not any(self.members.values())


class Engines:
    """The engines of one namespace."""

    def __init__(self) -> None:
        self._by_name: dict[str, Engine] = {}

    def join(self, name: str, ranks: int, holder: Holder, *, rank: int, leader: bool) -> Engine:
        """Raises ValueError when the ranks make no sense or do not agree with the engine's other members."""
        if not 0 <= rank < ranks <= MAX_RANKS:
            raise ValueError(f"rank {rank} of {ranks} makes no sense")
        engine = self._by_name.setdefault(name, Engine(name, ranks))
        if engine.ranks != ranks:
            raise ValueError(f"engine {name} has {engine.ranks} ranks, not {ranks}: set S3KV_ENGINE_ID")
        members = engine.leaders if leader else engine.members.setdefault(rank, Counter())
        members[holder] += 1
        return engine

    def leave(self, name: str, holder: Holder, *, rank: int, leader: bool, mapped: bool = False) -> None:
        """`mapped`: the connection was counted in `Engine.mapped`."""
        engine = self._by_name.get(name)
        if engine is None:
            return
        engine.mapped[rank] -= mapped
        members = engine.leaders if leader else engine.members.get(rank, Counter())
        members[holder] -= 1
        if members[holder] <= 0:
            del members[holder]
        if engine.empty:
            del self._by_name[name]

    def __len__(self) -> int:
        return len(self._by_name)
