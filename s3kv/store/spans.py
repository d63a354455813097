"""Planning range requests: which ranges are read together. Pure.

Ranges with small gaps are cheaper together, although the gaps are read for nothing. (obstore's own merging is not used:
0.12 panics when an object is shorter than asked.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

GAP_BYTES = 64 << 10
"""Read over gaps up to this: 0.6 ms at 100 MB/s, about the CPU time of another request. Not more, although a first byte
takes tens of milliseconds, because the requests of one read run at once."""
SPAN_BYTES = 16 << 20
"""Spans are not merged beyond this, so that several connections share a large read."""


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes `[start, end)` of one request, and the indices of the ranges inside."""

    start: int
    end: int
    members: tuple[int, ...]


def plan_spans(
    ranges: Sequence[tuple[int, int]], gap_bytes: int = GAP_BYTES, span_bytes: int = SPAN_BYTES
) -> list[Span]:
    """Requests that cover `ranges` of `(offset, length)`; empty ranges are in none. Sorted by start."""
    spans: list[Span] = []
    order = sorted((index for index, (_, length) in enumerate(ranges) if length), key=lambda index: ranges[index])
    for index in order:
        start, end = ranges[index][0], sum(ranges[index])
        last = spans[-1] if spans else None
        if (
            last
            and start - last.end <= gap_bytes
            and max(end, last.end) - last.start <= max(span_bytes, last.end - last.start)
        ):
            spans[-1] = Span(last.start, max(end, last.end), (*last.members, index))
        else:
            spans.append(Span(start, end, (index,)))
    return spans
