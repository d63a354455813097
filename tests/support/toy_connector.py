"""A minimal connector for tests of the simulated runtime: correct, or broken in the one way that the settings name.

Settings are JSON in the environment variable TOY, so that rank processes have them too:
store: a name for an in-memory store, or a folder; load: "sync", "async" or "none"; hold: keep pages after the end;
polls: polls that a transfer takes (by rank: rank r takes (r + 1) * polls); bug: see the tests.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from dataclasses import dataclass, field
from pathlib import Path

import torch

try:
    from tensorrt_llm._torch.pyexecutor.connectors.kv_cache_connector import (
        KvCacheConnectorScheduler,
        KvCacheConnectorWorker,
    )
except ImportError:
    from tensorrt_llm._torch.pyexecutor.kv_cache_connector import KvCacheConnectorScheduler, KvCacheConnectorWorker
from tensorrt_llm._utils import mpi_rank

STORES: dict[str, dict] = {}


def settings() -> dict:
    return {"store": "default", "load": "sync", "hold": False, "polls": 0, "bug": "", **json.loads(os.environ["TOY"])}


class Store:
    """Blocks by (key, group, rank), in memory or in a folder that outlives processes."""

    def __init__(self, name: str) -> None:
        self._folder = Path(name) if "/" in name else None
        self._memory = STORES.setdefault(name, {})

    def put(self, key: str, parts: list[torch.Tensor]) -> None:
        if self._folder is None:
            self._memory[key] = [part.cpu() for part in parts]
        else:
            torch.save([part.cpu() for part in parts], self._folder / f"{key}.new{threading.get_ident()}")
            (self._folder / f"{key}.new{threading.get_ident()}").rename(self._folder / key)

    def get(self, key: str) -> list[torch.Tensor] | None:
        if self._folder is None:
            return self._memory.get(key)
        path = self._folder / key
        return torch.load(path) if path.exists() else None

    def has(self, key: str) -> bool:
        return (self._folder / key).exists() if self._folder is not None else key in self._memory


@dataclass
class State:
    keys: list[str]
    identity: tuple
    ignored: bool = False
    tokens: list[int] = field(default_factory=list)
    pages: list[list[int]] = field(default_factory=list)
    offer: range = range(0)
    honoured: range = range(0)
    is_async: bool = False
    saved: int = 0


@dataclass
class Plan:
    loads: list = field(default_factory=list)  # (key, pages by group)
    saves: list = field(default_factory=list)
    parked: dict = field(default_factory=dict)  # request id -> loads
    poison: object = None


class ToyScheduler(KvCacheConnectorScheduler):
    supports_attention_dp = True

    def __init__(self, llm_args) -> None:
        super().__init__(llm_args)
        self.settings, self.states, self.parked = settings(), {}, {}
        self.bug = self.settings["bug"]
        self.block = llm_args.kv_cache_config.tokens_per_block
        self.ranks = 1 if llm_args.enable_attention_dp else llm_args.tensor_parallel_size
        self.store = Store(self.settings["store"])
        self.groups = 1
        self.calls: list[str] = []
        if self.bug == "raise:init":
            raise ValueError("asked to fail in init")

    def _fail(self, where: str) -> None:
        if self.bug == f"raise:{where}":
            raise ValueError(f"asked to fail in {where}")

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        self._fail("query")
        state = self.states[request.request_id] = self._new_state(request)
        bugs = {"zero_async": (0, True), "offer_all": (request.prompt_len - num_computed_tokens, False)}
        bugs |= {"negative": (-16, False), "not_tuple": 0, "not_int": (1.5, False)}
        if self.bug in bugs:
            return bugs[self.bug]
        if state.ignored or self.settings["load"] == "none":
            return 0, False
        usable = (request.prompt_len - 1) // self.block
        count = 0
        while count < usable and (self.bug == "offer_unverified" or self._stored(state.keys[count])):
            count += 1
        end = count * self.block
        if end <= num_computed_tokens:
            return 0, False
        state.offer = range(num_computed_tokens, end)
        state.is_async = self.settings["load"] == "async"
        return len(state.offer), state.is_async

    def cancel_load(self, request, start, end):
        offer = self.states[request.request_id].offer
        kept = range(end, offer.stop) if start <= offer.start else range(offer.start, start)
        self.states[request.request_id].offer = kept if kept else range(0)

    def update_state_after_alloc(self, request, block_ids):
        self._allocated(request, [block_ids])

    def request_finished(self, request, cache_block_ids):
        return self._finished(request)

    def update_state_after_alloc_by_layer_group(self, request, block_ids_by_layer_group):
        self._allocated(request, block_ids_by_layer_group)

    def request_finished_by_layer_group(self, request, cache_block_ids_by_layer_group):
        return self._finished(request)

    def _allocated(self, request, pages):
        self._fail("alloc")
        self.groups = len(pages)
        state = self.states.setdefault(request.request_id, None) or self._new_state(request)
        self.states[request.request_id] = state
        honoured = getattr(request, "py_num_connector_matched_tokens", len(state.offer))
        state.honoured = range(state.offer.start, state.offer.start + min(honoured, len(state.offer)))
        if state.is_async:
            whole = state.offer if len(state.offer) >= honoured else state.honoured
            self.parked[request.request_id] = self._loads(state, whole, pages)
            state.honoured = range(0)

    def _finished(self, request):
        self._fail("finished")
        self.states.pop(request.request_id, None)
        self.parked.pop(request.request_id, None)
        return 1 if self.bug == "not_bool" else self.settings["hold"]

    def build_connector_meta(self, scheduler_output):
        self._fail("meta")
        plan = Plan(parked=self.parked)
        self.parked = {}
        for data in scheduler_output.new_requests:
            state = self.states[data.request_id]
            state.tokens, state.pages = [], [[] for _ in range(self.groups)]
            self._take(state, data)
            plan.loads += self._loads(state, state.honoured, state.pages)
            state.saved = (data.computed_position + len(state.honoured)) // self.block
            self._save(plan, state, data, len(state.honoured))
        for data in scheduler_output.cached_requests:
            state = self.states[data.request_id]
            self._take(state, data)
            self._save(plan, state, data, 0)
        if self.bug == "unpicklable":
            plan.poison = lambda: None
        return plan if plan.loads or plan.saves or plan.parked or plan.poison else None

    def _take(self, state, data):
        state.tokens += data.new_tokens
        by_group = getattr(data, "new_block_ids_by_layer_group", None) or [data.new_block_ids]
        for pages, new in zip(state.pages, by_group, strict=True):
            pages += new

    def _loads(self, state, tokens, pages):
        if not tokens:
            return []
        ordinals = range(tokens.start // self.block, -(-tokens.stop // self.block))
        if self.bug == "skip_load":
            ordinals = ordinals[:-1]
        return [(state.keys[i], [group[i] for group in pages]) for i in ordinals]

    def _save(self, plan, state, data, honoured):
        if state.ignored:
            return
        complete = min(len(state.tokens), data.computed_position + honoured + data.num_scheduled_tokens) // self.block
        if self.bug == "early_save":
            complete = len(state.tokens) // self.block
        self._extend(state)
        for i in range(state.saved, complete):
            if all(i < len(group) for group in state.pages) and not self._stored(state.keys[i]):
                plan.saves.append((state.keys[i], [group[i] for group in state.pages]))
        state.saved = max(state.saved, complete)

    def _stored(self, key):
        groups = range(1 if self.bug == "no_group" else self.groups)
        return all(self.store.has(f"{key}-{g}-{r}") for g in groups for r in range(self.ranks))

    def _new_state(self, request):
        media = list(zip(request.multimodal_positions or [], request.multimodal_lengths or [], strict=True))
        unknown = getattr(request, "py_multimodal_data", None) is not None and request.multimodal_hashes is None
        hashes = request.multimodal_hashes or []
        salt = getattr(request, "cache_salt", getattr(request, "cache_salt_id", None))
        identity = (None if self.bug == "no_salt" else salt, None if self.bug == "no_adapter" else request.lora_task_id)
        state = State([], (*identity, str(media), str(hashes)), ignored=request.is_dummy_request or unknown)
        state.tokens = request.get_tokens(0)
        self._extend(state)
        return state

    def _extend(self, state):
        while (len(state.keys) + 1) * self.block <= len(state.tokens):
            i = len(state.keys)
            part = (state.keys[-1] if i else state.identity, state.tokens[i * self.block : (i + 1) * self.block])
            state.keys.append(hashlib.blake2b(repr(part).encode(), digest_size=16).hexdigest())


class ToyWorker(KvCacheConnectorWorker):
    supports_attention_dp = True

    def __init__(self, llm_args) -> None:
        super().__init__(llm_args)
        self.settings, self.rank = settings(), mpi_rank()
        self.dp = llm_args.enable_attention_dp
        self.bug, self.store = self.settings["bug"], Store(self.settings["store"])
        self.regions: list[list] = []
        self.waiting: dict[str, dict[int, int]] = {"save": {}, "load": {}}

    def _fail(self, where: str) -> None:
        if self.bug == f"raise:{where}" and self.rank == int(self.settings.get("rank", 0)):
            raise ValueError(f"asked to fail in {where}")

    def register_kv_caches(self, kv_cache_tensor):
        self._fail("register")
        self.regions = [[kv_cache_tensor.flatten(1).view(torch.uint8)]]

    def register_kv_cache_layout(self, layout):
        self._fail("register")
        groups = layout.groups
        self.regions = [
            [region.as_tensor() for region in (*group.regions, *getattr(group, "replicated_regions", ()))]
            for group in groups
        ]

    def bind_connector_meta(self, metadata):
        super().bind_connector_meta(metadata)
        self._fail("bind")
        if metadata is not None and self.bug != "never_loads":
            for loads in metadata.parked.values():
                self._load(loads)

    def start_load_kv(self, stream):
        self._fail("start_load")
        if self.bug == "stray_write":
            self.regions[0][0][-1] = 1
        if self._metadata is not None:
            self._load(self._metadata.loads)

    def wait_for_layer_load(self, layer_idx, stream):
        self._fail("before_layer")

    def save_kv_layer(self, layer_idx, stream):
        self._fail("after_layer")

    def wait_for_save(self, stream):
        self._fail("wait_for_save")
        if self._metadata is None:
            return
        for key, pages in self._metadata.saves:
            for group, page in enumerate(pages):
                if page >= 0 or self.bug == "ignore_minus_one":
                    parts = [region[page].clone() for region in self.regions[group]]
                    self.store.put(self._name(key, group), parts)

    def get_finished(self, finished_gen_req_ids, started_loading_req_ids):
        self._fail("get_finished")
        if self.bug == "unknown_id":
            return [], [12345]
        return self._poll("save", finished_gen_req_ids), self._poll("load", started_loading_req_ids)

    def _poll(self, kind, new):
        waiting = self.waiting[kind]
        waiting.update(dict.fromkeys(new, self.settings["polls"] * (self.rank + 1)))
        done = [i for i, polls in waiting.items() if polls <= 0]
        for i in list(waiting):
            waiting[i] -= 1
        if self.bug == "never_done":
            return []
        if self.bug != "named_twice":
            for i in done:
                del waiting[i]
        return done

    def _load(self, loads):
        for key, pages in loads:
            for group, page in enumerate(pages):
                parts = self.store.get(self._name(key, group))
                if parts is not None and (page >= 0 or self.bug == "ignore_minus_one"):
                    for region, part in zip(self.regions[group], parts, strict=True):
                        if region.shape[1] == part.shape[0]:
                            region[page].copy_(part)

    def _name(self, key, group):
        group = 0 if self.bug == "no_group" else group
        return f"{key}-{group}-{0 if self.dp else self.rank}"


class HalfScheduler(KvCacheConnectorScheduler):
    """Has one method of each set."""

    def build_connector_meta(self, scheduler_output):
        return None

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        return 0, False

    def update_state_after_alloc(self, request, block_ids):
        pass

    def request_finished_by_layer_group(self, request, cache_block_ids_by_layer_group):
        return False


class FlatScheduler(HalfScheduler):
    """Has the flat set alone."""

    def request_finished(self, request, cache_block_ids):
        return False

    if hasattr(KvCacheConnectorScheduler, "request_finished_by_layer_group"):
        request_finished_by_layer_group = KvCacheConnectorScheduler.request_finished_by_layer_group


class FlatWorker(ToyWorker):
    """Takes one pool tensor alone, and opts out of attention DP."""

    supports_attention_dp = False

    if hasattr(KvCacheConnectorWorker, "register_kv_cache_layout"):
        register_kv_cache_layout = KvCacheConnectorWorker.register_kv_cache_layout
