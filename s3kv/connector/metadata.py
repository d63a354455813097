"""What the leader tells the workers in one iteration. Pickled and broadcast by the runtime, so: plain and small."""

from __future__ import annotations

from dataclasses import dataclass

Pages = tuple[tuple[int, ...], ...]
"""`pages[g][i]`: the page slot of the i-th block in layer group g, -1 where it has none there."""


@dataclass(frozen=True, slots=True)
class Load:
    """Copy `slots[i]` of the agent run `epoch` to page `pages[g][i]` of every group g that has one.

    A background load has no `slots` yet: the agent names those of the whole lease once all are there, and the first
    `skip` of them are of no use.
    """

    request_id: int
    lease: int
    epoch: int
    slots: tuple[int, ...]
    pages: Pages
    skip: int = 0

    @property
    def blocks(self) -> int:
        return len(self.pages[0])


@dataclass(frozen=True, slots=True)
class Save:
    """Consecutive blocks of one chain, complete once the pass has run: `hashes[i]` is block `start + i`."""

    parent: bytes
    start: int
    hashes: tuple[bytes, ...]
    pages: Pages


@dataclass(frozen=True, slots=True)
class ConnectorMeta:
    """`loads` before the pass, `parked` in the background, `saves` after it.

    `dropped`: requests that ended; loads of theirs that were not begun are not to be begun.
    """

    loads: tuple[Load, ...] = ()
    parked: tuple[Load, ...] = ()
    saves: tuple[Save, ...] = ()
    dropped: tuple[int, ...] = ()
