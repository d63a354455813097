"""The chunk objects that a bucket really holds, beside what its catalog says.

Objects are listed in the order of chunk ids, so one chunk's objects come together and memory is that of the findings.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from s3kv.catalog.entry import Tombstone
from s3kv.format.keys import chunks_prefix, parse_chunk_key
from s3kv.format.limits import ID_BYTES
from s3kv.gc.plan import Orphan
from s3kv.store import ObjectMeta, Store


class Known(Protocol):
    """What a scan asks a catalog."""

    def chunk(self, chunk_id: bytes) -> object | None: ...
    def tombstone(self, chunk_id: bytes) -> Tombstone | None: ...
    @property
    def unread(self) -> int: ...


class ChunkObjects(NamedTuple):
    chunk_id: bytes
    size: int
    objects: int
    modified: float
    """Of the youngest object, by the store's clock."""


@dataclass(slots=True)
class Scan:
    """`forgotten`: the catalog says that they are deleted; `orphans`: no record names them and they are old enough;
    `young`: no record yet; `foreign`: keys under `chunk/` that s3kv does not write, which are left alone. `unsure` ones
    would be orphans, had the catalog been read completely: `unread` objects of it were not."""

    chunks: int = 0
    objects: int = 0
    bytes: int = 0
    forgotten: list[Orphan] = field(default_factory=list)
    orphans: list[Orphan] = field(default_factory=list)
    young: int = 0
    foreign: int = 0
    unsure: int = 0
    unread: int = 0


async def scan_chunks(
    store: Store,
    namespace: str,
    catalog: Known,
    *,
    orphan_age_s: float,
    now: float,
    progress: Callable[[int], None] = lambda count: None,
) -> Scan:
    """Lists every chunk object of `namespace` (its name) and says what the catalog does not name. Deletes nothing.

    Raises StoreError. A record may be published while this runs: who deletes asks the catalog once more.
    """
    scan = Scan(unread=catalog.unread)
    async for found in chunk_objects(store, namespace, scan):
        scan.chunks += 1
        scan.objects += found.objects
        scan.bytes += found.size
        progress(found.objects)
        if catalog.chunk(found.chunk_id) is not None:
            continue
        orphan = Orphan(namespace, found.chunk_id, found.size, found.objects)
        if catalog.tombstone(found.chunk_id) is not None:
            scan.forgotten.append(orphan)
        elif now - found.modified <= orphan_age_s:
            scan.young += 1
        elif scan.unread:
            scan.unsure += 1
        else:
            scan.orphans.append(orphan)
    return scan


async def chunk_objects(store: Store, namespace: str, scan: Scan) -> AsyncIterator[ChunkObjects]:
    """The chunks of which any object exists; counts `scan.foreign`."""
    current: ChunkObjects | None = None
    async for page in store.list(chunks_prefix(namespace)):
        for meta in page:
            key = parse_chunk_key(meta.key)
            if key is None:
                scan.foreign += 1
            elif current is not None and current.chunk_id == key.chunk_id:
                current = _with(current, meta)
            else:
                if current is not None:
                    yield current
                current = _with(ChunkObjects(key.chunk_id, 0, 0, 0.0), meta)
    if current is not None:
        assert len(current.chunk_id) == ID_BYTES
        yield current


def _with(chunk: ChunkObjects, meta: ObjectMeta) -> ChunkObjects:
    return ChunkObjects(chunk.chunk_id, chunk.size + meta.size, chunk.objects + 1, max(chunk.modified, meta.modified))
