"""In which order prompts are best computed. Pure.

The prompt that shares the longest prefixes with others goes first; one that shares a prefix waits until the prompt that
computes that prefix is done. So every block is computed once, however many are sent at a time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from s3kv.errors import S3kvError
from s3kv.identity import Chain, NamespaceSpec, Scope
from s3kv.warm.prompts import Prompt


@dataclass(frozen=True, slots=True)
class Chained:
    """A prompt as the connector sees it: its tokens and the hashes of its whole blocks."""

    prompt: Prompt
    tokens: tuple[int, ...]
    hashes: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Step:
    """`item` indexes the prompts. `after` indexes the step (not the prompt) that computes the shared prefix, if any;
    `shared` is how many of the blocks that one or the store has."""

    item: int
    after: int | None
    shared: int


class UnknownAdapter(S3kvError):
    """The adapter's identity is not in the settings."""


def chained(prompt: Prompt, tokens: Sequence[int], namespace: NamespaceSpec, adapters: Mapping[str, str]) -> Chained:
    """With block hashes that are the connector's. Raises UnknownAdapter; ValueError for bad token ids."""
    adapter = None
    if prompt.lora is not None:
        adapter = adapters.get(prompt.lora)
        if adapter is None:
            raise UnknownAdapter(f"identity.adapters has no identity for the adapter {prompt.lora!r}")
    scope = Scope(cache_salt=prompt.cache_salt, adapter=adapter)
    chain = Chain(namespace.digest, namespace.tokens_per_block, scope=scope)
    try:
        chain.extend(tokens)
    except OverflowError as error:
        raise ValueError("a token id is out of range") from error
    return Chained(prompt, tuple(tokens), tuple(chain.hashes))


def order(prompts: Sequence[Chained], stored: Sequence[int] | None = None) -> list[Step]:
    """Steps in the order in which to begin them. `stored[i]` blocks of prompt i need not be computed any more.

    A prompt of which nothing is left to compute (all stored, or all computed by an earlier step) gets no step.
    """
    held = list(stored) if stored is not None else [0] * len(prompts)
    uses = Counter(block for each in prompts for block in set(each.hashes))
    shared_blocks = [sum(1 for block in each.hashes if uses[block] > 1) for each in prompts]
    ranked = sorted(range(len(prompts)), key=lambda i: (-shared_blocks[i], -len(prompts[i].hashes), i))
    owner: dict[bytes, int] = {}
    steps: list[Step] = []
    for item in ranked:
        hashes = prompts[item].hashes
        prefix = held[item]
        after = None
        while prefix < len(hashes) and hashes[prefix] in owner:
            after = owner[hashes[prefix]]
            prefix += 1
        if prefix >= len(hashes):
            continue
        for block in hashes[prefix:]:
            owner[block] = len(steps)
        steps.append(Step(item, after, prefix))
    return steps


def left_out(prompts: Sequence[Chained], sent: Sequence[Step], failed: Collection[int]) -> list[Step]:
    """Steps, as of `order`, for prompts that got none because one that failed was to compute their last blocks.

    sent: all steps that were carried out until now. failed: the items among them that were not computed.
    """
    computed = {block for step in sent if step.item not in failed for block in prompts[step.item].hashes}
    lost = {block for step in sent if step.item in failed for block in prompts[step.item].hashes[step.shared :]}
    lost -= computed
    tried = {step.item for step in sent}
    held = [
        len(each.hashes)
        if item in tried
        else next((at for at, block in enumerate(each.hashes) if block in lost), len(each.hashes))
        for item, each in enumerate(prompts)
    ]
    return order(prompts, held)
