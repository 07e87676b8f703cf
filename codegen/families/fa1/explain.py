"""What a call of fa1 moves, tensor by tensor, as its loops predict: Q, O, m and l once for each tile of keys that sees
them. Beside it what the other loop order moves, and the few blocks that a call has."""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from flashgen.codegen.dtype import DTYPES
from flashgen.codegen.explain.counts import LSE_BYTES, Shape
from flashgen.codegen.explain.text import OwnExplanation, bar, row, si
from flashgen.codegen.mask import tile_counts, visible_pairs
from flashgen.codegen.plan import Plan
from flashgen.codegen.smem import round_up

FP32_BYTES = 4


@dataclass(frozen=True)
class Moved:
    """Bytes of device memory that a call asks for, of one tensor or of several that go together."""

    read: int
    written: int

    @property
    def bytes(self) -> int:
        return self.read + self.written


class Visits(NamedTuple):
    """Of one head and sequence."""

    tiles: int  # of queries, over all tiles of keys
    rows: int   # queries that exist, likewise
    keys: int   # in tiles that some query sees


def count_visits(shape: Shape, block_m: int, block_n: int, causal: bool) -> Visits:
    """The two loops: for each tile of keys, the query tiles from the first that sees its first key."""
    m_tiles, tiles, rows, keys = -(-shape.seqlen_q // block_m), 0, 0, 0
    for key in range(0, shape.seqlen_kv, block_n):
        begin = max(key - (shape.seqlen_kv - shape.seqlen_q), 0) // block_m if causal else 0
        tiles, rows = tiles + m_tiles - begin, rows + shape.seqlen_q - begin * block_m
        keys += min(block_n, shape.seqlen_kv - key)
    return Visits(tiles, rows, keys)


@dataclass(frozen=True)
class Fa1Explanation(OwnExplanation):
    moved: dict[str, Moved]  # by tensor
    visits: int              # of a query tile by a tile of keys
    bytes_once: int          # each tensor of the call once
    bytes_by_query: int      # with queries in the outer loop, as its successors have them; 0 of the backward
    scratch_bytes: int
    blocks: int              # of the kernel with the two loops
    block_of: str            # what a block has, of one sequence
    flops: int               # of visible pairs, a multiply-add as two
    flops_issued: int        # of whole tiles

    def call(self) -> str:
        shape, fields = self.shape, dict(self.plan.spec)
        return (f"q {shape.batch} x {shape.seqlen_q} x {shape.num_heads_q}, k and v {shape.batch} x {shape.seqlen_kv} "
                f"x {shape.num_heads_kv}, head dims {fields['head_dim_qk']} and {fields['head_dim_v']}, "
                f"{fields['dtype']}")

    @property
    def units(self) -> dict[str, float]:
        """Milliseconds at the datasheet's rates. A block keeps its SM: those without one do nothing."""
        device = self.target.device
        waves = -(-self.blocks // device.num_sms)
        busy = self.blocks / (waves * device.num_sms)
        return {"tensor cores": self.flops_issued / device.bf16_tflops / 1e9 / busy,
                "device memory": sum(each.bytes for each in self.moved.values()) / device.memory_gbps / 1e6}

    def draw_work(self) -> Iterator[str]:
        total, device = sum(each.bytes for each in self.moved.values()), self.target.device
        most = max(each.bytes for each in self.moved.values())
        yield (f"work of a call: {si(self.flops, 'FLOP')}; issued {si(self.flops_issued, 'FLOP')} in {self.visits} "
               f"visits of a query tile by a tile of keys")
        for name, each in self.moved.items():
            yield row(name, si(each.bytes, "B"),
                      f"{bar(0, each.bytes, most)}  reads {si(each.read, 'B')}, writes {si(each.written, 'B')}")
        yield row("all", si(total, "B"), f"{total / self.bytes_once:.1f} times the {si(self.bytes_once, 'B')} of each "
                                         "tensor once")
        if self.bytes_by_query:
            yield row("queries outside", si(self.bytes_by_query, "B"), "the other loop order, with the same tiles")
        units = self.units
        ms = max(units.values())
        yield row("blocks", str(self.blocks), f"one for each {self.block_of} and sequence, on {device.num_sms} SMs; "
                                              f"scratch memory {si(self.scratch_bytes, 'B')}, fp32")
        yield (f"roofline on {device.name}, with the bytes above, of which L2 may serve a part: at best {ms:.3f} ms = "
               f"{self.flops / ms / 1e9:.0f} TFLOP/s")
        for name, each_ms in units.items():
            yield row(name, f"{each_ms:.3f} ms", bar(0, each_ms, ms))


class _Call(NamedTuple):
    """What both passes count with. Bytes of tensors, each once; rows and visits over all heads."""

    fields: dict[str, Any]
    heads: int    # query heads of all sequences
    visits: int   # of query tiles
    rows: int     # queries that exist, over all visits
    stored: int   # rows of q, up to whole tiles
    once: dict[str, int]
    lse: int
    pairs: int    # visible
    scores: int   # of whole tiles

    @classmethod
    def of(cls, plan: Plan, shape: Shape) -> _Call:
        fields: dict[str, Any] = dict(plan.spec)
        block_m, block_n, heads = plan.constant("BLOCK_M"), plan.constant("BLOCK_N"), shape.batch * shape.num_heads_q
        visits = count_visits(shape, block_m, block_n, fields["causal"])
        rows, keys = heads * shape.seqlen_q, shape.batch * shape.num_heads_kv * shape.seqlen_kv
        qk, dv = (fields[name] * DTYPES[fields["dtype"]].bytes for name in ("head_dim_qk", "head_dim_v"))
        pairs = heads * visible_pairs(shape.seqlen_q, shape.seqlen_kv, (-1, 0) if fields["causal"] else (-1, -1))
        return cls(fields, heads, heads * visits.tiles, heads * visits.rows, heads * round_up(shape.seqlen_q, block_m),
                   {"q": rows * qk, "k": keys * qk, "v": keys * dv, "out": rows * dv}, rows * LSE_BYTES, pairs,
                   heads * visits.tiles * block_m * block_n)

    def bytes(self, *names: str) -> int:
        return sum(self.once[name] for name in names)

    def row_bytes(self, *names: str) -> int:
        """Of one element of each head dim that is named."""
        columns: int = sum(self.fields[name] for name in names)
        return columns * DTYPES[self.fields["dtype"]].bytes


def explain_forward(plan: Plan, spec: object, *, registers: int | None = None, variants: int = 1, **problem: Any
                    ) -> Fa1Explanation:
    """The work of a forward call. UnsupportedError for sizes of no call."""
    shape = Shape.of(**problem)
    call, block_m = _Call.of(plan, shape), plan.constant("BLOCK_M")
    o_row, state_row = plan.constant("MMA_COLS_V") * FP32_BYTES, 2 * FP32_BYTES
    stored = call.visits * block_m + call.stored  # line 2 writes all rows before the visits, line 16 reads them after
    per_kv_head = shape.num_heads_q // shape.num_heads_kv  # blocks that read the same keys
    moved = {
        "K and V": Moved(per_kv_head * call.bytes("k", "v"), 0),
        "Q": Moved(call.rows * call.row_bytes("head_dim_qk"), 0),
        "O, fp32": Moved(stored * o_row, stored * o_row),
        "m and l": Moved(stored * state_row, stored * state_row),
        "out and lse": Moved(0, call.bytes("out") + call.lse)}
    window = (-1, 0) if call.fields["causal"] else (-1, -1)
    loaded = call.heads * tile_counts(shape.seqlen_q, shape.seqlen_kv, block_m, plan.constant("BLOCK_N"),
                                      window).keys_loaded
    dims, columns = (sum(names) for names in (
        (call.fields["head_dim_qk"], call.fields["head_dim_v"]),
        (plan.constant("MMA_COLS_QK"), plan.constant("MMA_COLS_V"))))
    return Fa1Explanation(
        plan, shape, registers, variants, moved, call.visits, call.bytes("q", "k", "v", "out") + call.lse,
        call.bytes("q", "out") + call.lse + loaded * call.row_bytes("head_dim_qk", "head_dim_v"),
        call.stored * (o_row + state_row), call.heads, "head",
        2 * call.pairs * dims, 2 * call.scores * columns)


def explain_backward(plan: Plan, spec: object, *, registers: int | None = None, variants: int = 1, **problem: Any
                     ) -> Fa1Explanation:
    """The work of a whole backward call, whichever of its kernels is given. UnsupportedError for sizes of no call."""
    shape = Shape.of(**problem)
    call = _Call.of(plan, shape)
    visited, terms_row, dq_row = call.visits * plan.constant("BLOCK_M"), 2 * FP32_BYTES, (
        plan.constant("MMA_COLS_QK") * FP32_BYTES)
    moved = {
        "Q, dO, lse and delta": Moved(call.rows * call.row_bytes("head_dim_qk", "head_dim_v") + visited * terms_row,
                                      call.stored * terms_row),
        "dQ, fp32": Moved((visited + call.stored) * dq_row, (visited + call.stored) * dq_row),
        "all else, once": Moved(2 * call.bytes("out") + call.lse + call.bytes("k", "v"), call.bytes("q", "k", "v"))}
    dims = 3 * call.fields["head_dim_qk"] + 2 * call.fields["head_dim_v"]  # S, dK and dQ; dP and dV
    return Fa1Explanation(
        plan, shape, registers, variants, moved, call.visits,
        2 * call.bytes("q", "k", "v", "out") + call.lse, 0, call.stored * (terms_row + dq_row),
        shape.batch * shape.num_heads_kv, "kv head", 2 * call.pairs * dims, 2 * call.scores * dims)
