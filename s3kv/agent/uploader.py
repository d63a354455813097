"""From sealed runs to durable chunks and catalog records.

Invariants kept here:
- Catalog follows data: the record goes out after every layer group's object is durable (invariant 6).
- Nothing is put before the catalog has found the bucket's prefix to be of this format: nobody could ever read it.
- The blocks of a run stay where they are until the run is stored or given up on; then each is let go once (bounded,
  invariant 7: what cannot be stored within `upload.give_up_s` is dropped and counted).

With codec raw an upload runs at 0.89 to 1.01 times the MB/s of raw puts of the same slots, and costs 0.2 to 0.3 s of
CPU a GB more, half of it checksums (`python -m benchmarks agent`).
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass

from tenacity import AsyncRetrying, retry_if_exception_type, wait_random_exponential

from s3kv.agent.metrics import AgentMetrics
from s3kv.agent.packer import Run
from s3kv.agent.pages import Pages
from s3kv.agent.publisher import Publisher
from s3kv.agent.together import PASS_ON, in_thread, together
from s3kv.agent.weights import ByteSemaphore
from s3kv.catalog.catalog import Catalog
from s3kv.catalog.stored import header_beside
from s3kv.errors import AlreadyExists, S3kvError, StoreError
from s3kv.format.chunk import ChunkContent, EncodedPage, assemble_chunk, encode_page
from s3kv.format.codecs import Codec
from s3kv.format.header import ChunkHeader, chunk_id
from s3kv.format.keys import chunk_key
from s3kv.format.records import ChunkAdded, GroupObject
from s3kv.format.wire import Buffer
from s3kv.settings import UploadSettings
from s3kv.store.base import Store
from s3kv.tier.directory import Directory

logger = logging.getLogger("s3kv.agent")

_BACKOFF_MAX_S = 10.0


@dataclass(frozen=True, slots=True)
class _Stored:
    """One layer group's object as it lies in the bucket."""

    group: GroupObject
    codec_id: int


