"""Several namespaces on one node's memory."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from s3kv.identity import ROOT
from s3kv.tier import Directory, NodeBudget

PAGE = 4096


class Namespace:
    """A directory, and the set of its slots that take up memory."""

    def __init__(self, budget: NodeBudget, slots: int, slot_bytes: int = PAGE, pinned: bool = False) -> None:
        granted = budget.grant(slot_bytes, slots, pinned)
        self.punched: list[int] = []
        self.directory = Directory(
            granted,
            (0,),
            slot_bytes_all_parts=slot_bytes,
            budget=budget,
            dirty_max_slots=0,
            pinned_memory=pinned,
            punch=self.punch,
        )
        self.next = 0

    def punch(self, slot: int) -> bool:
        self.punched.append(slot)
        return True

    def save(self, count: int) -> int:
        """Saves so many new blocks; returns how many found room."""
        saved = 0
        for _ in range(count):
            self.next += 1
            (room,) = self.directory.reserve(0, ROOT, 0, [self.next.to_bytes(16, "big")], "engine")
            if room is not None:
                self.directory.commit(0, *room)
                saved += 1
        self.directory.check()
        return saved

    def pin_all(self) -> None:
        for i in range(1, self.next + 1):
            self.directory.match([i.to_bytes(16, "big")], readers={0: "engine"})

    def exit(self) -> None:
        """The engine exits, and another one comes that is called the same."""
        self.directory.holder_gone("engine")
        self.directory.holder_back("engine")

    @property
    def blocks(self) -> int:
        return self.directory.counters().resident


def test_one_namespace_may_use_everything() -> None:
    budget = NodeBudget(10 * PAGE)
    only = Namespace(budget, 100)
    assert only.save(15) == 15
    assert only.blocks == 10
    assert budget.charged_bytes == 10 * PAGE
    assert only.directory.counters().budget == 10


def test_namespaces_under_pressure_end_up_equal() -> None:
    budget = NodeBudget(12 * PAGE)
    first, second, third = (Namespace(budget, 12) for _ in range(3))
    first.save(12)
    second.save(30)
    assert (first.blocks, second.blocks) == (6, 6)
    assert len(first.punched) == 6, "its memory went back to the machine"
    third.save(30)
    assert sorted(namespace.blocks for namespace in (first, second, third)) == [4, 4, 4]
    first.save(30)
    assert first.blocks == 4, "over its share it evicts its own"


def test_what_one_does_not_need_serves_the_others() -> None:
    budget = NodeBudget(12 * PAGE)
    small, large = Namespace(budget, 12), Namespace(budget, 12)
    small.save(2)
    large.save(50)
    assert (small.blocks, large.blocks) == (2, 10)


def test_what_is_in_use_is_never_taken() -> None:
    budget = NodeBudget(8 * PAGE)
    first, second = Namespace(budget, 8), Namespace(budget, 8)
    first.save(8)
    first.pin_all()
    assert second.save(3) == 0
    assert second.directory.counters().no_room == 3
    first.exit()
    assert second.save(3) == 3


def test_an_idle_namespace_pays_first() -> None:
    budget = NodeBudget(12 * PAGE)
    idle, busy = Namespace(budget, 12), Namespace(budget, 12)
    idle.save(4)
    busy.save(8)
    idle.directory._detached()
    busy.save(4)
    assert (idle.blocks, busy.blocks) == (0, 12)


def test_slots_of_different_size() -> None:
    budget = NodeBudget(16 * PAGE)
    small, large = Namespace(budget, 16), Namespace(budget, 16, slot_bytes=4 * PAGE)
    small.save(16)
    large.save(10)
    assert (small.blocks, large.blocks) == (8, 2)


def test_memory_that_cannot_be_returned_is_not_taken() -> None:
    budget = NodeBudget(4 * PAGE)
    stubborn, other = Namespace(budget, 4), Namespace(budget, 4)
    stubborn.directory._table._punch = lambda slot: False
    stubborn.save(4)
    assert other.save(1) == 0
    assert budget.charged_bytes == 4 * PAGE
    stubborn.directory.check()


def test_pinned_memory_counts_whole_and_is_first_come_first_served() -> None:
    budget = NodeBudget(10 * PAGE)
    pinned = Namespace(budget, 8, pinned=True)
    assert budget.charged_bytes == 8 * PAGE
    assert budget.grant(PAGE, 8, pinned=True) == 2
    sparse = Namespace(budget, 10)
    sparse.save(10)
    assert sparse.blocks == 2
    pinned.save(20)
    assert pinned.blocks == 8
    with pytest.raises(ValueError, match="grant"):
        Directory(9, (0,), slot_bytes_all_parts=PAGE, budget=budget, dirty_max_slots=0, pinned_memory=True, punch=None)


def test_an_operator_can_plan_for_several_pinned_namespaces() -> None:
    budget = NodeBudget(10 * PAGE, namespaces=2)
    assert Namespace(budget, 100, pinned=True).directory.counters().slots == 5
    assert Namespace(budget, 100, pinned=True).directory.counters().slots == 5
    assert budget.grant(PAGE, 100, pinned=True) == 0


def test_an_upgrade_takes_over_the_memory_of_the_old_model() -> None:
    budget = NodeBudget(10 * PAGE)
    old = Namespace(budget, 10, pinned=True)
    old.save(10)
    old.directory._detached()
    new = Namespace(budget, 10, pinned=True)
    assert new.directory.counters().slots == 10
    assert old.blocks == 0
    assert not old.directory.attached(pinned_memory=True, holder="engine"), "no room to register it again"
    new.directory._detached()
    new.directory.close()
    new.directory.close()
    assert old.directory.attached(pinned_memory=True, holder="engine")
    assert budget.charged_bytes == 10 * PAGE
    old.directory.check()


def test_registering_trims_active_namespaces_to_their_share_only() -> None:
    budget = NodeBudget(10 * PAGE)
    active = Namespace(budget, 10)
    active.save(10)
    assert budget.grant(PAGE, 10, pinned=True) == 5
    assert active.blocks == 5


def test_registered_memory_is_not_returned_while_a_process_lives() -> None:
    budget = NodeBudget(10 * PAGE)
    pinned, other = Namespace(budget, 8, pinned=True), Namespace(budget, 10)
    pinned.save(8)
    for rank in ("rank0", "rank1"):
        assert pinned.directory.attached(pinned_memory=True, holder=rank)
    pinned.directory.holder_gone("rank0")
    pinned.directory.quarantine_holder("rank1")
    pinned.directory._detached()
    other.save(10)
    assert (pinned.blocks, other.blocks, pinned.punched) == (8, 2, [])
    pinned.directory.holder_gone("rank1")
    other.save(10)
    assert (pinned.blocks, other.blocks) == (0, 10)


@pytest.mark.parametrize("capacity", [0, -1])
def test_a_budget_of_nothing_is_refused(capacity: int) -> None:
    with pytest.raises(ValueError):
        NodeBudget(capacity)


steps = st.lists(
    st.tuples(st.integers(0, 3), st.sampled_from(["save", "save", "pin", "exit", "attach", "detach"])), max_size=60
)


@given(steps=steps, sizes=st.lists(st.integers(1, 3), min_size=4, max_size=4))
def test_the_budget_holds_whatever_happens(steps: list[tuple[int, str]], sizes: list[int]) -> None:
    budget = NodeBudget(12 * PAGE, namespaces=2)
    namespaces = [Namespace(budget, 12, slot_bytes=size * PAGE, pinned=size == 3) for size in sizes]
    for which, action in steps:
        namespace = namespaces[which]
        match action:
            case "save":
                namespace.save(3)
            case "pin":
                namespace.pin_all()
            case "exit":
                namespace.exit()
            case "attach":
                namespace.directory.attached(pinned_memory=sizes[which] == 3, holder="engine")
            case "detach":
                namespace.directory._detached()
        for each in namespaces:
            each.directory.check()
