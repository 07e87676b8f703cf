"""The work of a call of triton: products, bytes and blocks. Registers and shared memory are Triton's to say."""
from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from flashgen.codegen.dtype import DTYPES
from flashgen.codegen.explain.counts import LSE_BYTES, Shape
from flashgen.codegen.explain.text import OwnExplanation, bar, row, si
from flashgen.codegen.plan import Plan

# Products over columns of q, and of v: S, O; S, dK, dV, dP; S, dQ, dP.
PRODUCTS = {"fwd": (1, 1), "preprocess": (0, 0), "key_gradients": (2, 2), "query_gradients": (2, 1)}


@dataclass(frozen=True)
class TritonExplanation(OwnExplanation):
    blocks: int
    flops: int   # of all pairs of queries and keys, a multiply-add as two; half of them under a causal mask
    bytes: int   # of device memory, each tensor once

    def call(self) -> str:
        shape, fields = self.shape, dict(self.plan.spec)
        return (f"q {shape.batch} x {shape.seqlen_q} x {shape.num_heads_q} x {fields['head_dim_qk']}, k "
                f"{shape.batch} x {shape.seqlen_kv} x {shape.num_heads_kv} x {fields['head_dim_qk']}, "
                f"v ... x {fields['head_dim_v']}, {fields['dtype']}")

    def draw_work(self) -> Iterator[str]:
        device, plan = self.target.device, self.plan
        flops_ms, bytes_ms = self.flops / device.bf16_tflops / 1e9, self.bytes / device.memory_gbps / 1e6
        yield "work of a call"
        if plan.tried:
            yield row("tiles", str(len(plan.tried)), "the first call times them, since no row of the table fits")
        yield row("blocks", str(self.blocks), f"tiles of {plan.constant('BLOCK_M')} queries x "
                                             f"{plan.constant('BLOCK_N')} keys, {plan.constant('NUM_WARPS')} warps, "
                                             f"{plan.constant('NUM_STAGES')} stages")
        yield row("products", si(self.flops, "FLOP"), "of all pairs that a mask leaves")
        yield row("device memory", si(self.bytes, "B"), "each tensor once")
        yield f"roofline on {device.name}"
        longest = max(flops_ms, bytes_ms, 1e-9)
        yield row("products", f"{flops_ms:.3f} ms", bar(0, flops_ms, longest))
        yield row("device memory", f"{bytes_ms:.3f} ms", bar(0, bytes_ms, longest))


def explain_kernel(plan: Plan, spec: object, *, registers: int | None = None, variants: int = 1, **problem: Any
                   ) -> TritonExplanation:
    """One kernel of a call. UnsupportedError for sizes of no call."""
    shape = Shape.of(**problem)
    fields: dict[str, Any] = dict(plan.spec)
    rows, keys = shape.batch * shape.num_heads_q * shape.seqlen_q, shape.batch * shape.num_heads_kv * shape.seqlen_kv
    dims = fields["head_dim_qk"], fields["head_dim_v"]
    pairs = rows * shape.seqlen_kv // (2 if fields["causal"] else 1)
    by_keys = plan.step == "key_gradients"
    side, length, heads = (("BLOCK_N", shape.seqlen_kv, shape.num_heads_kv) if by_keys
                           else ("BLOCK_M", shape.seqlen_q, shape.num_heads_q))
    elements = sum(dims) * (rows + keys) + (0 if plan.step == "fwd" else sum(dims) * (keys if by_keys else rows))
    flops = 2 * pairs * sum(count * dim for count, dim in zip(PRODUCTS[plan.step], dims, strict=True))
    return TritonExplanation(
        plan, shape, registers, variants, shape.batch * heads * math.ceil(length / plan.constant(side)),
        flops, elements * DTYPES[fields["dtype"]].bytes + rows * LSE_BYTES)
