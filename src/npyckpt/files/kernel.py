"""What Linux offers beyond the `os` module, and what each mount supports.

Every function has a plain answer where the kernel or the file system does not have the feature: nothing
here is needed for correctness, only for speed. What a mount supports is asked once, of the mount itself,
and never guessed from the name of its file system.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
import sys
import threading
from typing import Any

from npyckpt.options import PAGE_BYTES

LINUX = sys.platform == "linux"
O_DIRECT: int = getattr(os, "O_DIRECT", 0)
RWF_DONTCACHE = 0x80
"""Flag of pwritev2 (Linux 6.14): start writeback at once and drop the pages when it ends."""

MAX_CALL_BYTES = 0x7FFFF000
"""Linux moves at most this many bytes in one read or write call."""

_NR_CACHESTAT = 451
_NR_OPENAT2 = 437
_GENERIC_SYSCALLS = platform.machine() in ("x86_64", "aarch64", "riscv64")
_RESOLVE_NO_SYMLINKS = 0x04
_RESOLVE_BENEATH = 0x08

_UNSUPPORTED = frozenset({errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS, errno.ENOTTY})


def _libc() -> Any:
    return ctypes.CDLL(None, use_errno=True)


_C = _libc() if LINUX else None
_refused: set[tuple[int, str]] = set()
"""(device, feature) pairs that a mount has refused."""
_refused_lock = threading.Lock()


def supports(device: int, feature: str) -> bool:
    """Whether the mount with this `st_dev` has not refused `feature` so far."""
    return (device, feature) not in _refused


def refuse(device: int, feature: str) -> None:
    """Remember that a mount refuses `feature`."""
    with _refused_lock:
        _refused.add((device, feature))


def is_unsupported(error: OSError) -> bool:
    """Whether the error says that a feature does not exist here, rather than that I/O failed."""
    return error.errno in _UNSUPPORTED


def reopen_direct(fd: int, flags: int) -> int | None:
    """A second descriptor of an open file, for direct I/O; None where that is not to be had."""
    device = os.fstat(fd).st_dev
    if not O_DIRECT or not supports(device, "direct"):
        return None
    try:
        return os.open(f"/proc/self/fd/{fd}", flags | O_DIRECT | os.O_CLOEXEC)
    except OSError as e:
        if not is_unsupported(e) and e.errno != errno.ENOENT:  # ENOENT: no /proc
            raise
        refuse(device, "direct")
        return None


def preallocate(fd: int, nbytes: int) -> None:
    """Reserve blocks, so that a full disk is found before the data moves and extents stay large.

    glibc's `posix_fallocate` writes zeros where the file system has no fallocate; this never does.

    Raises:
      OSError: the disk is full, or the quota is.
    """
    if _C is None or nbytes == 0:
        return
    device = os.fstat(fd).st_dev
    if not supports(device, "fallocate"):
        return
    while _C.fallocate(fd, 0, ctypes.c_longlong(0), ctypes.c_longlong(nbytes)) != 0:
        code = ctypes.get_errno()
        if code == errno.EINTR:
            continue
        if code in _UNSUPPORTED:
            refuse(device, "fallocate")
            return
        raise OSError(code, os.strerror(code))


class _CachestatRange(ctypes.Structure):
    _fields_ = (("off", ctypes.c_uint64), ("len", ctypes.c_uint64))


class _Cachestat(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_uint64)
        for name in ("nr_cache", "nr_dirty", "nr_writeback", "nr_evicted", "nr_recently_evicted")
    )


def resident_fraction(fd: int, nbytes: int) -> float | None:
    """Fraction of a file that is in the page cache (`cachestat`, Linux 6.5); None if it cannot be known."""
    if _C is None or not _GENERIC_SYSCALLS or nbytes == 0:
        return None
    span = _CachestatRange(0, nbytes)
    stat = _Cachestat()
    if _C.syscall(_NR_CACHESTAT, fd, ctypes.byref(span), ctypes.byref(stat), 0) != 0:
        return _mincore_fraction(fd, nbytes)
    pages = -(-nbytes // PAGE_BYTES)
    return float(min(stat.nr_cache / pages, 1.0))


def _mincore_fraction(fd: int, nbytes: int) -> float | None:
    """The same by `mincore`, for kernels before 6.5."""
    if _C is None:
        return None
    pages = -(-nbytes // mmap.PAGESIZE)
    vector = (ctypes.c_ubyte * pages)()
    with mmap.mmap(fd, nbytes, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE) as mapped:
        anchor = ctypes.c_char.from_buffer(mapped)
        code = _C.mincore(ctypes.c_void_p(ctypes.addressof(anchor)), ctypes.c_size_t(nbytes), vector)
        del anchor
    return None if code != 0 else sum(v & 1 for v in vector) / pages


class _OpenHow(ctypes.Structure):
    _fields_ = (("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64))


def open_beneath(name: str, flags: int, dir_fd: int) -> int:
    """Open `name` below the directory `dir_fd` without following any symbolic link.

    Raises:
      OSError: as `open`; ELOOP or ENOTDIR where a component is a link.
    """
    if _C is not None and _GENERIC_SYSCALLS and supports(0, "openat2"):
        how = _OpenHow(flags | os.O_CLOEXEC, 0, _RESOLVE_NO_SYMLINKS | _RESOLVE_BENEATH)
        while True:
            fd = _C.syscall(_NR_OPENAT2, dir_fd, os.fsencode(name), ctypes.byref(how), ctypes.sizeof(how))
            if fd >= 0:
                return int(fd)
            code = ctypes.get_errno()
            if code in (errno.EINTR, errno.EAGAIN):
                continue
            if code not in (errno.ENOSYS, errno.EPERM):  # EPERM: a container's filter does not know it
                raise OSError(code, os.strerror(code), name)
            refuse(0, "openat2")
            break
    return _open_by_component(name, flags, dir_fd)


def _open_by_component(name: str, flags: int, dir_fd: int) -> int:
    here = dir_fd
    try:
        *parents, last = name.split("/")
        for parent in parents:
            below = os.open(parent, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=here)
            if here != dir_fd:
                os.close(here)
            here = below
        return os.open(last, flags | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=here)
    finally:
        if here != dir_fd:
            os.close(here)
