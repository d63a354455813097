"""Who may share a request's blocks: its salt, its adapter, its media. None for a request that must be left alone.

Facts: the runtime contract, section 4. `lora_task_id` is a number local to one server, so the settings give the
adapter's own identity; an adapter that they do not name is kept apart under a random id of this server, and no other
server will ever look for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from s3kv.identity import MediaSpan, Scope

_MEDIA_WITHOUT_HASH = (
    "multimodal_positions",
    "multimodal_lengths",
    "multimodal_embedding",
    "py_multimodal_data",
    "prompt_embedding_table",
)
"""Inputs that change KV bytes and that tokens do not show. The last is prompt tuning's.

Raw media travel in `py_multimodal_data` alone, which Python adds to a request: under the PyTorch backend the native
request, which V1's query is given a copy of, has of media only the hashes, with their positions and lengths.
"""


def request_identity(
    request: Any, adapters: Mapping[str, str], server_id: str, tokens: int
) -> tuple[Scope, tuple[MediaSpan, ...]] | None:
    """`tokens`: how many the request has now; media of unknown place are taken to be anywhere among them."""
    media = _media(request, tokens)
    if media is None:
        return None
    return Scope(cache_salt=_salt(request), adapter=_adapter(request, adapters, server_id)), media


def shows_media(request: Any) -> bool:
    """Whether a request without media could be told from one with media by this object."""
    return hasattr(request, "py_multimodal_data") or _present(getattr(request, "multimodal_hashes", None))


def has_unnamed_media(request: Any) -> bool:
    """Whether the request has inputs that its identity cannot name, as far as this object shows."""
    return _media(request, 0) is None


def salt_text(salt: Any) -> str | None:
    """A salt of another type keeps its requests apart too, and is no string's equal. NUL: no user's salt."""
    return salt if salt is None or isinstance(salt, str) else f"\0{type(salt).__name__}:{salt!r}"


def _salt(request: Any) -> str | None:
    salt = salt_text(getattr(request, "cache_salt", None))
    if salt is not None:
        return salt
    # Releases that hand the C++ request to the query know the salt's 64-bit number alone. NUL: no user's salt.
    number = getattr(request, "cache_salt_id", None)
    return f"\0id:{number}" if isinstance(number, int) else None


def _adapter(request: Any, adapters: Mapping[str, str], server_id: str) -> str | None:
    number = getattr(request, "lora_task_id", None)
    if number is None:
        return None
    return adapters.get(str(number)) or f"unnamed/{server_id}/{number}"


def _media(request: Any, tokens: int) -> tuple[MediaSpan, ...] | None:
    hashes = getattr(request, "multimodal_hashes", None)
    if not _present(hashes):
        return None if any(_present(getattr(request, name, None)) for name in _MEDIA_WITHOUT_HASH) else ()
    digests = [_digest(item) for item in _sequence(hashes)]
    starts = [int(start) for start in _sequence(getattr(request, "multimodal_positions", None) or ())]
    lengths = [int(length) for length in _sequence(getattr(request, "multimodal_lengths", None) or ())]
    if not len(digests) == len(starts) == len(lengths):
        # Hashed, but not placed: every block may depend on every item.
        return tuple(MediaSpan(0, tokens, digest) for digest in digests)
    return tuple(MediaSpan(*item) for item in zip(starts, lengths, digests, strict=True))


def _digest(item: Any) -> bytes:
    """The runtime gives eight int32 an item, most significant byte first; strings and bytes are taken as they are."""
    if isinstance(item, bytes):
        return item
    if isinstance(item, str):
        return item.encode()
    return b"".join((int(word) & 0xFFFFFFFF).to_bytes(4, "big") for word in item)


def _present(value: Any) -> bool:
    if value is None:
        return False
    return len(value) > 0 if hasattr(value, "__len__") else True


def _sequence(value: Any) -> Sequence[Any]:
    return value if isinstance(value, Sequence) else list(value)
