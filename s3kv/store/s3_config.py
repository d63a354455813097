"""What both S3 clients derive from the settings alike. Pure but for the environment and the CA file."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from s3kv.errors import ConfigError
from s3kv.setting_types import has_control_characters, why_bad_endpoint
from s3kv.settings import StoreSettings
from s3kv.store.credentials import check_variables
from s3kv.store.failures import Target, named
from s3kv.store.keys import Location

DEFAULT_REGION = "us-east-1"
USER_AGENT = "s3kv"
_IGNORE = "ignore_configured_endpoint_urls"

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class S3Config:
    """The settings with every default decided."""

    location: Location
    region: str
    endpoint: str | None
    path_style: bool
    unsigned_payload: bool
    ca_file: Path | None
    ca_pem: bytes | None
    """What `ca_file` holds."""

    @property
    def target(self) -> Target:
        return Target(self.location.root, self.endpoint or f"AWS in {self.region}", self.region)


def s3_config(settings: StoreSettings, location: Location) -> S3Config:
    """Raises ConfigError, one sentence that names the setting."""
    endpoint = _endpoint(settings)
    if (settings.access_key_id is None) != (settings.secret_access_key is None):
        raise ConfigError(f"{named('access_key_id')} and {named('secret_access_key')} must be set together")
    check_variables(settings)
    if not settings.tls_verify:
        log.warning(
            "%s is false: TLS certificates are NOT verified and anybody on the way can read and change data",
            named("tls_verify"),
        )
    ca_file, ca_name = _ca_file(settings)
    plain = endpoint is not None and endpoint.startswith("http://")
    return S3Config(
        location=location,
        region=settings.region or _chain_region(settings, endpoint),
        endpoint=endpoint,
        path_style=_path_style(settings, location, endpoint),
        unsigned_payload=settings.payload_signing == "never" or (settings.payload_signing == "auto" and not plain),
        ca_file=ca_file,
        ca_pem=_read_ca(ca_file, ca_name) if ca_file is not None else None,
    )


def _endpoint(settings: StoreSettings) -> str | None:
    """The setting, else what AWS's own tools read, in their order (its SDK guide, "Service-specific endpoints").

    Decided here for all clients: obstore knows one of the variables, and neither path style nor plain HTTP with it.
    """
    found = [(named("endpoint"), settings.endpoint)] if settings.endpoint else _configured_endpoints(settings.profile)
    name, value = next(iter(found), ("", None))
    if value is None:
        return None
    if reason := why_bad_endpoint(value):
        raise ConfigError(f"{name} {reason}")
    return value.rstrip("/")


def _configured_endpoints(profile: str | None) -> Iterator[tuple[str, str]]:
    """Where it stands and the URL; the first one counts."""
    session = aws_session(profile) if _has_profiles(profile) else None  # botocore takes long to import
    ignored = session.get_config_variable(_IGNORE) if session else os.environ.get(f"AWS_{_IGNORE}".upper())
    if str(ignored).lower() == "true":
        return
    for variable in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"):
        if value := os.environ.get(variable):
            yield variable, value
    if session is None:
        return
    chosen = session.get_scoped_config()
    services = session.full_config.get("services", {}).get(chosen.get("services"), {})
    for section in (services.get("s3", {}), chosen):
        if value := section.get("endpoint_url"):
            yield "endpoint_url of the AWS profile", value


def _has_profiles(profile: str | None) -> bool:
    """Whether AWS's configuration files say anything, or should."""
    files = ("AWS_CONFIG_FILE", "~/.aws/config"), ("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials")
    named_one = profile or os.environ.get("AWS_PROFILE") or os.environ.get("AWS_DEFAULT_PROFILE")
    try:
        return bool(named_one) or any(Path(os.environ.get(name, usual)).expanduser().exists() for name, usual in files)
    except (OSError, RuntimeError):  # a folder that is closed to us, no home: botocore decides
        return True


def _path_style(settings: StoreSettings, location: Location, endpoint: str | None) -> bool:
    if settings.path_style is not None:
        return settings.path_style
    # A dot in the bucket's name leaves the wildcard of AWS's certificate.
    return endpoint is not None or "." in location.root


def _chain_region(settings: StoreSettings, endpoint: str | None) -> str:
    for variable in ("AWS_REGION", "AWS_DEFAULT_REGION"):
        if value := os.environ.get(variable):
            if has_control_characters(value):
                raise ConfigError(f"{variable} must hold no control characters, such as a line break")
            return value
    if endpoint is not None:
        return DEFAULT_REGION
    found = aws_session(settings.profile).get_config_variable("region")
    return str(found) if found else DEFAULT_REGION


def aws_session(profile: str | None) -> Any:
    """A botocore session whose configuration could be read. Raises ConfigError otherwise."""
    from botocore.exceptions import BotoCoreError, ProfileNotFound
    from botocore.session import Session

    session = Session(profile=profile)
    try:
        session.get_scoped_config()
    except ProfileNotFound as error:
        name = named("profile") if profile is not None else "AWS_PROFILE"
        raise ConfigError(f"{name}: there is no profile {session.profile!r}") from error
    except BotoCoreError as error:  # the message names the file
        raise ConfigError(str(error)) from error
    return session


def _ca_file(settings: StoreSettings) -> tuple[Path | None, str]:
    """The setting, else the variable that AWS's own tools read; and the name of that which decided."""
    if settings.ca_bundle is not None:
        return settings.ca_bundle, named("ca_bundle")
    stated = os.environ.get("AWS_CA_BUNDLE")
    return (Path(stated), "AWS_CA_BUNDLE") if stated else (None, "")


def _read_ca(path: Path, name: str) -> bytes:
    try:
        pem = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{name}: {path} cannot be read: {error.strerror}") from error
    if b"-----BEGIN CERTIFICATE-----" not in pem:
        raise ConfigError(f"{name}: {path} holds no PEM certificate")
    return pem
