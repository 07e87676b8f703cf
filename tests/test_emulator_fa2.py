"""Every shipped FA2 kernel on the emulator: right under every policy, and without a fault of any kind."""
from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch
from emulator_kit import distinct_plans, problems_of, shipped, solve, with_nans_in_v
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import problems

from flashgen.codegen.plan import Plan
from flashgen.codegen.spec import Spec
from flashgen.runtime.compare import check_bits
from flashgen.runtime.edges import masks
from flashgen.runtime.emulator.schedule import POLICIES, Schedule
from flashgen.runtime.verify import verify_spec

PLANS = distinct_plans("fa2")
SMALL = shipped("fa2_fwd_bf16_d64_window")
SOAK_RUNS = int(os.environ.get("EMULATOR_SOAK_RUNS", "0"))  # of correct kernels; recorded in docs/emulator.md


@pytest.mark.parametrize("spec, plan", PLANS, ids=[plan.kernel_name for _, plan in PLANS])
def test_every_kernel(spec: Spec, plan: Plan) -> None:
    """fp16 kernels differ from bf16 ones in three instructions, so one problem of each mask does for them."""
    chosen = None if spec.dtype == "bf16" else [p for p in problems_of(spec) if p.causal != "top_left"][::3]
    failures = [row for row in verify_spec([spec], problems=chosen, emulate=True) if not row.ok]
    assert not failures, "\n\n".join(row.message for row in failures[:3])


def test_the_plans_cover_the_families_of_kernels() -> None:
    seen = {(plan.constant("HEAD_DIM_QK"), dict(plan.slots)["mask"], dict(plan.slots)["layout"], spec.dtype)
            for spec, plan in PLANS}
    assert {mask for _, mask, _, _ in seen} == {"full", "causal", "window"}
    assert len(seen) == 7 * 3 * 2 * 2 - 3 * 2 * 2  # head dims (192, 192) and (192, 128) share head_dim_qk
    assert {plan.constant("NUM_STAGES") for _, plan in PLANS} == {2, 3}


@pytest.mark.parametrize("variant", ["fa2_fwd_bf16_d64_window", "fa2_fwd_bf16_d32_window_varlen",
                                     "fa2_fwd_fp16_d64_causal", "fa2_fwd_bf16_d128_causal_varlen"])
@settings(deadline=None, derandomize=True, max_examples=15)
@given(data=st.data())
def test_random_problems(variant: str, data: st.DataObject) -> None:
    spec = shipped(variant)
    problem = data.draw(problems(masks=masks(spec), varlen=spec.kv_layout == "varlen", dtype=spec.dtype,
                                 head_dims=(spec.head_dim_qk, spec.head_dim_v), tile_m=64, tile_n=32))
    problem = replace(problem, num_heads_q=min(problem.num_heads_q, 2), num_heads_kv=1)
    schedule = Schedule(data.draw(st.sampled_from(POLICIES)), data.draw(st.integers(0, 2**32)),
                        resident=data.draw(st.integers(1, 3)))
    solve(spec, problem.make_inputs(), schedule, f"{problem}, {schedule}")


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("variant", ["fa2_fwd_bf16_d64_causal", "fa2_fwd_fp16_d32_window", "fa2_fwd_bf16_d64_varlen"])
def test_nan_in_values(variant: str, policy: str) -> None:
    """The rare path of nonfinite.cuh: a non-finite value reaches the rows that see it, and no other."""
    spec = shipped(variant)
    for problem in problems_of(spec):
        solve(spec, with_nans_in_v(problem.make_inputs()), Schedule(policy))


def test_results_do_not_depend_on_the_schedule() -> None:
    inputs = problems_of(SMALL)[3].make_inputs()
    first = solve(SMALL, inputs, Schedule("eager"))
    for seed in range(5):
        check_bits(solve(SMALL, inputs, Schedule("random", seed, resident=1 + seed)), first, f"seed {seed}")


def test_strided_and_misaligned_tensors() -> None:
    """Rows between those of a strided tensor are no part of it, and the kernel stays out of them."""
    problem = problems_of(SMALL)[0]
    inputs = problem.make_inputs()
    wide = torch.full((*inputs.k.shape[:2], 2, *inputs.k.shape[2:]), float("nan"), dtype=inputs.k.dtype)
    wide[:, :, 0] = inputs.k
    plain = solve(SMALL, inputs, Schedule())
    check_bits(solve(SMALL, inputs.with_(k=wide[:, :, 0]), Schedule()), plain, "k strided")


@pytest.mark.skipif(not SOAK_RUNS, reason="EMULATOR_SOAK_RUNS is not set")
def test_soak() -> None:
    """No false alarm in many seeded runs of correct kernels."""
    small = [spec for spec, plan in PLANS if plan.constant("HEAD_DIM_QK") <= 128]
    for run in range(SOAK_RUNS):
        spec = small[run % len(small)]
        chosen = problems_of(spec, seed=run)
        problem = chosen[run // len(small) % len(chosen)]
        inputs = problem.make_inputs()
        if run % 5 == 0:
            inputs = with_nans_in_v(inputs)
        solve(spec, inputs, Schedule(POLICIES[run % 3], run, resident=1 + run % 3), f"run {run}: {problem}")
