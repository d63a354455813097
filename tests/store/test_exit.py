"""A process whose last request was answered just before its end, when obstore's threads still want Python's lock."""

from __future__ import annotations

import subprocess
import sys

LATE = """
import asyncio, atexit, threading
from s3kv.errors import StoreError
from s3kv.settings import StoreSettings
from s3kv.store.opening import open_store

store = open_store(StoreSettings(url="s3://bucket/p", endpoint="http://127.0.0.1:1", region="us-east-1",
    access_key_id="key", secret_access_key="secret", retries=0))
staying, ending = threading.Event(), threading.Event()
atexit.register(ending.set)

async def main():
    loop = asyncio.get_running_loop()
    hand_over = loop.call_soon_threadsafe

    def hand_over_and_stay(callback, *args, **options):
        answer = "Completor" in type(callback).__name__  # credentials come by other calls
        if answer:
            staying.set()
        hand_over(callback, *args, **options)
        if answer:
            ending.wait()

    loop.call_soon_threadsafe = hand_over_and_stay
    try:
        await store.head("k")
    except StoreError as error:
        print(type(error).__name__)

asyncio.run(main())
assert staying.is_set()
"""


def test_a_request_answered_at_the_last_moment_does_not_abort_the_process() -> None:
    command = [sys.executable, "-c", LATE]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.split()) == 1
    assert not done.stderr
