"""A small OpenAI-compatible HTTP server in front of a simulated engine: `/v1/models`, `/v1/completions`,
`/v1/chat/completions`, `/health`. For trying s3kv end to end without a GPU; loopback unless told otherwise.

One thread owns the engine; the threads of requests hand it work and wait. A text is a token a byte. Like trtllm-serve
it takes prompts as token ids too, and `cache_salt`, and `lora_request` with `lora_int_id`.
"""

from __future__ import annotations

import itertools
import json
import queue
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from s3kv.sim.config import ConnectorConfig, SimConfig, SimRequest, SimResult
from s3kv.sim.engine import Engine
from s3kv.sim.install import install
from s3kv.sim.workload import tokens_to_text

MAX_BODY_BYTES = 64 << 20
MAX_NEW_TOKENS = 4096
_LOOK_S = 0.2


class EngineOver(Exception):
    """The engine has ended or failed; nothing is served any more."""


class EngineThread:
    """Runs an engine, with the stand-in runtime installed, in a thread of its own until `close`."""

    def __init__(self, config: SimConfig, connector: ConnectorConfig | None) -> None:
        """Returns when the engine is up. Raises whatever its bring-up raises."""
        self.config = config
        self._connector = connector
        self._ids = itertools.count(1)
        self._inbox: queue.SimpleQueue[tuple[SimRequest, Future[SimResult]] | None] = queue.SimpleQueue()
        self._waiting: dict[int, Future[SimResult]] = {}
        self._lock = threading.Lock()  # guards _over together with what is put into the inbox
        self._over: BaseException | None = None
        ready: Future[None] = Future()
        self._thread = threading.Thread(target=self._main, args=(ready,), name="s3kv-sim-engine", daemon=True)
        self._thread.start()
        ready.result()

    def generate(self, fields: Mapping[str, Any]) -> SimResult:
        """Serves one request; `fields` are SimRequest's but for the id. Blocks. Raises EngineOver, ValueError."""
        request = SimRequest(request_id=next(self._ids), **fields)
        future: Future[SimResult] = Future()
        with self._lock:
            if self._over is not None:
                raise EngineOver(f"the engine is over: {self._over}")
            self._inbox.put((request, future))
        return future.result()

    def close(self) -> None:
        """Ends the engine when what was begun is done."""
        self._inbox.put(None)
        self._thread.join()

    def _main(self, ready: Future[None]) -> None:
        try:
            with install(), Engine(self.config, self._connector) as engine:
                ready.set_result(None)
                self._serve(engine)
            self._end(EngineOver("it was closed"))
        except BaseException as error:
            if not ready.done():
                ready.set_exception(error)
            self._end(error)

    def _serve(self, engine: Engine) -> None:
        closing = False
        while not (closing and not self._waiting):
            try:
                item = self._inbox.get(block=not self._waiting)
            except queue.Empty:
                self._step(engine)
                continue
            if item is None:
                closing = True
                continue
            request, future = item
            try:
                engine.submit(request)
                self._waiting[request.request_id] = future
            except ValueError as error:
                future.set_exception(error)
        engine.run_until_done()

    def _step(self, engine: Engine) -> None:
        for result in engine.step():
            self._waiting.pop(result.request_id).set_result(result)
        if not self._waiting:
            engine.run_until_done()  # nobody waits, but blocks may still be on their way to the agent

    def _end(self, error: BaseException) -> None:
        with self._lock:
            self._over = error
        while not self._inbox.empty():
            item = self._inbox.get()
            if item is not None:
                item[1].set_exception(EngineOver(str(error)))
        for future in self._waiting.values():
            future.set_exception(EngineOver(str(error)))


