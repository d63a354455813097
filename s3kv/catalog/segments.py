"""Writing the log: records in portions that fit a segment, each under a name of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from s3kv.catalog.context import Context
from s3kv.errors import AlreadyExists
from s3kv.format.keys import log_key
from s3kv.format.limits import MAX_SEGMENT_BYTES, MAX_SEGMENT_RECORDS, U32
from s3kv.format.records import Record
from s3kv.format.segment import SEGMENT_OVERHEAD_BYTES, encode_segment, record_bytes
from s3kv.format.snapshot import SegmentName

NAME_TRIES = 8


def split_records(records: Iterable[Record]) -> Iterator[list[Record]]:
    """Portions that `encode_segment` accepts, in order; none when there are no records."""
    part: list[Record] = []
    size = SEGMENT_OVERHEAD_BYTES
    for record in records:
        more = record_bytes(record)
        if part and (size + more > MAX_SEGMENT_BYTES or len(part) == MAX_SEGMENT_RECORDS):
            yield part
            part, size = [], SEGMENT_OVERHEAD_BYTES
        part.append(record)
        size += more
    if part:
        yield part


class SegmentWriter:
    def __init__(self, context: Context, agent_id: int) -> None:
        self._context = context
        self._agent_id = agent_id
        self._seq = 0

    async def write(self, records: Sequence[Record], tick: Callable[[], int]) -> SegmentName:
        """Durable on return. Raises StoreError; then, or cancelled, the segment is there whole or not at all.

        `tick` gives the time for a name. A name that is taken (another agent of the same id, or the lost answer to a
        call that was sent again) is left alone: the records may be written again under a new one.
        """
        spec = self._context.spec
        for attempt in range(NAME_TRIES):
            name = SegmentName(tick(), self._agent_id, self._seq)
            self._seq = (self._seq + 1) & U32
            body = encode_segment(records, name.agent, name.seq, spec.digest)
            try:
                await self._context.store.put_if_absent(log_key(spec.name, *name), body)
                break
            except AlreadyExists:
                if attempt == NAME_TRIES - 1:
                    raise
        return name
