"""Which checkpoint is there now: the manifest and the files that belong to it, whatever a saver is doing.

A reader takes the manifest from `.commit/` if a committed save lies there, else from the directory itself,
and each file from `.commit/` or, failing that, its final place. Reading never writes, and never asks
whether something exists before opening it.
"""

from __future__ import annotations

import errno
import os
import stat
from dataclasses import dataclass

from npyckpt import manifest as mf
from npyckpt.errors import CheckpointNotFoundError, CorruptCheckpointError, NotACheckpointError
from npyckpt.files.kernel import open_beneath
from npyckpt.names import MANIFEST

NEXT = ".next"
COMMIT = ".commit"
MAX_MANIFEST_BYTES = 1 << 30
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A manifest, and enough to tell later whether it is still the one."""

    manifest: mf.Manifest
    raw: bytes
    committed_only: bool
    """It lies in `.commit/`: a saver is rolling forward, or was stopped while doing so."""


def open_directory(path: str) -> int:
    """Open a checkpoint's directory (a symbolic link to one will do).

    Raises:
      CheckpointNotFoundError: nothing is there.
      NotACheckpointError: it is not a directory.
    """
    try:
        return os.open(path, _DIRECTORY)
    except FileNotFoundError as e:
        raise CheckpointNotFoundError(errno.ENOENT, "no checkpoint: there is no such directory", path) from e
    except NotADirectoryError as e:
        raise NotACheckpointError(
            errno.ENOTDIR, "not a checkpoint: a directory was expected, here or above", path
        ) from e


def read_snapshot(dir_fd: int, path: str) -> Snapshot:
    """The manifest of the checkpoint that is there now.

    Raises:
      CheckpointNotFoundError: the directory holds none.
      CorruptCheckpointError: its manifest is damaged or inconsistent.
    """
    for _ in range(3):  # a roll-forward may move the manifest home between the two looks
        for name, committed_only in ((f"{COMMIT}/{MANIFEST}", True), (MANIFEST, False)):
            raw = _read(dir_fd, name, path)
            if raw is not None:
                where = os.path.join(path, name)
                return Snapshot(mf.decode(raw, where), raw, committed_only)
    raise CheckpointNotFoundError(
        errno.ENOENT, f"no checkpoint: the directory has no {MANIFEST}; was this meant to be a step below it?", path
    )


def read_raw(dir_fd: int, path: str) -> bytes | None:
    """The bytes of the manifest that is there now, not validated; None if there is none."""
    for name in (f"{COMMIT}/{MANIFEST}", MANIFEST, f"{COMMIT}/{MANIFEST}", MANIFEST):
        raw = _read(dir_fd, name, path)
        if raw is not None:
            return raw
    return None


def _read(dir_fd: int, name: str, path: str) -> bytes | None:
    try:
        fd = open_beneath(name, os.O_RDONLY | os.O_NONBLOCK, dir_fd)
    except FileNotFoundError:
        return None
    except OSError as e:
        if e.errno in (errno.ELOOP, errno.ENOTDIR, errno.ENXIO, errno.EXDEV):
            raise CorruptCheckpointError(
                f"{os.path.join(path, name)}: the manifest is, or lies behind, a symbolic link or a special file"
            ) from e
        raise
    with open(fd, "rb") as f:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode) or info.st_size > MAX_MANIFEST_BYTES:
            raise CorruptCheckpointError(
                f"{os.path.join(path, name)}: the manifest is not a plain file of at most {MAX_MANIFEST_BYTES} bytes"
            )
        return f.read()


def open_data(dir_fd: int, name: str, committed_only: bool) -> int:
    """Open a data file for reading, following no symbolic link.

    Raises:
      OSError: FileNotFoundError if it is neither in `.commit/` nor home.
    """
    flags = os.O_RDONLY | os.O_NONBLOCK
    if committed_only:
        for _ in range(2):
            for place in (f"{COMMIT}/{name}", name):
                try:
                    return open_beneath(place, flags, dir_fd)
                except FileNotFoundError:
                    continue
    return open_beneath(name, flags, dir_fd)
