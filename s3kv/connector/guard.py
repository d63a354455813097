"""No exception of ours stops the executor, save the one that must.

An exception that escapes a callback stops the executor, so after start-up callbacks answer with a safe default and
count. The exception is a promise that cannot be kept: the runtime was told that a load covers some tokens, there is
no way to take that back, and it would read whatever lies in those pages. A stopped server is better than wrong tokens.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from s3kv.client.stats import Counts
from s3kv.errors import S3kvError

logger = logging.getLogger("s3kv.connector")

P = ParamSpec("P")
R = TypeVar("R")


class PromiseBroken(S3kvError):
    """Bytes that were offered to the runtime cannot be copied to its pages. Next: start the stopped server again."""


class Troubles(Counts):
    """What went wrong, by name. The first of each name is logged with its traceback."""

    def log(self, name: str, error: BaseException) -> None:
        if self.count(name) == 1:
            logger.error("%s failed; served without it (further ones are counted, not logged)", name, exc_info=error)


class HasTroubles(Protocol):
    troubles: Troubles


S = TypeVar("S", bound=HasTroubles)


def never_raises(
    default: Callable[[], R],
) -> Callable[[Callable[Concatenate[S, P], R]], Callable[Concatenate[S, P], R]]:
    """For callbacks after start-up: any error but PromiseBroken is counted and becomes `default()`."""

    def decorate(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
        @functools.wraps(method)
        def guarded(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
            try:
                return method(self, *args, **kwargs)
            except PromiseBroken:
                raise
            except Exception as error:
                self.troubles.log(f"{method.__name__}.{type(error).__name__}", error)
                return default()

        return guarded

    return decorate


def nothing(*_: Any) -> None:
    """The default of callbacks without a result."""
