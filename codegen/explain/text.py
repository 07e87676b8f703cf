"""An Explanation as one screen of text."""
from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from flashgen.codegen.dtype import DTYPES
from flashgen.codegen.explain import counts
from flashgen.codegen.explain.cost import Cost
from flashgen.codegen.explain.counts import Counts, Shape
from flashgen.codegen.plan import Plan, Role, registers_per_thread_max
from flashgen.codegen.slots import mask_choice
from flashgen.codegen.target import SMEM_RESERVED_PER_BLOCK_BYTES, TARGETS, Target
from flashgen.errors import UnsupportedError

if TYPE_CHECKING:
    from flashgen.codegen.spec.spec import Spec

BAR_WIDTH = 24
NOTE_WIDTH = 116
_FULL, _EMPTY = "█", "·"
_PREFIXES = ("", "k", "M", "G", "T", "P", "E")


class Explanation(Counts):
    """str() is one screen of text."""

    def __str__(self) -> str:
        return "\n".join(line.rstrip() for part in _PARTS for line in part(self))


@dataclass(frozen=True)
class OwnExplanation:
    """What a family says of a kernel whose work it counts itself. str() is one screen of text."""

    plan: Plan
    shape: Any                   # the sizes of the call
    registers: int | None        # per thread, of a build
    variants: int                # in the spec file
    need: ClassVar[None] = None  # no model of a thread's registers, as there is of attention

    @property
    def target(self) -> Target:
        return TARGETS[self.plan.target]

    @property
    def registers_max(self) -> int:
        return registers_per_thread_max(self.plan.launch.threads, self.plan.launch.min_blocks_per_sm, self.target)

    def cost(self) -> Cost:
        """Of a call, by default from fields: `moved`, by kernel or by tensor, and `scratch_bytes`. Kernels have FLOPs,
        and run one after the other; beside tensors, `flops_issued` and `units` say FLOPs and milliseconds.
        UnsupportedError where these are missing."""
        moved: dict[str, Any] = getattr(self, "moved", {})
        scratch_bytes: int = getattr(self, "scratch_bytes", 0)
        if moved and all(hasattr(one, "flops") for one in moved.values()):
            return Cost.of(moved, scratch_bytes, self.target)
        flops, units = getattr(self, "flops_issued", None), getattr(self, "units", None)
        if flops is None or not units or not all(hasattr(one, "read") for one in moved.values()):
            raise UnsupportedError(f"the bytes of {self.plan.variant} are not counted", where="cost")
        return Cost(sum(one.read for one in moved.values()), sum(one.written for one in moved.values()), flops,
                    scratch_bytes, max(units.values()))

    def call(self) -> str:
        """The sizes of the call, for the second line."""
        return tensors(self.plan, self.shape)

    def draw_work(self) -> Iterator[str]:
        """The lines below those of the plan."""
        raise NotImplementedError

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "plan": self.plan.to_dict(), "registers_max": self.registers_max,
                "device": asdict(self.target.device)}

    def __str__(self) -> str:
        return "\n".join(line.rstrip() for part in (head(self, self.call()), draw_plan(self), self.draw_work())
                         for line in part)


def explain_attention(plan: Plan, spec: Spec, *, registers: int | None = None, variants: int = 1, **problem: Any
                      ) -> Explanation:
    """What a pass that answers attention does. UnsupportedError for sizes that make no call."""
    return Explanation(**vars(counts.count(plan, spec, Shape.of(**problem), registers=registers, variants=variants)))


def si(value: float, unit: str) -> str:
    """Three digits and a decimal prefix: 137 MB."""
    step = 0
    while abs(value) >= 999.5 and step < len(_PREFIXES) - 1:
        value, step = value / 1000, step + 1
    digits = 0 if value >= 99.95 or (step == 0 and value == int(value)) else 1 if value >= 9.995 else 2
    return f"{value:.{digits}f} {_PREFIXES[step]}{unit}"


def bar(first: float, size: float, whole: float) -> str:
    """A bar of BAR_WIDTH cells with [first, first + size) of `whole` filled; anything above zero fills a cell."""
    start = min(round(first / whole * BAR_WIDTH), BAR_WIDTH - 1)
    cells = max(round((first + size) / whole * BAR_WIDTH) - start, 1) if size else 0
    return (_EMPTY * start + _FULL * cells).ljust(BAR_WIDTH, _EMPTY)[:BAR_WIDTH]


def row(label: str, value: str, about: str = "") -> str:
    return f"  {label:<24}{value:>11}  {about}"


def _wrapped(label: str, about: str) -> Iterator[str]:
    lines = textwrap.wrap(about, NOTE_WIDTH - len(label)) or [""]
    yield from (f"{label if i == 0 else ' ' * len(label)}{line}" for i, line in enumerate(lines))


