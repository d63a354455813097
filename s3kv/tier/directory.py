"""The directory of one namespace: which blocks are in host memory, who reads and writes them, what may go.

Invariants (all checked by `check`)
-----------------------------------
1. A block is matched only while it is *resident*: every part was committed under the ticket of this use of the slot,
   or the agent fetched and verified it.
2. A slot is given to another block only when nobody copies in or out of it: no lease, no writer, no fetch, no uploader.
3. Every slot is in exactly one state, and every counter says what the slots say.
4. Nothing ends by a clock. A process that broke its connection may still be copying, so what it holds stays
   (*quarantined*) until it is known to have exited.

A match of 1,024 blocks, 65,536 being resident, takes 1.3 to 1.5 times as long as bare dict look-ups of the same hashes
in the same run, and the release of its lease 0.9 to 1.0 times as long (0.24 to 0.38 and 0.15 to 0.27 ms, most of it
waiting for memory; `python -m benchmarks directory`).

One event loop calls it; there is no lock, nothing blocks and nothing raises for what an engine sent late, twice or
wrongly: that is ignored and counted. ValueError marks a mistake of the caller.

Slot numbers are common to all parts: slot 7 of a block is slot 7 in the arena of every part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict

from s3kv.identity import BlockHash
from s3kv.tier.arrivals import Arrivals
from s3kv.tier.block import Block, Committed, Counters, Held, Holder, Match, ReaderId, Reserved, State, Sums
from s3kv.tier.budget import NodeBudget
from s3kv.tier.check import check_book, check_table
from s3kv.tier.leases import Holding, LeaseBook
from s3kv.tier.table import SlotTable

UPLOADED_ANCESTORS = 1024
"""How far back the end of an upload marks ancestors as used; the end of their request marks them all."""


class Directory:
    """`slots` slots for blocks of the parts `parts` (ids as in `NamespaceSpec.parts`, at most 256).

    slot_bytes_all_parts: bytes that one slot takes in all arenas together.
    budget: shared by the node's namespaces; None: `slots` is the only bound.
    dirty_max_slots: how many blocks may wait for upload; 0: nothing is uploaded.
    pinned_memory: the arenas are registered with CUDA from the start (see `NodeBudget.grant`).
    punch: returns a free slot's memory to the machine, in every arena (`Arena.punch`), and says whether it did.
    """

    def __init__(
        self,
        slots: int,
        parts: Sequence[int],
        *,
        slot_bytes_all_parts: int,
        budget: NodeBudget | None = None,
        dirty_max_slots: int,
        pinned_memory: bool = False,
        punch: Callable[[int], bool] | None = None,
    ) -> None:
        if slots < 0 or slot_bytes_all_parts < 1 or dirty_max_slots < 0:
            raise ValueError("slots and dirty_max_slots must not be negative, slot_bytes_all_parts must be positive")
        if not parts or len(set(parts)) != len(parts):
            raise ValueError("parts must be distinct, and at least one")
        self.parts = tuple(parts)
        self.dirty_max_slots = dirty_max_slots
        self._table = SlotTable(slots, slot_bytes_all_parts, budget, punch, pinned_memory)
        self._book = LeaseBook()
        self._pinned = 0
        self._dirty = 0
        self._sums = Sums()
        self._arrivals = Arrivals(self.parts, self._table, self._book, self._sums, self._enqueue)

    # Reading: match, touch, release.

    def match(
        self, hashes: Sequence[BlockHash], *, readers: Mapping[ReaderId, Holder], max_pinned_slots: int | None = None
    ) -> Match:
        """Pins the longest resident prefix of `hashes` under one lease, which has a share for each of `readers`.

        No more than `max_pinned_slots` slots are pinned by all leases together: the prefix ends there. What is pinned
        counts as used when the lease ends; the head of the chain is then more recent than its tail, so that a prefix
        that many prompts share goes after what depends on it. Nothing is offered to an engine of which a process has
        exited: its share would never end.
        """
        if not readers:
            raise ValueError("a lease needs a reader, or nobody would end it")
        if not self._book.gone.keys().isdisjoint(readers.values()):
            return Match(0, [])
        limit = self._table.slots if max_pinned_slots is None else max_pinned_slots
        resident = self._table.resident
        pinned = self._pinned
        blocks: list[Block] = []
        for block_hash in hashes:  # a thousand in a call, hence no function calls here
            block = resident.get(block_hash)
            if block is None:
                break
            if not block.pins:
                if pinned >= limit:
                    self._sums.pin_limited += 1
                    break
                pinned += 1
            block.pins += 1
            blocks.append(block)
        self._pinned = pinned
        self._sums.hits += len(blocks)
        self._sums.misses += len(hashes) - len(blocks)
        if not blocks:
            return Match(0, [])
        return Match(self._book.open(blocks, readers), [block.slot for block in blocks])

    def release(self, lease_id: int, reader: ReaderId | None = None) -> bool:
        """Ends one reader's share, or all of them with None; the pins go with the last one.

        Only what will not be read any more may be released. False: there is no such share (any more).
        """
        lease = self._book.leases.get(lease_id)
        if lease is None or (reader is not None and reader not in lease.readers):
            return False
        for each in [reader] if reader is not None else list(lease.readers):
            if self._book.end_share(lease_id, each):
                self._unpin(self._book.leases.pop(lease_id).blocks)
        return True

    def _unpin(self, blocks: list[Block]) -> None:
        lru, resident = self._table.lru, State.RESIDENT
        for block in reversed(blocks):
            block.pins -= 1
            if block.pins:
                continue
            self._pinned -= 1
            if block.state is not resident:
                self._table.rest(block)
            elif not block.kept:
                lru[block.slot] = block
                lru.move_to_end(block.slot)

    def touch_chain(self, tip: BlockHash, most: int | None = None) -> int:
        """Marks the resident blocks from `tip` back to the head as used, the head most recently. Returns how many.

        most: stop after so many; a chunk in the middle of a very long chain need not go back over all of it.

        For chains that were used without a lease: the part of a prompt that the device still had, blocks that were
        saved or fetched one by one (in the order of their arrival the head would go first, and the rest with it).
        """
        lru = self._table.lru
        touched = 0
        block = self._table.resident.get(tip)
        while block is not None and (most is None or touched < most):
            touched += 1
            if block.slot in lru:
                lru.move_to_end(block.slot)
            parent = self._table.resident.get(block.parent)
            # Ordinals must fall, or a parent that an engine named wrongly could lead round in a circle.
            block = parent if parent is not None and parent.start_block < block.start_block else None
        return touched

    # Saving: reserve, commit, abandon.

    def reserve(
        self, part: int, parent: BlockHash, start_block: int, hashes: Sequence[BlockHash], holder: Holder
    ) -> list[Reserved | None]:
        """Room for `part` of the consecutive blocks `hashes`, the first of which follows `parent` as `start_block`.

        None where nothing is to be copied: the block is resident or being fetched, somebody already has or wrote this
        part of it, or there is no room. The first part to ask allocates, the others get the same slot and ticket.
        An unknown part gets None throughout, and so does a process that has exited: what it sent before is worthless.
        """
        return self._arrivals.reserve(part, parent, start_block, hashes, holder)

    def commit(self, part: int, slot: int, ticket: int) -> Committed:
        """The copy of this part is complete. With the last part the block becomes resident."""
        return self._arrivals.commit(part, slot, ticket)

    def abandon(self, part: int, slot: int, ticket: int) -> bool:
        """This part will not be copied, and nothing is copying into it any more.

        The block is given up: found no more at once, its slot free once no other part's writer is active. False: stale.
        """
        return self._arrivals.abandon(part, slot, ticket)

    # Holders that went away.

    def quarantine_holder(self, holder: Holder) -> None:
        """Its connection broke but the process may still be copying: what it holds stays, counted as quarantined."""
        if holder in self._book.holders:
            self._book.holders[holder].quarantined = True

    def holder_back(self, holder: Holder) -> None:
        """The process has connected (again), and will end its shares and reservations itself."""
        self._book.gone.pop(holder, None)
        if holder in self._book.holders:
            self._book.holders[holder].quarantined = False

    def holder_gone(self, holder: Holder) -> None:
        """The process HAS exited, so nothing of it copies any more: ends all its shares and reservations.

        Nor is it given anything from now on, should requests that it had sent turn up late; `holder_back` ends that
        when a new process has the same name. With the last attached process the arenas are idle.
        """
        holding = self._book.holders.get(holder, Holding())
        for block, position in list(holding.writes):
            self._arrivals.give_up(block, position)
        for lease_id, reader in list(holding.shares):
            self.release(lease_id, reader)
        was_attached = holder in self._book.attached
        self._book.bury(holder)
        if was_attached:
            self._detached()

    # Fetching.

    def begin_fetch(self, hashes: Sequence[BlockHash], *, parent: BlockHash, start_block: int) -> list[int | None]:
        """Slots to fetch the consecutive blocks `hashes` into; the first follows `parent` as `start_block`.

        None: resident, already fetched by somebody, being written by an engine, or no room (counted). Every slot must
        come back by `finish_fetch`, also after a failure or a cancellation. Pin what precedes these blocks first, or it
        may be evicted for them.
        """
        return self._arrivals.begin_fetch(hashes, parent=parent, start_block=start_block)

    def finish_fetch(self, slot: int, ok: bool) -> bool:
        """Nothing writes into `slot` any more; `ok`: every part of the block is in it, verified.

        Whether the block is resident now; it may have been dropped meanwhile. Otherwise the slot is free. It can be
        evicted from now on: match or hold it before the next await.
        """
        return self._arrivals.finish_fetch(slot, ok)

    # Uploading.

    def hold(self, block_hash: BlockHash) -> Held | None:
        """Keeps a resident block where it is until `unhold`, so that it can be read. None: it is not resident."""
        block = self._table.resident.get(block_hash)
        if block is None:
            return None
        block.kept += 1
        self._table.lru.pop(block.slot, None)
        return Held(block.hash, block.slot, block.ticket, block.parent, block.start_block)

    def unhold(self, held: Held) -> None:
        """Ends one `hold`; it must be given back once and only once."""
        block = self._table.occupied.get(held.slot)
        if block is None or block.ticket != held.ticket or block.kept <= block.dirty:
            raise ValueError(f"slot {held.slot} is not held")
        block.kept -= 1
        self._table.rest(block)

    def mark_clean(self, block_hash: BlockHash, ticket: int) -> bool:
        """The block is stored, or given up on: it no longer waits for upload. False: it does not wait (any more)."""
        block = self._table.resident.get(block_hash)
        if block is None or block.ticket != ticket or not block.dirty:
            return False
        self._clean(block)
        self._table.rest(block)
        return True

    def finish_upload(self, run: Sequence[Held]) -> None:
        """The end of an upload, stored or given up on: marks a run of held blocks clean and unholds them.

        `run` is in chain order; several runs may follow each other. Head and tail of each become evictable in the right
        order, ancestors included.
        """
        for held in reversed(run):
            self.mark_clean(held.block, held.ticket)
            self.unhold(held)
        before = None
        for held in run:
            if held.parent != before:  # once a run: ancestors may be many
                self.touch_chain(held.block, UPLOADED_ANCESTORS)
            before = held.block

    def _enqueue(self, block: Block) -> bool:
        """Keeps a block until it is stored or given up on. False: too many wait already."""
        if self._dirty >= self.dirty_max_slots:
            self._sums.upload_dropped += 1
            return False
        block.dirty = True
        block.kept += 1
        self._dirty += 1
        return True

    def _clean(self, block: Block) -> None:
        block.dirty = False
        block.kept -= 1
        self._dirty -= 1

    # Forgetting.

    def drop(self, hashes: Iterable[BlockHash]) -> int:
        """Forgets resident and arriving blocks, also dirty ones; returns how many.

        They are found no more at once. A slot that somebody reads, or fetches into, is free as soon as they are done.
        Blocks that engines are writing stay: their bytes are fresh.
        """
        dropped = 0
        for block_hash in hashes:
            block = self._table.find(block_hash)
            if block is None or block.state is State.WRITING:
                continue
            if block.dirty:
                self._clean(block)
            self._table.discard(block)
            dropped += 1
        return dropped

    # The node's budget.

    def attached(self, *, pinned_memory: bool, holder: Holder) -> bool:
        """A process is about to map the arenas; `pinned_memory`: it wants to register them with CUDA.

        False: they do not fit into the node's budget as pinned memory; the engine may only map them. `holder` stays
        attached, also while quarantined, until it is gone.
        """
        self._table.idle = False
        self._book.attached.add(holder)
        return not pinned_memory or self._table.pin_memory()

    def _detached(self) -> None:
        """Blocks stay until others need the room. Does nothing while a holder that attached has not exited.

        Memory must not be returned to the machine while a process has it registered: the device would go on using the
        old pages, and read or write bytes that nobody else sees.
        """
        if not self._book.attached:
            self._table.idle = True
            self._table.unpin_memory()

    def close(self) -> None:
        """The arenas are gone: their memory counts no more. Idempotent."""
        if self._table.budget is not None:
            self._table.budget.leave(self._table)

    # Looking.

    def state(self, block_hash: BlockHash) -> State | None:
        """None: not here."""
        block = self._table.find(block_hash)
        return block.state if block is not None else None

    def block_at(self, slot: int) -> BlockHash | None:
        """The block that occupies a slot; None: the slot is free, or there is none."""
        block = self._table.occupied.get(slot)
        return block.hash if block is not None else None

    def resident(self) -> Iterator[BlockHash]:
        """Every resident block, in no order; not to be mixed with changes."""
        return iter(self._table.resident)

    def counters(self) -> Counters:
        """A snapshot."""
        self._sums.evicted = self._table.evicted
        return Counters(
            **asdict(self._sums),
            **self._table.gauges(),
            dirty=self._dirty,
            pinned=self._pinned,
            quarantined=len(self._book.quarantined_slots()),
        )

    def check(self) -> None:
        """Raises AssertionError unless every invariant holds. Looks at every slot and lease."""
        check_table(self._table)
        check_book(self._book, self._table)
        blocks = self._table.occupied.values()
        assert self._pinned == sum(block.pins > 0 for block in blocks), "pinned miscounted"
        assert self._dirty == sum(block.dirty for block in blocks), "dirty miscounted"
        assert self._dirty <= self.dirty_max_slots, "too many dirty blocks"
        for block in self._table.resident.values():
            assert block.committed == self._arrivals.all_committed, f"slot {block.slot} is resident without all parts"
