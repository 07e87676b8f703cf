"""Engines: what runs the text of a family, a row for each. A family names its own (Family.engine); nobody else does.

`load` gives a kernel of a device from its plan and image, `emulate` one of the CPU from its plan and source. Kernels
have a plan, num_sms and `launcher`; those of the CPU take tensors by name, the others addresses.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from flashgen.codegen.families.family import lazily
from flashgen.codegen.families.registry import FAMILIES
from flashgen.codegen.plan import Plan


class Engine(NamedTuple):
    load: Callable[..., Any]     # from (Plan, image, device index)
    emulate: Callable[..., Any]  # from (Plan, Source)


ENGINES: dict[str, Engine] = {
    "cuda": Engine(lazily("flashgen.runtime.launch.kernel", "Kernel"),
                   lazily("flashgen.runtime.emulator.kernel", "EmulatedKernel")),
    "triton": Engine(lazily("flashgen.runtime.launch.triton", "TritonKernel"),
                     lazily("flashgen.runtime.launch.triton", "InterpretedKernel")),
}


def engine_of(plan: Plan) -> Engine:
    return ENGINES[FAMILIES[plan.family].engine]