def head(e: Any, call: str) -> Iterator[str]:
    """The kernel, the call and the device; `e` has the parts of an Explanation."""
    device = e.target.device
    yield e.plan.kernel_name + (f"   (1 of {e.variants} variants; --variant and --arch choose another)"
                                if e.variants > 1 else "")
    yield f"  {call}"
    yield f"  on {device.name}: {device.num_sms} SMs, {device.bf16_tflops:g} TFLOP/s, {device.memory_gbps:g} GB/s"


def tensors(plan: Plan, shape: Shape) -> str:
    """What a call of attention takes."""
    dim_qk, dim_v, dtype = (plan.spec_value(name) for name in ("head_dim_qk", "head_dim_v", "dtype"))
    return (f"q {shape.batch} x {shape.seqlen_q} x {shape.num_heads_q} x {dim_qk}, k {shape.batch} x {shape.seqlen_kv} "
            f"x {shape.num_heads_kv} x {dim_qk}, v ... x {dim_v}, {dtype}")


def _head(e: Counts) -> Iterator[str]:
    plan, shape = e.plan, e.shape
    mask = mask_choice(plan.spec_value("causal") is True, plan.spec_value("window") is True)
    if "mask" in dict(plan.spec):
        mask = f"mask {dict(plan.spec)['mask']}"
    return head(e, f"{tensors(plan, shape)}, {f'window {shape.window}' if mask == 'window' else mask}")


def _plan(e: Counts) -> Iterator[str]:
    plan = e.plan
    yield "plan"
    for constant in plan.constants:
        yield f"  {constant.name:<19}{constant.value:>6}  {constant.reason}"
    choices = dict(plan.slots)
    words = [*(f"{slot} {choice}" for slot, choice in choices.items()),
             *(name for name, on in plan.flags if on and name not in choices.values())]
    yield from _wrapped(f"  {'slots and flags':<27}", ", ".join(words))
    if not _moves_registers(e):
        yield f"  {'warps':<27}{', '.join(f'{role.name} {role.warps}' for role in plan.roles)}"
    for note in plan.notes:
        yield from textwrap.wrap(note, NOTE_WIDTH, initial_indent="  ", subsequent_indent="    ")
    built = e.registers is not None
    if not _moves_registers(e):
        yield row("registers per thread", f"{e.registers} of {e.registers_max}" if built else f"<= {e.registers_max}",
                   f"{'the cached build' if built else 'not built yet'}; {e.target.regs_per_sm} / "
                   f"({plan.launch.threads} threads * {plan.launch.min_blocks_per_sm} blocks per SM), at most "
                   f"{e.target.regs_per_thread}")


def _moves_registers(e: Counts) -> bool:
    return any(role.registers is not None for role in e.plan.roles)


def _roles(e: Counts) -> Iterator[str]:
    """Warps that hand registers to each other: who has how many, against what the block has."""
    if not _moves_registers(e):
        return

    def total(role: Role) -> int:
        return 32 * role.warps * (e.registers_max if role.registers is None else role.registers)

    threads = e.plan.launch.threads
    asked = sum(map(total, e.plan.roles))
    build = "not built yet" if e.registers is None else f"{e.registers} in the cached build"
    yield (f"roles: {asked} of {threads * e.registers_max} registers, which are {threads} threads * {e.registers_max} "
           f"at launch ({build})")
    for role in e.plan.roles:
        registers = f"{e.registers_max} as launched" if role.registers is None else f"{role.registers}"
        need = f"  at least {e.need}" if role.name == "mma" and e.need else ""
        yield f"  {role.name:<10}{role.warps:>3} warps * 32 * {registers:<3} = {total(role):>6}{need}"


def _smem(e: Counts) -> Iterator[str]:
    plan, target = e.plan, e.target
    if not plan.compiles_here:
        yield "registers and shared memory: as the compiler has it that runs at the first launch"
        return
    used, limit = plan.launch.smem_bytes, target.smem_per_block_bytes
    yield f"shared memory of a block: {used} of {limit} bytes"
    width = max((len(region.name) for region in plan.smem), default=0) + 2
    for region in plan.smem:
        yield from _wrapped(f"  {region.name:<{width}}{region.offset_bytes:>7} {region.size_bytes:>7}  "
                            f"{bar(region.offset_bytes, region.size_bytes, limit)}  ", region.holds)
    blocks = plan.launch.min_blocks_per_sm
    yield (f"  of an SM: {blocks} * ({used} + {SMEM_RESERVED_PER_BLOCK_BYTES}) = "
           f"{blocks * (used + SMEM_RESERVED_PER_BLOCK_BYTES)} of {target.smem_per_sm_bytes} bytes")


def _barriers(e: Counts) -> Iterator[str]:
    barriers = e.plan.barriers
    if not barriers:
        return
    yield f"barriers: {sum(barrier.count for barrier in barriers)}, with the arrivals that complete one"
    width = max(len(barrier.name) for barrier in barriers) + 2
    for barrier in barriers:
        arrivals = barrier.expects.replace("p.warpgroups", "mma warpgroups")
        yield from _wrapped(f"  {barrier.name:<{width}}{barrier.count:>3} * {arrivals:>3} arrivals  ",
                            barrier.about)


