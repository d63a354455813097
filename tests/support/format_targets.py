"""Fuzz targets: each takes any bytes, and fails unless the reader answers with a value or `CorruptData`.

Checksums would keep random bytes from the code behind them, so most readers have a second target that puts right
checksums into the bytes first: what an attacker, who can compute a checksum too, would send.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from struct import Struct

import xxhash

from s3kv.errors import ConfigError, CorruptData
from s3kv.format import header as chunk_header
from s3kv.format import keys, marker, segment, snapshot
from s3kv.format.chunk import read_frame
from s3kv.format.codecs import decode_block
from support import format_values as values

_U64 = Struct("<Q")
_U32 = Struct("<I")


def target_header(data: bytes) -> None:
    try:
        chunk_header.header_bytes_of(data)
        header = chunk_header.read_header(data)
    except CorruptData:
        return
    assert chunk_header.read_header(chunk_header.encode_header(header)) == header


def target_header_sealed(data: bytes) -> None:
    target_header(sealed_header(data))


def target_segment(data: bytes) -> None:
    try:
        found = segment.decode_segment(data)
    except CorruptData:
        return
    again = segment.encode_segment(found.records, found.agent, found.seq, found.namespace_digest)
    assert segment.decode_segment(again).records == found.records


def target_segment_sealed(data: bytes) -> None:
    target_segment(sealed_segment(data))


def target_snapshot(data: bytes) -> None:
    """The first byte chooses in what pieces the rest is fed."""
    step = 1 + data[0] * 8 if data else 1
    reader = snapshot.SnapshotReader()
    try:
        blocks = [block for at in range(1, len(data), step) for block in reader.feed(data[at : at + step])]
        header = reader.close()
    except CorruptData:
        return
    entries = [entry for block in blocks for entry in block.entries()]
    again = snapshot.decode_snapshot(b"".join(snapshot.encode_snapshot(header, entries)))
    assert again[0] == header and [entry for block in again[1] for entry in block.entries()] == entries


def target_snapshot_sealed(data: bytes) -> None:
    target_snapshot(data[:1] + sealed_snapshot(data[1:]))


def target_frame(data: bytes) -> None:
    """codec, element size, page length (two bytes), then the frame."""
    if len(data) < 4:
        return
    out = bytearray(data[2] + 256 * (data[3] & 63))
    try:
        decode_block(data[4:], data[0] & 3, data[1] & 15, out)
    except CorruptData:
        return


def target_object(data: bytes) -> None:
    """A whole object with a sealed header: every frame is read as the header says."""
    data = sealed_header(data)
    try:
        header = chunk_header.read_header(data)
    except CorruptData:
        return
    for index, frame in enumerate(header.frames):
        if frame.raw_length > 1 << 16:  # the reader's own buffer would be of the size that it expects
            continue
        try:
            stored = data[frame.offset : frame.offset + frame.length]
            read_frame(header, *divmod(index, len(header.shards)), stored, bytearray(frame.raw_length))
        except CorruptData:
            continue


def target_keys(data: bytes) -> None:
    key = data.decode("utf-8", "surrogateescape")
    if (chunk := keys.parse_chunk_key(key)) is not None:
        assert keys.chunk_key(*chunk) == key
    if (log := keys.parse_log_key(key)) is not None:
        assert keys.log_key(*log) == key
    if (snap := keys.parse_snap_key(key)) is not None:
        assert keys.snap_key(*snap) == key
    if (lease := keys.parse_lease_key(key)) is not None:
        assert keys.lease_key(lease) == key
    if (namespace := keys.parse_namespace_key(key)) is not None:
        assert keys.namespace_key(namespace) == key


def target_marker(data: bytes) -> None:
    try:
        assert marker.read_format(data) > 0
    except CorruptData:
        return
    try:
        marker.require_format(data)
    except ConfigError:
        return


TARGETS: dict[str, Callable[[bytes], None]] = {
    "header": target_header,
    "header-sealed": target_header_sealed,
    "segment": target_segment,
    "segment-sealed": target_segment_sealed,
    "snapshot": target_snapshot,
    "snapshot-sealed": target_snapshot_sealed,
    "frame": target_frame,
    "object": target_object,
    "keys": target_keys,
    "marker": target_marker,
}


def sealed_header(data: bytes) -> bytes:
    """`data` with the chunk id and checksum that its header would need, where it has one."""
    try:
        size = chunk_header.header_bytes_of(data)
    except CorruptData:
        return data
    if len(data) < size:
        return data
    fixed = chunk_header.FIXED_HEADER_BYTES
    n_blocks, n_shards = _U32.unpack_from(data, 84)[0], data[89]
    hashes = data[fixed + n_shards : fixed + n_shards + 16 * n_blocks]
    named = data[:48] + chunk_header.chunk_id(data[16:48], data[64:80], [hashes]) + data[64:]
    return named[: size - 8] + _checksum(named[: size - 8]) + data[size:]


def sealed_segment(data: bytes) -> bytes:
    """`data` with its true length and checksum."""
    if len(data) < 24:
        return data
    body = data[:12] + _U32.pack(len(data)) + data[16:-8]
    return body + _checksum(body)


def sealed_snapshot(data: bytes) -> bytes:
    """`data` with a right checksum on every piece that its own lengths name."""
    if len(data) < 88:
        return data
    head = 80 + 16 * _U32.unpack_from(data, 72)[0]
    out = data[:head] + _checksum(data[:head])
    chain = xxhash.xxh3_64(out[-8:])
    at = head + 8
    while len(data) - at >= 40:
        if data[at : at + 4] == snapshot.END_MAGIC:
            body = data[at : at + 24] + _U64.pack(chain.intdigest())
            return out + body + _checksum(body) + data[at + 40 :]
        size = _U32.unpack_from(data, at + 24)[0]
        payload = data[at + 40 : at + 40 + size]
        digest = _checksum(data[at : at + 32] + payload)
        chain.update(digest)
        out += data[at : at + 32] + digest + payload
        at += 40 + size
    return out + data[at:]


def seeds(target: str) -> list[bytes]:
    """Valid inputs of a target, to mutate."""
    name = target.removesuffix("-sealed")
    if name in ("header", "object"):
        return [values.built(codec, 40, 2)[1] for codec in (values.Codec("raw"), values.Codec("zstd"))]
    if name == "segment":
        return [segment.encode_segment(values.RECORDS, 7, 1, values.NAMESPACE)]
    if name == "snapshot":
        return [b"\xff" + values.snapshot_bytes(), b"\x00" + values.snapshot_bytes()]
    if name == "frame":
        return _frame_seeds()
    if name == "marker":
        return [marker.encode_format()]
    namespace = "0a" * 16
    built = keys.chunk_key(namespace, values.block_hash(1), 3), keys.log_key(namespace, 1, 2, 3)
    others = keys.snap_key(namespace, 1, 2), keys.lease_key("gc"), keys.namespace_key(namespace)
    return [key.encode() for key in (*built, *others)]


def _frame_seeds() -> list[bytes]:
    header, data, _ = values.built(values.Codec("zstd"), 512, 1)
    frames = [data[frame.offset : frame.offset + frame.length] for frame in header.frames]
    return [bytes([1, 2, 0, 4]) + frame for frame in frames] + [b"\x00\x01\x05\x00" + bytes(5)]


def mutated(seed: bytes, rng: random.Random) -> bytes:
    """`seed` with a few bytes changed, repeated, cut or replaced by numbers that lengths go wrong with."""
    data = bytearray(seed)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(data) + 1)
        kind = rng.randrange(5)
        if kind == 0 and at < len(data):
            data[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            del data[at : at + rng.randint(1, 32)]
        elif kind == 2:
            data[at:at] = data[at : at + rng.randint(1, 32)]
        elif kind == 3:
            number = rng.choice((0, 1, 0x7F, 0xFF, 0x7FFFFFFF, 0xFFFFFFFF, (1 << 63) - 1, (1 << 64) - 1))
            data[at : at + 8] = _U64.pack(number)[: rng.choice((1, 4, 8))]
        else:
            data[at : at + 4] = rng.randbytes(4)
    return bytes(data)


def _checksum(data: bytes) -> bytes:
    return _U64.pack(xxhash.xxh3_64_intdigest(data))
