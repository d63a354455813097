"""The radix tree that finds pages on the device for a prompt's prefix, block by block, and within a block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from s3kv.sim.layout import BAD_PAGE_INDEX
from s3kv.sim.pool import PagePool

BlockKey = tuple[tuple[int, ...], tuple[str, ...]]
"""A block's tokens and the media in it."""


@dataclass(eq=False)
class Node:
    """One block after all those above it; `pages[g]` is its page slot in layer group g, or -1."""

    key: BlockKey
    parent: Node | None
    pages: list[int]
    children: dict[BlockKey, Node] = field(default_factory=dict)


@dataclass(frozen=True)
class Match:
    """What the device holds of a prompt: whole blocks `nodes`, then `partial_tokens` of the block `partial`."""

    tokens: int = 0
    nodes: tuple[Node, ...] = ()
    partial: Node | None = None


def first_needed(position: int, window: int | None, tokens_per_block: int) -> int:
    """The first block that a query at `position` or later still looks at."""
    return 0 if window is None else max(0, position - window + 1) // tokens_per_block


class ReuseTree:
    """Blocks whose keys and values are complete, by everything that decides them.

    A page that a window has passed and that was freed is gone from its node, so a prefix is reused only where every
    layer group still has the pages that its window needs.
    """

    def __init__(self, pools: Sequence[PagePool], tokens_per_block: int, *, partial: bool) -> None:
        self._pools, self._block, self._partial = pools, tokens_per_block, partial
        self._roots: dict[object, Node] = {}

    def root(self, scope: object) -> Node:
        """The node above the first block of every sequence of a scope (salt, adapter)."""
        return self._roots.setdefault(scope, Node(((), ()), None, [BAD_PAGE_INDEX] * len(self._pools)))

    def match(self, scope: object, keys: Sequence[BlockKey], tail: BlockKey, limit: int) -> Match:
        """The longest prefix on the device, of at most `limit` tokens.

        keys: the prompt's whole blocks. tail: the tokens after them.
        """
        path = self._walk(scope, keys)
        best = Match()
        for count in range(len(path), -1, -1):
            rest = (*keys, tail)[count]
            best = max(best, self._at(scope, tuple(path[:count]), rest, limit), key=lambda match: match.tokens)
            if best.tokens >= count * self._block:
                break
        return best

    def insert(self, parent: Node, key: BlockKey, pages: Sequence[int]) -> Node:
        """Records a complete block; its pages are kept from now on. Where a node has a page already, that one stays."""
        node = parent.children.get(key)
        if node is None:
            node = parent.children[key] = Node(key, parent, [BAD_PAGE_INDEX] * len(self._pools))
        for group, page in enumerate(pages):
            if node.pages[group] == BAD_PAGE_INDEX and page != BAD_PAGE_INDEX:
                node.pages[group] = page
                self._pools[group].keep(page, lambda node=node, group=group: self._forget(node, group))  # type: ignore[misc]
        return node

    def _walk(self, scope: object, keys: Sequence[BlockKey]) -> list[Node]:
        node, path = self.root(scope), []
        for key in keys:
            child = node.children.get(key)
            if child is None:
                break
            path.append(child)
            node = child
        return path

    def _at(self, scope: object, nodes: tuple[Node, ...], rest: BlockKey, limit: int) -> Match:
        """The match that goes through exactly these whole blocks, if every group has what its window needs."""
        whole = len(nodes) * self._block
        best = Match()
        if whole <= limit and self._usable(nodes, whole):
            best = Match(whole, nodes)
        if not self._partial or rest[1]:
            return best
        parent = nodes[-1] if nodes else self.root(scope)
        for child in parent.children.values():
            shared = 0 if child.key[1] else _common_prefix(child.key[0], rest[0])
            tokens = min(whole + shared, limit)
            if tokens > max(whole, best.tokens) and self._usable((*nodes, child), tokens):
                best = Match(tokens, nodes, child)
        return best

    def _usable(self, nodes: Sequence[Node], tokens: int) -> bool:
        return all(
            nodes[ordinal].pages[group] != BAD_PAGE_INDEX
            for group, pool in enumerate(self._pools)
            for ordinal in range(first_needed(tokens, pool.window, self._block), len(nodes))
        )

    def _forget(self, node: Node, group: int) -> None:
        node.pages[group] = BAD_PAGE_INDEX
        while node.parent is not None and not node.children and set(node.pages) == {BAD_PAGE_INDEX}:
            if node.parent.children.get(node.key) is node:
                del node.parent.children[node.key]
            node = node.parent


def _common_prefix(first: tuple[int, ...], second: tuple[int, ...]) -> int:
    length = 0
    for left, right in zip(first, second, strict=False):
        if left != right:
            break
        length += 1
    return length
