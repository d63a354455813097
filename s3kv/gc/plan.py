"""What to collect: a pure function of the catalog's entries and a policy.

Invariants kept here:

* **A shared prefix goes after what depends on it.** A chunk counts as used when any chunk that continues it was used
  (its effective last use), and among equals the deeper one goes first. So a plan never takes a chunk and leaves one
  that hangs on it, unless the block that it hangs on is held by another chunk too.
* **Superseded means covered.** A chunk is superseded when one other chunk with the same shards holds all of its
  blocks. A block hash stands for all tokens before it, so it is enough to find the last block, far enough in.
* **Bounded.** Two passes over the entries keep some 80 bytes a chunk, however many blocks it has.

Block hashes are compared by their first 64 bits. Two that agree by chance only make the plan more careful: a chunk is
taken to be depended upon. For "superseded" the ordinals have to agree as well.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from s3kv.catalog.touches import TOUCH_EVERY_HOURS
from s3kv.format.limits import ID_BYTES
from s3kv.format.records import SECONDS_PER_HOUR
from s3kv.gc.links import Links, find_links

Ints = NDArray[np.int64]
Keys = NDArray[np.uint64]


class Added(Protocol):
    """What the planner reads of `ChunkAdded`."""

    chunk_id: bytes
    parent: bytes
    start_block: int
    blocks: tuple[bytes, ...]
    shards: tuple[int, ...]
    groups: tuple[Any, ...]

    @property
    def size(self) -> int: ...


class Entry(Protocol):
    """What the planner reads of a catalog's `ChunkEntry`."""

    @property
    def added(self) -> Any: ...
    @property
    def touched_hour(self) -> int: ...


class Reason(IntEnum):
    """Why a chunk goes. In the order in which reasons are looked for."""

    ORPHAN = 1
    SUPERSEDED = 2
    IDLE = 3
    SIZE = 4

    @property
    def text(self) -> str:
        return _TEXTS[self]


_TEXTS = {
    Reason.ORPHAN: "orphan: no record names it",
    Reason.SUPERSEDED: "superseded: another chunk holds all of it",
    Reason.IDLE: "idle for longer than the limit",
    Reason.SIZE: "least recently used, over the size limit",
}


@dataclass(frozen=True, slots=True)
class Source:
    """A namespace's stored chunks; `entries()` can be called twice and gives them in the same order."""

    namespace: str
    entries: Callable[[], Iterable[Entry]]


@dataclass(frozen=True, slots=True)
class Orphan:
    """Objects without a record, of one chunk id. `objects` of them with `size` bytes in all."""

    namespace: str
    chunk_id: bytes
    size: int
    objects: int


@dataclass(frozen=True, slots=True)
class Policy:
    """`now` in seconds since 1970. None and False: that reason is not looked for."""

    now: float
    max_bytes: int | None = None
    max_idle_s: float | None = None
    superseded: bool = False


class Doomed(NamedTuple):
    namespace: str
    chunk_id: bytes
    reason: Reason
    size: int
    objects: int
    blocks: int
    last_use_hour: int


@dataclass(frozen=True, slots=True)
class Line:
    """One row of what is shown: all chunks of one namespace that go for one reason."""

    namespace: str
    reason: Reason
    chunks: int
    objects: int
    blocks: int
    bytes: int


@dataclass(slots=True)
class Plan:
    """Chunks to delete, in the order of deletion; column arrays of equal length."""

    namespaces: tuple[str, ...]
    chunks_before: int
    bytes_before: int
    ids: NDArray[np.uint8]
    """Shape (n, 16)."""
    namespace: NDArray[np.uint16]
    reason: NDArray[np.uint8]
    size: Ints
    objects: NDArray[np.uint16]
    blocks: NDArray[np.uint32]
    hour: NDArray[np.uint32]
    """Effective last use, hours since 1970."""
    policy: Policy = field(default_factory=lambda: Policy(0.0))

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def total_bytes(self) -> int:
        """Of all that goes, orphans included."""
        return int(self.size.sum())

    @property
    def bytes_after(self) -> int:
        """Of what the catalog names; orphans are not among that."""
        return self.bytes_before - int(self.size[self.reason != Reason.ORPHAN].sum())

    def items(self) -> Iterator[Doomed]:
        for row in range(len(self)):
            yield Doomed(
                self.namespaces[self.namespace[row]],
                self.ids[row].tobytes(),
                Reason(int(self.reason[row])),
                int(self.size[row]),
                int(self.objects[row]),
                int(self.blocks[row]),
                int(self.hour[row]),
            )

    def lines(self) -> list[Line]:
        found = []
        for index, name in enumerate(self.namespaces):
            for reason in Reason:
                rows = (self.namespace == index) & (self.reason == reason)
                if rows.any():
                    objects, blocks = int(self.objects[rows].sum()), int(self.blocks[rows].sum())
                    found.append(Line(name, reason, int(rows.sum()), objects, blocks, int(self.size[rows].sum())))
        return found


@dataclass(slots=True)
class Columns:
    """The stored chunks of all sources, a row each. `parent` and `tip`: first 64 bits of a block hash."""

    ids: NDArray[np.uint8]
    namespace: NDArray[np.uint16]
    parent: Keys
    tip: Keys
    start: NDArray[np.uint32]
    blocks: NDArray[np.uint32]
    size: Ints
    objects: NDArray[np.uint16]
    hour: NDArray[np.uint32]
    shards: NDArray[np.uint16]
    """Which set of shards: equal numbers, equal sets."""

    def __len__(self) -> int:
        return len(self.ids)


