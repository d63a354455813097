"""Having a running server compute what is missing: one generated token a prompt, bounded concurrency.

Prompts are sent as token ids, so that the server stores just the blocks whose hashes were computed here, whatever its
own tokenizer and chat template are.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import urllib3

from s3kv.errors import ConfigError, S3kvError
from s3kv.warm.plan import Chained, Step, left_out

MAX_ANSWER_BYTES = 1 << 20
CONNECT_TIMEOUT_S = 10.0


class ServerError(S3kvError):
    """The server refused or failed one prompt; one sentence."""


class Server:
    """An OpenAI-compatible server. Thread-safe; nothing is sent twice: a prompt may be expensive."""

    def __init__(self, url: str, *, model: str | None, timeout_s: float, concurrency: int, api_key: str | None) -> None:
        """Raises ConfigError for a URL that is none."""
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"--through {url}: must begin with http:// or https://")
        self._base = url.rstrip("/").removesuffix("/v1")
        self._model = model
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            api_key = api_key.rstrip("\r\n")  # as files and secrets of orchestrators end
            if not api_key.isprintable() or not api_key.isascii():
                raise ConfigError("OPENAI_API_KEY holds characters that no key has")
            self._headers["Authorization"] = f"Bearer {api_key}"
        timeout = urllib3.Timeout(connect=CONNECT_TIMEOUT_S, read=timeout_s)
        self._pool = urllib3.PoolManager(maxsize=concurrency, timeout=timeout, retries=False)

    def model(self) -> str:
        """The model to ask for: the one that was named, or the first that the server lists. Raises ServerError."""
        if self._model is None:
            answer = self._call("GET", "/v1/models", None)
            try:
                self._model = str(answer["data"][0]["id"])
            except (KeyError, IndexError, TypeError) as error:
                raise ServerError(f"{self._base}/v1/models lists no model: name one with --model") from error
        return self._model

    def compute(self, item: Chained) -> None:
        """Returns when the prompt is computed. Raises ServerError."""
        body: dict[str, Any] = {
            "model": self.model(),
            "prompt": list(item.tokens),
            "max_tokens": 1,
            "temperature": 0,
        }
        if item.prompt.cache_salt is not None:
            body["cache_salt"] = item.prompt.cache_salt
        if item.prompt.lora_request is not None:
            body["lora_request"] = item.prompt.lora_request
        self._call("POST", "/v1/completions", body)

    def _call(self, method: str, path: str, body: Mapping[str, Any] | None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        try:
            answer = self._pool.request(
                method, self._base + path, body=data, headers=self._headers, preload_content=False, redirect=False
            )
            text = answer.read(MAX_ANSWER_BYTES)
            answer.release_conn()
        except urllib3.exceptions.HTTPError as error:
            raise ServerError(f"{self._base} does not answer: {_reason(error)}") from error
        if answer.status != 200:
            raise ServerError(f"the server answered {answer.status}: {_message(text)}")
        try:
            return json.loads(text)
        except ValueError as error:
            raise ServerError("the server's answer is not JSON") from error


def _reason(error: BaseException) -> str:
    if isinstance(error, urllib3.exceptions.NewConnectionError):  # before the next: it is one of those too
        return "no connection could be made"
    if isinstance(error, urllib3.exceptions.TimeoutError):
        return "timed out"
    return type(error).__name__


def _message(text: bytes) -> str:
    """The `message` of an OpenAI error, else the beginning of the text."""
    try:
        fields = json.loads(text)
        found = fields.get("message") or fields["error"]["message"]
    except (ValueError, KeyError, TypeError, AttributeError):
        found = text[:200].decode(errors="replace")
    return " ".join(str(found).split())[:200]


@dataclass(slots=True)
class Sent:
    """By item: what failed, and why. `done` are the items that were computed."""

    done: list[int] = field(default_factory=list)
    errors: dict[int, str] = field(default_factory=dict)


async def send_steps(
    steps: Sequence[Step],
    compute: Callable[[int], Awaitable[None]],
    *,
    concurrency: int,
    progress: Callable[[int], None] = lambda count: None,
) -> Sent:
    """Computes every step, `concurrency` at a time, each after the step that it builds on.

    One that fails is noted; what waited for it is computed all the same. Cancelled, what is being computed is waited
    for no longer.
    """
    sent = Sent()
    ended = [asyncio.Event() for _ in steps]
    places = asyncio.Semaphore(concurrency)

    async def work(number: int) -> None:
        step = steps[number]
        try:
            if step.after is not None:
                await ended[step.after].wait()
            async with places:
                await compute(step.item)
            sent.done.append(step.item)
        except ServerError as error:
            sent.errors[step.item] = str(error)
        finally:
            ended[number].set()
            progress(1)

    async with asyncio.TaskGroup() as group:
        for number in range(len(steps)):
            group.create_task(work(number))
    return sent


async def send_through(
    server: Server,
    prompts: Sequence[Chained],
    steps: Sequence[Step],
    *,
    concurrency: int,
    progress: Callable[[int], None] = lambda count: None,
) -> Sent:
    """`send_steps` with the server's blocking calls in threads of their own.

    A prompt that needed no step, because a longer one was to compute it too, is sent by itself when that one fails.
    """

    async def compute(item: int) -> None:
        await _in_daemon(server.compute, prompts[item])

    if steps:
        await _in_daemon(server.model)  # asked for once, before all others need it
    sent, carried_out, ahead = Sent(), list(steps), steps
    while ahead:
        more = await send_steps(ahead, compute, concurrency=concurrency, progress=progress)
        sent.done += more.done
        sent.errors |= more.errors
        ahead = left_out(prompts, carried_out, sent.errors)
        carried_out += ahead
    return sent


async def _in_daemon(function: Callable[..., object], *arguments: object) -> None:
    """Runs in a thread that nobody waits for at the end: Ctrl-C must not wait for a prompt that takes minutes."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()

    def settle(error: BaseException | None) -> None:
        if done.done():
            return
        if error is None:
            done.set_result(None)
        else:
            done.set_exception(error)

    def run() -> None:
        error: BaseException | None = None
        try:
            function(*arguments)
        except BaseException as caught:
            error = caught
        with suppress(RuntimeError):  # the loop is closed: the command has ended
            loop.call_soon_threadsafe(settle, error)

    threading.Thread(target=run, name="s3kv-warm", daemon=True).start()
    await done
