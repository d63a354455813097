"""Object stores behind one small interface: S3, a local folder, memory, and fault injection."""

from s3kv.store.base import Body, BytesLike, Capabilities, DeleteError, ObjectMeta, Store
from s3kv.store.failures import describe_failure
from s3kv.store.guard import GuardedStore, StoreEvents
from s3kv.store.opening import open_store

__all__ = [
    "Body",
    "BytesLike",
    "Capabilities",
    "DeleteError",
    "GuardedStore",
    "ObjectMeta",
    "Store",
    "StoreEvents",
    "describe_failure",
    "open_store",
]
