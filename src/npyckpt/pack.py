"""Packs: many small arrays in one plain, uncompressed `.npz`, laid out for few large reads and writes.

The layout is that of PKZIP APPNOTE 6.3, method 0 (stored), without ZIP64: a local header, a `.npy` stream,
... and the central directory at the end. An extra field pads each local header so that the array's data is
64-byte aligned in the file; a pack read into page-aligned memory therefore *is* its arrays. Everything but
the CRC-32s follows from names, dtypes and shapes alone.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from npyckpt import npy

MAX_MEMBERS = 16_000
"""Members of one pack at most; beyond 65,535 a reader would need ZIP64."""

_LOCAL = struct.Struct("<IHHHHHIIIHH")
_CENTRAL = struct.Struct("<IHHHHHHIIIHHHHHII")
_END = struct.Struct("<IHHHHIIH")
_VERSION = 20
_DATE_1980 = 0x21
"""1980-01-01, the earliest date of the format: the same content gives the same bytes."""
_PADDING_ID = 0xD935
"""Extra field that zipalign uses for the same purpose."""


class Member(NamedTuple):
    """One array of a pack and where it lies."""

    name: str
    header: bytes
    """The `.npy` header."""
    start: int
    """Offset of the local header."""
    data_offset: int
    nbytes: int
    """Bytes of data, without the header."""

    @property
    def stream_offset(self) -> int:
        return self.data_offset - len(self.header)


class Layout(NamedTuple):
    """Where everything in a pack lies."""

    members: tuple[Member, ...]
    directory_offset: int
    nbytes: int


def layout(arrays: Sequence[tuple[str, np.dtype[Any], tuple[int, ...]]]) -> Layout:
    """Lay out a pack of arrays given as (name without suffix, dtype, shape)."""
    members = []
    offset = directory_bytes = 0
    for name, dtype, shape in arrays:
        filename = name + ".npy"
        header = npy.header(dtype, shape)
        stream = _align(offset + _LOCAL.size + len(filename) + 4)
        nbytes = dtype.itemsize * int(np.prod(shape, dtype=np.int64))
        members.append(Member(filename, header, offset, stream + len(header), nbytes))
        offset = stream + len(header) + nbytes
        directory_bytes += _CENTRAL.size + len(filename)
    return Layout(tuple(members), offset, offset + directory_bytes + _END.size)


def fill(plan: Layout, buffer: np.ndarray[Any, np.dtype[np.uint8]], crcs: Sequence[int]) -> None:
    """Write the headers and the directory into `buffer`, whose data is in place already.

    `crcs` are those of the members' streams, from `stream_crc`.
    """
    directory = bytearray()
    for member, crc in zip(plan.members, crcs, strict=True):
        name = member.name.encode()
        size = len(member.header) + member.nbytes
        padding = member.stream_offset - member.start - _LOCAL.size - len(name)
        extra = struct.pack("<HH", _PADDING_ID, padding - 4).ljust(padding, b"\0")
        common = (_VERSION, 0, 0, 0, _DATE_1980, crc, size, size, len(name))
        head = _LOCAL.pack(0x04034B50, *common, padding) + name + extra + member.header
        buffer[member.start : member.data_offset] = np.frombuffer(head, np.uint8)
        directory += _CENTRAL.pack(0x02014B50, _VERSION, *common, 0, 0, 0, 0, 0, member.start) + name
    count = len(plan.members)
    directory += _END.pack(0x06054B50, 0, 0, count, count, len(directory), plan.directory_offset, 0)
    buffer[plan.directory_offset : plan.nbytes] = np.frombuffer(directory, np.uint8)


def stream_crc(member: Member, data: memoryview) -> int:
    """CRC-32 of a member's `.npy` stream."""
    return zlib.crc32(data, zlib.crc32(member.header))


def _align(offset: int) -> int:
    return -(-offset // npy.MEMBER_ALIGNMENT) * npy.MEMBER_ALIGNMENT
