"""The agent's arenas as this rank sees them: registered with CUDA, and as strips."""

from __future__ import annotations

import logging
import threading
from typing import Literal

import torch

from s3kv.connector.device import Device
from s3kv.connector.ports import ArenaLike
from s3kv.connector.strips import Strip
from s3kv.errors import ConfigError

logger = logging.getLogger("s3kv.connector")

Pin = Literal["auto", "require", "never"]


class Arenas:
    """Called by the client when it maps an arena and before it unmaps one; asked by who copies."""

    def __init__(self, device: Device, pin: Pin) -> None:
        self._device = device
        self._pin = pin
        self._lock = threading.Lock()
        self._strips: dict[int, Strip] = {}
        self._pinned: set[int] = set()
        self.refusal: ConfigError | None = None
        """Why tier.pin: require could not be kept; raised at start-up."""

    def add(self, arena: ArenaLike, may_pin: bool = True) -> None:
        """An arena is mapped. Its memory stays mapped while the strip made here is in use.

        may_pin: the agent has granted its memory whole, so it may be registered with CUDA.
        """
        flat = torch.frombuffer(arena.buffer, dtype=torch.uint8, count=arena.slots * arena.slot_bytes)
        strip = Strip.of(flat.view(arena.slots, arena.slot_bytes))
        if self._pin != "never":
            self._register(strip, may_pin)
        with self._lock:
            self._strips[id(arena)] = strip

    def remove(self, arena: ArenaLike) -> None:
        """An arena is about to be unmapped; nobody copies from or to it any more."""
        with self._lock:
            strip = self._strips.pop(id(arena), None)
        if strip is not None and strip.base in self._pinned:
            self._pinned.discard(strip.base)
            self._device.unpin(strip.base)

    def strip(self, arena: ArenaLike) -> Strip:
        """Raises KeyError for an arena that is not mapped."""
        return self._strips[id(arena)]

    def _register(self, strip: Strip, may_pin: bool) -> None:
        reason: str | None = "the agent has no memory to pin (tier.capacity_bytes, tier.namespaces)"
        if may_pin:
            reason = self._device.pin(strip.base, strip.stride * strip.rows)
        if reason is None:
            self._pinned.add(strip.base)
        elif self._pin == "require":
            self.refusal = ConfigError(f"tier.pin is require, and {reason}")
        else:
            logger.warning("%s; copies go through pageable memory, which is slower (tier.pin)", reason)
