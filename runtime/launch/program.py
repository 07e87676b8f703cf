"""A program bound to a device: its kernels loaded, its buffers placed, and each pointer's position known."""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from flashgen.codegen.plan import Plan
from flashgen.codegen.program import BUFFER_DTYPES, Buffer, Program
from flashgen.errors import PlanError
from flashgen.runtime.launch.counters import counters_of
from flashgen.runtime.launch.kernel import Kernel, picker


class BoundProgram:
    """A program with all but the addresses of a call's tensors fixed. Not for two threads at once, as its launchers."""

    def __init__(self, program: Program, kernels: Mapping[str, Kernel], names: Sequence[str],
                 device: torch.device) -> None:
        """`names`: the tensors of a call, in the order in which calls give their addresses. Plans name their pointers
        after these and the program's buffers; PlanError for a pointer that neither has."""
        order = [*names, *(buffer.name for buffer in program.buffers)]
        self._steps = [(kernels[step.kernel].launcher(step), picker(positions(kernels[step.kernel].plan, order)))
                       for step in program.steps]
        self._buffers = [_source(buffer, device) for buffer in program.buffers]

    def __call__(self, stream: int, addresses: list[int]) -> None:
        """Launch all steps on `stream`, torch's current one on this device, which is the current one."""
        if self._buffers:
            held = [take(stream) for take in self._buffers]  # freed after the launches, for what follows on the stream
            addresses = addresses + [x if type(x) is int else x.data_ptr() for x in held]
        for launch, pick in self._steps:
            launch(stream, *pick(addresses))


def positions(plan: Plan, order: Sequence[str]) -> list[int]:
    """Where each pointer of a plan is among the named ones."""
    places = {name: place for place, name in enumerate(order)}
    if unknown := [name for name in plan.pointers if name not in places]:
        raise PlanError(f"no call gives it the pointer {unknown[0]}", where=plan.kernel_name, allowed=", ".join(order))
    return [places[name] for name in plan.pointers]


def _source(buffer: Buffer, device: torch.device) -> Callable[[int], Any]:
    """A function of the stream that gives a buffer for one call: its tensor, or its address."""
    if buffer.life == "counters":
        return counters_of(device.index, buffer.size).slot
    if not buffer.size:
        return lambda stream: 0
    like = torch.empty(0, dtype=getattr(torch, BUFFER_DTYPES[buffer.dtype]), device=device)
    make = like.new_zeros if buffer.life == "zeroed" else like.new_empty  # the cheapest way to an allocation
    return lambda stream: make(buffer.size)


def bind(program: Program, kernels: Mapping[str, Any], names: Sequence[str], device: torch.device) -> Any:
    """A BoundProgram of Kernels on a CUDA device, an EmulatedProgram of EmulatedKernels on the CPU."""
    if device.type == "cpu":
        from flashgen.runtime.emulator.program import EmulatedProgram

        return EmulatedProgram(program, kernels)
    return BoundProgram(program, kernels, names, device)
