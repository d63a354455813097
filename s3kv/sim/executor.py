"""The executor loop of one rank: schedules, calls the connector in the contract's order, and runs the passes.

Every rank of tensor parallelism runs this same loop on the same requests and takes the same decisions, because nothing
in it depends on time, on hashing order or on chance that is not seeded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from s3kv.sim.active import Active, activate, dummy
from s3kv.sim.allocation import start_v1, start_v2
from s3kv.sim.config import SimConfig, SimRequest, SimResult
from s3kv.sim.driver import Driver
from s3kv.sim.errors import ContractError
from s3kv.sim.guard import PageGuard
from s3kv.sim.llm_request import LlmRequest, LlmRequestState
from s3kv.sim.managers import CacheManager, ManagerV1
from s3kv.sim.model import Model, Span
from s3kv.sim.reuse import first_needed
from s3kv.sim.streams import Download, make_stream, upload, using

FIRST_DUMMY_ID = 1 << 60


@dataclass
class _Pass:
    """The requests of one forward pass, and, once it is enqueued, those it samples and what it samples."""

    context: list[Active] = field(default_factory=list)
    generation: list[Active] = field(default_factory=list)
    sampled: list[Active] = field(default_factory=list)
    outcome: Download | None = None

    @property
    def requests(self) -> list[Active]:
        return [*self.context, *self.generation]


class Executor:
    """One rank's executor. Not thread-safe. An exception of the connector's leaves it unusable."""

    def __init__(
        self, config: SimConfig, model: Model, manager: CacheManager, driver: Driver, clock: Callable[[], float]
    ) -> None:
        self._config, self._model, self.manager, self.driver, self._clock = config, model, manager, driver, clock
        self._device = torch.device(config.device)
        self.stream = make_stream(self._device)
        self._on_pass_end = driver.forward_pass_callable()
        self._guard = PageGuard(manager, enabled=config.guard, nan=config.poison == "nan")
        self._active: dict[int, Active] = {}
        self._held: dict[int, Active] = {}
        self._cancelled: set[int] = set()
        self._previous = _Pass()
        self._results: list[SimResult] = []
        self._dummies = 0
        self.iteration = 0
        self.progressed = False

    @property
    def idle(self) -> bool:
        """Whether no request is active, no pages are held and no results are outstanding, but for dummies'."""
        outstanding = (*self._active.values(), *self._held.values(), *self._previous.sampled)
        return all(active.id >= FIRST_DUMMY_ID for active in outstanding)

    def submit(self, spec: SimRequest) -> None:
        """Takes a request in. One that could never run is answered by the next step, with the reason."""
        active = activate(spec, self._config, self._clock())
        self._active[active.id] = active

    def cancel(self, request_id: int) -> None:
        """Cancels a request in the next step; one whose load is under way, when that is over."""
        self._cancelled.add(request_id)

    def reset_reuse(self) -> None:
        """Empties the device's cache of blocks that no request uses."""
        with using(self.stream):
            self._guard.check(self._parked(), "between passes")
            self.manager.reset_reuse()
            self._guard.arm()

    def step(self) -> list[SimResult]:
        """One iteration. Returns the results of the requests that it ended."""
        self.iteration, self.progressed, self._results = self.iteration + 1, False, []
        with using(self.stream):
            self._guard.check(self._parked(), "between passes")
            self._refuse_misfits()
            self._replay_some()
            self._add_dummy()
            batch = self._schedule()
            self._run(batch)
            if self._config.overlap:
                self._process(self._previous)
                self._previous = batch
            else:
                self._process(batch)
            self._end_cancelled()
            self._settle_transfers()
            self._guard.arm()
        self.progressed = self.progressed or bool(batch.requests or self._results)
        return [result for result in self._results if result.request_id < FIRST_DUMMY_ID]

    # ---- what runs ----

    def _schedule(self) -> _Pass:
        batch, budget = _Pass(), self._config.max_num_tokens
        for active in self._active.values():
            if active.allocated and not self.driver.is_parked(active.id):
                self.manager.trim(active.id, active.position)
        for active in list(self._active.values()):
            fits = len(batch.requests) < self._config.max_batch_size and budget
            if fits and active.generating and self._grow_for_token(active, batch):
                batch.generation.append(active)
                budget -= 1
        for active in list(self._active.values()):
            if not active.in_context or len(batch.requests) >= self._config.max_batch_size:
                continue
            chunk = self._chunk(active, budget)
            if chunk == 0 or not self._prepare_context(active, chunk, batch):
                break
            if active.in_context:
                batch.context.append(active)
            budget -= active.request.context_chunk_size
        return batch

    def _chunk(self, active: Active, budget: int) -> int:
        """Prompt tokens that a pass computes of a request at most; 0 when it has to wait for another pass."""
        remaining = active.request.context_remaining_length
        if self._config.chunk_tokens is None:
            return remaining if remaining <= budget else 0
        chunk = min(self._config.chunk_tokens, budget)
        return chunk if chunk >= min(remaining, self._config.tokens_per_block) else 0

    def _prepare_context(self, active: Active, chunk: int, batch: _Pass) -> bool:
        if active.allocated:
            active.request.set_chunk(chunk)
            end = active.position + active.request.context_chunk_size
            if isinstance(self.manager, ManagerV1) or self.manager.grow(active.id, end, active.position):
                return True
            if not batch.requests and not self._previous.sampled and not self.driver.waits():
                self._pause_latest(keep=active, batch=batch)
            return False
        if isinstance(self.manager, ManagerV1):
            return self._fits_to_its_end(active) and start_v1(active, self.manager, self.driver, self._config, chunk)
        return start_v2(active, self.manager, self.driver, self._config, chunk)

    def _fits_to_its_end(self, active: Active) -> bool:
        """Whether a request can be admitted so that neither it nor a running one will ever lack a page."""
        owed = sum(
            self._pages_at_end(other) - self.manager.pages_held(other.id)
            for other in self._active.values()
            if other.allocated
        )
        return owed + self._pages_at_end(active) <= min(pool.available for pool in self.manager.pools)

    def _pages_at_end(self, active: Active) -> int:
        tokens = active.request.orig_prompt_len + active.request.max_new_tokens
        return -(-tokens // self._config.tokens_per_block)

    def _grow_for_token(self, active: Active, batch: _Pass) -> bool:
        """Makes room for a request's next token, at the cost of younger requests if need be."""
        while not self.manager.grow(active.id, active.position + 1, active.position):
            if self._previous.sampled:
                self._flush()
                batch.generation = [other for other in batch.generation if not other.done]
                if active.done:
                    return False
            elif not self._pause_latest(keep=active, batch=batch):
                self._pause(active)
                return False
        return True

    def _flush(self) -> None:
        """Takes in the results of the pass before, so that no request has one outstanding."""
        self._process(self._previous)
        self._previous = _Pass()

    def _pause_latest(self, keep: Active, batch: _Pass) -> bool:
        """Takes the pages of the youngest request that is not in the batch. False when there is none."""
        for active in reversed(self._active.values()):
            idle = active.allocated and active is not keep and active not in batch.requests
            if idle and not self.driver.is_parked(active.id):
                self._pause(active)
                return True
        return False

    def _pause(self, active: Active, *, destroy: bool = False) -> None:
        """Takes a request's pages and makes it start over; `destroy`: with none of them left to reuse."""
        self.manager.release(active.id, destroy=destroy)
        self.driver.forget(active.request)
        active.request.pause()
        active.allocated, active.position, active.load_range = False, 0, range(0)

    def _replay_some(self) -> None:
        for active in list(self._active.values()):
            chosen = active.allocated and self._config.replays.replays(active.id, self.iteration)
            if chosen and not self.driver.is_parked(active.id):
                self._flush()
                if not active.done:
                    self._pause(active, destroy=self._config.replays.destroys(active.id, self.iteration))

    def _add_dummy(self) -> None:
        every = self._config.dummies
        if self._config.attention_dp:
            wanted = not self._active
        else:
            real = bool(self._active) and max(self._active) < FIRST_DUMMY_ID
            wanted = real and bool(every) and self.iteration % every == 0
        if wanted:
            self._dummies += 1
            active = dummy(FIRST_DUMMY_ID + self._dummies, self._config, self._clock())
            self._active[active.id] = active

    def _refuse_misfits(self) -> None:
        """Ends requests that could never run, with the setting that stands in their way."""
        for active in list(self._active.values()):
            if active.allocated or active.allocations:
                continue
            length = active.request.prompt_len
            if self._pages_at_end(active) > self._config.num_pages:
                self._finish(active, f"needs {self._pages_at_end(active)} pages, num_pages is {self._config.num_pages}")
            elif self._config.chunk_tokens is None and length > self._config.max_num_tokens:
                self._finish(active, f"{length} prompt tokens exceed max_num_tokens {self._config.max_num_tokens}")

    # ---- one pass ----

    def _run(self, batch: _Pass) -> None:
        context = [active.request for active in batch.context]
        self.driver.handle_metadata(context, [active.request for active in batch.generation], self)
        loads = batch.requests or (self._config.load_on_empty and self._parked())
        self._guard.arm()
        if loads:
            self.driver.start_load(self.stream)
        self._guard.check([*batch.context, *self._parked()], "while loads started")
        if batch.requests:
            self._forward(batch)
        if loads:
            self.driver.wait_for_save(self.stream)
        self._guard.check_written(batch.context)
        for active in batch.requests:
            self._advance(active, batch)

    def _forward(self, batch: _Pass) -> None:
        spans = [self._span(active) for active in batch.requests]
        hidden = [self._model.embed(span) for span in spans]
        hooks = self._config.layer_hooks
        called = hooks == "always" or (hooks == "prefill" and bool(batch.context))
        for layer in range(self._config.model.num_layers):
            if called:
                self.driver.before_layer(layer, self.stream)
            hidden = [self._model.layer(layer, part, span) for part, span in zip(hidden, spans, strict=True)]
            if called:
                self.driver.after_layer(layer, self.stream)
        values = []
        for active, part in zip(batch.requests, hidden, strict=True):
            if active.generating or active.request.is_last_context_chunk:
                token, score = self._model.sample(part)
                active.last_token = token
                batch.sampled.append(active)
                values += [token.double(), score.double()]
        if values:
            batch.outcome = Download(values, self.stream)
        if self._on_pass_end is not None:
            self._on_pass_end()

    def _span(self, active: Active) -> Span:
        if active.generating:
            count, tokens = 1, active.last_token
        else:
            count = active.request.context_chunk_size
            known = active.request.get_tokens(0)[active.position : active.position + count]
            tokens = upload(known, self._device)
        assert tokens is not None
        blocks = -(-(active.position + count) // self._config.tokens_per_block)
        by_group = [pages[:blocks] for pages in self.manager.pages(active.id)]
        for pages, pool in zip(by_group, self.manager.pools, strict=True):
            first = first_needed(active.position, pool.window, self._config.tokens_per_block)
            if len(pages) < blocks or min(pages[first:]) < 0:
                raise RuntimeError(f"request {active.id} lacks a page that its pass needs")
        uploaded = [upload(pages, self._device) for pages in by_group]
        groups = [self.manager.group_of_layer(layer) for layer in range(self._config.model.num_layers)]
        return Span(tokens, active.position, [uploaded[group] for group in groups], active.identity)

    def _advance(self, active: Active, batch: _Pass) -> None:
        """Takes note that a pass over a request is enqueued."""
        request, active.load_range = active.request, range(0)
        if active.generating:
            active.position += 1
        else:
            count = request.context_chunk_size
            ends = request.is_last_context_chunk
            active.position += count
            active.computed += count
            request.context_current_position = active.position
            if ends:
                request.state = LlmRequestState.GENERATION_IN_PROGRESS
        if not isinstance(self.manager, ManagerV1) or (active in batch.context and active.generating):
            self._commit(active)

    def _commit(self, active: Active) -> None:
        known = min(active.position, active.request.get_num_tokens())
        self.manager.commit(active.id, active.block_keys(known // self._config.tokens_per_block))

    def _process(self, batch: _Pass) -> None:
        """Takes in what a pass sampled, which waits for the pass, and ends the requests that it completes."""
        if batch.outcome is None:
            return
        self.progressed = True
        values = batch.outcome.values()
        for index, active in enumerate(batch.sampled):
            if active.done:
                continue
            active.request.append(int(values[2 * index]))
            active.scores.append(values[2 * index + 1])
            if active.first_token_at is None:
                active.first_token_at = self._clock()
            if active.generated >= active.request.max_new_tokens:
                self._finish(active, None)

    # ---- ends ----

    def _finish(self, active: Active, error: str | None) -> None:
        active.done = True
        active.request.state = LlmRequestState.GENERATION_COMPLETE
        if active.allocated:
            self._commit(active)
        del self._active[active.id]
        if self.driver.request_finished(active.request, self.manager.pages(active.id)):
            self._held[active.id] = active
        elif active.allocated:
            self.manager.release(active.id)
        self._results.append(active.result(error))

    def _end_cancelled(self) -> None:
        for active in list(self._active.values()):
            active.steps += 1
            due = active.spec.cancel_after is not None and active.steps >= active.spec.cancel_after
            if (due or active.id in self._cancelled) and not self.driver.is_parked(active.id):
                self._finish(active, "cancelled")
        self._cancelled &= set(self._active)

    def _settle_transfers(self) -> None:
        saved, loaded = self.driver.get_finished()
        self.progressed = self.progressed or bool(saved or loaded)
        for request in saved:
            if self._held.pop(request.request_id).allocated:
                self.manager.release(request.request_id)
        for request in loaded:
            active = self._active[request.request_id]
            self._guard.check_written([active])
            active.load_range = range(0)

    def _parked(self) -> list[Active]:
        return [active for active in self._active.values() if self.driver.is_parked(active.id)]

    # ---- what reports are made from ----

    def pages(self, request_id: int) -> list[list[int]]:
        """A request's pages by layer group."""
        return self.manager.pages(request_id)

    def block_hashes(self, request: LlmRequest) -> list[int]:
        """A chain of hashes of the request's whole blocks, such as a V1 cache reports."""
        chain, tokens, block = [], request.get_tokens(0), self._config.tokens_per_block
        value = 0
        for start in range(0, len(tokens) // block * block, block):
            value = hash((value, tuple(tokens[start : start + block]))) & 0xFFFF_FFFF_FFFF_FFFF
            chain.append(value)
        return chain

    def check_clean(self) -> None:
        """Raises ContractError when an idle engine still has pages in use, but for those of a dummy."""
        used = [pool.used for pool in self.manager.pools]
        holders = [request_id for request_id in self.manager.requests if request_id < FIRST_DUMMY_ID]
        if self.idle and (holders or (any(used) and not self._active)):
            raise ContractError(f"pages are in use though no request is active: {used} by group, of {holders}")
