"""One namespace on this node: its arenas, directory, catalog, and what moves between them."""

from __future__ import annotations

import asyncio
import logging
from array import array
from collections.abc import Awaitable, Callable, Hashable, Sequence
from dataclasses import asdict
from typing import Any

from s3kv.agent.engines import Engine, Engines
from s3kv.agent.fetcher import Fetcher
from s3kv.agent.packer import Packer
from s3kv.agent.pages import Pages
from s3kv.agent.prefetch import prefetch
from s3kv.agent.promises import PROMISE_BIT, Promises
from s3kv.agent.publisher import Publisher
from s3kv.agent.resources import Resources
from s3kv.agent.together import PASS_ON
from s3kv.agent.touching import Touching
from s3kv.agent.uploader import Uploader
from s3kv.catalog.catalog import Catalog
from s3kv.client.protocol import NO_SLOT, Matched, PromiseState, Reserved, pack_u32
from s3kv.errors import ConfigError, S3kvError
from s3kv.identity import NamespaceSpec
from s3kv.tier.arena import Arena
from s3kv.tier.block import Committed, Held, State
from s3kv.tier.directory import Directory

logger = logging.getLogger("s3kv.agent")

_OPEN_RETRY_S = 5.0
UNUSED_POLLS_EVERY = 12
"""Without an engine and without anything to store, only every so many intervals are polled: a listing costs money."""


