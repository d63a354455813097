"""Field reports about S3, met by a whole agent: its socket, an engine, and a server behind a proxy that does harm."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from support.agents import FakeEngine, RunningAgent, agent_settings, running_agent, small_spec
from support.faulty_proxy import SLOW_DOWN, Fault, FaultyProxy, Request, faulty_proxy, s3_error
from support.servers import S3Place

from s3kv.client.protocol import Drained
from s3kv.identity import NamespaceSpec
from s3kv.settings import Settings

SPEC = small_spec()
QUICK: dict[str, Any] = {
    "request_timeout_s": 2.0,
    "backoff_initial_s": 0.01,
    "backoff_max_s": 0.05,
    "breaker_reset_s": 0.1,
    "retries": 4,
}


@pytest.fixture
def proxy(moto_place: S3Place) -> Iterator[FaultyProxy]:
    with faulty_proxy(moto_place.endpoint) as running:
        yield running


class OnS3:
    """An agent and an engine on a bucket behind the proxy."""

    def __init__(self, folder: Path, place: S3Place, proxy: FaultyProxy) -> None:
        self._folder, self._place, self.proxy = folder, place, proxy

    def settings(self, **store: Any) -> Settings:
        values = self._place.values(endpoint=self.proxy.endpoint, **QUICK | store)
        return agent_settings(self._folder, store=values, upload={"chunk_target_bytes": 4096, "give_up_s": 20.0})

    def client(self) -> Any:
        return self._place.client()

    @property
    def bucket(self) -> str:
        return self._place.bucket

    @property
    def prefix(self) -> str:
        return self._place.prefix


@pytest.fixture
def on_s3(tmp_path: Path, moto_place: S3Place, proxy: FaultyProxy) -> OnS3:
    return OnS3(tmp_path, moto_place, proxy)


def wait(agent: RunningAgent, condition: Any) -> None:
    agent.until(condition, turns=8000)  # requests go through a server of their own


def store_all(agent: RunningAgent, engine: FakeEngine, chain: list[bytes], spec: NamespaceSpec = SPEC) -> None:
    engine.save(chain)
    engine.leader.finished(chain[-1])
    wait(agent, lambda: len(agent.namespace(spec).catalog.lookup(chain)) == len(chain))


def drop(agent: RunningAgent) -> None:
    agent.forget()


def test_case_35_a_strict_store_serves_save_load_and_collection(on_s3: OnS3) -> None:
    """It refuses chunked signatures, checksum headers and a bulk delete; the documented settings avoid all three."""

    def strict(request: Request) -> Fault | None:
        if "aws-chunked" in request.headers.get("content-encoding", ""):
            return s3_error(501, "NotImplemented")
        if any(name.startswith(("x-amz-checksum-", "x-amz-trailer")) for name in request.headers):
            return s3_error(400, "InvalidArgument")
        if request.method == "POST" and "delete" in request.target:
            return s3_error(400, "MissingContentMD5")
        return None

    from support.command import Cli

    on_s3.proxy.rule(strict)
    settings = on_s3.settings(delete_mode="single")
    with running_agent(settings) as agent:
        engine = FakeEngine.start(settings, SPEC)
        chain = engine.chain(1, 4)
        store_all(agent, engine, chain)
        drop(agent)
        assert engine.load(chain) == 4
        values = settings.store.model_dump(mode="json", exclude_defaults=True)
        values["secret_access_key"] = settings.store.secret_access_key.get_secret_value()  # type: ignore[union-attr]
        cli = Cli(*(word for name, value in values.items() for word in ("--set", f"store.{name}={value}")))
        cli("gc", "--max-bytes", "1", "--grace", "0s", "--yes").ok()
        drop(agent)
        wait(agent, lambda: agent.namespace(SPEC).catalog.lookup(chain) == [])
        assert engine.load(chain) == 0
        engine.close()


def test_case_36_43_every_path_begins_with_the_bucket_and_every_list_prefix_ends_with_a_slash(on_s3: OnS3) -> None:
    settings = on_s3.settings()
    with running_agent(settings) as agent:
        engine = FakeEngine.start(settings, SPEC)
        store_all(agent, engine, engine.chain(1, 4))
        drop(agent)
        assert engine.load(engine.chain(1, 4)) == 4
        engine.close()
    seen = on_s3.proxy.seen
    assert len(seen) > 5
    assert all(request.path.rstrip("/").startswith(f"/{on_s3.bucket}") for request in seen)
    asked = [parse_qs(urlsplit(request.target).query) for request in seen]
    prefixes = [query["prefix"][0] for query in asked if "list-type" in query]
    assert prefixes and all(prefix.endswith("/") for prefix in prefixes)


@pytest.mark.parametrize("kind", ["truncate", "reset_body", "longer", "shorter", "corrupt"])
def test_case_37_a_cut_or_wrong_body_is_fetched_again_or_a_miss(on_s3: OnS3, kind: Any) -> None:
    """No partial byte is ever offered: `load` checks every one."""
    settings = on_s3.settings()
    with running_agent(settings) as agent:
        engine = FakeEngine.start(settings, SPEC)
        chain = engine.chain(1, 4)
        store_all(agent, engine, chain)
        drop(agent)
        on_s3.proxy.inject(Fault(kind, count=100), times=2, method="GET", contains="/chunk/")
        engine.load(chain)
        on_s3.proxy.inject(Fault(kind, count=100), times=None, method="GET", contains="/chunk/")
        drop(agent)
        assert engine.load(chain) == 0
        on_s3.proxy.clear()
        agent.call(agent.namespace(SPEC).directory.check)
        engine.save(chain)
        wait(agent, lambda: len(agent.namespace(SPEC).catalog.lookup(chain)) == 4)
        drop(agent)
        assert engine.load(chain) == 4
        engine.close()


def test_case_39_sixty_four_chunks_at_once(on_s3: OnS3, caplog: pytest.LogCaptureFixture) -> None:
    settings = on_s3.settings(max_connections=64, request_timeout_s=30.0)
    fetch = settings.fetch.model_copy(update={"concurrency": 64})
    upload = settings.upload.model_copy(update={"chunk_target_bytes": 1024})
    settings = settings.model_copy(update={"fetch": fetch, "upload": upload})
    with caplog.at_level(logging.WARNING), running_agent(settings) as agent:
        engine = FakeEngine.start(settings, SPEC)
        chain = engine.chain(1, 64)
        store_all(agent, engine, chain)
        assert agent.totals().total(agent.totals().uploaded_chunks) == 64
        drop(agent)
        assert engine.load(chain) == 64
        engine.close()
    assert on_s3.proxy.peak_connections <= 64 + 2
    assert not [record for record in caplog.records if "pool" in record.getMessage().lower()]


@pytest.mark.parametrize(
    "fault", [SLOW_DOWN, s3_error(500, "InternalError"), s3_error(429, "TooManyRequests"), Fault("reset")]
)
def test_case_42_three_refusals_then_success_cost_no_block(on_s3: OnS3, fault: Fault) -> None:
    settings = on_s3.settings()
    with running_agent(settings) as agent:
        engine = FakeEngine.start(settings, SPEC)
        wait(agent, agent.namespace(SPEC).catalog_open.is_set)
        for method in ("PUT", "GET"):
            on_s3.proxy.inject(fault, times=3, method=method, contains="/chunk/")
        chain = engine.chain(1, 1)
        store_all(agent, engine, chain)
        drop(agent)
        assert engine.load(chain) == 1
        assert agent.totals().total(agent.totals().dropped_blocks) == 0
        puts = [each for each in on_s3.proxy.seen if each.method == "PUT" and "/chunk/" in each.target]
        assert len(puts) <= 2 * (1 + settings.store.retries), "two objects, bounded tries"
        engine.close()


@pytest.mark.parametrize(
    "fault",
    [s3_error(403, "AccessDenied"), s3_error(400, "ExpiredToken"), s3_error(403, "RequestTimeTooSkewed")],
    ids=["denied", "expired", "skewed"],
)
def test_case_40_45_refused_credentials_pass_without_a_restart(
    on_s3: OnS3, fault: Fault, caplog: pytest.LogCaptureFixture
) -> None:
    """While they are refused the engine is served without; nothing raises, nothing prints a secret or a traceback."""
    settings = on_s3.settings()
    on_s3.proxy.inject(fault, times=None)
    with caplog.at_level(logging.DEBUG), running_agent(settings) as agent:
        engine = FakeEngine.start(settings, SPEC)
        chain = engine.chain(1, 4)
        engine.save(chain)
        assert engine.load(chain) == 4
        wait(agent, lambda: agent.totals().total(agent.totals().troubles) > 0)
        on_s3.proxy.clear()
        wait(agent, lambda: len(agent.namespace(SPEC).catalog.lookup(chain)) == 4)
        drop(agent)
        assert engine.load(chain) == 4
        engine.close()
    assert not [record for record in caplog.records if record.exc_info]
    assert "test-secret-key" not in caplog.text


def test_case_48_a_put_that_breaks_off_leaves_no_object_and_no_multipart_upload(on_s3: OnS3) -> None:
    settings = on_s3.settings()
    with running_agent(settings) as agent:
        engine = FakeEngine.start(settings, SPEC)
        wait(agent, agent.namespace(SPEC).catalog_open.is_set)
        on_s3.proxy.inject(Fault("reset"), times=None, method="PUT", contains="/chunk/")
        engine.save(engine.chain(1, 4))
        wait(agent, lambda: agent.totals().total(agent.totals().failed_puts) > 2)
        found = on_s3.client().list_objects_v2(Bucket=on_s3.bucket, Prefix=f"{on_s3.prefix}/")
        assert not [each for each in found.get("Contents", []) if "/chunk/" in each["Key"]]
        assert "Uploads" not in on_s3.client().list_multipart_uploads(Bucket=on_s3.bucket)
        on_s3.proxy.clear()
        wait(agent, lambda: len(agent.namespace(SPEC).catalog.lookup(engine.chain(1, 4))) == 4)
        engine.close()
    assert not [each for each in on_s3.proxy.seen if "uploadId" in each.target or "uploads" in each.target]


def test_case_l4_an_object_deleted_behind_our_back_is_forgotten_by_every_agent(tmp_path: Path, on_s3: OnS3) -> None:
    settings = on_s3.settings()
    other = settings.model_copy(
        update={"agent": settings.agent.model_copy(update={"socket": tmp_path / "b/agent.sock"})}
    )
    with running_agent(settings) as first, running_agent(other, seed=1) as second:
        engines = [FakeEngine.start(each, SPEC) for each in (settings, other)]
        chain = engines[0].chain(1, 2)
        store_all(first, engines[0], chain)
        wait(second, lambda: len(second.namespace(SPEC).catalog.lookup(chain)) == 2)
        found = on_s3.client().list_objects_v2(Bucket=on_s3.bucket, Prefix=f"{on_s3.prefix}/")
        for each in found["Contents"]:
            if "/chunk/" in each["Key"] and each["Key"].endswith("g0"):
                on_s3.client().delete_object(Bucket=on_s3.bucket, Key=each["Key"])
        assert engines[1].load(chain) == 0
        wait(first, lambda: first.namespace(SPEC).catalog.lookup(chain) == [])
        drop(first)
        assert engines[0].load(chain) == 0
        for engine in engines:
            engine.close()


def test_drain_over_the_socket_says_what_an_outage_kept_from_being_stored(on_s3: OnS3) -> None:
    from s3kv.client.connection import Connection
    from s3kv.client.protocol import Drain

    settings = on_s3.settings()
    with running_agent(settings) as agent:
        engine = FakeEngine.start(settings, SPEC)
        wait(agent, agent.namespace(SPEC).catalog_open.is_set)
        on_s3.proxy.outage = True
        engine.save(engine.chain(1, 3))
        connection = Connection.open(settings.agent.socket, "cli", timeout_s=5)
        drained = connection.call(Drain(connection.next_id(), 0.3), Drained, timeout_s=20)
        assert (drained.chunks, drained.unsaved_blocks) == (0, 3)
        on_s3.proxy.clear()
        drained = connection.call(Drain(connection.next_id(), 20.0), Drained, timeout_s=30)
        assert drained.unsaved_blocks == 0
        connection.close()
        engine.close()
