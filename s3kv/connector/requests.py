"""What is known of each request: its chain, its pages, what was offered, which blocks a pass completes. Pure.

Invariants kept here:
- Only computed tokens are saved: block i is complete after a pass iff (i + 1) * B <= min(tokens known, first token not
  computed before the pass + tokens loaded for it + tokens the pass computes). The chunk's end bounds it, not the
  prompt's.
- A load writes the pages of the tokens that the offer covers and the runtime honours, and no others. The first of
  these pages may hold tokens that the device matched (a match inside a block): the runtime itself is about to write the
  rest of that page, offered or not, so it has given the request a page of its own; a shared page could not be
  continued. Its head is rewritten with KV of the same tokens.
- Every lease has one owner: this module until it is named in metadata, then the workers. Each path out of here
  (not honoured, replaced, cancelled, finished) returns what was not handed over, to be released.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from s3kv.connector.blocksize import BlockSizeProof
from s3kv.connector.guard import PromiseBroken, Troubles
from s3kv.connector.metadata import Load, Pages, Save
from s3kv.connector.scope import salt_text
from s3kv.identity import ROOT, Chain

NEVER = 1 << 62
Lease = tuple[int, int]
"""`(lease, epoch)`"""

MakeChain = Callable[[str | None], Chain]
"""Makes an empty chain of the request's identity; the argument, when not None, is its salt."""


@dataclass(slots=True)
class Offered:
    """Tokens `[start, end)` were offered from `slots`, of which `slots[0]` holds block `first_block`.

    `slots` is empty for a parked offer, whose slots the agent names when they are filled.
    """

    start: int
    end: int
    first_block: int
    blocks: int
    slots: Sequence[int]
    lease: int
    epoch: int
    parked: bool
    handed: bool = False

    @property
    def owned(self) -> Lease:
        return self.lease, self.epoch


@dataclass(slots=True)
class RequestState:
    """One request between its query and its end. `pages[g]`: page slots by block ordinal, as reported so far.

    `prompt` is kept until the first report restates it, to see whether the chain made from it still holds. `fresh`:
    reported tokens that the chain has not been given yet; no block can be complete with them.
    """

    request_id: int
    make_chain: MakeChain
    chain: Chain
    prompt: list[int]
    prompt_length: int
    salt: str | None
    request: Any = None
    offered: Offered | None = None
    allocated: list[list[int]] = field(default_factory=list)
    pages: list[list[int]] = field(default_factory=list)
    priorities: dict[int, int] = field(default_factory=dict)
    fresh: list[int] = field(default_factory=list)
    saved: int = 0
    next_end: int = NEVER
    reported: bool = False
    any_saved: bool = False


@dataclass(slots=True)
class Step:
    """What one iteration asks of the workers, and leases that nobody needs any more."""

    loads: list[Load] = field(default_factory=list)
    parked: list[Load] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)
    released: list[Lease] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Ending:
    """What is left of a request. `hold`: a background load may still write its pages. `tip`: its last saved block."""

    released: Lease | None = None
    hold: bool = False
    tip: bytes | None = None


def completed_blocks(known: int, position: int, honoured: int, scheduled: int, tokens_per_block: int) -> int:
    """Blocks whose every token has KV once the pass has run."""
    return min(known, position + honoured + scheduled) // tokens_per_block


def pages_by_group(data: Any) -> list[list[int]]:
    """A report's new pages. Builds without layer groups report flat lists, some builds a dict by group id."""
    grouped = getattr(data, "new_block_ids_by_layer_group", None)
    if isinstance(grouped, dict):
        grouped = [grouped[group] for group in sorted(grouped)]
    return grouped if grouped else [data.new_block_ids]


