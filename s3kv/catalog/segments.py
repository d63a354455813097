"""Records in portions that fit a segment."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from s3kv.format.limits import MAX_SEGMENT_BYTES, MAX_SEGMENT_RECORDS
from s3kv.format.records import Record
from s3kv.format.segment import SEGMENT_OVERHEAD_BYTES, record_bytes


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
