"""The leader's decisions: what to offer, load and save. Apart from the runtime's interface, so it runs without one."""

from __future__ import annotations

import logging
import secrets
from typing import Any

from s3kv.connector.blocksize import BlockSizeProof
from s3kv.connector.guard import PromiseBroken, Troubles
from s3kv.connector.layout import PagedCache
from s3kv.connector.metadata import ConnectorMeta
from s3kv.connector.ports import Leader
from s3kv.connector.requests import Ending, Lease, MakeChain, Offered, RequestState, RequestTracker
from s3kv.connector.scope import has_unnamed_media, request_identity, shows_media
from s3kv.identity import Chain, MediaSpan, NamespaceSpec, Scope
from s3kv.settings import Settings

logger = logging.getLogger("s3kv.connector")

_DUMMY = ("is_dummy_request", "is_dummy", "is_attention_dp_dummy", "is_cuda_graph_dummy")
"""How releases mark requests of the runtime's own, which pad a batch."""


class Planner:
    """Made once the cache is registered. All calls come from the executor's thread."""

    def __init__(
        self,
        settings: Settings,
        namespace: NamespaceSpec,
        cache: PagedCache,
        leader: Leader,
        *,
        offers: bool = True,
        text_only: bool = False,
        troubles: Troubles,
    ) -> None:
        """`offers` False: save only. `text_only`: the model is known to take token ids and nothing else."""
        self.leader = leader
        self._namespace = namespace
        self._block = namespace.tokens_per_block
        self._adapters = settings.identity.adapters
        self._server_id = secrets.token_hex(16)
        self._offers = offers
        self._text_only = text_only
        self._told = False
        self._min_tokens = max(1, settings.load.min_tokens)
        self._troubles = troubles
        self.tracker = RequestTracker(
            self._block,
            len(cache.groups),
            save=settings.save.enabled,
            save_generated=settings.save.generated,
            min_priority=settings.save.min_priority,
            proof=BlockSizeProof(self._block, proved=cache.tokens_per_block is not None),
            troubles=troubles,
        )

    def match(self, request: Any, computed: int) -> tuple[int, bool]:
        """Tokens to offer beyond the `computed` ones on the device, and whether to park the request for them."""
        state = self._begin(request)
        if state is None or not self._offers or not self._tells(request):
            return 0, False
        last_block = (self._prompt_length(request, state) - 1) // self._block  # one token is left to compute
        first_block = computed // self._block
        if not 0 <= first_block < last_block:
            return 0, False
        offer = self.leader.match(state.chain.hashes[:last_block], first_block=first_block)
        # A device match that ends inside a block is completed to the block's end: see requests.py.
        blocks = len(offer.slots) or offer.pending
        tokens = (first_block + blocks) * self._block - computed
        if not blocks or tokens < self._min_tokens:
            self._release((offer.lease, offer.epoch))
            return 0, False
        parked = offer.pending > 0
        state.offered = Offered(
            start=computed,
            end=computed + tokens,
            first_block=first_block,
            blocks=blocks,
            slots=offer.slots,
            lease=offer.lease,
            epoch=offer.epoch,
            parked=parked,
        )
        return tokens, parked

    def allocated(self, request: Any, pages: list[list[int]]) -> None:
        """V1 shows the whole request here first. Raises PromiseBroken for one that should have been offered nothing."""
        request_id = int(request.request_id)
        if has_unnamed_media(request):
            self._leave_alone(request_id)
        self.tracker.allocated(request, request_id, pages)

    def cancel(self, request: Any, start: int, end: int) -> None:
        self.tracker.cancel(int(request.request_id), start, end)

    def plan(self, output: Any) -> ConnectorMeta | None:
        """None when there is nothing to do, which is cheapest to broadcast. Raises PromiseBroken."""
        step = self.tracker.step(output.new_requests, output.cached_requests)
        for lease in step.released:
            self._release(lease)
        dropped = self.tracker.take_dropped()
        if not (step.loads or step.parked or step.saves or dropped):
            return None
        return ConnectorMeta(tuple(step.loads), tuple(step.parked), tuple(step.saves), dropped)

    def finish(self, request: Any) -> bool:
        """True holds the pages: a background load may still write them."""
        ending: Ending = self.tracker.finish(int(request.request_id))
        if ending.released is not None:
            self._release(ending.released)
        if ending.tip is not None:
            self.leader.finished(ending.tip)
        return ending.hold

    def _tells(self, request: Any) -> bool:
        """Whether what identifies the request is all of it: V1's native view has no media without hashes."""
        if self._text_only or shows_media(request):
            return True
        if not self._told:
            self._told = True
            logger.warning(
                "this model may take images or sound, which V1 does not show before a prompt's KV is allocated: s3kv "
                "offers nothing to requests without multimodal hashes (kv_cache_config.use_kv_cache_manager_v2 does)"
            )
        return False

    def _leave_alone(self, request_id: int) -> None:
        """A tracked request turns out to have media without hashes: its blocks are no text's, and nobody's to share."""
        state = self.tracker.get(request_id)
        if state is None:
            return
        self._text_only = False
        offered = state.offered
        self._release(self.tracker.finish(request_id).released)
        if offered is not None:
            raise PromiseBroken(
                f"request {request_id} was offered KV of its text, and has media that its checkpoint's files do not "
                "speak of: set kv_cache_config.use_kv_cache_manager_v2, which shows them in time"
            )

    def _begin(self, request: Any) -> RequestState | None:
        """Track a request, from its query on. None for one that must be left alone."""
        request_id = int(request.request_id)
        tokens = _tokens(request)
        identity = None
        if tokens and not any(getattr(request, name, False) is True for name in _DUMMY):
            identity = request_identity(request, self._adapters, self._server_id, len(tokens))
        if identity is None:
            # Under this id there may be an earlier request, or an earlier run of this one.
            self._release(self.tracker.finish(request_id).released)
            return None
        scope, media = identity
        state, released = self.tracker.begin(request_id, self._chain_maker(scope, media), tokens, scope.cache_salt)
        self._release(released)
        return state

    def _chain_maker(self, scope: Scope, media: tuple[MediaSpan, ...]) -> MakeChain:
        def make(salt: str | None) -> Chain:
            chosen = scope if salt is None else Scope(salt, scope.adapter)
            return Chain(self._namespace.digest, self._block, scope=chosen, media=media)

        return make

    def _prompt_length(self, request: Any, state: RequestState) -> int:
        """Tokens of the prompt, of which one at least must be computed; after a replay it includes generated ones."""
        stated = getattr(request, "prompt_len", None)
        known = state.prompt_length
        return min(stated, known) if isinstance(stated, int) and stated > 0 else known

    def _release(self, lease: Lease | None) -> None:
        if lease is not None and lease[0]:
            self.leader.release(*lease)


def _tokens(request: Any) -> list[int]:
    """All token ids of beam 0; empty for a request that has none (embeddings alone, say)."""
    get = getattr(request, "get_tokens", None)
    tokens = get(0) if get is not None else None
    if tokens is None:
        return []
    as_list = getattr(tokens, "tolist", None)  # arrays and tensors: plain numbers
    return as_list() if as_list is not None else list(tokens)
