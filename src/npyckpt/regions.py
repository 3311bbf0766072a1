"""Index regions: half-open boxes of a global array, and the arithmetic that saving and resharding need.

A region is a pair (start, stop) per dimension, in elements of the global array. A 0-d array has the one
region of no dimensions.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple


class Region(NamedTuple):
    """`start[d] <= i < stop[d]` in each dimension `d`."""

    start: tuple[int, ...]
    stop: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(b - a for a, b in zip(self.start, self.stop, strict=True))

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def slices(self, origin: Sequence[int] | None = None) -> tuple[slice, ...]:
        """Index of this region in an array whose first element is at `origin` (default: the global one)."""
        base = origin if origin is not None else (0,) * len(self.start)
        return tuple(slice(a - o, b - o) for a, b, o in zip(self.start, self.stop, base, strict=True))

    def __str__(self) -> str:
        return "[" + ", ".join(f"{a}:{b}" for a, b in zip(self.start, self.stop, strict=True)) + "]"


def whole(shape: Sequence[int]) -> Region:
    """The region that is all of an array of this shape."""
    return Region((0,) * len(shape), tuple(shape))


def from_index(index: Sequence[slice], shape: Sequence[int]) -> Region:
    """The region of a `jax.Shard.index`: slices of step 1, open ends meaning the whole dimension."""
    bounds = [s.indices(n) for s, n in zip(index, shape, strict=True)]
    return Region(tuple(b[0] for b in bounds), tuple(max(b[0], b[1]) for b in bounds))


def intersect(a: Region, b: Region) -> Region | None:
    """The elements in both, or None where there are none."""
    start = tuple(map(max, a.start, b.start))
    stop = tuple(map(min, a.stop, b.stop))
    if any(lo >= hi for lo, hi in zip(start, stop, strict=True)):
        return None
    return Region(start, stop)


def tiling_fault(regions: Sequence[Region], shape: Sequence[int]) -> str | None:
    """Why `regions` do not tile an array of `shape`, or None as the proof that they do.

    They tile it when each lies inside, no two overlap, and their sizes add up to the array's. Grids, which
    is what shardings make, are checked in linear time; anything else pairwise within a sweep over the
    first dimension that is cut.
    """
    box = whole(shape)
    for r in regions:
        if len(r.start) != len(shape) or len(r.stop) != len(shape):
            return f"region {r} does not have the array's {len(shape)} dimensions"
        if any(not 0 <= a <= b <= n for a, b, n in zip(r.start, r.stop, shape, strict=True)):
            return f"region {r} is not inside {box}"
    covered = sum(r.size for r in regions)
    if covered != box.size:
        return f"the regions cover {covered} elements of {box.size}"
    if box.size == 0:
        return None if len(regions) == 1 and regions[0] == box else "an empty array has exactly one region"
    overlap = next(overlaps(regions), None)
    return None if overlap is None else f"regions {overlap[0]} and {overlap[1]} overlap"


def overlaps(regions: Sequence[Region]) -> Iterator[tuple[Region, Region]]:
    """Pairs of regions that share an element."""
    if len(regions) < 2:
        return
    if len(set(regions)) == len(regions) and _is_grid(regions):
        return
    dims = range(len(regions[0].start))
    axis = max(dims, key=lambda d: len({r.start[d] for r in regions}), default=None)
    if axis is None:  # 0-d: all regions are the same element
        yield regions[0], regions[1]
        return
    live: list[Region] = []
    for r in sorted(regions, key=lambda r: r.start[axis]):
        live = [q for q in live if q.stop[axis] > r.start[axis]]
        for q in live:
            if intersect(q, r) is not None:
                yield q, r
        live.append(r)


def _is_grid(regions: Sequence[Region]) -> bool:
    """Whether the distinct `regions` are cells of a grid: in each dimension the intervals are disjoint."""
    for intervals in zip(*(zip(r.start, r.stop, strict=True) for r in regions), strict=True):
        ordered = sorted(set(intervals))
        if any(a[1] > b[0] for a, b in zip(ordered, ordered[1:], strict=False)):
            return False
    return bool(regions[0].start)


def split(region: Region, pieces: int) -> list[Region]:
    """Cut into at most `pieces` nearly equal parts along the first dimension that allows the most.

    The first dimension is preferred because its parts are contiguous in a C-ordered array.
    """
    shape = region.shape
    if pieces <= 1 or not shape or region.size == 0:
        return [region]
    axis = next((d for d, n in enumerate(shape) if n >= pieces), None)
    if axis is None:
        axis = max(range(len(shape)), key=lambda d: shape[d])
    n = min(pieces, shape[axis])
    cuts = [region.start[axis] + shape[axis] * i // n for i in range(n + 1)]
    return [
        Region(
            (*region.start[:axis], a, *region.start[axis + 1 :]),
            (*region.stop[:axis], b, *region.stop[axis + 1 :]),
        )
        for a, b in zip(cuts, cuts[1:], strict=False)
    ]


def flat_boxes(shape: Sequence[int], first: int, last: int) -> Iterator[tuple[Region, int]]:
    """Boxes that hold the elements `first <= i < last` of the C-ordered flattening of `shape`.

    Yields (box, flat index of its first element) in order; each box is contiguous in the flattening. There
    are at most 2 * ndim - 1 of them. This is how a block of a file, which knows nothing of rows, is copied
    to or from a strided array with few large copies.
    """
    if first >= last:
        return
    yield from _flat_boxes(tuple(shape), first, last, (), 0)


def _flat_boxes(
    shape: tuple[int, ...], first: int, last: int, prefix: tuple[int, ...], base: int
) -> Iterator[tuple[Region, int]]:
    if not shape:
        yield Region(prefix, tuple(i + 1 for i in prefix)), base
        return
    rest = shape[1:]
    row = math.prod(rest)

    def rows(lo: int, hi: int) -> tuple[Region, int]:
        region = Region((*prefix, lo, *(0 for _ in rest)), (*(i + 1 for i in prefix), hi, *rest))
        return region, base + lo * row

    lo, lo_rest = divmod(first, row)
    hi, hi_rest = divmod(last, row)
    if lo_rest:
        end = min(last - lo * row, row)
        yield from _flat_boxes(rest, lo_rest, end, (*prefix, lo), base + lo * row)
        if lo == hi:
            return
        lo += 1
    if lo < hi:
        yield rows(lo, hi)
    if hi_rest and hi >= lo:
        yield from _flat_boxes(rest, 0, hi_rest, (*prefix, hi), base + hi * row)


def flat_runs(shape: Sequence[int], box: Region) -> tuple[int, int, Iterable[int]]:
    """The contiguous runs of `box` in the C-ordered flattening of `shape`.

    Returns (length of a run, number of runs, flat index of each run's start in order), in elements.
    """
    n = len(shape)
    inner = n  # dimensions inner.. are whole in the box, so a run spans them
    while inner > 0 and box.start[inner - 1] == 0 and box.stop[inner - 1] == shape[inner - 1]:
        inner -= 1
    axis = max(inner - 1, 0)
    if n == 0:
        return 1, 1, (0,)
    strides = [math.prod(shape[d + 1 :]) for d in range(n)]
    length = (box.stop[axis] - box.start[axis]) * strides[axis]
    outer = box.shape[:axis]
    start = sum(a * s for a, s in zip(box.start, strides, strict=True))

    def starts() -> Iterator[int]:
        index = [0] * axis
        offset = start
        for _ in range(math.prod(outer)):
            yield offset
            for d in reversed(range(axis)):
                index[d] += 1
                offset += strides[d]
                if index[d] < outer[d]:
                    break
                offset -= index[d] * strides[d]
                index[d] = 0

    return length, math.prod(outer), starts()
