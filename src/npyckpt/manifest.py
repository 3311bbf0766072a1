"""`manifest.json`: the record of a checkpoint, written last and believed only when proven consistent.

docs/format.md describes every field. The manifest holds relative names only and nothing about hosts,
devices, times or meshes. Its last field is a digest of all bytes before it, so that any damage to the
manifest itself is found before a single name in it is used.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import numpy as np
import xxhash

from npyckpt.dtypes import dtype_from_name, stored_dtype
from npyckpt.errors import CorruptCheckpointError
from npyckpt.leaves import LeafKind, LeafSpec, python_value
from npyckpt.names import name_fault
from npyckpt.options import CHUNK_BYTES
from npyckpt.regions import Region, tiling_fault
from npyckpt.tree import INDEXED, MAX_DEPTH, Node, key_identity

FORMAT = "npyckpt"
VERSION = 1
MAX_DIMENSIONS = 64


class Part(msgspec.Struct, frozen=True, omit_defaults=True):
    """One piece of a leaf: `region` (start and stop per dimension) and where its bytes are."""

    region: tuple[tuple[int, int], ...]
    file: int
    """Position in `Manifest.files`."""
    offset: int
    bytes: int
    member: str | None = None
    """Name within a pack."""

    @property
    def box(self) -> Region:
        return Region(tuple(a for a, _ in self.region), tuple(b for _, b in self.region))


class LeafRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """A leaf: see `npyckpt.leaves.LeafSpec` for the fields up to `text`."""

    path: str
    kind: LeafKind
    dtype: str
    shape: tuple[int, ...] = ()
    impl: str | None = None
    text: str | None = None
    parts: tuple[Part, ...] = ()

    @property
    def nbytes(self) -> int:
        """Logical bytes of the array; 0 for a Python scalar."""
        return sum(p.bytes for p in self.parts)

    @property
    def spec(self) -> LeafSpec:
        return LeafSpec(self.kind, self.dtype, self.shape, self.impl, self.text)

    @property
    def true_dtype(self) -> np.dtype[Any]:
        """The array's dtype."""
        return dtype_from_name(self.dtype)

    @property
    def stored_dtype(self) -> np.dtype[Any]:
        """The dtype in the `.npy` header."""
        return stored_dtype(self.true_dtype)


class FileRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """A data file: relative name, size, and the xxh3-64 of each chunk of it (none if saved without)."""

    name: str
    bytes: int
    checksums: tuple[str, ...] = ()


class Manifest(msgspec.Struct, frozen=True):
    """The whole record."""

    format: str
    version: int
    chunk_bytes: int
    """A checksum covers this many bytes of a file, the last one what is left."""
    tree: Node
    leaves: tuple[LeafRecord, ...]
    files: tuple[FileRecord, ...]

    @property
    def nbytes(self) -> int:
        """Logical bytes of all arrays."""
        return sum(leaf.nbytes for leaf in self.leaves)


class _Version(msgspec.Struct):
    format: str
    version: int


_DIGEST_FIELD = b',"digest":"'
_DIGEST_BYTES = len(_DIGEST_FIELD) + 32 + len(b'"}\n')


def make_manifest(tree: Node, leaves: Sequence[LeafRecord], files: Sequence[FileRecord]) -> Manifest:
    """A manifest of the current version."""
    return Manifest(FORMAT, VERSION, CHUNK_BYTES, tree, tuple(leaves), tuple(files))


def encode(manifest: Manifest) -> bytes:
    """The bytes of `manifest.json`."""
    body = msgspec.json.encode(manifest)[:-1]
    return body + _DIGEST_FIELD + xxhash.xxh3_128_hexdigest(body).encode() + b'"}\n'


def decode(raw: bytes, name: str) -> Manifest:
    """Read and validate a manifest; `name` is its file, for errors.

    Raises:
      CorruptCheckpointError: it is damaged, of another format or version, or inconsistent.
    """
    body = raw[:-_DIGEST_BYTES]
    digest = _DIGEST_FIELD + xxhash.xxh3_128_hexdigest(body).encode() + b'"}\n'
    try:
        if raw[-_DIGEST_BYTES:] != digest:
            _check_version(raw, name)
            raise CorruptCheckpointError(
                f"{name}: damaged manifest ({len(raw)} bytes): its digest does not match its content. Restore "
                "the file from a copy, or use another checkpoint."
            )
        _check_version(raw, name)
        manifest = msgspec.json.decode(raw, type=Manifest)
        fault = _fault(manifest)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as e:
        raise CorruptCheckpointError(f"{name}: not a readable manifest: {e}") from e
    if fault is not None:
        raise CorruptCheckpointError(f"{name}: inconsistent manifest, refused before any file was opened: {fault}")
    return manifest


def _check_version(raw: bytes, name: str) -> None:
    found = msgspec.json.decode(raw, type=_Version)
    if found.format != FORMAT:
        raise CorruptCheckpointError(f"{name}: its format is {found.format!r}, not {FORMAT!r}")
    if found.version != VERSION:
        raise CorruptCheckpointError(
            f"{name}: format version {found.version}; this npyckpt reads version {VERSION}. Upgrade npyckpt."
        )


