"""Opening what commands work on."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from s3kv.errors import S3kvError

if TYPE_CHECKING:
    from s3kv.catalog.browse import Found
    from s3kv.identity import NamespaceSpec
    from s3kv.settings import Settings
    from s3kv.store import Store

Namespace = Annotated[
    str | None,
    typer.Option("--namespace", "-n", help="A namespace: the beginning of its name, or its model.", metavar="NAME"),
]


@asynccontextmanager
async def opened_store(settings: Settings) -> AsyncIterator[Store]:
    """The store of the settings, guarded, closed at the end. Its failures name the setting at fault."""
    from s3kv.errors import StoreError
    from s3kv.store import open_store
    from s3kv.store.failures import describe_failure

    store = open_store(settings.store)
    try:
        yield store
    except StoreError as error:
        raise CommandFailed(describe_failure(error, settings.store)) from error
    except ExceptionGroup as group:
        first = _first_leaf(group)
        if not isinstance(first, StoreError):
            raise first from group
        raise CommandFailed(describe_failure(first, settings.store)) from group
    finally:
        await store.close()


def _first_leaf(error: Exception) -> Exception:
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error


class CommandFailed(S3kvError):
    """One sentence for the user; the cause is chained."""


@dataclass(frozen=True, slots=True)
class Bucket:
    store: Store
    found: Found
    chosen: tuple[NamespaceSpec, ...]


@asynccontextmanager
async def opened_bucket(settings: Settings, namespace: str | None) -> AsyncIterator[Bucket]:
    """The store and the namespaces that `--namespace` chose (all without it)."""
    from s3kv.catalog.browse import find_namespaces, pick_namespaces

    async with opened_store(settings) as store:
        found = await find_namespaces(store)
        yield Bucket(store, found, pick_namespaces(found, namespace))


def short(spec: NamespaceSpec) -> str:
    """How a namespace is shown: enough of its name to be typed, and what it is."""
    return spec.name[:8]
