"""A kernel on the emulator: the interface of runtime/launch/kernel.py over CPU tensors instead of device pointers."""
from __future__ import annotations

import ctypes
import functools
import math
import sys
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashgen.codegen.plan import Plan, params_layout
from flashgen.codegen.program import Step
from flashgen.codegen.source import Source
from flashgen.errors import VerifyError
from flashgen.log import logger
from flashgen.runtime.emulator.client import (
    ALIGN_BYTES,
    GUARD_BYTES,
    POISON,
    BufferPlace,
    Request,
    TensorMapPlace,
    Worker,
    WorkerDied,
)
from flashgen.runtime.emulator.costs import costs
from flashgen.runtime.emulator.report import WARP_SIZE, TensorView, fault_error, site
from flashgen.runtime.emulator.schedule import collect, current_schedule
from flashgen.runtime.emulator.toolchain import compile_kernel
from flashgen.runtime.launch.kernel import pack_params
from flashgen.runtime.launch.tensor_map import MapShape, map_shapes

if TYPE_CHECKING:
    from torch import Tensor

REGISTERS_PER_SM = 65536
NUM_SMS = 4   # that a persistent grid is sized for: so few that blocks get several tiles and a last round is ragged
SLOW_S = 2.0  # after this a launch shows its progress
_local = threading.local()


@dataclass(frozen=True)
class Statistics:
    """Of one launch. `warps`: of a block. `banks`, by access site: (code offset, instructions, wavefronts, wavefronts
    without conflicts)."""

    kernel: str
    warps: int
    switches: int
    accesses: int
    banks: tuple[tuple[int, int, int, int], ...]
    trace: tuple[tuple[int, int, int, float, float], ...]  # (row, kind, code offset, begin, end): trace.py

    def bank_conflicts(self) -> dict[str, tuple[int, int, int]]:
        """Shared-memory accesses as the hardware would serve them: (instructions, wavefronts, ideal) by place."""
        found: dict[str, tuple[int, int, int]] = {}
        for pc, *counts in self.banks:
            place = str(site(self.kernel, pc))
            old = found.get(place, (0, 0, 0))
            found[place] = (old[0] + counts[0], old[1] + counts[1], old[2] + counts[2])
        return found


@dataclass(frozen=True)
class Argument:
    """A CPU tensor and where the kernel's parameter block points to it."""

    name: str
    tensor: Tensor
    param_offset: int
    writable: bool
    initialised: bool = True  # False: reading it before writing it is a fault


