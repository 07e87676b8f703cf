"""What the tests share: one rounding of each weight is within the bound between two machines, and samples turn."""
from __future__ import annotations

import pytest
import sampling
import torch
from emulator_kit import with_nans_in_v
from kit import assert_one_rounding_apart

from flashgen.codegen.dtype import DTYPES
from flashgen.runtime.ops.attention.problem import Inputs, Problem
from flashgen.runtime.verify.reference import reference

PROBLEMS = {
    "dense": Problem(2, 33, 70, 4, 2, causal=True),
    "varlen": Problem(3, (20, 1, 7), (50, 9, 0), 2, 1, window=(16, 0), dtype="fp16", softmax_scale=0.3, tail=3),
}
each_problem = pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS)


def result(inputs: Inputs, roundings: float = 0.0) -> torch.Tensor:
    """`out` where each weight is too large by that many roundings if its value is positive, too small if negative.

    out is linear in weights * v, so v may be moved in their place; rounded as a kernel's is.
    """
    v = inputs.v.double()
    moved = torch.where(v.isfinite(), v + roundings * torch.finfo(inputs.v.dtype).eps * v.abs(), v)
    return reference(inputs.q, inputs.k, moved, **inputs.keywords)[0].to(inputs.q.dtype)


@each_problem
def test_one_rounding_of_each_weight_passes(problem: Problem) -> None:
    for inputs in (problem.make_inputs(), with_nans_in_v(problem.make_inputs())):
        for roundings in (0.0, 1.0, -1.0):
            assert_one_rounding_apart(result(inputs, roundings), result(inputs), inputs)


@each_problem
def test_three_roundings_of_each_weight_fail(problem: Problem) -> None:
    for inputs in (problem.make_inputs(), with_nans_in_v(problem.make_inputs())):
        for roundings in (3.0, -3.0):
            with pytest.raises(AssertionError, match="elements, the worst at"):
                assert_one_rounding_apart(result(inputs, roundings), result(inputs), inputs)


@each_problem
def test_one_wrong_element_fails(problem: Problem) -> None:
    """Also one that the elements around it would excuse: it is moved by no more than the largest result."""
    inputs = problem.make_inputs()
    good = result(inputs)
    for value in (good.abs().max().item(), float("nan"), float("inf"), float("-inf")):
        wrong = good.clone()
        wrong.view(-1)[wrong.abs().argmin()] = value
        with pytest.raises(AssertionError):
            assert_one_rounding_apart(wrong, good, inputs)
        with pytest.raises(AssertionError):
            assert_one_rounding_apart(good, wrong, inputs)


def test_a_nan_in_both_is_no_excuse_for_its_neighbours() -> None:
    inputs = with_nans_in_v(PROBLEMS["dense"].make_inputs())
    good = result(inputs)
    assert good.isnan().any() and good.isneginf().any()
    wrong = torch.where(good.isfinite(), good + 1, good)
    with pytest.raises(AssertionError, match="the worst at"):
        assert_one_rounding_apart(wrong, good, inputs)


def test_the_unit_is_the_dtypes() -> None:
    """Two roundings in bf16 are sixteen in fp16."""
    coarse, fine = (torch.finfo(getattr(torch, DTYPES[name].torch_name)).eps for name in ("bf16", "fp16"))
    assert coarse == 8 * fine
    inputs = PROBLEMS["varlen"].make_inputs()
    with pytest.raises(AssertionError, match="the worst at"):
        assert_one_rounding_apart(result(inputs, coarse / fine), result(inputs), inputs)


def test_nothing_agrees_with_nothing() -> None:
    inputs = Problem(1, 0, 5).make_inputs()
    assert_one_rounding_apart(result(inputs), result(inputs), inputs)


# ---- samples

def test_samples_cover_everything_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "SOAK_RUNS", 0)
    things, seen, turns = list(range(11)), set[int](), set[tuple[int, ...]]()
    for rotation in range(4):
        monkeypatch.setattr(sampling, "ROTATION", rotation)
        seen |= set(sampling.one_in(4, things))
        assert len(sampling.one_in(4, things)) in (2, 3)
        turns.add(tuple(one for number in range(3) for one in sampling.in_turn("abc", number)))
    assert seen == set(things) and len(turns) == 3 and all(len(set(turn)) == 3 for turn in turns)
    monkeypatch.setattr(sampling, "SOAK_RUNS", 1)
    assert sampling.one_in(4, things) == things and sampling.in_turn("abc", 1) == ["a", "b", "c"]
