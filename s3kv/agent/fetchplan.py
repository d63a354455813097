"""What to read for a run of blocks that storage has: a pure planner."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from s3kv.catalog.entry import ChunkEntry, Location
from s3kv.format.header import CODEC_RAW

WHOLE_FRACTION = 0.5
"""From this share of a chunk's blocks on, a compressed chunk is read whole: one request instead of two in a row."""


@dataclass(frozen=True, slots=True)
class ChunkFetch:
    """Blocks `[first, first + len(blocks))` of a chunk; they are consecutive in their chain, too."""

    chunk: ChunkEntry
    first: int
    blocks: tuple[bytes, ...]

    @property
    def parent(self) -> bytes:
        return self.chunk.added.parent if self.first == 0 else self.chunk.blocks[self.first - 1]

    @property
    def start_block(self) -> int:
        return self.chunk.added.start_block + self.first

    @property
    def raw(self) -> bool:
        """Frames of raw pages lie where arithmetic says, so header and pages are read in one go, into the slots."""
        return self.chunk.added.codec_id == CODEC_RAW

    @property
    def whole(self) -> bool:
        return len(self.blocks) >= WHOLE_FRACTION * len(self.chunk.blocks)


def plan_fetches(
    hashes: Sequence[bytes], locations: Sequence[Location], chunk: Callable[[bytes], ChunkEntry | None]
) -> list[ChunkFetch]:
    """One fetch for each run of `hashes` that lies in one chunk; `locations[i]` is where `hashes[i]` is.

    Stops at a chunk that the catalog has forgotten meanwhile, since nothing behind it could be offered.
    """
    fetches: list[ChunkFetch] = []
    start = 0
    while start < len(locations):
        chunk_id, index, _ = locations[start]
        end = start + 1
        while end < len(locations) and locations[end][:2] == (chunk_id, index + end - start):
            end += 1
        entry = chunk(chunk_id)
        if entry is None:
            break
        fetches.append(ChunkFetch(entry, index, tuple(hashes[start:end])))
        start = end
    return fetches
