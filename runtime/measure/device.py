"""The GPU side of `flashgen bench`: facts of the device, timers, host time of calls."""
from __future__ import annotations

import contextlib
import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from flashgen.errors import EnvironmentError_, UnsupportedError
from flashgen.runtime.compile.nvrtc import version_text
from flashgen.runtime.doctor import driver_version
from flashgen.runtime.measure.bench import DATA, Call, Refused, Run
from flashgen.runtime.select.lookup import archs_for

TIMING_MS = 5.0      # of one timing at least: far above what an event resolves
PACKAGES = ("flashgen", "torch", "triton", "cuda-bindings", "nvidia-cuda-nvrtc", "fa3-fwd", "flash-attn-3")


class CudaDevice:
    """The current CUDA device. EnvironmentError_ if there is none."""

    out_of_memory: type[Exception] = torch.cuda.OutOfMemoryError

    def __init__(self, timer: str = "graph", data: str = "normal") -> None:
        """`timer`: "graph" replays CUDA graphs, "events" times plain calls, host overhead included where it shows.
        `data`: one of bench.DATA."""
        if not torch.cuda.is_available():
            raise EnvironmentError_(
                "kernels are timed on a GPU, and torch sees no CUDA device", where="torch.cuda.is_available()",
                allowed="a CUDA device with its driver, and a torch built with CUDA",
                nearest="flashgen explain and flashgen tune --dry-run give the model's figures", next="flashgen doctor")
        if timer not in TIMERS:
            raise UnsupportedError(f"timer {timer}", where="--timer", allowed=", ".join(TIMERS))
        if data not in DATA:
            raise UnsupportedError(f"data {data}", where="--data", allowed=", ".join(DATA))
        self.timer, self.data, self.place = timer, data, "cuda"
        self.properties = torch.cuda.get_device_properties()
        self.l2_bytes, self.num_sms = self.properties.L2_cache_size, self.properties.multi_processor_count

    def facts(self) -> dict[str, Any]:
        versions: dict[str, Any] = {name: found for name in PACKAGES if (found := package_version(name)) is not None}
        versions |= {"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version(), "nvrtc": version_text()}
        return {"gpu": self.properties.name, "driver": driver_version(), "versions": versions}

    def archs(self) -> Sequence[str]:
        return archs_for(10 * self.properties.major + self.properties.minor)

    def timed(self, timer: str, calls: Sequence[Call]) -> Run:
        return TIMERS[timer](calls)

    def release(self) -> None:
        torch.cuda.empty_cache()

    def peak_bytes(self, call: Call) -> int:
        """The most memory that is allocated while the call runs, less what was before."""
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before


def package_version(package: str) -> str | None:
    """None if no such package is installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


# -- timers


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Without the garbage collector: a graph that it found would be destroyed, which ends a capture in progress."""
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def graph_timer(calls: Sequence[Call]) -> Run:
    """Replays of a CUDA graph that holds every call once: no host in between."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls[:2]:
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    try:
        with uncollected(), torch.cuda.graph(graph):
            for call in calls:
                call()
    except Exception as err:  # whatever a library raises where it waits for the device or allocates by itself
        raise Refused(f"cannot be captured in a CUDA graph: {err}", next="--timer events") from err
    return _long_enough(graph.replay, len(calls))


def event_timer(calls: Sequence[Call]) -> Run:
    """Plain calls, one after the other."""
    def run_all() -> None:
        for call in calls:
            call()
    return _long_enough(run_all, len(calls))


TIMERS: dict[str, Callable[[Sequence[Call]], Run]] = {"graph": graph_timer, "events": event_timer}


def _long_enough(work: Callable[[], object], calls: int) -> Run:
    """Times `work` as often in a row as fills TIMING_MS."""
    _elapsed_ms(work, 1)
    repeats = max(1, math.ceil(TIMING_MS / max(_elapsed_ms(work, 1), 1e-3)))
    return lambda: _elapsed_ms(work, repeats) / (repeats * calls)


def _elapsed_ms(work: Callable[[], object], repeats: int) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    for _ in range(repeats):
        work()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end))


# -- host overhead

OVERHEAD_CALLS = 200   # between two waits: fewer than a stream queues before the host must wait
OVERHEAD_ROUNDS = 25


def host_us(calls: dict[str, Call], wait: Callable[[], object], clock: Callable[[], float] = time.perf_counter
            ) -> dict[str, float]:
    """Median microseconds per call of each, interleaved. `wait` empties the queue outside the time."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(OVERHEAD_ROUNDS + 1):
        for name, call in calls.items():
            wait()
            start = clock()
            for _ in range(OVERHEAD_CALLS):
                call()
            elapsed = clock() - start
            if number:  # the first round compiles and fills the memo
                times[name].append(1e6 * elapsed / OVERHEAD_CALLS)
    wait()
    return {name: round(statistics.median(values), 3) for name, values in times.items()}
