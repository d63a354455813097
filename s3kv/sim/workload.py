"""Text as tokens for the demo, and random workloads for differential tests."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from s3kv.sim.config import SimRequest
from s3kv.sim.model import Media

BEGIN = 256
"""The token that begins a text; the bytes are tokens 0 to 255."""

END = 257
SEPARATOR = 258
VOCABULARY = 260

Item = TypeVar("Item")


def text_to_tokens(text: str) -> tuple[int, ...]:
    """One token for every byte of the text's UTF-8, after BEGIN. So texts that share a prefix share its tokens."""
    return (BEGIN, *text.encode())


def tokens_to_text(tokens: Sequence[int]) -> str:
    """The text of tokens; those that are no bytes are left out, and bytes that are no UTF-8 are replaced."""
    return bytes(token for token in tokens if token < 256).decode(errors="replace")


@dataclass(frozen=True)
class WorkloadShape:
    """What random workloads are made of.

    boundaries: lengths around multiples of each are likely (blocks and chunks). salts, adapters: how many there are
    besides none. media, cancellations: how often a request has them, from 0 to 1.
    """

    requests: int = 8
    max_prompt: int = 200
    max_new_tokens: int = 8
    boundaries: tuple[int, ...] = (16, 64)
    prefixes: int = 3
    salts: int = 0
    adapters: int = 0
    media: float = 0.0
    cancellations: float = 0.0
    priorities: bool = False
    vocabulary: int = 256


def random_workload(rng: random.Random, shape: WorkloadShape, first_id: int = 1) -> list[SimRequest]:
    """Requests whose prompts share prefixes and whose lengths lie around block and chunk boundaries."""
    documents = [_tokens(rng, shape.max_prompt, shape.vocabulary) for _ in range(shape.prefixes)]
    return [_request(rng, shape, first_id + index, documents) for index in range(shape.requests)]


def _request(rng: random.Random, shape: WorkloadShape, request_id: int, documents: list[list[int]]) -> SimRequest:
    length = _length(rng, shape)
    shared = min(length, _length(rng, shape)) if rng.random() < 0.8 else 0
    prompt = rng.choice(documents)[:shared]
    prompt = prompt + _tokens(rng, length - len(prompt), shape.vocabulary)
    media: tuple[Media, ...] = ()
    if rng.random() < shape.media:
        start = rng.randrange(length)
        media = (Media(start, rng.randint(1, length - start), f"image {rng.randrange(2)}"),)
    return SimRequest(
        request_id=request_id,
        prompt_tokens=tuple(prompt),
        max_new_tokens=rng.randint(1, shape.max_new_tokens),
        cache_salt=_one_of(rng, [f"salt {number}" for number in range(shape.salts)]),
        lora_task_id=_one_of(rng, list(range(1, shape.adapters + 1))),
        media=media,
        media_hashes=rng.random() < 0.7,
        priority=rng.choice((None, 10, 35, 80)) if shape.priorities else None,
        cancel_after=rng.randint(1, 12) if rng.random() < shape.cancellations else None,
    )


def _one_of(rng: random.Random, items: Sequence[Item]) -> Item | None:
    """One of the items, or None, which is as likely as each of them."""
    return rng.choice([*items, None])


def _length(rng: random.Random, shape: WorkloadShape) -> int:
    boundary = rng.choice(shape.boundaries)
    multiple = boundary * rng.randint(0, max(1, shape.max_prompt // boundary))
    near = multiple + rng.choice((-1, 0, 0, 1, 2))
    return min(max(1, near if rng.random() < 0.8 else rng.randint(1, shape.max_prompt)), shape.max_prompt)


def _tokens(rng: random.Random, count: int, vocabulary: int) -> list[int]:
    return [rng.randrange(vocabulary) for _ in range(count)]
