"""`s3kv sim serve` as a process of its own, and the agent that its connector starts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from support.command import Cli

BLOCK_TOKENS = 16


@dataclass(frozen=True)
class Served:
    cli: Cli
    url: str


@contextmanager
def sim_server(folder: Path, *sets: str, store: Cli | None = None) -> Iterator[Served]:
    """On a folder, or on the store of `store`; chunks are sealed at once. Engine and agent are gone at the end."""
    common = [
        *(("--store", f"file://{folder}/store") if store is None else store.common),
        *("--set", f"agent.socket={folder}/agent.sock"),
        *("--set", "upload.seal_age_s=0.05"),
        *("--set", "upload.seal_grace_s=0.01"),
        *("--set", "tier.capacity_bytes=33554432"),
        *(word for each in sets for word in ("--set", each)),
    ]
    command = [sys.executable, "-m", "s3kv_cli.main", *common, "sim", "serve", "--port", "0"]
    with (folder / "serve.log").open("wb") as log:
        process = subprocess.Popen(
            [*command, "--block-tokens", str(BLOCK_TOKENS)],
            stdout=subprocess.PIPE,
            stderr=log,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
    cli = Cli(*common)
    try:
        assert process.stdout is not None
        line = process.stdout.readline().decode()
        assert " at http://" in line, (folder / "serve.log").read_text()
        yield Served(cli, line.split()[-1])
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)
        assert process.stdout is not None
        process.stdout.close()
        cli("agent", "stop", "--wait", "1s")
