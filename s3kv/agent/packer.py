"""Which blocks become one chunk: a pure planner over runs of one chain.

A run is open while blocks may still follow its last one. It is sealed when its chunk would reach the target size, when
it is old, or a moment after its request ended (the other ranks' commits may lag). What is stored later of the same
chain begins a new run where the stored one ended, so a growing conversation never stores a block twice.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from s3kv.format.limits import MAX_BLOCKS
from s3kv.tier.block import Held


@dataclass(slots=True)
class Run:
    """Consecutive blocks of one chain; `blocks[i].parent` is `blocks[i - 1].block`."""

    blocks: list[Held]
    opened: float
    due: float

    @property
    def parent(self) -> bytes:
        return self.blocks[0].parent

    @property
    def tip(self) -> bytes:
        return self.blocks[-1].block


@dataclass(slots=True)
class Packer:
    """`block_bytes`: what a block takes in all of a chunk's objects together, before compression. `most_blocks`: what
    the format allows."""

    block_bytes: int
    target_bytes: int
    seal_age_s: float
    seal_grace_s: float
    most_blocks: int = MAX_BLOCKS
    _by_tip: dict[bytes, Run] = field(default_factory=dict)
    _by_parent: dict[bytes, list[Run]] = field(default_factory=dict)

    @property
    def max_blocks(self) -> int:
        return max(1, min(self.most_blocks, self.target_bytes // self.block_bytes))

    @property
    def waiting_blocks(self) -> int:
        return sum(len(run.blocks) for run in self._by_tip.values())

    @property
    def next_due(self) -> float | None:
        return min((run.due for run in self._by_tip.values()), default=None)

    def add(self, block: Held, now: float) -> list[Run]:
        """Put a block on its chain's open run, joining runs that it connects. Returns the runs that are full now."""
        run = self._by_tip.pop(block.parent, None)
        if run is None:
            run = Run([block], now, now + self.seal_age_s)
            self._by_parent.setdefault(block.parent, []).append(run)
        else:
            run.blocks.append(block)
        self._join_followers(run)
        # Two engines may save one block twice only after the first was dropped; the older run goes out as it is.
        replaced = self._by_tip.pop(run.tip, None)
        self._by_tip[run.tip] = run
        full = self._cut(run)
        return [*([self._remove(replaced)] if replaced is not None else []), *full]

    def finish(self, tip: bytes, now: float) -> None:
        """The request whose chain ends at `tip` is over: its run waits only for late commits."""
        run = self._by_tip.get(tip)
        if run is not None:
            run.due = min(run.due, now + self.seal_grace_s)

    def take_due(self, now: float) -> list[Run]:
        return [self._remove(run) for run in list(self._by_tip.values()) if run.due <= now]

    def take_all(self) -> list[Run]:
        return [self._remove(run) for run in list(self._by_tip.values())]

    def _join_followers(self, run: Run) -> None:
        """Blocks may become resident out of order: a run that begins where this one ends is its continuation."""
        while len(followers := self._by_parent.get(run.tip, [])) == 1 and followers[0] is not run:
            follower = followers[0]
            self._remove(follower)
            run.blocks.extend(follower.blocks)
            run.due = min(run.due, follower.due)

    def _cut(self, run: Run) -> list[Run]:
        if len(run.blocks) < self.max_blocks:
            return []
        self._remove(run)
        whole = len(run.blocks) // self.max_blocks * self.max_blocks
        starts = range(0, whole, self.max_blocks)
        blocks = run.blocks
        full = [Run(blocks[start : start + self.max_blocks], run.opened, run.due) for start in starts]
        if rest := blocks[whole:]:
            tail = Run(rest, run.opened, run.due)
            self._by_tip[tail.tip] = tail
            self._by_parent.setdefault(tail.parent, []).append(tail)
        return full

    def _remove(self, run: Run) -> Run:
        if self._by_tip.get(run.tip) is run:
            del self._by_tip[run.tip]
        siblings = self._by_parent.get(run.parent, [])
        if run in siblings:
            siblings.remove(run)
            if not siblings:
                del self._by_parent[run.parent]
        return run
