"""Opens stores through a faulty proxy and closes them at the end."""

from __future__ import annotations

from typing import Any

from s3kv.store import Store, open_store
from support.faulty_proxy import FaultyProxy
from support.servers import S3Place

FAST = {"backoff_initial_s": 0.01, "backoff_max_s": 0.05, "request_timeout_s": 20.0}


class Opener:
    """Opens stores through the proxy and closes them at the end."""

    def __init__(self, proxy: FaultyProxy, place: S3Place) -> None:
        self.proxy, self.place = proxy, place
        self._open: list[Store] = []

    def __call__(self, **values: Any) -> Store:
        changes = {"endpoint": self.proxy.endpoint, "conditional_put": "native", **FAST, **values}
        self._open.append(open_store(self.place.settings(**changes)))
        return self._open[-1]

    async def close(self) -> None:
        for store in self._open:
            await store.close()