def _fault(manifest: Manifest) -> str | None:
    """The first inconsistency, or None."""
    checks = (_tree_fault, _files_fault, _leaves_fault, _extents_fault)
    return next((fault for check in checks if (fault := check(manifest)) is not None), None)


def _tree_fault(manifest: Manifest) -> str | None:
    seen: list[int] = []
    stack = [(manifest.tree, 0)]
    while stack:
        node, depth = stack.pop()
        if depth > MAX_DEPTH:
            return f"the tree is deeper than {MAX_DEPTH} levels"
        if (node.kind == "leaf") != (node.leaf is not None) or (
            node.kind in ("leaf", "none") and (node.children or node.keys is not None)
        ):
            return f"a node of kind {node.kind!r} is malformed"
        if node.leaf is not None:
            seen.append(node.leaf)
        elif node.kind in INDEXED:
            if node.keys is not None:
                return f"a node of kind {node.kind!r} has keys"
        elif node.kind != "none":
            keys = node.keys or ()
            if len(keys) != len(node.children) or len({key_identity(k) for k in keys}) != len(keys):
                return f"a node of kind {node.kind!r} has {len(node.children)} children for keys {keys[:8]}"
        stack.extend((child, depth + 1) for child in node.children)
    if sorted(seen) != list(range(len(manifest.leaves))):
        return f"the tree refers to {len(seen)} leaves, {len(manifest.leaves)} are recorded"
    return None


def _files_fault(manifest: Manifest) -> str | None:
    if manifest.chunk_bytes != CHUNK_BYTES:
        return f"chunk_bytes is {manifest.chunk_bytes}, version 1 has {CHUNK_BYTES}"
    names: set[str] = set()
    for record in manifest.files:
        fault = name_fault(record.name)
        if fault is not None:
            return f"file name {record.name!r}: {fault}"
        if record.bytes < 0 or (record.checksums and len(record.checksums) != chunks(record.bytes)):
            return f"file {record.name!r}: {len(record.checksums)} checksums for {record.bytes} bytes"
        names.add(record.name.casefold())
    if len(names) != len(manifest.files):
        return "two files have the same name"
    return None


def _leaves_fault(manifest: Manifest) -> str | None:
    paths: set[str] = set()
    for leaf in manifest.leaves:
        fault = _leaf_fault(leaf, len(manifest.files))
        if fault is not None:
            return f"leaf {leaf.path!r}: {fault}"
        paths.add(leaf.path)
    return "two leaves have the same path" if len(paths) != len(manifest.leaves) else None


def _leaf_fault(leaf: LeafRecord, files: int) -> str | None:
    if leaf.kind == "python":
        if leaf.text is None or leaf.parts or leaf.shape:
            return "a Python scalar has a text and nothing else"
        try:
            python_value(leaf.dtype, leaf.text)
        except ValueError as e:
            return str(e)
        return None
    if (leaf.kind == "key") != (leaf.impl is not None) or leaf.text is not None:
        return f"malformed record of kind {leaf.kind!r}"
    if len(leaf.shape) > MAX_DIMENSIONS or any(n < 0 for n in leaf.shape):
        return f"{leaf.shape} is not a shape"
    try:
        itemsize = leaf.true_dtype.itemsize
    except ValueError as e:
        return str(e)
    for part in leaf.parts:
        if not 0 <= part.file < files or part.offset < 0:
            return f"part {part.region} is in no file"
        if part.bytes != math.prod(b - a for a, b in part.region) * itemsize:
            return f"part {part.region} has {part.bytes} bytes"
    return tiling_fault([p.box for p in leaf.parts], leaf.shape)


def _extents_fault(manifest: Manifest) -> str | None:
    """Parts lie inside their files and do not overlap there; a `.npy` holds exactly one."""
    extents: dict[int, list[tuple[int, int, str | None]]] = defaultdict(list)
    for leaf in manifest.leaves:
        for part in leaf.parts:
            extents[part.file].append((part.offset, part.offset + part.bytes, part.member))
    for number, record in enumerate(manifest.files):
        found = sorted(extents[number], key=lambda e: e[:2])
        is_pack = record.name.endswith(".npz")
        if not found or (not is_pack and len(found) != 1) or any((e[2] is not None) != is_pack for e in found):
            return f"file {record.name!r} holds {len(found)} parts, or parts of the wrong kind"
        if found[-1][1] > record.bytes or (not is_pack and found[0][1] != record.bytes):
            return f"file {record.name!r}: its parts end at byte {found[-1][1]} of {record.bytes}"
        if any(a[1] > b[0] for a, b in zip(found, found[1:], strict=False)):
            return f"file {record.name!r}: its parts overlap"
    return None


def chunks(nbytes: int) -> int:
    """Number of checksummed chunks of a file of `nbytes`."""
    return -(-nbytes // CHUNK_BYTES)


def leaf_record(path: str, spec: LeafSpec, parts: Iterable[Part] = ()) -> LeafRecord:
    """The record of a leaf, its parts in the order of their regions."""
    ordered = tuple(sorted(parts, key=lambda p: p.region))
    return LeafRecord(path, spec.kind, spec.dtype, spec.shape, spec.impl, spec.text, ordered)
