"""What each host writes: a pure function of the leaves and of who holds which region.

Each distinct region is written once. A region that several hosts hold (a replica) is written by one of
them, or cut among them when it is large, so that bytes are balanced over hosts. Nothing here touches disk,
clock or environment; equal inputs give an equal plan, and so equal file names.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from npyckpt import npy, pack
from npyckpt.errors import InvalidTreeError
from npyckpt.names import KeyPath, display, leaf_name, pack_name
from npyckpt.regions import Region, split, tiling_fault, whole

MIN_PACKED = 8
"""Fewer small pieces than this gain nothing from a pack and stay plain `.npy` files."""
MIN_SPLIT_BYTES = 4 << 20
"""Replicas are cut among their hosts in pieces of at least this size."""

Host = int


@dataclass(frozen=True, slots=True)
class Placement:
    """A leaf with an array, and which hosts hold each of its distinct regions."""

    leaf: int
    """Position among the leaves."""
    path: KeyPath
    dtype: np.dtype[Any]
    """As stored in the `.npy` file."""
    shape: tuple[int, ...]
    holders: Mapping[Region, tuple[Host, ...]]


@dataclass(frozen=True, slots=True)
class Extent:
    """One piece of a leaf and its place in a file."""

    leaf: int
    region: Region
    offset: int
    """Of the array's first byte in the file."""
    nbytes: int
    member: str | None = None
    """Name within a pack."""


@dataclass(frozen=True, slots=True)
class FilePlan:
    """A file to write: a `.npy` with one extent, or a pack with many."""

    name: str
    nbytes: int
    dtypes: tuple[np.dtype[Any], ...]
    """Of each extent."""
    extents: tuple[Extent, ...]

    @property
    def is_pack(self) -> bool:
        return self.extents[0].member is not None


@dataclass(frozen=True, slots=True)
class SavePlan:
    """What each host writes. Every region of every leaf is in exactly one file of one host."""

    files: Mapping[Host, tuple[FilePlan, ...]]

    def nbytes(self, host: Host) -> int:
        """Bytes that `host` writes."""
        return sum(f.nbytes for f in self.files.get(host, ()))

    def all_files(self) -> Iterable[FilePlan]:
        """All files, by host."""
        for host in sorted(self.files):
            yield from self.files[host]


@dataclass(frozen=True, slots=True)
class _Piece:
    leaf: int
    name: str
    dtype: np.dtype[Any]
    region: Region
    nbytes: int


def plan_save(
    placements: Sequence[Placement],
    *,
    pack_threshold_bytes: int,
    pack_bytes: int,
    taken_packs: frozenset[str] = frozenset(),
) -> SavePlan:
    """Plan one save.

    `taken_packs` are names of packs that must stay as they are, because leaves that this save does not
    replace live in them.

    Raises:
      InvalidTreeError: the regions of a leaf do not tile it, or two names would collide.
    """
    pieces = _assign(placements)
    _check_names(piece.name for host in pieces.values() for piece in host)
    files: dict[Host, tuple[FilePlan, ...]] = {}
    number = 0
    for host in sorted(pieces):
        small = [p for p in pieces[host] if p.nbytes <= pack_threshold_bytes]
        packed = set(map(id, small)) if len(small) >= MIN_PACKED else set()
        plans = [_npy_file(p) for p in pieces[host] if id(p) not in packed]
        for group in _groups(small if packed else (), pack_bytes):
            while pack_name(number) in taken_packs:
                number += 1
            plans.append(_pack_file(pack_name(number), group))
            number += 1
        files[host] = tuple(plans)
    return SavePlan(files)


def _assign(placements: Sequence[Placement]) -> dict[Host, list[_Piece]]:
    """Give each region to one of its holders, cutting large replicas, least loaded host first."""
    load: dict[Host, int] = defaultdict(int)
    owned: list[tuple[int, Host, _Piece]] = []
    shared: list[tuple[int, Placement, Region, tuple[Host, ...]]] = []
    for order, placement in enumerate(placements):
        fault = tiling_fault(tuple(placement.holders), placement.shape)
        if fault is not None:
            raise InvalidTreeError(f"leaf {display(placement.path)!r}: {fault}. Nothing was written.")
        for region, hosts in placement.holders.items():
            if len(hosts) == 1:
                piece = _piece(placement, region)
                load[hosts[0]] += piece.nbytes
                owned.append((order, hosts[0], piece))
            else:
                shared.append((order, placement, region, tuple(sorted(hosts))))
    shared.sort(key=lambda s: -s[2].size * s[1].dtype.itemsize)
    queues: dict[tuple[Host, ...], list[tuple[int, Host]]] = {}
    for order, placement, region, hosts in shared:
        if hosts not in queues:
            queues[hosts] = sorted((load[h], h) for h in hosts)  # a sorted list is a heap
        queue = queues[hosts]
        nbytes = region.size * placement.dtype.itemsize
        for cut in split(region, min(len(hosts), nbytes // MIN_SPLIT_BYTES)):
            piece = _piece(placement, cut)
            host = _least_loaded(queue, load)
            load[host] += piece.nbytes
            heapq.heappush(queue, (load[host], host))
            owned.append((order, host, piece))
    pieces: dict[Host, list[_Piece]] = defaultdict(list)
    for _, host, piece in sorted(owned, key=lambda o: (o[0], o[2].region)):
        pieces[host].append(piece)
    return pieces


def _least_loaded(queue: list[tuple[int, Host]], load: Mapping[Host, int]) -> Host:
    """Take the least loaded host from a heap whose entries may be out of date (loads only grow)."""
    while True:
        seen, host = heapq.heappop(queue)
        if seen == load[host]:
            return host
        heapq.heappush(queue, (load[host], host))


def _piece(placement: Placement, region: Region) -> _Piece:
    part = None if region == whole(placement.shape) else region
    return _Piece(
        placement.leaf,
        leaf_name(placement.path, part),
        placement.dtype,
        region,
        region.size * placement.dtype.itemsize,
    )


def _npy_file(piece: _Piece) -> FilePlan:
    extent = Extent(piece.leaf, piece.region, npy.DATA_OFFSET, piece.nbytes)
    return FilePlan(piece.name + ".npy", npy.DATA_OFFSET + piece.nbytes, (piece.dtype,), (extent,))


def _pack_file(name: str, group: Sequence[_Piece]) -> FilePlan:
    plan = pack.layout([(p.name, p.dtype, p.region.shape) for p in group])
    extents = tuple(
        Extent(p.leaf, p.region, m.data_offset, p.nbytes, m.name)
        for p, m in zip(group, plan.members, strict=True)
    )
    return FilePlan(name, plan.nbytes, tuple(p.dtype for p in group), extents)


def _groups(small: Sequence[_Piece], pack_bytes: int) -> Iterable[list[_Piece]]:
    """Cut a host's small pieces into packs, in order."""
    group: list[_Piece] = []
    filled = 0
    for piece in small:
        if group and (filled + piece.nbytes > pack_bytes or len(group) == pack.MAX_MEMBERS):
            yield group
            group, filled = [], 0
        group.append(piece)
        filled += piece.nbytes
    if group:
        yield group


def _check_names(names: Iterable[str]) -> None:
    """The encoding is injective by construction; a collision of two digests is refused all the same."""
    seen: set[str] = set()
    for name in names:
        folded = name.casefold()
        if folded in seen:
            raise InvalidTreeError(f"two leaves would share the file name {name!r}. Nothing was written.")
        seen.add(folded)
