"""Every shipped FA2 kernel on the emulator: right, and without a fault of any kind. Policies take turns."""
from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from emulator_kit import distinct_plans, failures_in_turn, problems_of, shipped, solve, with_nans_in_v
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling import SOAK_RUNS, in_turn
from strategies import problems

from flashgen.codegen.spec.spec import Spec
from flashgen.runtime.emulator.schedule import POLICIES, Schedule
from flashgen.runtime.ops.attention.edges import masks
from flashgen.runtime.verify.compare import check_bits

PLANS = distinct_plans("fa2")
SMALL = shipped("fa2_fwd_bf16_d64_window")


@pytest.mark.parametrize("number, spec", [*enumerate(s for s, _ in PLANS)], ids=[p.kernel_name for _, p in PLANS])
def test_every_kernel(number: int, spec: Spec) -> None:
    """fp16 kernels differ from bf16 ones in three instructions, so one problem of each mask does for them."""
    chosen = problems_of(spec)
    if spec.dtype == "fp16":
        chosen = [p for p in chosen if p.causal != "top_left"][::3]
    failures = failures_in_turn(spec, number, chosen)
    assert not failures, "\n\n".join(failures[:3])


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


@pytest.mark.parametrize("variant", ["fa2_fwd_bf16_d64_causal", "fa2_fwd_fp16_d32_window", "fa2_fwd_bf16_d64_varlen"])
def test_nan_in_values(variant: str) -> None:
    """The rare path of nonfinite.cuh: a non-finite value reaches the rows that see it, and no other."""
    spec = shipped(variant)
    for number, problem in enumerate(problems_of(spec)):
        for policy in in_turn(POLICIES, number + len(variant)):
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
