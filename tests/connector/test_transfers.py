"""Snapshots, slot copies and loads, on a device whose streams run as late, or as early, as waits allow."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.connector_rig import ALONE, namespace_for, pages_cache
from support.fake_agent import FakeAgent
from support.lazy_device import LazyDevice

from s3kv.connector.device import HostDevice, device_for
from s3kv.connector.guard import PromiseBroken, Troubles
from s3kv.connector.metadata import ConnectorMeta, Load, Save
from s3kv.connector.ring import RowLayout, SnapshotRing, ring_rows
from s3kv.connector.strips import Copies, Strip, numbers
from s3kv.connector.transfers import Transfers
from s3kv.connector.transfers import ring_blocks as wanted_ring_blocks
from s3kv.errors import ConfigError
from s3kv.identity import ROOT
from s3kv.settings import Settings, load_settings

WAIT_S = 10.0


class Rig:
    """A cache of `groups` pools of 8 pages of 64 bytes, an agent, and one rank's transfers on a lazy device."""

    def __init__(
        self, device: LazyDevice | None = None, *, groups: int = 1, ring_blocks: int = 8, **fields: Any
    ) -> None:
        self.device = device or LazyDevice()
        self.cache, self.pools = pages_cache(groups)
        self.namespace = namespace_for(self.cache)
        self.agent = FakeAgent(slots=8)
        self.troubles = Troubles()
        self.transfers = Transfers(
            fields.pop("settings", Settings()),
            self.namespace,
            self.cache,
            ALONE,
            self.device,
            engine_id="engine",
            ring_blocks=ring_blocks,
            troubles=self.troubles,
            client_factory=self.agent.worker,
        )
        self.leader = self.agent.leader(Settings(), self.namespace, ranks=1, engine_id="engine")

    def fill(self, page: int, value: int, group: int = 0) -> None:
        """Enqueue a pass that writes a page."""
        self.device.enqueue(self.device.forward, lambda: self.pools[group][page].fill_(value))

    def save(self, names: list[bytes], *pages: list[int], start: int = 0, parent: bytes = ROOT) -> None:
        save = Save(parent, start, tuple(names), tuple(tuple(group) for group in pages))
        self.transfers.bind(ConnectorMeta(saves=(save,)))
        self.transfers.start_loads(self.device.forward)
        self.transfers.snapshot(self.device.forward)

    def load(self, names: list[bytes], *pages: list[int], request_id: int = 1) -> Load:
        offer = self.leader.match(names)
        assert len(offer.slots) == len(names)
        return Load(request_id, offer.lease, offer.epoch, tuple(offer.slots), tuple(tuple(group) for group in pages))

    def stored(self, name: bytes, group: int = 0) -> set[int]:
        """The values of one block's bytes in host memory."""
        directory = self.agent.directory(self.namespace)
        begin = self.namespace.parts[0].group_offset(group)
        return set(directory.arenas[0].view(directory.blocks[name].slot)[begin : begin + 64])

    def drain(self) -> None:
        assert self.transfers.drain(WAIT_S)


@pytest.fixture(params=[False, True], ids=["late", "early"])
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    made = Rig(LazyDevice(eager_side=request.param))
    yield made
    made.transfers.close()


A, B, C = b"a" * 16, b"b" * 16, b"c" * 16


def test_case_07_a_page_overwritten_right_after_the_hook_is_stored_as_it_was(rig: Rig) -> None:
    rig.fill(3, 11)
    rig.save([A], [3])
    rig.fill(3, 99)
    rig.device.run_forward()
    rig.drain()
    assert rig.stored(A) == {11}


def test_saving_waits_for_the_pass_that_computes(rig: Rig) -> None:
    """The pass has not run yet when the saver copies: it must wait for the gather, not read an empty ring."""
    rig.fill(3, 11)
    rig.save([A], [3])
    rig.drain()
    assert rig.stored(A) == {11}


def test_a_load_lands_after_an_earlier_pass_and_before_the_next(rig: Rig) -> None:
    rig.fill(3, 11)
    rig.save([A], [3])
    rig.drain()
    rig.fill(5, 77)  # a pass that is still to run writes the page that the load will get
    seen: list[int] = []
    rig.transfers.bind(ConnectorMeta(loads=(rig.load([A], [5]),)))
    rig.transfers.start_loads(rig.device.forward)
    rig.device.enqueue(rig.device.forward, lambda: seen.extend(rig.pools[0][5].tolist()))
    rig.device.run_forward()
    assert set(seen) == {11}
    rig.drain()
    rig.agent.check_at_rest()


