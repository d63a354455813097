"""`format.json`: the marker under a prefix that says which format all that lies beside it has."""

from __future__ import annotations

import json

from s3kv.errors import ConfigError, CorruptData
from s3kv.format.keys import FORMAT_KEY
from s3kv.format.limits import FORMAT
from s3kv.format.wire import Buffer, flat, need

MAX_FORMAT_JSON_BYTES = 4096


def encode_format() -> bytes:
    """The content of `format.json` for FORMAT. It is written once, if absent."""
    return json.dumps({"format": FORMAT, "kind": "s3kv"}, sort_keys=True, separators=(",", ":")).encode()


def read_format(data: Buffer) -> int:
    """The format number in `data`; members besides `format` and `kind` are ignored. CorruptData when there is none."""
    view = flat(data)
    need(len(view) <= MAX_FORMAT_JSON_BYTES, f"{FORMAT_KEY} is larger than {MAX_FORMAT_JSON_BYTES} bytes")
    try:
        fields = json.loads(bytes(view))
    except (ValueError, RecursionError) as error:  # ValueError also covers undecodable text
        raise CorruptData(f"{FORMAT_KEY} is not JSON") from error
    need(isinstance(fields, dict) and fields.get("kind") == "s3kv", f"{FORMAT_KEY} is not one of s3kv")
    number = fields.get("format")
    need(type(number) is int and number > 0, f"{FORMAT_KEY} has no format number")
    return int(number)


def require_format(data: Buffer) -> None:
    """ConfigError when the prefix belongs to another format or to something else: nothing may be written there."""
    try:
        number = read_format(data)
    except CorruptData as error:
        raise ConfigError(f"{error}: set store.url to a prefix of s3kv's own") from error
    if number != FORMAT:
        raise ConfigError(f"store.url names a prefix of format {number}; this release reads and writes format {FORMAT}")
