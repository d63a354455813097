"""From prompts to token ids, as the server does it, by the model's own tokenizer from a local folder.

Nothing is downloaded, and no code from the folder is run: the chat template is rendered in jinja2's sandbox.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol

from s3kv.errors import ConfigError, S3kvError
from s3kv.warm.prompts import Prompt

BYTES = "bytes"
"""The tokenizer of the simulated engine: a token a byte."""
MAX_TEMPLATE_BYTES = 1 << 20


class Untokenized(S3kvError):
    """This prompt cannot be turned into tokens. The others can."""


class Tokenizer(Protocol):
    def encode(self, text: str) -> list[int]:
        """With the special tokens that the tokenizer adds to a prompt."""
        ...

    def chat(self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] | None) -> list[int]:
        """By the model's chat template, with the generation prompt. Raises Untokenized."""
        ...


def tokens_of(prompt: Prompt, tokenizer: Tokenizer | None) -> list[int]:
    """Raises Untokenized, one sentence."""
    if prompt.token_ids is not None:
        return list(prompt.token_ids)
    if tokenizer is None:
        raise Untokenized("needs the model's tokenizer: name its folder with --tokenizer")
    if prompt.messages is not None:
        return tokenizer.chat(prompt.messages, prompt.tools)
    assert prompt.text is not None
    return tokenizer.encode(prompt.text)


def load_tokenizer(where: str) -> Tokenizer:
    """The tokenizer of a model folder, or BYTES. Raises ConfigError that says what is missing."""
    if where == BYTES:
        return ByteTokenizer()
    folder = Path(where)
    if not folder.is_dir():
        raise ConfigError(f"--tokenizer {where}: no such folder (nothing is downloaded)")
    if not (folder / "tokenizer.json").is_file():
        return _slow_tokenizer(folder)
    try:
        from tokenizers import Tokenizer as FastTokenizer
    except ImportError as error:
        raise ConfigError("warming from text needs the tokenizers package: pip install s3kv-cache[warm]") from error
    try:
        fast = FastTokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception as error:  # the library raises Exception itself
        raise ConfigError(f"{folder}/tokenizer.json cannot be read: {str(error).splitlines()[0]}") from error
    fast.no_truncation()
    fast.no_padding()
    return FolderTokenizer(fast, read_template(folder))


def _slow_tokenizer(folder: Path) -> Tokenizer:
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise ConfigError(f"{folder} has no tokenizer.json, and transformers is not installed to do without") from error
    try:
        return TransformersTokenizer(AutoTokenizer.from_pretrained(str(folder), local_files_only=True))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder} holds no tokenizer: {str(error).splitlines()[0]}") from error


class ByteTokenizer:
    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def chat(self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] | None) -> list[int]:
        return self.encode("".join(f"{each.get('role')}: {each.get('content')}\n" for each in messages) + "assistant: ")


class FolderTokenizer:
    """`tokenizer.json`, and the chat template beside it."""

    def __init__(self, fast: Any, template: ChatTemplate | None) -> None:
        self._fast = fast
        self._template = template

    def encode(self, text: str) -> list[int]:
        return list(self._fast.encode(text).ids)

    def chat(self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] | None) -> list[int]:
        if self._template is None:
            raise Untokenized("the model folder has no chat template")
        # The template writes the special tokens itself.
        return list(self._fast.encode(self._template.render(messages, tools), add_special_tokens=False).ids)


class TransformersTokenizer:
    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text))

    def chat(self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] | None) -> list[int]:
        try:
            ids = self._tokenizer.apply_chat_template(
                list(messages), tools=list(tools) if tools else None, add_generation_prompt=True, tokenize=True
            )
        except Exception as error:  # templates raise what they like
            raise Untokenized(f"chat template: {error}") from error
        return list(ids)


class ChatTemplate:
    """A model's chat template as Hugging Face defines it: jinja2 with `raise_exception` and `strftime_now`."""

    def __init__(self, source: str, special_tokens: dict[str, str]) -> None:
        """Raises ConfigError when it is no template."""
        try:
            from jinja2 import TemplateError
            from jinja2.ext import loopcontrols
            from jinja2.sandbox import ImmutableSandboxedEnvironment
        except ImportError as error:
            raise ConfigError("chat messages need the jinja2 package: pip install s3kv-cache[warm]") from error
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        self._error: type[Exception] = TemplateError
        self._special = special_tokens
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise ConfigError(f"the model's chat template is not valid: {error}") from error

    def render(self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] | None) -> str:
        """Raises Untokenized."""
        try:
            return self._template.render(
                messages=list(messages),
                tools=list(tools) if tools else None,
                documents=None,
                add_generation_prompt=True,
                **self._special,
            )
        except Untokenized:
            raise
        except Exception as error:  # a template may fail in any way on messages that it does not expect
            raise Untokenized(f"chat template: {type(error).__name__}: {error}") from error


def _refuse(message: str) -> None:
    raise Untokenized(f"chat template: {message}")


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **_: Any) -> str:
    """Hugging Face's filter: jinja2's own escapes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


def read_template(folder: Path) -> ChatTemplate | None:
    """`chat_template.jinja`, else the one in `tokenizer_config.json`. None: the model has none."""
    config = _json_file(folder / "tokenizer_config.json")
    special = {name: text for name, value in config.items() if name.endswith("_token") and (text := _token_text(value))}
    file = folder / "chat_template.jinja"
    if file.is_file():
        if file.stat().st_size > MAX_TEMPLATE_BYTES:
            raise ConfigError(f"{file} is larger than {MAX_TEMPLATE_BYTES} bytes")
        return ChatTemplate(file.read_text(encoding="utf-8"), special)
    source = config.get("chat_template")
    if isinstance(source, list):  # several, by name
        named = {each.get("name"): each.get("template") for each in source if isinstance(each, dict)}
        source = named.get("default")
    return ChatTemplate(source, special) if isinstance(source, str) else None


def _token_text(value: Any) -> str | None:
    content = value.get("content") if isinstance(value, dict) else value
    return content if isinstance(content, str) else None


def _json_file(path: Path) -> dict[str, Any]:
    try:
        loaded = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    return loaded if isinstance(loaded, dict) else {}
