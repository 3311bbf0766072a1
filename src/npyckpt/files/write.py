"""Writing: a plan's files from the arrays' own memory, by threads over (file, block) items.

A block of a C-contiguous host array goes to the kernel straight from the array's memory. Only strided
arrays, device arrays, packs, and direct I/O from unaligned memory pass through staging, which is bounded.
Each block is hashed by the thread that writes it. The thread that ends a file's last block syncs it, so
that syncs overlap with the writing of the next file.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash

from npyckpt import npy, pack
from npyckpt.files import kernel
from npyckpt.files.memory import Bytes, StagingPool
from npyckpt.files.sources import Source
from npyckpt.files.threads import Stages, run_all
from npyckpt.options import CHUNK_BYTES, PAGE_BYTES, Options
from npyckpt.plan import Extent, FilePlan

Fetch = Callable[[Extent], Source]
"""Gives the source of an extent's bytes, in the stored dtype."""


@dataclass(frozen=True, slots=True)
class Written:
    """A file that is on disk at its whole size, and its checksums by chunk."""

    name: str
    nbytes: int
    checksums: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class WriteReport:
    """What one host has written."""

    files: tuple[Written, ...]
    io: str
    """The mode that was used, or `mixed`."""
    staging_peak_bytes: int
    thread_seconds: Mapping[str, float]
    """Seconds in device-to-host, write (with hashing) and sync, over all threads."""


def write_files(files: Sequence[FilePlan], fetch: Fetch, dir_fd: int, options: Options) -> WriteReport:
    """Write `files` below the directory `dir_fd`, and sync them and their directories.

    Raises:
      OSError: with the file's name; some files may be there in part.
    """
    engine = _Engine(dir_fd, options, fetch)
    make_directories({os.path.dirname(f.name) for f in files}, dir_fd)
    jobs = [(_PackJob if f.is_pack else _NpyJob)(f, engine) for f in files]
    try:
        run_all(_items(jobs), options.io_threads)
    finally:
        for job in jobs:
            job.close()
    if options.durable:
        with engine.stages.time("sync"):
            sync_directories({os.path.dirname(f.name) for f in files}, dir_fd, options.io_threads)
    modes = engine.modes or {"buffered"}
    return WriteReport(
        tuple(Written(j.plan.name, j.plan.nbytes, tuple(j.checksums)) for j in jobs),
        modes.pop() if len(modes) == 1 else "mixed",
        engine.staging.peak_bytes,
        engine.stages.per_thread(1),
    )


def _items(jobs: Sequence[_Job]) -> Iterator[Callable[[], None]]:
    for job in jobs:
        yield from job.items()


class _Engine:
    """What all files of one save share."""

    def __init__(self, dir_fd: int, options: Options, fetch: Fetch) -> None:
        self.dir_fd = dir_fd
        self.options = options
        self.fetch = fetch
        self.staging = StagingPool(options.staging_bytes)
        self.stages = Stages()
        self.device = os.fstat(dir_fd).st_dev
        self.modes: set[str] = set()

    def wants_direct(self) -> bool:
        """`auto` prefers uncached writes, and direct I/O where the kernel does not have those."""
        io = self.options.io
        return io == "direct" or (io == "auto" and not kernel.supports(self.device, "uncached"))

    def wants_uncached(self) -> bool:
        return self.options.io in ("auto", "uncached") and kernel.supports(self.device, "uncached")


