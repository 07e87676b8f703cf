"""Every shipped FA3 kernel on the emulator: right on grids of any size, and without a fault. Policies
take turns: sampling.py.

tests/emulator/test_emulator_fa3_faults.py is its other half: what is taken out of these kernels is missed.
"""
from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from unittest import mock

import pytest
import torch
from emulator_kit import distinct_plans, failures_in_turn, problems_of, shipped, solve, with_nans_in_v
from hypothesis import given, settings
from hypothesis import strategies as st
from kit import tiles_of_warpgroups
from sampling import SOAK_RUNS, in_turn
from strategies import edge_lengths, problems

from flashgen.codegen.families.fa3 import split
from flashgen.codegen.families.registry import lower, program_of
from flashgen.codegen.families.shared.launch import Sizes
from flashgen.codegen.plan import Plan
from flashgen.codegen.spec.spec import Spec
from flashgen.errors import PlanError, UnsupportedError
from flashgen.runtime.emulator.kernel import emulated_sms
from flashgen.runtime.emulator.schedule import POLICIES, Schedule
from flashgen.runtime.ops.attention.edges import company_problem, masks
from flashgen.runtime.ops.attention.op import alone_and_in_company, future_keys, head_major, spread, strided
from flashgen.runtime.ops.attention.problem import Problem
from flashgen.runtime.verify.compare import check_bits
from flashgen.runtime.verify.subject import Subject

PLANS = distinct_plans("fa3")


@pytest.fixture(autouse=True)
def _tall_tiles() -> Iterator[None]:
    """The lengths of problems are about tiles of all warpgroups."""
    with tiles_of_warpgroups():
        yield


def fa3(variant: str) -> Spec:
    return shipped(f"fa3_fwd_{variant}", "sm_90a")


def small(**changes: object) -> Spec:
    """A kernel with tiles so small that short sequences have many of them."""
    return fa3("bf16_d64").with_(**{"tile": {"m": 128, "n": 32}, "stages": 2, **changes})


def problem_of(spec: Spec, seqlen_q: int | tuple[int, ...], seqlen_kv: int | tuple[int, ...],
               heads: tuple[int, int] = (2, 1), batch: int = 1, **more: object) -> Problem:
    return Problem(batch, seqlen_q, seqlen_kv, *heads, spec.head_dim_qk, spec.head_dim_v, dtype=spec.dtype,
                   **{"causal": spec.causal, **more})  # type: ignore[arg-type]


def test_the_plans_cover_the_families_of_kernels() -> None:
    seen = {(plan.constant("HEAD_DIM_QK"), plan.constant("HEAD_DIM_V"), dict(plan.slots)["mask"],
             dict(plan.slots)["coordinates"], spec.split, spec.pack_gqa, spec.dtype) for spec, plan in PLANS}
    assert len(seen) == len(PLANS) == 6 * 2 * (3 * 2 + 2 * 2)  # head dims, dtypes; masks, layouts; masks, packed
    flags = [dict(plan.flags) for _, plan in PLANS]
    for flag in ("pingpong", "over_queries", "tile_counter", "stores_rows", "pack_gqa", "filters_nonfinite"):
        assert {f[flag] for f in flags} == {False, True}, flag


