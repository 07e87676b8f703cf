"""The launch rules of all families, a row for each pass. Nothing here or below loads specs, pydantic or Jinja."""
from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from flashgen.codegen.families.fa2 import launch as fa2
from flashgen.codegen.families.fa3 import launch as fa3
from flashgen.codegen.families.flashmla import launch as flashmla
from flashgen.codegen.families.shared.launch import smallest_call
from flashgen.codegen.plan import Plan
from flashgen.codegen.program import Program
from flashgen.errors import PlanError


class Rule(NamedTuple):
    """`launch` takes plans by pass, the sizes of a call and the number of SMs. `smallest`: the sizes of the smallest
    call of a plan."""

    launch: Callable[[Mapping[str, Plan], Any, int], Program]
    smallest: Callable[[Plan], Any]


RULES: dict[tuple[str, str], Rule] = {  # by family and by the pass that a call is named after
    ("fa2", "fwd"): Rule(fa2.launch, smallest_call),
    ("fa3", "fwd"): Rule(fa3.launch, smallest_call),
    ("flashmla", "schedule"): Rule(flashmla.launch_schedule, flashmla.smallest_queries),
    ("flashmla", "decode"): Rule(flashmla.launch_decode, flashmla.smallest_decode),
}


def program_of(plan: Plan, sizes: Any, num_sms: int, *helpers: Plan) -> Program:
    """What a call with these sizes launches on `num_sms` SMs. `helpers`: plans of kernels that run before `plan`'s."""
    rule = RULES.get((plan.family, plan.pass_))
    if rule is None:
        raise PlanError(f"no launch rules for family {plan.family}", where=plan.kernel_name,
                        allowed=", ".join(sorted({family for family, _ in RULES})))
    return rule.launch({one.pass_: one for one in (plan, *helpers)}, sizes, num_sms)
