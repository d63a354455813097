"""The differential test bites: each of these mutants, which the contract forbids, turns it red."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from support.fake_agent import FakeAgent

from s3kv.connector import planner, requests, scope
from s3kv.connector.loader import Loader
from s3kv.connector.metadata import Load
from s3kv.connector.strips import Copies, Strip, numbers
from s3kv.identity import Scope

from .test_differential import MODELS, SETTINGS, Setting, check, check_pictures

Patch = pytest.MonkeyPatch


def one_block_early(patch: Patch) -> None:
    right = requests.completed_blocks
    patch.setattr(requests, "completed_blocks", lambda *args: right(*args) + 1)


def whole_prompt_at_once(patch: Patch) -> None:
    """The prompt is in the first report, so save it then (field report L1)."""
    patch.setattr(requests, "completed_blocks", lambda known, *_: known // _[-1])


def one_slot_for_all_groups(patch: Patch) -> None:
    """Every group's page at the slot's beginning, as a key without the group would have it."""
    from s3kv.identity.namespace import Part

    patch.setattr(Part, "group_offset", lambda self, group: 0 if group < len(self.group_bytes) else 4096)


def minus_one_is_a_subscript(patch: Patch) -> None:
    def addresses(self: Strip, rows: Any) -> Any:
        return self.base + self.stride * (rows % self.rows)

    def copies(self: Loader, load: Load, named: Sequence[int]) -> list[Copies]:
        found = []
        for place in self._places:
            arena = self._client.arena(load.epoch, place.part)
            assert arena is not None
            source = self._arenas.strip(arena).narrow(place.offset, place.region.size)
            found.append(Copies(place.region.strip, numbers(load.pages[place.group]), source, numbers(named)))
        return found

    patch.setattr(Strip, "addresses", addresses)
    patch.setattr(Loader, "_copies", copies)


def no_salt(patch: Patch) -> None:
    right = scope.request_identity

    def forgetful(*args: Any) -> Any:
        identity = right(*args)
        return identity and (Scope(None, identity[0].adapter), identity[1])

    patch.setattr(planner, "request_identity", forgetful)


def no_adapter(patch: Patch) -> None:
    right = scope.request_identity

    def forgetful(*args: Any) -> Any:
        identity = right(*args)
        return identity and (Scope(identity[0].cache_salt, None), identity[1])

    patch.setattr(planner, "request_identity", forgetful)


def media_are_tokens(patch: Patch) -> None:
    right = scope.request_identity
    patch.setattr(scope, "_media", lambda request, tokens: ())
    patch.setattr(planner, "request_identity", right)


def the_native_view_is_all(patch: Patch) -> None:
    """V1's query shows no media without hashes, so there are none."""
    patch.setattr(planner, "shows_media", lambda request: True)


def media_seen_late_are_overlooked(patch: Patch) -> None:
    patch.setattr(planner, "shows_media", lambda request: True)
    patch.setattr(planner, "has_unnamed_media", lambda request: False)


def unverified_blocks(patch: Patch) -> None:
    """The agent offers what it has only just begun to fetch."""
    patch.setattr(FakeAgent, "_fill", lambda self, directory, name, block: None)


def pages_saved_late(patch: Patch) -> None:
    """The snapshot is taken an iteration late, when a window may have given the page away."""
    from s3kv.connector.transfers import Transfers

    right = Transfers.snapshot

    def late(self: Transfers, stream: Any) -> None:
        now, self._saves = self._saves, self.__dict__.get("_kept", ())
        self.__dict__["_kept"] = now
        right(self, stream)

    patch.setattr(Transfers, "snapshot", late)


def loads_everything_offered_from_block_zero(patch: Patch) -> None:
    """Field report L2: the load begins at the sequence's start, over pages that the device shares."""
    right = requests.RequestTracker._load

    def from_zero(self: Any, state: Any, offered: Any, start: int, end: int, pages: Any) -> Load:
        load = right(self, state, offered, start, end, pages)
        shifted = tuple(tuple(group[: len(load.slots)]) for group in pages)
        return dataclasses.replace(load, pages=shifted)

    patch.setattr(requests.RequestTracker, "_load", from_zero)


def parked_is_reported_at_once(patch: Patch) -> None:
    right = Loader.finished

    def hasty(self: Loader, ended: Sequence[int], started: Sequence[int]) -> tuple[list[int], list[int]]:
        saved, _ = right(self, ended, ())
        return saved, list(started) if started else []

    patch.setattr(Loader, "finished", hasty)


CHUNKED_WINDOWS = dataclasses.replace(SETTINGS["v2, windows"], slots=64)
PLAIN = dataclasses.replace(SETTINGS["v2"], slots=64)

MUTANTS: dict[Callable[[Patch], None], Setting] = {
    one_block_early: dataclasses.replace(SETTINGS["v2, chunks"], slots=64),
    whole_prompt_at_once: dataclasses.replace(SETTINGS["v1, chunks, overlap"], slots=64),
    one_slot_for_all_groups: CHUNKED_WINDOWS,
    minus_one_is_a_subscript: CHUNKED_WINDOWS,
    no_salt: PLAIN,
    no_adapter: PLAIN,
    media_are_tokens: dataclasses.replace(PLAIN, media=0.8),
    unverified_blocks: PLAIN,
    pages_saved_late: dataclasses.replace(SETTINGS["v2, narrow window"], slots=64),
    loads_everything_offered_from_block_zero: SETTINGS["v2, one after another"],
    parked_is_reported_at_once: SETTINGS["v2, parked"],
}


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_mutant_is_caught(mutant: Callable[[Patch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    setting = MUTANTS[mutant]
    assert setting.model in MODELS
    mutant(monkeypatch)
    with pytest.raises(Exception):  # noqa: B017 - an assertion, or whatever the runtime raises
        for seed in range(1, 7):
            check(monkeypatch, setting, seed)


@pytest.mark.parametrize("mutant", [the_native_view_is_all, media_seen_late_are_overlooked])
def test_mutant_is_caught_by_pictures(mutant: Callable[[Patch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    mutant(monkeypatch)
    with pytest.raises(Exception):  # noqa: B017 - an assertion, or a promise that is broken
        check_pictures(monkeypatch, "v1", hashed=False)
