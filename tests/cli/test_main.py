"""The frame: options, exit codes, start-up, and errors of one line (field report 45)."""

from __future__ import annotations

import datetime
import http.server
import os
import re
import ssl
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml
from s3kv_cli.common import COMMON
from s3kv_cli.config import settings_template
from s3kv_cli.main import app
from support.command import Cli
from support.places import Place
from typer.main import get_command

from s3kv.settings import load_settings

ROOT = Path(__file__).parents[2]


def test_every_command_has_help_with_an_example_and_json() -> None:
    def leaves(command: object, path: list[str]) -> Iterator[tuple[list[str], object]]:
        children = getattr(command, "commands", None)
        if children is None:
            yield path, command
        for name, child in (children or {}).items():
            yield from leaves(child, [*path, name])

    found = {" ".join(path): command for path, command in leaves(get_command(app), [])}
    assert len(found) >= 26
    for name, command in found.items():
        assert f"Example: s3kv {name}" in (command.epilog or ""), name  # type: ignore[attr-defined]
        options = {option for param in command.params for option in param.opts}  # type: ignore[attr-defined]
        assert {"--json", "--store", "--config", "--set"} <= options, name
        assert command.help, name  # type: ignore[attr-defined]
        assert Cli()(*name.split(), "--help").ok().out


def test_options_work_before_and_after_the_command(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/x"
    for arguments in (("--store", url, "config", "show", "--json"), ("config", "show", "--json", "--store", url)):
        shown = Cli()(*arguments).ok().json["settings"]["store.url"]
        assert shown == {"value": url, "source": "command line"}
    assert set(COMMON) >= {"config", "store", "region", "endpoint", "json"}


def test_config_says_where_each_setting_came_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "s3kv.yaml"
    file.write_text("tier: {capacity_bytes: 1048576}\nstore: {secret_access_key: hush, access_key_id: key}\n")
    monkeypatch.setenv("S3KV_LOAD__POLICY", "resident")
    ran = Cli()("config", "show", "--config", str(file), "--json", "--region", "eu-west-1").ok()
    shown = ran.json["settings"]
    assert shown["tier.capacity_bytes"] == {"value": 1048576, "source": str(file)}
    assert shown["load.policy"] == {"value": "resident", "source": "S3KV_LOAD__POLICY"}
    assert shown["store.region"]["source"] == "command line" and shown["save.enabled"]["source"] == "default"
    assert "hush" not in ran.out
    assert ran.json["kv_connector_config"]["connector_module"] == "s3kv.connector"


def test_config_check_finds_typos_and_open_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "s3kv.yaml"
    file.write_text("store: {secret_access_key: a, access_key_id: b, url: 's3://my-kv/p'}\n")
    file.chmod(0o644)
    monkeypatch.setenv("S3KV_STOER__REGION", "x")
    ran = Cli()("config", "check", "--config", str(file), "--json")
    found = {each["setting"] for each in ran.json["findings"]}
    assert ran.code == 1 and found == {"S3KV_STOER__REGION", "store.region", "store.secret_access_key"}
    assert Cli()("config", "check", "--store", f"file://{tmp_path}/kv").code == 1
    monkeypatch.delenv("S3KV_STOER__REGION")
    Cli()("config", "check", "--store", f"file://{tmp_path}/kv").ok()


def test_config_check_looks_at_what_aws_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check = ("config", "check", "--store", "s3://my-kv/p", "--region", "eu-west-1", "--json")
    Cli()(*check).ok()
    monkeypatch.setenv("AWS_ENDPOINT_URL", "localhost:9000")
    (finding,) = Cli()(*check).json["findings"]
    assert finding["finding"].startswith("AWS_ENDPOINT_URL must begin with http")
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    (finding,) = Cli()(*check, "--set", "store.access_key_id=a").json["findings"]
    assert "must be set together" in finding["finding"]


@pytest.mark.parametrize("value", ["2026-13-45", "!!int many", "[" * 5000, "*absent"])
def test_a_value_that_is_no_yaml_is_wrong_use(value: str) -> None:
    ran = Cli()("config", "show", "--set", f"store.region={value}")
    assert ran.code == 2 and "'store.region'" in ran.err and "internal error" not in ran.err


def test_template_changes_nothing_and_is_valid_once_uncommented(tmp_path: Path) -> None:
    assert yaml.safe_load(settings_template()) is None
    lines = settings_template().splitlines()
    opened = [line.removeprefix("#") for line in lines if re.match(r"#(  )?\w+:", line)]
    file = tmp_path / "s3kv.yaml"
    file.write_text("\n".join(line for line in opened if "(chosen for" not in line))
    assert load_settings(file).model_dump() == load_settings().model_dump()


def test_fingerprint_is_the_connectors(tmp_path: Path) -> None:
    from s3kv.identity import fingerprint_model

    (tmp_path / "model.safetensors").write_bytes(b"weights")
    assert Cli()("fingerprint", str(tmp_path)).ok().out.strip() == fingerprint_model(tmp_path)
    assert Cli()("fingerprint", str(tmp_path / "absent")).code == 2


@pytest.mark.parametrize(
    "arguments",
    [
        ("nonsense",),
        ("ls", "--limit", "0"),
        ("gc", "--max-bytes", "lots"),
        ("config", "show", "--set", "x"),
        ("usage", "--set", "store.url={"),
    ],
)
def test_wrong_use_is_2(arguments: tuple[str, ...], tmp_path: Path) -> None:
    ran = Cli("--store", f"file://{tmp_path}/kv")(*arguments)
    assert ran.code == 2 and "Traceback" not in ran.err


def test_a_bad_setting_is_one_line() -> None:
    ran = Cli()("usage", "--set", "store.client=curl")
    assert ran.code == 1 and ran.err.startswith("s3kv: setting store.client (or S3KV_STORE__CLIENT)")
    assert ran.err.count("\n") == 1


@pytest.mark.parametrize("redirection", [">&-", ">&- 2>&-", "| head -n 1"])
def test_streams_that_are_closed_are_no_fault(redirection: str) -> None:
    ran = subprocess.run(
        ["bash", "-o", "pipefail", "-c", f'"$0" -m s3kv_cli.main config template {redirection}', sys.executable],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert (ran.returncode, ran.stderr) == (0, "")


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_what_the_locale_lacks_is_shown_escaped(encoding: str) -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "s3kv_cli.main", "--store", "memory://größe…", "config", "show"],
        capture_output=True, timeout=120, check=False, env={**os.environ, "PYTHONIOENCODING": encoding},
    )  # fmt: skip
    shown = {"ascii": "gr\\xf6\\xdfe\\u2026", "latin-1": "größe\\u2026", "utf-8": "größe…"}[encoding]
    assert ran.returncode == 0 and shown in ran.stdout.decode(encoding)