def test_nothing_synchronizes_on_the_executors_thread(rig: Rig) -> None:
    """Neither saving nor loading may make the forward stream run while it is enqueued."""
    rig.fill(3, 11)
    rig.save([A], [3])
    rig.drain()
    done = rig.device.forward.done
    rig.device.eager_side = False
    rig.fill(4, 12)
    rig.transfers.loader._side.eager = False
    rig.transfers.bind(ConnectorMeta(loads=(rig.load([A], [5]),)))
    rig.transfers.start_loads(rig.device.forward)
    assert rig.device.forward.done == done
    rig.drain()


def test_lease_is_released_after_the_copy_not_before(rig: Rig) -> None:
    rig.fill(3, 11)
    rig.save([A], [3])
    rig.drain()
    rig.transfers.bind(ConnectorMeta(loads=(rig.load([A], [5]),)))
    released = threading.Event()
    seen: list[set[int]] = []
    release = rig.transfers.client.release

    def watch(lease: int, epoch: int) -> None:
        seen.append(set(rig.pools[0][5].tolist()))
        release(lease, epoch)
        released.set()

    rig.transfers.client.release = watch  # type: ignore[method-assign]
    rig.transfers.start_loads(rig.device.forward)
    assert released.wait(WAIT_S)
    assert seen == [{11}]


def test_case_03_groups_are_stored_apart_and_the_last_page_is_never_touched() -> None:
    rig = Rig(groups=2)
    rig.fill(2, 21, group=0)
    rig.fill(5, 25, group=1)
    rig.save([A], [2], [5])
    rig.drain()
    assert (rig.stored(A, 0), rig.stored(A, 1)) == ({21}, {25})
    rig.transfers.bind(ConnectorMeta(loads=(rig.load([A], [4], [-1]),)))
    before = rig.pools[1].clone()
    rig.transfers.start_loads(rig.device.forward)
    rig.device.run_forward()
    assert set(rig.pools[0][4].tolist()) == {21}
    assert torch.equal(rig.pools[1], before)
    rig.drain()
    rig.transfers.close()


@pytest.mark.parametrize("page", [-2, 8, 1 << 40])
def test_a_page_outside_the_pool_is_refused(page: int) -> None:
    rig = Rig(LazyDevice())
    rig.fill(3, 11)
    rig.save([A], [3])
    rig.drain()
    rig.transfers.bind(ConnectorMeta(loads=(rig.load([A], [page]),)))
    with pytest.raises(PromiseBroken, match="offered"):
        rig.transfers.start_loads(rig.device.forward)
    rig.transfers.close()


def test_full_ring_drops_and_counts(rig: Rig) -> None:
    rig.transfers.saver.close(WAIT_S)  # type: ignore[union-attr]  # nobody empties the ring now
    names = [bytes([i]) * 16 for i in range(12)]
    rig.save(names, [i % 8 for i in range(12)])
    assert rig.troubles["save_ring_full"] == 4
    rig.save(names[:2], [0, 1])
    assert rig.troubles["save_ring_full"] == 6


def test_a_pass_whose_pages_cannot_be_gathered_is_lost_alone(rig: Rig) -> None:
    """Its rows come back, however many such passes there are, and none of its blocks is stored."""
    for _ in range(5):
        with pytest.raises(IndexError):
            rig.save([A, B], [3, 8])
        rig.drain()
    assert rig.agent.blocks_saved() == {}
    rig.fill(3, 11)
    rig.save([C], [3])
    rig.drain()
    assert rig.stored(C) == {11}
    assert rig.troubles["save_ring_full"] == 0


def test_page_numbers_of_a_pass_outlive_the_enqueueing_of_the_next_ones() -> None:
    """Two layer groups, and nothing has run on the device before all passes are enqueued."""
    rig = Rig(groups=2, ring_blocks=8)
    for number in range(8):
        rig.fill(number, number + 1)
        rig.fill(7 - number, 100 + number, group=1)
        rig.save([bytes([number]) * 16], [number], [7 - number])
    rig.device.run_forward()
    rig.drain()
    assert [rig.stored(bytes([number]) * 16) for number in range(8)] == [{number + 1} for number in range(8)]
    assert [rig.stored(bytes([number]) * 16, 1) for number in range(8)] == [{100 + number} for number in range(8)]
    rig.transfers.close()


