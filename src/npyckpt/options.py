"""One frozen object with every setting that tunes I/O. The defaults need no tuning."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal, get_args

IoMode = Literal["auto", "buffered", "direct", "uncached"]

KIB = 1 << 10
MIB = 1 << 20

PAGE_BYTES = 4096
"""Alignment of memory, file offset and length that direct I/O asks of every device we know."""

CHUNK_BYTES = 4 * MIB
"""A checksum covers one chunk of a file; part of format version 1."""


def _cpus() -> int:
    """CPUs this process may run on."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not Linux
        return os.cpu_count() or 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How bytes are moved. Nothing here changes what a checkpoint means.

    Raises:
      ValueError: a value out of range, by its name.
    """

    threads: int = 0
    """I/O threads per host; 0 means twice the CPUs this process may use, at least 2, at most 8."""
    block_bytes: int = 8 * MIB
    """Bytes per read or write call; a multiple of 4 MiB (the checksum chunk)."""
    io: IoMode = "auto"
    """`buffered` goes through the page cache, `direct` is O_DIRECT, `uncached` is a buffered write that
    leaves nothing in the page cache (RWF_DONTCACHE, Linux 6.14); `auto` asks the file system what it
    supports and takes what does best there. A mode the file system refuses falls back to `buffered`,
    and the save result says which one was used."""
    staging_bytes: int = 128 * MIB
    """Upper bound of the memory for copies in flight beside the arrays themselves, both ways."""
    pack_threshold_bytes: int = 256 * KIB
    """Pieces of at most this size are packed together when there are 8 or more; 0 packs nothing."""
    pack_bytes: int = 64 * MIB
    """A pack is closed when it reaches this size."""
    durable: bool = True
    """Sync every file and directory before the commit. Without it, a crash of the machine (not of the
    process) may lose or tear the checkpoint."""
    checksum: bool = True
    """Write checksums when saving, and check them when restoring."""

    def __post_init__(self) -> None:
        if self.io not in get_args(IoMode):
            raise ValueError(f"Options.io must be one of {', '.join(get_args(IoMode))}, got {self.io!r}")
        for name in ("threads", "block_bytes", "staging_bytes", "pack_threshold_bytes", "pack_bytes"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ValueError(f"Options.{name} must be a non-negative int, got {value!r}")
        if self.threads > 1024:
            raise ValueError(f"Options.threads must be at most 1024, got {self.threads}")
        if self.block_bytes == 0 or self.block_bytes % CHUNK_BYTES:
            raise ValueError(
                f"Options.block_bytes must be a multiple of {CHUNK_BYTES} (4 MiB), got {self.block_bytes}"
            )
        if self.block_bytes > 1 << 30:
            raise ValueError(f"Options.block_bytes must be at most 1 GiB, got {self.block_bytes}")
        if not MIB <= self.pack_bytes <= 1 << 31:
            raise ValueError(f"Options.pack_bytes must be between 1 MiB and 2 GiB, got {self.pack_bytes}")
        if self.staging_bytes < self.block_bytes:
            raise ValueError(
                f"Options.staging_bytes ({self.staging_bytes}) must hold at least one block "
                f"(block_bytes={self.block_bytes})"
            )
        if self.pack_threshold_bytes > self.pack_bytes:
            raise ValueError("Options.pack_threshold_bytes must not exceed Options.pack_bytes")

    @property
    def io_threads(self) -> int:
        """Number of threads, with the default resolved."""
        return self.threads or min(8, max(2, 2 * _cpus()))
