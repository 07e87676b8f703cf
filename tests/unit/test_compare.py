"""The comparison kit finds every kind of planted fault, and passes a kernel that only rounds."""
from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from strategies import problems
from torch import Tensor

from flashgen.errors import VerifyError
from flashgen.runtime.ops.attention.problem import Inputs, Problem
from flashgen.runtime.verify.compare import Accuracy, check, check_bits, named
from flashgen.runtime.verify.reference import reference, visible

NAN = math.nan
PROBLEMS = {
    "dense": Problem(2, 70, 300, 6, 2, causal=True, seed=1),
    "varlen": Problem(3, (70, 1, 40), (300, 200, 33), 6, 2, causal=True, tail=4, seed=2),
    "window": Problem(2, 70, 300, 6, 2, window=(40, 3), dtype="fp16", seed=3),
}


def judged(out: Tensor, lse: Tensor | None, inputs: Inputs, **more: str) -> Accuracy:
    return check(named(out, lse), inputs, **more)


def rounded(inputs: Inputs) -> tuple[Tensor, Tensor]:
    out, lse = reference(inputs.q, inputs.k, inputs.v, **inputs.keywords)
    return out.to(inputs.q.dtype), lse.float()


def blockwise(inputs: Inputs, block_n: int = 16) -> tuple[Tensor, Tensor]:
    """A dense FlashAttention-2 forward with a kernel's roundings: fp32 state, P in the inputs' dtype."""
    group = inputs.q.shape[2] // inputs.k.shape[2]
    q = inputs.q.float().transpose(1, 2)
    k, v = (x.float().repeat_interleave(group, 2).transpose(1, 2) for x in (inputs.k, inputs.v))
    scale = q.shape[-1] ** -0.5 if inputs.softmax_scale is None else inputs.softmax_scale
    mask = visible(q.shape[2], k.shape[2], causal=inputs.causal, window=inputs.window)
    row_max = q.new_full((*q.shape[:3], 1), -math.inf)
    row_sum, acc = torch.zeros_like(row_max), q.new_zeros(*q.shape[:3], v.shape[-1])
    for n in range(0, k.shape[2], block_n):
        keys = slice(n, n + block_n)
        scores = (q @ k[:, :, keys].mT * (scale * math.log2(math.e))).masked_fill(~mask[:, keys], -math.inf)
        new_max = row_max.maximum(scores.amax(-1, keepdim=True))
        shift = new_max.masked_fill(new_max == -math.inf, 0.0)
        weights, shrink = torch.exp2(scores - shift), torch.exp2(row_max - shift)
        row_sum, row_max = row_sum * shrink + weights.sum(-1, keepdim=True), new_max
        acc = acc * shrink + weights.to(inputs.q.dtype).float() @ v[:, :, keys]
    out = (acc / row_sum.masked_fill(row_sum == 0, 1.0)).to(inputs.q.dtype)
    lse = row_max.masked_fill(row_max == -math.inf, 0.0) * math.log(2) + row_sum.log()
    return out.transpose(1, 2), lse.squeeze(-1)


@settings(deadline=None, derandomize=True, max_examples=150)
@given(problems(varlen=False))
def test_a_blockwise_kernel_passes(problem: Problem) -> None:
    inputs = problem.make_inputs()
    found = judged(*blockwise(inputs), inputs)
    assert found.out_error <= found.out_allowed


@settings(deadline=None, derandomize=True, max_examples=50)
@given(problems())
def test_the_rounded_reference_passes(problem: Problem) -> None:
    inputs = problem.make_inputs()
    found = judged(*rounded(inputs), inputs)
    assert found.out_error <= found.out_allowed


def _one_element(out: Tensor, lse: Tensor) -> None:
    out[..., -9, 2, 5] *= 1.5


def _one_row_zero(out: Tensor, lse: Tensor) -> None:
    out[..., 7, 3, :] = 0


def _rows_not_written(out: Tensor, lse: Tensor) -> None:
    out[..., 5:9, :, :] = NAN


def _nan(out: Tensor, lse: Tensor) -> None:
    out[..., 30, 1, 7] = NAN


def _inf(out: Tensor, lse: Tensor) -> None:
    out[..., 30, 1, 7] = math.inf


def _heads_swapped(out: Tensor, lse: Tensor) -> None:
    out[..., [0, 3], :] = out[..., [3, 0], :]


def _row_of_a_neighbour(out: Tensor, lse: Tensor) -> None:
    out[..., 8, :, :] = out[..., 9, :, :]


def _lse_base_2(out: Tensor, lse: Tensor) -> None:
    lse /= math.log(2)


def _lse_of_one_row(out: Tensor, lse: Tensor) -> None:
    lse[..., 4, 9] += 1e-4


def _lse_plus_inf(out: Tensor, lse: Tensor) -> None:
    lse[..., 1, 3] = math.inf


def _lse_heads_swapped(out: Tensor, lse: Tensor) -> None:
    lse[..., [0, 1], :] = lse[..., [1, 0], :]


PLANTS = [_one_element, _one_row_zero, _rows_not_written, _nan, _inf, _heads_swapped, _row_of_a_neighbour,
          _lse_base_2, _lse_of_one_row, _lse_plus_inf, _lse_heads_swapped]


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.__name__.strip("_"))
@pytest.mark.parametrize("name", PROBLEMS)
def test_a_planted_fault_is_found(name: str, plant: Callable[[Tensor, Tensor], None]) -> None:
    inputs = PROBLEMS[name].make_inputs()
    out, lse = rounded(inputs)
    judged(out, lse, inputs)
    plant(out, lse)
    with pytest.raises(VerifyError, match=r"^lse at" if "lse" in plant.__name__ else r"^out at"):
        judged(out, lse, inputs)


