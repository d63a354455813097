"""`s3kv sim serve`: a simulated engine behind an OpenAI-compatible server."""

from __future__ import annotations

import signal
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .common import command, group
from .config import CONNECTOR
from .session import Session

if TYPE_CHECKING:
    from s3kv.settings import Settings

app = group("A simulated engine, for trying s3kv without a GPU.")


def register(root: typer.Typer) -> None:
    root.add_typer(app, name="sim")


@command(app, "serve", example="s3kv sim serve --port 8000 --store file:///tmp/kv")
def serve(
    session: Session,
    host: Annotated[str, typer.Option(help="Address to listen at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8000,
    pages: Annotated[int, typer.Option(min=8, help="Pages of the device's KV cache.")] = 512,
    block_tokens: Annotated[int, typer.Option(min=1, help="Tokens a block.")] = 32,
    connector: Annotated[bool, typer.Option(help="Use s3kv's connector; without it nothing is saved.")] = True,
) -> None:
    """Serves a small model on the CPU as trtllm-serve would, with s3kv's connector on the settings' store and agent.

    Needs torch. A text is a token a byte: warm it with --tokenizer bytes. Ctrl-C or SIGTERM ends it.
    """
    from s3kv.errors import ConfigError

    try:
        from s3kv.sim.config import ConnectorConfig, SimConfig
        from s3kv.sim.serve import EngineThread, SimServer
    except ImportError as error:
        raise ConfigError(f"the simulated engine needs {error.name}: pip install s3kv-cache[sim]") from error
    _check_free(host, port)
    config = SimConfig(kv_dtype="bfloat16", num_pages=pages, tokens_per_block=block_tokens)
    with _for_the_connector(session.settings), _sigterm_as_interrupt():
        engine = EngineThread(config, ConnectorConfig(**CONNECTOR) if connector else None)
        try:
            server = SimServer(engine, host, port)
            session.out.print(f"serving {config.model_name} at {server.url}", soft_wrap=True)
            session.out.file.flush()
            server.serve_forever()
        finally:
            engine.close()


def _check_free(host: str, port: int) -> None:
    """Before an engine starts an agent, which would stay, and describes its namespace in the store.

    Raises typer.BadParameter. Whoever takes the address in the seconds until the server listens makes that fail.
    """
    try:
        with socket.socket() as tried:
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server will
            tried.bind((host, port))
    except (OSError, UnicodeError) as error:  # a name that no host can have is a UnicodeError
        reason = getattr(error, "strerror", None) or str(error)
        raise typer.BadParameter(f"cannot listen at {host}:{port}: {reason}", param_hint="--host, --port") from error


@contextmanager
def _for_the_connector(settings: Settings) -> Iterator[None]:
    """The connector reads its settings from the file that S3KV_CONFIG names, as inside TensorRT-LLM."""
    from s3kv.sim.demo import only_settings_of, write_settings

    identity = settings.identity
    if identity.fingerprint is None:
        identity = identity.model_copy(update={"fingerprint": "simulated model, seed 0"})
    with tempfile.TemporaryDirectory(prefix="s3kv-sim-") as folder:
        path = Path(folder) / "s3kv.yaml"
        write_settings(settings.model_copy(update={"identity": identity}), path)
        with only_settings_of(path):
            yield


@contextmanager
def _sigterm_as_interrupt() -> Iterator[None]:
    def stop(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
