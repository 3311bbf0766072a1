"""Raw samples: one JSON object a line, from which every table, plot and report can be drawn again.

A sample is one timed operation of one method on one workload in one round, or the reason why there is
none. Nothing derived (throughput, fractions, medians) is stored; `stats` forms those.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal

import msgspec

Benchmark = Literal["peak", "methods", "scaling"]
Operation = Literal["save", "load", "h2d", "d2h", "memcpy"]
Cache = Literal["cold", "warm", "unknown"]


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One row of `samples.jsonl`.

    In the rows of `bench_peak.py` and of the peak probe that runs beside the methods, `method` is
    `peak` (the true peak: the best of a sweep, from ready host memory) or `peak-2022` (one stream of
    `np.save`, or `np.load` and `device_put`), and `parameters` names the point of the sweep.
    """

    benchmark: Benchmark
    method: str
    workload: str
    operation: Operation
    hosts: int = 1
    round: int = 0
    """0 is the warm-up round."""
    counted: bool = True
    seconds: float | None = None
    """From first start to last finish; None in a skipped row."""
    first_finish_seconds: float | None = None
    """With several hosts: from first start to the first host's finish."""
    payload_bytes: int = 0
    """Logical array bytes, once: not times replicas, no file overhead."""
    file_bytes: int | None = None
    files: int | None = None
    cache: Cache | None = None
    """State of the page cache before a load, proven; None for saves and for links."""
    durable: bool | None = None
    """Whether the timed region of a save ended with the data durable; None for loads."""
    peak_rss_extra_bytes: int | None = None
    """Peak resident memory during the operation less what was resident at its start."""
    cpu_seconds: float | None = None
    """CPU time of all threads of the process in the timed region, user and system."""
    verified: bool | None = None
    """Whether the result was compared bit for bit after the timer stopped."""
    stages: dict[str, float] = {}
    """Seconds by stage, where the method reports them; stages may overlap."""
    parameters: dict[str, str | int | float | bool | None] = {}
    """Point of a sweep, or what the method chose (for example threads, block_bytes, io)."""
    skipped: str | None = None
    """Why there is no figure, for example "needs 36 GB of memory; 22 GB are available"."""
    error: str | None = None
    """What went wrong: the operation raised, or its result was wrong."""


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Sample)


def append_samples(path: str | os.PathLike[str], samples: Iterable[Sample]) -> None:
    """Append `samples` to the file `path`, one line each; each line is written whole."""
    with open(path, "ab") as f:
        for sample in samples:
            f.write(_encoder.encode(sample) + b"\n")


def read_samples(path: str | os.PathLike[str]) -> Iterator[Sample]:
    """Yield the samples of `path`.

    A last line cut off by a crash is passed over; any other malformed line raises
    `msgspec.ValidationError` or `msgspec.DecodeError` with the line's number.
    """
    lines = Path(path).read_bytes().split(b"\n")
    complete, rest = lines[:-1], lines[-1]
    for number, line in enumerate(complete, 1):
        try:
            yield _decoder.decode(line)
        except msgspec.DecodeError as e:
            raise type(e)(f"{path}, line {number}: {e}") from e
    if rest:
        try:
            yield _decoder.decode(rest)
        except msgspec.DecodeError:
            return
