"""A program bound to a device: its kernels loaded, its buffers placed, and each pointer's position known."""
from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from flashgen.codegen.program import BUFFER_DTYPES, Buffer, Program
from flashgen.runtime.launch.counters import counters_of
from flashgen.runtime.launch.kernel import Kernel


class BoundProgram:
    """A program with all but the addresses of a call's tensors fixed. Not for two threads at once, as its launchers."""

    def __init__(self, program: Program, kernels: Mapping[str, Kernel], names: Sequence[str],
                 device: torch.device) -> None:
        """`names`: the tensors of a call, in the order in which calls give their addresses. Plans name their pointers
        after these and the program's buffers; PlanError for a pointer that neither has."""
        buffers = sorted(program.buffers, key=_is_allocated)
        order = [*names, *(buffer.name for buffer in buffers)]
        self.launchers = [kernels[step.kernel].launcher(step, order) for step in program.steps]
        self._places = [_place(buffer, device) for buffer in buffers if not _is_allocated(buffer)]
        self._allocations = [_allocation(buffer, device) for buffer in buffers if _is_allocated(buffer)]

    def __call__(self, stream: int, addresses: list[int]) -> None:
        """Launch all steps on `stream`, torch's current one on this device, which is the current one. The list becomes
        longer."""
        for place in self._places:
            addresses.append(place(stream))
        if self._allocations:
            held = [allocate() for allocate in self._allocations]  # freed when all is launched, for what follows
            addresses += [t.data_ptr() for t in held]
        for launch in self.launchers:
            launch(stream, addresses)


def _is_allocated(buffer: Buffer) -> bool:
    """Whether each call has its own."""
    return buffer.life != "counters" and buffer.size > 0


def _place(buffer: Buffer, device: torch.device) -> Callable[[int], int]:
    """The address of a buffer that no call allocates, as a function of the stream."""
    return counters_of(device.index, buffer.size).slot if buffer.life == "counters" else lambda stream: 0


def _allocation(buffer: Buffer, device: torch.device) -> Callable[[], torch.Tensor]:
    like = torch.empty(0, dtype=getattr(torch, BUFFER_DTYPES[buffer.dtype]), device=device)
    make = like.new_zeros if buffer.life == "zeroed" else like.new_empty  # the cheapest way to an allocation
    return functools.partial(make, buffer.size)


def bind(program: Program, kernels: Mapping[str, Any], names: Sequence[str], device: torch.device) -> Any:
    """On the CPU an EmulatedProgram of EmulatedKernels, else what launches Kernels: a BoundProgram, or a launcher that
    needs none around it."""
    if device.type == "cpu":
        from flashgen.runtime.emulator.program import EmulatedProgram

        return EmulatedProgram(program, kernels)
    bound = BoundProgram(program, kernels, names, device)
    return bound if program.buffers or len(bound.launchers) != 1 else bound.launchers[0]
