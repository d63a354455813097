"""The ranks of one engine, stepped in lockstep: alone in this thread, as threads, or as processes.

A rank that fails stops all of them: its error is raised in the caller, and the engine is over.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import pickle
import queue
import socket
import sys
import threading
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch

from s3kv.sim.bringup import start_rank
from s3kv.sim.comm import Communicator, ProcessRank, Solo, ThreadGroup, ThreadRank
from s3kv.sim.config import ConnectorConfig, SimConfig
from s3kv.sim.errors import ContractError
from s3kv.sim.executor import Executor
from s3kv.sim.install import Installation, install, installed

START_TIMEOUT_S = 180.0
CALL_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 20.0


class Ranks(Protocol):
    """All ranks of an engine."""

    def call(self, method: str, arguments: list[tuple[Any, ...]]) -> list[Any]:
        """Calls a method of every rank's executor, `arguments[rank]` each, and returns the answers by rank."""

    def close(self, failed: bool) -> None:
        """Ends the connector, where it has a `shutdown`, and the ranks; after a failure without waiting for them."""


def start_ranks(config: SimConfig, connector: ConnectorConfig | None, clock: Callable[[], float]) -> Ranks:
    """Starts the ranks that a configuration asks for. Raises what any of them raises at bring-up."""
    if config.tp_size == 1:
        return SoloRank(start_rank(config, connector, Solo(), clock))
    if config.ranks == "thread":
        return ThreadRanks(config, connector, clock)
    return ProcessRanks(config, connector)


def run_method(executor: Executor, method: str, arguments: tuple[Any, ...]) -> Any:
    """What a rank does with a command. A `dispatch` carries one for this rank alone, or none."""
    if method == "step":
        return executor.step(), executor.idle, executor.progressed
    if method == "trace":
        return executor.driver.trace
    if method == "dispatch":
        method, arguments = arguments
    if not method:
        return None
    return getattr(executor, method)(*arguments)


class SoloRank:
    """One rank, in the caller's thread."""

    def __init__(self, executor: Executor) -> None:
        self.executor = executor

    def call(self, method: str, arguments: list[tuple[Any, ...]]) -> list[Any]:
        """Calls a method of the executor."""
        return [run_method(self.executor, method, arguments[0])]

    def close(self, failed: bool) -> None:
        """Ends the connector."""
        self.executor.driver.shutdown()


@dataclass
class _Outcome:
    value: Any = None
    error: BaseException | None = None


class _RanksApart(ABC):
    """Ranks that run on their own: commands go out to all of them, then the answers are awaited."""

    def call(self, method: str, arguments: list[tuple[Any, ...]]) -> list[Any]:
        """Calls a method of every rank's executor."""
        for send, argument in zip(self._senders(), arguments, strict=True):
            send((method, argument))
        return self._collect(CALL_TIMEOUT_S)

    @abstractmethod
    def close(self, failed: bool) -> None:
        """As `Ranks.close`."""

    def _await_start(self) -> None:
        """To be called once every rank was started: each answers as to its first command when it is up."""
        try:
            self._collect(START_TIMEOUT_S)
        except BaseException:
            self.close(failed=True)
            raise

    @abstractmethod
    def _senders(self) -> list[Callable[[Any], object]]:
        """What gives a rank a command, by rank."""

    @abstractmethod
    def _collect(self, timeout_s: float) -> list[Any]:
        """The answers of all ranks, by rank. Raises the error of the one that failed."""


class ThreadRanks(_RanksApart):
    """Ranks as threads. Quick to start; their connectors share one process, which real ranks do not."""

    def __init__(self, config: SimConfig, connector: ConnectorConfig | None, clock: Callable[[], float]) -> None:
        self._group = ThreadGroup(config.tp_size)
        self._inbox: list[queue.Queue[Any]] = [queue.Queue() for _ in range(config.tp_size)]
        self._outbox: list[queue.Queue[_Outcome]] = [queue.Queue() for _ in range(config.tp_size)]
        self.executors: list[Executor | None] = [None] * config.tp_size

        def serve(rank: int) -> None:
            def build() -> None:
                self.executors[rank] = start_rank(config, connector, ThreadRank(self._group, rank), clock)

            self._answer(rank, build)
            while (command := self._inbox[rank].get()) is not None:
                self._answer(rank, partial(self._run, rank, command))

        self._threads = [threading.Thread(target=serve, args=(rank,), daemon=True) for rank in range(config.tp_size)]
        for thread in self._threads:
            thread.start()
        self._await_start()

    def close(self, failed: bool) -> None:
        """Ends the connectors and the threads."""
        for executor in self.executors:
            if executor is not None:
                executor.driver.shutdown()
        for inbox in self._inbox:
            inbox.put(None)
        for thread in self._threads:
            thread.join(CALL_TIMEOUT_S)

    def _senders(self) -> list[Callable[[Any], object]]:
        return [inbox.put for inbox in self._inbox]

    def _run(self, rank: int, command: tuple[str, tuple[Any, ...]]) -> Any:
        executor = self.executors[rank]
        assert executor is not None
        return run_method(executor, *command)

    def _answer(self, rank: int, work: Callable[[], Any]) -> None:
        try:
            self._outbox[rank].put(_Outcome(work()))
        except BaseException as error:
            self._group.abort()
            self._outbox[rank].put(_Outcome(error=error))

    def _collect(self, timeout_s: float) -> list[Any]:
        outcomes = [outbox.get(timeout=timeout_s) for outbox in self._outbox]
        _raise_first([outcome.error for outcome in outcomes])
        return [outcome.value for outcome in outcomes]


