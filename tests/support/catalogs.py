"""Chunks and catalogs for tests."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence
from pathlib import Path

from s3kv.catalog.catalog import Catalog
from s3kv.catalog.entry import ChunkEntry
from s3kv.format.chunk import ChunkContent, build_chunk
from s3kv.format.codecs import Codec
from s3kv.format.header import chunk_id, header_size
from s3kv.format.keys import chunk_key
from s3kv.format.records import ChunkAdded, GroupObject, Stamp
from s3kv.identity import ROOT, GroupSpec, NamespaceSpec, RegionSpec
from s3kv.settings import CatalogSettings
from s3kv.store import Store

T0 = 1_800_000_000.0
"""A time in seconds since 1970 at which tests begin."""


class FakeClock:
    """Seconds since 1970, moved by hand."""

    def __init__(self, now: float = T0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


def namespace(model: str = "test", groups: int = 1) -> NamespaceSpec:
    """A tiny unsharded namespace; a page of each layer group has 64 bytes."""
    specs = tuple(GroupSpec((layer,), None, (RegionSpec(64),)) for layer in range(groups))
    return NamespaceSpec(model=model, weights="w", kv_dtype="bfloat16", tokens_per_block=32, groups=specs)


def block(*path: object) -> bytes:
    """A block hash that stands for `path`."""
    return hashlib.blake2b(repr(path).encode(), digest_size=16).digest()


def chain(name: object, length: int) -> list[bytes]:
    """The block hashes of one chain."""
    return [block(name, at) for at in range(length)]


def added(
    spec: NamespaceSpec,
    blocks: Sequence[bytes],
    *,
    parent: bytes = ROOT,
    start: int = 0,
    time_us: int = 0,
    agent: int = 0,
) -> ChunkAdded:
    """The record of a chunk as `store_chunk` would store it."""
    header = header_size(len(blocks), 1)
    groups = tuple(GroupObject(header + 64 * len(blocks), header) for _ in spec.groups)
    name = chunk_id(spec.digest, parent, blocks)
    return ChunkAdded(name, Stamp(time_us, agent), parent, start, tuple(blocks), 0, (0,), groups)


async def store_chunk(
    store: Store, spec: NamespaceSpec, blocks: Sequence[bytes], *, parent: bytes = ROOT, start: int = 0
) -> ChunkAdded:
    """Puts every object of a chunk; the record is not published."""
    record = added(spec, blocks, parent=parent, start=start)
    for group in range(len(spec.groups)):
        content = ChunkContent(spec.digest, group, parent, start, (0,), tuple(blocks), 2)
        pages = [[random.Random(name).randbytes(64)] for name in blocks]
        _, parts = build_chunk(content, pages, Codec("raw"))
        await store.put(chunk_key(spec.name, record.chunk_id, group), parts)
    return record


def settings(**changes: object) -> CatalogSettings:
    return CatalogSettings(**{"map_bytes": 1 << 26, **changes})  # type: ignore[arg-type]


class Node:
    """One agent's catalog with a folder of its own; it can be killed and started again."""

    def __init__(
        self,
        store: Store,
        folder: Path,
        *,
        agent: int = 1,
        clock: Callable[[], float] | None = None,
        spec: NamespaceSpec | None = None,
        **changes: object,
    ) -> None:
        self.store = store
        self.folder = folder
        self.agent = agent
        self.clock = clock or FakeClock()
        self.spec = spec or namespace()
        self.settings = settings(**changes)
        self.catalog = self._new()

    def _new(self) -> Catalog:
        return Catalog(
            self.store, self.spec, self.folder, agent_id=self.agent, clock=self.clock, settings=self.settings
        )

    async def start(self) -> Catalog:
        await self.catalog.open()
        return self.catalog

    def kill(self) -> None:
        """As if the process had died: nothing is synced or marked clean; the lock goes with it."""
        index = self.catalog._index
        if index is not None:
            index.close(clean=False)
        self.catalog = self._new()

    async def restart(self) -> Catalog:
        self.kill()
        return await self.start()


def state(catalog: Catalog) -> dict[bytes, ChunkEntry]:
    """Every stored chunk."""
    return {entry.chunk_id: entry for entry in catalog.iter_chunks()}
