"""A loaded kernel, and how a call's numbers become its launch. No Jinja, no YAML, no torch."""
from __future__ import annotations

import ctypes
import math
import struct
from collections.abc import Mapping
from typing import Any

from flashgen.codegen.plan import CTYPES, Plan
from flashgen.errors import EnvironmentError_, UnsupportedError
from flashgen.log import logger
from flashgen.runtime.driver import api, check, device_facts, during_capture

LOG2_E = math.log2(math.e)
MAX_GRID_X = 2**31 - 1


class Kernel:
    """A cubin loaded on one device. The context that torch uses there must be current."""

    def __init__(self, plan: Plan, image: bytes, device_index: int) -> None:
        """EnvironmentError_ where the driver refuses the image: it is for another card, or newer than the driver."""
        cuda = api()
        device = check(cuda.cuDeviceGet(device_index), f"cuda:{device_index}")
        smem_attribute = cuda.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        with during_capture():
            status, library = cuda.cuLibraryLoadData(image, None, None, 0, None, None, 0)
            if status != cuda.CUresult.CUDA_SUCCESS:
                facts = device_facts(device_index)
                driver_version = check(cuda.cuDriverGetVersion())
                raise EnvironmentError_(
                    f"the driver refuses {plan.kernel_name} ({status.name}) on {facts.name}, compute capability "
                    f"{facts.cc / 10:.1f}, driver for CUDA {driver_version // 1000}.{driver_version % 1000 // 10}",
                    allowed="a cubin of this card's compute capability, from an NVRTC of the driver's CUDA or older",
                    next="flashgen doctor shows both versions")
            self._library = library  # keeps the code loaded
            kernel = check(cuda.cuLibraryGetKernel(library, plan.variant.encode()), plan.kernel_name)
            check(cuda.cuKernelSetAttribute(smem_attribute, plan.launch.smem_bytes, kernel, device), plan.kernel_name)
            # Asking for the function loads the code now; a lazy load at the first launch would break a graph capture.
            self.function = check(cuda.cuKernelGetFunction(kernel), plan.kernel_name)
        self.plan = plan
        self.device_index = device_index
        logger().info("loaded %s on cuda:%d", plan.kernel_name, device_index)

    def launcher(self, values: Mapping[str, int | float]) -> Launcher:
        return Launcher(self, values)


def pointer_names(plan: Plan) -> list[str]:
    """The parameters that are pointers, in the plan's order."""
    return [p.name for p in plan.params if CTYPES[p.ctype].code == "Q"]


def pack_params(plan: Plan, values: Mapping[str, int | float]) -> bytes:
    """The parameter block with null pointers. `values`: every other parameter."""
    pointers = set(pointer_names(plan))
    return struct.pack(plan.params_format(), *(0 if p.name in pointers else values[p.name] for p in plan.params))


class Launcher:
    """One kernel with all arguments but its pointers fixed. Not for two threads at once: they would share the bytes."""

    def __init__(self, kernel: Kernel, values: Mapping[str, int | float]) -> None:
        """`values`: every parameter of the plan that is not a pointer, and `grid_x`."""
        plan, config = kernel.plan, api().CUlaunchConfig()
        packed, pointers = pack_params(plan, values), pointer_names(plan)
        assert [p.name for p in plan.params[:len(pointers)]] == pointers, "pointers come first in every plan"
        self._buffer = ctypes.create_string_buffer(packed, len(packed))
        self._arguments = (ctypes.c_void_p * 1)(ctypes.addressof(self._buffer))
        self._arguments_address = ctypes.addressof(self._arguments)
        self._pack_pointers = struct.Struct(f"<{len(pointers)}Q").pack_into
        config.gridDimX, config.gridDimY, config.gridDimZ = int(values["grid_x"]), 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = plan.launch.threads, 1, 1
        config.sharedMemBytes = plan.launch.smem_bytes
        self._config, self._kernel, self._function = config, kernel, kernel.function
        self._launch, self._success = api().cuLaunchKernelEx, api().CUresult.CUDA_SUCCESS
        self._stream_type, self._stream = api().CUstream, -1

    def __call__(self, stream: int, *pointers: int) -> None:
        """Launch on `stream` (a CUstream as an int). `pointers` in the plan's order. DriverError if it is refused."""
        self._pack_pointers(self._buffer, 0, *pointers)
        if stream != self._stream:
            self._config.hStream, self._stream = self._stream_type(stream), stream
        (status,) = self._launch(self._config, self._function, self._arguments_address, 0)
        if status != self._success:
            check((status,), f"launch of {self._kernel.plan.kernel_name}")


def fa2_values(plan: Plan, *, batch: int, seqlen_q: int, seqlen_kv: int, num_heads_q: int, num_heads_kv: int,
               softmax_scale: float, top_left: bool, window: tuple[int, int],
               strides: Mapping[str, int]) -> dict[str, Any]:
    """Parameter values and grid of an fa2 forward launch.

    Varlen: seqlen_q and seqlen_kv are total_q and total_kv. `window` as in the API; an unbounded side becomes a count
    that reaches past both sequences, so that the kernel's sums cannot wrap. `strides` count elements, named as in
    the plan. UnsupportedError if the grid is too large.
    """
    reach = max(seqlen_q, seqlen_kv)
    left, right = (reach if side < 0 else min(side, reach) for side in window)
    block_m = plan.constant("BLOCK_M")
    varlen = plan.spec_value("kv_layout") == "varlen"
    # Varlen: what slots/layout/varlen.cuh.j2 sets aside, one tile per sequence beyond the floor, and one for the rest.
    m_tiles = seqlen_q // block_m + batch + 1 if varlen else -(-seqlen_q // block_m)
    grid_x = m_tiles * num_heads_q * (1 if varlen else batch)
    if grid_x > MAX_GRID_X:
        raise UnsupportedError(f"{grid_x} blocks ({m_tiles} query tiles, {num_heads_q} heads, batch {batch})",
                               where=plan.kernel_name, allowed=f"{MAX_GRID_X} blocks", next="split the batch")
    return {
        "batch": batch, "seqlen_q": seqlen_q, "seqlen_kv": seqlen_kv, "num_heads_q": num_heads_q,
        "heads_per_kv_head": num_heads_q // num_heads_kv, "m_tiles": m_tiles, "scale_log2": softmax_scale * LOG2_E,
        "align_bottom_right": int(not top_left), "window_left": left, "window_right": right, "grid_x": grid_x,
        **strides,
    }
