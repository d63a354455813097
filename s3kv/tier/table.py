"""Which block is in which slot, and which slot is used next.

Every slot is either free or occupied by one `Block`. A free slot is *warm* (its memory is there) or *cold* (its memory
was never touched, or was returned to the machine; taking it needs the node budget's consent).

`lru` is the order of eviction, least recently used first: every block that nobody uses, which are clean resident blocks
and blocks of which some parts arrived and the others may never. Blocks under a lease may be in it too: a match is much
quicker if it leaves them there, eviction takes them out when it meets them, and the end of the lease puts them back.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from s3kv.identity import BlockHash
from s3kv.tier.block import Block, State
from s3kv.tier.budget import NodeBudget

TICKET_LIMIT = 1 << 32


class SlotTable:
    """Slots, the blocks in them, and the order of eviction. See `Directory` for the parameters."""

    def __init__(
        self,
        slots: int,
        slot_bytes: int,
        budget: NodeBudget | None,
        punch: Callable[[int], bool] | None,
        pinned_memory: bool,
    ) -> None:
        self.slots = slots
        self.slot_bytes = slot_bytes
        self.pinned_memory = pinned_memory
        self.idle = False
        self.resident: dict[BlockHash, Block] = {}
        self.pending: dict[BlockHash, Block] = {}
        self.occupied: dict[int, Block] = {}
        self.lru: OrderedDict[int, Block] = OrderedDict()
        self.tickets = [0] * slots
        self.warm: list[int] = []
        self.cold = list(range(slots - 1, -1, -1))
        self.evicted = 0
        self.budget = budget
        self._punch = punch
        if pinned_memory:
            self.warm, self.cold = self.cold, []
        if budget is not None:
            budget.join(self)

    def find(self, block: BlockHash) -> Block | None:
        return self.resident.get(block) or self.pending.get(block)

    def allocate(self, block: BlockHash, parent: BlockHash, start_block: int, state: State) -> Block | None:
        """A slot for `block`, entered as pending; evicts if it must. None when every slot is busy."""
        slot = self._take_slot()
        if slot is None:
            return None
        ticket = (self.tickets[slot] + 1) % TICKET_LIMIT
        self.tickets[slot] = ticket
        entry = Block(block, parent, start_block, slot, ticket, state, fetching=state is State.FETCHING)
        self.occupied[slot] = entry
        self.pending[block] = entry
        return entry

    def _take_slot(self) -> int | None:
        if self.warm:
            return self.warm.pop()
        if self.cold and (self.budget is None or self.budget.may_grow(self)):
            return self.cold.pop()
        if self._evict():
            return self.warm.pop()
        return None

    def _evict(self) -> bool:
        while self.lru:
            _, victim = self.lru.popitem(last=False)
            if not victim.pins:
                self.evicted += 1
                self.forget(victim)
                self.free(victim)
                return True
        return False

    def make_resident(self, entry: Block) -> None:
        del self.pending[entry.hash]
        entry.state = State.RESIDENT
        self.resident[entry.hash] = entry

    def forget(self, entry: Block) -> None:
        """Takes a block off the map: it is found no more. Follow with `rest` or `free`."""
        (self.resident if entry.state is State.RESIDENT else self.pending).pop(entry.hash)
        entry.state = State.DOOMED

    def free(self, entry: Block) -> None:
        """Frees the slot of a forgotten block that nobody uses any more."""
        del self.occupied[entry.slot]
        self.warm.append(entry.slot)

    def rest(self, entry: Block) -> None:
        """To be called when one use of a block ended: with the last one it becomes evictable, or free if forgotten."""
        if entry.pins or entry.kept or entry.writers or entry.fetching:
            return
        if entry.state is State.DOOMED:
            self.free(entry)
        else:
            self.lru[entry.slot] = entry

    def discard(self, entry: Block) -> None:
        """Forgets a block; its slot is free at once if nobody uses it, else as soon as the last one is done."""
        self.lru.pop(entry.slot, None)
        self.forget(entry)
        self.rest(entry)

    def gauges(self) -> dict[str, int]:
        """The fields of `Counters` that slots alone decide."""
        in_use, resident, arriving = len(self.occupied), len(self.resident), len(self.pending)
        room = self.slots if self.budget is None else self.budget.room_for(self) // self.slot_bytes
        return {
            "slots": self.slots,
            "budget": min(self.slots, room),
            "in_use": in_use,
            "free": self.slots - in_use,
            "resident": resident,
            "arriving": arriving,
            "doomed": in_use - resident - arriving,
        }

    # What the node budget asks (`budget.Member`).

    @property
    def charge(self) -> int:
        """Bytes of host memory that this namespace's arenas take up."""
        return (self.slots - len(self.cold)) * self.slot_bytes

    def reclaim(self) -> bool:
        """Returns one slot's memory to the machine. False: every slot is busy, or the memory cannot be returned."""
        if self.pinned_memory or self._punch is None or not (self.warm or self._evict()):
            return False
        slot = self.warm.pop()
        if not self._punch(slot):
            self.warm.append(slot)
            return False
        self.cold.append(slot)
        return True

    def pin_memory(self) -> bool:
        """Charges the whole arena, as registering it with CUDA makes all of it resident. False: it does not fit."""
        if self.pinned_memory:
            return True
        missing = len(self.cold) * self.slot_bytes
        if self.budget is not None and not self.budget.make_room(self, missing):
            return False
        self.pinned_memory = True
        self.warm, self.cold = self.cold + self.warm, []
        return True

    def unpin_memory(self) -> None:
        """The registrations are gone. The memory stays until another namespace needs it."""
        self.pinned_memory = False
