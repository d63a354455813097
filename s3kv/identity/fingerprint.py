"""A fast fingerprint of a checkpoint: configuration, tensor headers, sampled contents.

Hashing all of a 140 GB checkpoint at every start would take minutes. Two checkpoints that differ only in bytes that
were not sampled get the same fingerprint; fine-tuning changes every tensor, so samples over each file catch it. Who
edits single weights by hand sets `identity.fingerprint`.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from s3kv.errors import ConfigError
from s3kv.identity.framing import frame

_CONFIG_NAMES = ("config.json", "generation_config.json", "hf_quant_config.json", "quantization_config.json")
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".engine", ".gguf")
_HEAD_BYTES = 1 << 20
_SAMPLE_BYTES = 16 << 10
_SAMPLES = 64


def fingerprint_model(model_dir: Path) -> str:
    """32 hex digits for the checkpoint in `model_dir`, independent of where the folder lies.

    Raises ConfigError when the folder holds no weights or cannot be read.
    """
    state = hashlib.blake2b(digest_size=16, person=b"s3kv weights")
    try:
        files = sorted(path for path in model_dir.iterdir() if path.is_file())
        weights = [path for path in files if path.suffix in _WEIGHT_SUFFIXES]
        if not weights:
            raise ConfigError(f"{model_dir} holds no model weights ({', '.join(_WEIGHT_SUFFIXES)})")
        for path in files:
            if path.name in _CONFIG_NAMES:
                state.update(frame(path.name.encode(), path.read_bytes()))
        for path in weights:
            _sample(state, path)
    except OSError as error:
        raise ConfigError(f"model folder {model_dir} cannot be read: {error.strerror}") from error
    return state.hexdigest()


def _sample(state: hashlib.blake2b, path: Path) -> None:
    size = path.stat().st_size
    state.update(frame(b"file", f"{path.name}:{size}".encode()))
    with path.open("rb") as file:
        state.update(frame(b"head", file.read(_HEAD_BYTES)))
        step = max(1, (size - _SAMPLE_BYTES) // _SAMPLES)
        for offset in range(_HEAD_BYTES, max(_HEAD_BYTES, size - _SAMPLE_BYTES), step):
            file.seek(offset)
            state.update(file.read(_SAMPLE_BYTES))
        file.seek(max(0, size - _SAMPLE_BYTES))
        state.update(frame(b"tail", file.read(_SAMPLE_BYTES)))
