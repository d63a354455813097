"""Writing what never changes: chunks, segments, descriptions."""

from __future__ import annotations

import contextlib

from s3kv.errors import AlreadyExists, NotFound
from s3kv.store.base import Body, Store


async def put_once(store: Store, key: str, body: Body) -> bool:
    """Make sure that `key` holds its one content. Returns whether this call wrote it; False: somebody had.

    `body` must not be empty, and must be what everybody writes under `key`, or as good. An empty object under the key
    is replaced: some servers keep one when a writer dies between the header and the body of its put (SeaweedFS 4.48
    does), and it would otherwise hold the name for ever.
    """
    try:
        await store.put_if_absent(key, body)
        return True
    except AlreadyExists:
        with contextlib.suppress(NotFound):
            if (await store.head(key)).size > 0:
                return False
    await store.put(key, body)
    return True
