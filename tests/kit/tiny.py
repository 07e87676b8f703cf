"""A Plan and a Source small enough to write by hand: one kernel that adds, for tests of the build side."""
from __future__ import annotations

import struct
from typing import Any

from flashgen.codegen.plan import Launch, Param, Plan, Role
from flashgen.codegen.source import Source
from flashgen.runtime.compile.cubin import Cubin, Resources

# The least that passes for a cubin: a header, and one section of 16 bytes.
IMAGE = struct.pack("<16sHHIQQQIHHHHHH", b"\x7fELF\x02\x01\x01", 2, 190, 1, 0, 0, 64, 0, 64, 56, 0, 64, 1, 0)
IMAGE += struct.pack("<IIQQQQIIQQ", 0, 1, 0, 0, 128, 16, 0, 0, 1, 0) + bytes(16)
CUBIN = Cubin(IMAGE, ("-O3",), "13.0", "a log", Resources(40, 0, 0, 0, 16, 0, ("C7510",)))
FIELDS: tuple[tuple[str, object], ...] = (
    ("name", "tiny"), ("family", "tiny"), ("pass", "fwd"), ("dtype", "bf16"), ("head_dim_qk", 64),
    ("head_dim_v", 64), ("causal", False), ("window", False), ("kv_layout", "dense"), ("page_size", None),
    ("score", "none"), ("lse", True), ("batch_invariant", False), ("deterministic", False), ("kernel", None),
    ("split", False), ("pack_gqa", False))
HEADER = ("flashgen/tiny.cuh", "#pragma once\n__device__ inline float twice(float x) { return x + x; }\n")
TEXT = """#include <flashgen/tiny.cuh>
struct Params { const float* a; float* out; int n; };
extern "C" __global__ void __launch_bounds__(32, 1) NAME(const Params params) {
    if (threadIdx.x < params.n) {
        params.out[threadIdx.x] = twice(params.a[threadIdx.x]);
    }
}
"""
# 64 values live across a barrier with 32 registers: nothing but spills can hold them.
SPILL_TEXT = """extern "C" __global__ void __launch_bounds__(1024, 2) NAME(float* p) {
    float a[64];
    #pragma unroll
    for (int i = 0; i < 64; i++) a[i] = p[i * 1024 + threadIdx.x];
    __syncthreads();
    #pragma unroll
    for (int i = 0; i < 64; i++) for (int j = 0; j < 4; j++) a[i] = a[i] * a[(i * 7 + j) % 64] + a[(i + 13) % 64];
    #pragma unroll
    for (int i = 0; i < 64; i++) p[i * 1024 + threadIdx.x] = a[i];
}
"""
# Without __launch_bounds__ ptxas cannot know the registers at entry and drops the instruction.
SETMAXNREG_TEXT = """extern "C" __global__ void NAME(float* p) {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
    p[threadIdx.x] = 1.0f;
}
"""


def tiny_plan(variant: str = "tiny_add", target: str = "sm_80", fields: dict[str, object] | None = None,
              **changes: Any) -> Plan:
    values: dict[str, Any] = dict(
        variant=variant, target=target, family="tiny", pass_="fwd",
        spec=tuple((name, (fields or {}).get(name, value)) for name, value in FIELDS),
        template="tiny/fwd.cu.j2", element="bf16", constants=(), slots=(), flags=(),
        params=(Param("a", "element_ptr", "input"), Param("out", "f32_out", "output"), Param("n", "i32", "elements")),
        smem=(), roles=(Role("add", 1),), launch=Launch(32, 1, 0, "one block"))
    return Plan(**{**values, **changes})


def tiny_source(plan: Plan, text: str = TEXT, headers: tuple[tuple[str, str], ...] = (HEADER,)) -> Source:
    return Source(text.replace("NAME", plan.variant), plan.variant, f"{plan.kernel_name}.cu", headers, plan.target)


def tiny(variant: str = "tiny_add", target: str = "sm_80", text: str = TEXT) -> tuple[Plan, Source]:
    plan = tiny_plan(variant, target)
    return plan, tiny_source(plan, text)
