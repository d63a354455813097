"""The full consistency check behind `Directory.check`, for tests and for a running agent asked to examine itself."""

from __future__ import annotations

from collections import Counter

from s3kv.tier.block import Block, State
from s3kv.tier.leases import LeaseBook
from s3kv.tier.table import TICKET_LIMIT, SlotTable


def check_table(table: SlotTable) -> None:
    free = table.warm + table.cold
    assert sorted(free + list(table.occupied)) == list(range(table.slots)), "a slot is in no state, or in two"
    for slot, block in table.occupied.items():
        assert block.slot == slot, f"slot {slot} holds a block that says it is in {block.slot}"
        assert 0 <= block.ticket < TICKET_LIMIT and block.ticket == table.tickets[slot], f"slot {slot}: wrong ticket"
        _check_block(block, table)
    found = len(table.resident) + len(table.pending)
    doomed = sum(block.state is State.DOOMED for block in table.occupied.values())
    assert found + doomed == len(table.occupied), "the map and the slots disagree"
    evictable = {slot for slot, block in table.occupied.items() if not block.busy}
    unleased = {slot for slot, block in table.lru.items() if not block.pins}
    assert unleased == evictable, "the eviction order does not hold exactly what may be evicted"
    assert all(table.occupied[slot] is block for slot, block in table.lru.items()), "a stale block may be evicted"
    assert not any(block.kept for block in table.lru.values()), "what the uploader reads may be evicted"
    assert not (table.pinned_memory and table.cold), "pinned memory is all there, so no slot is cold"
    if table.budget is not None:
        assert table.budget.charged_bytes <= table.budget.capacity_bytes, "the node's budget is exceeded"


def _check_block(block: Block, table: SlotTable) -> None:
    where = f"slot {block.slot} ({block.state.value})"
    maps = {State.RESIDENT: table.resident, State.WRITING: table.pending, State.FETCHING: table.pending}
    for blocks in (table.resident, table.pending):
        mapped = blocks.get(block.hash) is block
        assert mapped == (maps.get(block.state) is blocks), f"{where} is found as something else"
    if block.state is State.RESIDENT:
        assert not block.writers and not block.fetching, f"{where} is being written"
    elif block.state is State.DOOMED:
        assert block.busy and not block.dirty, f"{where} should be free"
    else:
        assert not block.pins and not block.kept, f"{where} is read before it is complete"
        assert block.fetching == (block.state is State.FETCHING), f"{where}: fetching {block.fetching}"
    assert block.kept >= block.dirty, f"{where} is dirty but may be evicted"
    assert not any(block.committed >> position & 1 for position in block.writers), f"{where} is written twice"


def check_book(book: LeaseBook, table: SlotTable) -> None:
    pins: Counter[Block] = Counter()
    for lease_id, lease in book.leases.items():
        assert lease.blocks and lease.readers, f"lease {lease_id} has nothing left"
        pins.update(lease.blocks)
        for reader, holder in lease.readers.items():
            assert (lease_id, reader) in book.holders[holder].shares, f"lease {lease_id}: the share of {reader} is lost"
    blocks = set(table.occupied.values())
    assert set(pins) <= blocks, "a lease pins a slot that is free"
    assert all(block.pins == pins[block] for block in blocks), "pins miscounted"
    writes = {(block, position, holder) for block in blocks for position, holder in block.writers.items()}
    held = {(block, position, holder) for holder, holding in book.holders.items() for block, position in holding.writes}
    assert writes == held, "reservations and holders disagree"
    shares = sum(len(holding.shares) for holding in book.holders.values())
    assert shares == sum(len(lease.readers) for lease in book.leases.values()), "a holder has a share of no lease"
    assert book.gone.keys().isdisjoint(book.holders), "a process that has exited holds something"
    assert all(holding.shares or holding.writes for holding in book.holders.values()), "a holder holds nothing"
