"""The main job, shown on real input: compute once, end every process, start again, load instead of compute.

Nothing here is a stand-in: the agent and the engines are processes of their own, and the only thing that survives
between the two engines is what the object store holds.
"""

from __future__ import annotations

import json
import os
import secrets
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from s3kv.client.connection import Connection
from s3kv.client.launch import connect_or_start
from s3kv.client.protocol import Drain, Drained, Report, Status, Stop
from s3kv.errors import AgentUnavailable, ConfigError, S3kvError
from s3kv.settings import CONFIG_VARIABLE, NESTED, PREFIX, Settings
from s3kv.store.opening import open_store

CONNECTOR = {
    "connector_module": "s3kv.connector",
    "connector_scheduler_class": "S3KVScheduler",
    "connector_worker_class": "S3KVWorker",
}
TOKENS_PER_BLOCK = 32
NEW_TOKENS = 24
ENGINE_TIMEOUT_S = 600.0
DRAIN_S = 120.0
STATUS_S = 10.0

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Prompt:
    name: str
    tokens: tuple[int, ...]
    repeated: bool


@dataclass(frozen=True)
class Run:
    """What one engine did with some of the prompts. Times in seconds."""

    prompts: int
    prompt_tokens: int
    loaded_tokens: int
    computed_tokens: int
    ttft_s: float


@dataclass(frozen=True)
class DemoResult:
    """`cold` (without s3kv), `saving` and `warm` are of the repeated prompts, `prefix_only` of the others."""

    tokens_identical: bool
    differing: tuple[str, ...]
    cold: Run
    saving: Run
    warm: Run
    prefix_only: Run
    stored_tokens: int
    objects: int
    bytes_stored: int
    blocks_per_object: float
    compression: float
    store: str

    @property
    def loaded_fraction(self) -> float:
        """Of the prompts' whole-block tokens that were stored and may be loaded (one token is always computed)."""
        return self.warm.loaded_tokens / self.stored_tokens if self.stored_tokens else 0.0

    def to_json(self) -> dict[str, Any]:
        return {
            "tokens_identical": self.tokens_identical,
            "differing": list(self.differing),
            "prompts": self.warm.prompts,
            "prompt_tokens": self.warm.prompt_tokens,
            "loaded_tokens": self.warm.loaded_tokens,
            "computed_tokens": self.warm.computed_tokens,
            "loaded_fraction": self.loaded_fraction,
            "objects": self.objects,
            "bytes_stored": self.bytes_stored,
            "blocks_per_object": self.blocks_per_object,
            "compression": self.compression,
            "ttft_cold_s": self.cold.ttft_s,
            "ttft_warm_s": self.warm.ttft_s,
            "saving": asdict(self.saving),
            "prefix_only": asdict(self.prefix_only),
            "store": self.store,
        }


