"""What is said to a server."""

from __future__ import annotations

import pytest

from s3kv.errors import ConfigError
from s3kv.warm.through import Server


def server(api_key: str) -> Server:
    return Server("http://127.0.0.1:1", model="m", timeout_s=1.0, concurrency=1, api_key=api_key)


def test_a_key_may_end_in_a_line_break_and_hold_no_other() -> None:
    """Secrets of orchestrators do; who refuses a header with one in it shows it, with the key."""
    assert server("sk-hush\n")._headers["Authorization"] == "Bearer sk-hush"
    for wrong in ("sk-\nhush", "sk-hush\x00", "sk-h\u00fcsh"):
        with pytest.raises(ConfigError, match=r"^OPENAI_API_KEY holds characters that no key has$"):
            server(wrong)
