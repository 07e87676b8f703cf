"""FA3 kernels in which the query heads of a kv head share query tiles, emulated: who is which row, and no fault."""
from __future__ import annotations

from dataclasses import replace

import pytest
from emulator_kit import solve, with_nans_in_v
from test_emulator_fa3 import _tall_tiles, fa3, problem_of, small  # noqa: F401

from flashgen.codegen.spec.spec import Spec
from flashgen.errors import UnsupportedError
from flashgen.runtime.emulator.kernel import emulated_sms
from flashgen.runtime.emulator.schedule import POLICIES, Schedule
from flashgen.runtime.ops.attention.edges import company_problem
from flashgen.runtime.ops.attention.op import alone_and_in_company, future_keys, head_major, spread, strided
from flashgen.runtime.verify.compare import check_bits
from flashgen.runtime.verify.subject import Subject

LENGTHS = ((1, 300), (5, 200), (70, 90), (70, 40))  # one query; one tile; several, with fewer keys than queries too


def packed(**changes: object) -> Spec:
    return small(**{"split": True, "pack_gqa": True, **changes})


@pytest.mark.parametrize("heads", [(4, 1), (16, 2), (6, 2), (5, 5), (5, 1), (64, 1)], ids=str)
@pytest.mark.parametrize("causal", [False, True, "top_left"])
def test_heads_share_tiles(causal: bool | str, heads: tuple[int, int]) -> None:
    """Groups that fill a warpgroup's rows, and groups that leave some over. Whole tiles and parts."""
    spec = packed(causal=bool(causal))
    for number, (seqlen_q, seqlen_kv) in enumerate(LENGTHS[:2] if heads[0] == 64 else LENGTHS):
        problem = problem_of(spec, seqlen_q, seqlen_kv, heads, 1 + number % 2, causal=causal)
        with emulated_sms((3, 9, 20)[number % 3]):
            solve(spec, with_nans_in_v(problem.make_inputs()), Schedule(POLICIES[number % 3], number), repr(problem))


@pytest.mark.parametrize("spec", [
    packed(split=False, causal=True), packed(lse=False), packed(q_stages=1, causal=True), packed(dtype="fp16"),
    packed(schedule="pingpong", causal=True), packed(tile={"m": 64, "n": 32}), packed(head_dim_qk=40, head_dim_v=72),
    fa3("bf16_d128_split_packed"), fa3("bf16_d256_causal_split_packed"), fa3("fp16_d192v128_split_packed")],
    ids=lambda spec: spec.variant)
def test_variants(spec: Spec) -> None:
    for number, (seqlen_q, seqlen_kv) in enumerate(LENGTHS[1:]):
        problem = problem_of(spec, seqlen_q, seqlen_kv, (6, 2), seed=number)
        solve(spec, problem.make_inputs(), Schedule("random", number), repr(problem))


def test_strided_tensors() -> None:
    spec = packed(causal=True)
    inputs = problem_of(spec, 20, 130, (6, 2), 2).make_inputs()
    plain = solve(spec, inputs, Schedule())
    wide = inputs.with_(q=spread(inputs.q), k=head_major(inputs.k), v=spread(head_major(inputs.v)))
    check_bits(solve(spec, wide, Schedule("lazy")), plain, "strides")


def test_identities() -> None:
    spec = packed(tile={"m": 64, "n": 32}, causal=True)
    subject, problem = Subject(spec, "cpu", emulated=True), company_problem(spec, 64, (True, (-1, -1)), 0)
    alone_and_in_company(subject, problem)
    strided(subject, problem)
    future_keys(subject, replace(problem, causal=True))


def test_results_do_not_depend_on_the_schedule() -> None:
    spec = packed()
    inputs = problem_of(spec, 9, 700, (8, 2)).make_inputs()
    with emulated_sms(12):
        first = solve(spec, inputs, Schedule("eager"))
        for seed in range(4):
            check_bits(solve(spec, inputs, Schedule("random", seed, resident=1 + seed)), first, f"seed {seed}")


def test_more_heads_than_rows_are_refused() -> None:
    spec = packed()
    with pytest.raises(UnsupportedError, match="no variant of it serves"):
        solve(spec, problem_of(spec, 1, 40, (65, 1)).make_inputs(), Schedule())