class _Job:
    """A file being written."""

    def __init__(self, plan: FilePlan, engine: _Engine) -> None:
        self.plan = plan
        self.checksums: list[str] = []
        self._engine = engine
        self._lock = threading.Lock()
        self._fd = -1
        self._direct_fd: int | None = None
        self._left = 0

    def items(self) -> Iterator[Callable[[], None]]:
        raise TypeError("a subclass gives the items")

    def open(self) -> None:
        """Create the file, which must not exist: the staging directory is ours alone."""
        engine, name = self._engine, self.plan.name
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            self._fd = os.open(name, flags, 0o666, dir_fd=engine.dir_fd)
            kernel.preallocate(self._fd, self.plan.nbytes)
            if engine.wants_direct() and self.plan.nbytes >= 2 * PAGE_BYTES:
                self._direct_fd = kernel.reopen_direct(self._fd, os.O_WRONLY)
        except OSError as e:
            raise _named(e, name) from e

    def write(self, pieces: Sequence[memoryview], offset: int) -> None:
        """Write contiguous pieces of memory at `offset`, directly where alignment allows."""
        try:
            if self._direct_fd is None:
                self._write_buffered(pieces, offset)
                return
            for piece in pieces:
                self._write_direct(piece, offset)
                offset += piece.nbytes
        except OSError as e:
            raise _named(e, self.plan.name) from e

    def _write_direct(self, piece: memoryview, offset: int) -> None:
        address = np.frombuffer(piece, np.uint8).ctypes.data
        head = min(-offset % PAGE_BYTES, piece.nbytes)
        body = (piece.nbytes - head) // PAGE_BYTES * PAGE_BYTES
        if (address - offset) % PAGE_BYTES or body == 0:
            self._write_buffered([piece], offset)
            return
        if head:
            self._write_buffered([piece[:head]], offset)
        self._engine.modes.add("direct")
        assert self._direct_fd is not None
        write_all(self._direct_fd, [piece[head : head + body]], offset + head)
        if head + body < piece.nbytes:
            self._write_buffered([piece[head + body :]], offset + head + body)

    def _write_buffered(self, pieces: Sequence[memoryview], offset: int) -> None:
        engine = self._engine
        if engine.wants_uncached():
            try:
                write_all(self._fd, pieces, offset, kernel.RWF_DONTCACHE)
            except OSError as e:
                if not kernel.is_unsupported(e):
                    raise
                kernel.refuse(engine.device, "uncached")
            else:
                engine.modes.add("uncached")
                return
        if self._direct_fd is None:
            engine.modes.add("buffered")
        write_all(self._fd, pieces, offset)

    def hash(self, pieces: Sequence[memoryview], offset: int) -> None:
        """Record the checksums of the chunks that `pieces` make up from `offset`, a chunk boundary."""
        if not self._engine.options.checksum:
            return
        for i, digest in enumerate(chunk_hashes(pieces)):
            self.checksums[offset // CHUNK_BYTES + i] = digest

    def finish(self) -> None:
        """Sync the file and check its size."""
        engine, plan = self._engine, self.plan
        try:
            if engine.options.durable:
                with engine.stages.time("sync"):
                    os.fsync(self._fd)
            size = os.fstat(self._fd).st_size
        except OSError as e:
            raise _named(e, plan.name) from e
        if size != plan.nbytes:
            raise OSError(f"{plan.name}: {size} bytes are on disk after writing {plan.nbytes}")
        self.close()

    def close(self) -> None:
        """Close what is open; a failed close (quota on NFS) raises."""
        fd, self._fd = self._fd, -1
        direct, self._direct_fd = self._direct_fd, None
        try:
            if direct is not None:
                os.close(direct)
            if fd >= 0:
                os.close(fd)
        except OSError as e:
            raise _named(e, self.plan.name) from e


class _NpyJob(_Job):
    """A `.npy` file: a header and one array, in independent blocks."""

    def __init__(self, plan: FilePlan, engine: _Engine) -> None:
        super().__init__(plan, engine)
        self._source: Source | None = None
        extent = plan.extents[0]
        self._header = npy.header(plan.dtypes[0], extent.region.shape, length=extent.offset)
        self._blocks = -(-plan.nbytes // engine.options.block_bytes)
        self._left = self._blocks
        self.checksums = [""] * (-(-plan.nbytes // CHUNK_BYTES)) if engine.options.checksum else []

    def items(self) -> Iterator[Callable[[], None]]:
        for i in range(self._blocks):
            yield lambda i=i: self._write_block(i)  # type: ignore[misc]

    def _opened(self) -> Source:
        with self._lock:
            if self._source is None:
                self.open()
                self._source = self._engine.fetch(self.plan.extents[0])
            return self._source

    def _write_block(self, block: int) -> None:
        source = self._opened()
        size = self._engine.options.block_bytes
        lo = block * size
        hi = min(lo + size, self.plan.nbytes)
        offset = self.plan.extents[0].offset
        header = memoryview(self._header)[lo:hi]
        first, last = max(lo - offset, 0), max(hi - offset, 0)
        memory = source.memory
        if memory is not None and self._is_writable_in_place(memory, offset):
            self._put([header, memoryview(memory[first:last])], lo)
        else:
            with self._engine.staging.borrow(hi - lo) as staging:
                staging[: header.nbytes] = np.frombuffer(header, np.uint8)
                itemsize = self.plan.dtypes[0].itemsize
                with self._engine.stages.time("copy" if source.on_host else "device_to_host"):
                    if last > first:
                        data = staging[header.nbytes : hi - lo]
                        source.copy_out(first // itemsize, last // itemsize, data)
                self._put([memoryview(staging[: hi - lo])], lo)
        with self._lock:
            self._left -= 1
            ended = self._left == 0
        if ended:
            self.finish()
            self._source = None

    def _is_writable_in_place(self, memory: Bytes, offset: int) -> bool:
        """Whether writing straight from the array is possible in the mode at hand."""
        if self._direct_fd is None:
            return True
        return memory.nbytes < 2 * PAGE_BYTES or (memory.ctypes.data - offset) % PAGE_BYTES == 0

    def _put(self, pieces: Sequence[memoryview], offset: int) -> None:
        pieces = [p for p in pieces if p.nbytes]
        with self._engine.stages.time("write"):
            self.hash(pieces, offset)
            self.write(pieces, offset)


class _PackJob(_Job):
    """A pack: built in staging as one image, written in large blocks."""

    def items(self) -> Iterator[Callable[[], None]]:
        yield self._write_pack

    def _write_pack(self) -> None:
        engine, plan = self._engine, self.plan
        arrays = [
            ((extent.member or "").removesuffix(".npy"), dtype, extent.region.shape)
            for extent, dtype in zip(plan.extents, plan.dtypes, strict=True)
        ]
        layout = pack.layout(arrays)
        self.open()
        with engine.staging.borrow(plan.nbytes) as staging:
            image = staging[: plan.nbytes]
            with engine.stages.time("copy"):
                crcs = [self._copy_member(e, m, image) for e, m in zip(plan.extents, layout.members, strict=True)]
                pack.fill(layout, image, crcs)
            self.checksums = [""] * (-(-plan.nbytes // CHUNK_BYTES)) if engine.options.checksum else []
            with engine.stages.time("write"):
                for lo in range(0, plan.nbytes, engine.options.block_bytes):
                    block = [memoryview(image[lo : lo + engine.options.block_bytes])]
                    self.hash(block, lo)
                    self.write(block, lo)
        self.finish()

    def _copy_member(self, extent: Extent, member: pack.Member, image: Bytes) -> int:
        end = member.data_offset + member.nbytes
        data = image[member.data_offset : end]
        if member.nbytes:
            source = self._engine.fetch(extent)
            if source.memory is not None:
                data[:] = source.memory
            else:
                source.copy_out(0, extent.region.size, data)
        return pack.stream_crc(member, memoryview(data))


def chunk_hashes(pieces: Sequence[memoryview]) -> Iterator[str]:
    """The xxh3-64 of each chunk of the concatenated pieces, as 16 hexadecimal digits."""
    digest = xxhash.xxh3_64()
    filled = 0
    for piece in pieces:
        at = 0
        while at < piece.nbytes:
            take = min(CHUNK_BYTES - filled, piece.nbytes - at)
            digest.update(piece[at : at + take])
            at += take
            filled += take
            if filled == CHUNK_BYTES:
                yield digest.hexdigest()
                digest.reset()
                filled = 0
    if filled:
        yield digest.hexdigest()


def write_all(fd: int, pieces: Sequence[memoryview], offset: int, flags: int = 0) -> None:
    """Write every byte: the kernel may take fewer than asked, and never more than 0x7ffff000.

    Raises:
      OSError: the write failed, or made no progress.
    """
    left = [p for p in pieces if p.nbytes]
    while left:
        if sum(p.nbytes for p in left) > kernel.MAX_CALL_BYTES:
            batch: list[Any] = [left[0][: kernel.MAX_CALL_BYTES]]
        else:
            batch = left
        done = os.pwritev(fd, batch, offset, flags) if flags else os.pwritev(fd, batch, offset)
        if done <= 0:
            raise OSError(f"a write of {sum(p.nbytes for p in batch)} bytes at {offset} made no progress")
        offset += done
        while left and done >= left[0].nbytes:
            done -= left.pop(0).nbytes
        if done:
            left[0] = left[0][done:]


def make_directories(names: set[str], dir_fd: int) -> None:
    """Make relative directories and their parents; those that are there already are kept."""
    for name in sorted({d for n in names for d in _with_parents(n)}):
        try:
            os.mkdir(name, dir_fd=dir_fd)
        except FileExistsError:
            continue


def sync_directories(names: set[str], dir_fd: int, threads: int) -> None:
    """Make the entries of relative directories, of their parents and of `dir_fd` itself durable."""
    every = {d for n in names for d in _with_parents(n)}
    run_all([lambda d=d: _sync_directory(d, dir_fd) for d in sorted(every)], min(threads, len(every)))  # type: ignore[misc]
    os.fsync(dir_fd)


def _sync_directory(name: str, dir_fd: int) -> None:
    fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=dir_fd)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _with_parents(name: str) -> Iterator[str]:
    while name:
        yield name
        name = os.path.dirname(name)


def _named(error: OSError, name: str) -> OSError:
    """The same error, with the file's name (a descriptor has none)."""
    if error.filename is not None or error.errno is None:
        return error
    return OSError(error.errno, error.strerror, name)
