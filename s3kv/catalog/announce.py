"""The first writes of an agent to a bucket: `format.json` and the namespace's description."""

from __future__ import annotations

import hashlib

from s3kv.errors import AlreadyExists, ConfigError
from s3kv.format.keys import FORMAT_KEY, namespace_key
from s3kv.format.marker import MAX_FORMAT_JSON_BYTES, encode_format, require_format
from s3kv.identity import NamespaceSpec
from s3kv.identity.namespace import MAX_JSON_BYTES
from s3kv.store import Store


async def announce(store: Store, spec: NamespaceSpec) -> str:
    """Writes both unless they are there. Returns the identity of this bucket's copy of the namespace, for indexes.

    An index belongs to the very object that `namespace.json` is: in another bucket or prefix, or made again after a
    bucket was emptied, it has another time or tag. Raises ConfigError (another format, another namespace) and
    StoreError; may be repeated.
    """
    try:
        await store.put_if_absent(FORMAT_KEY, encode_format())
    except AlreadyExists:
        require_format(await store.get(FORMAT_KEY, MAX_FORMAT_JSON_BYTES))
    key = namespace_key(spec.name)
    try:
        await store.put_if_absent(key, spec.to_json())
    except AlreadyExists:
        if await store.get(key, MAX_JSON_BYTES) != spec.to_json():
            raise ConfigError(f"store.url: {key} describes another namespace; use another prefix") from None
    meta = await store.head(key)
    return hashlib.blake2b(f"{meta.modified!r} {meta.etag}".encode() + spec.digest, digest_size=16).hexdigest()
