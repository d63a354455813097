"""How several namespaces of one node share its memory.

Policy
------
*What counts.* An arena that is registered with CUDA (*pinned memory*) cannot shrink and counts whole, from the moment
it is registered. Any other arena is sparse: it counts what its slots have touched, and a free slot's memory can be
returned to the machine.

*Growing.* A namespace takes memory freely while the node has some left. After that it takes it from the namespace that
is most over its fair share. As all shares are equal, that is the one with the most memory; the requester only takes
from one that stays ahead of it, and otherwise evicts blocks of its own. So namespaces under pressure converge on equal
memory, and what one does not need serves the others. A namespace without an engine (*idle*) has no fair share: it pays
first, and everything. Only evictable blocks are ever taken: nothing that is leased, being copied or to be uploaded.

*Registering.* Since pinned memory never comes back while its engine lives, first come is first served, up to
`capacity // namespaces` for one namespace; an operator who serves several models from one node says how many. To make
room, idle namespaces give what they have and active ones what they have beyond `capacity // members`. What still does
not fit is not granted: a smaller arena, or pageable memory, or none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class Member(Protocol):
    """A namespace's slots, as the budget sees them."""

    slot_bytes: int
    idle: bool
    pinned_memory: bool

    @property
    def charge(self) -> int:
        """Bytes that count against the budget."""

    def reclaim(self) -> bool:
        """Returns one slot's memory, evicting a block if it must. False: it cannot."""


class NodeBudget:
    """`capacity_bytes` of host memory for all namespaces; `namespaces` is how many pinned ones to plan for."""

    def __init__(self, capacity_bytes: int, *, namespaces: int = 1) -> None:
        if capacity_bytes < 1 or namespaces < 1:
            raise ValueError("capacity_bytes and namespaces must be positive")
        self.capacity_bytes = capacity_bytes
        self.namespaces = namespaces
        self._members: list[Member] = []

    @property
    def charged_bytes(self) -> int:
        return sum(member.charge for member in self._members)

    def join(self, member: Member) -> None:
        """Charges a new namespace. ValueError: its pinned memory is more than `grant` allowed."""
        if self.charged_bytes + member.charge > self.capacity_bytes:
            raise ValueError("pinned memory beyond the node's budget: ask grant first")
        self._members.append(member)

    def leave(self, member: Member) -> None:
        """Its arenas are gone; idempotent."""
        if member in self._members:
            self._members.remove(member)

    def room_for(self, member: Member) -> int:
        """The charge that `member` could have if the others stayed as they are."""
        return max(member.charge, self.capacity_bytes - self.charged_bytes + member.charge)

    def grant(self, slot_bytes: int, want_slots: int, pinned: bool) -> int:
        """Slots for a new namespace's arena, at most `want_slots`, perhaps 0.

        Memory is charged when the namespace's `Directory` is made; make it before anything else asks. A pageable arena
        costs nothing until it is used, so it is granted up to the whole capacity.
        """
        if slot_bytes < 1 or want_slots < 0:
            raise ValueError("slot_bytes must be positive and want_slots not negative")
        if not pinned:
            return min(want_slots, self.capacity_bytes // slot_bytes)
        slots = min(want_slots, self.capacity_bytes // self.namespaces // slot_bytes)
        self._trim(None, slots * slot_bytes)
        return max(0, min(slots, (self.capacity_bytes - self.charged_bytes) // slot_bytes))

    def make_room(self, member: Member, nbytes: int) -> bool:
        """Whether `nbytes` more of pinned memory fit, after the other namespaces gave what they owe."""
        return self._trim(member, nbytes)

    def may_grow(self, member: Member) -> bool:
        """Whether `member` may touch one more slot; takes its memory from another namespace if that is fair."""
        need = member.slot_bytes
        return self._collect(member, need, lambda payer: payer.charge > member.charge + need)

    def _trim(self, requester: Member | None, nbytes: int) -> bool:
        members = len(self._members) + (requester is None)
        share = self.capacity_bytes // max(1, members)
        return self._collect(requester, nbytes, lambda payer: payer.charge > share)

    def _collect(self, requester: Member | None, nbytes: int, owes: Callable[[Member], bool]) -> bool:
        """Whether `nbytes` more fit, after taking slot by slot from whoever pays first, as long as they owe."""
        payers = [member for member in self._members if member is not requester]
        while self.charged_bytes + nbytes > self.capacity_bytes:
            if not payers:
                return False
            payer = min(payers, key=_pays_first)
            if not (payer.idle or owes(payer)) or not payer.reclaim():
                payers.remove(payer)
        return True


def _pays_first(member: Member) -> tuple[bool, int]:
    return (not member.idle, -member.charge)