class Namespace:
    """Made for the first engine that attaches, and kept warm after the last has gone."""

    def __init__(self, spec: NamespaceSpec, resources: Resources, *, pinned: bool) -> None:
        """Raises ConfigError when the node's budget has no room for it, or a layer group holds nothing."""
        if not all(group.regions for group in spec.groups):
            raise ConfigError(f"a layer group of model {spec.model} has no KV, which s3kv cannot store")
        self.spec = spec
        self.engines = Engines()
        self._r = resources
        settings, metrics = resources.settings, resources.metrics
        slot_bytes = sum(part.slot_bytes for part in spec.parts)
        # The leader attaches first and does not know whether the ranks will pin the arena, which cannot shrink then.
        want = settings.tier.capacity_bytes // settings.tier.namespaces // slot_bytes
        slots = resources.budget.grant(slot_bytes, want, pinned)
        if slots < 1:
            raise ConfigError(
                f"tier.capacity_bytes: no room for a block of {slot_bytes} bytes (model {spec.model}); set it higher"
            )
        hugepages = settings.tier.hugepages
        self.arenas = _arenas(spec, slots, hugepages)
        self.directory = Directory(
            slots,
            [part.shard for part in spec.parts],
            slot_bytes_all_parts=slot_bytes,
            budget=resources.budget,
            dirty_max_slots=max(1, int(slots * settings.tier.dirty_max_fraction)) if settings.upload.enabled else 0,
            pinned_memory=pinned,
            punch=self._punch,
        )
        self.pages = Pages(spec, self.arenas)
        self.catalog = Catalog(
            resources.store,
            spec,
            resources.index_dir,
            agent_id=resources.agent_id,
            clock=resources.wall_clock,
            settings=settings.catalog,
        )
        self.packer = Packer(
            self.pages.block_bytes,
            settings.upload.chunk_target_bytes * len(spec.groups),
            settings.upload.seal_age_s,
            settings.upload.seal_grace_s,
            self.pages.most_blocks,
        )
        self.publisher = Publisher(self.catalog.publish, settings.catalog.publish_interval_s)
        self.uploader = Uploader(
            settings=settings.upload,
            store=resources.store,
            catalog=self.catalog,
            directory=self.directory,
            pages=self.pages,
            publisher=self.publisher,
            inflight=resources.upload_bytes,
            threads=resources.threads,
            metrics=metrics,
            clock=resources.clock,
            rng=resources.rng,
        )
        self.fetcher = Fetcher(
            settings=settings.fetch,
            store=resources.store,
            catalog=self.catalog,
            directory=self.directory,
            pages=self.pages,
            inflight=resources.fetch_bytes,
            threads=resources.threads,
            metrics=metrics,
        )
        self.promises = Promises(self._pin, self.directory.release, self._coming, self._count_found)
        self.catalog_open = asyncio.Event()
        self._max_pinned = max(1, int(slots * settings.load.max_pinned_fraction))
        self._touching = Touching(self.catalog, resources.wall_clock)
        self._packer_wake = asyncio.Event()
        self._first_opening: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._tasks = [asyncio.create_task(self._keep_catalog()), asyncio.create_task(self._seal_when_due())]

    def _punch(self, slot: int) -> bool:
        given_back = [arena.punch(slot) for arena in self.arenas.values()]
        return all(given_back)

    # ---- loading

    async def match(
        self, engine: Engine, owner: Hashable, hashes: Sequence[bytes], wait_s_per_block: float, wait_cap_s: float,
        *, park: bool, min_blocks: int, identity: int,
    ) -> Matched:  # fmt: skip
        """Pin the longest prefix that host memory has, after waiting as long as the budget allows for more of it."""
        if trouble := engine.trouble():
            self._r.metrics.not_offered.labels("engine").inc()
            return Matched(identity, 0, b"", 0, 0.0, trouble)
        started = self._r.clock()
        readers = engine.readers()
        await self._wait_for_catalog(min(wait_cap_s, wait_s_per_block * len(hashes)))
        wait_cap_s = max(0.0, wait_cap_s - (self._r.clock() - started))
        found = self._pin(hashes, readers)
        ahead = hashes[len(found.slots) :]
        reach, coming = self._bring(ahead)
        if coming and park:
            self.directory.release(found.lease_id)
            promised = hashes[: min(len(found.slots) + reach, self._max_pinned)]  # a lease of more is never given
            waited = self._r.clock() - started
            if len(promised) < min_blocks:
                return Matched(identity, 0, b"", 0, waited)
            self._count_match(hashes[len(promised) :], 0, waited)  # the others are counted once they have come
            return Matched(identity, self.promises.make(promised, owner, readers), b"", len(promised), waited)
        if coming and (budget := min(wait_cap_s, wait_s_per_block * coming)) > 0:
            await self._wait_for(ahead[:reach], budget)
            first, found = found, self._pin(hashes, readers)
            self.directory.release(first.lease_id)
        if found.lease_id and len(found.slots) < min_blocks:
            self.directory.release(found.lease_id)
            return Matched(identity, 0, b"", 0, self._r.clock() - started)
        waited = self._r.clock() - started
        self._count_match(hashes, len(found.slots), waited)
        return Matched(identity, found.lease_id, pack_u32(found.slots), 0, waited)

    def _pin(self, hashes: Sequence[bytes], readers: dict[Hashable, Hashable]) -> Any:
        return self.directory.match(hashes, readers=readers, max_pinned_slots=self._max_pinned)

    def _bring(self, blocks: Sequence[bytes]) -> tuple[int, int]:
        """Begin to fetch what storage has of them. How many lie before the first that is neither in host memory nor on
        its way, and how many of those are on their way."""
        coming = 0
        if blocks and self.fetcher.start(blocks):
            for reach, block in enumerate(blocks):
                if self.fetcher.on_its_way(block):
                    coming += 1
                elif self.directory.state(block) is not State.RESIDENT:
                    return reach, coming
        return len(blocks), coming

    def _coming(self, blocks: Sequence[bytes]) -> bool:
        """Until the first is gone from the bucket, or bad there. That all pins or slots are taken, that an engine is
        just writing it, or that the catalog cannot be read passes."""
        first = blocks[0]
        if self.directory.state(first) is None and self.fetcher.is_bad(first):
            return False
        if self.fetcher.start(blocks) or self.directory.state(first) in (State.RESIDENT, State.WRITING):
            return True
        return bool(self.catalog.lookup([first])) or not self.catalog.readable

    async def _wait_for_catalog(self, budget_s: float) -> None:
        """Just after a start nobody knows yet what storage has: the first opening is worth the budget, no later one."""
        if self._first_opening.done() or budget_s <= 0:
            return
        await asyncio.wait([self._first_opening], timeout=budget_s)

    async def _wait_for(self, blocks: Sequence[bytes], budget_s: float) -> None:
        """Until the last of these blocks that is on its way has arrived or failed, or the budget is spent."""
        try:
            async with asyncio.timeout(budget_s):
                await self.fetcher.arrived(blocks)
        except TimeoutError:
            self._r.metrics.not_offered.labels("budget").inc()

    def _count_match(self, hashes: Sequence[bytes], found: int, waited_s: float) -> None:
        self._r.metrics.match_wait.observe(waited_s)
        self._r.metrics.matched_blocks.labels("nowhere").inc(len(hashes) - found)
        self._count_found(hashes[:found])

    def _count_found(self, hashes: Sequence[bytes]) -> None:
        self._r.metrics.matched_blocks.labels("tier").inc(len(hashes))
        if hashes:
            self._touching.soon(hashes)

    def promised(self, identity: int, lease: int) -> PromiseState:
        ready, failed, slots = self.promises.state(lease)
        return PromiseState(identity, ready, failed, pack_u32(slots))

    def release(self, lease: int, rank: int) -> None:
        reader = None if rank < 0 else rank
        if lease & PROMISE_BIT:
            self.promises.release(lease, reader)
        else:
            self.directory.release(lease, reader)

    def look(self, hashes: Sequence[bytes]) -> tuple[int, int]:
        """How many blocks of the prefix host memory holds, and how many the bucket does. Changes nothing."""
        resident = 0
        for block in hashes:
            if self.directory.state(block) is not State.RESIDENT:
                break
            resident += 1
        return resident, len(self.catalog.lookup(hashes))

    async def prefetch(self, hashes: Sequence[bytes], deadline_s: float) -> tuple[int, int]:
        """Bring what the bucket holds into host memory; returns (resident, missing) of the chain at the end."""
        await prefetch(self.fetcher, self.directory, hashes, deadline_s)
        resident, _ = self.look(hashes)
        return resident, len(hashes) - resident

    # ---- saving

    def reserve(
        self, part: int, parent: bytes, start_block: int, hashes: Sequence[bytes], holder: Hashable, identity: int
    ) -> Reserved:
        places = self.directory.reserve(part, parent, start_block, hashes, holder)
        slots = pack_u32(NO_SLOT if place is None else place.slot for place in places)
        return Reserved(identity, slots, pack_u32(0 if place is None else place.ticket for place in places))

    def commit(self, part: int, slots: array[int], tickets: array[int]) -> None:
        known: list[Held] = []
        for slot, ticket in zip(slots, tickets, strict=False):
            block = self.directory.block_at(slot)
            outcome = self.directory.commit(part, slot, ticket)
            if outcome in (Committed.DIRTY, Committed.CLEAN):
                self._r.metrics.saved_blocks.inc()
            if outcome is Committed.DIRTY and block is not None:
                self._pack(block, known)
            elif outcome is Committed.CLEAN and self._r.settings.upload.enabled:
                self._r.metrics.dropped_blocks.labels("too_many_waiting").inc()
        self.directory.finish_upload(known)  # together: it walks back over the chain

    def abandon(self, part: int, slots: array[int], tickets: array[int]) -> None:
        for slot, ticket in zip(slots, tickets, strict=False):
            self.directory.abandon(part, slot, ticket)

    def finish(self, tip: bytes) -> None:
        self.packer.finish(tip, self._r.clock())
        self.directory.touch_chain(tip)  # blocks commit head first; the head of a chain must not be evicted first
        self._packer_wake.set()

    def _pack(self, block: bytes, known: list[Held]) -> None:
        """What the bucket has already is held on and added to `known`."""
        held = self.directory.hold(block)
        if held is None:
            return
        if self.catalog.lookup([block]):
            self._r.metrics.known_blocks.inc()
            self.directory.mark_clean(block, held.ticket)  # at once: it takes no place among those that wait
            known.append(held)
            return
        for run in self.packer.add(held, self._r.clock()):
            self.uploader.start(run)
        self._packer_wake.set()

    async def _seal_when_due(self) -> None:
        while True:
            due = self.packer.next_due
            try:
                async with asyncio.timeout(None if due is None else max(0.0, due - self._r.clock())):
                    await self._packer_wake.wait()
                self._packer_wake.clear()
            except TimeoutError:
                pass
            for run in self.packer.take_due(self._r.clock()):
                self.uploader.start(run)

    # ---- catalog

    async def _keep_catalog(self) -> None:
        """Open the catalog, however long the store is away, then poll it. Until it is open only host memory serves."""
        interval = self._r.settings.catalog.poll_interval_s
        while not self.catalog_open.is_set():
            if await self._try("catalog_open", self.catalog.open):
                self.catalog_open.set()
            if not self._first_opening.done():
                self._first_opening.set_result(None)
            if not self.catalog_open.is_set():
                await asyncio.sleep(min(_OPEN_RETRY_S, interval))
        unused = 0
        while True:
            await asyncio.sleep(self._r.rng.uniform(0.8, 1.2) * interval)
            unused = 0 if self._in_use() else unused + 1
            if unused % UNUSED_POLLS_EVERY:
                continue
            await self._try("catalog_poll", self.catalog.poll)
            if self.catalog.wants_compaction():
                await self._try("catalog_compact", self.catalog.compact)

    def _in_use(self) -> bool:
        return bool(len(self.engines) or self.packer.waiting_blocks or self.uploader.queued_chunks)

    async def _try(self, work: str, call: Callable[[], Awaitable[object]]) -> bool:
        try:
            await call()
        except (S3kvError, OSError, TimeoutError) as error:
            logger.warning("%s of %s: %s", work, self.spec.name, error)
        except PASS_ON:
            raise
        except BaseException:  # a panic in a library written in Rust is no Exception
            logger.exception("%s of %s", work, self.spec.name)
        else:
            return True
        self._r.metrics.troubles.labels(work).inc()
        return False

    # ---- life

    async def drain(self, deadline_s: float) -> tuple[int, int]:
        """Flush what can be flushed; returns (chunks stored meanwhile, blocks that are not in the bucket).

        Those blocks still wait, or were given up on meanwhile.
        """
        end = self._r.clock() + deadline_s
        before, lost_before = self._stored_and_lost()
        for run in self.packer.take_all():
            self.uploader.start(run)
        self.publisher.hurry()
        try:
            await self.uploader.drain(deadline_s)
            async with asyncio.timeout(max(0.0, end - self._r.clock())):
                await self._try("touch", self.catalog.flush_touches)
        except TimeoutError:
            pass
        finally:
            self.publisher.relax()
        stored, lost = self._stored_and_lost()
        return stored - before, lost - lost_before + self.directory.counters().dirty

    def _stored_and_lost(self) -> tuple[int, int]:
        return self.uploader.stored_chunks, self.uploader.lost_blocks

    async def close(self) -> None:
        """Stop at once. What was not stored is lost from this node; the bucket stays whole."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.uploader.stop()
        await self.publisher.stop()
        await self.fetcher.stop()
        await self.catalog.close()
        self.directory.close()
        for arena in self.arenas.values():
            arena.close()

    def status(self) -> dict[str, Any]:
        counters = asdict(self.directory.counters())
        metrics = self._r.metrics
        for state in ("in_use", "free", "dirty", "pinned", "resident", "quarantined"):
            metrics.tier.labels(self.spec.name, state).set(counters[state])
        return {
            "namespace": self.spec.name,
            "model": self.spec.model,
            "engines": len(self.engines),
            "slot_bytes": sum(part.slot_bytes for part in self.spec.parts),
            "tier": counters,
            "waiting_blocks": self.packer.waiting_blocks,
            "uploading_chunks": self.uploader.queued_chunks,
            "fetching_chunks": self.fetcher.running_chunks,
            "promises": len(self.promises),
            "catalog_open": self.catalog_open.is_set(),
            "catalog": self.catalog.stats(),
        }


def _arenas(spec: NamespaceSpec, slots: int, hugepages: bool) -> dict[int, Arena]:
    """One for each part, or none: an engine asks again and again, and each time would leave memory behind.

    The agent made sure of ordinary memory for the node's whole budget when it started; by now other namespaces use it.
    """
    arenas: dict[int, Arena] = {}
    try:
        for part in spec.parts:
            arenas[part.shard] = Arena.create(slots, part.slot_bytes, hugepages, check=hugepages)
    except BaseException:
        for arena in arenas.values():
            arena.close()
        raise
    return arenas
