"""Reading: byte ranges of files into memory that becomes the arrays.

What is wanted of a file is a list of `Copy`: a box of one extent and the array it goes to. Where an extent
is wanted whole and in one piece, the file is read straight into the array's memory (and all members of a
pack into one buffer of which they are views). Otherwise blocks pass through bounded staging, and each box
is copied from there to its place. Nearby ranges are read together; every needed byte is read once.

Reads are direct where the file is not in the page cache, buffered where it is. Each checksummed chunk that
is read whole is checked by the thread that read it.
"""

from __future__ import annotations

import bisect
import errno
import functools
import os
import stat
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from npyckpt import npy
from npyckpt.errors import CorruptCheckpointError
from npyckpt.files import kernel
from npyckpt.files.memory import Bytes, StagingPool
from npyckpt.files.threads import Stages, run_all
from npyckpt.files.write import chunk_hashes
from npyckpt.options import CHUNK_BYTES, MIB, PAGE_BYTES, Options
from npyckpt.regions import Region, flat_boxes, flat_runs, intersect, whole

RESIDENT = 0.9
"""A file counts as cached from this fraction on; below it, direct reads are faster than buffered ones."""
MAX_GAP_BYTES = MIB
"""A gap up to this size is read rather than skipped, if it is no longer than the run before it."""


