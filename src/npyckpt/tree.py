"""Pytrees as JSON-able nodes and a list of leaves, and back.

`flatten` keeps what `jax.tree.flatten` loses: `None`, empty containers, the kinds of containers, the types
of dict keys, and Python scalars. It never stores code: a NamedTuple, a dataclass or a custom node is
stored as its kind, the name of its type (for the reader only) and its fields; rebuilding it needs a
target, and without one it comes back as a plain dict of its fields.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import jax
import msgspec
import numpy as np
from jax.tree_util import DictKey, FlattenedIndexKey, GetAttrKey, SequenceKey

from npyckpt.errors import InvalidTreeError, UnsupportedLeafError
from npyckpt.names import Index, KeyPath, Scalar, display

MAX_DEPTH = 200
"""Deepest nesting. It bounds recursion, here and in readers of the manifest."""

Kind = Literal["leaf", "none", "dict", "list", "tuple", "namedtuple", "dataclass", "custom"]
INDEXED: frozenset[str] = frozenset({"list", "tuple"})
PYTHON_SCALARS = (bool, int, float, complex, str)


class Node(msgspec.Struct, frozen=True, omit_defaults=True):
    """One node of a tree. A `leaf` node holds the leaf's position in the list of leaves."""

    kind: Kind
    type: str | None = None
    """Module and name of the type, for the reader; never imported."""
    keys: tuple[str | int | float | bool | None, ...] | None = None
    """Dict keys, or names of fields; None for lists and tuples, whose keys are positions."""
    children: tuple[Node, ...] = ()
    leaf: int | None = None

    def items(self) -> Iterator[tuple[Scalar, Node]]:
        """Keys and children, in the order in which they are stored."""
        keys = self.keys if self.keys is not None else map(Index, range(len(self.children)))
        return zip(keys, self.children, strict=True)

    def leaves(self) -> Iterator[int]:
        """Positions of all leaves below this node."""
        for _, node in walk(self):
            if node.leaf is not None:
                yield node.leaf


NONE = Node("none")


@dataclasses.dataclass(frozen=True, slots=True)
class Leaf:
    """A value of the tree that is not a container, and where it stands."""

    path: KeyPath
    value: Any


def walk(node: Node, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Node]]:
    """All nodes in depth-first order, with their key paths."""
    stack = [(path, node)]
    while stack:
        here, current = stack.pop()
        yield here, current
        if current.children:
            stack.extend(reversed([((*here, key), child) for key, child in current.items()]))


def key_identity(key: Scalar) -> tuple[str, Scalar]:
    """Tells keys apart that compare equal: `1`, `1.0` and `True`."""
    return ("index" if isinstance(key, Index) else type(key).__name__, key)


def child_map(node: Node) -> dict[tuple[str, Scalar], Node]:
    """Children by the identity of their keys."""
    return {key_identity(key): child for key, child in node.items()}


# ---------------------------------------------------------------------------------------------------------
# One level of a tree: what `flatten` and `rebuild` share.


@dataclasses.dataclass(frozen=True, slots=True)
class Level:
    """A container opened by one level."""

    kind: Kind
    keys: Sequence[Scalar]
    children: Sequence[Any]
    rebuild: Callable[[Sequence[Any]], Any]
    """Makes a container of the same type from new children."""


def open_level(value: Any, path: KeyPath) -> Level | None:
    """Open one level of a container; None if `value` is a leaf or None.

    Raises:
      UnsupportedLeafError: a dict key is of a type that JSON does not have.
      InvalidTreeError: two children have the same key.
    """
    kind = type(value)
    if value is None or isinstance(value, (np.ndarray, np.generic, jax.Array, *PYTHON_SCALARS)):
        return None
    if kind is dict:
        keys = _sorted_keys(value, path)
        return Level("dict", keys, [value[k] for k in keys], lambda c: dict(zip(keys, c, strict=True)))
    if kind is list or kind is tuple:
        return Level("list" if kind is list else "tuple", _positions(value), value, kind)
    if isinstance(value, tuple) and hasattr(kind, "_fields"):
        return Level("namedtuple", kind._fields, tuple(value), lambda c: kind(*c))
    return _open_registered(value, path) or _open_dataclass(value, path) or _open_mapping(value, path)


def _positions(children: Sequence[Any]) -> list[Scalar]:
    return [Index(i) for i in range(len(children))]


def _sorted_keys(value: Mapping[Any, Any], path: KeyPath) -> list[Any]:
    for key in value:
        if type(key) not in (str, int, float, bool, type(None)):
            raise UnsupportedLeafError(
                f"dict key {key!r} of type {type(key).__name__} at {_at(path)}: keys must be str, int, float, "
                "bool or None. Nothing was written."
            )
        if (type(key) is float and not math.isfinite(key)) or (type(key) is int and key.bit_length() > 63):
            raise UnsupportedLeafError(f"dict key {key!r} at {_at(path)} cannot be stored. Nothing was written.")
    return sorted(value, key=lambda k: (type(k).__name__, 0 if k is None else k))


