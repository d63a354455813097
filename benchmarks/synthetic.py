"""Catalogs of millions of blocks, made of random hashes, in a local folder; and work in processes of their own.

Chains have 1,024 blocks in chunks of 16, each chunk a child of the one before it, one layer group of 2 MiB a block.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from s3kv.catalog.entry import ChunkEntry
from s3kv.format.columns import GROUP, KIND_ADDED, ROW, SnapshotBlock
from s3kv.format.header import chunk_id, header_size
from s3kv.format.keys import snap_key
from s3kv.format.records import ChunkAdded, GroupObject, Stamp
from s3kv.format.snapshot import SegmentName, SnapshotHeader, encode_snapshot_blocks
from s3kv.identity import GroupSpec, NamespaceSpec, RegionSpec
from s3kv.settings import StoreSettings
from s3kv.store import open_store

CHUNK_BLOCKS = 16
CHAIN_BLOCKS = 1024
BLOCK_BYTES = 2 << 20
KEPT_CHAINS = 64
HEADER_BYTES = header_size(CHUNK_BLOCKS, 1)
OBJECT_BYTES = HEADER_BYTES + CHUNK_BLOCKS * BLOCK_BYTES
_ROWS_A_BLOCK = 3000

SPEC = NamespaceSpec("benchmark", "w", "bfloat16", 32, (GroupSpec((0,), None, (RegionSpec(BLOCK_BYTES),)),))

Bytes = NDArray[np.uint8]
T = TypeVar("T")


def alone(work: Callable[..., T], *arguments: Any) -> T:
    """`work(*arguments)` in a new process, which has nobody else's memory and no warm caches of ours."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(work, *arguments).result()


def chains_for(blocks: int) -> int:
    return -(-blocks // CHAIN_BLOCKS)


def chain_hashes_of(chains: int, seed: int = 1) -> Bytes:
    """uint8 `[chains, CHAIN_BLOCKS, 16]`."""
    raw = np.random.default_rng(seed).bytes(chains * CHAIN_BLOCKS * 16)
    return np.frombuffer(raw, np.uint8).reshape(chains, CHAIN_BLOCKS, 16)


def write_snapshot(folder: Path, blocks: int) -> int:
    """A snapshot of at least `blocks` blocks in the store `folder/store`; `folder/kept.npy` has KEPT_CHAINS chains.

    Returns its bytes.
    """
    hashes = chain_hashes_of(chains_for(blocks))
    np.save(folder / "kept.npy", hashes[:KEPT_CHAINS])
    now_us = int(time.time() * 1e6)
    covers = (SegmentName(now_us - 2_000_000, 1, 0),)
    header = SnapshotHeader(SPEC.digest, now_us - 1_000_000, 1, 0, covers)
    pieces = list(encode_snapshot_blocks(header, _snapshot_blocks(hashes, now_us)))

    async def put() -> None:
        store = open_store(StoreSettings(url=f"file://{folder / 'store'}"))
        await store.put(snap_key(SPEC.name, header.time_us, header.epoch), pieces)
        await store.close()

    asyncio.run(put())
    return sum(map(len, pieces))


def _snapshot_blocks(hashes: Bytes, now_us: int) -> Iterator[SnapshotBlock]:
    chunks = hashes.reshape(-1, CHUNK_BLOCKS, 16)
    parents = np.zeros((len(chunks), 16), np.uint8)
    parents[1:] = chunks[:-1, -1]
    parents[:: CHAIN_BLOCKS // CHUNK_BLOCKS] = 0
    ids = np.frombuffer(b"".join(map(_id_of, parents, chunks)), np.uint8).reshape(-1, 16)
    halves = ids.copy().view(">u8").astype(np.uint64)
    order = np.lexsort((halves[:, 1], halves[:, 0]))
    starts = np.arange(len(chunks)) * CHUNK_BLOCKS % CHAIN_BLOCKS
    for at in range(0, len(order), _ROWS_A_BLOCK):
        chosen = order[at : at + _ROWS_A_BLOCK]
        rows = np.zeros(len(chosen), ROW)
        rows["chunk_id"], rows["parent"], rows["start_block"] = ids[chosen], parents[chosen], starts[chosen]
        rows["time_us"] = now_us - 3_600_000_000
        rows["hour"] = now_us // 3_600_000_000 - chosen % 1000
        rows["n_blocks"], rows["kind"], rows["n_shards"], rows["n_groups"] = CHUNK_BLOCKS, KIND_ADDED, 1, 1
        groups = np.zeros(len(chosen), GROUP)
        groups["size"], groups["header_size"] = OBJECT_BYTES, HEADER_BYTES
        yield SnapshotBlock(rows, chunks[chosen].reshape(-1, 16), np.zeros(len(chosen), np.uint8), groups)


def _id_of(parent: Bytes, blocks: Bytes) -> bytes:
    return chunk_id(SPEC.digest, parent.tobytes(), [blocks.tobytes()])


def entries(chunks: int, seed: int = 3) -> list[ChunkEntry]:
    """Stored chunks as a catalog gives them, in the chains above. About 1 KB of memory each."""
    hashes = chain_hashes_of(chains_for(chunks * CHUNK_BLOCKS), seed)
    made = []
    group = (GroupObject(OBJECT_BYTES, HEADER_BYTES),)
    for chain in hashes:
        parent = bytes(16)
        for start in range(0, CHAIN_BLOCKS, CHUNK_BLOCKS):
            raw = chain[start : start + CHUNK_BLOCKS].tobytes()
            blocks = tuple(raw[at : at + 16] for at in range(0, len(raw), 16))
            name = chunk_id(SPEC.digest, parent, blocks)
            added = ChunkAdded(name, Stamp(1, 1), parent, start, blocks, 0, (0,), group)
            made.append(ChunkEntry(added, 480_000 - len(made) % 1000))
            parent = blocks[-1]
    return made[:chunks]
