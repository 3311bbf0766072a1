"""Dtypes on disk: what `.npy` can name is stored as it is, everything else as its bits.

bfloat16, the float8, float6 and float4 families, and the sub-byte integers are NumPy extension types
(`ml_dtypes`) whose `.npy` descr would be a void type that says nothing. They are stored as unsigned
integers of the same width, and the manifest carries the true name.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

_UINT = {1: np.dtype("<u1"), 2: np.dtype("<u2"), 4: np.dtype("<u4"), 8: np.dtype("<u8")}


def _extension_types() -> dict[str, np.dtype[Any]]:
    found = {}
    for name in dir(ml_dtypes):
        scalar = getattr(ml_dtypes, name)
        if isinstance(scalar, type) and issubclass(scalar, np.generic):
            found[name] = np.dtype(scalar)
    return found


EXTENSIONS = _extension_types()
"""The extension dtypes by name, for example `bfloat16`, `float8_e4m3fn`, `int4`."""


def dtype_fault(dtype: np.dtype[Any]) -> str | None:
    """Why arrays of this dtype cannot be saved, or None."""
    if dtype.name in EXTENSIONS:
        return None
    if dtype.hasobject:
        return "arrays of Python objects would need pickle, which is never used; save a list instead"
    if dtype.names is not None or dtype.subdtype is not None:
        return f"structured dtype {dtype} is not supported; save each field as an array of its own"
    if dtype.kind not in "biufcmM":
        return f"dtype {dtype} is not supported; save strings as Python str in a list"
    return None


def dtype_name(dtype: np.dtype[Any]) -> str:
    """The name in the manifest: `bfloat16`, `float32`; with its byte order where that is big-endian
    (`>f4`), with its unit where it has one (`<M8[ns]`)."""
    if dtype.name in EXTENSIONS:
        return dtype.name
    if dtype.kind in "mM" or dtype.str.startswith(">"):
        return dtype.str
    return dtype.name


def dtype_from_name(name: str) -> np.dtype[Any]:
    """The inverse of `dtype_name`.

    Raises:
      ValueError: no dtype of ours has this name.
    """
    if name in EXTENSIONS:
        return EXTENSIONS[name]
    try:
        dtype = np.dtype(name)
    except (TypeError, ValueError, SyntaxError) as e:
        raise ValueError(f"unknown dtype {name!r}") from e
    if dtype_fault(dtype) is not None or dtype_name(dtype) != name:
        raise ValueError(f"unknown dtype {name!r}")
    return dtype


def stored_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """What the `.npy` file says: `dtype` itself, or the unsigned integer of its width."""
    return _UINT[dtype.itemsize] if dtype.name in EXTENSIONS else dtype
