"""The same KV in 32 MiB chunks through SeaweedFS: s3kv's agent against LMCache's S3 connector.

LMCache lives in an environment of its own, named by S3KV_BENCH_LMCACHE (its python): `pip install lmcache` beside a
CPU build of torch. Its connector knows virtual-hosted addressing alone and uploads in parts, so it needs an S3 server
under a name that resolves to it: its process gets an /etc/hosts of its own (`unshare --mount`, which takes root). s3kv
checks every block and writes a catalog; LMCache's connector does neither.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from support import servers

from benchmarks.agent_process import one_page_spec
from benchmarks.harness import MIB, Options, Report, Series, at_least, at_most, timed
from benchmarks.origins import ACCESS_KEY, BUCKET, SECRET_KEY, Origin, seaweedfs
from benchmarks.tier_node import tier_node

VARIABLE = "S3KV_BENCH_LMCACHE"
BLOCK, CHUNK_BLOCKS, AT_ONCE = 2 * MIB, 16, 8
DOMAIN = "s3kv.test"


def measure(options: Options) -> Report:
    chunks = 4 if options.quick else 8
    report = Report(f"{chunks} chunks of 32 MiB: s3kv's agent against LMCache's S3 connector, on SeaweedFS")
    python = os.environ.get(VARIABLE)
    if not python:
        report.note(f"Not run: set {VARIABLE} to the python of an environment that has LMCache.")
        return report
    series = {name: Series() for name in ("save", "put", "load", "get")}
    blocks = chunks * CHUNK_BLOCKS
    with (
        named_seaweedfs() as origin,
        tier_node(origin, one_page_spec(BLOCK), 2 * blocks) as node,
        driver(python, origin, chunks) as ask,
    ):
        node.fill(os.urandom(BLOCK))
        stored = node.fresh_chain(blocks)
        node.do(node.save(node.reserve(stored)))
        ask("put")
        for _ in range(options.rounds(8)):
            node.forget()
            held = node.reserve(node.fresh_chain(blocks))
            _add(series["save"], *timed(lambda held=held: node.do(node.save(held))))  # type: ignore[misc]
            _told(series["put"], ask("put"))
            node.forget()
            _add(series["load"], *timed(lambda: node.do(node.load(stored))))
            _told(series["get"], ask("get"))
    size = blocks * BLOCK
    for what, ours, theirs in (("put", "save", "put"), ("get", "load", "get")):
        report.rates(
            f"{what}, verified and in the catalog", series[ours], "LMCache", series[theirs], size,
            goal=at_least(1), cpu_goal=at_most(1),
        )  # fmt: skip
    return report


def _add(series: Series, wall: float, cpu: float) -> None:
    series.wall.append(wall)
    series.cpu.append(cpu)


def _told(series: Series, answer: dict[str, Any]) -> None:
    _add(series, answer["wall"], answer["cpu"])


@contextmanager
def named_seaweedfs() -> Iterator[Origin]:
    """SeaweedFS that also answers to BUCKET.DOMAIN."""
    plain = servers._weed_command
    servers._weed_command = lambda *paths: [*plain(*paths), f"-s3.domainName={DOMAIN}"]
    try:
        with seaweedfs() as origin:
            yield origin
    finally:
        servers._weed_command = plain


@contextmanager
def driver(python: str, origin: Origin, chunks: int) -> Iterator[Any]:
    script, port = Path(__file__).with_name("lmcache_driver.py"), origin.endpoint.rpartition(":")[2]
    with tempfile.TemporaryDirectory(prefix="s3kv-bench-") as folder:
        hosts = Path(folder) / "hosts"
        hosts.write_text(f"127.0.0.1 localhost {BUCKET}.{DOMAIN}\n")
        command = f'mount --bind {hosts} /etc/hosts && exec "$@"'
        arguments = [f"{BUCKET}.{DOMAIN}:{port}", str(chunks), str(AT_ONCE), ACCESS_KEY, SECRET_KEY]
        process = subprocess.Popen(
            ["unshare", "--mount", "sh", "-c", command, "sh", python, str(script), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            preexec_fn=servers.die_with_parent,
            cwd="/",
        )
        try:
            asked = _Asked(process)
            asked.answer()
            yield asked.ask
        finally:
            process.kill()
            process.wait()


class _Asked:
    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stdin is not None and process.stdout is not None
        self._process, self._in, self._out = process, process.stdin, process.stdout

    def answer(self) -> dict[str, Any]:
        line = self._out.readline()
        if not line:
            raise RuntimeError(f"LMCache's process ended with status {self._process.wait()}")
        found: dict[str, Any] = json.loads(line)
        return found

    def ask(self, work: str) -> dict[str, Any]:
        self._in.write(work + "\n")
        self._in.flush()
        return self.answer()
