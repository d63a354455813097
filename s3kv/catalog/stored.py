"""A chunk's object that lies in the bucket already, beside the one that was about to be put under its key."""

from __future__ import annotations

from s3kv.errors import CorruptData, NotFound
from s3kv.format.header import ChunkHeader, read_header
from s3kv.store import Store


async def header_beside(store: Store, key: str, ours: ChunkHeader) -> ChunkHeader | None:
    """Its header: the same blocks and shards, whose last bits and encoding may differ from ours. None when the object
    is gone, cut, or another. Its frames are not looked at. Raises StoreError.
    """
    buffer = bytearray(ours.header_bytes)
    try:
        meta = await store.head(key)
        await store.get_into(key, memoryview(buffer))
        header = read_header(
            buffer,
            expect_namespace=ours.namespace_digest,
            expect_chunk=ours.chunk_id,
            expect_group=ours.layer_group,
        )
    except (CorruptData, NotFound):
        return None
    return header if header.object_bytes == meta.size and header.shards == ours.shards else None
