"""Whether a checkpoint takes media: what its own files say.

Under V1 the query is given the native request, on which media without hashes leave no trace (see scope.py), so a plain
request can be told only where the model takes token ids alone. Nothing lists such models: one counts as text-only when
its files are at hand and nothing in them speaks of anything else. Doubt costs offers under V1, never tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from s3kv.connector.numerics import checkpoint_config

logger = logging.getLogger("s3kv.connector")

_WORDS = ("vision", "visual", "image", "img", "video", "audio", "speech", "modal")
"""Parts of configuration keys. Of models whose configuration has none of them, Molmo has a preprocessor."""

_ENDINGS = ("ForCausalLM", "LMHeadModel")


def text_only(folder: Path | None) -> bool:
    """Whether the checkpoint in `folder` is known to take token ids alone."""
    config = checkpoint_config(folder)
    names = config.get("architectures")
    if folder is None or not isinstance(names, list) or not names:
        return False
    if not all(isinstance(name, str) and name.endswith(_ENDINGS) for name in names):
        return False
    try:
        processors = any(path.name.endswith("processor_config.json") for path in folder.iterdir())
    except OSError:
        return False
    keys = [key for key in _keys(config) if _speaks_of_media(key)]
    if keys:
        logger.info("%s: config.json has %s, so the model may take media", folder, keys[0])
    return not processors and not keys


def _speaks_of_media(key: str) -> bool:
    key = key.lower().replace("revision", "").replace("supervision", "")
    return key.startswith("mm_") or any(word in key for word in _WORDS)


def _keys(value: Any) -> Iterator[str]:
    """Of all objects in a JSON value."""
    if isinstance(value, dict):
        yield from value
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from _keys(item)
