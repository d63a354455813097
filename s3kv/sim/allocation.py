"""The first pages of a request: the device's own match, the connector's offer, and how much of it is honoured."""

from __future__ import annotations

from s3kv.sim.active import Active
from s3kv.sim.config import SimConfig
from s3kv.sim.driver import Driver
from s3kv.sim.llm_request import LlmRequestState
from s3kv.sim.managers import CacheManager
from s3kv.sim.reuse import Match


def match_on_device(active: Active, manager: CacheManager) -> Match:
    """What the device holds of the prompt; at least one token is left to compute."""
    request, block = active.request, manager.tokens_per_block
    blocks = request.prompt_len // block
    tail = active.key_of(request.get_tokens(0)[blocks * block : request.prompt_len], blocks * block)
    return manager.lookup(active.scope, active.block_keys(blocks), tail, request.prompt_len - 1)


def start_v1(active: Active, manager: CacheManager, driver: Driver, config: SimConfig, chunk: int) -> bool:
    """Gives a request the pages of its whole prompt. The offer is honoured in full, or, with reuse off, not at all."""
    match = _begin(active, manager)
    if not manager.grow(active.id, active.request.prompt_len, 0):
        manager.release(active.id)
        return False
    offered, is_async = driver.query(active.request, match.tokens)
    honoured = offered if config.reuse else 0
    active.request.set_prepopulated(match.tokens + honoured, chunk)
    _settle(active, manager, driver, match.tokens, honoured, offered, is_async)
    return True


def start_v2(active: Active, manager: CacheManager, driver: Driver, config: SimConfig, chunk: int) -> bool:
    """Gives a request the pages of its first chunk, and of as much of the offer as can be honoured.

    False, with nothing changed and the connector not asked, when there is no room for the chunk.
    """
    match = _begin(active, manager)
    active.request.set_prepopulated(match.tokens, chunk)
    if not manager.grow(active.id, match.tokens + active.request.context_chunk_size, match.tokens):
        manager.release(active.id)
        active.request.set_prepopulated(0, active.request.prompt_len)
        return False
    told = match.tokens
    if driver.can_cancel_loads:
        told = config.offers.asked_with(active.id, active.allocations, match.tokens, manager.tokens_per_block)
    offered, is_async = driver.query(active.request, told)
    end = told + offered
    honoured = _honour_v2(active, manager, config, match.tokens, max(0, end - match.tokens), chunk)
    if offered and driver.can_cancel_loads:
        driver.cancel_load(active.request, told, min(match.tokens, end))
        driver.cancel_load(active.request, max(match.tokens + honoured, told), end)
    active.request.set_prepopulated(match.tokens + honoured, chunk)
    promised = honoured if driver.can_cancel_loads else max(0, end - match.tokens)
    _settle(active, manager, driver, match.tokens, honoured, promised, is_async)
    return True


def _begin(active: Active, manager: CacheManager) -> Match:
    """Takes the pages that the device has; none of them where there is no room to copy a part of a block."""
    match = match_on_device(active, manager)
    if not manager.begin(active.id, active.scope, match):
        match = Match()
        manager.begin(active.id, active.scope, match)
    return match


def _honour_v2(active: Active, manager: CacheManager, config: SimConfig, first: int, offered: int, chunk: int) -> int:
    """How much of an offer beyond `first` is honoured: what the policy says, as far as there are pages."""
    block, request = manager.tokens_per_block, active.request
    honoured = 0
    if config.reuse:
        honoured = config.offers.honoured(active.id, active.allocations, first, offered, block)
    while honoured > 0:
        request.set_prepopulated(first + honoured, chunk)
        if manager.grow(active.id, first + honoured + request.context_chunk_size, first + honoured):
            break
        honoured = max(0, (first + honoured - 1) // block * block - first)
    return honoured


def _settle(
    active: Active,
    manager: CacheManager,
    driver: Driver,
    on_device: int,
    honoured: int,
    promised: int,
    is_async: bool,
) -> None:
    """Records an allocation. `promised`: what a background load will write, beyond what is honoured of it."""
    request = active.request
    active.position = on_device + honoured
    manager.trim(active.id, active.position)
    active.load_range = range(on_device, on_device + (promised if is_async else honoured))
    active.allocated, active.allocations = True, active.allocations + 1
    active.reused, active.loaded = active.reused + on_device, active.loaded + honoured
    driver.honour(request, honoured, is_async)
    driver.allocated(request, manager.pages(active.id))
    if is_async:
        request.state = LlmRequestState.DISAGG_GENERATION_TRANS_IN_PROGRESS
