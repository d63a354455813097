"""Start an agent when the socket named in the settings has none, and tell the ranks of one engine from another's."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from hashlib import blake2b

from s3kv.client.connection import AgentRefused, Connection
from s3kv.client.trust import foreign_folder
from s3kv.errors import AgentUnavailable
from s3kv.settings import AgentSettings

ENGINE_VARIABLE = "S3KV_ENGINE_ID"
_LAUNCHERS = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "OMPI_MCA_orte_ess_jobid", "PMI_JOBID", "SLURM_STEP_ID")
_POLL_S = 0.02
_REFUSED_POLL_S = 0.5  # each is a line in the agent's log


def engine_id(environ: Mapping[str, str] = os.environ, parent: Callable[[], int] = os.getppid) -> str:
    """One name for all ranks of an engine: S3KV_ENGINE_ID, or what the MPI launcher gives every rank of a job.

    Without either it is the parent process, which a launcher's ranks share. Two engines that end up with one name are
    noticed by the agent (two leaders, or one rank twice) and are offered nothing until S3KV_ENGINE_ID tells them apart.
    """
    if environ.get(ENGINE_VARIABLE):
        return environ[ENGINE_VARIABLE]
    named = [f"{name}={environ[name]}" for name in _LAUNCHERS if environ.get(name)]
    text = ";".join(named) or f"parent={parent()}"
    return blake2b(text.encode(), digest_size=8).hexdigest()


def start_agent(settings: AgentSettings) -> subprocess.Popen[bytes]:
    """Start `python -m s3kv.agent` in a session of its own, so that it outlives this process and its signals.

    It runs in this process's folder, since it reads the same settings, which may name files from there.
    Raises AgentUnavailable, with nothing written, when the socket's folder is another user's.
    """
    settings.socket.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if (foreign := foreign_folder(settings.socket.parent)) is not None:
        raise AgentUnavailable(f"agent.socket: folder {foreign} belongs to another user, so no agent is started there")
    log = settings.socket.with_suffix(".log")
    environment = dict(os.environ)
    environment["S3KV_AGENT__SOCKET"] = str(settings.socket)
    with log.open("ab") as out:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "s3kv.agent"],  # -P: imports nothing that happens to lie in that folder
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
            env=environment,
        )


def connect_or_start(
    settings: AgentSettings,
    role: str,
    *,
    start: bool,
    timeout_s: float,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,  # noqa: TID251 - the default of an injected sleep
) -> Connection:
    """Connect; with `start` and nobody there, start an agent and wait for it.

    Raises AgentUnavailable when none answers within `timeout_s`, or a started one within `agent.start_timeout_s`, and
    AgentRefused when one is there that does not serve this client: no other could have its socket. With `start` one
    that may do so later is asked until `agent.start_timeout_s` have passed.
    Two engines may start agents at once: the one that does not get the socket's lock exits, and both connect to the
    other.
    """

    def connect(timeout_s: float) -> Connection:
        return Connection.open(settings.socket, role, timeout_s=timeout_s, clock=clock, trusted=settings.trusted_uid)

    started = False
    try:
        return connect(timeout_s)
    except AgentRefused as error:
        if not (start and error.passing):
            raise
    except AgentUnavailable:
        if not start:
            raise
        _start(settings)
        started = True
    deadline = clock() + settings.start_timeout_s
    while True:
        try:
            return connect(max(deadline - clock(), _POLL_S))
        except AgentRefused as error:
            if clock() >= deadline or not error.passing:
                raise
            sleep(_REFUSED_POLL_S)
        except AgentUnavailable as error:
            if clock() >= deadline and started:
                log = settings.socket.with_suffix(".log")
                raise AgentUnavailable(f"{error}; the agent that was started left its reason in {log}") from error
            if clock() >= deadline:
                raise
            sleep(_POLL_S)


def _start(settings: AgentSettings) -> None:
    try:
        start_agent(settings)
    except OSError as error:
        raise AgentUnavailable(f"no agent could be started for {settings.socket} (agent.socket): {error}") from error
