"""How blocks come to be resident: parts that engines copy in, and blocks that the agent fetches from storage.

A block that engines write is resident once every part was committed under the ticket of this use of its slot. One that
the agent fetches is resident at once, since storage has all of its parts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from s3kv.identity import BlockHash
from s3kv.tier.block import Block, Committed, Holder, Reserved, State, Sums
from s3kv.tier.leases import LeaseBook
from s3kv.tier.table import SlotTable


class Arrivals:
    """What `Directory` promises of reserve, commit, abandon and of fetching is kept here.

    enqueue: queues a block that engines completed for upload, and says whether it did.
    """

    def __init__(
        self, parts: Sequence[int], table: SlotTable, book: LeaseBook, sums: Sums, enqueue: Callable[[Block], bool]
    ) -> None:
        self.all_committed = (1 << len(parts)) - 1
        self._position = {part: position for position, part in enumerate(parts)}
        self._table = table
        self._book = book
        self._sums = sums
        self._enqueue = enqueue

    def reserve(
        self, part: int, parent: BlockHash, start_block: int, hashes: Sequence[BlockHash], holder: Holder
    ) -> list[Reserved | None]:
        position = self._position.get(part)
        if position is None or holder in self._book.gone:
            return [None] * len(hashes)
        result: list[Reserved | None] = []
        full = False
        for ordinal, block_hash in enumerate(hashes, start_block):
            block = self._table.find(block_hash)
            if block is None and not full:
                block = self._table.allocate(block_hash, parent, ordinal, State.WRITING)
                full = block is None
            if block is None:
                self._sums.no_room += 1
            result.append(self._join(block, position, holder))
            parent = block_hash
        return result

    def _join(self, block: Block | None, position: int, holder: Holder) -> Reserved | None:
        if block is None or block.state is not State.WRITING:
            if block is not None and block.slot in self._table.lru:
                self._table.lru.move_to_end(block.slot)  # in use right now: not to be evicted for its successors
            return None
        if position in block.writers or block.committed >> position & 1:
            return None
        self._table.lru.pop(block.slot, None)
        self._book.writes(holder, block, position)
        return Reserved(block.slot, block.ticket)

    def commit(self, part: int, slot: int, ticket: int) -> Committed:
        block, position = self._written(part, slot, ticket)
        if block is None:
            return Committed.STALE
        self._book.end_write(block, position)
        if block.state is State.DOOMED:
            self._sums.stale_commits += 1
            self._table.rest(block)
            return Committed.STALE
        block.committed |= 1 << position
        if block.committed != self.all_committed:
            self._table.rest(block)
            return Committed.WAITING
        self._table.make_resident(block)
        queued = self._enqueue(block)
        self._table.rest(block)
        return Committed.DIRTY if queued else Committed.CLEAN

    def abandon(self, part: int, slot: int, ticket: int) -> bool:
        block, position = self._written(part, slot, ticket)
        if block is None:
            return False
        self.give_up(block, position)
        return True

    def _written(self, part: int, slot: int, ticket: int) -> tuple[Block | None, int]:
        position = self._position.get(part, -1)
        block = self._table.occupied.get(slot)
        if block is not None and block.ticket == ticket and position in block.writers:
            return block, position
        self._sums.stale_commits += 1
        return None, position

    def give_up(self, block: Block, position: int) -> None:
        """One part of a block will not come: the block is forgotten, and its slot free once nobody copies."""
        self._sums.abandoned += 1
        self._book.end_write(block, position)
        if block.state is State.DOOMED:
            self._table.rest(block)
        else:
            self._table.discard(block)

    def begin_fetch(self, hashes: Sequence[BlockHash], *, parent: BlockHash, start_block: int) -> list[int | None]:
        slots: list[int | None] = []
        for ordinal, block_hash in enumerate(hashes, start_block):
            slots.append(self._fetch_slot(block_hash, parent, ordinal))
            parent = block_hash
        return slots

    def _fetch_slot(self, block_hash: BlockHash, parent: BlockHash, ordinal: int) -> int | None:
        known = self._table.find(block_hash)
        if known is not None:
            if known.state is not State.WRITING or known.busy:
                return None
            self._table.discard(known)  # parts of it arrived, nobody copies: storage has all of it
        block = self._table.allocate(block_hash, parent, ordinal, State.FETCHING)
        if block is None:
            self._sums.no_room += 1
            return None
        return block.slot

    def finish_fetch(self, slot: int, ok: bool) -> bool:
        block = self._table.occupied.get(slot)
        if block is None or not block.fetching:
            raise ValueError(f"slot {slot} is not being fetched into")
        block.fetching = False
        if block.state is State.DOOMED:
            self._table.rest(block)
            return False
        if not ok:
            self._table.discard(block)
            return False
        block.committed = self.all_committed
        self._table.make_resident(block)
        self._table.rest(block)
        return True
