"""The few kinds of failure, each saying what its caller does next.

Third-party errors are translated into these once, at the boundary, with the cause chained.
"""

from __future__ import annotations


class S3kvError(Exception):
    """Base of every error that s3kv raises on purpose. Its text is one sentence for the user."""


class ConfigError(S3kvError):
    """A setting or file is wrong. Next: fix what the message names; nothing was changed."""


class CorruptData(S3kvError):
    """Bytes do not say what their identity says. Next: treat as a miss and forget the object."""


class AgentUnavailable(S3kvError):
    """The agent did not answer within the deadline, or is gone. Next: treat as a miss."""


class AgentTimeout(AgentUnavailable):
    """No answer within the deadline; the connection is kept, since leases live with it. Next: a miss, and a pause."""


class ProtocolError(S3kvError):
    """The peer broke the socket protocol. Next: close the connection."""


class StoreError(S3kvError):
    """The object store failed. Next: count a miss; the subclass says whether to try again."""


class NotFound(StoreError):
    """No such object. Next: a miss; forget the record that named it."""


class AlreadyExists(StoreError):
    """`put_if_absent` found the key taken. Next: read what is there; nothing was written."""


class PreconditionFailed(StoreError):
    """`put_if_match` found another version. Next: somebody else won; nothing was written."""


class Unsupported(StoreError):
    """The store refuses the operation (501 and the like). Next: change `store.conditional_put` or the store."""


class Transient(StoreError):
    """A passing fault (5xx, 429, reset, truncated body). Next: retry within the deadline."""


class StoreTimeout(Transient):
    """No answer within the deadline. Next: retry if time is left, else a miss."""


class BreakerOpen(StoreError):
    """The circuit breaker is open; nothing was sent. Next: a miss, until a probe succeeds."""


class PermissionDenied(StoreError, ConfigError):
    """The store refuses these credentials. Next: fix the credentials or the policy."""


class StoreMisconfigured(StoreError, ConfigError):
    """Endpoint, region, CA bundle, bucket or clock is wrong. Next: fix the setting that the message names."""
