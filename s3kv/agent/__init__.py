"""The agent: the one process of a node that owns arenas, catalog, uploads and fetches.

It runs apart from the engine because two busy Python threads inside the engine's process slow its kernel launches from
10 µs to 30,000 µs an operation (the interpreter lock; measured on one H200 host). One event loop runs everything;
codecs and checksums run in threads, which leave the lock.
"""
