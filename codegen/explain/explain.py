"""`flashgen explain`: what a variant will do before any GPU is touched."""
from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Protocol

from flashgen.codegen.explain.cost import Cost
from flashgen.codegen.families.registry import FAMILIES, lower, pass_of, passes
from flashgen.codegen.plan import Plan
from flashgen.codegen.spec.spec import Spec, load_specs, spec_path
from flashgen.codegen.target import Target
from flashgen.errors import UnsupportedError

# The variant shown for a file when the caller names none: what most people run. Families may ask for more.
TYPICAL = {"arch": "sm_90", "dtype": "bf16", "head_dim_qk": 128, "causal": True, "window": False, "kv_layout": "dense"}


class Explanation(Protocol):
    """str() is one screen of text."""

    @property
    def plan(self) -> Plan: ...
    @property
    def shape(self) -> Any: ...
    @property
    def target(self) -> Target: ...
    def to_json(self) -> dict[str, Any]: ...
    def cost(self) -> Cost: ...


def explain(spec: Spec | str | os.PathLike[str], *, registers: int | None = None, variants: int = 1,
            **problem: Any) -> Explanation:
    """What the kernel of `spec` does for a call of these sizes (batch, seqlen_q, ...: of attention those of Shape).

    Of a spec file (a path, or the name of a shipped one) the most ordinary variant is taken, see TYPICAL. `registers`
    per thread are a build's. Raises SpecError, PlanError, and UnsupportedError for sizes that make no call.
    """
    if not isinstance(spec, Spec):
        specs = load_specs(spec_path(spec)).specs
        spec, variants = typical(specs), len(specs)
    return explain_plan(lower(spec), spec, registers=registers, variants=variants, **problem)


def explain_plan(plan: Plan, spec: Spec, *, registers: int | None = None, variants: int = 1, **problem: Any
                 ) -> Explanation:
    """`explain` for a plan that is there already, made from `spec`."""
    found = pass_of(spec)
    if found.explain is None:
        counted = [name for name, each in passes().items() if each.explain]
        raise UnsupportedError(f"{spec.variant} is of pass {spec.pass_}, whose work is not counted here",
                               where="explain", allowed=f"passes {' and '.join(counted)}",
                               next="flashgen build SPEC -o DIR writes the plan and the kernel")
    made: Explanation = found.explain(plan, spec, registers=registers, variants=variants, **problem)
    return made


def typical(specs: Sequence[Spec]) -> Spec:
    """The variant that has what its family says, and agrees with TYPICAL in most fields; the first of several."""
    def agrees(spec: Spec) -> tuple[bool, bool, int]:
        asked = FAMILIES[spec.family].typical
        return (spec.kernel == pass_of(spec).shown,
                bool(asked) and all(getattr(spec, name) == value for name, value in asked.items()),
                sum(getattr(spec, name) == value for name, value in TYPICAL.items()))
    return max(specs, key=agrees)