def _open_registered(value: Any, path: KeyPath) -> Level | None:
    """A node of a type that is registered with JAX, opened by one level."""
    pairs, treedef = jax.tree_util.tree_flatten_with_path(value, is_leaf=lambda x: x is not value)
    if len(pairs) == 1 and pairs[0][1] is value:
        return None
    keys = [_registered_key(p[0]) for p, _ in pairs]
    if keys and all(isinstance(k, Index) for k in keys):
        names: Sequence[Scalar] = [str(k) for k in keys]
    else:
        names = keys
    if len({key_identity(k) for k in names}) != len(names):
        raise InvalidTreeError(
            f"{type(value).__name__} at {_at(path)} gives two of its children the same key: {names}. "
            "Nothing was written."
        )
    kind: Kind = "dict" if isinstance(value, Mapping) else "custom"
    return Level(kind, names, [child for _, child in pairs], treedef.unflatten)


def _registered_key(entry: Any) -> Scalar:
    if isinstance(entry, GetAttrKey):
        return entry.name
    if isinstance(entry, (SequenceKey, FlattenedIndexKey)):
        return Index(entry.idx if isinstance(entry, SequenceKey) else entry.key)
    key = entry.key if isinstance(entry, DictKey) else entry
    return key if type(key) in (str, int, float, bool) else str(key)


def _open_dataclass(value: Any, path: KeyPath) -> Level | None:
    """A dataclass that is not registered with JAX: all its fields are children."""
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return None
    fields = dataclasses.fields(value)
    for field in fields:
        if not field.init:
            raise UnsupportedLeafError(
                f"field {field.name!r} of {type(value).__name__} at {_at(path)} has init=False, so it could not "
                "be restored. Register the type with jax.tree_util.register_dataclass. Nothing was written."
            )
    names = [f.name for f in fields]
    return Level(
        "dataclass",
        names,
        [getattr(value, n) for n in names],
        lambda c: type(value)(**dict(zip(names, c, strict=True))),
    )


def _open_mapping(value: Any, path: KeyPath) -> Level | None:
    """A subclass of dict, which JAX takes for a leaf unless it is registered."""
    if not isinstance(value, dict):
        return None
    keys = _sorted_keys(value, path)
    kind = type(value)
    return Level("dict", keys, [value[k] for k in keys], lambda c: kind(zip(keys, c, strict=True)))


# ---------------------------------------------------------------------------------------------------------


def flatten(tree: Any) -> tuple[Node, list[Leaf]]:
    """The node and the leaves of `tree`, in an order that depends on nothing but its keys.

    Raises:
      UnsupportedLeafError: a dict key cannot be stored.
      InvalidTreeError: the tree is nested deeper than `MAX_DEPTH`, or contains itself.
    """
    leaves: list[Leaf] = []
    return _flatten(tree, (), leaves), leaves


def _flatten(value: Any, path: KeyPath, leaves: list[Leaf]) -> Node:
    if value is None:
        return NONE
    if len(path) > MAX_DEPTH:
        raise InvalidTreeError(
            f"the tree is nested deeper than {MAX_DEPTH} levels, or contains itself, at {_at(path[:4])}... "
            "Nothing was written."
        )
    level = open_level(value, path)
    if level is None:
        leaves.append(Leaf(path, value))
        return Node("leaf", leaf=len(leaves) - 1)
    children = tuple(
        _flatten(child, (*path, key), leaves) for key, child in zip(level.keys, level.children, strict=True)
    )
    named = level.kind in ("namedtuple", "dataclass", "custom") or type(value) not in (dict, list, tuple)
    return Node(
        level.kind,
        type=f"{type(value).__module__}.{type(value).__qualname__}" if named else None,
        keys=None if level.kind in INDEXED else tuple(level.keys),  # type: ignore[arg-type]
        children=children,
    )


def rebuild_like(tree: Any, leaf_of: Callable[[KeyPath, Any], Any], path: KeyPath = ()) -> Any:
    """A tree like `tree` in which each leaf is `leaf_of(path, leaf)`; `None` stays."""
    level = open_level(tree, path)
    if level is None:
        return None if tree is None else leaf_of(path, tree)
    children = [
        rebuild_like(child, leaf_of, (*path, key))
        for key, child in zip(level.keys, level.children, strict=True)
    ]
    return level.rebuild(children)


def build_plain(node: Node, values: Mapping[int, Any]) -> Any:
    """Plain containers: dict, list and tuple as they were; NamedTuples, dataclasses and custom nodes as a
    dict of their fields. A subtree none of whose leaves is in `values` is left out of a dict, and is None
    in a list or tuple (a place there cannot be left out)."""
    found = _build_plain(node, values)
    return None if found is _ABSENT else found


_ABSENT: Any = object()


def _build_plain(node: Node, values: Mapping[int, Any]) -> Any:
    if node.kind == "none":
        return None
    if node.leaf is not None:
        return values.get(node.leaf, _ABSENT)
    children = [_build_plain(child, values) for child in node.children]
    if node.children and all(c is _ABSENT for c in children):
        return _ABSENT
    if node.kind in INDEXED:
        filled = [None if c is _ABSENT else c for c in children]
        return filled if node.kind == "list" else tuple(filled)
    keys = node.keys or ()
    return {k: c for k, c in zip(keys, children, strict=True) if c is not _ABSENT}


def _at(path: KeyPath) -> str:
    return repr(display(path)) if path else "the root of the tree"
