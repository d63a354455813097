"""Object stores behind one small interface: S3, a local folder, memory, and fault injection."""

from s3kv.store.base import Body, BytesLike, Capabilities, DeleteError, ObjectMeta, Store
from s3kv.store.opening import open_store

__all__ = ["Body", "BytesLike", "Capabilities", "DeleteError", "ObjectMeta", "Store", "open_store"]