@dataclass(frozen=True)
class LaunchShape:
    grid: tuple[int, int, int]
    threads: int
    smem_bytes: int
    cluster: int = 1  # blocks along x
    min_blocks_per_sm: int = 1
    max_threads: int = 0  # of __launch_bounds__; 0: as many as the launch has

    @property
    def registers(self) -> int:
        """Of each thread: what __launch_bounds__ leaves it, which setmaxnreg moves around."""
        return min(255, REGISTERS_PER_SM // ((self.max_threads or self.threads) * self.min_blocks_per_sm) // 8 * 8)


def launch(plan: Plan, kernel: Path, packed: bytes, arguments: Sequence[Argument], shape: LaunchShape,
           maps: Sequence[TensorMapPlace] = ()) -> Statistics:
    """Run a kernel's shared object. `packed`: its parameter block, pointers filled in here. Writes to the arguments'
    tensors. KernelFault if the checker objects, VerifyError if the kernel crashes or hangs."""
    schedule = current_schedule()
    with _worker() as worker:
        answer = _answer(worker, plan, kernel, packed, arguments, shape, maps)
    if "fault" in answer:
        views = [TensorView(a.name, a.tensor.element_size(), tuple(a.tensor.shape), a.tensor.stride())
                 for a in arguments]
        raise fault_error(answer["fault"], plan, schedule, str(kernel), views)
    raw = answer["statistics"]
    statistics = Statistics(str(kernel), shape.threads // WARP_SIZE, raw["switches"], raw["accesses"],
                            tuple(map(tuple, raw["banks"])), tuple(map(tuple, raw["trace"])))
    collect(statistics)
    return statistics


def _answer(worker: Worker, plan: Plan, kernel: Path, packed: bytes, arguments: Sequence[Argument],
            shape: LaunchShape, maps: Sequence[TensorMapPlace]) -> dict[str, Any]:
    """The worker's answer; the arguments' tensors hold what the kernel wrote. VerifyError if the worker died."""
    import torch

    schedule = current_schedule()
    places, total = _places(arguments)
    whole = torch.frombuffer(worker.reserve(total), dtype=torch.uint8)
    # Not by operators of torch: those that use OpenMP's threads hang in a fork, where these threads do not exist.
    ctypes.memset(whole.data_ptr(), POISON, total)
    windows = [whole[place.offset:place.offset + place.bytes].view(argument.tensor.dtype)
               for place, argument in zip(places, arguments, strict=True)]
    for window, argument in zip(windows, arguments, strict=True):
        ctypes.memmove(window.data_ptr(), argument.tensor.data_ptr(), window.nbytes)
    request = Request(str(kernel), packed, shape.grid, (shape.threads, 1, 1), shape.smem_bytes, schedule.policy,
                      schedule.seed, schedule.resident, schedule.most_resident, shape.cluster, shape.registers, places,
                      list(maps), schedule.traced_block, costs(plan.target))
    try:
        with _progress(plan.kernel_name, math.prod(shape.grid)) as beat:
            answer = worker.run(request, beat)
    except WorkerDied as death:
        raise VerifyError(str(death), where=plan.kernel_name, details=f"  replay: {schedule}") from None
    for window, argument in zip(windows, arguments, strict=True):
        if argument.writable:
            _bring_back(argument.tensor, window)
    return answer


@contextmanager
def emulated_sms(count: int) -> Iterator[None]:
    """Calls in this context size persistent grids for `count` SMs."""
    before = emulated_num_sms()
    _local.num_sms = count
    try:
        yield
    finally:
        _local.num_sms = before


def emulated_num_sms() -> int:
    """What persistent grids are sized for in this context."""
    return getattr(_local, "num_sms", NUM_SMS)


class EmulatedKernel:
    """A plan's text compiled for this machine."""

    def __init__(self, plan: Plan, source: Source) -> None:
        """CompileError, or EnvironmentError_ without a C++ compiler."""
        self.plan, self._source, self._path = plan, source, compile_kernel(source)

    @property
    def path(self) -> Path:
        """Its shared object, compiled again if the file has gone: with a cleared cache, or before a fork with the
        process that made it."""
        if not self._path.exists():
            self._path = compile_kernel(self._source)
        return self._path

    @property
    def num_sms(self) -> int:
        return emulated_num_sms()

    def launcher(self, step: Step) -> EmulatedLauncher:
        return EmulatedLauncher(self, step)


class EmulatedLauncher:
    """One kernel with all arguments but its tensors fixed."""

    def __init__(self, kernel: EmulatedKernel, step: Step) -> None:
        plan = kernel.plan
        self._kernel, self._packed = kernel, pack_params(plan, step.values)
        self._offsets, self._ctypes = params_layout(plan.params)[1], {p.name: p.ctype for p in plan.params}
        self._maps = map_shapes(plan, step.values)
        self._shape = LaunchShape((step.grid_x, 1, 1), step.threads, plan.launch.smem_bytes,
                                  min_blocks_per_sm=plan.launch.min_blocks_per_sm, max_threads=plan.launch.threads)

    def __call__(self, tensors: Mapping[str, Tensor | None], filled: Collection[str] = ()) -> Statistics:
        """Run it on CPU tensors, named as the plan's pointers; None or none is a null pointer. Raises as `launch`.

        `filled`: names of outputs that the kernel may read before it writes them.
        """
        plan = self._kernel.plan
        arguments = [self._argument(name, tensor, filled) for name in plan.pointers
                     if (tensor := tensors.get(name)) is not None
                     and (tensor.numel() or self._ctypes[name] != "f32_sum")]  # as data_ptr() of no elements is null
        places = [self._place(row, [argument.name for argument in arguments]) for row in self._maps]
        return launch(plan, self._kernel.path, self._packed, arguments, self._shape, places)

    def _argument(self, name: str, tensor: Tensor, filled: Collection[str]) -> Argument:
        kind = self._ctypes[name].rpartition("_")[2]
        return Argument(name, tensor, self._offsets[name], kind in ("out", "sum"),
                        initialised=kind != "out" or name in filled)

    def _place(self, row: MapShape, buffers: list[str]) -> TensorMapPlace:
        return TensorMapPlace(self._offsets[row.name], buffers.index(row.tensor), row.element_bytes, False,
                              row.swizzle_bytes, row.dims, row.strides, row.box)


def _places(arguments: Sequence[Argument]) -> tuple[list[BufferPlace], int]:
    """Where each tensor lies in the shared memory, and how much of that there is."""
    places: list[BufferPlace] = []
    offset = GUARD_BYTES
    for argument in arguments:
        t = argument.tensor
        span = _span(t).numel() * t.element_size()
        run, axes = _runs(t)
        places.append(BufferPlace(
            offset, span, run, tuple(t.shape[i] for i in axes), tuple(t.stride(i) * t.element_size() for i in axes),
            argument.writable, argument.initialised, argument.param_offset))
        offset += math.ceil((span + GUARD_BYTES) / ALIGN_BYTES) * ALIGN_BYTES
    return places, offset


def _bring_back(tensor: Tensor, window: Tensor) -> None:
    """Copy the elements of a tensor, and nothing between them: that may be another thread's."""
    if tensor.is_contiguous():
        ctypes.memmove(tensor.data_ptr(), window.data_ptr(), window.nbytes)
    else:
        tensor.copy_(window.as_strided(tensor.shape, tensor.stride()))


def _span(t: Tensor) -> Tensor:
    """Flat view of the memory from the first to the last element, gaps included."""
    count = 1 + sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True)) if t.numel() else 0
    return t.as_strided((count,), (1,))


