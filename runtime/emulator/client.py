"""The worker process seen from outside: memory that both share, launches, and an end for those that hang.

A worker serves one launch after another until one gives anything but a whole answer: it crashes, spins, is killed, or
the caller is interrupted. Then the process ends, its memory goes with it, and the next launch starts another. So no
launch writes into memory that a later one uses, and no late answer is taken for a later one's.
"""
from __future__ import annotations

import json
import mmap
import os
import select
import signal
import subprocess
import sys
import weakref
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
    most_resident: int
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
    """One process at a time, and the memory that it shares with this one. For one thread, and one launch at a time."""

    def __init__(self) -> None:
        if not hasattr(os, "memfd_create"):
            raise EnvironmentError_("the emulator needs Linux (memfd_create)", allowed="Linux on x86-64 or aarch64")
        self._process: subprocess.Popen[bytes] | None = None
        self._memory = -1                 # file descriptor
        self._end: Callable[[], object] = lambda: None
        self._unread = b""
        self.memory = mmap.mmap(-1, 1)
        self._running = False             # no whole answer has come yet
        self.busy = False                 # for its user: memory or answer are in use
        _workers.add(self)

    def reserve(self, total_bytes: int) -> mmap.mmap:
        """Fresh shared memory for the next launch. EnvironmentError_ if the machine cannot give it."""
        if self._running or self._process is None or self._process.poll() is not None:
            self.stop()
            self._start()
        size = max(total_bytes, 1)
        try:
            os.ftruncate(self._memory, 0)  # drops the old pages
            os.ftruncate(self._memory, size)
            self.memory = mmap.mmap(self._memory, size)
        except (OSError, ValueError, OverflowError) as err:
            raise EnvironmentError_(f"a launch cannot have {size} bytes of shared memory ({err})", where="the emulator",
                                    allowed="tensors that fit into free memory twice") from err
        return self.memory

    def run(self, request: Request, beat: Callable[[int], None] = lambda blocks: None) -> dict[str, Any]:
        """The worker's answer to one launch in the memory reserved last; `beat(blocks done)` is called while it runs.

        Raises WorkerDied, and EnvironmentError_ naming a compiled object that cannot be loaded. Whatever is raised
        here, an interrupt too, ends the process.
        """
        self._running = True
        try:
            answer = self._answer(request, beat)
        except BaseException:
            self.stop()
            raise
        self._running = False
        return answer

    def _answer(self, request: Request, beat: Callable[[int], None]) -> dict[str, Any]:
        process = self._process
        assert process is not None and process.stdin is not None, "reserve comes first"
        unsent = request.to_json(len(self.memory)).encode()
        try:
            while unsent:
                unsent = unsent[process.stdin.write(unsent):]
        except BrokenPipeError:
            raise self._death(process) from None
        while True:
            line = self._line(process)
            try:
                answer: dict[str, Any] = json.loads(line)
            except ValueError:
                raise WorkerDied(f"the emulator's process said {line[:80]!r}, which is no answer") from None
            if "unloadable" in answer:
                raise EnvironmentError_(
                    f"the compiled object cannot be loaded: {answer['why']}", where=answer["unloadable"],
                    allowed="a whole file, in a folder whose file system is not mounted noexec",
                    next="flashgen cache clear deletes it, and the next call compiles it anew; FLASHGEN_CACHE_DIR "
                         "names another folder")
            if "blocks" not in answer:
                return answer
            beat(answer["blocks"])

    def _line(self, process: subprocess.Popen[bytes]) -> bytes:
        assert process.stdout is not None
        while b"\n" not in self._unread:
            ready = select.poll()  # select() takes no descriptor above 1023
            ready.register(process.stdout, select.POLLIN)
            found = ready.poll(int(1000 * STALL_S))
            if self._process is not process:  # by a signal handler, whose fork went on
                raise WorkerDied("this process was forked while the launch ran, and the answer is its parent's")
            if not found:
                raise WorkerDied(f"no drawer call for {STALL_S:g} s: a thread spins on memory, which lets no other run")
            chunk = process.stdout.read(1 << 16)
            if not chunk:
                raise self._death(process)
            self._unread += chunk
        line, _, self._unread = self._unread.partition(b"\n")
        return line

    @staticmethod
    def _death(process: subprocess.Popen[bytes]) -> WorkerDied:
        """Of a process that has closed its pipes."""
        code = process.wait()
        return WorkerDied("the emulator's process ended with "
                          + (signal.Signals(-code).name if code < 0 else f"exit code {code}")
                          + (", which comes from outside: is memory short?" if code == -signal.SIGKILL else ""))

    def _start(self) -> None:
        library = str(runtime_library())
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        module = [sys.executable, "-m", "flashgen.runtime.emulator.worker", library]
        try:
            self._memory = os.memfd_create("flashgen-emulator")
            # Without a buffer there is none to be written again by a fork, and no lock of it that a fork may inherit.
            self._process = subprocess.Popen([*module, str(self._memory), str(os.getpid())], env=environment, bufsize=0,
                                             stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=[self._memory])
        except OSError as err:
            raise EnvironmentError_(f"the emulator's process does not start ({err})", where=sys.executable,
                                    next="ulimit -a shows what this user may have of processes and files") from err
        self._unread, self._running = b"", False
        # When this object goes, as it does with its thread, or else when the interpreter does.
        self._end = weakref.finalize(self, _ended, self._process, self._memory, os.getpid())

    def stop(self) -> None:
        """End the process, and leave its memory to it: what may still run there harms no later launch. In a fork,
        whose parent owns them, only let go of both."""
        self._process = None
        self._end()


_workers: weakref.WeakSet[Worker] = weakref.WeakSet()


def _ended(process: subprocess.Popen[bytes], memory: int, owner: int) -> None:
    if os.getpid() == owner:
        process.kill()
    else:
        process.returncode = 0  # it is no child of this process, which must neither wait for it nor end it
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        pipe.close()
    os.close(memory)
    process.wait()


def _in_child() -> None:
    for worker in list(_workers):
        worker.stop()


os.register_at_fork(after_in_child=_in_child)
