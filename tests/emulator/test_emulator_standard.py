"""Standard attention on the emulator: three kernels for each call, right and without a fault of any kind."""
from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from emulator_kit import distinct_plans, failures_in_turn, problems_of, shipped, solve, with_nans_in_v
from large_scores import PATTERNS, SOFT, inputs_of, judge
from sampling import in_turn, one_in

import flashgen
from flashgen.codegen.spec.spec import Spec
from flashgen.runtime.emulator.schedule import POLICIES, Schedule
from flashgen.runtime.ops.attention.op import IDENTITIES, run_poisoned
from flashgen.runtime.ops.attention.problem import Problem
from flashgen.runtime.verify.compare import check_bits
from flashgen.runtime.verify.subject import Subject

# A spec with its last kernel stands for the call; the last kernel knows the whole tile.
CALLS = [spec for spec, _ in distinct_plans("standard") if spec.kernel == "values"]
FULL, CAUSAL = (shipped(f"standard_bf16_d64{mask}_values") for mask in ("", "_causal"))
OTHER_DIMS = ((96, 96), (192, 192), (192, 128), (72, 40), (8, 8))


@pytest.mark.parametrize("number, spec", [*enumerate(CALLS)], ids=[spec.variant for spec in CALLS])
def test_every_call(number: int, spec: Spec) -> None:
    """fp16 kernels differ from bf16 ones in the instructions alone, so one problem of each mask does for them."""
    chosen = problems_of(spec)[::3 if spec.dtype == "fp16" else 1]
    failures = failures_in_turn(spec, number, chosen)
    assert not failures, "\n\n".join(failures[:3])


@pytest.mark.parametrize("causal", [False, True, "top_left"])
def test_lengths_at_the_edges_of_tiles(causal: bool | str) -> None:
    """Heads shared by several queries, more queries than keys, and rows without a key."""
    spec = CAUSAL if causal else FULL
    lengths = ((1, 1), (1, 65), (127, 63), (128, 64), (129, 65), (131, 7), (3, 193))
    for number, (seqlen_q, seqlen_kv) in enumerate(lengths):
        problem = Problem(1 + number % 2, seqlen_q, seqlen_kv, 4, 1 + number % 2, 64, 64, causal=causal, seed=number)
        solve(spec, problem.make_inputs(), Schedule(POLICIES[number % len(POLICIES)], number), str(problem))


@pytest.mark.parametrize("head_dims", OTHER_DIMS, ids=lambda d: f"d{d[0]}v{d[1]}")
def test_other_head_dims(head_dims: tuple[int, int]) -> None:
    spec = CAUSAL.with_(head_dim_qk=head_dims[0], head_dim_v=head_dims[1])
    for dtype in ("bf16", "fp16"):
        problem = Problem(1, 130, 70, 2, 1, *head_dims, causal=True, dtype=dtype)
        solve(spec.with_(dtype=dtype), problem.make_inputs(), Schedule(), str(problem))


@pytest.mark.parametrize("spec", [FULL, CAUSAL], ids=lambda spec: spec.variant)
def test_nan_in_values(spec: Spec) -> None:
    """A non-finite value reaches the rows that see it, and no other."""
    for number, problem in enumerate(problems_of(spec)):
        for policy in in_turn(POLICIES, number):
            solve(spec, with_nans_in_v(problem.make_inputs()), Schedule(policy))


def test_nan_in_hidden_keys() -> None:
    """The scores of masked keys are -inf, whatever the product was."""
    inputs = Problem(1, 66, 66, 2, 1, 64, 64, causal=True).make_inputs()
    k, v = inputs.k.clone(), inputs.v.clone()
    k[:, -1], v[:, -1] = torch.nan, torch.inf
    found = solve(CAUSAL, inputs.with_(k=k, v=v), Schedule())
    check_bits(found[:, :-1], solve(CAUSAL, inputs, Schedule())[:, :-1], "rows that do not see the last key")


def test_rows_without_a_key() -> None:
    """Out is 0 and lse -inf; the same with no key at all, where no kernel is launched."""
    for seqlen_kv in (5, 0):
        inputs = Problem(1, 20, seqlen_kv, 2, 2, 64, 64, causal=True).make_inputs()
        out, lse = run_poisoned(inputs, spec=CAUSAL)
        assert lse is not None and bool((out[:, :20 - seqlen_kv] == 0).all())
        assert bool(lse[..., :20 - seqlen_kv].isneginf().all()) and bool(lse[..., 20 - seqlen_kv:].isfinite().all())


@pytest.mark.parametrize("pattern", one_in(2, PATTERNS))
def test_far_scores(pattern: str) -> None:
    for spec in (FULL, CAUSAL.with_(dtype="fp16")):
        scores = PATTERNS[pattern](160, spec.dtype)
        inputs = inputs_of(spec, scores)
        judge(*run_poisoned(inputs, spec=spec), inputs, scores)


@pytest.mark.parametrize("level", SOFT)
def test_p_is_as_exact_as_the_scores(level: float) -> None:
    scores = [level + (j * 7 % 16) / 4 for j in range(160)]
    inputs = inputs_of(FULL, scores)
    judge(*run_poisoned(inputs, spec=FULL), inputs, scores, level)


def test_strides_out_and_lse_change_no_bit() -> None:
    inputs = Problem(2, 70, 70, 2, 1, 64, 64, causal=True).make_inputs()
    plain = solve(CAUSAL, inputs, Schedule())
    wide = torch.full((*inputs.k.shape[:2], 2, *inputs.k.shape[2:]), torch.nan, dtype=inputs.k.dtype)
    wide[:, :, 0] = inputs.k
    heads = inputs.q.transpose(1, 2).contiguous().transpose(1, 2)
    check_bits(solve(CAUSAL, inputs.with_(q=heads, k=wide[:, :, 0]), Schedule()), plain, "strided")
    out = torch.full((2, 2, 70, 64), torch.nan, dtype=plain.dtype).transpose(1, 2)  # head-major
    assert flashgen.attention(inputs.q, inputs.k, inputs.v, causal=True, spec="standard", out=out) is out
    check_bits(out, plain, "out given, lse not asked for")


@pytest.mark.parametrize("name", IDENTITIES)
def test_identities_hold_bit_by_bit(name: str) -> None:
    """Requests keep to themselves, strides do not count, and keys of the future are not seen."""
    problem = Problem(2, 130, 130, 2, 1, 64, 64, causal=True)
    IDENTITIES[name](Subject(CAUSAL, "cpu", emulated=True), problem)


def test_results_do_not_depend_on_the_schedule() -> None:
    inputs = replace(problems_of(CAUSAL)[0], seed=3).make_inputs()
    first = solve(CAUSAL, inputs, Schedule("eager"))
    for seed in range(3):
        check_bits(solve(CAUSAL, inputs, Schedule("random", seed, resident=1 + seed)), first, f"seed {seed}")
