"""Where the bytes of a region come from: host memory as it is, or a device, block by block."""

from __future__ import annotations

import functools
from typing import Any, Protocol

import jax
import numpy as np

from npyckpt.files.memory import Bytes
from npyckpt.regions import flat_boxes

Array = np.ndarray[Any, np.dtype[Any]]


class Source(Protocol):
    """The bytes of one region, in C order."""

    @property
    def memory(self) -> Bytes | None:
        """The region's own memory where it is C-contiguous host memory: nothing needs to be copied."""

    def copy_out(self, first: int, last: int, out: Bytes) -> None:
        """Copy the elements `first <= i < last` of the flattened region into `out`."""

    @property
    def on_host(self) -> bool:
        """Whether a copy is a memory copy and not a device transfer."""


class HostSource:
    """A NumPy array of any strides."""

    on_host = True

    def __init__(self, array: Array) -> None:
        self._array = array

    @property
    def memory(self) -> Bytes | None:
        if not self._array.flags.c_contiguous:
            return None
        return self._array.reshape(-1).view(np.uint8)

    def copy_out(self, first: int, last: int, out: Bytes) -> None:
        array = self._array
        typed = out.view(array.dtype)
        for box, at in flat_boxes(array.shape, first, last):
            view = array[box.slices()]
            np.copyto(typed[at - first : at - first + view.size].reshape(view.shape), view)


class DeviceSource:
    """A JAX array that lives on one accelerator; its bytes cross the link one block at a time."""

    on_host = False
    memory = None

    def __init__(self, array: jax.Array, dtype: np.dtype[Any]) -> None:
        self._array = array
        self._dtype = dtype

    def copy_out(self, first: int, last: int, out: Bytes) -> None:
        block = _device_block(self._array, first, last - first)
        out[: (last - first) * self._dtype.itemsize] = np.asarray(block).view(np.uint8).reshape(-1)


@functools.partial(jax.jit, static_argnums=2)
def _device_block(array: jax.Array, first: int, size: int) -> jax.Array:
    """`size` elements of the flattened array; compiled once for a shape and a size."""
    return jax.lax.dynamic_slice(array.reshape(-1), (first,), (size,))
