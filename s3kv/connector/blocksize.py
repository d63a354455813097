"""Whether the cache really has as many tokens a block as was stated, where its tensor does not tell (field report 2).

V1 registers one tensor, `[num_blocks, num_layers, kv_factor, block_size]`, whose last dimension mixes heads, tokens and
their size, and an attention backend may override `kv_cache_config.tokens_per_block`. First reports tell: with B tokens
a block, a prompt of T tokens has ceil(T / B) pages. From two pages on, twice or half of B would give another number. A
page more than needed, for a token to come, is told from half of B from four pages on.
"""

from __future__ import annotations

import logging

logger = logging.getLogger("s3kv.connector")


class BlockSizeProof:
    """Nothing is saved before the proof `holds`, nor once it is `broken`. Loads need none: their keys were proved."""

    def __init__(self, tokens_per_block: int, *, proved: bool) -> None:
        self._block = tokens_per_block
        self.holds = proved
        self.broken = False
        self._certain = proved

    def see_prompt(self, tokens: int, pages: int) -> None:
        """A prompt of `tokens` tokens was given `pages` pages."""
        if self._certain or self.broken:
            return
        expected = -(-tokens // self._block)
        if pages < expected or (expected >= 3 and pages >= 2 * expected - 1):
            self._break(tokens, pages)
        elif (pages == expected and expected >= 2) or (pages == expected + 1 and expected >= 4):
            self.holds = True

    def see_growth(self, tokens: int, pages: int) -> None:
        """A sequence has grown to `tokens` tokens on `pages` pages, of which one may be for tokens to come."""
        if not (self._certain or self.broken) and pages * self._block < tokens:
            self._break(tokens, pages)

    def _break(self, tokens: int, pages: int) -> None:
        self.holds, self.broken = False, True
        logger.error(
            "%d tokens lie on %d pages, so the KV cache does not have %d tokens a block as "
            "kv_cache_config.tokens_per_block says: s3kv saves nothing until that is corrected",
            tokens, pages, self._block,
        )  # fmt: skip
