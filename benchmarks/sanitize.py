"""Launches every shipped variant of this card once, on a small problem, without torch: something to run under
compute-sanitizer.

    compute-sanitizer --tool memcheck  --error-exitcode 1 python benchmarks/sanitize.py
    compute-sanitizer --tool racecheck --error-exitcode 1 python benchmarks/sanitize.py
    compute-sanitizer --tool initcheck --error-exitcode 1 python benchmarks/sanitize.py

Build first (`flashgen build specs/*.yaml --arch sm_90`), so that the sanitizer watches launches and no compiling.
"""
from __future__ import annotations

import fnmatch
import random
import struct
import sys
from collections.abc import Sequence

from flashgen.codegen.lower import lower
from flashgen.codegen.plan import Plan
from flashgen.codegen.render import render
from flashgen.codegen.spec import load_specs, shipped_spec_paths
from flashgen.runtime.cache import Cache
from flashgen.runtime.driver import api, check, device_facts
from flashgen.runtime.kernel import Kernel, fa2_values, pointer_names
from flashgen.runtime.lookup import archs_for

# More than two tiles each way, ragged ends; varlen with an empty sequence, a short one, and rows after the last.
SEQLEN_Q, SEQLEN_KV, NUM_HEADS_Q, NUM_HEADS_KV, BATCH = 261, 277, 4, 2, 2
CU_SEQLENS_Q, CU_SEQLENS_KV = (0, 130, 130, 258), (0, 150, 160, 270)


class Memory:
    """Device allocations of exactly the asked size, freed together: memcheck then sees every stray byte."""

    def __init__(self) -> None:
        self._pointers: list[object] = []

    def filled(self, data: bytes) -> int:
        pointer = self.empty(len(data))
        check(api().cuMemcpyHtoD(pointer, data, len(data)))
        return pointer

    def empty(self, size: int) -> int:
        pointer = check(api().cuMemAlloc(size))
        self._pointers.append(pointer)
        return int(pointer)

    def free(self) -> None:
        for pointer in self._pointers:
            check(api().cuMemFree(pointer))


def launch_once(kernel: Kernel) -> None:
    """One launch with random inputs; raises DriverError if it fails."""
    plan, memory = kernel.plan, Memory()
    varlen = plan.spec_value("kv_layout") == "varlen"
    batch = len(CU_SEQLENS_Q) - 1 if varlen else BATCH
    rows = 1 if varlen else BATCH
    sizes = {"q": (SEQLEN_Q, NUM_HEADS_Q, plan.constant("HEAD_DIM_QK")),
             "k": (SEQLEN_KV, NUM_HEADS_KV, plan.constant("HEAD_DIM_QK")),
             "v": (SEQLEN_KV, NUM_HEADS_KV, plan.constant("HEAD_DIM_V")),
             "out": (SEQLEN_Q, NUM_HEADS_Q, plan.constant("HEAD_DIM_V"))}
    pointers = {name: memory.filled(_random_elements(rows * a * b * c)) for name, (a, b, c) in sizes.items()
                if name != "out"}
    pointers["out"] = memory.empty(2 * rows * SEQLEN_Q * NUM_HEADS_Q * plan.constant("HEAD_DIM_V"))
    pointers["lse"] = memory.empty(4 * rows * SEQLEN_Q * NUM_HEADS_Q)
    for name, lengths in (("cu_seqlens_q", CU_SEQLENS_Q), ("cu_seqlens_kv", CU_SEQLENS_KV)):
        pointers[name] = memory.filled(struct.pack(f"{len(lengths)}i", *lengths))
    strides: dict[str, int] = {}
    for name, (length, heads, dim) in sizes.items():
        strides |= {f"{name}_batch_stride": length * heads * dim, f"{name}_row_stride": heads * dim,
                    f"{name}_head_stride": dim}
    window = (70, 20) if plan.spec_value("window") else (-1, -1)
    values = fa2_values(plan, batch=batch, seqlen_q=SEQLEN_Q, seqlen_kv=SEQLEN_KV, num_heads_q=NUM_HEADS_Q,
                        num_heads_kv=NUM_HEADS_KV, softmax_scale=0.1, top_left=False, window=window, strides=strides)
    kernel.launcher(values)(0, *(pointers[name] for name in pointer_names(plan)))
    check(api().cuCtxSynchronize(), plan.kernel_name)
    memory.free()


def _random_elements(count: int) -> bytes:
    """Finite bf16 or fp16 bit patterns of moderate size, the same for both."""
    return struct.pack(f"<{count}H", *(random.getrandbits(16) & 0xBFFF & ~0x2000 for _ in range(count)))


def plans(pattern: str) -> list[Plan]:
    archs = archs_for(device_facts(0).cc)
    return [lower(spec) for path in shipped_spec_paths() for spec in load_specs(path).specs
            if spec.arch == archs[0] and fnmatch.fnmatch(spec.variant, pattern)]


def main(arguments: Sequence[str]) -> None:
    cuda, cache = api(), Cache()
    check(cuda.cuCtxSetCurrent(check(cuda.cuDevicePrimaryCtxRetain(check(cuda.cuDeviceGet(0))))))
    chosen = plans(arguments[0] if arguments else "*")
    for plan in chosen:
        launch_once(Kernel(plan, cache.get_or_build(plan, render(plan)).cubin.image, 0))
    print(f"{len(chosen)} variants launched")


if __name__ == "__main__":
    main(sys.argv[1:])
