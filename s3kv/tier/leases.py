"""Who holds what: leases with a share for each reader, and the reservations of writers.

Neither ends by a clock: a stopped engine may still copy. A share ends by `release`, a reservation by commit or abandon,
and both when the process that holds them has exited.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from s3kv.tier.block import Block, Holder, ReaderId


@dataclass(slots=True)
class Lease:
    """Pins on `blocks` (head of the chain first) until every one of `readers` gave its share back."""

    blocks: list[Block]
    readers: dict[ReaderId, Holder]


@dataclass(slots=True)
class Holding:
    """What one process holds. Dicts serve as sets that keep their order, so that runs repeat exactly."""

    shares: dict[tuple[int, ReaderId], None] = field(default_factory=dict)
    writes: dict[tuple[Block, int], None] = field(default_factory=dict)
    """(block, position of the part)"""
    quarantined: bool = False


GONE_REMEMBERED = 4096
"""Processes known to have exited. What they sent before can only be as old as a socket's buffer, or one match."""


class LeaseBook:
    def __init__(self) -> None:
        self.gone: dict[Holder, None] = {}
        self.attached: set[Holder] = set()
        """Processes that may have the arenas mapped, and registered with CUDA."""
        self.leases: dict[int, Lease] = {}
        self.holders: dict[Holder, Holding] = {}
        self._last_id = 0

    def open(self, blocks: list[Block], readers: Mapping[ReaderId, Holder]) -> int:
        """Its id, never 0 and never used twice."""
        self._last_id += 1
        self.leases[self._last_id] = Lease(blocks, dict(readers))
        for reader, holder in readers.items():
            self.of(holder).shares[self._last_id, reader] = None
        return self._last_id

    def end_share(self, lease_id: int, reader: ReaderId) -> bool:
        """Whether that was the lease's last share: its pins are to be taken off, then it is to be removed."""
        lease = self.leases[lease_id]
        holder = lease.readers.pop(reader)
        del self.holders[holder].shares[lease_id, reader]
        self._forget_if_empty(holder)
        return not lease.readers

    def of(self, holder: Holder) -> Holding:
        return self.holders.setdefault(holder, Holding())

    def writes(self, holder: Holder, block: Block, position: int) -> None:
        block.writers[position] = holder
        self.of(holder).writes[block, position] = None

    def end_write(self, block: Block, position: int) -> None:
        holder = block.writers.pop(position)
        del self.holders[holder].writes[block, position]
        self._forget_if_empty(holder)

    def bury(self, holder: Holder) -> None:
        """The process has exited: it is given nothing more. Its shares and writes must have been ended."""
        self.attached.discard(holder)
        self.gone[holder] = None
        if len(self.gone) > GONE_REMEMBERED:
            del self.gone[next(iter(self.gone))]

    def quarantined_slots(self) -> set[int]:
        return {slot for holding in self.holders.values() if holding.quarantined for slot in self._slots(holding)}

    def _slots(self, holding: Holding) -> Iterator[int]:
        for block, _ in holding.writes:
            yield block.slot
        for lease_id, _ in holding.shares:
            yield from (block.slot for block in self.leases[lease_id].blocks)

    def _forget_if_empty(self, holder: Holder) -> None:
        holding = self.holders[holder]
        if not holding.shares and not holding.writes:
            del self.holders[holder]
