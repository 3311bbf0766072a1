"""What a leaf is: its kind, dtype and shape, and the value of a Python scalar as text.

Everything that can be refused is refused here, by name, before anything is written.
"""

from __future__ import annotations

from typing import Any, Literal

import jax
import msgspec
import numpy as np

from npyckpt.dtypes import dtype_fault, dtype_name
from npyckpt.errors import InvalidTreeError, UnsupportedLeafError
from npyckpt.names import KeyPath, display
from npyckpt.tree import PYTHON_SCALARS

LeafKind = Literal["array", "scalar", "key", "python"]


class LeafSpec(msgspec.Struct, frozen=True):
    """A leaf without its bytes.

    `kind` is `array` (NumPy or JAX), `scalar` (a NumPy scalar, which comes back as one), `key` (typed PRNG
    keys, whose array is their key data) or `python` (bool, int, float, complex or str, held as text).
    """

    kind: LeafKind
    dtype: str
    """Of the array; the name of the Python type for `python`."""
    shape: tuple[int, ...]
    """Of the array on disk; for `key` this includes the trailing dimensions of the key data."""
    impl: str | None = None
    """Name of the PRNG implementation of a `key`."""
    text: str | None = None
    """Value of a `python` leaf: `repr`, except for str, which is itself."""


def is_prng_key(value: Any) -> bool:
    """Whether `value` is an array (or a shape) of typed PRNG keys."""
    dtype = getattr(value, "dtype", None)
    return dtype is not None and jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key)


def leaf_spec(path: KeyPath, value: Any) -> LeafSpec:
    """What kind of leaf `value` is.

    Raises:
      UnsupportedLeafError: its type or dtype cannot be stored exactly.
      InvalidTreeError: it is a JAX array that has been deleted or donated.
    """
    if isinstance(value, PYTHON_SCALARS) and type(value) in PYTHON_SCALARS:
        return _python_spec(path, value)
    if isinstance(value, jax.Array):
        return _jax_spec(path, value)
    if isinstance(value, (np.ndarray, np.generic)):
        _check_dtype(path, value.dtype)
        if isinstance(value, np.ma.MaskedArray):
            raise _unsupported(path, "a masked array would lose its mask; save data and mask apart")
        kind: LeafKind = "array" if isinstance(value, np.ndarray) else "scalar"
        return LeafSpec(kind, dtype_name(value.dtype), value.shape)
    raise _unsupported(
        path,
        f"{type(value).__module__}.{type(value).__qualname__} is neither an array, a Python scalar, a str nor "
        "a container known to JAX (jax.tree_util.register_pytree_node)",
    )


def _python_spec(path: KeyPath, value: Any) -> LeafSpec:
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as e:
            raise _unsupported(path, f"the str is not valid Unicode ({e.reason})") from e
        return LeafSpec("python", "str", (), text=value)
    if isinstance(value, int) and value.bit_length() > 13_000:
        raise _unsupported(path, "the int has more than 13,000 bits")  # Python refuses to print 4,300 digits
    return LeafSpec("python", type(value).__name__, (), text=repr(value))


def _jax_spec(path: KeyPath, value: jax.Array) -> LeafSpec:
    if isinstance(value, jax.core.Tracer):
        raise _unsupported(path, "a traced array has no bytes; save outside jit")
    if value.is_deleted():
        raise InvalidTreeError(
            f"leaf {display(path)!r} has been deleted or donated (for example to a jitted function with "
            "donate_argnums), so its bytes are gone. Nothing was written."
        )
    if is_prng_key(value):
        impl = str(jax.random.key_impl(value))
        known = {"threefry2x32", "rbg", "unsafe_rbg"}
        if impl not in known:
            raise _unsupported(path, f"PRNG implementation {impl!r} is not one of {sorted(known)}")
        data = jax.eval_shape(jax.random.key_data, value)
        return LeafSpec("key", dtype_name(np.dtype(data.dtype)), data.shape, impl=impl)
    _check_dtype(path, np.dtype(value.dtype))
    return LeafSpec("array", dtype_name(np.dtype(value.dtype)), value.shape)


def _check_dtype(path: KeyPath, dtype: np.dtype[Any]) -> None:
    fault = dtype_fault(dtype)
    if fault is not None:
        raise _unsupported(path, fault)


def _unsupported(path: KeyPath, why: str) -> UnsupportedLeafError:
    return UnsupportedLeafError(f"leaf {display(path)!r}: {why}. Nothing was written.")


def python_value(dtype: str, text: str) -> bool | int | float | complex | str:
    """The value of a `python` leaf.

    Raises:
      ValueError: `dtype` is none of ours, or `text` is not a value of it.
    """
    if dtype == "str":
        return text
    if dtype == "bool":
        if text not in ("True", "False"):
            raise ValueError(f"{text!r} is not a bool")
        return text == "True"
    makers: dict[str, type[int] | type[float] | type[complex]] = {"int": int, "float": float, "complex": complex}
    if dtype not in makers:
        raise ValueError(f"unknown Python type {dtype!r}")
    return makers[dtype](text)