def _tensor_maps(e: Counts) -> Iterator[str]:
    maps = e.plan.tensor_maps
    if not maps:
        return
    element_bytes = DTYPES[str(e.plan.spec_value("dtype"))].bytes
    yield "tensor maps"
    width = max(len(name) for m in maps for name in (m.name, m.tensor)) + 2
    for m in maps:
        panels = f" * {m.box_panels} panels" if m.box_panels else ""
        copied = m.box_rows * m.box_cols * max(m.box_panels, 1) * element_bytes
        yield (f"  {m.name:<{width}}{m.tensor:<{width}}{m.box_rows:>4} rows * {m.box_cols:>3} columns{panels} = "
               f"{copied:>6} bytes a copy, swizzle {m.swizzle_bytes}")


def _work(e: Counts) -> Iterator[str]:
    work, tiles = e.work, e.work.tiles
    yield "work"
    waves = (f"{math.ceil(work.waves)} waves, the last {_percent(work.waves % 1 or 1)} full" if e.need
             else f"{work.waves:.1f} per resident block")
    yield row("query tiles", f"{work.query_tiles}", f"{tiles.query_tiles} per head * {e.shape.num_heads_q} heads * "
               f"{e.shape.batch} sequences; {waves}")
    yield row("KV tiles per head", f"{tiles.visited}", f"of {work.tiles_full_mask}; {tiles.masked} of them masked"
               + (f"; at most: {', '.join(e.unknown)} unknown (flashgen check)" if e.unknown else ""))
    yield row("FLOPs of visible pairs", si(work.flops, ""),
               f"2 * (head_dim_qk + head_dim_v) * {'' if e.pairs_exact else 'at most '}{si(work.pairs, 'pairs')}")
    yield row("FLOPs issued", si(work.flops_issued, ""), "whole tiles with their padding"
               + (f", {work.flops_issued / work.flops:.3g} x the visible ones" if work.flops else ""))


def _traffic(e: Counts) -> Iterator[str]:
    t = e.traffic
    yield "device-memory bytes"
    rows = (("standard, three kernels", t.standard, f"write S, read S, write P, read P: {si(t.scores, 'B')}"),
            ("this kernel asks for", t.kernel, f"k and v per query tile: {si(t.kv, 'B')}; q, out, lse once"),
            ("law: N^2 d^2 / M", t.law, f"M = {e.plan.launch.smem_bytes} B of shared memory; k and v: "
             + (f"{t.kv / t.law:.1f} x that" if t.law else "none")),
            ("each tensor once", t.once, "if L2 serves every further read of k and v"))
    for label, value, about in rows:
        yield row(label, si(value, "B"), f"{bar(0, value, max(t.standard, 1))}  {about}")


def _percent(fraction: float) -> str:
    return f"{100 * fraction:.0f} %"


def _roofline(e: Counts) -> Iterator[str]:
    r = e.roofline
    yield f"roofline on {e.target.device.name}"
    longest = max(*r.units.values(), r.memory_kernel_ms)
    yield row("arithmetic intensity", f"{r.intensity:.0f}",
               f"FLOPs issued per byte asked for; both rates meet at {r.balance:.0f}")
    columns = e.plan.constant("MMA_COLS_QK") + e.plan.constant("MMA_COLS_V")
    about = {"tensor cores": f"{2 * columns} FLOP per score, {counts.TENSOR_FLOPS_PER_CLOCK} per SM clock"
             if e.need else "FLOPs issued",
             "exponential unit": f"1 exp2 per score, {counts.EXP2_PER_CLOCK} per SM clock",
             "issue slots": f"{counts.INSTRUCTIONS_PER_SCORE} instructions per score, "
                            f"{counts.INSTRUCTIONS_PER_CLOCK} per SM clock",
             "device memory": f"each tensor once; {r.memory_kernel_ms:.3f} ms without L2"}
    for unit, ms in r.units.items():
        share = f"{_percent(ms / r.ms):>5}: " if e.need else ""
        yield row(unit, f"{ms:.3f} ms", f"{bar(0, ms, longest)}  {share}{about[unit]}")
    need = f", if L2 serves {_percent(r.l2_share)} of the k and v bytes" if r.l2_share > 0.005 else ""
    whole = " = 100 %" if e.need else ""
    yield f"  bound: {r.bound}{whole}, {r.ms:.3f} ms = {r.tflops:.0f} TFLOP/s of visible pairs{need}"


def draw_plan(e: Any) -> Iterator[str]:
    """The parts that only the plan and its registers decide; `e` has those of an Explanation."""
    for part in (_plan, _roles, _smem, _barriers, _tensor_maps):
        yield from part(e)


_PARTS = (_head, draw_plan, _work, _traffic, _roofline)
