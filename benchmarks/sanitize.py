"""Launches every shipped variant of this card on small problems, without torch: something to run under
compute-sanitizer.

    compute-sanitizer --tool memcheck  --error-exitcode 1 python benchmarks/sanitize.py
    compute-sanitizer --tool racecheck --error-exitcode 1 python benchmarks/sanitize.py 'fa2*'
    compute-sanitizer --tool initcheck --error-exitcode 1 python benchmarks/sanitize.py 'fa2*'

An argument picks variants by name. fa3 and decodes are for memcheck alone: the other two follow neither what the copy
engine and wgmma read and write nor the mbarriers that order it. The emulator looks for races there, and stray reads.

Build first (`flashgen build fa2_fwd fa3_fwd fa2_bwd fa3_bwd standard mla_h100 mla_h100_caches`), so that the sanitizer
watches launches only.
"""
from __future__ import annotations

import ctypes
import fnmatch
import math
import random
import struct
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from flashgen.codegen.families.registry import lower, pass_of, program_of
from flashgen.codegen.families.shared.launch import DecodeSizes, QuerySizes, is_persistent
from flashgen.codegen.families.shared.launch import Sizes as AttentionSizes
from flashgen.codegen.plan import Plan
from flashgen.codegen.program import Program
from flashgen.codegen.render import render
from flashgen.codegen.spec.spec import load_specs, shipped_spec_paths
from flashgen.errors import VerifyError
from flashgen.runtime.compile.cache import Cache
from flashgen.runtime.launch.driver import api, check, device_facts
from flashgen.runtime.launch.kernel import Kernel
from flashgen.runtime.select.lookup import archs_for


@dataclass(frozen=True)
class Sizes:
    """Of one launch. Varlen takes the prefix sums in place of `batch` equal lengths."""

    seqlen_q: int
    seqlen_kv: int
    num_heads_q: int
    num_heads_kv: int
    batch: int
    cu_seqlens_q: tuple[int, ...]
    cu_seqlens_kv: tuple[int, ...]


# More than two tiles each way, ragged ends; varlen with an empty sequence, a short one, and rows after the last.
SMALL = Sizes(261, 277, 4, 2, 2, (0, 130, 130, 258), (0, 150, 160, 270))
# For blocks that stay: more than two tiles for each SM, and few tiles over many keys, which they share.
PERSISTENT = (Sizes(261, 277, 90, 45, 2, (0, 130, 130, 258), (0, 150, 160, 270)),
              Sizes(133, 2777, 2, 1, 1, (0, 1, 133), (0, 2000, 2777)))


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


def launch_program(program: Program, kernels: dict[str, Kernel], pointers: dict[str, int], memory: Memory,
                   where: str) -> None:
    """All launches of a program; then waits for them. VerifyError if they leave counters unlike zero."""
    counters = {}
    for buffer in program.buffers:
        size = 4 * buffer.size  # of both dtypes
        if buffer.life == "scratch":
            pointers[buffer.name] = memory.empty(size) if size else 0
        else:
            pointers[buffer.name] = counters[buffer.name] = memory.filled(bytes(size))
    for step in program.steps:
        kernels[step.kernel].launcher(step, [*pointers])(0, [*pointers.values()])
    check(api().cuCtxSynchronize(), where)
    for name, place in counters.items():
        left = (ctypes.c_char * (4 * program.buffer(name).size))()
        check(api().cuMemcpyDtoH(ctypes.addressof(left), place, len(left)))
        if any(left.raw):
            raise VerifyError(f"{name} are not zero after a launch", where=where)


def launch(kernels: Sequence[Kernel], sizes: Sizes) -> None:
    """One call of attention or of its backward, on random inputs. DriverError if a launch fails, VerifyError if it
    leaves its counters unlike zero."""
    plan, memory = kernels[0].plan, Memory()
    varlen = plan.spec_value("kv_layout") == "varlen"
    batch, rows = (len(sizes.cu_seqlens_q) - 1, 1) if varlen else (sizes.batch, sizes.batch)
    query, key = (sizes.seqlen_q, sizes.num_heads_q), (sizes.seqlen_kv, sizes.num_heads_kv)
    head_dim_qk, head_dim_v = int(str(plan.spec_value("head_dim_qk"))), int(str(plan.spec_value("head_dim_v")))
    shapes = {"q": (*query, head_dim_qk), "k": (*key, head_dim_qk), "v": (*key, head_dim_v),
              "out": (*query, head_dim_v)}
    shapes |= {"dout": shapes["out"], **{f"d{name}": shapes[name] for name in ("q", "k", "v")}}
    read = ("q", "k", "v") if plan.pass_ == "fwd" else ("q", "k", "v", "out", "dout")
    pointers = {name: memory.filled(_random_elements(rows * math.prod(shape))) if name in read
                else memory.empty(2 * rows * math.prod(shape)) for name, shape in shapes.items()}
    stats = rows * math.prod(query)
    pointers["lse"] = memory.empty(4 * stats) if plan.pass_ == "fwd" else memory.filled(struct.pack("f", 5.0) * stats)
    pointers["dlse"] = 0
    for name, sums in (("cu_seqlens_q", sizes.cu_seqlens_q), ("cu_seqlens_kv", sizes.cu_seqlens_kv)):
        pointers[name] = memory.filled(struct.pack(f"{len(sums)}i", *sums))
    strides: dict[str, int] = {}
    for name, (length, heads, dim) in shapes.items():
        strides |= {f"{name}_batch_stride": length * heads * dim, f"{name}_row_stride": heads * dim,
                    f"{name}_head_stride": dim}
    call = AttentionSizes(batch, sizes.seqlen_q, sizes.seqlen_kv, sizes.num_heads_q, sizes.num_heads_kv, 0.1,
                          window=(70, 20) if plan.spec_value("window") else (-1, -1), strides=strides)
    program = program_of(plan, call, kernels[0].num_sms, *(kernel.plan for kernel in kernels[1:]))
    launch_program(program, {kernel.plan.step: kernel for kernel in kernels}, pointers, memory,
                   f"{plan.kernel_name}, {sizes}")
    memory.free()


