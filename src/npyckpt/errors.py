"""Everything this library raises on purpose.

Each error says what failed, which leaf or file, what was expected against what was found, and what to do
next. The bases are the built-in exceptions a caller would look for, so `except ValueError` or
`except FileNotFoundError` work without knowing this module. Failures of the operating system stay
`OSError`, with the file's name.
"""

from __future__ import annotations


class CheckpointError(Exception):
    """Base of every error that npyckpt raises on purpose."""


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """There is no checkpoint at this path."""


class NotACheckpointError(CheckpointError, NotADirectoryError):
    """The path holds something that is not a checkpoint directory."""


class CorruptCheckpointError(CheckpointError, ValueError):
    """What is on disk is not what was saved: a damaged, missing, exchanged or hostile file."""


class MismatchError(CheckpointError, ValueError):
    """The target, the shardings or the selection do not fit what is stored."""


class UnsupportedLeafError(CheckpointError, TypeError):
    """A leaf, a dict key or a container cannot be saved exactly; nothing was written."""


class InvalidTreeError(CheckpointError, ValueError):
    """The tree cannot be saved as it is (too deep, cyclic, a deleted array); nothing was written."""


class SaveInProgressError(CheckpointError, RuntimeError):
    """Another saver holds this checkpoint; it is named with its host, process and start time."""


class SaveOvertakenError(CheckpointError, RuntimeError):
    """This save lost its staging directory to another saver and has changed nothing."""


class HostError(CheckpointError, RuntimeError):
    """A host failed, was lost or timed out; the message names it and what it had to do."""
