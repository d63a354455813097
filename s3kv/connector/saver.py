"""Saves: a snapshot on the forward stream, then, in a helper thread, slots, copies and commits.

Order in the helper thread: reserve slots → copy ring rows to them on a side stream that waits for the gather → wait for
the copy's event → commit → give the rows back. A slot is committed only with its bytes in it; one that will not be
written is abandoned. The copy of one job runs while the next one's slots are asked for.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from s3kv.client.engine import Reservation
from s3kv.connector.arenas import Arenas
from s3kv.connector.device import Device, Event, Stream
from s3kv.connector.guard import Troubles
from s3kv.connector.metadata import Save
from s3kv.connector.ports import Worker
from s3kv.connector.ring import RowPart, Rows, SnapshotRing
from s3kv.connector.strips import Copies, numbers


class Pass(NamedTuple):
    """The blocks of all `saves`, one after another, lie in the rows of `runs`, one after another, once `gathered` has
    happened; blocks behind the last row found no room. Or all of them are `lost`."""

    saves: tuple[Save, ...]
    runs: list[Rows]
    gathered: Event
    lost: bool

    def snapshots(self) -> Iterator[Snapshot]:
        """By save, and in the order of the rows."""
        runs = iter(self.runs)
        rows = next(runs)
        for save in self.saves:
            first = 0
            while first < len(save.hashes):
                count = min(len(save.hashes) - first, rows.count)
                yield Snapshot(save, first, rows.head(count), self.gathered, self.lost)
                first += count
                if count < rows.count:
                    rows = rows.behind(count)
                elif (following := next(runs, None)) is not None:
                    rows = following
                else:
                    return


class Snapshot(NamedTuple):
    """Blocks `[first, first + rows.count)` of `save` lie in `rows` once `gathered` has happened, or are `lost`."""

    save: Save
    first: int
    rows: Rows
    gathered: Event
    lost: bool


@dataclass(slots=True)
class _Written:
    """Copies under way: what to commit, what to abandon, and rows to give back, once `copied` has happened.

    A copy that failed may have begun: its slots are nobody else's before the stream is past it.
    """

    rows: Rows
    copied: Event
    commits: list[tuple[int, Reservation, list[int]]] = field(default_factory=list)
    failures: list[tuple[int, Reservation, list[int]]] = field(default_factory=list)


_End = threading.Event | None
"""None ends the thread; an event is set once everything before it is done."""


class Saver:
    """`snapshot` is for the executor's thread; everything else happens in a thread of its own."""

    def __init__(self, client: Worker, device: Device, arenas: Arenas, ring: SnapshotRing, troubles: Troubles) -> None:
        self._client = client
        self._device = device
        self._arenas = arenas
        self._ring = ring
        self._troubles = troubles
        self._jobs: queue.SimpleQueue[Pass | _End] = queue.SimpleQueue()
        self._begun: deque[Snapshot | _End] = deque()  # the saver's thread's own
        self._thread = threading.Thread(target=self._run, name="s3kv-saver", daemon=True)
        self._thread.start()

    def snapshot(self, saves: tuple[Save, ...], stream: Stream) -> None:
        """Enqueue the gather of the blocks' pages into the ring. What finds no room is dropped and counted."""
        left = sum([len(save.hashes) for save in saves])
        runs: list[Rows] = []
        while left and (rows := self._ring.take(left)) is not None:
            runs.append(rows)
            left -= rows.count
        if left:
            self._troubles.count("save_ring_full", left)
        if not runs:
            return
        lost = True
        try:
            self._gather(saves, runs, stream)
            lost = False
        finally:
            # One job a pass: each wakes the helper thread, which costs this one more than a snapshot does.
            self._jobs.put(Pass(saves, runs, self._device.record(stream), lost))

    def drain(self, timeout_s: float) -> bool:
        """Wait until every snapshot taken before has been copied or dropped. For shutdown and tests."""
        reached = threading.Event()
        self._jobs.put(reached)
        return reached.wait(timeout_s)

    def close(self, timeout_s: float) -> None:
        self._jobs.put(None)
        self._thread.join(timeout_s)

    def _gather(self, saves: tuple[Save, ...], runs: list[Rows], stream: Stream) -> None:
        """All saves at once: enqueueing a gather costs as much as its rows."""
        pages = [[page for save in saves for page in save.pages[group]] for group in range(len(saves[0].pages))]
        begin = 0
        for rows in runs:
            end = begin + rows.count
            self._ring.gather(rows.start, [group[begin:end] for group in pages], stream)
            begin = end

    def _run(self) -> None:
        self._device.adopt()
        stream = self._device.new_stream()
        under_way: deque[_Written] = deque()
        while True:
            job = self._next(under_way)
            if isinstance(job, Snapshot):
                under_way.append(self._try_to_write(job, stream))
                continue
            while under_way:
                self._complete(under_way.popleft())
            if job is None:
                return
            job.set()

    def _try_to_write(self, job: Snapshot, stream: Stream) -> _Written:
        """Whatever goes wrong costs this snapshot alone: the thread serves the engine to its end."""
        try:
            return self._write(job, stream) if not job.lost else _Written(job.rows, job.gathered)
        except Exception as error:
            self._troubles.log("save_write", error)
            return _Written(job.rows, job.gathered)

    def _next(self, under_way: deque[_Written]) -> Snapshot | _End:
        """The next job; with none there yet, complete what is under way before sleeping."""
        if len(under_way) > 1:
            self._complete(under_way.popleft())
        while under_way:
            try:
                return self._get(block=False)
            except queue.Empty:
                self._complete(under_way.popleft())
        return self._get(block=True)

    def _get(self, *, block: bool) -> Snapshot | _End:
        """Raises queue.Empty."""
        if not self._begun:
            job = self._jobs.get(block)
            self._begun.extend(job.snapshots() if isinstance(job, Pass) else (job,))
        return self._begun.popleft()

    def _write(self, job: Snapshot, stream: Stream) -> _Written:
        """Reserve and enqueue the copies. A part that cannot be copied is abandoned and counted."""
        written = _Written(job.rows, job.gathered)
        hashes = job.save.hashes[job.first : job.first + job.rows.count]
        parent = job.save.hashes[job.first - 1] if job.first else job.save.parent
        self._device.wait(stream, job.gathered)
        for part in self._ring.layout.parts:
            reservation = self._client.reserve(part.part, parent, job.save.start + job.first, hashes)
            wanted = [index for index, slot in enumerate(reservation.slots) if slot >= 0]
            if len(wanted) < len(hashes):
                self._troubles.count("blocks_not_reserved", len(hashes) - len(wanted))
            if not wanted:
                continue
            try:
                self._device.copy([self._copies(part, job.rows, reservation, wanted)], stream)
                written.commits.append((part.part, reservation, wanted))
            except Exception as error:
                self._troubles.log("save_copy", error)
                written.failures.append((part.part, reservation, wanted))
        written.copied = self._device.record(stream)
        return written

    def _copies(self, part: RowPart, rows: Rows, reservation: Reservation, wanted: list[int]) -> Copies:
        arena = self._client.arena(reservation.epoch, part.part)
        if arena is None:
            raise LookupError(f"no arena of part {part.part} is mapped for the agent run that reserved slots")
        slots = self._arenas.strip(arena).narrow(0, part.size)
        return Copies(
            slots,
            numbers([reservation.slots[index] for index in wanted]),
            self._ring.column(part),
            numbers(wanted) + rows.start,
        )

    def _complete(self, written: _Written) -> None:
        try:
            written.copied.synchronize()
            for part, reservation, wanted in written.commits:
                self._client.commit(part, reservation, wanted)
                self._troubles.count("blocks_saved", len(wanted))
            for part, reservation, failed in written.failures:
                self._client.abandon(part, reservation, failed)
        except Exception as error:
            # The device failed: nothing is known of the bytes, so nothing is committed; the agent reclaims the slots
            # when this process, which cannot go on either, has ended.
            self._troubles.log("save_complete", error)
        self._ring.give_back(written.rows)
