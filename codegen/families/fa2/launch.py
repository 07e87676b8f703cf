"""How a call of fa2 is launched: one block per query tile."""
from __future__ import annotations

from collections.abc import Mapping

from flashgen.codegen.families.shared.launch import Sizes, tiled_values
from flashgen.codegen.plan import Plan
from flashgen.codegen.program import Program, Step


def launch(plans: Mapping[str, Plan], sizes: Sizes, num_sms: int) -> Program:
    """The program of a forward call, on any number of SMs."""
    plan = plans["fwd"]
    values = tiled_values(plan, plan.constant("BLOCK_M"), sizes)
    return Program((Step("fwd", int(values["num_tiles"]), plan.launch.threads, values),))
