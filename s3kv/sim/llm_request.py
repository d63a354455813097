"""What a connector sees of a request: the attributes of TensorRT-LLM's `LlmRequest` that the interface exposes."""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Sequence
from typing import Any

from s3kv.sim.model import Media


class LlmRequestState(enum.Enum):
    """The states of a request that matter to a connector."""

    CONTEXT_INIT = 1
    DISAGG_GENERATION_TRANS_IN_PROGRESS = 2
    GENERATION_IN_PROGRESS = 3
    DISAGG_CONTEXT_TRANS_IN_PROGRESS = 4
    GENERATION_COMPLETE = 5


class LlmRequest:
    """A request in the runtime.

    The same object is given to every callback of a V2 cache. `bound_view` is what V1's query is given instead.
    """

    is_generation_only_request = False
    is_context_only_request = False
    is_child = False
    sampling_config = None

    def __init__(
        self,
        request_id: int,
        prompt: Sequence[int],
        max_new_tokens: int,
        *,
        tokens_per_block: int,
        cache_salt: str | None = None,
        lora_task_id: int | None = None,
        media: Sequence[tuple[Media, bool]] = (),
        priority: int | None = None,
        is_dummy: bool = False,
    ) -> None:
        self.request_id = self.py_request_id = request_id
        self.prompt_len = self.orig_prompt_len = self.py_prompt_len = self.py_orig_prompt_len = len(prompt)
        self.max_new_tokens = self.py_max_new_tokens = max_new_tokens
        self.cache_salt, self.cache_salt_id = cache_salt, _salt_id(cache_salt)
        self.lora_task_id = self.py_lora_task_id = lora_task_id
        self.is_dummy = self.is_dummy_request = is_dummy
        self.is_attention_dp_dummy = False
        self.kv_cache_retention_config = None if priority is None else {"priority": priority}
        self.state = LlmRequestState.CONTEXT_INIT
        self.context_current_position = self.prepopulated_prompt_len = 0
        self.context_chunk_size = len(prompt)
        self.py_num_connector_matched_tokens = 0
        self._tokens, self._block = list(prompt), tokens_per_block
        self._set_media(media)

    def get_tokens(self, beam: int = 0) -> list[int]:
        """A copy of the tokens, prompt and generated."""
        return list(self._tokens)

    def get_num_tokens(self, beam: int = 0) -> int:
        """The number of tokens, prompt and generated."""
        return len(self._tokens)

    def get_last_tokens(self, beam: int = 0) -> int:
        """The last token."""
        return self._tokens[-1]

    @property
    def context_remaining_length(self) -> int:
        """Prompt tokens not computed yet."""
        return self.prompt_len - self.context_current_position

    @property
    def is_first_context_chunk(self) -> bool:
        """Whether no chunk of the prompt has been computed."""
        return self.context_current_position == self.prepopulated_prompt_len

    @property
    def is_last_context_chunk(self) -> bool:
        """Whether the chunk that comes next ends the prompt."""
        return self.context_current_position + self.context_chunk_size >= self.prompt_len

    @property
    def is_finished(self) -> bool:
        """Whether generation is over."""
        return self.state is LlmRequestState.GENERATION_COMPLETE

    def append(self, token: int) -> None:
        """Adds a generated token."""
        self._tokens.append(token)

    def set_chunk(self, tokens: int) -> None:
        """Sets the next chunk; one that does not end the prompt is cut so that it ends at a block boundary."""
        tokens = min(tokens, self.context_remaining_length)
        end = self.context_current_position + tokens
        if end < self.prompt_len:
            end = max(end // self._block * self._block, self.context_current_position)
        self.context_chunk_size = end - self.context_current_position

    def set_prepopulated(self, position: int, chunk: int) -> None:
        """Starts the prompt at `position`, because the cache holds what is before."""
        self.prepopulated_prompt_len = self.context_current_position = position
        self.set_chunk(chunk)

    def pause(self) -> None:
        """Makes everything known so far the prompt of a replay, of which nothing is computed."""
        self.prompt_len = self.py_prompt_len = len(self._tokens)
        self.state = LlmRequestState.CONTEXT_INIT
        self.py_num_connector_matched_tokens = 0
        self.set_prepopulated(0, self.prompt_len)

    def bound_view(self, early: bool) -> BoundRequest:
        """The request as native code hands it over: fields bound there, and none that Python added."""
        return BoundRequest(self, early)

    def _set_media(self, media: Sequence[tuple[Media, bool]]) -> None:
        """As the PyTorch backend does: raw media stay with Python, and native code has their hashes, if anything."""
        hashed = bool(media) and all(has_hash for _, has_hash in media)
        self.multimodal_embedding = None
        self.multimodal_positions = [item.position for item, _ in media] if hashed else None
        self.multimodal_lengths = [item.length for item, _ in media] if hashed else None
        self.multimodal_hashes = [_digest(item.content) for item, _ in media] if hashed else None
        self.py_multimodal_data = {"image": [item.content for item, _ in media]} if media else None


_BOUND_NAMES = """
request_id prompt_len orig_prompt_len max_new_tokens get_tokens get_num_tokens get_last_tokens state
context_current_position context_chunk_size context_remaining_length prepopulated_prompt_len
is_first_context_chunk is_last_context_chunk is_generation_only_request is_context_only_request is_child
is_dummy_request lora_task_id cache_salt cache_salt_id multimodal_hashes multimodal_positions
multimodal_lengths multimodal_embedding sampling_config kv_cache_retention_config is_finished
"""
_BOUND = frozenset(_BOUND_NAMES.split())


class BoundRequest:
    """A request without the attributes that Python adds (`py_…`), and another object at every call.

    Early releases have no `cache_salt` either, only its number `cache_salt_id`.
    """

    def __init__(self, request: LlmRequest, early: bool) -> None:
        object.__setattr__(self, "_request", request)
        object.__setattr__(self, "_names", _BOUND - {"cache_salt"} if early else _BOUND)

    def __getattr__(self, name: str) -> Any:
        if name not in object.__getattribute__(self, "_names"):
            raise AttributeError(f"'LlmRequest' object has no attribute '{name}'")
        return getattr(object.__getattribute__(self, "_request"), name)


def _salt_id(salt: str | None) -> int | None:
    if salt is None:
        return None
    return int.from_bytes(hashlib.blake2b(salt.encode(), digest_size=8).digest(), "little")


def _digest(content: str) -> list[int]:
    """A 256-bit digest as eight signed 32-bit numbers, the form that `multimodal_hashes` has."""
    raw = hashlib.blake2b(content.encode(), digest_size=32).digest()
    return [int.from_bytes(raw[i : i + 4], "big", signed=True) for i in range(0, 32, 4)]
