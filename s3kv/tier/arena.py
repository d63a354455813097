"""The shared memory of one part's slots: a sealed memfd that the agent makes and every engine maps.

The seals (no shrinking, no growing, no further seals) are what makes mapping somebody else's file safe: without them
the other side could cut the file, and the next access would kill this process (SIGBUS). So `attach` verifies seals and
size before it maps. Facts: memfd_create(2), fcntl(2) "File Sealing", madvise(2) MADV_REMOVE.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import logging
import mmap
import os

from s3kv.errors import ConfigError, ProtocolError
from s3kv.tier.memory import check_available

PAGE_BYTES = 4096
HUGE_PAGE_BYTES = 2 << 20
MAX_ARENA_BYTES = 1 << 46
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL

log = logging.getLogger(__name__)


class Arena:
    """`slots` slots of `slot_bytes` bytes (a multiple of 4096), in memory shared between processes.

    Views are writable memoryviews of the shared bytes. They outlive `close`: the memory is unmapped when the last view
    is gone, so a late copy never faults. After `close`, asking for views raises ValueError.
    """

    def __init__(self, mapping: mmap.mmap, slots: int, slot_bytes: int, fd: int, hugepages: bool) -> None:
        """Use `create` or `attach`. Owns `mapping` and `fd` (-1: none)."""
        self.slots = slots
        self.slot_bytes = slot_bytes
        self.hugepages = hugepages
        self._fd = fd
        self._mapping: mmap.mmap | None = mapping
        self._buffer: memoryview | None = memoryview(mapping)[: slots * slot_bytes]

    @classmethod
    def create(
        cls, slots: int, slot_bytes: int, hugepages: bool = False, *, name: str = "s3kv-arena", check: bool = True
    ) -> Arena:
        """A new arena of zeros; its memory is taken page by page as it is touched.

        hugepages: from the machine's reserved pool of 2 MiB pages; where that is too small, ordinary pages with a
        warning (and `hugepages` False), which the kernel may still join to large ones. `check` off: the caller did it.
        Raises ConfigError naming the setting if the machine has less memory than that.
        """
        nbytes = _checked_size(slots, slot_bytes, ValueError)
        if hugepages:  # they are not part of what the machine calls available: the kernel itself refuses
            try:
                return cls._create(slots, slot_bytes, name, huge=True)
            except OSError as error:
                log.warning(
                    "tier.hugepages: %s; using ordinary pages (reserve more in vm.nr_hugepages)", error.strerror
                )
        if check:
            check_available(nbytes)
        try:
            arena = cls._create(slots, slot_bytes, name, huge=False)
        except OSError as error:
            raise ConfigError(
                f"tier.capacity_bytes: {nbytes} bytes of shared memory could not be had: {error.strerror}"
            ) from error
        if hugepages:
            arena._ask_for_transparent_hugepages()
        return arena

    @classmethod
    def _create(cls, slots: int, slot_bytes: int, name: str, *, huge: bool) -> Arena:
        flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | (os.MFD_HUGETLB | os.MFD_HUGE_2MB if huge else 0)
        nbytes = slots * slot_bytes
        if huge:
            nbytes = -(-nbytes // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
        fd = os.memfd_create(name, flags)
        try:
            os.ftruncate(fd, nbytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
            return cls(mmap.mmap(fd, nbytes, flags=mmap.MAP_SHARED), slots, slot_bytes, fd, huge)
        except BaseException:
            os.close(fd)
            raise

    def _ask_for_transparent_hugepages(self) -> None:
        """Heeded where /sys/kernel/mm/transparent_hugepage/shmem_enabled is "advise"; costs nothing elsewhere."""
        with contextlib.suppress(OSError):
            if self._mapping is not None:
                self._mapping.madvise(mmap.MADV_HUGEPAGE)

    @classmethod
    def attach(cls, fd: int, slots: int, slot_bytes: int) -> Arena:
        """Maps an arena that another process made. `fd` is borrowed for the call; close it afterwards.

        Raises ProtocolError if it is not a sealed memfd of at least that size, or the size makes no sense.
        """
        nbytes = _checked_size(slots, slot_bytes, ProtocolError)
        try:
            seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
            size = os.fstat(fd).st_size
        except OSError as error:
            raise ProtocolError(f"the arena is not a sealed memfd: {error.strerror}") from error
        if not seals & fcntl.F_SEAL_SHRINK:
            raise ProtocolError("the arena's memfd is not sealed against shrinking")
        if size < nbytes:
            raise ProtocolError(f"the arena's memfd has {size} bytes, {nbytes} were announced")
        try:
            mapping = mmap.mmap(fd, size, flags=mmap.MAP_SHARED)
        except OSError as error:
            raise ProtocolError(f"the arena cannot be mapped: {error.strerror}") from error
        return cls(mapping, slots, slot_bytes, -1, False)

    @property
    def fd(self) -> int:
        """The memfd, to be handed to engines; -1 once closed, and in an attached arena."""
        return self._fd

    @property
    def buffer(self) -> memoryview:
        """All slots, one after the other."""
        if self._buffer is None:
            raise ValueError("the arena is closed")
        return self._buffer

    @property
    def nbytes(self) -> int:
        return self.slots * self.slot_bytes

    @property
    def address(self) -> int:
        """Where slot 0 is mapped in this process, for registration with CUDA."""
        return ctypes.addressof(ctypes.c_char.from_buffer(self.buffer))

    @property
    def closed(self) -> bool:
        return self._mapping is None

    def view(self, slot: int) -> memoryview:
        """The bytes of one slot. IndexError: no such slot."""
        if not 0 <= slot < self.slots:
            raise IndexError(f"slot {slot} of {self.slots}")
        start = slot * self.slot_bytes
        return self.buffer[start : start + self.slot_bytes]

    def punch(self, slot: int) -> bool:
        """Returns a slot's memory to the machine; it reads as zeros afterwards.

        False: it stays, as it does with huge pages: their pool is reserved anyway, and a page that was given back might
        be gone when it is touched again, which is a SIGBUS.
        """
        if not 0 <= slot < self.slots:
            raise IndexError(f"slot {slot} of {self.slots}")
        if self._mapping is None or self.hugepages:
            return False
        try:
            self._mapping.madvise(mmap.MADV_REMOVE, slot * self.slot_bytes, self.slot_bytes)
        except OSError as error:
            log.warning("memory of a slot could not be returned: %s", error.strerror)
            return False
        return True

    def close(self) -> None:
        """Idempotent. Unmaps now, or when the last view is gone. The bytes live on in whoever else maps them."""
        buffer, mapping = self._buffer, self._mapping
        self._buffer = self._mapping = None
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        if buffer is None or mapping is None:
            return
        with contextlib.suppress(BufferError):  # somebody still has a view: the last one to go unmaps
            buffer.release()
            mapping.close()


def _checked_size(slots: int, slot_bytes: int, error: type[Exception]) -> int:
    if slots < 1 or slot_bytes < 1 or slot_bytes % PAGE_BYTES or slots * slot_bytes > MAX_ARENA_BYTES:
        raise error(f"an arena of {slots} slots of {slot_bytes} bytes makes no sense (multiples of {PAGE_BYTES})")
    return slots * slot_bytes
