"""Messages between the agent and its clients, and how they are framed on the Unix socket.

A frame is a u32 little-endian length and that many bytes of MessagePack, one array whose first element names the kind
of message. msgspec checks types and rejects unknown kinds while it decodes; a frame longer than MAX_FRAME_BYTES is
refused before memory is taken for it. Hashes travel as one byte string of 16 bytes a block and slots as u32
little-endian, since a thousand small objects would cost more than the look-up itself: a match of 1,024 resident blocks
takes 0.7 ms more than an empty round trip (`python -m benchmarks match`).

Requests that have a reply carry an `id`, which the reply repeats. A reply may come late, after its caller has given
up; whoever reads it next must not confuse it with his own, and gives back a lease that it names.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterable, Sequence
from typing import Annotated, Literal

import msgspec

from s3kv.errors import ProtocolError

PROTOCOL = 2
LENGTH = struct.Struct("<I")
MAX_FRAME_BYTES = 16 << 20
MAX_BLOCKS = 65_536
"""Blocks one message may name: two million tokens at 32 a block."""
HASH_BYTES = 16
NO_SLOT = 0xFFFFFFFF


MAX_SECONDS = 86_400.0
Seconds = Annotated[float, msgspec.Meta(ge=0.0, le=MAX_SECONDS)]
"""Refuses NaN too, which would put an event loop's timers out of order."""


class Message(msgspec.Struct, array_like=True, tag=True, frozen=True, forbid_unknown_fields=True):
    """Base of every message; the class name is the tag."""


# ---- requests


class Hello(Message, frozen=True):
    """First on every connection. `role` cli may not touch slots."""

    id: int
    protocol: int
    role: Literal["leader", "worker", "cli"]


class Attach(Message, frozen=True):
    """A rank takes its place in an engine. Leaders read and write nothing: `read` and `write` are empty.

    `pinned` says that the arena will be registered with CUDA whole, which takes its memory at once.
    """

    id: int
    namespace: bytes
    engine: str
    rank: int
    ranks: int
    read: tuple[int, ...] = ()
    write: tuple[int, ...] = ()
    pinned: bool = False


class Match(Message, frozen=True):
    """Pin the longest prefix of `hashes[first:]` that is in host memory on every shard.

    What only storage has is fetched, and waited for at most min(`wait_cap_s`, `wait_s_per_block` × blocks in storage).
    With `park`, a lease is also given over blocks that are being fetched; Promised says when they are there.
    """

    id: int
    ns: int
    hashes: bytes
    first: int
    wait_s_per_block: Seconds
    wait_cap_s: Seconds
    park: bool = False
    min_blocks: int = 1


class Promised(Message, frozen=True):
    id: int
    ns: int
    lease: int


class Release(Message, frozen=True):
    """The whole lease (rank < 0, from the leader) or one rank's share of it. No reply."""

    ns: int
    lease: int
    rank: int


class Reserve(Message, frozen=True):
    id: int
    ns: int
    part: int
    parent: bytes
    start_block: int
    hashes: bytes


class Commit(Message, frozen=True):
    """The bytes of these slots are written. No reply."""

    ns: int
    part: int
    slots: bytes
    tickets: bytes


class Abandon(Message, frozen=True):
    """These slots will not be written, and nothing is copying into them. No reply."""

    ns: int
    part: int
    slots: bytes
    tickets: bytes


class Finished(Message, frozen=True):
    """The chain that ends at `tip` gets no more blocks for now. No reply."""

    ns: int
    tip: bytes


class Mapped(Message, frozen=True):
    """A worker can read and write the arenas that it was given: blocks may be offered to its engine."""

    id: int
    ns: int


class Look(Message, frozen=True):
    """How much of a chain the tier and the bucket hold; touches nothing. For `s3kv warm --check`."""

    id: int
    namespace: str
    hashes: bytes


class Prefetch(Message, frozen=True):
    """Bring what the bucket holds into the tier; the reply comes when that has ended."""

    id: int
    namespace: str
    hashes: bytes
    deadline_s: Seconds


class Status(Message, frozen=True):
    id: int


class Metrics(Message, frozen=True):
    id: int


class Drain(Message, frozen=True):
    id: int
    deadline_s: Seconds


class Stop(Message, frozen=True):
    id: int
    deadline_s: Seconds


