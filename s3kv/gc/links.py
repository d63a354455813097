"""How chunks hang together: which continue which, and which are covered by another. Pure, bounded memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from s3kv.format.limits import ID_BYTES

if TYPE_CHECKING:
    from s3kv.gc.plan import Columns, Entry

Rows = NDArray[np.int64]
BATCH_CHUNKS = 4096
_ROOT_KEY = 0


@dataclass(slots=True)
class Links:
    """Rows are those of `Columns`. A node is a block hash that some chunk names as its parent.

    `children[i]` hangs on node `child_node[i]`, which lies in each chunk `holder[j]` with `holder_node[j]` equal.
    `covered[k]` has all its blocks in `cover[k]`.
    """

    nodes: int
    children: Rows
    child_node: Rows
    child_start: NDArray[np.uint32]
    holder: Rows
    holder_node: Rows
    covered: Rows
    cover: Rows

    def superseded(self, count: int) -> NDArray[np.bool_]:
        mask = np.zeros(count, np.bool_)
        mask[self.covered] = True
        return mask

    def levels(self) -> Iterator[tuple[Rows, Rows, Rows, Rows]]:
        """(children, their nodes, holders, their nodes), from the deepest children to the first.

        A chunk begins before whatever continues it, so in this order every child is complete before its holder.
        """
        node_start = np.zeros(self.nodes, np.uint32)
        np.maximum.at(node_start, self.child_node, self.child_start)
        by_child = np.argsort(node_start[self.child_node], kind="stable")[::-1]
        by_holder = np.argsort(node_start[self.holder_node], kind="stable")[::-1]
        child_levels = node_start[self.child_node][by_child]
        holder_levels = node_start[self.holder_node][by_holder]
        for level in np.unique(child_levels)[::-1]:
            mine = by_child[_slice_of(child_levels, level)]
            theirs = by_holder[_slice_of(holder_levels, level)]
            yield self.children[mine], self.child_node[mine], self.holder[theirs], self.holder_node[theirs]


def _slice_of(descending: NDArray[np.uint32], value: int) -> slice:
    ascending = descending[::-1]
    left, right = np.searchsorted(ascending, value, "left"), np.searchsorted(ascending, value, "right")
    return slice(len(descending) - int(right), len(descending) - int(left))


def find_links(columns: Columns, entries: Callable[[], Iterable[Entry]]) -> Links:
    """The second pass, over the same entries in the same order as the columns."""
    children = np.flatnonzero(columns.parent != _ROOT_KEY)
    node_keys, child_node = np.unique(columns.parent[children], return_inverse=True)
    tip_order = np.argsort(columns.tip, kind="stable")
    tips = columns.tip[tip_order]
    holders: list[Rows] = []
    holder_nodes: list[Rows] = []
    covers: list[tuple[Rows, Rows]] = []
    for first_row, counts, hashes in _batches(entries()):
        keys = hashes[:, :8].copy().view(">u8").astype(np.uint64).ravel()
        rows = first_row + np.repeat(np.arange(len(counts), dtype=np.int64), counts)
        place = np.arange(len(keys)) - np.repeat(np.cumsum(counts) - counts, counts)
        at, found = _find(node_keys, keys)
        holders.append(rows[found])
        holder_nodes.append(at[found])
        covers.append(_covered(columns, tips, tip_order, keys, rows, place))
    covered, cover = _confirm(columns, covers)
    return Links(
        nodes=len(node_keys),
        children=children,
        child_node=child_node.astype(np.int64),
        child_start=columns.start[children],
        holder=_joined(holders),
        holder_node=_joined(holder_nodes),
        covered=covered,
        cover=cover,
    )


def _batches(entries: Iterable[Entry]) -> Iterator[tuple[int, Rows, NDArray[np.uint8]]]:
    """(row of the first chunk, blocks of each chunk, all their hashes with shape (blocks, 16))."""
    source = iter(entries)
    row = 0
    while batch := [entry.added.blocks for entry in islice(source, BATCH_CHUNKS)]:
        counts = np.fromiter(map(len, batch), np.int64, len(batch))
        joined = b"".join(block for blocks in batch for block in blocks)
        yield row, counts, np.frombuffer(joined, np.uint8).reshape(-1, ID_BYTES)
        row += len(batch)


def _find(sorted_keys: NDArray[np.uint64], keys: NDArray[np.uint64]) -> tuple[Rows, NDArray[np.bool_]]:
    if not len(sorted_keys):
        return np.zeros(len(keys), np.int64), np.zeros(len(keys), np.bool_)
    at = np.minimum(np.searchsorted(sorted_keys, keys), len(sorted_keys) - 1)
    return at.astype(np.int64), sorted_keys[at] == keys


def _covered(
    columns: Columns,
    tips: NDArray[np.uint64],
    tip_order: NDArray[np.intp],
    keys: NDArray[np.uint64],
    rows: Rows,
    place: Rows,
) -> tuple[Rows, Rows]:
    """Pairs (covered, cover): the last block of one chunk, at a place of another that has as many blocks before it."""
    low = np.searchsorted(tips, keys, "left")
    count = np.searchsorted(tips, keys, "right") - low
    # Most blocks are the last one of their own chunk at most, so few pairs are made.
    hits = np.flatnonzero(count)
    pair = np.repeat(hits, count[hits])
    offset = np.arange(len(pair)) - np.repeat(np.cumsum(count[hits]) - count[hits], count[hits])
    small = tip_order[np.repeat(low[hits], count[hits]) + offset].astype(np.int64)
    large = rows[pair]
    fits = (
        (small != large)
        & (columns.namespace[small] == columns.namespace[large])
        & (columns.shards[small] == columns.shards[large])
        & (columns.blocks[small] < columns.blocks[large])
        & (columns.blocks[small] <= place[pair] + 1)
        # The ordinals must agree as well: with the 64 bits above, chance is out of the question.
        & (columns.start[small] + columns.blocks[small] == columns.start[large] + place[pair] + 1)
    )
    return small[fits], large[fits]


def _confirm(columns: Columns, pairs: list[tuple[Rows, Rows]]) -> tuple[Rows, Rows]:
    """One cover for each covered chunk: the largest. (Covers are larger than what they cover, so there is no ring.)"""
    covered, cover = _joined([pair[0] for pair in pairs]), _joined([pair[1] for pair in pairs])
    order = np.lexsort((-columns.blocks[cover].astype(np.int64), covered))
    covered, cover = covered[order], cover[order]
    first = np.ones(len(covered), np.bool_)
    first[1:] = covered[1:] != covered[:-1]
    return covered[first], cover[first]


def _joined(parts: list[Any]) -> Rows:
    return np.concatenate(parts).astype(np.int64) if parts else np.zeros(0, np.int64)