@pytest.mark.parametrize("wrong", [
    dict(causal=False), dict(causal="top_left"), dict(causal=True, window=(250, -1)), dict(softmax_scale=0.128)])
def test_the_wrong_problem_is_found(wrong: dict) -> None:
    inputs = PROBLEMS["dense"].make_inputs()
    with pytest.raises(VerifyError):
        judged(*rounded(inputs.with_(**wrong)), inputs)


@pytest.mark.parametrize("left, right", [(41, 3), (39, 3), (40, 2), (40, 4)])
def test_a_window_off_by_one_is_found(left: int, right: int) -> None:
    inputs = PROBLEMS["window"].make_inputs()
    with pytest.raises(VerifyError):
        judged(*rounded(inputs.with_(window=(left, right))), inputs)


def test_a_fault_in_a_long_row_does_not_hide_behind_short_ones() -> None:
    """Averages over many keys are small: an error that the whole tensor allows can be half of such a row."""
    inputs = Problem(1, 600, 600, 1, 1, causal=True).make_inputs()
    out, lse = rounded(inputs)
    allowed = judged(*blockwise(inputs), inputs).out_allowed
    out[0, 590, 0, out[0, 590, 0].abs().argmax()] += 0.9 * allowed
    with pytest.raises(VerifyError, match=r"row 590.*relative to its row"):
        judged(out, lse, inputs)


def test_a_fault_in_a_plain_row_does_not_hide_behind_one_that_cancels() -> None:
    """Head 1 weighs 1 and -3 by 3/4 and 1/4: its error is large beside its output of 0. Head 0 gives 1."""
    q, k, v = (torch.zeros(1, n, 2, 8, dtype=torch.bfloat16) for n in (1, 2, 2))
    q[0, 0, 1], k[0, 0, 1, 0] = 1, math.log(3)
    v[0, :, 0], v[0, 0, 1], v[0, 1, 1] = 1, 1, -3
    inputs = Inputs(q, k, v, softmax_scale=1.0)
    out, lse = rounded(inputs)
    judged(out, lse, inputs)
    out[0, 0, 0, 2] = 1.03125
    with pytest.raises(VerifyError, match=r"head 0, column 2.*: error 3"):
        judged(out, lse, inputs)


@pytest.mark.parametrize("lse_value, out_value", [
    (0.0, 0.0), (math.inf, 0.0), (NAN, 0.0), (-1e30, 0.0), (-math.inf, 1e-3)])
def test_a_row_without_a_key_is_0_and_minus_inf(lse_value: float, out_value: float) -> None:
    inputs = Problem(1, 5, 2, causal=True).make_inputs()
    out, lse = rounded(inputs)
    judged(out, lse, inputs)
    lse[0, 0, 1], out[0, 1, 0, 3] = lse_value, out_value
    with pytest.raises(VerifyError, match="row 1"):
        judged(out, lse, inputs)


def test_nan_of_the_reference_never_counts_as_equal() -> None:
    inputs = PROBLEMS["dense"].make_inputs()
    inputs.v[0, 250, 1, 3] = NAN
    out, lse = rounded(inputs)
    judged(out, lse, inputs)  # NaN where NaN belongs
    finite, wrong = out.nan_to_num(0.0), out.clone()
    wrong[1, 3, 0, 0] += 1  # an error elsewhere is not hidden by the NaN
    everywhere = torch.full_like(out, NAN)
    for bad in (finite, wrong, everywhere):
        with pytest.raises(VerifyError, match=r"^out at"):
            judged(bad, lse, inputs)


def test_form_is_checked_first() -> None:
    inputs = PROBLEMS["dense"].make_inputs()
    out, lse = rounded(inputs)
    for bad_out, bad_lse in ((out.float(), lse), (out[:, 1:], lse), (out, lse.double()), (out, lse.mT)):
        with pytest.raises(VerifyError, match=r"torch.Size|torch.float|torch.bfloat16"):
            judged(bad_out, bad_lse, inputs)


def test_the_message_is_enough_to_go_on() -> None:
    inputs = PROBLEMS["dense"].make_inputs()
    out, lse = rounded(inputs)
    out[1, 30, 4, 17] = 3.0
    with pytest.raises(VerifyError) as caught:
        judged(out, lse, inputs, label="fa2_fwd_bf16_d64_causal.sm_90, seed 7", rerun="flashgen verify x --seed 7")
    text = str(caught.value)
    for part in ("batch 1, row 30, head 4, column 17", "ours 3.0, reference", "fa2_fwd_bf16_d64_causal.sm_90, seed 7",
                 "next: flashgen verify x --seed 7", "torch's plain attention"):
        assert part in text


def test_bits() -> None:
    x = torch.tensor([0.0, NAN, 1.0], dtype=torch.bfloat16)
    check_bits(x, x.clone(), "x")
    for at, value in ((0, -0.0), (1, 1.0), (2, 1.0078125)):
        y = x.clone()
        y[at] = value
        with pytest.raises(VerifyError, match=rf"x at \[axis0 {at}\]: 1 of 3"):
            check_bits(y, x, "x")
    with pytest.raises(VerifyError):
        check_bits(x[:2], x, "x")
