"""A fault of the machine in the kernel's and the plan's own terms."""
from __future__ import annotations

import functools
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashgen.codegen.plan import Plan
from flashgen.errors import VerifyError
from flashgen.runtime.emulator.schedule import Schedule

WARP_SIZE = 32
SITE_FRAMES = 3  # innermost places that a report names


class KernelFault(VerifyError):
    """A kernel did on the emulator what a GPU punishes, or worse, does not notice. `kind` names it in one word."""

    kind: str = ""


@dataclass(frozen=True)
class TensorView:
    """What a report needs to turn a byte offset into an index."""

    name: str
    element_bytes: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # elements


@dataclass(frozen=True)
class Site:
    """A place in the kernel's code, inlined calls innermost first."""

    frames: tuple[tuple[str, str, int], ...]  # (function, file, line)

    def __str__(self) -> str:
        if not self.frames:
            return "an unknown place"
        places = [f"{Path(file).name}:{line}" for _, file, line in self.frames]
        return places[-1] + (f" (through {', '.join(reversed(places[:-1][:SITE_FRAMES]))})" if places[1:] else "")


@functools.lru_cache(maxsize=4096)
def site(kernel: str, pc: int) -> Site:
    """The source place of an offset in a kernel's shared object."""
    done = subprocess.run(["addr2line", "-f", "-i", "-e", kernel, hex(pc)], capture_output=True, text=True)
    lines = done.stdout.splitlines()
    frames = []
    for function, place in zip(lines[::2], lines[1::2], strict=False):
        file, _, line = place.partition(" ")[0].rpartition(":")
        if line.isdigit() and "/emulator/host/" not in file and not file.endswith("launch.cpp"):
            frames.append((function, file, int(line)))
    return Site(tuple(frames))


def fault_error(fault: dict[str, Any], plan: Plan, schedule: Schedule, kernel: str,
                views: Sequence[TensorView]) -> KernelFault:
    """The error for what the machine reported."""
    what = f"{fault['kind'].replace('_', ' ')}: {fault['text']}"
    if "other_pc" in fault:
        block, thread = fault["other_block"], fault["other_thread"]
        culprit = _thread(plan, block, thread) if thread >= 0 else f"{fault['other_agent']} of block {block}"
        what += f" {culprit} at {site(kernel, fault['other_pc'])}"
    lines = []
    if "thread" in fault:
        lines.append(f"  by: {_thread(plan, fault['block'], fault['thread'])}")
    if "space" in fault:
        place = _shared(plan, fault["offset"]) if fault["space"] == "shared" else _global(
            views[fault["buffer"]], fault["offset"])
        lines.append(f"  address: {place}")
    for waiter in fault["waiters"]:
        first = _thread(plan, waiter["block"], waiter["thread"])
        goal = re.sub(r"shared memory \+ (\d+)", lambda m: _shared(plan, int(m[1])), waiter["what"])
        lines.append(f"  {waiter['count']} threads, the first {first}, "
                     + (f"wait for {goal} at {site(kernel, waiter['pc'])}" if goal else "have exited"))
    lines.append(f"  replay: {schedule}")
    where = str(site(kernel, fault["pc"])) if fault["pc"] else plan.kernel_name
    error = KernelFault(what, where=where, details="\n".join(lines))
    error.kind = fault["kind"]
    return error


def _thread(plan: Plan, block: int, thread: int) -> str:
    warp, role = thread // WARP_SIZE, ""
    first = 0
    for row in plan.roles:
        if first <= warp < first + row.warps:
            role = f", role {row.name}"
        first += row.warps
    return f"thread {thread} (block {block}, warp {warp}{role})"


def _shared(plan: Plan, offset: int) -> str:
    """Which region, which stage, where in it."""
    for region in plan.smem:
        inside = offset - region.offset_bytes
        if 0 <= inside < region.size_bytes:
            stages = re.match(r"(\d+) stages", region.holds)
            if stages is None:
                return f"shared memory, {region.name} + {inside} bytes"
            stage_bytes = region.size_bytes // int(stages[1])
            return f"shared memory, {region.name} stage {inside // stage_bytes} + {inside % stage_bytes} bytes"
    return f"shared memory + {offset} bytes, in no region of the plan"


def _global(view: TensorView, offset: int) -> str:
    """The element's index, where strides nest."""
    rest, index = offset // view.element_bytes, [0] * len(view.shape)
    for axis in sorted(range(len(view.shape)), key=lambda i: -view.strides[i]):
        if view.shape[axis] != 1 and view.strides[axis]:
            index[axis], rest = divmod(rest, view.strides[axis])
    return f"{view.name}[{', '.join(map(str, index))}] of shape {list(view.shape)}, {offset:+d} bytes from its start"