@pytest.mark.parametrize("number, spec", [*enumerate(s for s, _ in PLANS)], ids=[p.kernel_name for _, p in PLANS])
def test_every_kernel(number: int, spec: Spec) -> None:
    """fp16 kernels differ from bf16 ones in the types of instructions, so one problem does for them; of a window
    kernel's masks a problem each, in turn."""
    chosen = problems_of(spec)
    if spec.window:
        chosen = [p for i, p in enumerate(chosen) if i % 4 == i // 4 % 4] if spec.kv_layout == "dense" else chosen[::2]
    if spec.dtype == "fp16":
        chosen = chosen[:1]
    failures = failures_in_turn(spec, number, chosen)
    assert not failures, "\n\n".join(failures[:3])


@pytest.mark.parametrize("spec, plan", [(s, p) for s, p in PLANS if s.dtype == "bf16" and p.constant("WARPGROUPS") > 1],
                         ids=lambda x: getattr(x, "kernel_name", ""))
def test_any_number_of_warpgroups(spec: Spec, plan: Plan) -> None:
    """A launch for few query rows has fewer of them. It changes no bit of a row, unless its keys are cut elsewhere."""
    problems, tall = problems_of(spec), None
    for number, warpgroups in enumerate(range(plan.constant("WARPGROUPS"), 0, -1)):
        inputs = with_nans_in_v(problems[len(problems) // 2].make_inputs())
        with tiles_of_warpgroups(warpgroups), emulated_sms(5):
            out = solve(spec, inputs, Schedule(POLICIES[number % 3], number), f"{warpgroups} warpgroups")
        if not spec.split:
            tall = out if tall is None else tall
            check_bits(out, tall, f"{warpgroups} warpgroups")


@pytest.mark.parametrize("variant", ["bf16_d128", "bf16_d128_causal_split", "bf16_d128_split_packed",
                                     "bf16_d128_window", "bf16_d128_varlen"])
def test_all_head_dims_have_a_plan(variant: str) -> None:
    spec, dims = fa3(variant), range(8, 257, 8)
    for head_dim_qk in dims:
        for head_dim_v in dims:
            lower(spec.with_(head_dim_qk=head_dim_qk, head_dim_v=head_dim_v))


def test_a_tile_that_is_asked_for_keeps_its_stages() -> None:
    """A stage less is for rows of the table alone, and never one stage."""
    for head_dim in (128, 192):
        with pytest.raises(PlanError, match="bytes of shared memory"):
            lower(fa3(f"bf16_d{head_dim}").with_(tile={"m": 128, "n": 160 if head_dim == 128 else 128}))


HEAD_DIMS = [(8, 8), (40, 72), (72, 40), (80, 80), (128, 64), (128, 72), (200, 136)]


@pytest.mark.parametrize("changes", [{"causal": True, "split": True}, {"kv_layout": "varlen"}], ids=str)
@pytest.mark.parametrize("head_dims", HEAD_DIMS, ids=str)
def test_head_dims_between_the_shipped_ones(head_dims: tuple[int, int], changes: dict[str, object]) -> None:
    """Columns past the tensor's are zero in shared memory and left out of the output."""
    spec = fa3("bf16_d64").with_(head_dim_qk=head_dims[0], head_dim_v=head_dims[1], **changes)
    solve(spec, problems_of(spec)[0].make_inputs(), Schedule("random", 1))
    solve(spec, with_nans_in_v(problems_of(spec)[-1].make_inputs()), Schedule("lazy", 1))


@pytest.mark.parametrize("changes", [
    {"roles": {"mma": 4}}, {"roles": {"mma": 16}, "stages": 3}, {"tile": {"m": 128, "n": 48}, "schedule": "pingpong"},
    {"q_stages": 1}, {"stages": 5, "tile": {"m": 64, "n": 16}}, {"q_stages": 1, "causal": True, "split": True},
    {"lse": False, "split": True}, {"lse": False, "kv_layout": "varlen"}, {"batch_invariant": True, "causal": True},
    {"schedule": "overlap", "split": True}, {"roles": {"mma": 12}, "schedule": "pingpong", "window": True},
    {"tile": {"m": 192, "n": 192}, "stages": 2, "p_operand": "shared"},
    {"tile": {"m": 128, "n": 32}, "p_operand": "shared", "causal": True, "split": True, "schedule": "overlap"},
    {"tile": {"m": 192, "n": 96}, "stages": 3, "p_operand": "shared", "window": True},
    {"tile": {"m": 128, "n": 128}, "stages": 2, "p_operand": "shared", "kv_layout": "varlen", "q_stages": 1},
], ids=str)
def test_overrides(changes: dict[str, object]) -> None:
    spec = fa3("bf16_d64").with_(**changes)
    for number, problem in enumerate(problems_of(spec)):
        solve(spec, problem.make_inputs(), Schedule("random", number))


# ---- lengths, masks, grids

def _edges(tile_m: int, tile_n: int) -> list[tuple[int, int]]:
    """Each edge length of queries with a third of those of keys, so that all pairs of neighbours turn up."""
    keys = edge_lengths(tile_n)
    return [(q, keys[(i + 2 * j) % len(keys)]) for i, q in enumerate(edge_lengths(tile_m)) for j in range(3)]


@pytest.mark.parametrize("changes", [{}, {"split": True}, {"causal": True}, {"causal": True, "split": True},
                                     {"window": True}], ids=str)
def test_lengths_at_the_edges(changes: dict[str, object]) -> None:
    spec, chosen = small(**changes), iter(masks(small(**changes)) * 18)
    for number, (seqlen_q, seqlen_kv) in enumerate(_edges(128, 32)):
        causal, window = next(chosen)
        problem = problem_of(spec, seqlen_q, seqlen_kv, causal=causal, window=window, seed=number)
        solve(spec, problem.make_inputs(), Schedule("random", number), repr(problem))


@pytest.mark.parametrize("changes", [{}, {"causal": True}, {"window": True}], ids=str)
def test_lengths_at_the_edges_side_by_side(changes: dict[str, object]) -> None:
    """The same as the sequences of one call, with rows after the last; tiles that nobody needs in several places."""
    spec, pairs = small(kv_layout="varlen", **changes), _edges(128, 32)
    for number, mask in enumerate(masks(spec)):
        turned = pairs[number:] + pairs[:number]
        problem = problem_of(spec, tuple(q for q, _ in turned), tuple(k for _, k in turned), (1, 1), len(turned),
                             causal=mask[0], window=mask[1], tail=(0, 7, 200)[number % 3])
        inputs = problem.make_inputs()
        solve(spec, with_nans_in_v(inputs) if number % 2 else inputs, Schedule("random", number), repr(problem))


@pytest.mark.parametrize("sms", [1, 2, 5, 13, 60])
@pytest.mark.parametrize("variant", ["causal_split", "split", "window", "varlen"])
def test_grids_of_any_size(variant: str, sms: int) -> None:
    """From one block for all to more SMs than there are work tiles: tile counter, splits and arrivals add up."""
    spec = small(split="split" in variant, causal="causal" in variant, window=variant == "window",
                 kv_layout="varlen" if variant == "varlen" else "dense", tile={"m": 128, "n": 16})
    window = (40, 30) if spec.window else (-1, -1)
    lengths = ((300, 5, 140), (170, 260, 40)) if variant == "varlen" else (300, 290)
    problem = problem_of(spec, *lengths, (4, 2), 3 if variant == "varlen" else 1, window=window)  # type: ignore[arg-type]
    with emulated_sms(sms):
        for policy in in_turn(POLICIES, sms + len(variant)) if sms < 13 else ("random",):
            solve(spec, problem.make_inputs(), Schedule(policy, sms, resident=1 + sms % 4), f"{policy}, {sms} SMs")


@pytest.mark.parametrize("tiles_per_split", [1, 2, 3])
@pytest.mark.parametrize("causal", [False, True, "top_left"])
def test_any_number_of_parts(causal: bool | str, tiles_per_split: int) -> None:
    """Up to one for each tile of keys, more than are read at once; tiles of different lengths; some of one part."""
    def cut(num_tiles: int, lengths: dict[int, int], num_sms: int, *costs: object) -> tuple[split.SplitPlan, float]:
        rest = sum(lengths.values())
        units = sum(count * -(-length // tiles_per_split) for length, count in lengths.items())
        return split.SplitPlan(num_tiles - rest, tiles_per_split, -(-max(lengths, default=1) // tiles_per_split),
                           num_tiles - rest + units), 0.0

    spec = small(causal=bool(causal), split=True)
    for seqlen_q, seqlen_kv in ((140, 40), (300, 100), (5, 500)):
        inputs = with_nans_in_v(problem_of(spec, seqlen_q, seqlen_kv, causal=causal).make_inputs())
        with mock.patch.object(split, "split_last_wave", cut), emulated_sms(7):
            if tiles_per_split % 2:
                inputs = inputs.with_(v=torch.nan_to_num(inputs.v, 0.0, 1.0, -1.0))
            solve(spec, inputs, Schedule("random", tiles_per_split), f"parts of {seqlen_q}, {seqlen_kv}")


def test_the_host_plans_splits_of_its_own() -> None:
    """That the tests above reach what they are about: splits, tiles fetched from the counter, tiles set aside."""
    def planned(spec: Spec, tiles: int, seqlen_kv: int = 2048) -> Mapping[str, int | float]:
        return program_of(lower(spec), Sizes(1, 128 * tiles, seqlen_kv, 1, 1), 4).step("fwd").values

    assert planned(small(split=True), 5)["max_splits"] > 1 and planned(small(split=True), 5)["full_tiles"] == 4
    assert planned(small(split=True, causal=True), 2)["max_splits"] > 1
    assert planned(small(split=True, causal=True), 5, seqlen_kv=640)["max_splits"] == 1
    assert planned(small(kv_layout="varlen"), 5)["num_tiles"] == 7


@pytest.mark.parametrize("variant", ["causal_split", "split", "window", "varlen"])
@settings(deadline=None, derandomize=True, max_examples=12)
@given(data=st.data())
def test_random_problems(variant: str, data: st.DataObject) -> None:
    spec = small(split="split" in variant, causal="causal" in variant, window=variant == "window",
                 kv_layout="varlen" if variant == "varlen" else "dense")
    problem = data.draw(problems(masks=masks(spec), varlen=spec.kv_layout == "varlen", dtype=spec.dtype,
                                 head_dims=(spec.head_dim_qk, spec.head_dim_v), tile_m=128, tile_n=32))
    problem = replace(problem, num_heads_q=min(problem.num_heads_q, 2), num_heads_kv=1)
    schedule = Schedule(data.draw(st.sampled_from(POLICIES)), data.draw(st.integers(0, 2**32)),
                        resident=data.draw(st.integers(1, 3)))
    with emulated_sms(data.draw(st.integers(1, 9))):
        solve(spec, problem.make_inputs(), schedule, f"{problem}, {schedule}")


@pytest.mark.parametrize("changes", [{}, {"causal": True}, {"window": True}, {"split": True}, {"dtype": "fp16"}],
                         ids=str)
def test_scores_that_grow_along_the_keys(changes: dict[str, object]) -> None:
    """So that the reference of softmax_lazy.cuh is raised again and again, in bf16 too, which waits the longest."""
    spec = small(**changes)
    window = (120, 60) if spec.window else (-1, -1)
    for growth in (0.03, 0.3, 3.0):
        inputs = problem_of(spec, 150, 400, window=window, softmax_scale=1.0).make_inputs()
        direction = torch.sign(inputs.q[:1, :1, :1].float())  # all queries have a part of it, so all rows grow
        q = inputs.q.float() * 0.3 + direction * 0.5
        k = inputs.k.float() + direction * growth * torch.arange(400).view(1, 400, 1, 1) / spec.head_dim_qk
        inputs = inputs.with_(q=q.to(inputs.q.dtype), k=k.to(inputs.k.dtype))
        solve(spec, inputs, Schedule("random"), f"growth {growth}")
        if spec.dtype == "bf16":  # the largest values that contracts.md promises to be safe, under the largest weights
            solve(spec, inputs.with_(v=inputs.v * 2.0**48), Schedule("random"), f"growth {growth}, large values")


# ---- what does not count

@pytest.mark.parametrize("variant", ["bf16_d64_causal", "fp16_d128_window", "bf16_d256_varlen", "bf16_d96_split",
                                     "fp16_d192v128_causal_split", "bf16_d64_causal_varlen"])
def test_nan_in_values(variant: str) -> None:
    """nonfinite.cuh: a non-finite value reaches the rows that see it, and no other."""
    spec = fa3(variant)
    for number, problem in enumerate(problems_of(spec)[::2]):
        for policy in in_turn(POLICIES, number + len(variant)):
            solve(spec, with_nans_in_v(problem.make_inputs()), Schedule(policy))


@pytest.mark.parametrize("variant", ["bf16_d64_causal", "bf16_d128_window", "bf16_d64_varlen", "bf16_d64_split"])
def test_nan_in_keys(variant: str) -> None:
    spec = fa3(variant)
    for number, problem in enumerate(problems_of(spec)):
        inputs = problem.make_inputs()
        k = inputs.k.clone()
        if k.shape[-3] > 40:
            k.select(-3, 37)[..., 3] = float("nan")
            k.select(-3, k.shape[-3] - 1)[..., 0] = float("nan")
        solve(spec, inputs.with_(k=k), Schedule("random", number))


@pytest.mark.parametrize("variant", ["bf16_d64", "bf16_d64_split", "bf16_d128_causal", "fp16_d192v128",
                                     "bf16_d64_window", "bf16_d64_varlen"])
def test_no_key_at_all(variant: str) -> None:
    """No map describes an empty tensor: the host answers. Whatever the queries hold."""
    spec = fa3(variant).with_(head_dim_qk=40) if variant == "bf16_d64" else fa3(variant)
    lengths = ((3, 1), (0, 0)) if spec.kv_layout == "varlen" else (3, 0)
    inputs = problem_of(spec, *lengths, batch=2).make_inputs()  # type: ignore[arg-type]
    for q in (inputs.q, torch.full_like(inputs.q, float("nan"))):
        solve(spec, inputs.with_(q=q), Schedule())


# ---- what changes no bit

@pytest.mark.parametrize("variant", ["bf16_d64_causal", "bf16_d128_split", "bf16_d256_causal_split", "bf16_d96_window",
                                     "bf16_d64_causal_varlen"])
def test_results_do_not_depend_on_the_schedule(variant: str) -> None:
    spec = fa3(variant)
    inputs = problems_of(spec)[-1].make_inputs()
    first = solve(spec, inputs, Schedule("eager"))
    for seed in range(5):
        check_bits(solve(spec, inputs, Schedule("random", seed, resident=1 + seed)), first, f"seed {seed}")


@pytest.mark.parametrize("changes", [{}, {"causal": True, "batch_invariant": True}, {"split": True},
                                     {"kv_layout": "varlen", "causal": True}, {"window": True}], ids=str)
def test_identities(changes: dict[str, object]) -> None:
    """Those of `flashgen verify`: neighbours, strides of every tensor and of `out`, and keys to come."""
    spec = small(tile={"m": 64, "n": 32}, **changes)
    problem = replace(company_problem(spec, 64, masks(spec)[-1], 0), num_heads_q=2, num_heads_kv=1)
    subject = Subject(spec, "cpu", emulated=True)
    alone_and_in_company(subject, problem)
    strided(subject, problem)
    if spec.causal:
        future_keys(subject, replace(problem, causal=True))


@pytest.mark.parametrize("changes", [{"kv_layout": "varlen", "batch_invariant": True},
                                     {"kv_layout": "varlen", "window": True}], ids=str)
def test_bits_beside_nan(changes: dict[str, object]) -> None:
    """Sequences end inside tiles of keys, which then hold NaN of the next one."""
    spec = small(tile={"m": 64, "n": 32}, **changes)
    alone_and_in_company(Subject(spec, "cpu", emulated=True), Problem(
        3, (133, 80, 63), (133, 80, 63), 2, 1, 64, 64, window=(50, 9) if spec.window else (-1, -1)))


@pytest.mark.parametrize("variant", ["bf16_d128", "bf16_d192v128_varlen", "bf16_d64_causal_split"])
def test_strided_tensors_of_wide_kernels(variant: str) -> None:
    spec = fa3(variant)
    inputs = problems_of(spec)[0].make_inputs()
    plain = solve(spec, inputs, Schedule())
    wide = inputs.with_(q=spread(inputs.q), k=head_major(inputs.k), v=spread(head_major(inputs.v)))
    check_bits(solve(spec, wide, Schedule("lazy")), plain, "strided")


def test_tensors_that_no_map_describes_are_refused() -> None:
    spec = fa3("bf16_d64")
    inputs = problem_of(spec, 5, 9, (1, 1), batch=2).make_inputs()
    with pytest.raises(UnsupportedError, match="contiguous"):
        solve(spec, inputs.with_(k=inputs.k[:1].expand(2, -1, -1, -1)), Schedule())


@pytest.mark.skipif(not SOAK_RUNS, reason="EMULATOR_SOAK_RUNS is not set")
def test_soak() -> None:
    """No false alarm in many seeded runs of correct kernels."""
    for run in range(SOAK_RUNS):
        spec = PLANS[run % len(PLANS)][0]
        chosen = problems_of(spec, seed=run)
        inputs = chosen[run // len(PLANS) % len(chosen)].make_inputs()
        with emulated_sms(1 + run % 7):
            solve(spec, with_nans_in_v(inputs) if run % 5 == 0 else inputs,
                  Schedule(POLICIES[run % 3], run, resident=1 + run % 3), f"run {run}")
