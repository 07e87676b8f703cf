"""The work of a call of triton: products, bytes and blocks. Registers and shared memory are Triton's to say."""
from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from flashgen.codegen.dtype import DTYPES
from flashgen.codegen.explain.cost import Cost, Moved
from flashgen.codegen.explain.counts import LSE_BYTES, Shape
from flashgen.codegen.explain.text import OwnExplanation, bar, row, si
from flashgen.codegen.mask import tile_counts
from flashgen.codegen.plan import Plan

# Products over columns of q, and of v: S, O; S, dK, dV, dP; S, dQ, dP.
PRODUCTS = {"fwd": (1, 1), "preprocess": (0, 0), "key_gradients": (2, 2), "query_gradients": (2, 1)}


@dataclass(frozen=True)
class TritonExplanation(OwnExplanation):
    blocks: int
    moved: dict[str, Moved]  # by kernel of the call: each tensor once, and products of whole tiles

    def cost(self) -> Cost:
        rows = self.shape.batch * self.shape.num_heads_q * self.shape.seqlen_q
        return Cost.of(self.moved, 0 if len(self.moved) == 1 else rows * LSE_BYTES, self.target)  # delta

    def draw_work(self) -> Iterator[str]:
        device, plan, own = self.target.device, self.plan, self.moved[self.plan.step]
        flops_ms, bytes_ms = own.flops / device.bf16_tflops / 1e9, own.bytes / device.memory_gbps / 1e6
        yield "work of a call"
        if plan.tried:
            yield row("tiles", str(len(plan.tried)), "the first call times them, since no row of the table fits")
        yield row("blocks", str(self.blocks), f"tiles of {plan.constant('BLOCK_M')} queries x "
                                             f"{plan.constant('BLOCK_N')} keys, {plan.constant('NUM_WARPS')} warps, "
                                             f"{plan.constant('NUM_STAGES')} stages")
        yield row("products", si(own.flops, "FLOP"), "of the tiles that a mask leaves")
        yield row("device memory", si(own.bytes, "B"), "each tensor once")
        yield f"roofline on {device.name}"
        longest = max(flops_ms, bytes_ms, 1e-9)
        yield row("products", f"{flops_ms:.3f} ms", bar(0, flops_ms, longest))
        yield row("device memory", f"{bytes_ms:.3f} ms", bar(0, bytes_ms, longest))


def explain_kernel(plan: Plan, spec: object, *, registers: int | None = None, variants: int = 1, **problem: Any
                   ) -> TritonExplanation:
    """One kernel of a call, and what the others move. UnsupportedError for sizes of no call."""
    shape = Shape.of(**problem)
    fields: dict[str, Any] = dict(plan.spec)
    by_keys = plan.step == "key_gradients"
    side, length, heads = (("BLOCK_N", shape.seqlen_kv, shape.num_heads_kv) if by_keys
                           else ("BLOCK_M", shape.seqlen_q, shape.num_heads_q))
    steps = ("fwd",) if plan.step == "fwd" else tuple(name for name in PRODUCTS if name != "fwd")
    return TritonExplanation(plan, shape, registers, variants,
                             shape.batch * heads * math.ceil(length / plan.constant(side)),
                             {step: _moved(step, shape, fields, _pairs(plan, shape, fields)) for step in steps})


def _pairs(plan: Plan, shape: Shape, fields: dict[str, Any]) -> int:
    block_m, block_n = plan.constant("BLOCK_M"), plan.constant("BLOCK_N")
    window = (-1, 0) if fields["causal"] else shape.window
    tiles = tile_counts(shape.seqlen_q, shape.seqlen_kv, block_m, block_n, window).visited
    return shape.batch * shape.num_heads_q * tiles * block_m * block_n


def _moved(step: str, shape: Shape, fields: dict[str, Any], pairs: int) -> Moved:
    rows, keys = shape.batch * shape.num_heads_q * shape.seqlen_q, shape.batch * shape.num_heads_kv * shape.seqlen_kv
    dims, size = (fields["head_dim_qk"], fields["head_dim_v"]), DTYPES[fields["dtype"]].bytes
    q, out, kv, stats = rows * dims[0] * size, rows * dims[1] * size, keys * sum(dims) * size, rows * LSE_BYTES
    read, written = {"fwd": (q + kv, out + stats), "preprocess": (2 * out, stats),
                     "key_gradients": (q + out + kv + 2 * stats, kv),
                     "query_gradients": (q + out + kv + 2 * stats, q)}[step]
    return Moved(read, written, 2 * pairs * sum(count * dim for count, dim in zip(PRODUCTS[step], dims, strict=True)))
