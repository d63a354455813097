"""The claims of docs/security.md, one test each."""

from __future__ import annotations

import ast
import json
import logging
import re
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.agents import FakeEngine, agent_settings, running_agent, small_spec
from support.command import Cli

from s3kv.agent import peer
from s3kv.client import protocol as p
from s3kv.client.connection import Connection
from s3kv.format import keys
from s3kv.identity import NamespaceSpec
from s3kv.settings import Settings, StoreSettings, load_settings
from s3kv.sim import ConnectorConfig, Engine, SimConfig, SimRequest, install
from s3kv.sim.demo import write_settings
from s3kv.store.opening import open_unguarded

ROOT = Path(__file__).parents[2]
CONNECTOR = ConnectorConfig("s3kv.connector", "S3KVScheduler", "S3KVWorker")
SALT = "the-raw-salt-of-tenant-7"
PROMPT = "A confidential prompt that nobody but its tenant may ever read, said twice. " * 2


def raw_answers(path: Path, *messages: bytes) -> bytes:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.settimeout(20)
        client.connect(str(path))
        client.sendall(b"".join(messages))
        answers = b""
        while piece := client.recv(65536):
            answers += piece
    return answers


def asked(settings: Settings) -> list[bytes]:
    """What the agent says to whoever asks."""
    connection = Connection.open(settings.agent.socket, "cli", timeout_s=5)
    try:
        kinds = (p.Status, p.Metrics)
        return [connection.call(kind(connection.next_id()), p.Report, timeout_s=10).text for kind in kinds]
    finally:
        connection.close()


# ---- the socket


def test_socket_and_its_folder_are_the_users_alone(tmp_path: Path) -> None:
    settings = agent_settings(tmp_path / "run")
    with running_agent(settings):
        path = settings.agent.socket
        assert path.stat().st_mode & 0o777 == 0o600
        assert path.parent.stat().st_mode & 0o777 == 0o700
        assert path.with_suffix(".lock").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(("uid", "own", "allowed"), [(1000, 1000, True), (0, 1000, True), (1001, 1000, False)])
def test_only_the_agents_own_user_and_root_may_connect(uid: int, own: int, allowed: bool) -> None:
    assert peer.may_connect(peer.Peer(1, uid), own) is allowed


def test_a_process_of_another_user_is_refused_whatever_the_files_mode_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("s3kv.agent.server.peer_of", lambda sock: peer.Peer(4242, 12345))
    settings = agent_settings(tmp_path)
    with running_agent(settings) as agent:
        settings.agent.socket.chmod(0o666)
        answers = raw_answers(settings.agent.socket, p.encode(p.Hello(1, p.PROTOCOL, "worker")))
        reply = p.decode_reply(answers[4:])
        assert isinstance(reply, p.Refused) and "user 12345" in reply.text
        assert agent.call(lambda: agent.agent.node._connections) == {}  # type: ignore[union-attr]


def test_a_command_line_client_may_not_touch_slots(tmp_path: Path) -> None:
    settings, spec = agent_settings(tmp_path), small_spec()
    with running_agent(settings):
        hello = p.encode(p.Hello(1, p.PROTOCOL, "cli"))
        assert b"Attached" not in raw_answers(
            settings.agent.socket, hello, p.encode(p.Attach(2, spec.to_json(), "e", 0, 1))
        )


# ---- no code from data


