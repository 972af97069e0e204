"""Wall time by named phase, without host synchronisation while the phases run."""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class PhaseTimer:
    """Sums the time spent in named phases: CUDA events on a GPU, the clock elsewhere."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._seconds: dict[str, float] = defaultdict(float)
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []
        self._device = device
        self._synchronize()
        self._start = time.perf_counter()

    def _synchronize(self) -> None:
        if self._cuda:
            torch.cuda.synchronize(self._device)

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Count the enclosed work under ``phase``."""
        if self._cuda:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            yield
            end.record()
            self._events.append((phase, begin, end))
        else:
            begin_time = time.perf_counter()
            yield
            self._seconds[phase] += time.perf_counter() - begin_time

    def totals(self) -> dict[str, float]:
        """Seconds per phase, plus ``rest`` and ``total``; waits for the device once."""
        self._synchronize()
        total = time.perf_counter() - self._start
        seconds = defaultdict(float, self._seconds)
        for phase, begin, end in self._events:
            seconds[phase] += begin.elapsed_time(end) / 1000
        return dict(seconds) | {"rest": total - sum(seconds.values()), "total": total}
