"""The timeline of one block: what each warp does and waits for, and what is in flight meanwhile.

The machine (src/trace.cpp) times each event in the warp's own order by the clocks of costs.py; trace_draw.py draws.
"""
from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

from flashgen.codegen.explain.counts import Shape
from flashgen.codegen.families.registry import lower
from flashgen.codegen.plan import Plan
from flashgen.codegen.render import render
from flashgen.codegen.spec.spec import Spec
from flashgen.errors import UnsupportedError
from flashgen.runtime.emulator.kernel import Statistics, emulated_sms
from flashgen.runtime.emulator.report import site
from flashgen.runtime.emulator.schedule import Schedule, collecting, scheduled
from flashgen.runtime.ops.attention.problem import Problem

KINDS = ("arithmetic", "exponentials", "tensor cores", "fragments", "shuffles", "copies", "waits")  # Kind of trace.h
WAITS = KINDS.index("waits")
BURST_CLOCKS = 200.0  # what one line issues after a longer pause is another tile's
DEFAULTS = {"fwd": {"batch": 1, "seqlen_q": 256, "num_heads_q": 1},
            "decode": {"batch": 1, "seqlen_q": 1, "seqlen_kv": 320, "num_heads_q": 64}}
DEPTHS = {"fa2": 1, "fa3": 2, "flashmla": 3}  # calls from the kernel's body to the statements that tell what happens


@dataclass(frozen=True)
class Span:
    """Consecutive events of one row that come from one line of the kernel. Times in clocks."""

    row: int                   # a warp; the number of warps: copies in flight; one more: products in flight
    line: int                  # of the kernel's text, 0: unknown
    begin: float
    end: float
    issued: float              # begin of its last event
    clocks: tuple[float, ...]  # by kind; those of what is in flight overlap
    events: tuple[int, ...]    # by kind

    @property
    def kind(self) -> int:
        return max(range(len(KINDS)), key=lambda kind: self.clocks[kind])


@dataclass(frozen=True)
class Timeline:
    """`lines`: the kernel's text, its first line at 1. `warps`: of a block of this launch."""

    plan: Plan
    title: str
    lines: Sequence[str]
    spans: Sequence[Span]
    warps: int

    @property
    def clocks(self) -> float:
        return max(span.end for span in self.spans)

    def text(self, span: Span) -> str:
        return self.lines[span.line].strip() if 0 < span.line < len(self.lines) else ""

    def label(self, span: Span) -> str:
        """The function that the line calls; in flight, the type of what it copies."""
        call = re.search(r"\b(?!(?:if|for|while)\b)(\w+)(?:<(\w+)[^;()]*>)?\(", self.text(span))
        if call is None:
            return ""
        return call[2] if span.row >= self.warps and call[2] else call[1]

    def hint(self, span: Span) -> str:
        parts = ", ".join(f"{events} {kind} {clocks:.0f}" if span.row < self.warps else f"{events} {kind}"
                          for kind, clocks, events in zip(KINDS, span.clocks, span.events, strict=True) if events)
        return (f"line {span.line}: {self.text(span)}\n{span.begin:.0f} to {span.end:.0f}: "
                f"{span.end - span.begin:.0f} clocks ({parts})")

    def rows(self) -> Iterator[tuple[str, list[Span]]]:
        """(label, spans that do not overlap): copies in flight, a row per warp by role, products in flight."""
        yield from self._in_flight("copies in flight", self.warps)
        names = [f"{role.name}, warp" for role in self.plan.roles for _ in range(role.warps)]
        for warp, name in enumerate(names[:self.warps]):
            yield f"{name} {warp}", [span for span in self.spans if span.row == warp]
        yield from self._in_flight("products in flight", self.warps + 1)

    def _in_flight(self, label: str, row: int) -> Iterator[tuple[str, list[Span]]]:
        lanes: list[list[Span]] = []
        for span in sorted((s for s in self.spans if s.row == row), key=lambda s: (s.begin, s.line)):
            lane = next((lane for lane in lanes if lane[-1].end <= span.begin), None)
            if lane is None:
                lanes.append(lane := [])
            lane.append(span)
        return ((label if i == 0 else "", lane) for i, lane in enumerate(lanes))

    def trips(self) -> list[tuple[str, float, float]]:
        """(the kernel's own heading, begin, end) as the busiest warp passes it; later trips of a loop: "next trip"."""
        busy = [sum(sum(s.clocks[:WAITS]) for s in self.spans if s.row == warp) for warp in range(self.warps)]
        own = [s for s in self.spans if s.row == busy.index(max(busy)) and s.end - s.begin > self.clocks / 200]
        found: list[tuple[str, float, float]] = []
        heading, line = None, 0
        for span in sorted(own, key=lambda s: s.begin):
            name = self._heading(span.line)
            if name != heading or span.line < line:
                found.append((name if name != heading else "next trip", found[-1][2] if found else 0.0, span.end))
            else:
                found[-1] = (*found[-1][:2], span.end)
            heading, line = name, span.line
        return found

    def _heading(self, line: int) -> str:
        """Of the `// ---- ` comments, the last one above a line."""
        above = [match[1] for text in self.lines[:line] if (match := re.match(r"\s*// ---- (.*)", text))]
        return above[-1] if above else ""


