"""What a reader of format 1 accepts at most. A writer that would exceed one of these is refused with ValueError."""

from __future__ import annotations

FORMAT = 1

ID_BYTES = 16  # block hashes and chunk ids
DIGEST_BYTES = 32  # namespace digests

MAX_BLOCKS = 4096  # of one chunk
MAX_SHARDS = 128  # parts of one chunk
MAX_FRAMES = 1 << 16  # blocks times shards of one chunk object
MAX_GROUPS = 64  # layer groups of a namespace
MAX_PAGE_BYTES = 1 << 30  # of one block, layer group and shard, uncompressed
MAX_OBJECT_BYTES = 5 << 30  # of one chunk object: what one S3 PUT carries
MAX_ELEMENT_SIZE = 8

MAX_SEGMENT_BYTES = 16 << 20
MAX_SEGMENT_RECORDS = 1 << 16

MAX_SNAPSHOT_BLOCK_BYTES = 4 << 20
MAX_SNAPSHOT_COVERS = 1 << 16

U8 = (1 << 8) - 1
U32 = (1 << 32) - 1
U64 = (1 << 64) - 1
