"""Memory that bytes are read into, and staging memory that is borrowed within a budget.

Memory for arrays is anonymous, owned by nobody else and congruent to 64 modulo 4096 where `npy.DATA_OFFSET`
is too: direct I/O runs straight into it, and `jax.device_put` on the CPU backend aliases it. It is never a
map of a file: an array must not change when its file does.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import numpy as np

from npyckpt.npy import DATA_OFFSET
from npyckpt.options import PAGE_BYTES

Bytes: TypeAlias = np.ndarray[Any, np.dtype[np.uint8]]
"""A one-dimensional array of bytes."""

HUGE_PAGE_BYTES = 2 << 20
_SLAB_BYTES = 8 << 20
"""Requests up to a quarter of this share one mapping: a process may have some 65,000 mappings."""
_DATA_SHIFT = DATA_OFFSET % PAGE_BYTES


def page_aligned(nbytes: int) -> Bytes:
    """`nbytes` bytes of fresh zeroed memory that start at a page, in large pages where they can be."""
    if nbytes == 0:
        return np.empty(0, np.uint8)
    if nbytes < HUGE_PAGE_BYTES:
        return np.frombuffer(mmap.mmap(-1, _round_up(nbytes, PAGE_BYTES)), np.uint8, nbytes)
    size = _round_up(nbytes, PAGE_BYTES)
    mapped = mmap.mmap(-1, size + HUGE_PAGE_BYTES)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        try:
            mapped.madvise(mmap.MADV_HUGEPAGE)
        except OSError:  # a kernel without transparent huge pages
            return np.frombuffer(mapped, np.uint8, nbytes)
    whole = np.frombuffer(mapped, np.uint8)
    shift = -whole.ctypes.data % HUGE_PAGE_BYTES
    return whole[shift : shift + nbytes]


class Arena:
    """Hands out memory for arrays; small requests share a mapping."""

    def __init__(self) -> None:
        self._slab: Bytes = np.empty(0, np.uint8)
        self._used = 0

    def allocate(self, nbytes: int) -> Bytes:
        """`nbytes` bytes at an address congruent to `npy.DATA_OFFSET` modulo the page size."""
        if nbytes > _SLAB_BYTES // 4:
            return page_aligned(nbytes + _DATA_SHIFT)[_DATA_SHIFT:]
        start = _round_up(self._used, PAGE_BYTES) + _DATA_SHIFT
        if start + nbytes > self._slab.nbytes:
            self._slab = page_aligned(_SLAB_BYTES)
            start = _DATA_SHIFT
        self._used = start + nbytes
        return self._slab[start : start + nbytes]


class StagingPool:
    """Reusable page-aligned buffers that never add up to more than `budget_bytes`.

    A request larger than the whole budget is granted alone: progress comes before the bound, and
    `peak_bytes` tells.
    """

    def __init__(self, budget_bytes: int) -> None:
        self._budget = budget_bytes
        self._free: list[Bytes] = []
        self._held = 0
        self._lent = 0
        self._changed = threading.Condition()
        self.peak_bytes = 0
        """Most bytes that were held at one time."""

    @contextmanager
    def borrow(self, nbytes: int) -> Iterator[Bytes]:
        """A buffer of `nbytes` bytes, whole pages, waited for within the budget."""
        buffer = self._take(_round_up(max(nbytes, 1), PAGE_BYTES))
        try:
            yield buffer
        finally:
            with self._changed:
                self._lent -= 1
                self._free.append(buffer)
                self._changed.notify_all()

    def _take(self, nbytes: int) -> Bytes:
        with self._changed:
            while True:
                fits = [i for i, b in enumerate(self._free) if b.nbytes >= nbytes]
                if fits:
                    self._lent += 1
                    return self._free.pop(min(fits, key=lambda i: self._free[i].nbytes))
                while self._free and self._held + nbytes > self._budget:
                    self._held -= self._free.pop().nbytes
                if self._held + nbytes <= self._budget or self._lent == 0:
                    self._held += nbytes
                    self._lent += 1
                    self.peak_bytes = max(self.peak_bytes, self._held)
                    return page_aligned(nbytes)
                self._changed.wait()


def _round_up(n: int, unit: int) -> int:
    return -(-n // unit) * unit