def read_prompts(path: Path) -> list[Prompt]:
    """JSON lines with `id`, `prompt` and optionally `only_prefix`; a token is a byte of the text.

    Raises ConfigError naming the file and line.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"prompts {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"prompts {path} are not UTF-8") from error
    prompts = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            fields = json.loads(line)
            tokens = tuple(fields["prompt"].encode())
            prompts.append(Prompt(str(fields.get("id", number)), tokens, not fields.get("only_prefix", False)))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"{path}, line {number}: not a JSON object with a prompt ({error})") from error
    if not any(prompt.repeated for prompt in prompts):
        raise ConfigError(f"{path} holds no prompt to repeat")
    return prompts


class Demo:
    """One demonstration in `folder`. `settings.store` says where the KV goes; the socket and index are the demo's own.

    A namespace of its own (a random `extra` field) keeps it apart from what an earlier demonstration stored.
    """

    def __init__(self, settings: Settings, prompts: Sequence[Prompt], folder: Path, progress: Progress) -> None:
        self._prompts = prompts
        self._folder = folder
        self._progress = progress
        self._marker = secrets.token_hex(8)
        self._settings = self._own_settings(settings, "a")

    def run(self) -> DemoResult:
        """Raises S3kvError when a process of it fails; those it started have ended then."""
        repeated = [prompt for prompt in self._prompts if prompt.repeated]
        self._progress("computing every prompt without s3kv, for comparison")
        reference = self._engine(self._prompts, None)
        self._progress("computing the prompts, saving their KV")
        saving, status = self._life(repeated, "a")
        self._progress("both processes are gone; a new agent and a new engine load what the store holds")
        warm, _ = self._life(self._prompts, "b")
        return self._result(reference, saving, warm, status)

    def _own_settings(self, settings: Settings, life: str) -> Settings:
        home = self._folder / life
        home.mkdir(exist_ok=True)
        agent = settings.agent.model_copy(update={"socket": home / "agent.sock"})
        catalog = settings.catalog.model_copy(update={"index_dir": home / "index"})
        extra = {**settings.identity.extra, "demo": self._marker}
        identity = settings.identity.model_copy(update={"fingerprint": "simulated model, seed 0", "extra": extra})
        # A demonstration waits for the catalog and the store rather than show a miss of its first prompt.
        load = settings.load.model_copy(update={"wait_ms_per_1k_tokens": 5000.0, "wait_cap_ms": 20_000.0})
        return settings.model_copy(update={"agent": agent, "catalog": catalog, "identity": identity, "load": load})

    def _life(self, prompts: Sequence[Prompt], life: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """An agent and an engine from birth to death; returns the engine's results and the agent's last status."""
        settings = self._settings = self._own_settings(self._settings, life)
        config = self._folder / life / "s3kv.yaml"
        write_settings(settings, config)
        with only_settings_of(config), _agent_for(settings) as connection:
            results = self._engine(prompts, CONNECTOR)
            self._progress("flushing")
            drained = connection.call(Drain(connection.next_id(), DRAIN_S), Drained, timeout_s=DRAIN_S + STATUS_S)
            if drained.unsaved_blocks:
                raise S3kvError(f"{drained.unsaved_blocks} blocks could not be stored within {DRAIN_S:.0f} s")
            status = json.loads(connection.call(Status(connection.next_id()), Report, timeout_s=STATUS_S).text)
            return results, status

    def _engine(
        self,
        prompts: Sequence[Prompt],
        connector: Mapping[str, str] | None,
    ) -> list[dict[str, Any]]:
        job, result = self._folder / "job.json", self._folder / "result.json"
        longest = max(len(prompt.tokens) for prompt in prompts) + NEW_TOKENS
        pages = 2 * -(-longest // TOKENS_PER_BLOCK)
        requests = [
            {"request_id": number, "prompt_tokens": prompt.tokens, "max_new_tokens": NEW_TOKENS}
            for number, prompt in enumerate(prompts)
        ]
        fields = {
            "config": {"tokens_per_block": TOKENS_PER_BLOCK, "num_pages": pages, "kv_dtype": "bfloat16"},
            "connector": connector,
            "requests": requests,
            "sequential": True,
            "empty_device": True,
        }
        job.write_text(json.dumps(fields))
        done = subprocess.run(
            [sys.executable, "-m", "s3kv.sim.engine", str(job), str(result)],
            capture_output=True,
            text=True,
            timeout=ENGINE_TIMEOUT_S,
            check=False,
        )
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
            raise S3kvError(f"the engine's process ended with status {done.returncode}: {last}")
        results: list[dict[str, Any]] = json.loads(result.read_text())["results"]
        return results

    def _result(
        self,
        reference: list[dict[str, Any]],
        saving: list[dict[str, Any]],
        warm: list[dict[str, Any]],
        status: dict[str, Any],
    ) -> DemoResult:
        names = [prompt.name for prompt in self._prompts]
        wanted = [each["tokens"] for each in reference]
        repeats = [index for index, prompt in enumerate(self._prompts) if prompt.repeated]
        differing = [
            f"{names[i]} (first run)" for i, each in zip(repeats, saving, strict=True) if each["tokens"] != wanted[i]
        ]
        differing += [f"{names[i]} (second run)" for i, each in enumerate(warm) if each["tokens"] != wanted[i]]
        totals = status["totals"]
        objects, stored_bytes = count_objects(self._settings, [each["namespace"] for each in status["namespaces"]])
        loadable = [(len(self._prompts[i].tokens) - 1) // TOKENS_PER_BLOCK * TOKENS_PER_BLOCK for i in repeats]
        return DemoResult(
            tokens_identical=not differing,
            differing=tuple(differing),
            cold=_run([reference[i] for i in repeats]),
            saving=_run(saving),
            warm=_run([warm[i] for i in repeats]),
            prefix_only=_run([each for i, each in enumerate(warm) if not self._prompts[i].repeated]),
            stored_tokens=sum(loadable),
            objects=objects,
            bytes_stored=stored_bytes,
            blocks_per_object=totals["uploaded_blocks"] / max(1, totals["uploaded_chunks"]),
            compression=totals["raw_bytes"] / max(1, totals["uploaded_bytes"]),
            store=self._settings.store.url,
        )


def _run(results: Sequence[dict[str, Any]]) -> Run:
    return Run(
        prompts=len(results),
        prompt_tokens=sum(each["prompt_tokens"] for each in results),
        loaded_tokens=sum(each["loaded_tokens"] for each in results),
        computed_tokens=sum(each["computed_tokens"] for each in results),
        ttft_s=statistics.median(each["ttft_s"] for each in results) if results else 0.0,
    )


def count_objects(settings: Settings, namespaces: Sequence[str]) -> tuple[int, int]:
    """(objects, bytes) of the chunks of these namespaces."""
    import asyncio

    from s3kv.format.keys import chunks_prefix

    async def count() -> tuple[int, int]:
        store = open_store(settings.store)
        try:
            sizes = [
                meta.size
                for namespace in namespaces
                async for page in store.list(chunks_prefix(namespace))
                for meta in page
            ]
            return len(sizes), sum(sizes)
        finally:
            await store.close()

    return asyncio.run(count())


def write_settings(settings: Settings, path: Path) -> None:
    """The settings as a file for other processes, readable by this user alone since it may hold a secret."""
    values = settings.model_dump(mode="json", exclude_defaults=True)
    for name in ("secret_access_key", "session_token"):
        secret = getattr(settings.store, name)
        if secret is not None:
            values["store"][name] = secret.get_secret_value()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        yaml.safe_dump(values, file)


@contextmanager
def _agent_for(settings: Settings) -> Iterator[Connection]:
    """It ends with the context."""
    connection = _agent(settings)
    try:
        yield connection
    finally:
        _end_agent(connection)


@contextmanager
def only_settings_of(path: Path) -> Iterator[None]:
    """Meanwhile the settings here and in processes started are those of the file: variables would win over it."""
    sections = Settings.model_fields
    before = dict(os.environ)
    for name in before:
        section = name.upper().removeprefix(PREFIX).partition(NESTED)[0].lower()
        if name.upper().startswith(PREFIX) and section in sections:
            del os.environ[name]
    os.environ[CONFIG_VARIABLE] = str(path)
    try:
        yield
    finally:
        for name in [*before, CONFIG_VARIABLE]:
            os.environ.pop(name, None)
            if name in before:
                os.environ[name] = before[name]


def _agent(settings: Settings) -> Connection:
    """Raises S3kvError that quotes what an agent that ended said: its log goes with the demonstration's folder."""
    try:
        return connect_or_start(settings.agent, "cli", start=True, timeout_s=STATUS_S)
    except AgentUnavailable as error:
        log = settings.agent.socket.with_suffix(".log")
        said = log.read_text(errors="replace").strip().splitlines() if log.is_file() else []
        raise S3kvError(
            f"the agent did not start: {said[-1].removeprefix('s3kv: ')}" if said else str(error)
        ) from error


def _end_agent(connection: Connection) -> None:
    """Ask it to stop and wait until its socket is closed, which is when it has ended."""
    try:
        connection.call(Stop(connection.next_id(), STATUS_S), Drained, timeout_s=2 * STATUS_S)
        connection.wait_closed(timeout_s=STATUS_S)
    except S3kvError:
        pass
    finally:
        connection.close()


def run_demo(settings: Settings, prompts_path: Path, progress: Progress) -> DemoResult:
    """The whole demonstration. Without `store.url` in the settings it uses a temporary folder and removes it."""
    prompts = read_prompts(prompts_path)
    with tempfile.TemporaryDirectory(prefix="s3kv-demo-") as name:
        folder = Path(name)
        if "url" not in settings.store.model_fields_set:
            store = settings.store.model_copy(update={"url": f"file://{folder / 'store'}"})
            settings = settings.model_copy(update={"store": store})
        count_objects(settings, [])  # opens the store: a folder that cannot be had need not wait for the engine
        return Demo(settings, prompts, folder, progress).run()
