"""The one small interface to object stores, and what every implementation promises.

Invariants that implementations keep (each is a test in `s3kv.store.testing`):

1. **Whole or nothing.** Whatever happens to a put (error, cancellation, kill), a key holds the whole old object, the
   whole new object, or nothing; never a part of one.
2. **Borrowed until return.** Buffers handed to a call are read or written only until that call returns or raises,
   cancellation included: a slot can be reused the moment the call is over.
3. **No partial success.** A read either fills every byte it was asked for or raises; after an error the contents of the
   output buffers are unspecified.
4. **Read your writes.** After a put returns, get, head and list see it (S3 since December 2020, and every store here).
5. **Few errors.** Everything the world does wrong is raised as a subclass of `StoreError` (or `CorruptData`), the third
   party's error chained. `ValueError` means the caller broke this contract.

Keys are `/`-separated, relative to the prefix of `store.url`, and follow `check_key`. A store belongs to the event loop
of its first call.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from s3kv.errors import StoreError

BytesLike = bytes | bytearray | memoryview
Body = BytesLike | Sequence[BytesLike]
"""What a put sends: one buffer, or several that are sent one after another."""

LIST_PAGE_KEYS = 1000
"""Most entries of one page of a listing: the page size of S3."""
DELETE_BATCH_KEYS = 1000
"""Most keys of one bulk delete: the limit of S3's DeleteObjects."""


@dataclass(frozen=True, slots=True)
class ObjectMeta:
    """What a store says about an object. `etag` is opaque and is compared for equality only; `modified` is the store's
    clock in seconds since the epoch, with at least second precision."""

    key: str
    size: int
    etag: str
    modified: float


@dataclass(frozen=True, slots=True)
class DeleteError:
    """A key that a delete did not remove, and why."""

    key: str
    error: StoreError


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What this store can do. None: not known yet (detected at the first conditional put)."""

    conditional_put: bool | None
    """`put_if_absent` is atomic. False: head, then put; two racing writers may both succeed."""
    conditional_match: bool | None
    """`put_if_match` is atomic. False: head, then put; not safe for leases."""
    start_after: bool = True
    """Listing skips on the server. False: the client lists everything and skips."""


Page = list[ObjectMeta]
Names = list[str]
Failures = list[DeleteError]


@runtime_checkable
class Store(Protocol):
    """An object store. All methods but `list` are coroutines; `list` returns an asynchronous iterator.

    Common to all: raises `StoreTimeout` or `Transient` (retry), `PermissionDenied`, `StoreMisconfigured` (fix a
    setting), `BreakerOpen` (nothing was sent), `ValueError` (bad key, prefix, range). Calls may run concurrently.
    """

    @property
    def capabilities(self) -> Capabilities: ...

    async def get_into(self, key: str, out: memoryview, offset: int = 0) -> int:
        """Fill `out` (writable, contiguous, format "B") with the object's bytes from `offset`. Returns `len(out)`.

        Raises NotFound without such an object; CorruptData when the object ends before `offset + len(out)` (its record
        says it is longer: treat as a miss and repair). A transfer that is cut is Transient. An empty `out` returns 0
        without asking the store. Bytes after the range are not an error.
        """
        ...

    async def get_ranges(self, key: str, ranges: Sequence[tuple[int, int]], outs: Sequence[memoryview]) -> None:
        """Fill `outs[i]` with `ranges[i] = (offset, length)`, `length == len(outs[i])`; errors as in `get_into`.

        Ranges may be in any order, may overlap and may be merged into fewer requests. One failure fails the call.
        """
        ...

    async def get(self, key: str, max_bytes: int) -> bytes:
        """The whole object. Raises NotFound; CorruptData when it is larger than `max_bytes` (it is then not read)."""
        ...

    async def get_with_etag(self, key: str, max_bytes: int) -> tuple[bytes, str]:
        """As `get`, with the etag of just those bytes, for `put_if_match`."""
        ...

    async def put(self, key: str, body: Body) -> str:
        """Write or replace the object; durable on return. Returns its etag. The last of several racing puts wins."""
        ...

    async def put_if_absent(self, key: str, body: Body) -> str:
        """Write the object unless the key is taken. Returns its etag. Raises AlreadyExists; nothing was written then.

        When an answer is lost and the call is sent again, AlreadyExists may speak of this very call's own object: a
        caller that must know who won reads the object. Unless `capabilities.conditional_put`, two racing writers may
        both succeed: harmless where a key determines its content (invariant 6 of the architecture).
        """
        ...

    async def put_if_match(self, key: str, body: Body, etag: str) -> str:
        """Replace the object if its etag is still `etag`. Returns the new etag.

        Raises PreconditionFailed when it is another one or the object is gone; nothing was written then. A lost answer
        that is sent again may raise PreconditionFailed for its own success: read the object to know.
        """
        ...

    async def head(self, key: str) -> ObjectMeta:
        """The object's metadata. Raises NotFound."""
        ...

    def list(self, prefix: str, start_after: str | None = None) -> AsyncIterator[Page]:
        """Objects under `prefix` ("" or ending in "/"), in the order of their keys' UTF-8 bytes.

        That order is certain among names of one folder and among folders; where a folder's name begins another name
        (`a/1` and `a-b`), servers differ, also in what they skip when `start_after` names a folder. Format 1 has no
        such names beside each other.
        Pages are non-empty and hold at most `LIST_PAGE_KEYS` entries. `start_after` is a whole key (need not exist);
        only keys greater than it are returned. Objects put or deleted meanwhile may or may not appear. Names that
        `check_key` refuses are somebody else's and are left out.
        """
        ...

    async def list_prefixes(self, prefix: str) -> Names:
        """The distinct next parts of keys below `prefix` that have keys under them, sorted, each with its `prefix` and
        the closing "/"; objects right at `prefix` are not among them. One whose last key has just been deleted may
        still be named (SeaweedFS removes empty folders later)."""
        ...

    async def delete(self, keys: Sequence[str]) -> Failures:
        """Remove the objects; a missing key is success. Sent in batches of `DELETE_BATCH_KEYS`.

        Returns the keys that are still there, with the reason: those that the store reported inside a 200 answer, and
        those of a batch that failed altogether. Raises only when nothing at all could be sent. May be repeated.
        """
        ...

    async def close(self) -> None:
        """Let go of connections and threads. Calls in flight may fail with StoreError. May be repeated."""
        ...