class Forget(Message, frozen=True):
    """Drop blocks from the tier: all of a namespace's, or of every namespace's when the name is empty."""

    id: int
    namespace: str


# ---- replies


class Welcome(Message, frozen=True):
    id: int
    protocol: int
    epoch: int
    version: str


class ArenaInfo(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    part: int
    slots: int
    slot_bytes: int


class Attached(Message, frozen=True):
    """The file descriptors of `arenas` ride along, in their order."""

    id: int
    ns: int
    arenas: tuple[ArenaInfo, ...]
    may_pin: bool
    """The arenas' memory is granted whole, so that they may be registered with CUDA."""


class Matched(Message, frozen=True):
    id: int
    lease: int
    slots: bytes
    pending: int
    waited_s: float
    reason: str = ""
    """Why nothing was offered, when that is not a plain miss."""


class PromiseState(Message, frozen=True):
    id: int
    ready: bool
    failed: bool
    slots: bytes


class Reserved(Message, frozen=True):
    id: int
    slots: bytes
    tickets: bytes


class Looked(Message, frozen=True):
    id: int
    resident: int
    stored: int


class Prefetched(Message, frozen=True):
    id: int
    resident: int
    missing: int


class Report(Message, frozen=True):
    """JSON (status) or Prometheus text (metrics)."""

    id: int
    text: bytes


class Drained(Message, frozen=True):
    id: int
    chunks: int
    unsaved_blocks: int


class Done(Message, frozen=True):
    id: int
    count: int = 0


class Refused(Message, frozen=True):
    """The request was understood and not carried out. `text` is one sentence for the user.

    `fatal`: nothing is served on this connection. `passing`: but perhaps on a later one.
    """

    id: int
    text: str
    fatal: bool = False
    passing: bool = False


OfASeat = Match | Promised | Release | Reserve | Commit | Abandon | Finished | Mapped
"""What a rank that has attached says."""
Request = Hello | Attach | OfASeat | Look | Prefetch | Status | Metrics | Drain | Stop | Forget
Reply = Welcome | Attached | Matched | PromiseState | Reserved | Looked | Prefetched | Report | Drained | Done | Refused

_encoder = msgspec.msgpack.Encoder()
_requests: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_replies: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)


def encode(message: Message) -> bytes:
    """The frame. Raises ProtocolError when it would be too long."""
    body = _encoder.encode(message)
    if len(body) > MAX_FRAME_BYTES:
        raise ProtocolError(f"message of {len(body)} bytes is longer than {MAX_FRAME_BYTES}")
    return LENGTH.pack(len(body)) + body


def frame_length(prefix: bytes | bytearray | memoryview) -> int:
    """Length of the body behind a 4-byte prefix. Raises ProtocolError when it is over the limit."""
    (length,) = LENGTH.unpack_from(prefix)
    if length > MAX_FRAME_BYTES:
        raise ProtocolError(f"frame of {length} bytes is longer than {MAX_FRAME_BYTES}")
    return int(length)


def decode_request(body: bytes | bytearray | memoryview) -> Request:
    try:
        return _requests.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"request is not valid: {error}") from error


def decode_reply(body: bytes | bytearray | memoryview) -> Reply:
    try:
        return _replies.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"reply is not valid: {error}") from error


def join_hashes(hashes: Sequence[bytes]) -> bytes:
    return b"".join(hashes)


def split_hashes(joined: bytes) -> list[bytes]:
    """Raises ProtocolError unless `joined` is whole hashes, at most MAX_BLOCKS of them."""
    count, rest = divmod(len(joined), HASH_BYTES)
    if rest or count > MAX_BLOCKS:
        raise ProtocolError(f"{len(joined)} bytes are not at most {MAX_BLOCKS} block hashes")
    return [joined[start : start + HASH_BYTES] for start in range(0, len(joined), HASH_BYTES)]


def pack_u32(values: Iterable[int]) -> bytes:
    return array("I", values).tobytes()


def unpack_u32(data: bytes) -> array[int]:
    """Raises ProtocolError unless `data` is whole numbers, at most MAX_BLOCKS of them."""
    if len(data) % 4 or len(data) > 4 * MAX_BLOCKS:
        raise ProtocolError(f"{len(data)} bytes are not at most {MAX_BLOCKS} slot numbers")
    values = array("I")
    values.frombytes(data)
    return values
