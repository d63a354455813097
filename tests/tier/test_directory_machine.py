"""The directory against a model that remembers which bytes are where and who is copying.

The model does not foresee which block is evicted; it demands that only what nobody uses goes, that room is refused only
when every slot is used, and that whoever reads a slot under a lease finds the bytes of its block for every part.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from s3kv.identity import ROOT
from s3kv.tier import Committed, Directory, Held, State

SLOTS = 5
DIRTY_MAX = 2
PARTS = (0, 1, 255)
HOLDERS = ("engine-a", "engine-b", "engine-c")


def chain(name: int) -> list[bytes]:
    """Five hashes; all chains have the first two in common."""
    return [bytes([0 if i < 2 else name, i]) + bytes(14) for i in range(5)]


@dataclass
class Model:
    """What is known of the current use of one slot."""

    hash: bytes
    slot: int
    ticket: int
    writers: dict[int, str] = field(default_factory=dict)
    committed: set[int] = field(default_factory=set)
    fetching: bool = False
    resident: bool = False
    dirty: bool = False
    forgotten: bool = False
    leases: set[int] = field(default_factory=set)
    holds: list[Held] = field(default_factory=list)

    @property
    def used(self) -> bool:
        return bool(self.writers or self.fetching or self.dirty or self.leases or self.holds)


runs = st.tuples(st.integers(1, 3), st.integers(0, 4), st.integers(1, 5)).map(
    lambda t: (t[1], chain(t[0])[t[1] : t[1] + t[2]], chain(t[0])[t[1] - 1] if t[1] else ROOT)
)
holders = st.sampled_from(HOLDERS)
parts = st.sampled_from(PARTS)


class DirectoryMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.directory = Directory(SLOTS, PARTS, slot_bytes_all_parts=4096, dirty_max_slots=DIRTY_MAX)
        self.slots: dict[int, Model] = {}
        self.bytes: dict[tuple[int, int], bytes] = {}
        self.leases: dict[int, dict[int, str]] = {}
        self.quarantined: set[str] = set()
        self.gone: set[str] = set()
        self.old_tickets: list[tuple[int, int, int]] = []

    # What the model knows.

    def found(self, block: bytes) -> Model | None:
        """The model's entry of a block, unless it was evicted meanwhile."""
        for model in self.slots.values():
            if model.hash == block and not model.forgotten:
                if model.used or self.directory.state(block) is not None:
                    return model
                return None
        return None

    def occupy(self, block: bytes, slot: int, ticket: int) -> Model:
        before = self.slots.get(slot)
        assert before is None or not before.used, f"slot {slot} was given away while {before} is in use"
        for other in [other for other in self.slots.values() if other.hash == block and not other.forgotten]:
            assert not other.used, f"{block!r} is in two slots"
            del self.slots[other.slot]
        self.slots[slot] = Model(block, slot, ticket)
        return self.slots[slot]

    def room(self) -> bool:
        return any(slot not in self.slots or not self.slots[slot].used for slot in range(SLOTS))

    def give_up(self, model: Model, part: int) -> None:
        del model.writers[part]
        model.forgotten = True

    def writing(self) -> list[tuple[Model, int]]:
        return [(model, part) for model in self.slots.values() for part in sorted(model.writers)]

    def end_share(self, lease: int, reader: int) -> None:
        del self.leases[lease][reader]
        if not self.leases[lease]:
            del self.leases[lease]
            for model in self.slots.values():
                model.leases.discard(lease)

    # Saving.

    @rule(part=parts, run=runs, holder=holders)
    def reserve(self, part: int, run: tuple[int, list[bytes], bytes], holder: str) -> None:
        start, hashes, parent = run
        before = [self.found(block) for block in hashes]
        reserved = self.directory.reserve(part, parent, start, hashes, holder)
        if holder in self.gone:
            assert reserved == [None] * len(hashes)
            return
        for block, known, room in zip(hashes, before, reserved, strict=True):
            if room is None:  # what was known may have been evicted for its successors since
                joinable = known and not (
                    known.resident or known.fetching or part in known.writers or part in known.committed
                )
                assert not joinable or self.directory.state(block) is None, "refused a part that nobody has"
                assert known or not self.room(), "refused although a slot is unused"
                continue
            model = self.slots.get(room.slot)
            if model is None or model.ticket != room.ticket:
                model = self.occupy(block, room.slot, room.ticket)
            assert model.hash == block and not model.resident and not model.fetching and not model.forgotten
            assert part not in model.writers and part not in model.committed
            model.writers[part] = holder
            self.bytes[room.slot, part] = b"half of " + block

    @precondition(lambda self: self.writing())
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        model, part = data.draw(st.sampled_from(self.writing()))
        dirty = sum(other.dirty for other in self.slots.values())
        result = self.directory.commit(part, model.slot, model.ticket)
        del model.writers[part]
        self.old_tickets.append((part, model.slot, model.ticket))
        self.bytes[model.slot, part] = model.hash
        if model.forgotten:
            assert result is Committed.STALE
            return
        model.committed.add(part)
        if model.committed != set(PARTS):
            assert result is Committed.WAITING
            return
        model.resident = True
        model.dirty = dirty < DIRTY_MAX
        assert result is (Committed.DIRTY if model.dirty else Committed.CLEAN)

    @precondition(lambda self: self.writing())
    @rule(data=st.data())
    def abandon(self, data: st.DataObject) -> None:
        model, part = data.draw(st.sampled_from(self.writing()))
        assert self.directory.abandon(part, model.slot, model.ticket)
        self.give_up(model, part)
        self.old_tickets.append((part, model.slot, model.ticket))

    @precondition(lambda self: self.old_tickets)
    @rule(data=st.data())
    def stale(self, data: st.DataObject) -> None:
        part, slot, ticket = data.draw(st.sampled_from(self.old_tickets[-8:]))
        model = self.slots.get(slot)
        if model is not None and model.ticket == ticket and part in model.writers:
            return
        before = self.directory.counters()
        assert self.directory.commit(part, slot, ticket) is Committed.STALE
        assert not self.directory.abandon(part, slot, ticket)
        after = self.directory.counters()
        assert after.stale_commits == before.stale_commits + 2
        assert (after.in_use, after.resident, after.dirty) == (before.in_use, before.resident, before.dirty)

    # Reading.

    @rule(run=runs, owners=st.lists(holders, min_size=1, max_size=3), limit=st.integers(0, SLOTS))
    def match(self, run: tuple[int, list[bytes], bytes], owners: list[str], limit: int) -> None:
        _, hashes, _ = run
        pinned = self.directory.counters().pinned
        found = self.directory.match(hashes, readers=dict(enumerate(owners)), max_pinned_slots=limit)
        assert (found.lease_id == 0) == (not found.slots)
        if not self.gone.isdisjoint(owners):
            assert not found.slots
            return
        for block, slot in zip(hashes, found.slots, strict=False):
            model = self.slots[slot]
            assert model.hash == block and model.resident and not model.forgotten
            model.leases.add(found.lease_id)
        if found.slots:
            assert sum(bool(model.leases) for model in self.slots.values()) <= max(limit, pinned)
            self.leases[found.lease_id] = dict(enumerate(owners))
        if len(found.slots) < len(hashes):
            missed = self.found(hashes[len(found.slots)])
            pinned = sum(bool(model.leases) for model in self.slots.values())
            assert missed is None or not missed.resident or (pinned >= limit and not missed.leases)

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), whole=st.booleans())
    def release(self, data: st.DataObject, whole: bool) -> None:
        lease = data.draw(st.sampled_from(sorted(self.leases)))
        readers = sorted(self.leases[lease])
        if whole:
            assert self.directory.release(lease)
        else:
            readers = [data.draw(st.sampled_from(readers))]
            assert self.directory.release(lease, readers[0])
        for reader in readers:
            self.end_share(lease, reader)
        assert not self.directory.release(lease, readers[0])

    # Processes.

    @rule(holder=holders)
    def process_exits(self, holder: str) -> None:
        self.directory.holder_gone(holder)
        self.quarantined.discard(holder)
        self.gone.add(holder)
        for model, part in self.writing():
            if model.writers[part] == holder:
                self.give_up(model, part)
                self.old_tickets.append((part, model.slot, model.ticket))
        for lease, readers in list(self.leases.items()):
            for reader in [reader for reader, owner in readers.items() if owner == holder]:
                self.end_share(lease, reader)

    @rule(holder=holders)
    def connection_breaks(self, holder: str) -> None:
        self.directory.quarantine_holder(holder)
        held = [model for model in self.slots.values() if self.held_by(model, holder)]
        if held:
            self.quarantined.add(holder)

    @rule(holder=holders)
    def connects_again(self, holder: str) -> None:
        self.directory.holder_back(holder)
        self.quarantined.discard(holder)
        self.gone.discard(holder)

    def held_by(self, model: Model, holder: str) -> bool:
        return holder in model.writers.values() or any(holder in self.leases[lease].values() for lease in model.leases)

    # The agent.

    @rule(run=runs)
    def begin_fetch(self, run: tuple[int, list[bytes], bytes]) -> None:
        start, hashes, parent = run
        before = [self.found(block) for block in hashes]
        slots = self.directory.begin_fetch(hashes, parent=parent, start_block=start)
        for block, known, slot in zip(hashes, before, slots, strict=True):
            if slot is None:
                idle = known and not known.resident and not known.used
                assert not idle or self.directory.state(block) is None, "an idle partial block blocks the fetch"
                assert known or not self.room()
                continue
            self.occupy(block, slot, -1).fetching = True
            for part in PARTS:
                self.bytes[slot, part] = b"half of " + block

    @precondition(lambda self: any(model.fetching for model in self.slots.values()))
    @rule(data=st.data(), ok=st.booleans())
    def finish_fetch(self, data: st.DataObject, ok: bool) -> None:
        slot = data.draw(st.sampled_from(sorted(slot for slot, model in self.slots.items() if model.fetching)))
        model = self.slots[slot]
        model.fetching = False
        if ok:
            self.bytes.update({(slot, part): model.hash for part in PARTS})
        model.resident = ok and not model.forgotten
        assert self.directory.finish_fetch(slot, ok) == model.resident
        model.forgotten |= not ok

    @rule(run=runs)
    def hold(self, run: tuple[int, list[bytes], bytes]) -> None:
        for block in run[1]:
            held = self.directory.hold(block)
            if held is not None:
                assert self.slots[held.slot].resident and self.slots[held.slot].hash == held.block == block
                self.slots[held.slot].holds.append(held)
            else:
                model = self.found(block)
                assert model is None or not model.resident

    @rule()
    def finish_upload(self) -> None:
        run = [model.holds.pop() for model in self.slots.values() if model.holds]
        self.directory.finish_upload(run)
        for held in run:
            self.slots[held.slot].dirty = False

    @precondition(lambda self: any(model.dirty for model in self.slots.values()))
    @rule()
    def give_up_upload(self) -> None:
        model = next(model for model in self.slots.values() if model.dirty)
        ticket = model.ticket
        assert self.directory.mark_clean(model.hash, ticket)
        assert not self.directory.mark_clean(model.hash, ticket)
        model.dirty = False

    @rule(run=runs)
    def drop(self, run: tuple[int, list[bytes], bytes]) -> None:
        models = [self.found(block) for block in run[1]]
        expected = [model for model in models if model is not None and (model.resident or model.fetching)]
        assert self.directory.drop(run[1]) == len(expected)
        for model in expected:
            model.forgotten, model.dirty, model.resident = True, False, False

    @rule(run=runs)
    def touch(self, run: tuple[int, list[bytes], bytes]) -> None:
        self.directory.touch_chain(run[1][-1])

    # After every step.

    @invariant()
    def consistent(self) -> None:
        self.directory.check()
        for model in self.slots.values():
            if model.forgotten or not model.used:
                continue
            expected = State.RESIDENT if model.resident else State.FETCHING if model.fetching else State.WRITING
            assert self.directory.state(model.hash) is expected, f"{model} went while in use"
            if model.leases or model.holds:
                assert {self.bytes[model.slot, part] for part in PARTS} == {model.hash}
        self.quarantined = {
            holder for holder in self.quarantined if any(self.held_by(model, holder) for model in self.slots.values())
        }
        counters = self.directory.counters()
        assert counters.pinned == sum(bool(model.leases) for model in self.slots.values())
        assert counters.dirty == sum(model.dirty for model in self.slots.values())
        assert counters.quarantined == sum(
            any(self.held_by(model, holder) for holder in self.quarantined) for model in self.slots.values()
        )


TestDirectoryMachine = DirectoryMachine.TestCase
