from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from s3kv.identity import ROOT, Chain, MediaSpan, Scope, chain_hashes

NS = bytes(range(32))
TOKENS = st.lists(st.integers(0, 200_000), max_size=100)


@given(TOKENS, st.lists(st.integers(0, 30), max_size=6), st.integers(1, 9))
def test_extending_in_any_steps_gives_the_same_hashes(tokens: list[int], steps: list[int], block: int) -> None:
    chain, done = Chain(NS, block), 0
    for step in steps:
        chain.extend(tokens[done : done + step])
        done += step
    chain.extend(tokens[done:])
    assert chain.hashes == chain_hashes(NS, block, tokens)
    assert len(chain.hashes) == len(tokens) // block
    assert chain.tokens == len(tokens)


@given(TOKENS, TOKENS)
def test_hashes_agree_exactly_as_far_as_the_tokens_do(a: list[int], b: list[int]) -> None:
    shared = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    ours, theirs = chain_hashes(NS, 4, a), chain_hashes(NS, 4, b)
    equal = sum(x == y for x, y in zip(ours, theirs, strict=False))
    assert equal == min(shared // 4, len(ours), len(theirs))


def test_a_hash_is_128_bits_and_never_the_root() -> None:
    assert all(len(each) == 16 and each != ROOT for each in chain_hashes(NS, 2, range(100)))


@given(TOKENS.filter(lambda tokens: len(tokens) >= 4))
def test_case_13_salts_and_adapters_keep_chains_apart(tokens: list[int]) -> None:
    scopes = [
        Scope(),
        Scope(cache_salt=""),
        Scope(cache_salt="5"),
        Scope(adapter="5"),
        Scope(adapter=""),
        Scope(cache_salt="5", adapter="5"),
        Scope(cache_salt="55"),
    ]
    first = {chain_hashes(NS, 4, tokens, scope=scope)[0] for scope in scopes}
    assert len(first) == len(scopes)


def test_case_16_keys_do_not_depend_on_the_hash_seed() -> None:
    program = (
        "from s3kv.identity import Scope, chain_hashes;"
        "print([h.hex() for h in chain_hashes(bytes(32), 4, range(64), scope=Scope('salt', 'lora'))])"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "1", "12345")
    }
    assert len(outputs) == 1


def test_case_17_the_digest_is_blake2b_of_128_bits_under_the_namespace_as_key() -> None:
    import hashlib

    state = hashlib.blake2b(digest_size=16, key=NS, person=b"s3kv block")
    state.update(Scope().encode())
    state.update(b"".join(token.to_bytes(4, "little") for token in (7, 8, 9, 10)))
    assert chain_hashes(NS, 4, [7, 8, 9, 10]) == [state.digest()]
    assert chain_hashes(bytes(32), 4, [7, 8, 9, 10]) != [state.digest()]


def test_case_19_the_raw_salt_is_not_in_what_is_hashed() -> None:
    assert b"secret-salt" not in Scope(cache_salt="secret-salt").encode()


def test_media_changes_only_blocks_from_its_first_on() -> None:
    tokens = list(range(20))
    plain = chain_hashes(NS, 4, tokens)
    cat = chain_hashes(NS, 4, tokens, media=[MediaSpan(9, 3, b"cat" * 10)])
    dog = chain_hashes(NS, 4, tokens, media=[MediaSpan(9, 3, b"dog" * 10)])
    assert plain[:2] == cat[:2] == dog[:2]
    assert len({plain[2], cat[2], dog[2]}) == 3
    assert len({plain[4], cat[4], dog[4]}) == 3


def test_a_reserved_or_impossible_token_is_refused_and_nothing_appended() -> None:
    chain = Chain(NS, 2)
    for bad in ([1, 0xFFFFFFFF], [1, -1], [1, 1 << 32]):
        with pytest.raises((ValueError, OverflowError)):
            chain.extend(bad)
    assert chain.tokens == 0
    assert chain.extend([0xFFFFFF, 0xFF000000]) == 1


def test_the_first_hash_of_a_fixed_input_never_changes() -> None:
    """A change here makes every stored block unreachable: it needs a new format number."""
    assert chain_hashes(bytes(32), 4, [1, 2, 3, 4])[0].hex() == GOLDEN


GOLDEN = "0fe7329aecbf3340aa669f1ea1b6d98b"
