"""Where obstore gets its keys: the settings, or the AWS chain of botocore with refresh.

Keys always go through a provider, static ones too: obstore merges `AWS_SESSION_TOKEN` of the environment into keys that
are given as configuration, and the signature is then wrong. boto3 is imported when the first request is signed.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from typing import Any

from s3kv.errors import ConfigError
from s3kv.setting_types import has_control_characters
from s3kv.settings import StoreSettings

Credential = dict[str, Any]
Provider = Callable[[], Awaitable[Credential]]

CACHE_S = 360.0
"""How long obstore may keep keys that do not expire. It asks again 300 s before the time it is told."""
RECHECK_S = 1.0
"""For keys that expire: below obstore's 300 s, so it asks before each request (at most every 100 ms) and botocore,
which knows the expiry, decides whether to refresh."""
KEY_VARIABLES = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_SECURITY_TOKEN")


class NoCredentials(Exception):
    """The AWS chain found no keys."""


class UnusableCredentials(Exception):
    """The AWS chain found keys that no header of a request can carry."""


def check_variables(settings: StoreSettings) -> None:
    """Raises ConfigError for a key in the environment that the chain would take and no client could send.

    A line break in it, as a mounted secret may have, is a panic of obstore's and is printed by botocore.
    """
    if settings.access_key_id is None and settings.profile is None:
        for name in KEY_VARIABLES:
            if has_control_characters(os.environ.get(name, "")):
                raise ConfigError(f"{name} must hold no control characters, such as a line break")


def provider(settings: StoreSettings, now: Callable[[], datetime] = lambda: datetime.now(UTC)) -> Provider:
    """What obstore calls to sign. `now` is the real time."""
    if settings.access_key_id is not None:
        return _static(settings)
    return ChainProvider(settings.profile, now)


def _static(settings: StoreSettings) -> Provider:
    secret, token = settings.secret_access_key, settings.session_token
    credential: Credential = {
        "access_key_id": settings.access_key_id,
        "secret_access_key": secret.get_secret_value() if secret else "",
        "token": token.get_secret_value() if token else None,
        "expires_at": None,
    }

    async def give() -> Credential:
        return credential

    return give


class ChainProvider:
    """Environment, profiles, SSO, processes, web identity, container and instance roles: as botocore finds them."""

    def __init__(self, profile: str | None, now: Callable[[], datetime]) -> None:
        self._profile = profile
        self._now = now
        self._keys: Any = None

    async def __call__(self) -> Credential:
        if self._keys is None:
            self._keys = await asyncio.to_thread(_find_keys, self._profile)
        expires = hasattr(self._keys, "refresh_needed")
        if expires and self._keys.refresh_needed():  # files, processes or the network: not on the event loop
            frozen = await asyncio.to_thread(self._keys.get_frozen_credentials)
        else:
            frozen = self._keys.get_frozen_credentials()
        if has_control_characters("".join(each or "" for each in frozen[:3])):
            raise UnusableCredentials
        return {
            "access_key_id": frozen.access_key,
            "secret_access_key": frozen.secret_key,
            "token": frozen.token,
            "expires_at": self._now() + timedelta(seconds=RECHECK_S if expires else CACHE_S),
        }


def _find_keys(profile: str | None) -> Any:
    import botocore.session

    session = botocore.session.Session(profile=profile)
    keys = session.get_credentials()
    if keys is None:
        raise NoCredentials("no credentials in the AWS chain")
    return keys
