"""What a call of standard attention moves, kernel by kernel, beside what attention on chip has to move."""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from flashgen.codegen.dtype import DTYPES
from flashgen.codegen.explain.cost import Moved
from flashgen.codegen.explain.counts import LSE_BYTES, Shape
from flashgen.codegen.explain.text import OwnExplanation, bar, row, si
from flashgen.codegen.families.standard.launch import BLOCK_N
from flashgen.codegen.families.standard.options import KERNELS
from flashgen.codegen.plan import Plan
from flashgen.codegen.smem import round_up
from flashgen.codegen.target import TARGETS

SCORE_BYTES = 4    # fp32
WARPS_PER_SM = 64  # 2048 threads


@dataclass(frozen=True)
class StandardExplanation(OwnExplanation):
    moved: dict[str, Moved]  # by kernel
    bytes_once: int          # q, k, v, out and lse, which attention on chip moves
    scratch_bytes: int       # S and P

    def draw_work(self) -> Iterator[str]:
        times = {name: each.ms(self.target) for name, each in self.moved.items()}
        total = sum(each.bytes for each in self.moved.values())
        yield "work of a call"
        for name, each in self.moved.items():
            yield row(name, si(each.bytes, "B"), f"reads {si(each.read, 'B')}, writes {si(each.written, 'B')}")
        yield row("all three", si(total, "B"),
                  f"{total / self.bytes_once:.1f} times the {si(self.bytes_once, 'B')} of q, k, v and out, each once")
        yield row("scratch memory", si(self.scratch_bytes, "B"), "S in fp32, and P")
        yield f"roofline on {self.target.device.name}"
        for name, ms in times.items():
            yield row(name, f"{ms:.3f} ms", bar(0, ms, max(times.values())))
        flops, ms = sum(each.flops for each in self.moved.values()), sum(times.values())
        yield f"  one after the other: {ms:.3f} ms = {flops / ms / 1e9:.0f} TFLOP/s, {total / ms / 1e6:.0f} GB/s"


def _passes(plan: Plan, row_bytes: int) -> int:
    """How often a row of S comes from device memory. softmax reads it twice, for the sum and for P. L2 serves the
    second reading if it holds the rows that are worked on at one time, one for each warp that SMs have room for."""
    device = TARGETS[plan.target].device
    return 1 if device.num_sms * WARPS_PER_SM * row_bytes <= device.l2_bytes else 2


def explain_kernel(plan: Plan, spec: object, *, registers: int | None = None, variants: int = 1, **problem: Any
                   ) -> StandardExplanation:
    """The work of a whole call, whichever of its three kernels is given. UnsupportedError for sizes of no call."""
    shape = Shape.of(**problem)
    fields: dict[str, Any] = dict(plan.spec)
    size, rows = DTYPES[fields["dtype"]].bytes, shape.batch * shape.num_heads_q * shape.seqlen_q
    keys, pairs = shape.batch * shape.num_heads_kv * shape.seqlen_kv, rows * shape.seqlen_kv
    stored = rows * round_up(shape.seqlen_kv, BLOCK_N)
    q, k = rows * fields["head_dim_qk"] * size, keys * fields["head_dim_qk"] * size
    out, v, lse = rows * fields["head_dim_v"] * size, keys * fields["head_dim_v"] * size, rows * LSE_BYTES
    moved: dict[str, Moved] = dict(zip(KERNELS, (
        Moved(q + k, stored * SCORE_BYTES, 2 * pairs * fields["head_dim_qk"]),
        Moved(_passes(plan, SCORE_BYTES * round_up(shape.seqlen_kv, BLOCK_N)) * stored * SCORE_BYTES,
              stored * size + lse, 0),
        Moved(stored * size + v, out, 2 * pairs * fields["head_dim_v"])), strict=True))
    return StandardExplanation(plan, shape, registers, variants, moved, q + k + v + out + lse,
                               stored * (SCORE_BYTES + size))