def test_a_fault_of_ours_is_one_line_too(local: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    from s3kv.catalog import browse

    async def broken(store: object) -> None:
        raise RuntimeError("no\nsuch luck")

    monkeypatch.setattr(browse, "find_namespaces", broken)
    ran = local.cli("usage")
    assert ran.code == 1 and ran.err.startswith("s3kv: internal error: RuntimeError: no such luck")


def test_interruption_is_130(local: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    from s3kv.catalog import browse

    async def interrupted(store: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(browse, "find_namespaces", interrupted)
    ran = local.cli("usage")
    assert ran.code == 130 and ran.err == "s3kv: interrupted\n"


STARTUP = """
import sys
from s3kv_cli.main import main
code = main(["--help"])
heavy = {"torch", "tensorrt_llm", "boto3", "obstore", "numpy", "lmdb", "pydantic", "aioboto3"} & set(sys.modules)
assert not heavy, heavy
sys.exit(code)
"""


def test_case_34_start_up_is_light_and_touches_no_cuda() -> None:
    subprocess.run([sys.executable, "-c", STARTUP], check=True, capture_output=True, timeout=60)


def test_the_list_of_packages_is_complete() -> None:
    listed = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    folders = {path.parent for path in (ROOT / "s3kv").rglob("*.py")}
    assert listed == {".".join(folder.relative_to(ROOT).parts) for folder in folders} | {"s3kv_cli"}


def test_completion_is_offered() -> None:
    assert "--install-completion" in Cli()("--help").ok().out


@contextmanager
def answering(status: int, code: str, extra: str = "", tls: ssl.SSLContext | None = None) -> Iterator[str]:
    """A server on loopback that gives one S3 error for everything; yields its endpoint and counts requests."""

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _refuse(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            self.rfile.read(length)
            body = f"<Error><Code>{code}</Code><Message>no</Message>{extra}</Error>".encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _refuse

        def log_message(self, format: str, *args: object) -> None:
            counted.append(1)

    counted: list[int] = []
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"{'https' if tls else 'http'}://127.0.0.1:{server.server_address[1]}"
        assert len(counted) < 50, "endless retry"
    finally:
        server.shutdown()
        server.server_close()


def at(endpoint: str) -> Cli:
    sets = ("access_key_id=key", "secret_access_key=secret", "backoff_initial_s=0.01", "backoff_max_s=0.05")
    words = [word for each in sets for word in ("--set", f"store.{each}")]
    return Cli("--store", "s3://my-kv/p", "--region", "us-east-1", "--endpoint", endpoint, *words)


COMMANDS = [("usage",), ("gc", "--max-bytes", "1", "--yes"), ("bucket", "check")]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda words: words[0])
@pytest.mark.parametrize(
    ("status", "code", "extra", "names"),
    [
        (400, "AuthorizationHeaderMalformed", "<Region>eu-west-1</Region>", ("eu-west-1", "store.region")),
        (403, "RequestTimeTooSkewed", "", ("clock",)),
        (403, "InvalidAccessKeyId", "", ("store.access_key_id",)),
    ],
)
def test_case_45_one_line_names_the_setting(
    command: tuple[str, ...], status: int, code: str, extra: str, names: tuple[str, ...]
) -> None:
    with answering(status, code, extra) as endpoint:
        ran = at(endpoint)(*command)
    assert ran.code == 1 and ran.err.count("\n") == 1 and ran.err.startswith("s3kv: "), ran.err
    assert all(name in ran.err for name in names), ran.err


@pytest.mark.parametrize("command", COMMANDS, ids=lambda words: words[0])
def test_case_45_a_wrong_ca_bundle_is_named(command: tuple[str, ...], tmp_path: Path) -> None:
    certificate = self_signed(tmp_path / "server.pem")
    other = self_signed(tmp_path / "other.pem")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    with answering(200, "None", tls=context) as endpoint:
        ran = at(endpoint)(*command, "--set", f"store.ca_bundle={other}")
    assert ran.code == 1 and ran.err.count("\n") == 1 and "store.ca_bundle" in ran.err, ran.err


def self_signed(path: Path) -> Path:
    """Certificate and key in one PEM file."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "127.0.0.1")])
    now = datetime.datetime.now(datetime.UTC)
    built = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    path.write_bytes(private + built.public_bytes(serialization.Encoding.PEM))
    return path
