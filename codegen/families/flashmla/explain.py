"""What a decode over a latent cache will do, as codegen/explain says it of attention: plan, memory, work, roofline.

Which block gets which tiles is worked out on the device from the lengths of a call; here all requests are equally long.
"""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from flashgen.codegen.dtype import DTYPES
from flashgen.codegen.explain.counts import check_sizes
from flashgen.codegen.explain.text import bar, draw_plan, row, si
from flashgen.codegen.plan import Plan, registers_per_thread_max
from flashgen.codegen.target import TARGETS, Target


@dataclass(frozen=True)
class DecodeShape:
    """Sizes of the call to explain: `batch` requests of seqlen_kv cached tokens each, with seqlen_q new ones."""

    batch: int = 32
    seqlen_q: int = 1
    seqlen_kv: int = 8192
    num_heads_q: int = 128

    @classmethod
    def of(cls, **problem: Any) -> DecodeShape:
        """UnsupportedError for what makes no call."""
        check_sizes(cls, problem)
        return cls(**problem)


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
class DecodeExplanation:
    """str() is one screen of text."""

    plan: Plan
    shape: DecodeShape
    registers_max: int
    registers: int | None
    work: DecodeWork
    variants: int
    need: None = None  # no model of a thread's registers, as prefill has

    @property
    def target(self) -> Target:
        return TARGETS[self.plan.target]

    def to_json(self) -> dict[str, Any]:
        return {"plan": self.plan.to_dict(), "shape": asdict(self.shape), "registers_max": self.registers_max,
                "registers": self.registers, "work": asdict(self.work), "variants": self.variants,
                "device": asdict(self.target.device)}

    def __str__(self) -> str:
        return "\n".join(line.rstrip() for part in (_head, draw_plan, _work) for line in part(self))


def explain_decode(plan: Plan, *, registers: int | None = None, variants: int = 1, **problem: Any) -> DecodeExplanation:
    """Of a plan of pass decode. UnsupportedError for sizes that make no call."""
    shape, target = DecodeShape.of(**problem), TARGETS[plan.target]
    registers_max = registers_per_thread_max(plan.launch.threads, plan.launch.min_blocks_per_sm, target)
    return DecodeExplanation(plan, shape, registers_max, registers, _count(plan, shape, target), variants)


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


def _head(e: DecodeExplanation) -> Iterator[str]:
    plan, shape, device = e.plan, e.shape, e.target.device
    yield f"{plan.kernel_name}" + (f"   (1 of {e.variants} variants; --variant and --arch choose another)"
                                   if e.variants > 1 else "")
    yield (f"  q {shape.batch} x {shape.seqlen_q} x {shape.num_heads_q} x {plan.constant('HEAD_DIM_QK')}, cache "
           f"{shape.batch} x {shape.seqlen_kv} x {plan.constant('HEAD_DIM_QK')}, {plan.spec_value('dtype')}")
    yield f"  on {device.name}: {device.num_sms} SMs, {device.bf16_tflops:g} TFLOP/s, {device.memory_gbps:g} GB/s"


def _work(e: DecodeExplanation) -> Iterator[str]:
    work = e.work
    yield "work"
    yield row("blocks of 64 rows", f"{work.row_blocks}",
              f"{e.shape.seqlen_q} tokens * {e.shape.num_heads_q} heads; of 32 or 16 rows where keys are few")
    yield row("parts", f"{work.parts}", f"of {work.tiles} tiles of keys: {work.tiles / work.parts:.1f} each")
    yield row("FLOPs", si(work.flops, ""), f"issued, with padding: {si(work.flops_issued, '')}")
    yield row("bytes, each once", si(work.bytes_once, "B"),
              f"asked for: {si(work.bytes_asked, 'B')}, the rest out of L2")
    longest = max(work.tensor_ms, work.memory_ms)
    yield f"roofline on {e.target.device.name}"
    for unit, ms in (("tensor cores", work.tensor_ms), ("device memory", work.memory_ms)):
        yield row(unit, f"{ms:.3f} ms", bar(0, ms, longest))
    yield (f"  bound: {'tensor cores' if work.tensor_ms > work.memory_ms else 'device memory'}, {longest:.3f} ms = "
           f"{work.flops / longest / 1e9:.0f} TFLOP/s, {work.bytes_once / longest / 1e6:.0f} GB/s")
