"""The worker process seen from outside: memory that both share, launches, and an end for those that hang."""
from __future__ import annotations

import atexit
import json
import mmap
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from flashgen.errors import EnvironmentError_
from flashgen.runtime.emulator.toolchain import runtime_library
from flashgen.runtime.emulator.worker import NUM_COSTS

STALL_S = 30.0       # without a sign of progress a kernel spins, and the worker is ended
GUARD_BYTES = 64 << 10
ALIGN_BYTES = 1024
POISON = 0xFF        # NaN in every element type


@dataclass(frozen=True)
class BufferPlace:
    """A tensor in the shared memory. `sizes` and `strides_bytes` leave out the innermost run of `run_bytes`."""

    offset: int
    bytes: int
    run_bytes: int
    sizes: tuple[int, ...]
    strides_bytes: tuple[int, ...]
    writable: bool
    initialised: bool
    param_offset: int   # of its pointer in the parameter block


@dataclass(frozen=True)
class TensorMapPlace:
    """A tensor map in the parameter block, with the arguments of cuTensorMapEncodeTiled: the contiguous dimension
    first, strides in bytes of all dimensions but that one."""

    param_offset: int
    buffer: int         # index among the launch's buffers
    element_bytes: int
    is_f32: bool
    swizzle_bytes: int  # 0: none
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]


@dataclass
class Request:
    kernel: str                       # path of the shared object
    params: bytes
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    smem_bytes: int
    policy: str
    seed: int
    resident: int
    cluster: int
    registers: int                    # of each thread at the start
    buffers: list[BufferPlace] = field(default_factory=list)
    maps: list[TensorMapPlace] = field(default_factory=list)
    traced_block: int = -1            # whose timeline is wanted; -1: none
    costs: tuple[float, ...] = (0.0,) * NUM_COSTS

    def to_json(self, memory_bytes: int) -> str:
        rows = [{"offset": b.offset, "bytes": b.bytes, "run_bytes": b.run_bytes, "sizes": b.sizes,
                 "strides": b.strides_bytes, "writable": int(b.writable),
                 "initialised": int(b.initialised), "param_offset": b.param_offset}
                for b in self.buffers]
        fields = {**self.__dict__, "params": self.params.hex(), "buffers": rows, "memory_bytes": memory_bytes,
                  "maps": [asdict(tensor_map) for tensor_map in self.maps]}
        return json.dumps(fields) + "\n"


class WorkerDied(Exception):
    """The launch ended its process, or had to be ended. The text says how."""


class Worker:
    """One process. Not for two threads at once."""

    def __init__(self) -> None:
        if not hasattr(os, "memfd_create"):
            raise EnvironmentError_("the emulator needs Linux (memfd_create)", allowed="Linux on x86-64 or aarch64")
        self._memory = os.memfd_create("flashgen-emulator")
        self._process: subprocess.Popen[bytes] | None = None
        self._unread = b""
        self.memory = mmap.mmap(-1, 1)

    def reserve(self, total_bytes: int) -> mmap.mmap:
        """Fresh shared memory, poisoned."""
        size = max(total_bytes, 1)
        os.ftruncate(self._memory, 0)  # drops the old pages
        os.ftruncate(self._memory, size)
        self.memory = mmap.mmap(self._memory, size)
        return self.memory

    def run(self, request: Request, beat: Callable[[int], None] = lambda blocks: None) -> dict[str, Any]:
        """The worker's answer; `beat(blocks done)` is called while it runs. Raises WorkerDied."""
        process = self._process or self._start()
        assert process.stdin is not None
        process.stdin.write(request.to_json(len(self.memory)).encode())
        process.stdin.flush()
        while True:
            answer = json.loads(self._line(process))
            if "blocks" not in answer:
                return answer
            beat(answer["blocks"])

    def _line(self, process: subprocess.Popen[bytes]) -> bytes:
        assert process.stdout is not None
        while b"\n" not in self._unread:
            if not select.select([process.stdout], [], [], STALL_S)[0]:
                self.stop()
                raise WorkerDied(f"no drawer call for {STALL_S:g} s: a thread spins on memory, which lets no other run")
            chunk = os.read(process.stdout.fileno(), 1 << 16)
            if not chunk:
                code = process.wait()
                self._process = None
                raise WorkerDied("the emulator's process ended with "
                                 + (signal.Signals(-code).name if code < 0 else f"exit code {code}"))
            self._unread += chunk
        line, _, self._unread = self._unread.partition(b"\n")
        return line

    def _start(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "flashgen.runtime.emulator.worker", str(runtime_library()), str(self._memory)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment,
                                         pass_fds=[self._memory])
        self._unread = b""
        atexit.register(self.stop)
        return self._process

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
