"""What a variant will do before any GPU is touched: its plan, its memory, its work, and the roofline over both.

Everything is counted from the plan and the kernel's own tile rule (mask.py). The rates are the datasheet's
(target.py), so that the times here are floors, not forecasts. For kernels on wgmma, whose softmax can run under the
products, two more units are counted: those that exponentiate and those that issue instructions.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

from flashgen.codegen.dtype import DTYPES
from flashgen.codegen.explain.cost import Cost, kv_bytes_read
from flashgen.codegen.explain.tile_map import Question, pairs_of, tile_map
from flashgen.codegen.expr.tree import INT_MAX, ScalarParam
from flashgen.codegen.mask import TileCounts, tile_counts, visible_pairs
from flashgen.codegen.plan import Plan, registers_per_thread_max
from flashgen.codegen.spec.show import show
from flashgen.codegen.target import TARGETS, Device, Target
from flashgen.codegen.warpgroup import RegisterNeed, register_need
from flashgen.errors import UnsupportedError, nearest_word

if TYPE_CHECKING:
    from flashgen.codegen.spec.spec import Spec

LSE_BYTES = 4
# Of one Hopper SM and clock. The device's clock follows from its bf16 rate and the first of these.
TENSOR_FLOPS_PER_CLOCK = 4096     # wgmma on 16-bit operands
EXP2_PER_CLOCK = 16
INSTRUCTIONS_PER_CLOCK = 128      # per thread: four schedulers, each issuing for 32
INSTRUCTIONS_PER_SCORE = 6        # scale, exp2, sum, half a pack: 3.5; the step around them: 2.3, counted in SASS


def check_sizes(cls: type[Any], problem: Mapping[str, Any], but: Sequence[str] = ()) -> None:
    """UnsupportedError for names that `cls` has no field for, and for numbers below 1 in all but those."""
    names = [f.name for f in fields(cls)]
    for name, value in problem.items():
        if name not in names:
            raise UnsupportedError(f"unknown size {name}", where="problem", allowed=", ".join(names),
                                   nearest=nearest_word(name, names))
        if name not in but and (type(value) is not int or not 1 <= value <= INT_MAX):
            raise UnsupportedError(f"{name} is {show(value)}", where="problem",
                                   allowed=f"whole numbers from 1 to {INT_MAX}")


@dataclass(frozen=True)
class Shape:
    """Sizes of the call to explain. Varlen: `batch` sequences of these lengths each. `window` as in the API."""

    batch: int = 2
    seqlen_q: int = 8192
    seqlen_kv: int = 8192
    num_heads_q: int = 16
    num_heads_kv: int = 16
    window: tuple[int, int] = (-1, -1)

    @classmethod
    def of(cls, **problem: Any) -> Shape:
        """seqlen_kv and num_heads_kv follow their _q twins unless given. UnsupportedError for what makes no call."""
        check_sizes(cls, problem, but=("window",))
        if "window" in problem and not _is_window(problem["window"]):
            raise UnsupportedError(f"window is {show(problem['window'])}", where="problem",
                                   allowed="two counts of keys, (left, right); -1 is unbounded")
        for name in ("seqlen", "num_heads"):
            if f"{name}_q" in problem:
                problem.setdefault(f"{name}_kv", problem[f"{name}_q"])
        shape = cls(**problem)
        if shape.num_heads_q % shape.num_heads_kv:
            raise UnsupportedError(f"{shape.num_heads_q} query heads over {shape.num_heads_kv} kv heads",
                                   where="problem", allowed="num_heads_q a multiple of num_heads_kv")
        return shape


def _is_window(value: object) -> bool:
    return (isinstance(value, Sequence) and not isinstance(value, str) and len(value) == 2
            and all(type(side) is int and -1 <= side <= INT_MAX for side in value))


@dataclass(frozen=True)
class Work:
    """FLOPs count a multiply-add as two. `flops` are those of visible (query, key) pairs, `flops_issued` those of
    whole tiles with their padding, which is what the tensor cores run."""

    tiles: TileCounts      # of one head and sequence
    tiles_full_mask: int   # KV tiles of one head and sequence if nothing were masked
    query_tiles: int       # over all heads and sequences
    waves: float           # query tiles over the blocks that are resident at once
    pairs: int             # visible, over all heads and sequences
    scores: int            # likewise, of whole tiles
    flops: int
    flops_issued: int


@dataclass(frozen=True)
class Traffic:
    """Bytes to and from device memory."""

    standard: int   # three kernels: S is written, read, P written, read; q, k, v and out once
    scores: int     # the part of `standard` that is S and P
    kernel: int     # this kernel's own requests: q, out and lse once, k and v once per query tile
    kv: int         # the part of `kernel` that is k and v
    law: float      # pairs * d^2 / M elements (FlashAttention, Theorem 2), M the block's shared memory in elements
    once: int       # every tensor once: the floor, reached where L2 serves all re-reads of k and v


@dataclass(frozen=True)
class Roofline:
    """Milliseconds at datasheet rates, and what bounds the kernel if L2 serves the re-reads of k and v."""

    units: dict[str, float]  # of each unit that can bound; device memory: each tensor once
    memory_kernel_ms: float  # of Traffic.kernel
    bound: str               # the slowest of `units`
    ms: float                # of that bound
    intensity: float         # FLOPs issued per byte of Traffic.kernel
    balance: float           # FLOPs per byte at which the device's two rates meet
    l2_share: float          # part of the k and v bytes that L2 must serve for `ms` to be possible
    tflops: float            # of `Work.flops` at `ms`


@dataclass(frozen=True)
class Counts:
    """All that is counted of one variant and call."""

    plan: Plan
    shape: Shape
    registers_max: int       # per thread, from the launch bounds
    registers: int | None    # per thread of a build, None if there is none
    need: RegisterNeed | None  # of a consumer thread, at least; None for kernels without wgmma
    work: Work
    traffic: Traffic
    roofline: Roofline
    variants: int            # of the file this one was taken from
    unknown: tuple[str, ...] = ()  # what a mask reads and nobody said: tiles and pairs are upper bounds
    pairs_exact: bool = True

    @property
    def target(self) -> Target:
        return TARGETS[self.plan.target]

    def cost(self) -> Cost:
        """q, out and lse once, k and v as kv_bytes_read says; the softmax of kernels on wgmma bounds them, too."""
        shape, device, asked = self.shape, self.target.device, self.traffic
        fields: dict[str, Any] = dict(self.plan.spec)
        size, heads = DTYPES[fields["dtype"]].bytes, shape.batch * shape.num_heads_kv
        q = shape.batch * shape.num_heads_q * shape.seqlen_q * fields["head_dim_qk"] * size
        head_bytes = shape.seqlen_kv * (fields["head_dim_qk"] + fields["head_dim_v"]) * size
        kv = kv_bytes_read(asked.kv, head_bytes, heads, self.work.query_tiles // heads,
                           device.num_sms * self.plan.launch.min_blocks_per_sm, device)
        written = asked.kernel - asked.kv - q
        units = {**self.roofline.units, "device memory": (q + kv + written) / device.memory_gbps / 1e6}
        return Cost(q + kv, written, self.work.flops_issued, 0, max(units.values()))

    def to_json(self) -> dict[str, Any]:
        numbers = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: value.to_dict() if isinstance(value, Plan) else asdict(value) if hasattr(value, "__dict__")
                else value for name, value in numbers.items()} | {"device": asdict(self.target.device)}


def count(plan: Plan, spec: Spec, shape: Shape, *, registers: int | None, variants: int) -> Counts:
    """What the kernel of `plan`, made from `spec`, does for one call. UnsupportedError for a mask that it has not."""
    target = TARGETS[plan.target]
    if shape.window != (-1, -1) and not spec.window:
        raise UnsupportedError(f"window is {shape.window}, and {spec.variant} has none", where="problem",
                               allowed="a variant with `window: true`")
    seen = _seen(plan, spec, shape)
    work = _work(plan, spec, shape, target, seen)
    traffic = _traffic(plan, spec, shape, work)
    registers_max = registers_per_thread_max(plan.launch.threads, plan.launch.min_blocks_per_sm, target)
    need = None
    if plan.wgmma_shapes:
        need = register_need(plan.constant("BLOCK_N"), plan.constant("MMA_COLS_V"),
                             dict(plan.slots).get("p_operand", "registers"))
    return Counts(plan, shape, registers_max, registers, need, work, traffic,
                  _roofline(work, traffic, target.device, bool(plan.wgmma_shapes)), variants, seen.unknown,
                  seen.exact)


@dataclass(frozen=True)
class _Seen:
    """What a mask leaves of one head and sequence."""

    tiles: TileCounts
    pairs: int
    exact: bool = True
    unknown: tuple[str, ...] = ()


def _seen(plan: Plan, spec: Spec, shape: Shape) -> _Seen:
    """Of a mask by expression, with the defaults of its parameters; what has none makes tiles count as masked."""
    block_m, block_n, mask = plan.constant("BLOCK_M"), plan.constant("BLOCK_N"), spec.expressions.mask
    if mask is None:
        window = (-1, 0) if spec.causal else shape.window
        return _Seen(tile_counts(shape.seqlen_q, shape.seqlen_kv, block_m, block_n, window, group=plan.rows_alone),
                     visible_pairs(shape.seqlen_q, shape.seqlen_kv, window))
    values = {param.name: param.default for param in spec.expressions.params if isinstance(param, ScalarParam)}
    question = Question(mask, shape.seqlen_q, shape.seqlen_kv, spec.align == "top_left", values)
    tiles = tile_map(question, block_m, block_n, plan.rows_alone)
    return _Seen(tiles.counts(), *pairs_of(question, tiles), tiles.unknown)


def _work(plan: Plan, spec: Spec, shape: Shape, target: Target, seen: _Seen) -> Work:
    block_m, block_n, tiles = plan.constant("BLOCK_M"), plan.constant("BLOCK_N"), seen.tiles
    heads = shape.batch * shape.num_heads_q
    pairs = heads * seen.pairs
    scores = heads * tiles.visited * block_m * block_n
    columns_issued = plan.constant("MMA_COLS_QK") + plan.constant("MMA_COLS_V")
    query_tiles = heads * tiles.query_tiles
    return Work(tiles, tiles.query_tiles * -(-shape.seqlen_kv // block_n), query_tiles,
                query_tiles / (target.device.num_sms * plan.launch.min_blocks_per_sm), pairs,
                scores, 2 * pairs * (spec.head_dim_qk + spec.head_dim_v), 2 * scores * columns_issued)


def _traffic(plan: Plan, spec: Spec, shape: Shape, work: Work) -> Traffic:
    element_bytes = DTYPES[spec.dtype].bytes
    columns = spec.head_dim_qk + spec.head_dim_v
    heads = shape.batch * shape.num_heads_q
    rows_q, rows_kv = heads * shape.seqlen_q, shape.batch * shape.num_heads_kv * shape.seqlen_kv
    q_and_out = rows_q * columns * element_bytes
    lse = rows_q * LSE_BYTES if spec.lse else 0
    kv = heads * work.tiles.keys_loaded * columns * element_bytes
    once = q_and_out + rows_kv * columns * element_bytes
    scores = 4 * rows_q * shape.seqlen_kv * element_bytes
    memory_elements = plan.launch.smem_bytes / element_bytes
    law = work.pairs * spec.head_dim_qk * spec.head_dim_v / memory_elements * element_bytes
    return Traffic(once + scores, scores, q_and_out + lse + kv, kv, law, once + lse)


def _roofline(work: Work, traffic: Traffic, device: Device, wgmma: bool) -> Roofline:
    flops_per_ms, bytes_per_ms = device.bf16_tflops * 1e9, device.memory_gbps * 1e6
    clocks_per_ms = flops_per_ms / TENSOR_FLOPS_PER_CLOCK  # of all SMs together
    units = {"tensor cores": work.flops_issued / flops_per_ms}
    if wgmma:
        units["exponential unit"] = work.scores / EXP2_PER_CLOCK / clocks_per_ms
        units["issue slots"] = work.scores * INSTRUCTIONS_PER_SCORE / INSTRUCTIONS_PER_CLOCK / clocks_per_ms
    units["device memory"] = traffic.once / bytes_per_ms
    bound, ms = max(units.items(), key=lambda unit: unit[1])
    from_l2 = max(0.0, traffic.kernel - ms * bytes_per_ms)
    return Roofline(units, traffic.kernel / bytes_per_ms, bound, ms, work.flops_issued / traffic.kernel,
                    flops_per_ms / bytes_per_ms, from_l2 / traffic.kv if traffic.kv else 0.0, work.flops / (ms * 1e9))


MAX_SIZE = 2**31 - 1  # kernels take sizes as 32-bit integers


def parse_shape(text: str) -> dict[str, Any]:
    """`batch=2 seqlen_q=8192 window=1024,0` as keywords of `explain`. UnsupportedError for anything else."""
    found: dict[str, Any] = {}
    for word in text.split():
        name, equals, value = word.partition("=")
        try:
            numbers = tuple(int(part) for part in value.split(","))
        except ValueError:
            equals = ""
        large = equals and max(map(abs, numbers)) > MAX_SIZE
        if not equals or name in found or large:
            what = " gives its size again" if name in found else " is too large" if large else ""
            raise UnsupportedError(f"{word!r}{what}", where="problem",
                                   allowed=f"name=number once per size, at most {MAX_SIZE}, and window=left,right",
                                   nearest="batch=2 seqlen_q=8192")
        found[name] = numbers if len(numbers) > 1 else numbers[0]
    return found
