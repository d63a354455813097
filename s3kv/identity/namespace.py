"""A namespace: everything besides tokens that decides what KV bytes mean."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from s3kv.errors import CorruptData
from s3kv.identity.framing import digest

REPLICATED = 255
"""Shard id of the part whose bytes are identical on every shard and are stored once a block (field report 18)."""

MAX_SHARDS = 64
FORMAT = 1
MAX_JSON_BYTES = 1 << 20
_GROUP_ALIGNMENT = 256
_SLOT_ALIGNMENT = 4096

_ELEMENT_SIZES = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1, "uint8": 1}

Buffer = tuple[int, str, int]
"""`(layer id, role, expansion)` as the runtime's layout names a run of bytes."""


@dataclass(frozen=True, slots=True)
class RegionSpec:
    """`size` bytes that repeat once a page. `buffers` in memory order."""

    size: int
    replicated: bool = False
    buffers: tuple[Buffer, ...] = ()


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """A layer group: layers that share one page index space. `window` in tokens, None for full attention."""

    layers: tuple[int, ...]
    window: int | None
    regions: tuple[RegionSpec, ...]

    def page_bytes(self, *, replicated: bool) -> int:
        return sum(region.size for region in self.regions if region.replicated is replicated)


@dataclass(frozen=True, slots=True)
class Part:
    """What one shard (or REPLICATED) holds of each block: `group_bytes[g]` bytes for layer group `g`, 0 for none."""

    shard: int
    group_bytes: tuple[int, ...]

    def group_offset(self, group: int) -> int:
        """Where the page of `group` begins in a slot, in bytes."""
        return sum(_round_up(size, _GROUP_ALIGNMENT) for size in self.group_bytes[:group])

    @property
    def slot_bytes(self) -> int:
        return _round_up(self.group_offset(len(self.group_bytes)), _SLOT_ALIGNMENT)


@dataclass(frozen=True)
class NamespaceSpec:
    """The identity of KV bytes besides tokens. Equal digests mean interchangeable bytes.

    `shards` counts the ranks that split the KV heads (attention DP: 1). Sharding matters only to bytes that are
    sharded: with replicated regions alone it must be 1.
    """

    model: str
    weights: str
    kv_dtype: str
    tokens_per_block: int
    groups: tuple[GroupSpec, ...]
    shards: int = 1
    quantization: str = ""
    format: int = FORMAT
    extra: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        if not 1 <= self.shards <= MAX_SHARDS:
            raise ValueError(f"shards must be 1 to {MAX_SHARDS}, not {self.shards}")
        if self.tokens_per_block < 1 or not self.groups:
            raise ValueError("a namespace needs a positive tokens_per_block and a layer group")
        if self.shards > 1 and not self._sharded:
            raise ValueError("a cache of replicated regions alone is unsharded: shards must be 1")

    @property
    def _sharded(self) -> bool:
        return any(group.page_bytes(replicated=False) for group in self.groups)

    @cached_property
    def digest(self) -> bytes:
        """32 bytes over the canonical JSON."""
        return digest(self.to_json(), size=32, person=b"s3kv namespace")

    @cached_property
    def name(self) -> str:
        """Safe in paths and keys: 32 hex digits of the digest."""
        return self.digest[:16].hex()

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        """Shards 0..n-1 where bytes are sharded, then REPLICATED where some are replicated."""
        replicated = tuple(group.page_bytes(replicated=True) for group in self.groups)
        sharded = tuple(group.page_bytes(replicated=False) for group in self.groups)
        parts = [Part(shard, sharded) for shard in range(self.shards)] if any(sharded) else []
        return (*parts, Part(REPLICATED, replicated)) if any(replicated) else tuple(parts)

    @cached_property
    def shards_of_group(self) -> tuple[tuple[int, ...], ...]:
        """For each layer group the parts that hold bytes of it, ascending: the shard set of its objects."""
        groups = range(len(self.groups))
        return tuple(tuple(part.shard for part in self.parts if part.group_bytes[group]) for group in groups)

    @property
    def element_size(self) -> int:
        """Bytes of one KV element, for byte planes; 1 where the dtype is unknown."""
        return _ELEMENT_SIZES.get(self.kv_dtype, 1)

    def to_json(self) -> bytes:
        """Canonical: sorted keys, no spaces, ASCII. JSON strings and arrays are framed by their own syntax."""
        fields = {
            "model": self.model,
            "weights": self.weights,
            "kv_dtype": self.kv_dtype,
            "quantization": self.quantization,
            "tokens_per_block": self.tokens_per_block,
            "groups": [_group_fields(group) for group in self.groups],
            "shards": self.shards,
            "format": self.format,
            "extra": [list(pair) for pair in sorted(self.extra)],
        }
        return json.dumps(fields, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()

    @classmethod
    def from_json(cls, data: bytes) -> NamespaceSpec:
        """Raises CorruptData for anything but the canonical JSON of a namespace."""
        if len(data) > MAX_JSON_BYTES:
            raise CorruptData(f"namespace description of {len(data)} bytes is larger than {MAX_JSON_BYTES}")
        try:
            fields = json.loads(data, parse_constant=_refuse_constant)
            groups = tuple(_group_from(group) for group in fields.pop("groups"))
            extra = tuple((_text(key), _text(value)) for key, value in fields.pop("extra"))
            texts = {name: _text(fields.pop(name)) for name in ("model", "weights", "kv_dtype", "quantization")}
            numbers = {name: _whole(fields.pop(name)) for name in ("tokens_per_block", "shards", "format")}
            if fields:
                raise ValueError(f"unknown field {min(fields)}")
            spec = cls(groups=groups, extra=extra, **texts, **numbers)  # type: ignore[arg-type]
            canonical = spec.to_json()
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise CorruptData(f"namespace description is not valid: {error}") from error
        if canonical != data:
            raise CorruptData("namespace description is not in canonical form")
        return spec


def _group_fields(group: GroupSpec) -> dict[str, Any]:
    regions = [
        {"size": region.size, "replicated": region.replicated, "buffers": [list(buffer) for buffer in region.buffers]}
        for region in group.regions
    ]
    return {"layers": list(group.layers), "window": group.window, "regions": regions}


def _group_from(fields: dict[str, Any]) -> GroupSpec:
    regions = tuple(
        RegionSpec(
            size=_positive(region["size"]),
            replicated=_flag(region["replicated"]),
            buffers=tuple((_whole(layer), _text(role), _whole(number)) for layer, role, number in region["buffers"]),
        )
        for region in fields["regions"]
    )
    window = fields["window"]
    layers = tuple(_whole(layer) for layer in fields["layers"])
    return GroupSpec(layers, None if window is None else _whole(window), regions)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no number here")


def _whole(value: Any) -> int:
    if type(value) is not int:
        raise ValueError(f"{value!r} is not a whole number")
    return value


def _positive(value: Any) -> int:
    if _whole(value) < 1:
        raise ValueError(f"a region's size must be positive, not {value}")
    return int(value)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is not a string")
    return value


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{value!r} is not true or false")
    return value


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
