"""What is listed of a catalog and is not part of it, and which of that never will be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from s3kv.catalog.context import Context
from s3kv.catalog.entry import US
from s3kv.catalog.snapshots import Snapshot, read_blocks, read_header
from s3kv.errors import CorruptData, NotFound, Transient
from s3kv.format.limits import MAX_SEGMENT_BYTES
from s3kv.format.segment import decode_segment


class Unread(NamedTuple):
    """A segment, or a snapshot. It is damaged, or `ahead`: named in the future, and read when its time comes."""

    key: str
    time_us: int
    ahead: bool
    snapshot: Snapshot | None = None


async def hopeless(context: Context, unread: Sequence[Unread]) -> list[str]:
    """The keys of what a second look finds damaged as well, and of names further ahead than deletions are remembered.

    Raises Transient when something reads well now: it was the reading that failed, so what follows from it is wrong.
    """
    latest_us = int((context.clock() + context.tombstone_keep_s) * US)
    found = [each.key for each in unread if each.ahead and each.time_us > latest_us]
    for each in unread:
        if each.ahead:
            continue
        try:
            await _read(context, each)
        except CorruptData:
            found.append(each.key)
        except NotFound:
            continue
        else:
            raise Transient(f"{each.key} was read wrongly before and reads well now: try again")
    return found


async def _read(context: Context, unread: Unread) -> None:
    if unread.snapshot is None:
        body = await context.store.get(unread.key, MAX_SEGMENT_BYTES)
        decode_segment(body, expect_namespace=context.spec.digest)
        return
    await read_header(context, unread.snapshot)
    async for _ in read_blocks(context, unread.snapshot):
        pass