def test_ring_rows_are_reused_in_order() -> None:
    """Many small saves through a ring of three rows: none is lost, none overwrites another."""
    rig = Rig(ring_blocks=3)
    for number in range(8):
        rig.fill(number, number + 1)
        rig.save([bytes([number]) * 16], [number])
        rig.drain()
    assert [rig.stored(bytes([number]) * 16) for number in range(8)] == [{number + 1} for number in range(8)]
    assert rig.troubles["save_ring_full"] == 0
    rig.transfers.close()


def test_a_save_that_wraps_around_the_ring_keeps_its_blocks_apart() -> None:
    rig = Rig(ring_blocks=3)
    for number in range(6):
        rig.fill(number, number + 1)
    rig.save([A, B], [0, 1])
    rig.drain()
    rig.save([C, b"d" * 16], [2, 3], start=2, parent=B)
    rig.drain()
    assert [rig.stored(name) for name in (A, B, C, b"d" * 16)] == [{1}, {2}, {3}, {4}]
    assert rig.agent.blocks_saved()[b"d" * 16] == (C, 3)
    rig.transfers.close()


def test_case_28_no_room_or_no_agent_drops_the_save_and_recovers(rig: Rig) -> None:
    rig.agent.refuse_reservations = True
    rig.save([A], [3])
    rig.drain()
    assert rig.troubles["blocks_not_reserved"] == 1
    rig.agent.refuse_reservations = False
    rig.agent.alive = False
    rig.save([A], [3])
    assert rig.troubles["save_without_agent"] == 1
    rig.agent.alive = True
    rig.fill(3, 5)
    rig.save([A], [3])
    rig.drain()
    assert rig.stored(A) == {5}


