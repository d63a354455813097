"""Prompts from text and JSON lines. A bad line is an item of its own: it must not stop the others."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

Format = Literal["auto", "text", "jsonl"]
MAX_LINE_CHARS = 64 << 20
_JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")
_CONTENTS = ("prompt", "messages", "prompt_token_ids")


@dataclass(frozen=True, slots=True)
class Prompt:
    """`source` is `file:line`. Exactly one of `text`, `messages`, `token_ids` is set.

    `lora` is what names the adapter in `identity.adapters`; `lora_request` goes to the server as it stands.
    """

    source: str
    text: str | None = None
    messages: tuple[dict[str, Any], ...] | None = None
    token_ids: tuple[int, ...] | None = None
    cache_salt: str | None = None
    lora: str | None = None
    lora_request: dict[str, Any] | None = None
    tools: tuple[dict[str, Any], ...] | None = None


@dataclass(frozen=True, slots=True)
class BadPrompt:
    """A line that is no prompt, and why."""

    source: str
    reason: str


def read_prompts(name: str, lines: Iterable[str], kind: Format = "auto") -> Iterator[Prompt | BadPrompt]:
    """The prompts of one file; empty lines are skipped. `auto`: JSON lines by the name's ending, or by a first "{"."""
    json_lines = kind == "jsonl" or (kind == "auto" and name.endswith(_JSON_SUFFIXES))
    undecided = kind == "auto" and not json_lines
    for number, line in enumerate(lines, 1):
        text = line.rstrip("\r\n")
        if not text.strip():
            continue
        if undecided:
            json_lines, undecided = text.lstrip().startswith("{"), False
        source = f"{name}:{number}"
        yield _from_json(source, text) if json_lines else Prompt(source, text=text)


def _from_json(source: str, text: str) -> Prompt | BadPrompt:
    if len(text) > MAX_LINE_CHARS:
        return BadPrompt(source, "the line is too long")
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError):
        return BadPrompt(source, "not JSON")
    if not isinstance(fields, dict):
        return BadPrompt(source, "not a JSON object")
    given = [name for name in _CONTENTS if fields.get(name) is not None]
    if len(given) != 1:
        return BadPrompt(source, f"needs one of {', '.join(_CONTENTS)}" + (f", not {len(given)}" if given else ""))
    try:
        return _prompt(source, fields, given[0])
    except ValueError as error:
        return BadPrompt(source, str(error))


def _prompt(source: str, fields: dict[str, Any], given: str) -> Prompt:
    salt = fields.get("cache_salt")
    if salt is not None and not isinstance(salt, str):
        raise ValueError("cache_salt is not a string")
    named = [value for name in ("lora", "lora_request") if (value := fields.get(name)) is not None]
    if len(named) > 1:
        raise ValueError("give lora or lora_request, not both")
    lora, request = _lora(named[0] if named else None)
    content = fields[given]
    common = Prompt(source, cache_salt=salt, lora=lora, lora_request=request)
    if given == "prompt" and isinstance(content, str):
        return _with(common, text=content)
    if given == "messages":
        tools = fields.get("tools")
        return _with(common, messages=_objects("messages", content), tools=_objects("tools", tools) if tools else None)
    return _with(common, token_ids=_token_ids(given, content))


def _with(prompt: Prompt, **changes: Any) -> Prompt:
    from dataclasses import replace

    return replace(prompt, **changes)


def _objects(name: str, value: Any) -> tuple[dict[str, Any], ...]:
    if not isinstance(value, list) or not value or not all(isinstance(each, dict) for each in value):
        raise ValueError(f"{name} is not a list of objects")
    return tuple(value)


def _token_ids(name: str, value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or not value or not all(type(each) is int and each >= 0 for each in value):
        raise ValueError(f"{name} is neither a string nor a list of token ids")
    return tuple(value)


def _lora(value: Any) -> tuple[str | None, dict[str, Any] | None]:
    """An id (what the server calls `lora_int_id`), or TensorRT-LLM's `lora_request` object that holds one."""
    if value is None:
        return None, None
    if isinstance(value, dict) and type(value.get("lora_int_id")) is int:
        return str(value["lora_int_id"]), value
    if type(value) is int or (isinstance(value, str) and value):
        return str(value), {"lora_name": str(value), "lora_int_id": int(value)} if str(value).isdigit() else None
    raise ValueError("lora is neither an adapter's id nor an object with lora_int_id")