class SimServer:
    """The HTTP side. `port` 0 takes a free one; `url` says which."""

    def __init__(self, engine: EngineThread, host: str, port: int, *, clock: Callable[[], float] = time.time) -> None:
        """Raises OSError when the address cannot be had."""
        handler = type("Handler", (_Handler,), {"engine": engine, "clock": staticmethod(clock)})
        self._http = ThreadingHTTPServer((host, port), handler)
        self._http.daemon_threads = True
        self.url = f"http://{host}:{self._http.server_address[1]}"

    def serve_forever(self) -> None:
        self._http.serve_forever(_LOOK_S)

    def close(self) -> None:
        """From another thread than `serve_forever`'s, or after it has returned."""
        self._http.shutdown()
        self._http.server_close()

    def __enter__(self) -> SimServer:
        """Serves in a thread."""
        threading.Thread(target=self.serve_forever, name="s3kv-sim-http", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _BadRequest(Exception):
    pass


class _Handler(BaseHTTPRequestHandler):
    engine: EngineThread
    clock: Callable[[], float]
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not logged: they hold prompts and salts."""

    def do_GET(self) -> None:
        if self.path == "/health":
            self._answer(200, {})
        elif self.path == "/v1/models":
            model = {"id": self.engine.config.model_name, "object": "model", "owned_by": "s3kv"}
            self._answer(200, {"object": "list", "data": [model]})
        else:
            self._refuse(404, f"no such path: {self.path[:100]}")

    def do_POST(self) -> None:
        makers = {"/v1/completions": _completion, "/v1/chat/completions": _chat}
        maker = makers.get(self.path)
        try:
            body = self._body()
            if maker is None:
                self._refuse(404, f"no such path: {self.path[:100]}")
                return
            fields, finish = maker(body)
            result = self.engine.generate(fields)
            if result.error is not None:
                self._refuse(400, result.error)
                return
            about = {"created": int(self.clock()), "model": self.engine.config.model_name, "usage": _usage(result)}
            self._answer(200, {"id": f"sim-{result.request_id}", **about, **finish(result)})
        except (_BadRequest, ValueError) as error:
            self._refuse(400, str(error))
        except EngineOver as error:
            self._refuse(500, str(error))

    def _body(self) -> dict[str, Any]:
        length = self.headers.get("Content-Length", "")
        if not length.isdigit() or int(length) > MAX_BODY_BYTES:
            self.close_connection = True
            raise _BadRequest("the body needs a Content-Length within the limit")
        try:
            body = json.loads(self.rfile.read(int(length)))
        except (ValueError, RecursionError) as error:
            raise _BadRequest("the body is not JSON") from error
        if not isinstance(body, dict):
            raise _BadRequest("the body is not a JSON object")
        return body

    def _refuse(self, status: int, message: str) -> None:
        self._answer(status, {"object": "error", "message": message, "code": status})

    def _answer(self, status: int, fields: dict[str, Any]) -> None:
        data = json.dumps(fields).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


Finish = Callable[[SimResult], dict[str, Any]]


def _completion(body: dict[str, Any]) -> tuple[dict[str, Any], Finish]:
    prompt = body.get("prompt")
    if isinstance(prompt, str):
        tokens = tuple(prompt.encode())
    elif isinstance(prompt, list) and prompt and all(type(each) is int for each in prompt):
        tokens = tuple(prompt)
    else:
        raise _BadRequest("prompt must be a string or a list of token ids")

    def finish(result: SimResult) -> dict[str, Any]:
        choice = {"index": 0, "text": tokens_to_text(result.tokens), "finish_reason": "length"}
        return {"object": "text_completion", "choices": [choice]}

    return _common(body, tokens), finish


def _chat(body: dict[str, Any]) -> tuple[dict[str, Any], Finish]:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages or not all(isinstance(each, dict) for each in messages):
        raise _BadRequest("messages must be a list of objects")
    text = "".join(f"{each.get('role')}: {each.get('content')}\n" for each in messages) + "assistant: "

    def finish(result: SimResult) -> dict[str, Any]:
        message = {"role": "assistant", "content": tokens_to_text(result.tokens)}
        choice = {"index": 0, "message": message, "finish_reason": "length"}
        return {"object": "chat.completion", "choices": [choice]}

    return _common(body, tuple(text.encode())), finish


def _common(body: dict[str, Any], tokens: tuple[int, ...]) -> dict[str, Any]:
    if body.get("stream"):
        raise _BadRequest("stream is not offered here")
    count = body.get("max_tokens", body.get("max_completion_tokens", 16))
    if type(count) is not int or not 1 <= count <= MAX_NEW_TOKENS:
        raise _BadRequest(f"max_tokens must be 1 to {MAX_NEW_TOKENS}")
    salt = body.get("cache_salt")
    if salt is not None and not isinstance(salt, str):
        raise _BadRequest("cache_salt must be a string")
    lora = body.get("lora_request")
    number = lora.get("lora_int_id") if isinstance(lora, dict) else None
    if lora is not None and type(number) is not int:
        raise _BadRequest("lora_request needs a lora_int_id")
    return {"prompt_tokens": tokens, "max_new_tokens": count, "cache_salt": salt, "lora_task_id": number}


def _usage(result: SimResult) -> dict[str, Any]:
    return {
        "prompt_tokens": result.prompt_tokens,
        "completion_tokens": len(result.tokens),
        "total_tokens": result.prompt_tokens + len(result.tokens),
        "prompt_tokens_details": {"cached_tokens": result.loaded_tokens + result.reused_tokens},
    }