def test_a_failed_copy_abandons_its_slots_once_nothing_writes_to_them(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_rest: list[bool] = []
    abandon = rig.agent.abandon

    def watched(*args: Any) -> None:
        at_rest.append(rig.device.at_rest)
        abandon(*args)

    monkeypatch.setattr(rig.agent, "abandon", watched)
    rig.device.failing_copies = True
    rig.save([A], [3])
    rig.drain()
    assert rig.troubles["save_copy"] == 1
    assert at_rest == [True]
    rig.agent.check_at_rest()
    with pytest.raises(PromiseBroken):
        rig.transfers.bind(ConnectorMeta(loads=(Load(1, 5, 1, (0,), ((0,),)),)))
        rig.transfers.start_loads(rig.device.forward)


def test_a_load_whose_arena_is_not_mapped_stops_the_executor(rig: Rig) -> None:
    rig.transfers.bind(ConnectorMeta(loads=(Load(1, 5, 99, (0,), ((0,),)),)))
    with pytest.raises(PromiseBroken, match="not mapped"):
        rig.transfers.start_loads(rig.device.forward)


def test_loads_of_an_iteration_without_a_pass_are_kept_unless_the_request_ended(rig: Rig) -> None:
    rig.fill(3, 11)
    rig.save([A], [3])
    rig.drain()
    rig.transfers.bind(ConnectorMeta(loads=(rig.load([A], [5], request_id=1), rig.load([A], [6], request_id=2))))
    rig.transfers.bind(ConnectorMeta(dropped=(2,)))
    rig.transfers.start_loads(rig.device.forward)
    rig.device.run_forward()
    assert set(rig.pools[0][5].tolist()) == {11}
    assert set(rig.pools[0][6].tolist()) == {200}
    rig.drain()


def test_dropped_loads_give_their_lease_back(rig: Rig) -> None:
    rig.fill(3, 11)
    rig.save([A], [3])
    rig.drain()
    rig.transfers.bind(ConnectorMeta(loads=(rig.load([A], [5]),)))
    rig.transfers.bind(ConnectorMeta(dropped=(1,)))
    rig.transfers.start_loads(rig.device.forward)
    rig.drain()
    rig.agent.check_at_rest()


def test_saves_of_a_pass_that_did_not_run_are_not_taken_later(rig: Rig) -> None:
    rig.transfers.bind(ConnectorMeta(saves=(Save(ROOT, 0, (A,), ((3,),)),)))
    rig.transfers.bind(None)
    rig.transfers.snapshot(rig.device.forward)
    rig.drain()
    assert rig.agent.blocks_saved() == {}


def test_an_agent_that_came_back_is_attached_and_the_old_arena_let_go(rig: Rig) -> None:
    rig.fill(3, 11)
    rig.save([A], [3])
    rig.drain()
    promised = rig.load([A], [5])
    rig.agent.restart()
    assert rig.transfers.client.connect()
    rig.transfers.bind(ConnectorMeta(loads=(promised,)))
    rig.transfers.start_loads(rig.device.forward)  # promised by the run before, kept from its memory
    rig.device.run_forward()
    assert set(rig.pools[0][5].tolist()) == {11}
    rig.save([A], [5])
    rig.drain()
    rig.transfers.bind(ConnectorMeta(loads=(rig.load([A], [6]),)))
    rig.transfers.start_loads(rig.device.forward)
    rig.drain()
    assert set(rig.transfers.client.arenas) == {2}  # type: ignore[attr-defined]
    assert len(rig.device.pinned) == 1


def test_helper_threads_adopt_the_ranks_device(rig: Rig) -> None:
    rig.drain()
    assert len(rig.device.adopted) == 2
    assert threading.get_ident() not in rig.device.adopted


def test_arenas_are_registered_and_unregistered() -> None:
    rig = Rig(LazyDevice())
    assert list(rig.device.pinned.values()) == [8 * 4096]
    rig.transfers.close()
    assert rig.device.pinned == {}


def test_case_34_failure_to_pin_falls_back_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig(LazyDevice(pin_error="cudaHostRegister gave CUDA error 2"))
    assert "tier.pin" in caplog.text and "slower" in caplog.text
    rig.fill(3, 11)
    rig.save([A], [3])
    rig.drain()
    assert rig.stored(A) == {11}
    rig.transfers.close()


def test_pin_require_is_a_start_up_error() -> None:
    settings = load_settings(tier={"pin": "require"})
    with pytest.raises(ConfigError, match=r"tier\.pin is require"):
        Rig(LazyDevice(pin_error="no"), settings=settings)


def test_pin_never_registers_nothing() -> None:
    rig = Rig(LazyDevice(), settings=load_settings(tier={"pin": "never"}))
    assert rig.device.pinned == {}
    rig.transfers.close()


def test_saving_can_be_switched_off() -> None:
    rig = Rig(settings=load_settings(save={"enabled": False}))
    rig.save([A], [3])
    rig.drain()
    assert rig.agent.blocks_saved() == {}
    rig.transfers.close()


def test_ring_is_one_pass_large_within_its_cap() -> None:
    assert ring_rows(1 << 20, 1 << 30, 300) == 300
    assert ring_rows(1 << 20, 100 << 20, 300) == 100
    assert ring_rows(1 << 31, 1 << 30, 300) == 1
    arguments = SimpleNamespace(max_num_tokens=8192, max_batch_size=64, disable_overlap_scheduler=True)
    assert wanted_ring_blocks(arguments, 32) == 256 + 64
    arguments.disable_overlap_scheduler = False
    assert wanted_ring_blocks(arguments, 32) == 2 * (256 + 64), "a pass is enqueued while the one before runs"
    cache, _ = pages_cache(groups=2)
    layout = RowLayout(cache, namespace_for(cache), (0,))
    ring = SnapshotRing(HostDevice(), layout, 4)
    assert (layout.row_bytes, [offset for _, offset in layout.places]) == (512, [0, 256])
    first, second = ring.take(3), ring.take(3)
    assert first is not None and second is not None
    assert (first.start, first.count, second.start, second.count) == (0, 3, 3, 1)
    assert ring.take(1) is None
    ring.give_back(first)
    third = ring.take(9)
    assert third is not None and (third.start, third.count) == (0, 3)


def test_cpu_tensors_get_the_host_device() -> None:
    assert isinstance(device_for(torch.device("cpu")), HostDevice)


@pytest.mark.parametrize("rows", [3, 400], ids=["few", "many"])
def test_the_host_copies_every_row_and_refuses_all_when_one_is_outside(rows: int) -> None:
    """Many: more than 4 MiB, which several threads share."""
    size = 16 << 10
    source = torch.randint(0, 256, (rows, size), dtype=torch.uint8)
    target = torch.zeros((rows + 1, size), dtype=torch.uint8)
    order = torch.randperm(rows)
    strips = Strip.of(target), Strip.of(source)
    HostDevice().copy([Copies(strips[0], numbers((order + 1).tolist()), strips[1], numbers(order.tolist()))], None)
    assert torch.equal(target[1:], source)
    assert not target[0].any()
    outside = numbers([*range(rows - 1), rows])
    with pytest.raises(IndexError):
        HostDevice().copy([Copies(strips[0], numbers(range(rows)), strips[1], outside)], None)
    assert torch.equal(target[1:], source)
