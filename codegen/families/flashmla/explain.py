"""What a decode over a latent cache will do, as codegen/explain says it of attention: plan, memory, work, roofline.

Which block gets which tiles is worked out on the device from the lengths of a call; here all requests are equally long.
"""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from flashgen.codegen.dtype import DTYPES
from flashgen.codegen.explain.cost import Cost
from flashgen.codegen.explain.counts import check_sizes
from flashgen.codegen.explain.text import OwnExplanation, bar, row, si
from flashgen.codegen.families.flashmla.launch import num_blocks
from flashgen.codegen.families.shared.launch import QuerySizes
from flashgen.codegen.plan import Plan
from flashgen.codegen.target import TARGETS, Target

FP32_BYTES = 4


@dataclass(frozen=True)
class DecodeShape:
    """Sizes of the call to explain: `batch` requests of seqlen_kv cached tokens each, with seqlen_q new ones."""

    batch: int = 32
    seqlen_q: int = 1
    seqlen_kv: int = 8192
    num_heads_q: int = 128


@dataclass(frozen=True)
class DecodeWork:
    """FLOPs count a multiply-add as two; bytes are those of device memory."""

    row_blocks: int     # of 64 rows that a request's new tokens have
    parts: int          # blocks that share the tiles of one block of rows
    tiles: int          # of keys, over all requests
    flops: int          # of all pairs
    flops_issued: int   # of whole tiles and blocks of rows, which is what the tensor cores run
    bytes_once: int     # cache, q and out, once each
    bytes_asked: int    # the cache once per block of rows
    tensor_ms: float    # at the datasheet's rates
    memory_ms: float


@dataclass(frozen=True)
class DecodeExplanation(OwnExplanation):
    work: DecodeWork

    def cost(self) -> Cost:
        """The cache once. Blocks that share a request's keys leave parts of its output in fp32, of which as many as run
        at one time fit in L2."""
        work, plan, size = self.work, self.plan, DTYPES[str(self.plan.spec_value("dtype"))].bytes
        rows = self.shape.batch * self.shape.seqlen_q * self.shape.num_heads_q
        written = rows * 2 * plan.constant("HALF_COLS") * size
        partials = 2 * num_blocks(QuerySizes(self.shape.batch, self.shape.seqlen_q, self.shape.num_heads_q),
                                  self.target.device.num_sms) * plan.constant("PARTIAL_FLOATS") * FP32_BYTES
        return Cost(work.bytes_once - written, written, work.flops_issued, partials,
                    max(work.tensor_ms, work.memory_ms))

    def call(self) -> str:
        shape, dim = self.shape, self.plan.constant("HEAD_DIM_QK")
        return (f"q {shape.batch} x {shape.seqlen_q} x {shape.num_heads_q} x {dim}, cache "
                f"{shape.batch} x {shape.seqlen_kv} x {dim}, {self.plan.spec_value('dtype')}")

    def draw_work(self) -> Iterator[str]:
        work = self.work
        yield "work"
        yield row("blocks of 64 rows", f"{work.row_blocks}",
                  f"{self.shape.seqlen_q} tokens * {self.shape.num_heads_q} heads; of 32 or 16 rows where keys are few")
        yield row("parts", f"{work.parts}", f"of {work.tiles} tiles of keys: {work.tiles / work.parts:.1f} each")
        yield row("FLOPs", si(work.flops, ""), f"issued, with padding: {si(work.flops_issued, '')}")
        yield row("bytes, each once", si(work.bytes_once, "B"),
                  f"asked for: {si(work.bytes_asked, 'B')}, the rest out of L2")
        longest = max(work.tensor_ms, work.memory_ms)
        yield f"roofline on {self.target.device.name}"
        for unit, ms in (("tensor cores", work.tensor_ms), ("device memory", work.memory_ms)):
            yield row(unit, f"{ms:.3f} ms", bar(0, ms, longest))
        yield (f"  bound: {'tensor cores' if work.tensor_ms > work.memory_ms else 'device memory'}, {longest:.3f} ms = "
               f"{work.flops / longest / 1e9:.0f} TFLOP/s, {work.bytes_once / longest / 1e6:.0f} GB/s")


def explain_decode(plan: Plan, spec: object, *, registers: int | None = None, variants: int = 1, **problem: Any
                   ) -> DecodeExplanation:
    """Of a plan of pass decode. UnsupportedError for sizes that make no call."""
    check_sizes(DecodeShape, problem)
    shape = DecodeShape(**problem)
    return DecodeExplanation(plan, shape, registers, variants, _count(plan, shape, TARGETS[plan.target]))


def _count(plan: Plan, shape: DecodeShape, target: Target) -> DecodeWork:
    block_m, block_n = plan.constant("BLOCK_M"), plan.constant("BLOCK_N")
    dim_qk, dim_v = plan.constant("HEAD_DIM_QK"), 2 * plan.constant("HALF_COLS")
    element_bytes, device = DTYPES[str(plan.spec_value("dtype"))].bytes, target.device
    rows = shape.seqlen_q * shape.num_heads_q
    blocks, tiles = -(-rows // block_m), shape.batch * -(-shape.seqlen_kv // block_n)
    issued = 2 * blocks * block_m * tiles * block_n * (dim_qk + dim_v)
    cache = shape.batch * shape.seqlen_kv * dim_qk * element_bytes
    once = cache + shape.batch * rows * (dim_qk + dim_v) * element_bytes
    return DecodeWork(blocks, max(1, device.num_sms // blocks), tiles,
                      2 * shape.batch * rows * shape.seqlen_kv * (dim_qk + dim_v), issued, once,
                      once + (blocks - 1) * cache, issued / device.bf16_tflops / 1e9, once / device.memory_gbps / 1e6)