def _raise_first(errors: list[BaseException | None]) -> None:
    """Raises the error of the rank that failed first: not that of one that stopped because another had."""
    raised = [error for error in errors if error is not None]
    if raised:
        raise next((error for error in raised if not isinstance(error, ContractError)), raised[0])


class ProcessRanks(_RanksApart):
    """Ranks as processes, as in the runtime; collectives by torch.distributed (gloo, or nccl for CUDA tensors)."""

    def __init__(self, config: SimConfig, connector: ConnectorConfig | None) -> None:
        # Ranks are forked from a server that has imported torch and done nothing else: no CUDA, no threads.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])
        port = _free_port()
        self._pipes: list[Any] = []
        self._processes: list[Any] = []
        for rank in range(config.tp_size):
            ours, theirs = context.Pipe()
            arguments = (rank, config, connector, installed(), port, list(sys.path), dict(os.environ), theirs)
            process = context.Process(target=_rank_main, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        self._await_start()

    def close(self, failed: bool) -> None:
        """Ends the processes: asks and waits, then kills; after a failure kills at once."""
        for pipe in self._pipes:
            with suppress(OSError):
                pipe.send(None)
        for process in self._processes:
            process.join(0.0 if failed else STOP_TIMEOUT_S)
            if process.is_alive():
                process.kill()
                process.join()
        for pipe in self._pipes:
            pipe.close()
        self._pipes, self._processes = [], []

    def _senders(self) -> list[Callable[[Any], object]]:
        return [pipe.send for pipe in self._pipes]

    def _collect(self, timeout_s: float) -> list[Any]:
        """The answers of all ranks. When one fails the others may wait for it for ever, so its error ends the wait."""
        waiting = {pipe: rank for rank, pipe in enumerate(self._pipes)}
        values: list[Any] = [None] * len(self._pipes)
        while waiting:
            ready = multiprocessing.connection.wait(list(waiting), timeout_s)
            if not ready:
                raise ContractError(f"ranks {sorted(waiting.values())} did not answer within {timeout_s} s")
            errors: list[BaseException | None] = []
            for pipe in ready:
                rank = waiting.pop(pipe)
                values[rank], error = _receive(pipe, rank)
                errors.append(error)
            if any(errors):
                errors += [_receive(pipe, rank)[1] for pipe, rank in waiting.items() if pipe.poll(0.5)]
                _raise_first(errors)
        return values


def _receive(pipe: Any, rank: int) -> tuple[Any, BaseException | None]:
    try:
        kind, value = pipe.recv()
    except EOFError:
        return None, RuntimeError(f"the process of rank {rank} ended")
    return (value, None) if kind == "answer" else (None, value)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _rank_main(
    rank: int,
    config: SimConfig,
    connector: ConnectorConfig | None,
    installation: Installation | None,
    port: int,
    path: list[str],
    environment: dict[str, str],
    pipe: Any,
) -> None:
    sys.path[:] = path
    os.environ.clear()
    os.environ.update(environment)
    for name, value in (("RANK", rank), ("SIZE", config.tp_size), ("LOCAL_RANK", rank), ("LOCAL_SIZE", config.tp_size)):
        os.environ[f"OMPI_COMM_WORLD_{name}"] = str(value)
    with ExitStack() as stack:
        if installation is not None:
            stack.enter_context(install(installation.paths, installation.early))
        try:
            executor = start_rank(config, connector, _join_group(rank, config, port), _clock())
        except BaseException as error:
            pipe.send(("error", _sendable(error)))
            return
        pipe.send(("answer", None))
        _serve(executor, pipe)
        executor.driver.shutdown()
        torch.distributed.destroy_process_group()


def _join_group(rank: int, config: SimConfig, port: int) -> Communicator:
    # NCCL wants a device for every rank; gloo takes several ranks on one.
    has_devices = config.device == "cuda" and torch.cuda.device_count() >= config.tp_size
    backend = "cpu:gloo,cuda:nccl" if has_devices else "gloo"
    torch.distributed.init_process_group(
        backend, init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=config.tp_size
    )
    return ProcessRank(rank, config.tp_size)


def _clock() -> Callable[[], float]:
    from time import perf_counter

    return perf_counter


def _serve(executor: Executor, pipe: Any) -> None:
    while (command := pipe.recv()) is not None:
        try:
            pipe.send(("answer", run_method(executor, *command)))
        except BaseException as error:
            pipe.send(("error", _sendable(error)))


def _sendable(error: BaseException) -> BaseException:
    """The error itself where it can be pickled, else a RuntimeError with its text."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError("".join(traceback.format_exception_only(error)).strip())
    return error
