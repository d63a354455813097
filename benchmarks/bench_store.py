"""Put and get of 16 MiB objects, 4 at once, through s3kv's store and through raw clients, on nginx and SeaweedFS."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from benchmarks.harness import MIB, Options, Report, Series, at_least, at_most, race, ratio
from benchmarks.origins import Origin, nginx, seaweedfs
from benchmarks.raw_clients import Aioboto3, Boto3, Client, Obstore, Ours, Work

SIZE, AT_ONCE = 16 * MIB, 4
SIZES = (256 << 10, 1 * MIB, 4 * MIB, 16 * MIB, 64 * MIB)
CONCURRENCIES = (1, 2, 4, 8, 16)


def measure(options: Options) -> Report:
    report = Report(f"store: {SIZE // MIB} MiB objects, {AT_ONCE} at once, into the caller's buffer, payload unsigned")
    with ExitStack() as stack:
        plain, tls = stack.enter_context(nginx())
        for origin in (plain, tls):
            _compare(report, origin, 8, options.rounds(10))
        if not options.quick:
            report.data["size"] = [_sweep(plain, size, AT_ONCE) for size in SIZES]
            report.data["concurrency"] = [_sweep(plain, SIZE, at_once) for at_once in CONCURRENCIES]
    with seaweedfs() as origin:
        _compare(report, origin, 4, options.rounds(5))
    report.note(
        "obstore without the copy leaves the bytes in a buffer of its own; a cache needs them in a slot, so the goal "
        "is held against obstore and one copy. SeaweedFS itself takes most of two cores: there, read the CPU rows."
    )
    return report


def _clients(origin: Origin, size: int) -> dict[str, Client]:
    return {
        "s3kv": Ours(origin, size),
        "obstore": Obstore(origin, size),
        "obstore, no copy": Obstore(origin, size, copy=False),
        "boto3": Boto3(origin, size),
        "aioboto3": Aioboto3(origin, size),
    }


def _compare(report: Report, origin: Origin, objects: int, rounds: int) -> None:
    clients = _clients(origin, SIZE)
    keys = [f"object-{number}" for number in range(objects)]
    works: tuple[Work, Work] = ("put", "get")
    for work in works:
        chosen = [name for name in clients if work == "get" or name != "obstore, no copy"]
        series = race({name: _runner(clients[name], work, keys) for name in chosen}, rounds, budget_s=25)
        _rows(report, f"{origin.name}: {work}", series, objects * SIZE)
    ours = clients["s3kv"]
    assert isinstance(ours, Ours)
    ours.check()
    for client in clients.values():
        client.close()


def _runner(client: Client, work: Work, keys: list[str]) -> Any:
    return lambda: client.run(work, keys, AT_ONCE)


def _rows(report: Report, what: str, series: dict[str, Series], nbytes: int) -> None:
    ours = series["s3kv"]
    report.rates(
        what, ours, "raw obstore", series["obstore"], nbytes, goal=at_least(0.95), cpu_goal=at_most(1.1)
    )  # fmt: skip
    for name in series.keys() - {"s3kv", "obstore"}:
        report.rates(what, ours, f"raw {name}" if name != "obstore, no copy" else name, series[name], nbytes)
    best = min((name for name in series if name not in ("s3kv", "obstore, no copy")), key=lambda n: series[n].wall_s)
    report.row(f"{what}: the best raw client, {best}, is ahead by", ratio(ours, series[best]), "×")


def _sweep(origin: Origin, size: int, at_once: int) -> dict[str, Any]:
    """One point of the plots: s3kv and raw obstore."""
    objects = max(at_once, min(64, 64 * MIB // size))
    keys = [f"sweep-{size}-{number}" for number in range(objects)]
    clients: dict[str, Client] = {"s3kv": Ours(origin, size), "obstore": Obstore(origin, size)}
    point: dict[str, Any] = {"size": size, "at_once": at_once}
    works: tuple[Work, Work] = ("put", "get")
    for work in works:

        def runner(client: Client, work: Work = work) -> Any:
            return lambda: client.run(work, keys, at_once)

        series = race({name: runner(client) for name, client in clients.items()}, 3, budget_s=5)
        for name, each in series.items():
            point[f"{work} {name}"] = objects * size / 1e6 / each.wall_s
    for client in clients.values():
        client.close()
    return point