def _runs(t: Tensor) -> tuple[int, list[int]]:
    """(bytes of the innermost contiguous run, axes outside it by falling stride). No axes where strides do not nest."""
    axes = sorted((i for i in range(t.dim()) if t.shape[i] != 1), key=lambda i: t.stride()[i], reverse=True)
    run = 1
    while axes and t.stride(axes[-1]) == run:
        run *= t.shape[axes.pop()]
    inner = run
    for i in reversed(axes):
        if t.stride(i) < inner:
            return _span(t).numel() * t.element_size(), []
        inner = t.stride(i) * t.shape[i]
    return run * t.element_size(), axes


@contextmanager
def _worker() -> Iterator[Worker]:
    """This thread's worker; another one while that one works, as for a signal handler that calls a kernel itself."""
    if not hasattr(_local, "worker"):
        _say_once()
        _local.worker = Worker()
    worker = _local.worker if not _local.worker.busy else Worker()
    worker.busy = True
    try:
        yield worker
    finally:
        worker.busy = False


@functools.cache
def _say_once() -> None:
    logger().info("kernels run on the emulator: correct, checked for races, and thousands of times slower than a GPU")


@contextmanager
def _progress(title: str, blocks: int) -> Iterator[Any]:
    """A function of (blocks done) that shows a bar on a terminal once the launch is slow."""
    begun, bar = time.monotonic(), None
    task: Any = None

    def beat(done: int) -> None:
        nonlocal bar, task
        if bar is None and time.monotonic() - begun > SLOW_S and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

            bar = Progress(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("blocks"),
                           TimeElapsedColumn(), console=Console(stderr=True), transient=True)
            bar.start()
            task = bar.add_task(f"emulating {title}", total=blocks)
        if bar is not None:
            bar.update(task, completed=done)

    try:
        yield beat
    finally:
        if bar is not None:
            bar.stop()
