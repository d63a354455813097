"""A boto3 client for administration, from the same settings as the bytes' client."""

from __future__ import annotations

from typing import Any

from s3kv.errors import ConfigError
from s3kv.settings import StoreSettings
from s3kv.store.bucket_spec import BucketSpec
from s3kv.store.failures import named
from s3kv.store.keys import parse_url
from s3kv.store.s3_config import aws_session, s3_config


def admin_client(settings: StoreSettings) -> Any:
    """Raises ConfigError that names the setting; no request is made."""
    import boto3
    from botocore.config import Config
    from botocore.exceptions import InvalidRegionError

    location = parse_url(settings.url)
    config = s3_config(settings, location)
    secret, token = settings.secret_access_key, settings.session_token
    session = boto3.session.Session(
        aws_access_key_id=settings.access_key_id,
        aws_secret_access_key=secret.get_secret_value() if secret is not None else None,
        aws_session_token=token.get_secret_value() if token is not None else None,
        botocore_session=aws_session(settings.profile),
    )
    verify: bool | str = str(config.ca_file) if config.ca_file is not None else settings.tls_verify
    try:
        return session.client(
            "s3",
            region_name=config.region,
            endpoint_url=config.endpoint,
            verify=verify if settings.tls_verify else False,
            config=Config(
                s3={"addressing_style": "path" if config.path_style else "auto"},
                retries={"mode": "standard", "total_max_attempts": settings.retries + 1},
                connect_timeout=settings.connect_timeout_s,
                read_timeout=settings.request_timeout_s,
                request_checksum_calculation="when_required",
                response_checksum_validation="when_required",
            ),
        )
    except InvalidRegionError as error:
        raise ConfigError(f"{named('region')} is not the name of a region") from error
    except ValueError as error:  # of host names it knows fewer than the clients that carry bytes
        raise ConfigError(f"botocore refuses {named('endpoint')}: its host must be of letters, digits and -") from error


def bucket_spec(settings: StoreSettings, **changes: Any) -> BucketSpec:
    """The bucket that `store.url` names. Raises ConfigError when it names none."""
    location = parse_url(settings.url)
    if location.scheme != "s3":
        raise ConfigError(f"store.url (or S3KV_STORE__URL) must be s3://bucket/prefix for this, not {settings.url!r}")
    config = s3_config(settings, location)
    plain = config.endpoint is not None and config.endpoint.startswith("http://")
    values = {"tls_only": not plain, **changes}
    return BucketSpec(name=location.root, region=config.region, prefix=location.prefix, **values)
