"""Plain threads over a stream of work items: read, write, hash and copy all release the GIL."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager


def run_all(items: Iterable[Callable[[], None]], threads: int) -> None:
    """Run all items, in order of start, on up to `threads` threads; return when all have ended.

    The stream is advanced by one thread at a time, so it may be a generator. After the first failure (or
    Ctrl-C) no further item starts; the items in progress end, and that failure is raised.
    """
    stream = iter(items)
    lock = threading.Lock()
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            with lock:
                item = next(stream, None)
            if item is None:
                return
            try:
                item()
            except BaseException:
                stop.set()
                raise

    with ThreadPoolExecutor(max(threads, 1), "npyckpt-io") as pool:
        try:
            for done in as_completed([pool.submit(work) for _ in range(max(threads, 1))]):
                done.result()
        finally:
            stop.set()


class Stages:
    """Seconds spent in each stage of a save or restore, added up over threads."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._lock = threading.Lock()

    @contextmanager
    def time(self, stage: str) -> Iterator[None]:
        """Add the duration of the block to `stage`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add(stage, time.perf_counter() - start)

    def add(self, stage: str, seconds: float) -> None:
        """Add `seconds` to `stage`."""
        with self._lock:
            self._seconds[stage] = self._seconds.get(stage, 0.0) + seconds

    def per_thread(self, threads: int) -> dict[str, float]:
        """Seconds by stage divided by the number of threads: the stages' share of the wall time."""
        return {stage: seconds / threads for stage, seconds in self._seconds.items()}
