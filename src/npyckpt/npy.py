"""The `.npy` format, version 1.0 and 2.0: headers we write, headers we accept.

The specification is `numpy.lib.format`. Our headers are padded with spaces, which the format allows and
`np.load` accepts (up to 10,000 bytes), so that the data starts at `DATA_OFFSET`.
"""

from __future__ import annotations

import ast
import struct
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

MAGIC = b"\x93NUMPY"
DATA_OFFSET = 4160
"""Where the data of a `.npy` file starts: 64 modulo 4096.

XLA places large buffers of the CPU backend at an address that is 64 modulo 4096. With this offset the
address of each byte and its place in the file agree modulo 4096, so all but the head and the tail of an
array go to the disk by direct I/O from the array's own memory; and an array read into page-aligned memory
lies at a multiple of 64 bytes, which is what lets `jax.device_put` alias it.
"""
MEMBER_ALIGNMENT = 64
MAX_HEADER_BYTES = 10_000
"""What `np.load` accepts by default (`max_header_size`)."""


class Header(NamedTuple):
    """What a `.npy` header says."""

    dtype: np.dtype[np.generic]
    shape: tuple[int, ...]
    fortran_order: bool
    data_offset: int


def header(dtype: np.dtype[np.generic], shape: Sequence[int], *, length: int | None = None) -> bytes:
    """The header of a C-ordered array, `length` bytes long (default: the next multiple of 64)."""
    body = f"{{'descr': {np.lib.format.dtype_to_descr(dtype)!r}, 'fortran_order': False, 'shape': {tuple(shape)!r}, }}"
    needed = len(MAGIC) + 2 + 2 + len(body) + 1
    total = length if length is not None else -(-needed // MEMBER_ALIGNMENT) * MEMBER_ALIGNMENT
    if needed > total:
        raise ValueError(f"a header of {needed} bytes does not fit in {total}")
    padded = body.ljust(total - (needed - len(body))) + "\n"
    return MAGIC + b"\x01\x00" + struct.pack("<H", len(padded)) + padded.encode("latin1")


def parse_header(head: bytes) -> Header:
    """Read the header at the start of `head`.

    Raises:
      ValueError: this is no `.npy` header, it is cut off or overlong, or it describes objects or records.
    """
    if head[: len(MAGIC)] != MAGIC:
        raise ValueError("it does not start with the .npy magic bytes")
    version = head[6:8]
    if version == b"\x01\x00":
        field, layout = 2, "<H"
    elif version in (b"\x02\x00", b"\x03\x00"):
        field, layout = 4, "<I"
    else:
        raise ValueError(f"unknown .npy version {tuple(version)}")
    if len(head) < 8 + field:
        raise ValueError("the .npy header is cut off")
    (length,) = struct.unpack_from(layout, head, 8)
    offset = 8 + field + length
    if offset > MAX_HEADER_BYTES or offset > len(head):
        raise ValueError(f"the .npy header ends at byte {offset} of {len(head)}")
    try:
        fields = ast.literal_eval(head[8 + field : offset].decode("utf-8").strip())
        descr, fortran_order, shape = fields["descr"], fields["fortran_order"], fields["shape"]
    except (ValueError, SyntaxError, KeyError, TypeError, MemoryError, RecursionError) as e:
        raise ValueError("the .npy header is not a dict with descr, fortran_order and shape") from e
    if not isinstance(descr, str):
        raise ValueError(f"record dtypes are not read (descr {descr!r})")
    try:
        dtype = np.dtype(descr)
    except TypeError as e:
        raise ValueError(f"{descr!r} is not a dtype") from e
    if dtype.hasobject:
        raise ValueError("arrays of Python objects are never read (they would need pickle)")
    if not (isinstance(shape, tuple) and all(type(n) is int and n >= 0 for n in shape)):
        raise ValueError(f"{shape!r} is not a shape")
    if not isinstance(fortran_order, bool):
        raise ValueError(f"fortran_order is {fortran_order!r}")
    return Header(dtype, shape, fortran_order, offset)
