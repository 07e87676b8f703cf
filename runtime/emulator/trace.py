"""The timeline of one block: what each warp does and waits for, and what is in flight meanwhile.

The machine (src/trace.cpp) times each event in the warp's own order by the clocks of costs.py; trace_draw.py draws.
"""
from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

from flashgen.codegen.explain.counts import Shape
from flashgen.codegen.families.registry import FAMILIES, lower
from flashgen.codegen.plan import Plan
from flashgen.codegen.render import render
from flashgen.codegen.spec.spec import Spec
from flashgen.errors import UnsupportedError
from flashgen.runtime.emulator.kernel import Statistics, emulated_sms
from flashgen.runtime.emulator.report import site
from flashgen.runtime.emulator.schedule import Schedule, collecting, scheduled
from flashgen.runtime.emulator.toolchain import compile_kernel
from flashgen.runtime.ops.registry import op_of

KINDS = ("arithmetic", "exponentials", "tensor cores", "fragments", "shuffles", "copies", "waits")  # Kind of trace.h
WAITS = KINDS.index("waits")
BURST_CLOCKS = 200.0  # what one line issues after a longer pause is another tile's


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
    """Of one block of a call. `sizes`: of `explain`, over the operation's. UnsupportedError if the grid has no such
    block."""
    import torch

    op = op_of(spec)
    if spec.pass_ not in op.EXAMPLES:
        raise UnsupportedError(f"{spec.variant} is of pass {spec.pass_}", where="trace", allowed=", ".join(op.EXAMPLES))
    shape, plan = Shape.of(**{**op.EXAMPLES[spec.pass_], **(sizes or {})}), lower(spec)
    example = op.example(spec, shape)
    sms = emulated_sms(example.num_sms) if example.num_sms else nullcontext()
    with torch.no_grad(), sms, scheduled(Schedule("eager", resident=1, traced_block=block)):
        call = example.prepare()
        with collecting() as rows:
            call()
    source = render(plan)
    own = [row for row in rows if row.kernel == str(compile_kernel(source))]  # a call may launch others before it
    found = spans(own[0], FAMILIES[plan.family].trace_depth) if own else []
    if not found:
        raise UnsupportedError(f"block {block} does nothing that is timed", where="--block",
                               allowed="a block with work to do", nearest="--block 0")
    title = f"{plan.kernel_name}: block {block} of a call with " + ", ".join(
        f"{name} {getattr(shape, name)}" for name in ("batch", "seqlen_q", "seqlen_kv", "num_heads_q"))
    return Timeline(plan, title, ["", *source.text.splitlines()], found, own[0].warps)