# Of a decode: lengths, new tokens, heads, more rows than a block's. Many short requests, and few keys for many blocks.
DECODES = (((0, 130, 1, 450, 64) * 4, 2, 40), ((700,), 1, 128))


def launch_decode(kernel: Kernel, schedule: Kernel, lengths: Sequence[int], tokens: int, heads: int) -> None:
    """A schedule and its decode, causal and with a sink, over pages in order. As launch()."""
    plan, memory, batch = kernel.plan, Memory(), len(lengths)
    width, cols = plan.constant("HEAD_DIM_QK"), 2 * plan.constant("HALF_COLS")
    dense = plan.spec_value("kv_layout") == "dense"
    page = max(lengths) if dense else 64 if plan.spec_value("page_size") == 64 else 48
    columns = 1 if dense else -(-max(lengths) // page)
    pages, rows = batch * columns, batch * tokens * heads
    sizes = DecodeSizes(QuerySizes(batch, tokens, heads), pages, page, columns, {
        "q_outer_stride": tokens * heads * width, "q_row_stride": width,
        "kv_outer_stride": page * width, "kv_row_stride": width}, softmax_scale=0.1, causal=True)
    pointers = {
        "q": memory.filled(_random_elements(rows * width)), "kv": memory.filled(_random_elements(pages * page * width)),
        "page_table": 0 if dense else memory.filled(struct.pack(f"{pages}i", *range(pages))),
        "seqlens": memory.filled(struct.pack(f"{batch}i", *lengths)), "sink": memory.filled(bytes(4 * heads)),
        "out": memory.empty(2 * rows * cols), "lse": memory.empty(4 * rows)}
    launch_program(program_of(plan, sizes, kernel.num_sms, schedule.plan), {"decode": kernel, "schedule": schedule},
                   pointers, memory, f"{plan.kernel_name}, {lengths}")
    memory.free()


def _random_elements(count: int) -> bytes:
    """Finite bf16 or fp16 bit patterns of moderate size, the same for both."""
    return struct.pack(f"<{count}H", *(random.getrandbits(16) & 0xBFFF & ~0x2000 for _ in range(count)))


def calls(pattern: str) -> list[tuple[Plan, ...]]:
    """The kernels of a call, for each matching variant of the shipped files that begins one, for the closest target
    that the file lists."""
    archs, found = archs_for(device_facts(0).cc), []
    for path in shipped_spec_paths():
        specs = load_specs(path).specs
        arch = next((arch for arch in archs if any(spec.arch == arch for spec in specs)), None)
        for spec in specs:
            kernels = [dict(traits) for traits in pass_of(spec).kernels]
            begins = all(getattr(spec, name) == value for name, value in kernels[0].items())
            if spec.arch == arch and begins and fnmatch.fnmatch(spec.variant, pattern):
                found.append(tuple(lower(spec.with_(**traits)) for traits in kernels))
    return found


def main(arguments: Sequence[str]) -> None:
    cuda, cache = api(), Cache()
    check(cuda.cuCtxSetCurrent(check(cuda.cuDevicePrimaryCtxRetain(check(cuda.cuDeviceGet(0))))))
    chosen, launches = calls(arguments[0] if arguments else "*"), 0

    def loaded(plan: Plan) -> Kernel:
        return Kernel(plan, cache.get_or_build(plan, render(plan)).cubin.image, 0)

    for plans in chosen:
        if plans[0].pass_ == "decode":
            [(schedule,)] = calls("mla_h100_schedule")
            for sizes in DECODES:
                launch_decode(loaded(plans[0]), loaded(schedule), *sizes)
                launches += 2
        elif plans[0].pass_ in ("fwd", "bwd"):
            kernels = [loaded(plan) for plan in plans]
            for small in (SMALL, *(PERSISTENT if is_persistent(plans[0]) else ())):
                launch(kernels, small)
                launches += len(kernels)
    print(f"{len(chosen)} variants launched, {launches} launches")


if __name__ == "__main__":
    main(sys.argv[1:])
