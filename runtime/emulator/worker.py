"""The process that runs launches: `python -m flashgen.runtime.emulator.worker LIBRARY MEMORY_FD PARENT_PID`.

One request per line of standard input, answers on standard output, JSON. A kernel that crashes or spins takes only
this process with it. It ends with the thread that started it, whatever it does then. Imports nothing but the standard
library.
"""
from __future__ import annotations

import ctypes
import json
import mmap
import os
import signal
import struct
import sys
from typing import Any

POLICY_CODES = {"eager": 0, "lazy": 1, "random": 2}
MAX_RANK = 5
NUM_COSTS = 9  # members of struct Costs of src/trace.h
MAP_MAGIC, MAP_FORMAT = 0x70616d74, "<10IQ9Q"  # struct EncodedMap of src/tensor_map.h
BEAT = ctypes.CFUNCTYPE(None, ctypes.c_uint32)
PR_SET_PDEATHSIG = 1  # of <sys/prctl.h>


class Unloadable(Exception):
    """A shared object that the loader refuses: (path, why)."""


class Buffer(ctypes.Structure):
    _fields_ = (("data", ctypes.c_void_p), ("bytes", ctypes.c_uint64), ("run_bytes", ctypes.c_uint64),
                ("writable", ctypes.c_uint32), ("initialised", ctypes.c_uint32),
                ("rank", ctypes.c_uint32), ("sizes", ctypes.c_int64 * MAX_RANK),
                ("strides", ctypes.c_int64 * MAX_RANK))


class Launch(ctypes.Structure):
    """struct Launch of src/machine.h."""

    _fields_ = (("entry", ctypes.c_void_p), ("params", ctypes.c_void_p), ("grid", ctypes.c_uint32 * 3),
                ("block", ctypes.c_uint32 * 3), ("smem_bytes", ctypes.c_uint32), ("cluster", ctypes.c_uint32),
                ("registers", ctypes.c_uint32), ("resident", ctypes.c_uint32), ("most_resident", ctypes.c_uint32),
                ("seed", ctypes.c_uint64), ("policy", ctypes.c_uint32), ("num_buffers", ctypes.c_uint32),
                ("buffers", ctypes.POINTER(Buffer)), ("traced_block", ctypes.c_int64),
                ("costs", ctypes.c_float * NUM_COSTS), ("beat", BEAT))


class Server:
    def __init__(self, library: str, memory: int) -> None:
        self._library = loaded(library, ctypes.RTLD_GLOBAL)
        self._library.emu_launch_bytes.restype = ctypes.c_ulong
        assert self._library.emu_launch_bytes() == ctypes.sizeof(Launch), "Launch is not that of src/machine.h"
        self._memory = memory
        self._kernels: dict[str, ctypes.CDLL] = {}

    def run(self, request: dict[str, Any]) -> dict[str, Any]:
        """The answer to one launch: {"fault": ...} or {"statistics": ...}."""
        kernel = self._kernels.get(request["kernel"])
        if kernel is None:
            kernel = self._kernels[request["kernel"]] = loaded(request["kernel"])
        if kernel.emu_params_bytes() != len(request["params"]) // 2:
            raise ValueError(f"the kernel takes {kernel.emu_params_bytes()} bytes of parameters, "
                             f"got {len(request['params']) // 2}")
        memory = mmap.mmap(self._memory, max(1, request["memory_bytes"]))
        window = (ctypes.c_char * len(memory)).from_buffer(memory)
        buffers, params = laid_out(request, ctypes.addressof(window))
        params_buffer = ctypes.create_string_buffer(params, len(params))
        beat = BEAT(lambda done: say({"blocks": done}))
        launch = Launch(
            entry=ctypes.cast(kernel.emu_entry, ctypes.c_void_p), params=ctypes.addressof(params_buffer),
            grid=tuple(request["grid"]), block=tuple(request["block"]), policy=POLICY_CODES[request["policy"]],
            num_buffers=len(buffers), buffers=buffers, beat=beat, costs=tuple(request["costs"]),
            **{name: request[name] for name in ("smem_bytes", "cluster", "registers", "resident",
                                                "most_resident", "seed", "traced_block")})
        answer = ctypes.c_char_p()
        failed = self._library.emu_run(ctypes.byref(launch), ctypes.byref(answer))
        del window
        memory.close()
        return {"fault" if failed else "statistics": json.loads(answer.value or b"{}")}


def loaded(path: str, mode: int = ctypes.DEFAULT_MODE) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(path, mode=mode)
    except OSError as err:
        raise Unloadable(path, str(err)) from err


def laid_out(request: dict[str, Any], base: int) -> tuple[Any, bytes]:
    """(buffers, parameter block with its pointers and tensor maps) for shared memory that starts at `base`."""
    params, rows = bytearray.fromhex(request["params"]), request["buffers"]
    buffers = (Buffer * len(rows))()
    for buffer, row in zip(buffers, rows, strict=True):
        buffer.data, buffer.bytes, buffer.run_bytes = base + row["offset"], row["bytes"], row["run_bytes"]
        buffer.writable, buffer.initialised = row["writable"], row["initialised"]
        buffer.rank = len(row["sizes"])
        buffer.sizes[:buffer.rank], buffer.strides[:buffer.rank] = row["sizes"], row["strides"]
        struct.pack_into("<Q", params, row["param_offset"], buffer.data)
    for row in request["maps"]:
        struct.pack_into(MAP_FORMAT, params, row["param_offset"], MAP_MAGIC, len(row["dims"]), row["element_bytes"],
                         row["is_f32"], row["swizzle_bytes"], *_padded(row["box"], MAX_RANK),
                         buffers[row["buffer"]].data, *_padded(row["dims"], MAX_RANK),
                         *_padded(row["strides"], MAX_RANK - 1))
    return buffers, bytes(params)


def _padded(numbers: list[int], count: int) -> list[int]:
    return numbers + [0] * (count - len(numbers))


def say(answer: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C reaches both processes; the one that asked decides
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # a kernel that spins would never see its input end
    if os.getppid() != int(sys.argv[3]):
        return  # the parent had ended before that was said
    try:
        server = Server(sys.argv[1], int(sys.argv[2]))
        for line in sys.stdin:
            say(server.run(json.loads(line)))
    except Unloadable as err:
        say(dict(zip(("unloadable", "why"), err.args, strict=True)))
    except BrokenPipeError:
        pass  # nobody waits for the answer


if __name__ == "__main__":
    main()
