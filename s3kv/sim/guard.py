"""Watches the pages: a connector may write what its offers cover, and must write all of it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from s3kv.sim.active import Active
from s3kv.sim.errors import ContractError
from s3kv.sim.layout import BAD_PAGE_INDEX
from s3kv.sim.managers import CacheManager
from s3kv.sim.pool import POISON_BYTE


class PageGuard:
    """Compares the cache with a copy taken before; does nothing unless enabled.

    nan: freed pages are filled with NaN, so that a promised page that nobody wrote is known by its bytes.
    """

    def __init__(self, manager: CacheManager, *, enabled: bool, nan: bool) -> None:
        self._manager, self._enabled, self._nan = manager, enabled, nan
        self._before: list[list[torch.Tensor]] | None = None

    def arm(self) -> None:
        """Takes the copy to compare with."""
        if self._enabled:
            self._before = [[memory.clone() for memory in pool.memories()] for pool in self._manager.pools]

    def check(self, loading: Sequence[Active], when: str) -> None:
        """Raises ContractError for a page that changed though no offer to the requests `loading` covers it."""
        if not self._enabled or self._before is None:
            return
        for group, pool in enumerate(self._manager.pools):
            allowed = {page for active in loading for page in self._covered(active, group, whole=False)}
            for memory, before in zip(pool.memories(), self._before[group], strict=True):
                changed = (memory != before).any(1).nonzero().flatten().tolist()
                wrong = sorted(set(changed) - allowed)
                if wrong:
                    raise ContractError(f"pages {wrong} of layer group {group} were written {when}, by no offer")

    def check_written(self, loaded: Sequence[Active]) -> None:
        """Raises ContractError for a page that an offer covers wholly and that still has no contents."""
        if not (self._enabled and self._nan):
            return
        for active in loaded:
            for group, pool in enumerate(self._manager.pools):
                for page in self._covered(active, group, whole=True):
                    if any(bool((memory[page] == POISON_BYTE).all()) for memory in pool.memories()):
                        raise ContractError(
                            f"page {page} of layer group {group} was promised to request {active.id} and not written"
                        )

    def _covered(self, active: Active, group: int, *, whole: bool) -> list[int]:
        """The pages of an offer: all that it touches, or those whose every token it and the device's match cover."""
        block, tokens = self._manager.tokens_per_block, active.load_range
        if not tokens:
            return []
        last = tokens.stop // block if whole else -(-tokens.stop // block)
        pages = self._manager.pages(active.id)[group][tokens.start // block : last]
        return [page for page in pages if page != BAD_PAGE_INDEX]