def make_plan(sources: Sequence[Source], policy: Policy, orphans: Sequence[Orphan] = ()) -> Plan:
    """The chunks that `policy` gives up, dependents before what they depend on. The order of `sources` is of no effect
    but on names. Bytes are counted over all sources together."""
    columns = read_columns(sources)
    links = find_links(columns, lambda: (entry for source in sources for entry in source.entries()))
    superseded = links.superseded(len(columns))
    used = effective_use(columns, links)
    reason = _reasons(columns, used, superseded, policy)
    order = _order(columns, used)
    chosen = order[reason[order] > 0]
    # Namespaces apart, since each batch of the execution is of one; superseded ones first: nothing needs them.
    chosen = chosen[np.lexsort((columns.namespace[chosen], reason[chosen] != Reason.SUPERSEDED))]
    return _with_orphans(columns, chosen, reason, used, sources, policy, orphans)


def read_columns(sources: Sequence[Source]) -> Columns:
    """The first pass."""
    ids, parents, tips = bytearray(), bytearray(), bytearray()
    start, blocks, hour = array("I"), array("I"), array("I")
    size = array("q")
    objects, namespace, shards = array("H"), array("H"), array("H")
    known: dict[tuple[int, tuple[int, ...]], int] = {}
    for number, source in enumerate(sources):
        for entry in source.entries():
            added = entry.added
            ids += added.chunk_id
            parents += added.parent[:8]
            tips += added.blocks[-1][:8]
            start.append(added.start_block)
            blocks.append(len(added.blocks))
            size.append(added.size)
            objects.append(len(added.groups))
            hour.append(entry.touched_hour)
            namespace.append(number)
            shards.append(known.setdefault((number, added.shards), len(known)))
    return Columns(
        ids=np.frombuffer(ids, np.uint8).reshape(-1, ID_BYTES),
        namespace=np.frombuffer(namespace, np.uint16),
        parent=np.frombuffer(parents, ">u8").astype(np.uint64),
        tip=np.frombuffer(tips, ">u8").astype(np.uint64),
        start=np.frombuffer(start, np.uint32),
        blocks=np.frombuffer(blocks, np.uint32),
        size=np.frombuffer(size, np.int64),
        objects=np.frombuffer(objects, np.uint16),
        hour=np.frombuffer(hour, np.uint32),
        shards=np.frombuffer(shards, np.uint16),
    )


def effective_use(columns: Columns, links: Links) -> NDArray[np.uint32]:
    """Hour of the last use of each chunk or of anything that hangs on it."""
    used = columns.hour.copy()
    np.maximum.at(used, links.cover, columns.hour[links.covered])
    node_use = np.zeros(links.nodes, np.uint32)
    for children, nodes, holders, holder_nodes in links.levels():
        np.maximum.at(node_use, nodes, used[children])
        np.maximum.at(used, holders, node_use[holder_nodes])
    return used


def _order(columns: Columns, used: NDArray[np.uint32]) -> NDArray[np.intp]:
    """Least recently used first; deeper first among equals; then by id, so that a plan can be repeated."""
    return np.lexsort((columns.tip, -columns.start.astype(np.int64), used))


def _reasons(
    columns: Columns, used: NDArray[np.uint32], superseded: NDArray[np.bool_], policy: Policy
) -> NDArray[np.uint8]:
    reason = np.zeros(len(columns), np.uint8)
    if policy.superseded:
        reason[superseded] = Reason.SUPERSEDED
    if policy.max_idle_s is not None:
        # Uses in the first hours after a touch are not published: the chunk may have been in use until these were over.
        idle_s = policy.now - (used.astype(np.float64) + TOUCH_EVERY_HOURS) * SECONDS_PER_HOUR
        reason[(reason == 0) & (idle_s > policy.max_idle_s)] = Reason.IDLE
    if policy.max_bytes is not None:
        order = _order(columns, used)
        kept = order[reason[order] == 0]
        after = int(columns.size[kept].sum()) - np.cumsum(columns.size[kept])
        over = np.concatenate([[after[0] + columns.size[kept[0]]], after[:-1]]) if len(kept) else after
        reason[kept[over > policy.max_bytes]] = Reason.SIZE
    return reason


def _with_orphans(
    columns: Columns,
    chosen: NDArray[np.intp],
    reason: NDArray[np.uint8],
    used: NDArray[np.uint32],
    sources: Sequence[Source],
    policy: Policy,
    orphans: Sequence[Orphan],
) -> Plan:
    names = [source.namespace for source in sources]
    names += sorted({orphan.namespace for orphan in orphans} - set(names))
    ids = np.frombuffer(b"".join(each.chunk_id for each in orphans), np.uint8).reshape(-1, ID_BYTES)
    count = len(orphans)

    def joined(first: Iterable[int], rows: NDArray[Any]) -> Any:
        return np.concatenate([np.fromiter(first, rows.dtype, count), rows[chosen]])

    return Plan(
        namespaces=tuple(names),
        chunks_before=len(columns),
        bytes_before=int(columns.size.sum()),
        ids=np.concatenate([ids, columns.ids[chosen]]),
        namespace=joined((names.index(each.namespace) for each in orphans), columns.namespace),
        reason=joined((Reason.ORPHAN for _ in orphans), reason),
        size=joined((each.size for each in orphans), columns.size),
        objects=joined((each.objects for each in orphans), columns.objects),
        blocks=joined((0 for _ in orphans), columns.blocks),
        hour=joined((0 for _ in orphans), used),
        policy=policy,
    )
