"""Fast S3-shaped origins on loopback: nginx on tmpfs (static files and DAV put), with and without TLS; SeaweedFS.

nginx knows no S3: it answers GET with ranges, HEAD and PUT, and honours neither signatures nor conditions nor listings.
It is there because it is faster than any client, which a real S3 server on two cores is not.
"""

from __future__ import annotations

import getpass
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from support.servers import ACCESS_KEY, REGION, SECRET_KEY, boto3_client, die_with_parent, free_port, running_seaweedfs
from support.tls import make_ca_and_server

from s3kv.settings import StoreSettings

BUCKET = "bench"
START_S = 10.0
TMPFS = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


@dataclass(frozen=True)
class Origin:
    """`folder` holds the objects of nginx; `log` a line "METHOD STATUS BODY-BYTES" for each request to nginx."""

    name: str
    endpoint: str
    ca: Path | None = None
    folder: Path | None = None
    log: Path | None = None
    extra: dict[str, Any] = field(default_factory=dict)

    def settings(self, prefix: str = "ours", **changes: Any) -> StoreSettings:
        values: dict[str, Any] = {
            "url": f"s3://{BUCKET}/{prefix}",
            "endpoint": self.endpoint,
            "region": REGION,
            "access_key_id": ACCESS_KEY,
            "secret_access_key": SECRET_KEY,
            "payload_signing": "never",  # as over TLS to S3; signing costs several times the transfer
            "conditional_put": "native",
        }
        return StoreSettings.model_validate({**values, "ca_bundle": self.ca, **changes})

    def gets(self) -> list[int]:
        """Body bytes of each successful GET so far."""
        assert self.log is not None
        rows = [line.split() for line in self.log.read_text().splitlines()]
        return [int(size) for method, status, size in rows if method == "GET" and status in ("200", "206")]


@contextmanager
def nginx() -> Iterator[tuple[Origin, Origin]]:
    """The same server without and with TLS. Raises FileNotFoundError when nginx is not installed."""
    program = shutil.which("nginx") or "/usr/sbin/nginx"
    if not Path(program).exists():
        raise FileNotFoundError("nginx is not installed (Debian: apt-get install nginx-light)")
    with tempfile.TemporaryDirectory(prefix="s3kv-bench-", dir=TMPFS) as name:
        folder = Path(name)
        folder.chmod(0o755)
        ca, _ = make_ca_and_server(folder)
        plain, tls = free_port(), free_port()
        (folder / "data" / BUCKET).mkdir(parents=True)
        (folder / "nginx.conf").write_text(_config(folder, plain, tls))
        with (folder / "nginx.log").open("ab") as log:
            process = subprocess.Popen(
                [program, "-p", str(folder), "-c", str(folder / "nginx.conf"), "-e", str(folder / "error.log")],
                stdout=log,
                stderr=log,
                preexec_fn=die_with_parent,
            )
        try:
            _wait(process, plain, folder / "error.log")
            data, lines = folder / "data" / BUCKET, folder / "access.log"
            yield (
                Origin("nginx", f"http://127.0.0.1:{plain}", None, data, lines),
                Origin("nginx TLS", f"https://127.0.0.1:{tls}", ca, data, lines),
            )
        finally:
            process.terminate()
            process.wait(10)


def _wait(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    end = time.monotonic() + START_S
    while process.poll() is None and time.monotonic() < end:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)
    raise RuntimeError(f"nginx did not start:\n{log.read_text() if log.exists() else ''}")


def _config(folder: Path, plain: int, tls: int) -> str:
    paths = "\n".join(
        f"  {kind}_temp_path {folder}/temp-{kind};" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    return f"""
daemon off;
user {getpass.getuser()};
pid {folder}/nginx.pid;
worker_processes 2;
events {{ worker_connections 512; }}
http {{
  log_format sizes '$request_method $status $body_bytes_sent';
  access_log {folder}/access.log sizes;
{paths}
  sendfile on;
  tcp_nopush on;
  keepalive_requests 1000000;
  client_max_body_size 0;
  client_body_buffer_size 1m;
  # clients of S3 want an ETag in the answer to a put
  map $request_method $put_etag {{ PUT '"put"'; default ""; }}
  server {{
    listen 127.0.0.1:{plain};
    listen 127.0.0.1:{tls} ssl;
    ssl_certificate {folder}/server.pem;
    ssl_certificate_key {folder}/server.pem;
    root {folder}/data;
    location / {{
      dav_methods PUT DELETE;
      create_full_put_path on;
      dav_access user:rw;
      add_header ETag $put_etag;
    }}
  }}
}}
"""


@contextmanager
def seaweedfs() -> Iterator[Origin]:
    with tempfile.TemporaryDirectory(prefix="s3kv-bench-", dir=TMPFS) as name, running_seaweedfs(Path(name)) as url:
        boto3_client(url).create_bucket(Bucket=BUCKET)
        yield Origin("SeaweedFS", url, extra={"exact": True})
