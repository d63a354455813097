"""Small real buckets: namespaces, chunks with real pages, catalogs; for tests of what looks after a bucket."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from s3kv.catalog.catalog import Catalog
from s3kv.format.chunk import ChunkContent, build_chunk
from s3kv.format.codecs import Codec
from s3kv.format.header import chunk_id
from s3kv.format.keys import chunk_key
from s3kv.format.records import ChunkAdded, GroupObject, Stamp
from s3kv.identity import ROOT, GroupSpec, NamespaceSpec, RegionSpec, chain_hashes
from s3kv.settings import CatalogSettings
from s3kv.store import Store

BLOCK_TOKENS = 4
PAGE_BYTES = 256
NOW = 1_800_000_000.0
HOUR_S = 3600.0
DAY_S = 86400.0


def small_namespace(model: str = "tests/llama", *, groups: int = 1, shards: int = 1) -> NamespaceSpec:
    each = tuple(GroupSpec((layer,), None, (RegionSpec(PAGE_BYTES),)) for layer in range(groups))
    return NamespaceSpec(model, "weights-1", "bfloat16", BLOCK_TOKENS, each, shards)


def chain(spec: NamespaceSpec, name: str, blocks: int, *, after: Sequence[int] = ()) -> list[bytes]:
    """Block hashes of a sequence: the tokens `after`, then some that `name` decides."""
    return chain_hashes(spec.digest, BLOCK_TOKENS, tokens_of(name, blocks, after=after))


def tokens_of(name: str, blocks: int, *, after: Sequence[int] = ()) -> list[int]:
    rng = random.Random(name)
    return [*after, *(rng.randrange(50_000) for _ in range(blocks * BLOCK_TOKENS))]


class Filler:
    """Stores chunks in a bucket as an agent would."""

    def __init__(self, store: Store, spec: NamespaceSpec, catalog: Catalog) -> None:
        self.store = store
        self.spec = spec
        self.catalog = catalog
        self._rng = random.Random(7)

    async def put_chunk(
        self, hashes: Sequence[bytes], start: int, count: int, *, publish: bool = True, page_bytes: int = PAGE_BYTES
    ) -> ChunkAdded:
        """The chunk of `hashes[start : start + count]`, every layer group of it, and its record unless told not to."""
        parent = hashes[start - 1] if start else ROOT
        blocks = tuple(hashes[start : start + count])
        groups = []
        for group in range(len(self.spec.groups)):
            shards = self.spec.shards_of_group[group]
            pages = [[self._rng.randbytes(page_bytes) for _ in shards] for _ in blocks]
            content = ChunkContent(self.spec.digest, group, parent, start, shards, blocks, 2)
            header, body = build_chunk(content, pages, Codec("raw"))
            await self.store.put(chunk_key(self.spec.name, header.chunk_id, group), body)
            groups.append(GroupObject(header.object_bytes, header.header_bytes))
        held = tuple(part.shard for part in self.spec.parts)
        record = ChunkAdded(
            chunk_id(self.spec.digest, parent, blocks), Stamp(0, 0), parent, start, blocks, 0, held, tuple(groups)
        )
        if publish:
            await self.catalog.publish([record])
        return record


class SettableClock:
    def __init__(self, now: float = NOW) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


@asynccontextmanager
async def filling(
    store: Store, spec: NamespaceSpec, folder: Path, clock: Callable[[], float], *, agent: int = 1
) -> AsyncIterator[Filler]:
    """A filler with a catalog of its own, as agent `agent`. Move `clock` forward only."""
    catalog = Catalog(store, spec, folder, agent_id=agent, clock=clock, settings=CatalogSettings())
    await catalog.open()
    try:
        yield Filler(store, spec, catalog)
    finally:
        await catalog.close()
