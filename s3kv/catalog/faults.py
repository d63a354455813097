"""What can go wrong with the index, in the two kinds that callers tell apart."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from struct import error as StructError

import lmdb

from s3kv.errors import CorruptData, S3kvError


class IndexUnwritable(S3kvError):
    """Disk or map is full. Nothing of the transaction was kept; lookups go on. Next: count it, try again later."""


class IndexDamaged(S3kvError):
    """The index cannot be read. Next: throw it away and load it from the bucket."""


DAMAGE = (
    lmdb.CorruptedError,
    lmdb.PageNotFoundError,
    lmdb.PanicError,
    lmdb.InvalidError,
    CorruptData,
    StructError,  # a value of another length than this code writes
)


@contextmanager
def translated(*, writing: bool) -> Iterator[None]:
    """lmdb's errors, and the disk's, as ours."""
    try:
        yield
    except DAMAGE as error:
        raise IndexDamaged(f"catalog index is damaged: {error}") from error
    except (lmdb.Error, OSError) as error:
        if writing:
            raise IndexUnwritable(f"catalog index cannot be written: {error}") from error
        raise IndexDamaged(f"catalog index cannot be read: {error}") from error