@dataclass(frozen=True, slots=True)
class Copy:
    """Elements `box` of an extent's array (of `shape`, at `offset` in the file) go to `dest`."""

    leaf: str
    offset: int
    shape: tuple[int, ...]
    box: Region
    dest: np.ndarray[Any, np.dtype[Any]]
    """In the stored dtype, of the box's shape; may be strided."""

    def runs(self) -> Iterator[tuple[int, int]]:
        """Byte ranges (start, stop) of the file that hold the box, in order."""
        itemsize = self.dest.dtype.itemsize
        length, _, starts = flat_runs(self.shape, self.box)
        for start in starts:
            yield self.offset + start * itemsize, self.offset + (start + length) * itemsize

    @property
    def end(self) -> int:
        """Offset behind the extent."""
        return self.offset + whole(self.shape).size * self.dest.dtype.itemsize

    def memory(self) -> tuple[int, int, Bytes] | None:
        """(start, stop, memory) where the box is one range of the file and of memory; else None."""
        if not self.dest.flags.c_contiguous or self.dest.nbytes == 0:
            return None
        length, count, starts = flat_runs(self.shape, self.box)
        if count != 1:
            return None
        start = self.offset + next(iter(starts)) * self.dest.dtype.itemsize
        return start, start + length * self.dest.dtype.itemsize, self.dest.reshape(-1).view(np.uint8)

    def scatter(self, staging: Bytes, lo: int, hi: int) -> None:
        """Copy what bytes `lo..hi` of the file, which are in `staging`, hold of the box."""
        itemsize = self.dest.dtype.itemsize
        total = whole(self.shape).size
        first = max(-(-(lo - self.offset) // itemsize), 0)
        last = min((hi - self.offset) // itemsize, total)
        for piece, at in flat_boxes(self.shape, first, last):
            common = intersect(piece, self.box)
            if common is None:
                continue
            begin = self.offset + at * itemsize - lo
            source = staging[begin : begin + piece.size * itemsize].view(self.dest.dtype)
            view = source.reshape(piece.shape)[common.slices(piece.start)]
            np.copyto(self.dest[common.slices(self.box.start)], view)


@dataclass(frozen=True, slots=True)
class FileRead:
    """What is wanted of one file."""

    name: str
    nbytes: int
    """Its size according to the manifest."""
    checksums: tuple[str, ...]
    copies: Sequence[Copy]
    header: npy.Header | None = None
    """What its `.npy` header must say; None for a pack."""
    image: Bytes | None = None
    """Whole pages that the file is read into as it is; all copies are views of it already."""


@dataclass(slots=True)
class ReadReport:
    """What one host has read."""

    bytes_read: int = 0
    staging_peak_bytes: int = 0
    stages: Stages = field(default_factory=Stages)


Open = Callable[[str], int]
"""Opens a data file of the checkpoint for reading, following no symbolic link."""


def read_files(files: Sequence[FileRead], open_file: Open, options: Options) -> ReadReport:
    """Read all that is wanted.

    Raises:
      CorruptCheckpointError: a file is missing, not a plain file, of another size, or damaged.
      OSError: with the file's name.
    """
    engine = _Engine(open_file, options)
    jobs = [_ReadJob(f, engine) for f in files]
    try:
        run_all((item for job in jobs for item in job.items()), options.io_threads)
    finally:
        for job in jobs:
            job.close()
    engine.report.staging_peak_bytes = engine.staging.peak_bytes
    return engine.report


def coalesce(runs: Iterator[tuple[int, int]]) -> list[tuple[int, int]]:
    """Join sorted ranges over small gaps.

    A gap no longer than what was read before it costs less to read than to skip, and so at most doubles
    the bytes; a page or less is free, because a device reads whole pages.
    """
    joined: list[tuple[int, int]] = []
    run_bytes = 0
    for start, stop in runs:
        if joined and start - joined[-1][1] <= max(PAGE_BYTES, min(run_bytes, MAX_GAP_BYTES)):
            joined[-1] = (joined[-1][0], max(stop, joined[-1][1]))
        else:
            joined.append((start, stop))
        run_bytes = stop - start
    return joined


class _Engine:
    """What all files of one restore share."""

    def __init__(self, open_file: Open, options: Options) -> None:
        self.open_file = open_file
        self.options = options
        self.staging = StagingPool(options.staging_bytes)
        self.report = ReadReport()
        self._lock = threading.Lock()

    def count(self, nbytes: int) -> None:
        with self._lock:
            self.report.bytes_read += nbytes


class _ReadJob:
    """One file being read."""

    def __init__(self, wanted: FileRead, engine: _Engine) -> None:
        self._wanted = wanted
        self._engine = engine
        self._lock = threading.Lock()
        self._fd = -1
        self._direct_fd: int | None = None
        self._copies = sorted(wanted.copies, key=lambda c: c.offset)
        self._offsets = [c.offset for c in self._copies]
        self._in_place = [m for m in (c.memory() for c in self._copies) if m is not None]
        self._ranges = self._plan()
        self._left = sum(1 for _ in self._blocks())

    def _plan(self) -> list[tuple[int, int]]:
        """Ranges to read: all of a `.npy` wanted whole (its header too), else what is needed."""
        header = self._wanted.header
        if header is not None and self._wanted.image is not None:
            return [(0, self._wanted.nbytes)]
        runs: Iterator[tuple[int, int]] = (r for c in self._copies for r in c.runs() if r[0] < r[1])
        if len(self._copies) > 1:
            runs = iter(sorted(runs))
        ranges = coalesce(runs)
        if header is not None and (not ranges or ranges[0][0] == header.data_offset):
            ranges = coalesce(iter([(0, header.data_offset), *ranges]))
        return ranges

    def _blocks(self) -> Iterator[tuple[int, int]]:
        """The ranges, cut at multiples of the block size."""
        size = self._engine.options.block_bytes
        for start, stop in self._ranges:
            lo = start
            while lo < stop:
                hi = min((lo // size + 1) * size, stop)
                yield lo, hi
                lo = hi

    def items(self) -> Iterator[Callable[[], None]]:
        """One item a block; a file of which no byte is wanted (empty arrays) is looked at all the same."""
        if self._left == 0:
            yield self._look
        for lo, hi in self._blocks():
            yield functools.partial(self._read_block, lo, hi)

    def _look(self) -> None:
        self._open()
        self.close()

    def _open(self) -> None:
        """Open the file and compare its size; once, by whichever thread comes first."""
        with self._lock:
            if self._fd >= 0:
                return
            try:
                self._fd = self._engine.open_file(self._wanted.name)
                info = os.fstat(self._fd)
                if not stat.S_ISREG(info.st_mode):
                    raise self._corrupt("it is not a plain file")
                if info.st_size != self._wanted.nbytes:
                    raise self._corrupt(f"it has {info.st_size} bytes, expected {self._wanted.nbytes}")
                if self._wants_direct():
                    self._direct_fd = kernel.reopen_direct(self._fd, os.O_RDONLY)
            except OSError as e:
                raise self._named(e) from e

    def _wants_direct(self) -> bool:
        io = self._engine.options.io
        if self._wanted.nbytes < 4 * PAGE_BYTES or io in ("buffered", "uncached"):
            return False
        if io == "direct":
            return True
        fraction = kernel.resident_fraction(self._fd, self._wanted.nbytes)
        return fraction is not None and fraction < RESIDENT

    def _read_block(self, lo: int, hi: int) -> None:
        """Read bytes `lo..hi` of the file: most of them in place, the rest by way of staging."""
        self._open()
        begin, end = lo, hi
        if self._direct_fd is not None:
            begin, end = lo // PAGE_BYTES * PAGE_BYTES, -(-hi // PAGE_BYTES) * PAGE_BYTES
        a, b, memory = self._target(begin, end)
        with self._engine.staging.borrow((a - begin) + (end - b)) as staging:
            head, tail = staging[: a - begin], staging[a - begin : (a - begin) + (end - b)]
            with self._engine.report.stages.time("read"):
                self._read([head, memory, tail], begin, min(end, self._wanted.nbytes))
            with self._engine.report.stages.time("verify"):
                self._verify([head, memory, tail], begin, lo, hi)
            with self._engine.report.stages.time("copy"):
                self._scatter(head, max(begin, lo), begin, min(a, hi))
                self._scatter(tail, max(b, lo), b, hi)
        with self._lock:
            self._left -= 1
            ended = self._left == 0
        if ended:
            self.close()

    def _target(self, begin: int, end: int) -> tuple[int, int, Bytes]:
        """(start, stop, memory) of what is read in place: whole pages of agreeing alignment if direct."""
        image = self._wanted.image
        if image is not None:
            return begin, end, image[begin:end]
        for start, stop, memory in self._in_place:
            a, b = max(start, begin), min(stop, end)
            if self._direct_fd is not None:
                if (memory.ctypes.data - start) % PAGE_BYTES:
                    continue
                a, b = -(-a // PAGE_BYTES) * PAGE_BYTES, b // PAGE_BYTES * PAGE_BYTES
            if b - a > (end - begin) // 2:
                return a, b, memory[a - start : b - start]
        return begin, begin, _NOTHING

    def _read(self, pieces: Sequence[Bytes], offset: int, stop: int) -> None:
        """Fill `pieces` with the file from `offset` on, up to `stop`."""
        left = [memoryview(p) for p in pieces if p.nbytes]
        fd = self._direct_fd if self._direct_fd is not None else self._fd
        try:
            while offset < stop:
                batch = left if sum(p.nbytes for p in left) <= kernel.MAX_CALL_BYTES else [left[0][: kernel.MAX_CALL_BYTES]]
                done = os.preadv(fd, batch, offset)
                if done == 0:
                    raise self._corrupt(f"it ends at byte {offset} of {self._wanted.nbytes} while being read")
                self._engine.count(done)
                offset += done
                while left and done >= left[0].nbytes:
                    done -= left.pop(0).nbytes
                if done:
                    left[0] = left[0][done:]
                    fd = self._fd  # a short direct read leaves the rest unaligned
        except OSError as e:
            raise self._named(e) from e

    def _verify(self, pieces: Sequence[Bytes], begin: int, lo: int, hi: int) -> None:
        """Compare the header, and the checksums of the chunks that lie wholly within `lo..hi`."""
        wanted = self._wanted
        if lo == 0 and wanted.header is not None and hi >= wanted.header.data_offset:
            self._verify_header(b"".join(_between(pieces, begin, 0, wanted.header.data_offset)))
        if not self._engine.options.checksum or not wanted.checksums:
            return
        first = -(-lo // CHUNK_BYTES)
        last = len(wanted.checksums) if hi == wanted.nbytes else hi // CHUNK_BYTES
        if first >= last:
            return
        span = _between(pieces, begin, first * CHUNK_BYTES, min(last * CHUNK_BYTES, wanted.nbytes))
        for i, digest in enumerate(chunk_hashes(list(span)), first):
            if digest != wanted.checksums[i]:
                start, stop = i * CHUNK_BYTES, min((i + 1) * CHUNK_BYTES, wanted.nbytes)
                raise self._corrupt(f"bytes {start} to {stop} do not match their checksum", start, stop)

    def _verify_header(self, head: bytes) -> None:
        try:
            found = npy.parse_header(head)
        except ValueError as e:
            raise self._corrupt(str(e)) from e
        if found != self._wanted.header:
            raise self._corrupt(f"its header says {found}, expected {self._wanted.header}")

    def _scatter(self, staging: Bytes, lo: int, begin: int, hi: int) -> None:
        """Hand bytes `lo..hi`, which are in `staging` (which starts at `begin`), to the copies."""
        if lo >= hi:
            return
        for copy in self._copies[: bisect.bisect_left(self._offsets, hi)]:
            copy.scatter(staging[lo - begin :], lo, hi)

    def _corrupt(self, what: str, start: int = 0, stop: int | None = None) -> CorruptCheckpointError:
        end = stop if stop is not None else self._wanted.nbytes
        leaves = [c.leaf for c in self._copies if c.offset < end and c.end > start] or [c.leaf for c in self._copies]
        names = ", ".join(map(repr, leaves[:3])) + (f" and {len(leaves) - 3} more" if len(leaves) > 3 else "")
        return CorruptCheckpointError(
            f"corrupt checkpoint: file {self._wanted.name!r} (leaf {names}): {what}. Restore the file from a copy, "
            "or use another checkpoint."
        )

    def _named(self, error: OSError) -> Exception:
        if error.errno == errno.ENOENT:
            return self._corrupt("it is missing")
        if error.errno in (errno.ELOOP, errno.ENOTDIR, errno.ENXIO, errno.EXDEV, errno.EISDIR):
            return self._corrupt("it is, or lies behind, a symbolic link or a special file")
        return OSError(error.errno, error.strerror, self._wanted.name)

    def close(self) -> None:
        """Close what is open."""
        fd, self._fd = self._fd, -1
        direct, self._direct_fd = self._direct_fd, None
        if direct is not None:
            os.close(direct)
        if fd >= 0:
            os.close(fd)


_NOTHING: Bytes = np.empty(0, np.uint8)


def _between(pieces: Sequence[Bytes], begin: int, lo: int, hi: int) -> Iterator[memoryview]:
    """Bytes `lo..hi` of consecutive pieces, of which the first starts at `begin`."""
    for piece in pieces:
        end = begin + piece.nbytes
        if begin < hi and end > lo:
            yield memoryview(piece[max(lo - begin, 0) : min(hi - begin, piece.nbytes)])
        begin = end
