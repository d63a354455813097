"""Framed, tagged encoding: the injective input of every digest."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable

_LENGTH = struct.Struct("<I")


def frame(tag: bytes, value: bytes) -> bytes:
    """`tag` and `value`, each behind its length (u32 LE), so that no two different pairs encode alike."""
    return _LENGTH.pack(len(tag)) + tag + _LENGTH.pack(len(value)) + value


def frames(fields: Iterable[tuple[bytes, bytes]]) -> bytes:
    return b"".join(frame(tag, value) for tag, value in fields)


def digest(data: bytes, *, size: int, person: bytes, key: bytes = b"") -> bytes:
    """blake2b of `data`; `person` (at most 16 bytes) keeps the digests of different things apart."""
    return hashlib.blake2b(data, digest_size=size, key=key, person=person).digest()
