"""Counters of persistent kernels: buffers of a program that outlive its calls.

They are int32 words that a kernel finds zero and leaves zero, so that nothing has to clear them between launches.
Launches that may overlap in time must not share them. Those of one stream never overlap, so a stream has one slot; a
launch that is captured into a CUDA graph gets a slot of its own, because the graph may be replayed on any stream, also
beside eager work on the one it was captured on. Captured slots stay taken for the life of the process (4 KiB each on
devices of up to 340 SMs): when the last graph that holds one is gone is not known here.

What this cannot see: two executable graphs instantiated from one capture share its slots, so they must not be replayed
at the same time; and a stream that is destroyed before its work is done must not be replaced by a new one (whose handle
may be the same) that runs beside the rest of that work. torch does neither.
"""
from __future__ import annotations

import functools
import threading

import torch

from flashgen.runtime.launch.driver import api, check, during_capture

SLOT_ALIGN_BYTES = 4096  # no two slots on one page, and none on a line that another launch's atomics keep busy
SLOTS_PER_BLOCK = 64     # of one allocation, where they are small
PER_THREAD_STREAM = 2    # CU_STREAM_PER_THREAD: one handle for another stream in each thread

# Of the current stream; a plain C function, and no context is made for asking.
_is_capturing = getattr(torch._C, "_cuda_isCurrentStreamCapturing", torch.cuda.is_current_stream_capturing)


class Counters:
    """The counter slots of one device. For any thread."""

    def __init__(self, slot_bytes: int = SLOT_ALIGN_BYTES) -> None:
        """`slot_bytes`: a multiple of SLOT_ALIGN_BYTES."""
        self.slot_bytes = slot_bytes
        self._lock, self._free = threading.Lock(), list[int]()
        self._of_stream: dict[int, int] = {}
        self._of_thread = threading.local()

    def slot(self, stream: int) -> int:
        """Address of the counters of a launch on `stream`, which is torch's current one on this device.

        Its context must be current. DriverError where there is no memory left.
        """
        if _is_capturing():
            return self._take()
        return self._of_stream.get(stream) or self._first(stream)

    def _first(self, stream: int) -> int:
        """The slot of a stream that had none."""
        if stream == PER_THREAD_STREAM:
            if not hasattr(self._of_thread, "slot"):
                self._of_thread.slot = self._take()
            return int(self._of_thread.slot)
        slot = self._take()
        return self._of_stream.setdefault(stream, slot)  # another thread may have been faster: then its slot counts

    def _take(self) -> int:
        with self._lock:
            if not self._free:
                self._free = self._new_block()
            return self._free.pop()

    def _new_block(self) -> list[int]:
        """Zeroed slots, in memory that torch's allocator and a capture in progress know nothing of."""
        count = max(1, SLOTS_PER_BLOCK * SLOT_ALIGN_BYTES // self.slot_bytes)
        cuda, total = api(), count * self.slot_bytes
        with during_capture():
            block = int(check(cuda.cuMemAlloc(total), f"{total} bytes for counters"))
            # On a stream of its own: the default one may be waiting for work that is queued, or be forbidden.
            stream = check(cuda.cuStreamCreate(cuda.CUstream_flags.CU_STREAM_NON_BLOCKING.value), "counters")
            try:
                check(cuda.cuMemsetD8Async(block, 0, total, stream), "counters")
                check(cuda.cuStreamSynchronize(stream), "counters")
            finally:
                check(cuda.cuStreamDestroy(stream), "counters")
        return [block + i * self.slot_bytes for i in range(count)]


def counters_of(device_index: int, words: int) -> Counters:
    """Counters of cuda:<device_index> with room for `words` int32 in each slot, whose sizes are powers of two, so that
    a process does not collect slots of many."""
    return _counters_of(device_index, SLOT_ALIGN_BYTES << max(0, -(-4 * words // SLOT_ALIGN_BYTES) - 1).bit_length())


@functools.cache
def _counters_of(device_index: int, slot_bytes: int) -> Counters:
    """Two threads that ask first at once may get one each, which is as good."""
    return Counters(slot_bytes)
