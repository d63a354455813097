"""Looking into a bucket from outside an agent: its namespaces, and a catalog with an index of its own.

The index lies in a temporary folder, because the node's own is the agent's to write and because what is shown must be
what the bucket holds now, not what was true when a cache was made.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from s3kv.catalog.catalog import Catalog
from s3kv.errors import ConfigError, CorruptData, NotFound
from s3kv.format.keys import FORMAT_KEY, NAMESPACES_PREFIX, namespace_key
from s3kv.format.marker import MAX_FORMAT_JSON_BYTES, require_format
from s3kv.identity import NamespaceSpec
from s3kv.identity.namespace import MAX_JSON_BYTES
from s3kv.settings import CatalogSettings
from s3kv.store import Store


@dataclass(frozen=True, slots=True)
class Found:
    """The namespaces of a bucket. `unreadable` are folders under `ns/` without a description that fits their name."""

    namespaces: tuple[NamespaceSpec, ...]
    unreadable: tuple[str, ...]


async def find_namespaces(store: Store) -> Found:
    """Reads `format.json` and every `namespace.json`. Raises ConfigError for a prefix of another format."""
    with suppress(NotFound):  # nothing was stored yet, or the marker was lost: the namespaces speak for themselves
        require_format(await store.get(FORMAT_KEY, MAX_FORMAT_JSON_BYTES))
    specs, unreadable = [], []
    for prefix in await store.list_prefixes(NAMESPACES_PREFIX):
        name = prefix.removeprefix(NAMESPACES_PREFIX).rstrip("/")
        spec = await _read_namespace(store, name)
        if spec is None:
            unreadable.append(name)
        else:
            specs.append(spec)
    return Found(tuple(specs), tuple(unreadable))


async def _read_namespace(store: Store, name: str) -> NamespaceSpec | None:
    try:
        spec = NamespaceSpec.from_json(await store.get(namespace_key(name), MAX_JSON_BYTES))
    except (NotFound, CorruptData, ValueError):
        return None
    return spec if spec.name == name else None


def pick_namespaces(found: Found, wanted: str | None) -> tuple[NamespaceSpec, ...]:
    """All of them, or those that `wanted` names: the beginning of a name, or a model. Raises ConfigError for none."""
    if wanted is None:
        return found.namespaces
    chosen = tuple(spec for spec in found.namespaces if spec.name.startswith(wanted.lower()) or spec.model == wanted)
    if not chosen:
        known = ", ".join(f"{spec.name[:8]} ({spec.model})" for spec in found.namespaces) or "none"
        raise ConfigError(f"--namespace {wanted}: the bucket holds no such namespace; it holds {known}")
    return chosen


def pick_namespace(found: Found, wanted: str | None) -> NamespaceSpec:
    """Exactly one. Raises ConfigError that says how to choose."""
    chosen = pick_namespaces(found, wanted)
    if not chosen:
        raise ConfigError("the bucket holds no namespace yet (store.url): an engine with the connector makes it")
    if len(chosen) > 1:
        names = ", ".join(f"{spec.name[:8]} ({spec.model})" for spec in chosen)
        raise ConfigError(f"several namespaces fit: choose one with --namespace: {names}")
    return chosen[0]


@asynccontextmanager
async def temporary_catalog(
    store: Store,
    namespace: NamespaceSpec,
    settings: CatalogSettings,
    *,
    clock: Callable[[], float] = time.time,  # noqa: TID251 - the default of an injected clock
    rng: random.Random | None = None,
) -> AsyncIterator[Catalog]:
    """The catalog of `namespace` as the bucket has it now; its index is removed at the end."""
    agent_id = (rng or random.SystemRandom()).getrandbits(32)
    with tempfile.TemporaryDirectory(prefix="s3kv-index-") as folder:
        catalog = Catalog(store, namespace, Path(folder), agent_id=agent_id, clock=clock, settings=settings)
        await catalog.open()
        try:
            yield catalog
        finally:
            await catalog.close()
