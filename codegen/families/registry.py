"""The families, a row each, and what is asked of all of them. Light: lowering is imported when it is called."""
from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flashgen.codegen import plan as plans
from flashgen.codegen.families.fa1.family import FA1
from flashgen.codegen.families.fa2.family import FA2
from flashgen.codegen.families.fa3.family import FA3
from flashgen.codegen.families.family import Family, Pass
from flashgen.codegen.families.flashmla.family import FLASHMLA
from flashgen.codegen.families.shared.loops import KvLoop
from flashgen.codegen.families.standard.family import STANDARD
from flashgen.codegen.families.triton.family import TRITON
from flashgen.codegen.plan import Plan
from flashgen.codegen.program import Program
from flashgen.codegen.target import TARGETS, Target
from flashgen.errors import PlanError

if TYPE_CHECKING:
    from flashgen.codegen.spec.spec import Spec

FAMILIES: dict[str, Family] = {family.name: family for family in (FA2, FA3, FLASHMLA, STANDARD, FA1, TRITON)}
DEFAULT = next(family.name for family in FAMILIES.values() if family.default)


def fastest_first(op: str, *, unasked: bool = False, emulated: bool = False) -> tuple[Family, ...]:
    """The families that answer an operation. `unasked`: those that serve calls which name no spec; `emulated`: of CPU
    tensors."""
    found = (family for family in FAMILIES.values() if op in family.by_op and (family.emulated or not emulated)
             and not (unasked and family.named_only))
    return tuple(sorted(found, key=lambda family: family.rank))


def answers_by_name(spec: Any, op: str) -> bool:
    """Whether a spec's family answers an operation, and serves by name alone: then no other family should."""
    family = FAMILIES[spec.family]
    return family.named_only and op in family.by_op


def passes() -> dict[str, Pass]:
    """Each pass by name, of the first family that has one of this name."""
    found: dict[str, Pass] = {}
    for family in FAMILIES.values():
        for each in family.passes:
            found.setdefault(each.name, each)
    return found


def pass_of(one: Any) -> Pass:
    """The pass of a Spec or a Plan."""
    return FAMILIES[one.family].by_name[one.pass_]


def op_of(one: Any) -> str:
    """The operation that a Spec or a Plan answers."""
    return pass_of(one).op


def implied_family(name: str) -> str:
    """The family that a variant's name need not say again."""
    first = name.partition("_")[0]
    return next((found.name for found in FAMILIES.values() if first in (found.name, *found.short_names)), DEFAULT)


def targets_of(family: str) -> list[str]:
    return [name for name, target in TARGETS.items() if FAMILIES[family].feature in target.features]


def by_generation(op: str) -> tuple[Family, ...]:
    """The families that answer an operation, the oldest first; behind them those that do not say, the slowest first."""
    found = (family for family in FAMILIES.values() if op in family.by_op)
    return tuple(sorted(found, key=lambda family: (not family.generation, family.generation, -family.rank)))


def served_unasked(archs: list[str], op: str) -> bool:
    """Whether calls on these targets that name no spec have a family beside fallbacks, whatever it takes of them."""
    return any(not family.fallback and set(archs) & set(targets_of(family.name))
               for family in fastest_first(op, unasked=True))


def lower(spec: Spec, target: Target | None = None) -> Plan:
    """The verified plan of one variant. Raises PlanError where it cannot fit `target` (by default the spec's arch)."""
    target = target or TARGETS[spec.arch]
    plan: Plan = pass_of(spec).lower(spec, target)
    plans.verify(plan, target)
    return plan


def launch_pass(plan: Plan) -> Pass | None:
    """The pass that says how a plan is launched. A plan from a file may be of a family that nobody knows."""
    return FAMILIES[plan.family].by_name.get(plan.pass_) if plan.family in FAMILIES else None


def loops_of(plan: Plan) -> tuple[KvLoop, ...]:
    """The loops over tiles of keys of a plan's skeleton, where it has them by mask."""
    found = launch_pass(plan)
    return found.loops(plan) if found and found.loops else ()


def program_of(plan: Plan, sizes: Any, num_sms: int, *helpers: Plan) -> Program:
    """What a call with these sizes launches on `num_sms` SMs. `helpers`: plans of the program's other kernels."""
    rule = launch_pass(plan)
    if rule is None:
        raise PlanError(f"no launch rules for family {plan.family}", where=plan.kernel_name,
                        allowed=", ".join(FAMILIES))
    return rule.launch({one.step: one for one in (plan, *helpers)}, sizes, num_sms)
