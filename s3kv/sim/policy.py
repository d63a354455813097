"""What the runtime may decide against a connector: how much of an offer it honours, and when it replays a request."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class OfferPolicy:
    """How much of each offer a V2 cache honours. Decided by seed, request and allocation, so alike on every rank.

    honour: "full", "part" (a proper part), "none", or "random" (any of them).
    ragged: a part may end inside a block. late_match: the connector is asked with fewer tokens than the device holds
    when the pages are allocated, so that an offer loses its head (only for connectors that have `cancel_load`).
    """

    honour: Literal["full", "part", "none", "random"] = "full"
    ragged: bool = False
    late_match: bool = False
    seed: int = 0

    def honoured(self, request_id: int, allocation: int, first: int, offered: int, tokens_per_block: int) -> int:
        """How many of `offered` tokens, from position `first` on, are honoured."""
        rng = random.Random(f"honour-{self.seed}-{request_id}-{allocation}")
        kind = rng.choice(("full", "part", "none")) if self.honour == "random" else self.honour
        if kind == "full" or offered <= 0:
            return max(offered, 0)
        part = rng.randrange(offered) if kind == "part" else 0
        if self.ragged:
            return part
        return max(0, (first + part) // tokens_per_block * tokens_per_block - first)

    def asked_with(self, request_id: int, allocation: int, on_device: int, tokens_per_block: int) -> int:
        """The match that the connector is told, at most what the device holds."""
        blocks = on_device // tokens_per_block
        if not self.late_match or blocks == 0:
            return on_device
        rng = random.Random(f"late-{self.seed}-{request_id}-{allocation}")
        return rng.randrange(blocks + 1) * tokens_per_block


@dataclass(frozen=True)
class ReplayPolicy:
    """How often a running request of a V2 cache loses its pages and is replayed.

    In one replay of two the pages are destroyed, so that the request comes back on others; else it finds some again.
    """

    rate: float = 0.0
    seed: int = 0

    def replays(self, request_id: int, iteration: int) -> bool:
        """Whether a request is replayed in an iteration."""
        return self.rate > 0 and random.Random(f"replay-{self.seed}-{request_id}-{iteration}").random() < self.rate

    def destroys(self, request_id: int, iteration: int) -> bool:
        """Whether a replay destroys the pages."""
        return random.Random(f"destroy-{self.seed}-{request_id}-{iteration}").random() < 0.5
