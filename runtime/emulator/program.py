"""A program on the emulator: the interface of runtime/launch/program.py over CPU tensors by name."""
from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from flashgen.codegen.program import BUFFER_DTYPES, Program
from flashgen.errors import VerifyError
from flashgen.runtime.emulator.kernel import EmulatedKernel
from flashgen.runtime.emulator.schedule import current_schedule

if TYPE_CHECKING:
    from torch import Tensor


class EmulatedProgram:
    """A program with all but a call's tensors fixed."""

    def __init__(self, program: Program, kernels: Mapping[str, EmulatedKernel]) -> None:
        self._buffers = program.buffers
        self._steps = [(kernels[step.kernel].plan, kernels[step.kernel].launcher(step)) for step in program.steps]

    def __call__(self, tensors: Mapping[str, Tensor | None]) -> None:
        """Run it on CPU tensors, named as the plans' pointers; None or none is a null pointer.

        Raises as emulator.kernel.launch, and VerifyError if a kernel leaves a counter that is not zero.
        """
        made = self._buffers_of_a_call()
        filled = {buffer.name for buffer in self._buffers if buffer.life != "scratch"}
        for plan, launch in self._steps:
            launch({**tensors, **made}, filled)
            filled.update(plan.pointers)  # what one kernel wrote, a later one may add to
            for buffer in self._buffers:
                if buffer.life == "counters" and buffer.name in plan.pointers:
                    _check_zero(made[buffer.name], plan.kernel_name)

    def _buffers_of_a_call(self) -> dict[str, Tensor]:
        import torch

        return {name: (torch.empty if life == "scratch" else torch.zeros)(
            shape, dtype=getattr(torch, BUFFER_DTYPES[dtype])) for name, dtype, shape, life in self._buffers
            if math.prod(shape)}


def _check_zero(counters: Tensor, kernel_name: str) -> None:
    if counters.any():
        word = int(counters.nonzero()[0])
        raise VerifyError(f"the kernel leaves counter {word} of {len(counters)} at {int(counters[word])}",
                          where=kernel_name, allowed="all zero, as the next launch on the stream expects them",
                          details=f"  replay: {current_schedule()}")
