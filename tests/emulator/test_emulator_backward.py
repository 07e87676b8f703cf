"""The shipped kernels of the backward on the emulator: right, and without a fault of any kind. Kernels take turns."""
from __future__ import annotations

import pytest
from emulator_kit import distinct_plans, failures_in_turn, text_of
from sampling import one_in

from flashgen.codegen.families.registry import lower, pass_of
from flashgen.codegen.plan import Plan
from flashgen.codegen.spec.spec import Spec
from flashgen.runtime.ops.registry import op_of

FAMILIES = ("fa2", "fa3")
TURNS = 7  # a kernel's turn comes with one commit of so many; no divisor of the masks, layouts and dtypes of a head dim
MAIN_KERNEL = "gradients"
GRADIENTS = [pair for family in FAMILIES for pair in distinct_plans(family, "bwd", MAIN_KERNEL)]
SAMPLE = one_in(TURNS, [(number, spec, plan) for number, (spec, plan) in enumerate(GRADIENTS)])


@pytest.mark.parametrize("number, spec, plan", SAMPLE, ids=[plan.kernel_name for _, _, plan in SAMPLE])
def test_every_kernel(number: int, spec: Spec, plan: Plan) -> None:
    """Each with the kernels that a call launches around it, and one policy for each problem."""
    problems = list(op_of(spec).problems(spec, plan, seed=0, emulated=True))
    failures = failures_in_turn(spec, number // TURNS, problems)
    assert not failures, "\n\n".join(failures[:3])


def test_the_plans_cover_the_families_of_kernels() -> None:
    seen = {(spec.family, spec.head_dim_qk, spec.head_dim_v, dict(plan.slots)["queries"], spec.kv_layout, spec.dtype)
            for spec, plan in GRADIENTS}
    assert {mask for _, _, _, mask, *_ in seen} == {"full", "causal", "window"}
    dims = {family: {(qk, v) for name, qk, v, *_ in seen if name == family} for family in FAMILIES}
    assert all({(64, 64), (128, 128), (192, 128)} <= dims[family] for family in FAMILIES)
    assert len(seen) == sum(map(len, dims.values())) * 3 * 2 * 2  # masks, layouts, dtypes


@pytest.mark.parametrize("family", FAMILIES)
def test_the_kernels_around_them_are_all_launched(family: str) -> None:
    calls = [spec for spec, _ in GRADIENTS if spec.family == family]
    for step in {*pass_of(calls[0]).kernel_names} - {MAIN_KERNEL}:
        launched = {text_of(lower(spec.with_(kernel=step))) for spec in calls}
        assert {text_of(plan) for _, plan in distinct_plans(family, "bwd", str(step))} <= launched