def _line(frames: tuple[tuple[str, str, int], ...], depth: int) -> int:
    """Of the kernel's body, or where that only hands out roles, of a function `depth` - 1 calls inside it."""
    outer = list(takewhile(lambda frame: frame[1] == frames[-1][1], reversed(frames[-depth:])))
    return outer[-1][2] if outer else 0


def spans(statistics: Statistics, depth: int = 1) -> list[Span]:
    """The events of a trace, joined where a row stays on one line of the kernel; waits stay apart."""
    found: list[Span] = []
    warps = statistics.warps
    last: dict[tuple[int, int], int] = {}  # where the row's open span is; in flight, each line has its own
    for row, kind, pc, begin, end in sorted(statistics.trace, key=lambda event: (event[0], event[3])):
        line = _line(site(statistics.kernel, pc).frames, depth)
        key = (row, 0 if row < warps else line)
        old = found[last[key]] if key in last else None
        if old is None or (old.line != line or (old.kind == WAITS) != (kind == WAITS) if row < warps
                           else begin > old.issued + BURST_CLOCKS):
            last[key] = len(found)
            found.append(Span(row, line, begin, end, begin, (0.0,) * len(KINDS), (0,) * len(KINDS)))
        old = found[last[key]]
        found[last[key]] = replace(
            old, end=max(old.end, end), issued=begin,
            clocks=tuple(x + (end - begin) * (i == kind) for i, x in enumerate(old.clocks)),
            events=tuple(x + (i == kind) for i, x in enumerate(old.events)))
    return found


def timeline(spec: Spec, sizes: dict[str, Any] | None = None, block: int = 0) -> Timeline:
    """Of one block of a call. `sizes`: of `explain`, over DEFAULTS. UnsupportedError if the grid has no such block."""
    if spec.pass_ not in DEFAULTS:
        raise UnsupportedError(f"{spec.variant} is of pass {spec.pass_}", where="trace", allowed=", ".join(DEFAULTS))
    shape, plan = Shape.of(**{**DEFAULTS[spec.pass_], **(sizes or {})}), lower(spec)
    with scheduled(Schedule("eager", resident=1, traced_block=block)):
        rows = (_decode if spec.pass_ == "decode" else _attention)(spec, shape)
    found = spans(rows[0], DEPTHS[plan.family]) if rows else []
    if not found:
        raise UnsupportedError(f"block {block} does nothing", where="--block", allowed="a block with work to do",
                               nearest="--block 0")
    title = f"{plan.kernel_name}: block {block} of a call with " + ", ".join(
        f"{name} {getattr(shape, name)}" for name in ("batch", "seqlen_q", "seqlen_kv", "num_heads_q"))
    return Timeline(plan, title, ["", *render(plan).text.splitlines()], found, rows[0].warps)


def _attention(spec: Spec, shape: Shape) -> list[Statistics]:
    import torch

    import flashgen

    varlen = spec.kv_layout == "varlen"
    seqlen_q, seqlen_kv = ((n,) * shape.batch if varlen else n for n in (shape.seqlen_q, shape.seqlen_kv))
    inputs = Problem(shape.batch, seqlen_q, seqlen_kv, shape.num_heads_q, shape.num_heads_kv, spec.head_dim_qk,
                     spec.head_dim_v or spec.head_dim_qk, spec.causal, shape.window, spec.dtype).make_inputs()
    with torch.no_grad(), collecting() as rows:
        flashgen.attention(inputs.q, inputs.k, inputs.v, **inputs.keywords, spec=spec)
    return rows


def _decode(spec: Spec, shape: Shape) -> list[Statistics]:
    """On as many SMs as a request has blocks of rows: none is cut, whose parts would have to be resident together."""
    import flashgen
    from flashgen.codegen.families.flashmla.launch import row_blocks
    from flashgen.codegen.families.shared.launch import QuerySizes
    from flashgen.runtime.ops.mla_decode.problem import MlaProblem

    inputs = MlaProblem((shape.seqlen_kv,) * shape.batch, shape.num_heads_q, shape.seqlen_q, spec.page_size,
                        spec.head_dim_qk, dtype=spec.dtype).make_inputs()
    with emulated_sms(row_blocks(QuerySizes(shape.batch, shape.seqlen_q, shape.num_heads_q))):
        schedule = flashgen.mla_schedule(inputs.seqlens_kv, shape.num_heads_q, shape.seqlen_q)
        with collecting() as rows:
            flashgen.mla_decode(inputs.q, inputs.kv_cache, inputs.seqlens_kv, **inputs.keywords, schedule=schedule,
                                spec=spec)
    return rows
