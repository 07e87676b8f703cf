"""Whether a plan that came from a file can be launched: its smallest call is packed, as a real one would be.

What a launch reads of a plan (constants, spec fields, parameter names) is known to the launch rules alone, so they are
asked instead of a second list of names.
"""
from __future__ import annotations

import struct

from flashgen.codegen.families.registry import launch_pass, program_of
from flashgen.codegen.plan import Plan
from flashgen.errors import PlanError
from flashgen.runtime.launch.kernel import pack_params
from flashgen.runtime.launch.tensor_map import ELEMENTS, map_shapes

# Packed sequences set one tile aside, and a backward's postprocess has up to four groups of rows for each tile.
MOST_BLOCKS = 8


def check_launch(plan: Plan) -> None:
    """PlanError unless the smallest call can be packed for the plan. Families without launch rules are not asked for:
    no lookup finds them."""
    rule = launch_pass(plan)
    if rule is None:
        return
    try:
        program = program_of(plan, rule.smallest(plan), 1)
        for step in program.with_values({p.name: 0 for p in plan.params if p.name.startswith("user_")}).steps:
            pack_params(plan, step.values)
            if not 1 <= step.grid_x <= MOST_BLOCKS:
                raise PlanError(f"a grid of {step.grid_x} for one query on one SM", allowed=f"1 to {MOST_BLOCKS}")
            if {shape.dtype for shape in map_shapes(plan, step.values)} - ELEMENTS.keys():
                raise PlanError(f"a tensor map of {plan.spec_value('dtype')}", allowed=", ".join(ELEMENTS))
    except (ArithmeticError, LookupError, TypeError, ValueError, struct.error) as err:
        raise PlanError(f"no call can be packed for it ({type(err).__name__}: {err})",
                        where=plan.kernel_name, allowed="what the launch rules of its family read") from err
