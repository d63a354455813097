"""Format 1: the bytes of chunk objects, catalog segments and snapshots, and the keys they live under.

Pure: no I/O, no clock, no randomness. `docs/format.md` specifies every byte. What is kept here:

* Right bytes or none: whatever is decoded was checked against its checksum, its lengths and its identity.
* No code from data: readers take any bytes; they raise `CorruptData` and nothing else, and check every length
  against a limit and against the bytes at hand before memory is allocated for it.
"""