def modules(*, but: str = "/sim/") -> Iterator[tuple[Path, ast.AST]]:
    for folder in ("s3kv", "cli"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            if but not in str(path):
                yield path, ast.parse(path.read_text())


def test_nothing_is_unpickled_or_evaluated() -> None:
    forbidden = {"pickle", "marshal", "shelve", "dill", "cloudpickle"}
    calls = {"eval", "exec", "compile", "__import__"}
    for path, tree in modules():
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                assert not {name.name.split(".")[0] for name in node.names} & forbidden, path
            if isinstance(node, ast.ImportFrom):
                assert (node.module or "").split(".")[0] not in forbidden, path
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in calls, path
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                name = ast.unparse(node.func)
                assert name not in ("yaml.load", "yaml.unsafe_load", "torch.load", "np.load", "numpy.load"), path


# ---- what reaches the bucket, the disk, the logs and the metrics


def spellings(text: str) -> list[bytes]:
    """The ways in which a prompt could lie somewhere: as text, and as its tokens (which are the text's bytes)."""
    tokens = list(text.encode())
    part = tokens[:24]
    return [
        text.encode()[:24],
        b"".join(token.to_bytes(2, "little") for token in part),
        b"".join(token.to_bytes(4, "little") for token in part),
        b"".join(token.to_bytes(8, "little") for token in part),
        ", ".join(map(str, part)).encode(),
        ",".join(map(str, part)).encode(),
    ]


def test_case_19_no_raw_salt_and_no_prompt_in_any_key_object_index_log_metric_or_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A whole engine serves a salted prompt twice, with every log on; then everything that was written is searched."""
    settings = agent_settings(
        tmp_path, store={"url": f"file://{tmp_path}/store"}, identity={"fingerprint": "simulated, seed 0"}
    )
    write_settings(settings, tmp_path / "s3kv.yaml")
    monkeypatch.setenv("S3KV_CONFIG", str(tmp_path / "s3kv.yaml"))
    texts = []
    with (
        caplog.at_level(logging.DEBUG),
        running_agent(settings) as agent,
        install("both"),
        Engine(SimConfig(), CONNECTOR) as engine,
    ):
        for number in (1, 2):
            (result,) = engine.generate([SimRequest(number, tuple(PROMPT.encode()), 4, cache_salt=SALT)])
            engine.reset_reuse()
        assert result.loaded_tokens > 0
        agent.drain()
        texts += asked(settings)
    written = [path for path in tmp_path.rglob("*") if path.is_file() and path.name != "s3kv.yaml"]
    assert any("/chunk/" in str(path) for path in written) and any("/log/" in str(path) for path in written)
    texts += [caplog.text.encode(), *(str(path).encode() for path in written), *(path.read_bytes() for path in written)]
    for text in texts:
        for spelling in [SALT.encode(), *spellings(PROMPT)]:
            assert spelling not in text


def test_salted_and_unsalted_prompts_have_nothing_in_common() -> None:
    """So a tenant learns of another's prompt only under the same salt."""
    from s3kv.identity import Scope, chain_hashes

    chains = [set(chain_hashes(bytes(32), 4, range(64), scope=Scope(salt, None))) for salt in (None, "", "a", "b")]
    assert all(not one & other for at, one in enumerate(chains) for other in chains[at + 1 :] if one != other)
    assert len({frozenset(chain) for chain in chains}) >= 3


@pytest.mark.parametrize("model", ["../../etc/passwd", "a/b_c", "x" * 5000, "s3://other/bucket", "\0\n", "ünïcödé"])
def test_names_of_namespaces_are_safe_in_paths_and_keys(model: str) -> None:
    spec = NamespaceSpec(model, "weights", "bfloat16", 4, small_spec().groups)
    assert re.fullmatch("[0-9a-f]{32}", spec.name)
    key = keys.chunk_key(spec.name, bytes(16), 0)
    assert re.fullmatch(r"ns/[0-9a-f]{32}/chunk/[0-9a-f]{2}/[0-9a-f]{32}/g0", key)


# ---- secrets and TLS


SECRETS = {"secret_access_key": "wJalrXUtnFEMI-secret", "session_token": "FwoGZXIvYXdz-token"}


def secret_settings(tmp_path: Path, **more: object) -> Settings:
    store = {"url": "s3://bucket/p", "endpoint": "http://127.0.0.1:1", "region": "us-east-1", "access_key_id": "AKIA"}
    return agent_settings(tmp_path, store={**store, **SECRETS, **more})


def test_secrets_are_in_no_settings_output_log_status_or_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = secret_settings(tmp_path, request_timeout_s=0.2, retries=0)
    texts = [repr(settings), str(settings), settings.model_dump_json(), json.dumps(settings.model_dump(), default=str)]
    with caplog.at_level(logging.DEBUG), running_agent(settings) as agent:
        engine = FakeEngine.start(settings, small_spec())
        engine.save(engine.chain(1, 2))
        agent.drain(1.0)
        texts += [text.decode() for text in asked(settings)]
        engine.close()
    config = tmp_path / "with-secrets.yaml"
    write_settings(settings, config)
    assert config.stat().st_mode & 0o777 == 0o600
    for command in (["config", "show"], ["ls"], ["doctor"], ["config", "show", "--json"]):
        ran = Cli("--config", str(config))(*command)
        texts += [ran.out, ran.err]
    with pytest.raises(Exception) as caught:
        load_settings(None, store={"secret_access_key": ["not", "a", SECRETS["secret_access_key"]]})
    texts += [str(caught.value), caplog.text]
    for text in texts:
        assert not [secret for secret in SECRETS.values() if secret in text]


@pytest.mark.parametrize("client", ["obstore", "aioboto3"])
def test_certificates_are_verified_unless_a_setting_says_otherwise_loudly(
    client: str, caplog: pytest.LogCaptureFixture
) -> None:
    values = {"url": "s3://bucket/p", "endpoint": "https://127.0.0.1:1", "region": "us-east-1", "client": client}
    assert StoreSettings().tls_verify is True
    with caplog.at_level(logging.WARNING):
        open_unguarded(StoreSettings.model_validate(values))
        assert "TLS" not in caplog.text
        open_unguarded(StoreSettings.model_validate({**values, "tls_verify": False}))
    assert "store.tls_verify" in caplog.text and "NOT verified" in caplog.text
