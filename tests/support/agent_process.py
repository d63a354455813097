"""A real agent as a process of its own: `python -m s3kv.agent`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from s3kv.client.connection import Connection
from s3kv.client.protocol import Report, Status
from s3kv.errors import AgentUnavailable
from s3kv.settings import CONFIG_VARIABLE, Settings
from s3kv.sim.demo import write_settings
from support.servers import die_with_parent, wait_until


class AgentProcess:
    """Started and answering; `log` is what it wrote."""

    def __init__(self, settings: Settings, *, limits: Mapping[int, int] | None = None, wait: bool = True) -> None:
        self.settings = settings
        self.folder = settings.agent.socket.parent
        self.folder.mkdir(parents=True, exist_ok=True)
        config = self.folder / "s3kv.yaml"
        write_settings(settings, config)
        self._log = self.folder / "agent.log"
        with self._log.open("ab") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "s3kv.agent"],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env={**os.environ, CONFIG_VARIABLE: str(config)},
                preexec_fn=lambda: _prepare(dict(limits or {})),
                cwd="/",
            )
        if wait and not wait_until(self.answers, self.process):
            raise RuntimeError(f"the agent did not start: {self.log}")

    @property
    def log(self) -> str:
        return self._log.read_text()

    def answers(self) -> bool:
        try:
            Connection.open(self.settings.agent.socket, "cli", timeout_s=5.0).close()
        except AgentUnavailable:
            return False
        return True

    def status(self) -> dict[str, Any]:
        import json

        connection = Connection.open(self.settings.agent.socket, "cli", timeout_s=20.0)
        try:
            report = connection.call(Status(connection.next_id()), Report, timeout_s=20.0)
        finally:
            connection.close()
        result: dict[str, Any] = json.loads(report.text)
        return result

    def tier(self) -> dict[str, int]:
        """The counters of its one namespace."""
        counters: dict[str, int] = self.status()["namespaces"][0]["tier"]
        return counters

    def until(self, ready: Any) -> None:
        assert wait_until(ready, self.process, 30.0)

    def pause(self) -> None:
        os.kill(self.process.pid, signal.SIGSTOP)
        self.until(lambda: Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T")

    def go_on(self) -> None:
        os.kill(self.process.pid, signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(20)

    def terminate(self) -> int:
        self.process.terminate()
        return self.process.wait(60)


def _prepare(limits: dict[int, int]) -> None:
    import resource

    die_with_parent()
    for limit, value in limits.items():
        resource.setrlimit(limit, (value, value))


@contextmanager
def agent_process(settings: Settings, **options: Any) -> Iterator[AgentProcess]:
    agent = AgentProcess(settings, **options)
    try:
        yield agent
    finally:
        agent.kill()
