"""spec -> plan: one module per family."""
from __future__ import annotations

from flashgen.codegen import plan as plans
from flashgen.codegen.families.fa2 import lower as fa2
from flashgen.codegen.families.fa3 import lower as fa3
from flashgen.codegen.families.flashmla import lower as flashmla
from flashgen.codegen.plan import Plan
from flashgen.codegen.spec.spec import Spec
from flashgen.codegen.target import TARGETS, Target
from flashgen.errors import PlanError

FAMILIES = {("fa2", "fwd"): fa2.lower, ("fa3", "fwd"): fa3.lower, ("flashmla", "decode"): flashmla.lower_decode,
            ("flashmla", "schedule"): flashmla.lower_schedule}


def lower(spec: Spec, target: Target | None = None) -> Plan:
    """The verified plan of one variant. Raises PlanError where it cannot fit `target` (by default the spec's arch)."""
    target = target or TARGETS[spec.arch]
    family = FAMILIES.get((spec.family, spec.pass_))
    if family is None:
        raise PlanError(f"no lowering for family {spec.family}, pass {spec.pass_}", where=spec.variant,
                        allowed=", ".join("/".join(key) for key in FAMILIES))
    plan = family(spec, target)
    plans.verify(plan, target)
    return plan
