"""Calls a connector: on the leader and on every rank, in the contract's order, and checks every answer.

The scheduler lives on rank 0 and its answers are broadcast; under attention DP every rank has its own and nothing is.
An error of the leader's is raised on every rank. What a call breaks is raised as ContractError, save the answers of
`get_finished`, which raise KeyError as in the runtime.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from s3kv.sim.comm import Communicator
from s3kv.sim.errors import ContractError
from s3kv.sim.interface import EarlyRequestData, RequestData, SchedulerOutput
from s3kv.sim.llm_request import LlmRequest, LlmRequestState

Answer = TypeVar("Answer")
Pages = list[list[int]]


@dataclass
class _Reported:
    """How much of a request has been reported."""

    tokens: int = 0
    blocks: list[int] = field(default_factory=list)


@dataclass
class _Transfers:
    """Requests whose background saves or loads are under way, by id."""

    saving: dict[int, LlmRequest] = field(default_factory=dict)
    loading: dict[int, LlmRequest] = field(default_factory=dict)


@dataclass(frozen=True)
class CallRecord:
    """One call into the connector: its name and the arguments worth looking at."""

    name: str
    detail: Any = None


class ConnectorDriver:
    """One rank's end of a connector. Not thread-safe: the executor's thread makes every call.

    grouped: whether pages are reported by layer group (V2) or as one flat list (V1).
    early: the shape of the early releases. trace: records every call, in order. Building it is collective.
    """

    def __init__(
        self,
        worker: Any,
        scheduler: Any | None,
        comm: Communicator,
        *,
        attention_dp: bool,
        grouped: bool,
        early: bool,
        trace: bool = False,
    ) -> None:
        self.worker, self.scheduler = worker, scheduler
        self._comm, self._attention_dp, self._grouped, self._early = comm, attention_dp, grouped, early
        self.trace: list[CallRecord] | None = [] if trace else None
        self._new, self._pending, self._local = _Transfers(), _Transfers(), _Transfers()
        self._reported: dict[int, _Reported] = {}
        self._sync_loads: dict[int, int] = {}
        self.can_cancel_loads = bool(self._on_leader(lambda scheduler: hasattr(scheduler, "cancel_load")))

    def ignores(self, request: LlmRequest) -> bool:
        """Whether the connector never hears of a request: dummies under attention DP."""
        return self._attention_dp and request.is_dummy_request

    def query(self, request: LlmRequest, computed: int) -> tuple[int, bool]:
        """Step 1: what the connector offers beyond `computed` tokens."""
        if self.ignores(request):
            return 0, False
        shown = request if self._grouped else request.bound_view(self._early)
        self._note("get_num_new_matched_tokens", (request.request_id, computed))
        answer = self._on_leader(lambda scheduler: scheduler.get_num_new_matched_tokens(shown, computed))
        tokens, is_async = _checked_offer(answer)
        if tokens and computed + tokens >= request.prompt_len:
            raise ContractError(
                f"request {request.request_id}: {computed} tokens on the device and {tokens} offered leave none of "
                f"{request.prompt_len} to compute"
            )
        return tokens, is_async

    def cancel_load(self, request: LlmRequest, start: int, end: int) -> None:
        """Step 2: takes the tokens `[start, end)` out of an offer, at its head or its tail."""
        if start < end and not self.ignores(request):
            self._note("cancel_load", (request.request_id, start, end))
            self._on_leader(lambda scheduler: scheduler.cancel_load(request, start, end))

    def honour(self, request: LlmRequest, tokens: int, is_async: bool) -> None:
        """Step 2: records what of an offer is honoured, and parks the request of a background load."""
        if self.ignores(request):
            return
        request.py_num_connector_matched_tokens = tokens
        if is_async:
            self._new.loading[request.request_id] = request
        else:
            self._sync_loads[request.request_id] = tokens

    def allocated(self, request: LlmRequest, pages: Pages) -> None:
        """Step 3: tells the leader the pages of a request."""
        if self.ignores(request):
            return
        self._note("update_state_after_alloc", (request.request_id, pages))
        if self.scheduler is None:
            return
        if self._grouped:
            self.scheduler.update_state_after_alloc_by_layer_group(request, pages)
        else:
            self.scheduler.update_state_after_alloc(request, pages[0])

    def is_parked(self, request_id: int) -> bool:
        """Whether a background load of a request is under way."""
        return any(request_id in transfers.loading for transfers in (self._new, self._pending, self._local))

    def forget(self, request: LlmRequest) -> None:
        """Makes the next report of a request its first: its pages are gone."""
        self._reported.pop(request.request_id, None)
        self._sync_loads.pop(request.request_id, None)

    def handle_metadata(self, context: Sequence[LlmRequest], generation: Sequence[LlmRequest], cache: Any) -> None:
        """Steps 4 to 6: reports the batch to the leader, and gives what it answers to every worker, pickled."""
        output = SchedulerOutput()
        for request in (*context, *generation):
            if self.ignores(request) or request.request_id in self._new.loading:
                continue
            is_new = request.request_id not in self._reported
            (output.new_requests if is_new else output.cached_requests).append(self._report(request, cache))
        self._sync_loads.clear()
        self._note("build_connector_meta", output)
        payload = self._on_leader(lambda scheduler: pickle.dumps(scheduler.build_connector_meta(output)))
        self.worker.bind_connector_meta(pickle.loads(payload))

    def start_load(self, stream: Any) -> None:
        """Step 7."""
        self._note("start_load_kv")
        self.worker.start_load_kv(stream)

    def wait_for_save(self, stream: Any) -> None:
        """Step 9."""
        self._note("wait_for_save")
        self.worker.wait_for_save(stream)

    def request_finished(self, request: LlmRequest, pages: Pages) -> bool:
        """Step 10: True when the pages must stay until every rank has named the request."""
        if self.ignores(request):
            return False
        self._note("request_finished", (request.request_id, pages))
        if self._grouped:
            held = self._on_leader(lambda scheduler: scheduler.request_finished_by_layer_group(request, pages))
        else:
            held = self._on_leader(lambda scheduler: scheduler.request_finished(request, pages[0]))
        if not isinstance(held, bool):
            raise ContractError(f"request_finished answered {held!r}, not a bool")
        self._reported.pop(request.request_id, None)
        if held:
            self._new.saving[request.request_id] = request
            request.state = LlmRequestState.DISAGG_CONTEXT_TRANS_IN_PROGRESS
        return held

    def get_finished(self) -> tuple[list[LlmRequest], list[LlmRequest]]:
        """Step 11: the requests whose saves, and whose loads, are complete on every rank.

        Raises KeyError when the worker names an id that it was not given, or names one twice.
        """
        saving, loading = list(self._new.saving), list(self._new.loading)
        self._pending.saving.update(self._new.saving)
        self._pending.loading.update(self._new.loading)
        self._new = _Transfers()
        self._note("get_finished", (saving, loading))
        saved, loaded = self.worker.get_finished(saving, loading)
        for request_id in saved:
            self._local.saving[request_id] = self._pending.saving.pop(request_id)
        for request_id in loaded:
            self._local.loading[request_id] = self._pending.loading.pop(request_id)
        local = (list(self._local.saving), list(self._local.loading))
        everywhere = [local] if self._attention_dp else self._comm.allgather(local)
        done = [[i for i in local[kind] if all(i in answer[kind] for answer in everywhere)] for kind in (0, 1)]
        return [self._local.saving.pop(i) for i in sorted(done[0])], [self._resume(i) for i in sorted(done[1])]

    def forward_pass_callable(self) -> Callable[[], None] | None:
        """What the worker wants called at the end of every pass, if anything."""
        register = getattr(self.worker, "register_forward_pass_callable", None)
        hook: Callable[[], None] | None = None if register is None else register()
        return hook

    def before_layer(self, layer: int, stream: Any) -> None:
        """Step 8, just before a layer is enqueued."""
        self.worker.wait_for_layer_load(layer, stream)

    def after_layer(self, layer: int, stream: Any) -> None:
        """Step 8, just after a layer is enqueued."""
        self.worker.save_kv_layer(layer, stream)

    def shutdown(self) -> None:
        """Ends both halves, where they have a way to be ended."""
        for half in (self.worker, self.scheduler):
            end = getattr(half, "shutdown", None)
            if end is not None:
                end()

    def waits(self) -> bool:
        """Whether any background load or save is under way."""
        return any(part.saving or part.loading for part in (self._new, self._pending, self._local))

    def _resume(self, request_id: int) -> LlmRequest:
        request = self._local.loading.pop(request_id)
        request.state = LlmRequestState.CONTEXT_INIT
        return request

    def _report(self, request: LlmRequest, cache: Any) -> EarlyRequestData:
        reported = self._reported.setdefault(request.request_id, _Reported())
        tokens, pages = request.get_tokens(0), cache.pages(request.request_id)
        new_tokens, new_blocks = tokens[reported.tokens :], []
        for group, ids in enumerate(pages):
            if group == len(reported.blocks):
                reported.blocks.append(0)
            new_blocks.append(ids[reported.blocks[group] :])
            reported.blocks[group] = len(ids)
        reported.tokens = len(tokens)
        if request.state is LlmRequestState.CONTEXT_INIT:
            position = request.context_current_position - self._sync_loads.get(request.request_id, 0)
            scheduled = min(request.context_remaining_length, request.context_chunk_size)
        else:
            position, scheduled = len(tokens) - 1, 1
        flat = new_blocks[0] if len(new_blocks) == 1 else []
        if self._early:
            return EarlyRequestData(request.request_id, new_tokens, flat, position, scheduled)
        return self._later_report(
            request, cache, EarlyRequestData(request.request_id, new_tokens, flat, position, scheduled), new_blocks
        )

    def _later_report(self, request: LlmRequest, cache: Any, data: EarlyRequestData, new_blocks: Pages) -> RequestData:
        retention = None if self._grouped else request.kv_cache_retention_config
        return RequestData(
            **vars(data),
            block_hashes=[] if self._grouped else cache.block_hashes(request),
            priorities=None if retention is None else [retention["priority"]] * len(data.new_block_ids),
            cache_salt=request.cache_salt,
            new_block_ids_by_layer_group=new_blocks if self._grouped else [],
        )

    def _on_leader(self, call: Callable[[Any], Answer]) -> Answer:
        if self._attention_dp or self._comm.size == 1:
            return call(self.scheduler)
        outcome: tuple[str, Any] = ("", None)
        if self.scheduler is not None:
            try:
                outcome = ("answer", call(self.scheduler))
            except Exception as error:
                self._comm.broadcast(("error", f"{type(error).__name__}: {error}"))
                raise
        kind, value = self._comm.broadcast(outcome)
        if kind == "error":
            raise ContractError(f"the leader stopped: {value}")
        answer: Answer = value
        return answer

    def _note(self, name: str, detail: Any = None) -> None:
        if self.trace is not None:
            self.trace.append(CallRecord(name, detail))


def _checked_offer(answer: Any) -> tuple[int, bool]:
    """Raises ContractError for an answer that the runtime would not take."""
    if not (isinstance(answer, tuple) and len(answer) == 2):
        raise ContractError(f"get_num_new_matched_tokens answered {answer!r}, not (tokens, is_async)")
    tokens, is_async = answer
    if not isinstance(tokens, int) or isinstance(tokens, bool) or not isinstance(is_async, bool):
        raise ContractError(f"get_num_new_matched_tokens answered {answer!r}, not (int, bool)")
    if tokens < 0:
        raise ContractError(f"get_num_new_matched_tokens offered {tokens} tokens")
    if tokens == 0 and is_async:
        raise ContractError("get_num_new_matched_tokens answered (0, True): nothing can be loaded in the background")
    return tokens, is_async


class NoConnector:
    """Stands where a `ConnectorDriver` would, in an engine without a connector."""

    can_cancel_loads = False
    trace: list[CallRecord] | None = None

    def query(self, request: LlmRequest, computed: int) -> tuple[int, bool]:
        """Offers nothing."""
        return 0, False

    def cancel_load(self, request: LlmRequest, start: int, end: int) -> None:
        """Does nothing."""

    def honour(self, request: LlmRequest, tokens: int, is_async: bool) -> None:
        """Does nothing."""

    def allocated(self, request: LlmRequest, pages: Pages) -> None:
        """Does nothing."""

    def is_parked(self, request_id: int) -> bool:
        """Nothing is ever loaded."""
        return False

    def forget(self, request: LlmRequest) -> None:
        """Does nothing."""

    def handle_metadata(self, context: Sequence[LlmRequest], generation: Sequence[LlmRequest], cache: Any) -> None:
        """Does nothing."""

    def start_load(self, stream: Any) -> None:
        """Does nothing."""

    def wait_for_save(self, stream: Any) -> None:
        """Does nothing."""

    def request_finished(self, request: LlmRequest, pages: Pages) -> bool:
        """Holds nothing."""
        return False

    def get_finished(self) -> tuple[list[LlmRequest], list[LlmRequest]]:
        """Nothing is ever under way."""
        return [], []

    def forward_pass_callable(self) -> Callable[[], None] | None:
        """Nothing to call."""
        return None

    def before_layer(self, layer: int, stream: Any) -> None:
        """Does nothing."""

    def after_layer(self, layer: int, stream: Any) -> None:
        """Does nothing."""

    def shutdown(self) -> None:
        """Does nothing."""

    def waits(self) -> bool:
        """Nothing is ever under way."""
        return False


Driver = ConnectorDriver | NoConnector
