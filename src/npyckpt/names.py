"""File names: readable, deterministic, injective, and safe on every file system we know.

A leaf's file is named by its key path, one directory a key, and by its region when the leaf is stored in
several pieces. The encoding is ASCII, distinguishes all keys even where case is ignored and Unicode is
normalised (macOS, Windows), and keeps each component within 255 bytes and each name within `MAX_NAME`.
Only the manifest rebuilds the tree; nothing ever parses a name.

The encoding of one key (docs/format.md has it in full):

* letters, digits, `_`, `-` and `.` stand for themselves; every other byte of the key's UTF-8 is `%xx`;
* upper-case letters are kept for the reader, and `~` with the hexadecimal bit mask of their places is
  added, so that `W` is `W~1` and `w` is `w` (a literal `~` is always `%7e`);
* a key that is not a string is `=` and its JSON; a list or tuple index is plain digits;
* a component that would be too long keeps its head, then `~~` and the BLAKE2b-128 of the whole.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from hashlib import blake2b
from typing import TypeAlias

from npyckpt.regions import Region

Scalar: TypeAlias = str | int | float | bool | None


class Index(int):
    """A position in a list or a tuple, as opposed to a dict key that is an int."""

    __slots__ = ()


KeyPath: TypeAlias = tuple[Scalar, ...]
"""Keys from the root to a leaf: `str` for dict keys, attributes and fields, `Index` for positions, and
int, float, bool or None for other dict keys."""

MAX_COMPONENT = 140
"""Longest encoded key; with a region and `.npy` behind it a component stays below 255 bytes."""
MAX_REGION = 100
MAX_NAME = 1024
"""Longest relative name; with a checkpoint path of 3,000 bytes it stays below PATH_MAX."""

MANIFEST = "manifest.json"
PACK_DIRECTORY = "packed"

_UNSAFE = re.compile(r"[^A-Za-z0-9_.\-]")
_RESERVED = re.compile(r"(con|prn|aux|nul|com[0-9]|lpt[0-9])(\..*)?", re.IGNORECASE)
_OURS = re.compile(r"step_[0-9]+|manifest(\..*)?|packed", re.IGNORECASE)
_SUFFIX = re.compile(r"\.(npy|npz|json)$", re.IGNORECASE)


def display(path: KeyPath) -> str:
    """The key path as users read and write it: `params/dense_0/kernel`.

    `/` and `%` within a key are `%2F` and `%25`; a key that is not a string is `=` and its JSON (`=1`), so
    different paths never look alike. The root is the empty string.
    """
    return "/".join(map(display_key, path))


def display_key(key: Scalar) -> str:
    """One component of `display`."""
    if isinstance(key, Index):
        return str(int(key))
    if not isinstance(key, str):
        return "=" + json.dumps(key)
    text = key.replace("%", "%25").replace("/", "%2F")
    if text.startswith("="):
        return "%3D" + text[1:]
    return text or "%"


def file_stem(path: KeyPath) -> str:
    """The relative name of a leaf, without region and suffix."""
    parts = [encode_key(key, first=(i == 0)) for i, key in enumerate(path)] or ["root"]
    name = "/".join(parts)
    if len(name) <= MAX_NAME - MAX_REGION:
        return name
    kept = name[: MAX_NAME // 4].rsplit("/", 1)[0]
    return f"{kept}/~~{_digest(name)}"


def region_suffix(region: Region) -> str:
    """`@start-stop,start-stop` for a piece of a leaf; a digest where that would be too long."""
    text = ",".join(f"{a}-{b}" for a, b in zip(region.start, region.stop, strict=True))
    return "@" + (text if len(text) < MAX_REGION else "~~" + _digest(text))


def leaf_name(path: KeyPath, region: Region | None = None) -> str:
    """The name of a leaf (or of one `region` of it) without its suffix; also its name within a pack."""
    return file_stem(path) + (region_suffix(region) if region is not None else "")


def pack_name(number: int) -> str:
    """The name of pack `number`."""
    return f"{PACK_DIRECTORY}/{number}.npz"


def encode_key(key: Scalar, *, first: bool = False) -> str:
    """One key as one path component. `first` guards the names this library uses itself at the top."""
    if isinstance(key, Index):
        return str(int(key))
    if not isinstance(key, str):
        return "=" + _escape(json.dumps(key))
    if key == "":
        return "%"
    encoded = _escape(key)
    if _RESERVED.fullmatch(encoded) or (first and _OURS.fullmatch(encoded)) or encoded.startswith("."):
        encoded = f"%{ord(encoded[0]):02x}{encoded[1:]}"
    encoded = _SUFFIX.sub(lambda m: "%2e" + m.group(1), encoded)
    if encoded.endswith("."):
        encoded = encoded[:-1] + "%2e"
    return _shorten(encoded + _case_mark(encoded))


def _escape(text: str) -> str:
    return _UNSAFE.sub(lambda m: "".join(f"%{b:02x}" for b in m.group().encode("utf-8", "surrogatepass")), text)


def _case_mark(encoded: str) -> str:
    """`~` and the places of the upper-case letters as a hexadecimal mask; nothing where there are none."""
    mask = sum(1 << i for i, c in enumerate(encoded) if c.isupper())
    return f"~{mask:x}" if mask else ""


def _shorten(encoded: str) -> str:
    if len(encoded) <= MAX_COMPONENT:
        return encoded
    head = re.sub(r"%[0-9a-f]?$", "", encoded[: MAX_COMPONENT - 40])
    return f"{head}~~{_digest(encoded)}"


def _digest(text: str) -> str:
    return blake2b(text.encode(), digest_size=16).hexdigest()


def name_fault(name: str) -> str | None:
    """Why a name read from a manifest is not acceptable, or None.

    Acceptable names are relative, ASCII, without `.` or `..` components, and never one of our own
    directories: a hostile manifest cannot reach outside its checkpoint.
    """
    if not name or len(name) > MAX_NAME + MAX_REGION or not name.isascii():
        return "it is empty, too long or not ASCII"
    if any(c in name for c in "\\:\0") or not name.isprintable():
        return "it holds a character that no name of ours has"
    parts: Sequence[str] = name.split("/")
    if any(part in ("", ".", "..") or part.startswith(".") or len(part) > 255 for part in parts):
        return "it is absolute, leaves the directory, or has an empty, hidden or overlong component"
    if not name.endswith((".npy", ".npz")):
        return "it is neither .npy nor .npz"
    return None
