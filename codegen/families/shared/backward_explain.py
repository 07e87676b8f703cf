"""What a backward call does, kernel by kernel: FLOPs, bytes, scratch memory and the roofline over them."""
from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from flashgen.codegen.dtype import DTYPES
from flashgen.codegen.explain.cost import L2_SHARE, Cost
from flashgen.codegen.explain.counts import EXP2_PER_CLOCK, LSE_BYTES, TENSOR_FLOPS_PER_CLOCK, Shape
from flashgen.codegen.explain.text import OwnExplanation, bar, row, si
from flashgen.codegen.families.shared.launch import Sizes, is_varlen
from flashgen.codegen.mask import tile_counts, visible_pairs
from flashgen.codegen.plan import Plan
from flashgen.codegen.program import Program
from flashgen.codegen.target import TARGETS

FP32_BYTES = 4
L2_SUMS_GBPS = 3800  # fp32 sums that L2 takes on an H200, measured (docs/lab/backward.md)
SUMS, MEMORY = "sums in L2", "device memory"
PRODUCTS = 5         # S and dP over head dims of qk and v, dV, dK and dQ


@dataclass(frozen=True)
class BackwardExplanation(OwnExplanation):
    moved: dict[str, int]    # bytes of device memory by kernel: each tensor once, and sums that L2 cannot hold
    written: int             # of them all, the bytes that are written
    sums_bytes: int          # fp32 sums of dQ that reach L2
    scratch: dict[str, int]  # bytes of each buffer of the call
    steps: int               # pairs of a key tile and a query tile that are not hidden
    pairs: int               # visible
    flops: int               # of visible pairs, a multiply-add as two
    flops_issued: int        # of whole tiles
    units: dict[str, float]  # milliseconds of each unit that can bound the gradients kernel

    def cost(self) -> Cost:
        """The gradients kernel at its slowest unit, those around it at the rate of device memory."""
        total = sum(self.moved.values())
        around = (total - self.moved["gradients"]) / self.target.device.memory_gbps / 1e6
        return Cost(total - self.written, self.written, self.flops_issued, sum(self.scratch.values()),
                    max(self.units.values()) + around)

    def call(self) -> str:
        shape, fields = self.shape, dict(self.plan.spec)
        return (f"q and dout {shape.batch} x {shape.seqlen_q} x {shape.num_heads_q}, k and v {shape.batch} x "
                f"{shape.seqlen_kv} x {shape.num_heads_kv}, head dims {fields['head_dim_qk']} and "
                f"{fields['head_dim_v']}, {fields['dtype']}")

    def draw_work(self) -> Iterator[str]:
        device = self.target.device
        yield (f"work of a call: {si(self.flops, 'FLOP')} in {PRODUCTS} products of {si(self.pairs, 'visible pairs')}; "
               f"issued {si(self.flops_issued, 'FLOP')} in {self.steps} pairs of tiles")
        yield row("scratch memory", si(sum(self.scratch.values()), "B"), _sizes_of(self.scratch))
        unit, ms = max(self.units.items(), key=lambda item: item[1])
        around = sum(size for name, size in self.moved.items() if name != "gradients") / device.memory_gbps / 1e6
        yield (f"roofline of the gradients kernel on {device.name}: bound by {unit}; with those around it "
               f"{ms + around:.3f} ms = {self.flops / (ms + around) / 1e9:.0f} TFLOP/s")
        moved = ", ".join(si(size, "B") for size in self.moved.values())
        notes = {SUMS: f"  {si(self.sums_bytes, 'B')} of fp32 sums of dQ", MEMORY: f"  {moved}, kernel by kernel"}
        for unit, each in self.units.items():
            yield row(unit, f"{each:.3f} ms", bar(0, each, ms) + notes.get(unit, ""))


def _sizes_of(parts: dict[str, int]) -> str:
    return ", ".join(f"{name} {si(size, 'B')}" for name, size in parts.items())


def explain_backward(plan: Plan, program_of: Callable[[Sizes], Program], *, registers: int | None = None,
                     variants: int = 1, **problem: Any) -> BackwardExplanation:
    """The work of a whole call, whichever of its kernels is given; `program_of` gives its buffers. UnsupportedError for
    sizes of no call."""
    shape = Shape.of(**problem)
    fields: dict[str, Any] = dict(plan.spec)
    block_m, block_n, device = plan.constant("BLOCK_M"), plan.constant("BLOCK_N"), TARGETS[plan.target].device
    window = (-1, 0) if fields["causal"] else shape.window
    heads = shape.batch * shape.num_heads_q
    tiles = tile_counts(shape.seqlen_q, shape.seqlen_kv, block_m, block_n, window)
    pairs = heads * visible_pairs(shape.seqlen_q, shape.seqlen_kv, window)
    steps, columns = heads * tiles.visited, plan.constant("MMA_COLS_QK")
    scores = steps * block_m * block_n
    dims = 3 * fields["head_dim_qk"] + 2 * fields["head_dim_v"]
    size, rows = DTYPES[fields["dtype"]].bytes, heads * shape.seqlen_q
    keys = shape.batch * shape.num_heads_kv * shape.seqlen_kv
    accumulated = rows * columns * FP32_BYTES
    # Zeros of a dq_accum that L2 cannot hold come back for the sums of their head, which leave before postprocess.
    spilled = accumulated if accumulated > L2_SHARE * device.l2_bytes else 0
    q, v_rows = rows * fields["head_dim_qk"] * size, rows * fields["head_dim_v"] * size
    kv = keys * (fields["head_dim_qk"] + fields["head_dim_v"]) * size
    moved = {"preprocess": 2 * v_rows + 3 * rows * LSE_BYTES + accumulated,
             "gradients": q + v_rows + 2 * kv + 2 * rows * LSE_BYTES + 2 * spilled,
             "postprocess": accumulated + q}
    # dq_accum as zeros, -lse and -delta, then the sums, dk and dv, then dq
    written = accumulated + 2 * rows * LSE_BYTES + spilled + kv + q
    sums = steps * block_m * columns * FP32_BYTES
    clocks_per_ms = device.bf16_tflops * 1e9 / TENSOR_FLOPS_PER_CLOCK
    units = {"tensor cores": 2 * scores * dims / device.bf16_tflops / 1e9,
             "exponential unit": scores / EXP2_PER_CLOCK / clocks_per_ms,
             SUMS: sums / L2_SUMS_GBPS / 1e6, MEMORY: moved["gradients"] / device.memory_gbps / 1e6}
    scratch = {buffer.name: buffer.size * FP32_BYTES for buffer in program_of(_sizes(plan, shape)).buffers}
    return BackwardExplanation(plan, shape, registers, variants, moved, written, sums, scratch, steps, pairs,
                               2 * pairs * dims, 2 * scores * dims, units)


def _sizes(plan: Plan, shape: Shape) -> Sizes:
    """Varlen: `batch` sequences of these lengths each."""
    times = shape.batch if is_varlen(plan) else 1
    return Sizes(shape.batch, times * shape.seqlen_q, times * shape.seqlen_kv, shape.num_heads_q, shape.num_heads_kv,
                 strides={p.name: 8 for p in plan.params if p.name.endswith("_stride")})