class Uploader:
    """Uploads of one namespace. `threads` run codecs and checksums; `inflight` bounds the node's bytes under way."""

    def __init__(
        self,
        *,
        settings: UploadSettings,
        store: Store,
        catalog: Catalog,
        directory: Directory,
        pages: Pages,
        publisher: Publisher,
        inflight: ByteSemaphore,
        threads: Executor,
        metrics: AgentMetrics,
        clock: Callable[[], float],
        rng: random.Random,
    ) -> None:
        self._settings = settings
        self._store = store
        self._catalog = catalog
        self._directory = directory
        self._pages = pages
        self._publisher = publisher
        self._inflight = inflight
        self._threads = threads
        self._metrics = metrics
        self._clock = clock
        self._rng = rng
        self._codec = Codec(settings.codec, settings.zstd_level)
        self._running: set[asyncio.Task[None]] = set()
        self._places = asyncio.Semaphore(settings.concurrency)
        self.stored_chunks = 0
        self.lost_blocks = 0

    @property
    def queued_chunks(self) -> int:
        return len(self._running)

    def start(self, run: Run) -> None:
        """Begin to store a run; its blocks' holds now belong to the uploader."""
        task = asyncio.create_task(self._carry_out(run, self._clock() + self._settings.give_up_s))
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def drain(self, deadline_s: float) -> int:
        """Wait for what is under way; returns how many chunks were not stored by then (they go on)."""
        if self._running:
            await asyncio.wait(set(self._running), timeout=deadline_s)
        return len(self._running)

    async def stop(self) -> None:
        """Give up on what is under way; an object cut off in the middle is no object (store contract 1)."""
        tasks = list(self._running)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _carry_out(self, run: Run, deadline: float) -> None:
        stored = False
        size = len(run.blocks) * self._pages.block_bytes
        try:
            async with asyncio.timeout(max(0.0, deadline - self._clock())):
                await self._catalog.announced.wait()
            async with self._places, self._inflight.take(size), asyncio.timeout(max(0.0, deadline - self._clock())):
                await self._store_with_retries(run)
                stored = True
        except (TimeoutError, S3kvError, OSError) as error:
            self._drop(run, error)
        except PASS_ON:
            raise
        except BaseException as error:  # a panic in a library written in Rust is no Exception
            logger.exception("a chunk could not be stored")
            self._drop(run, error)
        finally:
            self._directory.finish_upload(run.blocks)
        if stored:
            self.stored_chunks += 1
            self._metrics.uploaded_chunks.inc()
            self._metrics.uploaded_blocks.inc(len(run.blocks))
            self._metrics.raw_bytes.inc(size)

    def _drop(self, run: Run, error: BaseException) -> None:
        self.lost_blocks += len(run.blocks)
        self._metrics.dropped_blocks.labels("not_stored").inc(len(run.blocks))
        logger.warning("%d blocks were not stored: %s", len(run.blocks), str(error) or type(error).__name__)

    async def _store_with_retries(self, run: Run) -> None:
        """The store retries single calls; this goes on through an outage until the time budget ends."""
        retrying = AsyncRetrying(
            retry=retry_if_exception_type(StoreError),
            wait=_Jitter(self._rng),
            reraise=True,  # the caller's timeout is what ends it
        )
        async for attempt in retrying:
            with attempt:
                try:
                    await self._store_run(run)
                except StoreError as error:
                    self._metrics.failed_puts.labels(type(error).__name__).inc()
                    raise

    async def _store_run(self, run: Run) -> None:
        spec = self._pages.spec
        hashes = tuple(held.block for held in run.blocks)
        identity = chunk_id(spec.digest, run.parent, hashes)
        groups = range(len(spec.groups))
        stored = await together(self._store_group(run, identity, hashes, group) for group in groups)
        shards = self._pages.shards_of_group
        record = ChunkAdded(
            chunk_id=identity,
            stamp=self._catalog.next_stamp(identity),
            parent=run.parent,
            start_block=run.blocks[0].start_block,
            blocks=hashes,
            codec_id=max(each.codec_id for each in stored),
            shards=tuple(sorted({shard for group in groups for shard in shards[group]})),
            groups=tuple(each.group for each in stored),
        )
        await self._publisher.publish(record)

    async def _store_group(self, run: Run, identity: bytes, hashes: tuple[bytes, ...], group: int) -> _Stored:
        header, parts = await self._encode(run, hashes, group)
        key = chunk_key(self._pages.spec.name, identity, group)
        try:
            await self._store.put_if_absent(key, parts)
        except AlreadyExists:
            if not self._catalog.is_forgotten(identity) and (found := await header_beside(self._store, key, header)):
                return _stored(found)
            # What lies there was found corrupt before, or is cut short: right bytes replace it (it heals).
            await self._store.put(key, parts)
        self._metrics.uploaded_bytes.inc(header.object_bytes)
        return _stored(header)

    async def _encode(self, run: Run, hashes: tuple[bytes, ...], group: int) -> tuple[ChunkHeader, list[Buffer]]:
        shards = self._pages.shards_of_group[group]
        content = ChunkContent(
            namespace_digest=self._pages.spec.digest,
            layer_group=group,
            parent=run.parent,
            start_block=run.blocks[0].start_block,
            shards=shards,
            blocks=hashes,
            element_size=self._pages.spec.element_size,
        )
        raw = [self._pages.page(held.slot, group, shard) for held in run.blocks for shard in shards]
        pieces = [raw[start : start + _PAGES_A_JOB] for start in range(0, len(raw), _PAGES_A_JOB)]
        encoded = await together(in_thread(self._threads, self._encode_pages, piece) for piece in pieces)
        return assemble_chunk(content, [page for piece in encoded for page in piece])

    def _encode_pages(self, pages: Sequence[memoryview]) -> list[EncodedPage]:
        return [encode_page(page, self._codec, self._pages.spec.element_size) for page in pages]


def _stored(header: ChunkHeader) -> _Stored:
    return _Stored(GroupObject(header.object_bytes, header.header_bytes), header.codec_id)


_PAGES_A_JOB = 16


class _Jitter(wait_random_exponential):
    """tenacity's full jitter, drawn from the agent's own generator."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__(multiplier=0.2, max=_BACKOFF_MAX_S)
        self._rng = rng

    def __call__(self, retry_state: object) -> float:
        high = super(wait_random_exponential, self).__call__(retry_state)  # type: ignore[arg-type]
        return self._rng.uniform(0, high)