class RequestTracker:
    """All requests of one scheduler. Not thread-safe: the executor's thread drives it."""

    def __init__(
        self,
        tokens_per_block: int,
        groups: int,
        *,
        save: bool = True,
        save_generated: bool = True,
        min_priority: int = 0,
        proof: BlockSizeProof | None = None,
        troubles: Troubles | None = None,
    ) -> None:
        self._block = tokens_per_block
        self._groups = groups
        self._save = save
        self._save_generated = save_generated
        self._min_priority = min_priority
        self._proof = proof or BlockSizeProof(tokens_per_block, proved=True)
        self._troubles = troubles or Troubles()
        self._states: dict[int, RequestState] = {}
        self._saving: dict[int, RequestState] = {}
        self._to_park: list[int] = []
        self._dropped: list[int] = []

    def __len__(self) -> int:
        return len(self._states)

    def get(self, request_id: int) -> RequestState | None:
        return self._states.get(request_id)

    def begin(
        self, request_id: int, make_chain: MakeChain, prompt: list[int], salt: str | None
    ) -> tuple[RequestState, Lease | None]:
        """A request, or a replay of it, or another one under its id, gets pages. Returns a lease that nobody needs.

        Raises what the chain raises for tokens that are no ids; nothing is known of the request then.
        """
        ending = self.finish(request_id)
        chain = make_chain(None)
        chain.extend(prompt)
        state = self._states[request_id] = RequestState(request_id, make_chain, chain, prompt, len(prompt), salt)
        return state, ending.released

    def allocated(self, request: Any, request_id: int, pages: list[list[int]]) -> None:
        """The pages that an offer's tokens go to are known now."""
        state = self._states.get(request_id)
        if state is None:
            return
        state.request = request
        state.allocated = pages
        if state.offered is not None and state.offered.parked and not state.offered.handed:
            self._to_park.append(request_id)

    def cancel(self, request_id: int, start: int, end: int) -> None:
        """The runtime will not use tokens `[start, end)` of an offer: its head or its tail."""
        state = self._states.get(request_id)
        offered = state.offered if state is not None else None
        if offered is None or offered.handed or end <= start:
            return
        if start <= offered.start:
            offered.start = max(offered.start, min(end, offered.end))
        else:
            # A tail; and whatever would lie behind a hole in the middle is of no use without it.
            offered.end = min(offered.end, start)

    def step(self, new_requests: Iterable[Any], cached_requests: Iterable[Any]) -> Step:
        """Raises PromiseBroken when a load that was promised cannot be planned; other trouble untracks its request."""
        step = Step()
        if self._to_park:
            self._hand_parked(step)
        for data in new_requests:
            state = self._states.get(data.request_id)
            if state is not None:
                self._new_report(state, data, step)
        saving = self._saving
        no_pages: list[list[int]] = [[]] * self._groups
        for data in cached_requests:
            # 256 of these in 150 µs (benchmarks/bench_engine.py). A report is read at once, while it is in the caches:
            # kept until its block is complete it would come from memory, at several times the cost.
            state = saving.get(data.request_id)
            if state is None:
                continue
            try:
                state.fresh += data.new_tokens
                grouped = getattr(data, "new_block_ids_by_layer_group", None)
                if grouped != no_pages and (grouped or data.new_block_ids):
                    self._append_pages(state, data)
                if data.computed_position + data.num_scheduled_tokens >= state.next_end:
                    self._later_report(state, data, step)
            except Exception as error:
                self._give_up(state, error)
        return step

    def take_dropped(self) -> tuple[int, ...]:
        """Requests that ended since the last call after a load of theirs was handed to the workers."""
        if not self._dropped:
            return ()
        dropped, self._dropped = tuple(self._dropped), []
        return dropped

    def finish(self, request_id: int) -> Ending:
        """Forget a request. Idempotent."""
        state = self._states.pop(request_id, None)
        if state is None:
            return Ending()
        self._saving.pop(request_id, None)
        offered, tip = state.offered, None
        if state.any_saved and state.saved:
            tip = state.chain.hashes[state.saved - 1]
        if offered is None:
            return Ending(tip=tip)
        if not offered.handed:
            return Ending(released=offered.owned, tip=tip)
        self._dropped.append(request_id)
        return Ending(hold=offered.parked and not state.reported, tip=tip)

    def _new_report(self, state: RequestState, data: Any, step: Step) -> None:
        offered = state.offered
        promised = offered is not None and not offered.parked and not offered.handed
        try:
            self._first_report(state, data, step)
        except PromiseBroken:
            raise
        except Exception as error:
            if promised:
                raise PromiseBroken(
                    f"the load that was offered for request {state.request_id} cannot be planned: {error}"
                ) from error
            self._give_up(state, error)

    def _give_up(self, state: RequestState, error: Exception) -> None:
        self._troubles.log(f"report.{type(error).__name__}", error)
        self._saving.pop(state.request_id, None)

    def _hand_parked(self, step: Step) -> None:
        waiting, self._to_park = self._to_park, []
        for request_id in waiting:
            state = self._states.get(request_id)
            offered = state.offered if state is not None else None
            if state is not None and offered is not None and not offered.handed:
                offered.handed = True
                step.parked.append(self._load(state, offered, offered.start, offered.end, state.allocated))

    def _first_report(self, state: RequestState, data: Any, step: Step) -> None:
        self._restart(state, data)
        position = int(data.computed_position)
        honoured = 0
        offered = state.offered
        if offered is not None and not offered.parked and not offered.handed:
            honoured = self._honour(state, offered, position, step)
        state.request = None
        state.saved = (position + honoured) // self._block
        if self._save:
            self._saving[state.request_id] = state
            self._collect_saves(state, position, honoured, int(data.num_scheduled_tokens), step)

    def _restart(self, state: RequestState, data: Any) -> None:
        """A first report restates everything; after a replay without a query it overrides what was known."""
        tokens = list(data.new_tokens)
        salt = salt_text(getattr(data, "cache_salt", None))
        unseen_salt = salt is not None and state.salt is None
        if state.reported or tokens != state.prompt or unseen_salt:
            state.chain = state.make_chain(salt if unseen_salt else None)
            state.chain.extend(tokens)
        state.salt = salt if unseen_salt else state.salt
        state.reported = True
        state.prompt, state.prompt_length = [], len(tokens)
        state.fresh = []
        state.priorities.clear()
        state.pages = [[] for _ in range(self._groups)]
        self._append_pages(state, data)
        self._proof.see_prompt(len(tokens), len(state.pages[0]))

    def _honour(self, state: RequestState, offered: Offered, position: int, step: Step) -> int:
        honoured = honoured_tokens(state.request, offered, position)
        if honoured <= 0:
            state.offered = None
            step.released.append(offered.owned)
            return 0
        load = self._load(state, offered, position, position + honoured, state.pages)
        offered.handed = True
        step.loads.append(load)
        return honoured

    def _load(self, state: RequestState, offered: Offered, start: int, end: int, pages: list[list[int]]) -> Load:
        first, last = start // self._block, -(-end // self._block)
        skip = first - offered.first_block
        if skip < 0 or last - offered.first_block > offered.blocks:
            raise PromiseBroken(
                f"tokens {start} to {end} of request {state.request_id} were honoured, and other ones were offered"
            )
        chosen = [_padded(group[first:last], last - first) for group in pages or [[]]]
        slots = tuple(offered.slots[skip : skip + last - first])
        return Load(state.request_id, offered.lease, offered.epoch, slots, tuple(chosen), skip)

    def _later_report(self, state: RequestState, data: Any, step: Step) -> None:
        fresh, state.fresh = state.fresh, []
        state.chain.extend(fresh)
        self._proof.see_growth(state.chain.tokens, len(state.pages[0]))
        self._collect_saves(state, int(data.computed_position), 0, int(data.num_scheduled_tokens), step)

    def _append_pages(self, state: RequestState, data: Any) -> None:
        groups = pages_by_group(data)
        if len(groups) != self._groups:
            raise ValueError(f"request {state.request_id} reports {len(groups)} layer groups of {self._groups}")
        priorities = getattr(data, "priorities", None)
        if priorities:
            first = len(state.pages[0])
            state.priorities.update(each for each in enumerate(priorities, first) if each[1] is not None)
        for known, new in zip(state.pages, groups, strict=True):
            known.extend(new)

    def _collect_saves(self, state: RequestState, position: int, honoured: int, scheduled: int, step: Step) -> None:
        complete = completed_blocks(state.chain.tokens, position, honoured, scheduled, self._block)
        complete = min(complete, *map(len, state.pages))
        limit = NEVER if self._save_generated else state.prompt_length // self._block
        complete = min(complete, limit)
        if complete > state.saved and self._proof.holds:
            step.saves += self._runs(state, complete)
        state.saved = max(state.saved, complete)
        state.next_end = (state.saved + 1) * self._block
        if state.saved >= limit or self._proof.broken:
            self._saving.pop(state.request_id, None)

    def _runs(self, state: RequestState, complete: int) -> list[Save]:
        """Blocks `[saved, complete)` that have a page in every group and the priority to be kept, as runs."""
        start = state.saved
        if not state.priorities and all(min(group[start:complete]) >= 0 for group in state.pages):
            state.any_saved = True
            return [_save(state, start, complete)]
        runs = []
        for block in range(start, complete + 1):
            if block < complete and self._wanted(state, block):
                continue
            if block > start:
                state.any_saved = True
                runs.append(_save(state, start, block))
            start = block + 1
        return runs

    def _wanted(self, state: RequestState, block: int) -> bool:
        if state.priorities and state.priorities.get(block, self._min_priority) < self._min_priority:
            return False
        return all(group[block] >= 0 for group in state.pages)


def _save(state: RequestState, start: int, end: int) -> Save:
    hashes = state.chain.hashes
    pages: Pages = tuple([tuple(group[start:end]) for group in state.pages])
    return Save(hashes[start - 1] if start else ROOT, start, tuple(hashes[start:end]), pages)


def _padded(pages: list[int], length: int) -> tuple[int, ...]:
    return (*pages, *([-1] * (length - len(pages))))


def honoured_tokens(request: Any, offered: Offered, position: int) -> int:
    """How many of the offered tokens from `position` on the runtime takes as loaded.

    `py_num_connector_matched_tokens` says it, where the build has it. Under V1 the query is answered to a C++ view of
    the request, so the attribute of the Python one may still be at its default of 0 although V1 honours every offer
    whole: then the request's own position says it, which includes the loaded tokens while the report's excludes them.
    """
    most = max(0, offered.end - max(offered.start, position))
    stated = getattr(request, "py_num_connector_matched_tokens", None)
    if not isinstance(stated, int):
        return most
    if stated > 0:
        return min(stated, most)
    current = getattr(request, "context_current_position", None)
    if isinstance(current, int) and 0 < current - position <= most:
        return current - position
    return 0
