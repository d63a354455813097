"""From chunks in the bucket to verified blocks in host memory.

Invariants kept here:
- A block joins the directory only after every page of it was checked against the chunk's header, and that header
  against the identity asked for (invariant 2).
- Every slot taken for a fetch goes back, whatever happens (invariant 7).
- What is missing or corrupt is forgotten everywhere by a repair record; what merely failed is tried again by the next
  request that wants it (invariant 4).

With codec raw a fetch, checks included, runs at 0.94 to 1.02 times the MB/s of raw gets that are copied into a buffer,
at 1.0 to 1.3 times their CPU (`python -m benchmarks agent`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass

from s3kv.agent.fetchplan import ChunkFetch, plan_fetches
from s3kv.agent.metrics import AgentMetrics
from s3kv.agent.pages import Pages
from s3kv.agent.together import PASS_ON, in_thread, together
from s3kv.agent.weights import ByteSemaphore
from s3kv.catalog.catalog import Catalog
from s3kv.errors import CorruptData, NotFound, S3kvError, StoreError
from s3kv.format.chunk import check_page, read_frame
from s3kv.format.header import CODEC_RAW, ChunkHeader, header_size, read_header
from s3kv.format.keys import chunk_key
from s3kv.format.records import DeleteReason, GroupObject
from s3kv.settings import FetchSettings
from s3kv.store.base import Store
from s3kv.tier.directory import Directory

logger = logging.getLogger("s3kv.agent")

_BAD_CHUNKS = 4096


@dataclass(frozen=True, slots=True)
class _Place:
    """Block `index` of the chunk goes to `slot`."""

    index: int
    slot: int


class Fetcher:
    """Fetches of one namespace. `arrived` pulses whenever blocks have joined, or a fetch has ended without them."""

    def __init__(
        self,
        *,
        settings: FetchSettings,
        store: Store,
        catalog: Catalog,
        directory: Directory,
        pages: Pages,
        inflight: ByteSemaphore,
        threads: Executor,
        metrics: AgentMetrics,
    ) -> None:
        self._settings = settings
        self._store = store
        self._catalog = catalog
        self._directory = directory
        self._pages = pages
        self._inflight = inflight
        self._threads = threads
        self._metrics = metrics
        self._places = asyncio.Semaphore(settings.concurrency)
        self._running: set[asyncio.Task[None]] = set()
        self._fetching: dict[bytes, asyncio.Task[None]] = {}
        self._waiters: set[asyncio.Future[None]] = set()
        self._bad: dict[bytes, None] = {}  # chunks, oldest first

    @property
    def running_chunks(self) -> int:
        return len(self._running)

    def start(self, hashes: Sequence[bytes]) -> int:
        """Begin to fetch the longest prefix of `hashes` that storage has and host memory has not.

        Returns how many blocks of the prefix are on their way now, resident ones among them not counted.
        """
        locations = self._catalog.lookup(hashes)
        for fetch in plan_fetches(hashes[: len(locations)], locations, self._catalog.chunk):
            self._start_chunk(fetch)
        return sum(1 for block in hashes[: len(locations)] if block in self._fetching)

    def on_its_way(self, block: bytes) -> bool:
        return block in self._fetching

    def is_bad(self, block: bytes) -> bool:
        """Its chunk was missing or corrupt when it was last fetched, and the catalog could not be told. It is only
        fetched again for somebody who asks anew: who waits for it would wait for ever."""
        return bool(self._bad) and any(place.chunk_id in self._bad for place in self._catalog.lookup([block]))

    async def arrival(self) -> None:
        """Returns when the next fetch has ended, well or not."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.add(future)
        try:
            await future
        finally:
            self._waiters.discard(future)

    async def arrived(self, blocks: Sequence[bytes]) -> None:
        """Returns when none of these blocks is on its way any more."""
        for block in reversed(blocks):
            while self.on_its_way(block):
                await self.arrival()

    async def stop(self) -> None:
        tasks = list(self._running)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _start_chunk(self, fetch: ChunkFetch) -> None:
        slots = self._directory.begin_fetch(fetch.blocks, parent=fetch.parent, start_block=fetch.start_block)
        places = [_Place(fetch.first + offset, slot) for offset, slot in enumerate(slots) if slot is not None]
        if not places:
            return
        self._bad.pop(fetch.chunk.chunk_id, None)
        task = asyncio.create_task(self._carry_out(fetch, places))
        self._running.add(task)
        for place in places:
            self._fetching[fetch.chunk.blocks[place.index]] = task
        task.add_done_callback(lambda done: self._ended(done, fetch, places))

    def _ended(self, task: asyncio.Task[None], fetch: ChunkFetch, places: list[_Place]) -> None:
        self._running.discard(task)
        for place in places:
            block = fetch.chunk.blocks[place.index]
            if self._fetching.get(block) is task:  # not one that was begun since the slots were given back
                del self._fetching[block]
        for future in self._waiters:
            if not future.done():
                future.set_result(None)

    async def _carry_out(self, fetch: ChunkFetch, places: list[_Place]) -> None:
        good = False
        try:
            size = len(places) * self._pages.block_bytes
            async with self._places, self._inflight.take(size), asyncio.timeout(self._settings.deadline_s):
                await self._read(fetch, places)
            good = True
        except (NotFound, CorruptData) as error:
            await self._repair(fetch, error)
        except (TimeoutError, StoreError, OSError) as error:
            self._count(error)
        except PASS_ON:
            raise
        except BaseException as error:  # a panic in a library written in Rust is no Exception
            logger.exception("a fetch failed")
            self._count(error)
        finally:
            for place in reversed(places):  # the head last: it is then the more recently used
                self._directory.finish_fetch(place.slot, good)
        if good:
            self._metrics.fetched_blocks.inc(len(places))

    def _count(self, error: BaseException) -> None:
        self._metrics.failed_fetches.labels(type(error).__name__).inc()
        logger.debug("a chunk could not be fetched: %s", error)

    async def _repair(self, fetch: ChunkFetch, error: S3kvError) -> None:
        self._count(error)
        reason = DeleteReason.MISSING if isinstance(error, NotFound) else DeleteReason.CORRUPT
        self._metrics.repairs.labels(reason.name.lower()).inc()
        logger.warning("chunk %s is forgotten: %s", fetch.chunk.chunk_id.hex(), error)
        try:
            await self._catalog.forget([fetch.chunk.chunk_id], reason)
        except S3kvError as failure:
            self._metrics.troubles.labels("repair").inc()
            self._bad[fetch.chunk.chunk_id] = None
            if len(self._bad) > _BAD_CHUNKS:
                del self._bad[next(iter(self._bad))]
            logger.warning("the repair record could not be published, others will find out themselves: %s", failure)

    async def _read(self, fetch: ChunkFetch, places: list[_Place]) -> None:
        added = fetch.chunk.added
        if len(added.groups) != len(self._pages.spec.groups):
            raise CorruptData("the catalog's record has another number of layer groups than the namespace")
        for group, sizes in enumerate(added.groups):
            self._check_sizes(len(added.blocks), group, sizes)
        await together(self._read_group(fetch, places, group) for group in range(len(added.groups)))

    def _check_sizes(self, blocks: int, group: int, sizes: GroupObject) -> None:
        """Memory is taken for as many bytes as the record says: no more than its blocks can need."""
        shards = self._pages.shards_of_group[group]
        head = header_size(blocks, len(shards))
        most = head + blocks * sum(self._pages.page_bytes(group, shard) for shard in shards)
        if sizes.header_size != head or sizes.size > most:
            raise CorruptData("the catalog's record has sizes that its blocks cannot have")

    async def _read_group(self, fetch: ChunkFetch, places: list[_Place], group: int) -> None:
        if fetch.raw:
            await self._read_raw(fetch, places, group)
        elif fetch.whole:
            await self._read_whole(fetch, places, group)
        else:
            await self._read_frames(fetch, places, group)

    def _key(self, fetch: ChunkFetch, group: int) -> str:
        return chunk_key(self._pages.spec.name, fetch.chunk.chunk_id, group)

    def _targets(self, places: list[_Place], group: int) -> list[tuple[int, int, memoryview]]:
        """(block index, index of the shard in the object, page in the slot), in the order of the object's frames."""
        shards = list(enumerate(self._pages.shards_of_group[group]))
        return [
            (place.index, position, self._pages.page(place.slot, group, shard))
            for place in places
            for position, shard in shards
        ]

    async def _read_raw(self, fetch: ChunkFetch, places: list[_Place], group: int) -> None:
        blocks, shards = len(fetch.chunk.blocks), self._pages.shards_of_group[group]
        head = bytearray(header_size(blocks, len(shards)))
        targets = self._targets(places, group)
        page_bytes = [self._pages.page_bytes(group, shard) for shard in shards]
        before = [sum(page_bytes[:position]) for position in range(len(shards))]
        ranges = [(0, len(head))]
        ranges += [
            (len(head) + index * sum(page_bytes) + before[position], len(page)) for index, position, page in targets
        ]
        outs = [memoryview(head), *(page for _, _, page in targets)]
        await self._store.get_ranges(self._key(fetch, group), ranges, outs)
        header = self._check_header(head, fetch, group)
        self._metrics.fetched_bytes.inc(sum(length for _, length in ranges))
        for (index, position, _), (offset, length) in zip(targets, ranges[1:], strict=True):
            frame = header.frame(index, position)
            if (frame.codec, frame.offset, frame.length) != (CODEC_RAW, offset, length):
                raise CorruptData("a raw chunk's frames are not where its record says")
        await in_thread(self._threads, _check_pages, header, targets)

    async def _read_whole(self, fetch: ChunkFetch, places: list[_Place], group: int) -> None:
        data = bytearray(fetch.chunk.added.groups[group].size)
        await self._store.get_into(self._key(fetch, group), memoryview(data))
        self._metrics.fetched_bytes.inc(len(data))
        header = self._check_header(data, fetch, group)
        view = memoryview(data)
        work = []
        for index, position, page in self._targets(places, group):
            frame = header.frame(index, position)
            work.append((index, position, view[frame.offset : frame.offset + frame.length], page))
        await self._decode(header, work)

    async def _read_frames(self, fetch: ChunkFetch, places: list[_Place], group: int) -> None:
        key = self._key(fetch, group)
        head = bytearray(fetch.chunk.added.groups[group].header_size)
        await self._store.get_into(key, memoryview(head))
        header = self._check_header(head, fetch, group)
        targets = self._targets(places, group)
        frames = [header.frame(index, position) for index, position, _ in targets]
        if any(frame.raw_length != len(page) for frame, (_, _, page) in zip(frames, targets, strict=True)):
            raise CorruptData("the chunk's pages have other lengths than the namespace's")
        buffers = [bytearray(frame.length) for frame in frames]
        ranges = [(frame.offset, frame.length) for frame in frames]
        await self._store.get_ranges(key, ranges, [memoryview(buffer) for buffer in buffers])
        self._metrics.fetched_bytes.inc(len(head) + sum(map(len, buffers)))
        work = [
            (index, position, memoryview(buffer), page)
            for (index, position, page), buffer in zip(targets, buffers, strict=True)
        ]
        await self._decode(header, work)

    def _check_header(self, data: bytearray, fetch: ChunkFetch, group: int) -> ChunkHeader:
        header = read_header(
            data,
            expect_namespace=self._pages.spec.digest,
            expect_chunk=fetch.chunk.chunk_id,
            expect_group=group,
        )
        if header.shards != self._pages.shards_of_group[group] or header.blocks != fetch.chunk.blocks:
            raise CorruptData("the chunk holds other blocks or shards than its record says")
        return header

    async def _decode(self, header: ChunkHeader, work: list[tuple[int, int, memoryview, memoryview]]) -> None:
        pieces = [work[start : start + _PAGES_A_JOB] for start in range(0, len(work), _PAGES_A_JOB)]
        await together(in_thread(self._threads, _read_pages, header, piece) for piece in pieces)


_PAGES_A_JOB = 16


def _check_pages(header: ChunkHeader, targets: list[tuple[int, int, memoryview]]) -> None:
    for index, position, page in targets:
        check_page(header, index, position, page)


def _read_pages(header: ChunkHeader, work: list[tuple[int, int, memoryview, memoryview]]) -> None:
    for index, position, data, page in work:
        read_frame(header, index, position, data, page)
