"""From a staged directory to the checkpoint, atomically.

The protocol (docs/format.md, "Commit"):

1. `.next/` is made; `.next/saver.json` says who saves, and is locked with `flock` for as long as the saver
   lives. The kernel drops the lock when the process dies, however it dies, so a crashed saver never blocks
   the next one, and a paused one is never mistaken for a crashed one.
2. Everything the save writes is staged in `.next/` at its final relative name, synced, the manifest last.
3. **The commit point is the rename of `.next` to `.commit`.** Then the directory is synced.
4. Rolling forward moves the files home, removes those that the previous manifest named and the new one does
   not, moves the manifest home last and removes `.commit`. Each step may be repeated, so whoever comes next
   finishes what a crash interrupted.

A saver works through descriptors of its staging directory, never through its name: one that lost it (on a
file system whose locks can be lost) finds out at the commit and has touched nothing.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import stat
import time
from collections.abc import Iterable, Sequence
from types import TracebackType

from npyckpt import manifest as mf
from npyckpt.errors import CheckpointError, NotACheckpointError, SaveInProgressError, SaveOvertakenError
from npyckpt.files.threads import run_all
from npyckpt.files.write import make_directories, sync_directories, write_all
from npyckpt.names import MANIFEST
from npyckpt.snapshot import COMMIT, NEXT, Snapshot, read_snapshot

SAVER = "saver.json"
DEAD = ".dead"
"""Where the staging directory of a dead saver goes before it is removed."""
_GRACE_S = 2.0
"""How long a staging directory may be without `saver.json` before its maker counts as dead."""
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class Saver:
    """The one saver of a checkpoint, from its claim to its commit; a context manager.

    Leaving it without a commit removes the staging directory, and the directories that it made for a
    checkpoint that never came to be.

    Raises:
      SaveInProgressError: on entering, if another saver is at work.
      NotACheckpointError: on entering, if the path or something above it is not a directory.
    """

    def __init__(self, path: str, *, durable: bool = True, threads: int = 8) -> None:
        self.path = path
        self._durable = durable
        self._threads = threads
        self._made: list[str] = []
        self._root_fd = -1
        self._lock_fd = -1
        self.dir_fd = -1
        """Descriptor of the staging directory."""
        self.previous: Snapshot | None = None
        """The checkpoint that was there when this saver took over."""

    def __enter__(self) -> Saver:
        try:
            self._made = _make_root(self.path)
            self._root_fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except (FileExistsError, NotADirectoryError) as e:
            raise NotACheckpointError(
                errno.ENOTDIR, "cannot save: a directory was expected, here or above", self.path
            ) from e
        try:
            self._claim()
            self.previous = self._finish_previous()
        except BaseException:
            self._leave(committed=False)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._root_fd >= 0:
            self._leave(committed=False)

    # -- claiming ------------------------------------------------------------------------------------------

    def _claim(self) -> None:
        """Make `.next` and lock it, or take it over from a saver that is dead."""
        deadline = time.monotonic() + _GRACE_S
        while True:
            try:
                os.mkdir(NEXT, dir_fd=self._root_fd)
            except FileExistsError:
                if not self._bury(NEXT, patient=time.monotonic() < deadline):
                    time.sleep(0.02)
                continue
            if self._lock_staging():
                break
        if not self._bury(COMMIT, patient=False, only_uncommitted=True):
            self._wait_for_commit()

    def _lock_staging(self) -> bool:
        """Lock the directory just made; False if another saver took it for a dead one's meanwhile."""
        fd = -1
        try:
            fd = os.open(NEXT, _DIRECTORY, dir_fd=self._root_fd)
            lock = os.open(SAVER, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666, dir_fd=fd)
        except (FileNotFoundError, FileExistsError):
            if fd >= 0:
                os.close(fd)
            return False
        self.dir_fd, self._lock_fd = fd, lock
        _try_lock(lock)
        who = {"host": socket.gethostname(), "pid": os.getpid(), "since": time.strftime("%FT%TZ", time.gmtime())}
        write_all(lock, [memoryview(json.dumps(who).encode())], 0)
        return self._holds(NEXT)

    def _holds(self, name: str) -> bool:
        """Whether `name` is the staging directory that this saver holds."""
        try:
            there = os.stat(name, dir_fd=self._root_fd, follow_symlinks=False)
        except FileNotFoundError:
            return False
        ours = os.fstat(self.dir_fd)
        return (there.st_dev, there.st_ino) == (ours.st_dev, ours.st_ino)

    def _bury(self, name: str, *, patient: bool, only_uncommitted: bool = False) -> bool:
        """Remove what a dead saver left under `name`; True if it is gone (or committed and dead).

        Raises:
          SaveInProgressError: its saver lives.
        """
        try:
            fd = os.open(name, _DIRECTORY, dir_fd=self._root_fd)
        except FileNotFoundError:
            return True
        except NotADirectoryError as e:
            raise NotACheckpointError(errno.ENOTDIR, "not a directory of ours", os.path.join(self.path, name)) from e
        try:
            lock = _open_saver(fd)
            if lock is None and patient:
                return False
            if lock is not None:
                try:
                    if not _try_lock(lock):
                        raise SaveInProgressError(self._in_progress(lock))
                    if only_uncommitted and _has(fd, MANIFEST):
                        return True
                    self._remove_dead(name)
                finally:
                    os.close(lock)
            elif not (only_uncommitted and _has(fd, MANIFEST)):
                self._remove_dead(name)
            return True
        finally:
            os.close(fd)

    def _remove_dead(self, name: str) -> None:
        remove_tree(self._root_fd, DEAD)
        os.rename(name, DEAD, src_dir_fd=self._root_fd, dst_dir_fd=self._root_fd)
        remove_tree(self._root_fd, DEAD)

    def _wait_for_commit(self) -> None:
        raise SaveInProgressError(f"{self.path}: another save is being committed; try again")

    def _in_progress(self, lock: int) -> str:
        try:
            who = json.loads(os.pread(lock, 4096, 0))
            by = f"process {who['pid']} on host {who['host']}, since {who['since']}"
        except (ValueError, KeyError, TypeError):
            by = "a process that has not yet said who it is"
        return (
            f"{self.path}: another save is in progress, by {by}. Wait for it to end, or stop that process; a "
            "process that is gone never blocks the next save."
        )

    # -- the previous save ---------------------------------------------------------------------------------

    def _finish_previous(self) -> Snapshot | None:
        """Roll forward what a dead saver committed, and read what is there."""
        remove_tree(self._root_fd, DEAD)
        if _has(self._root_fd, f"{COMMIT}/{MANIFEST}"):
            self._roll_forward(read_snapshot(self._root_fd, self.path).manifest)
        if not _has(self._root_fd, MANIFEST):
            return None
        return read_snapshot(self._root_fd, self.path)

    # -- the commit ----------------------------------------------------------------------------------------

    def commit(self, manifest: mf.Manifest, staged: Sequence[str]) -> None:
        """Make the staged files, with `manifest`, the checkpoint.

        `staged` are the files that this save has written and synced below `dir_fd`; the manifest may name
        others, which are those of the previous checkpoint that it keeps.

        Raises:
          SaveOvertakenError: another saver has taken over; nothing was changed.
          CheckpointError: something that is not ours stands where a file must go; nothing was changed.
        """
        self._check_homes(staged)
        fd = os.open(MANIFEST, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666, dir_fd=self.dir_fd)
        try:
            write_all(fd, [memoryview(mf.encode(manifest))], 0)
            if self._durable:
                os.fsync(fd)
        finally:
            os.close(fd)
        if self._durable:
            os.fsync(self.dir_fd)
        if not self._holds(NEXT):
            raise self._overtaken()
        os.rename(NEXT, COMMIT, src_dir_fd=self._root_fd, dst_dir_fd=self._root_fd)
        if not self._holds(COMMIT):  # lost between the two lines: what was renamed is another's, not ours
            os.rename(COMMIT, NEXT, src_dir_fd=self._root_fd, dst_dir_fd=self._root_fd)
            raise self._overtaken()
        self._sync_root()
        self._roll_forward(manifest)
        self._leave(committed=True)

    def _overtaken(self) -> SaveOvertakenError:
        return SaveOvertakenError(
            f"{self.path}: this save lost its staging directory to another saver (its lock was lost); it has "
            "changed nothing. Save again."
        )

    def _sync_root(self) -> None:
        """Make the entries of the checkpoint's directory, and its own in those made for it, durable."""
        if not self._durable:
            return
        os.fsync(self._root_fd)
        for made in reversed(self._made):
            fd = os.open(os.path.dirname(made) or ".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)

    def _check_homes(self, staged: Iterable[str]) -> None:
        """Refuse, before the commit, whatever would stop the roll-forward after it."""
        parents = {p for name in staged for p in _parents(name)}
        for name in [*sorted(parents), *staged]:
            try:
                info = os.stat(name, dir_fd=self._root_fd, follow_symlinks=False)
            except (FileNotFoundError, NotADirectoryError):
                continue
            if stat.S_ISDIR(info.st_mode) != (name in parents):
                raise CheckpointError(
                    f"{os.path.join(self.path, name)} is not ours and stands where the checkpoint needs a "
                    f"{'directory' if name in parents else 'file'}. Move it away. Nothing was changed."
                )

    def _roll_forward(self, manifest: mf.Manifest) -> None:
        """Move the files of `.commit` home, remove what is obsolete, the manifest last. Idempotent."""
        names = {f.name for f in manifest.files}
        old = self._previous_names()
        folders = {os.path.dirname(n) for n in names}
        make_directories(folders, self._root_fd)
        run_all([lambda n=n: self._move_home(n) for n in sorted(names)], min(self._threads, 4))  # type: ignore[misc]
        for name in sorted(old - names):
            _unlink(name, self._root_fd)
        _remove_empty({p for n in old - names for p in _parents(n)}, self._root_fd)
        if self._durable:
            sync_directories(folders, self._root_fd, self._threads)
        self._move_home(MANIFEST)
        if self._durable:
            os.fsync(self._root_fd)
        remove_tree(self._root_fd, COMMIT)

    def _previous_names(self) -> set[str]:
        """Files of the checkpoint that is being replaced."""
        try:
            fd = os.open(MANIFEST, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self._root_fd)
        except FileNotFoundError:
            return set()
        with open(fd, "rb") as f:
            return {r.name for r in mf.decode(f.read(), os.path.join(self.path, MANIFEST)).files}

    def _move_home(self, name: str) -> None:
        try:
            os.rename(f"{COMMIT}/{name}", name, src_dir_fd=self._root_fd, dst_dir_fd=self._root_fd)
        except FileNotFoundError:
            return  # moved already, or kept from the previous checkpoint

    # -- leaving -------------------------------------------------------------------------------------------

    def _leave(self, *, committed: bool) -> None:
        """Release the lock; without a commit, remove what this saver made."""
        try:
            if not committed and self.dir_fd >= 0 and self._holds(NEXT):
                remove_tree(self._root_fd, NEXT)
        finally:
            for fd in (self._lock_fd, self.dir_fd, self._root_fd):
                if fd >= 0:
                    os.close(fd)
            self._lock_fd = self.dir_fd = self._root_fd = -1
            if not committed:
                for made in reversed(self._made):
                    try:
                        os.rmdir(made)
                    except OSError:  # somebody else uses it
                        break


def _make_root(path: str) -> list[str]:
    """Make the directory and its parents; returns those that were made, outermost first."""
    missing = []
    here = os.path.abspath(path)
    while True:
        try:
            os.mkdir(here)
            made = [here]
            break
        except FileExistsError:
            made = []
            break
        except FileNotFoundError:
            missing.append(here)
            here = os.path.dirname(here)
    for directory in reversed(missing):
        try:
            os.mkdir(directory)
            made.append(directory)
        except FileExistsError:
            continue
    return made


def _open_saver(dir_fd: int) -> int | None:
    try:
        return os.open(SAVER, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=dir_fd)
    except FileNotFoundError:
        return None


def _try_lock(fd: int) -> bool:
    """Lock an open file for this process; False if another process holds it."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _has(dir_fd: int, name: str) -> bool:
    """Whether `name` can be opened: an open, unlike a stat, is never answered from another's stale cache."""
    try:
        os.close(os.open(name, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=dir_fd))
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def _parents(name: str) -> list[str]:
    found = []
    while name := os.path.dirname(name):
        found.append(name)
    return found


def _unlink(name: str, dir_fd: int) -> None:
    try:
        os.unlink(name, dir_fd=dir_fd)
    except (FileNotFoundError, NotADirectoryError):
        return


def _remove_empty(names: set[str], dir_fd: int) -> None:
    """Remove directories that are empty, innermost first; others hold something that is not ours."""
    for name in sorted(names, key=lambda n: -n.count("/")):
        try:
            os.rmdir(name, dir_fd=dir_fd)
        except OSError as e:
            if e.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT, errno.ENOTDIR):
                raise


def remove_tree(dir_fd: int, name: str) -> None:
    """Remove `name` below `dir_fd` with everything in it, never following a symbolic link."""
    try:
        info = os.stat(name, dir_fd=dir_fd, follow_symlinks=False)
    except FileNotFoundError:
        return
    if not stat.S_ISDIR(info.st_mode):
        _unlink(name, dir_fd)
        return
    fd = os.open(name, _DIRECTORY, dir_fd=dir_fd)
    try:
        for entry in os.listdir(fd):
            remove_tree(fd, entry)
    finally:
        os.close(fd)
    try:
        os.rmdir(name, dir_fd=dir_fd)
    except FileNotFoundError:
        return
