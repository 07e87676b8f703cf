"""The comparison kit: contracts.md, Accuracy. A kernel's result is judged against fp64, in units of torch's own error.

Order of checks of an output: shape and dtype, NaN and inf positions, the error of the whole tensor, the error of each
row relative to that row. The first failure raises VerifyError with the coordinate, both values and the rerun.
"""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NoReturn, Protocol

import torch
from torch import Tensor

from flashgen.errors import VerifyError

OUT_FACTOR, OUT_ABSOLUTE = 2.0, 1e-5
FIXED_RELATIVE = 1e-6
# A row's error is measured against that row's largest value, but never below this part of the tensor's largest:
# values that cancel to almost nothing say nothing about the kernel.
ROW_FLOOR = 1e-3


@dataclass(frozen=True)
class Expected:
    """What is right for one output, and how far from it a kernel may be."""

    exact: Tensor                # in fp64
    axes: tuple[str, ...]        # names of its dimensions
    plain: Tensor | None = None  # torch's own answer in the output's dtype: the yardstick of a kernel's error
    # The error allowed besides: without a yardstick, FIXED_RELATIVE of the value, in fp32; with one, what that allows.
    absolute: float = 0.0
    sizes: Tensor | None = None  # of what each value is the sum, without signs: where sums cancel, the measure of rows


Truth = Mapping[str, Expected]          # by name of the output
Results = Mapping[str, Tensor]          # of a call, by the same names


def named(out: Tensor, lse: Tensor | None) -> Results:
    """The results of a call whose lse need not be asked for."""
    return {"out": out} if lse is None else {"out": out, "lse": lse}


class Answered(Protocol):
    """Inputs whose right answer is known."""

    def truth(self) -> Truth: ...


@dataclass(frozen=True)
class Accuracy:
    """Largest absolute errors found and what was allowed; 0 for an empty tensor. `out` is the output with a yardstick
    that comes closest to what it is allowed, `lse` the one without."""

    out_error: float = 0.0
    out_allowed: float = 0.0
    lse_error: float = 0.0


def check(results: Results, inputs: Answered, *more: Results, label: str = "", rerun: str = "") -> Accuracy:
    """Raise VerifyError unless `results`, and `more` of other runs, keep the accuracy contract for `inputs`.

    The truth is computed here, after the kernel, so that recycled memory cannot hold the answer.
    `label` names spec, variant, problem and seed; `rerun` is the command that repeats the failure.
    """
    truth, judge = inputs.truth(), _Judge(label, rerun)
    measured, fixed = [(0.0, 0.0)], [0.0]
    for name, result in (pair for run in (results, *more) for pair in run.items()):
        right = truth[name]
        judge.same_form(name, result, right.exact.shape, torch.float32 if right.plain is None else right.plain.dtype)
        judge.same_specials(name, result, right)
        if right.plain is None:
            fixed.append(judge.close_by_value(name, result, right))
        else:
            measured.append(judge.close_by_yardstick(name, result, right, right.plain))
    return Accuracy(*max(measured, key=lambda pair: (pair[0] / (pair[1] or 1.0), pair[1])), max(fixed))


def check_bits(actual: Tensor, expected: Tensor, what: str, *, label: str = "", rerun: str = "") -> None:
    """Raise VerifyError unless both tensors hold the same bits (NaN equals itself, -0 differs from 0)."""
    judge = _Judge(label, rerun)
    judge.same_form(what, actual, expected.shape, expected.dtype)
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[actual.element_size()]
    differs = actual.contiguous().view(bits) != expected.contiguous().view(bits)
    if differs.any():
        axes = tuple(f"axis{i}" for i in range(actual.dim()))
        judge.fail(what, differs.to(torch.int8), actual, Expected(expected, axes),
                   f"{int(differs.sum())} of {differs.numel()} elements are not bitwise equal", "the same bits")


@dataclass(frozen=True)
class _Judge:
    label: str
    rerun: str

    def same_form(self, what: str, actual: Tensor, shape: torch.Size, dtype: torch.dtype) -> None:
        if actual.shape != shape or actual.dtype != dtype:
            raise VerifyError(f"{what} is {actual.dtype} {tuple(actual.shape)}", where=self.label,
                              allowed=f"{dtype} {tuple(shape)}", next=self.rerun)

    def same_specials(self, what: str, actual: Tensor, expected: Expected) -> None:
        """NaN, +inf and -inf in the same places. NaN in both is a match of places, never of values."""
        for name, test in (("NaN", torch.isnan), ("+inf", torch.isposinf), ("-inf", torch.isneginf)):
            differs = test(actual) != test(expected.exact)
            if differs.any():
                self.fail(what, differs.to(torch.int8), actual, expected,
                          f"{name} in {int(differs.sum())} wrong places", f"{name} exactly where the reference has it")

    def close_by_yardstick(self, what: str, out: Tensor, expected: Expected, plain: Tensor) -> tuple[float, float]:
        """(largest error, allowed error). Rows are the last dimension."""
        exact = expected.exact
        if not exact.numel():
            return 0.0, 0.0
        finite = exact.isfinite()
        zero = torch.zeros((), dtype=torch.float64, device=exact.device)
        size = exact.abs().where(finite, zero)
        error = (out.double() - exact).abs().where(finite, zero)
        # Storing the result rounds it, so no output can promise less than half a unit in the last place.
        rounding = size * (torch.finfo(out.dtype).eps / 2)
        plain_error = (plain.double() - exact).abs().where(finite, zero).maximum(rounding)
        absolute = OUT_ABSOLUTE + expected.absolute
        allowed = OUT_FACTOR * plain_error.max().item() + absolute
        if error.max().item() > allowed:
            self.fail(what, error, out, expected, f"error {error.max().item():.3e}",
                      f"{allowed:.3e} = {OUT_FACTOR:g} * torch's plain attention + {absolute:g}")
        size = size if expected.sizes is None else expected.sizes
        row_size = size.amax(-1, keepdim=True).clamp_min(max(ROW_FLOOR * size.max().item(), OUT_ABSOLUTE))
        row_error, row_allowed = error / row_size, OUT_FACTOR * (plain_error / row_size).max().item()
        excess = (error - absolute) / row_size
        if excess.max().item() > row_allowed:
            self.fail(what, excess, out, expected, f"error relative to its row {row_error.max().item():.3e}",
                      f"{row_allowed:.3e} = {OUT_FACTOR:g} * torch's plain attention")
        return error.max().item(), allowed

    def close_by_value(self, what: str, actual: Tensor, expected: Expected) -> float:
        """The largest error."""
        exact = expected.exact
        finite = exact.isfinite()
        if not finite.any():
            return 0.0
        zero = torch.zeros((), dtype=torch.float64, device=exact.device)
        error = (actual.double() - exact).abs().where(finite, zero)
        excess = error - expected.absolute - FIXED_RELATIVE * exact.abs().where(finite, zero)
        if excess.max().item() > 0:
            self.fail(what, excess, actual, expected, f"error {error.max().item():.3e}",
                      f"{expected.absolute:g} + {FIXED_RELATIVE:g} * |{what}|")
        return error.max().item()

    def fail(self, what: str, badness: Tensor, actual: Tensor, expected: Expected, found: str, allowed: str
             ) -> NoReturn:
        """Point at the worst element."""
        worst = int(badness.flatten().argmax())
        at = tuple(int(i) for i in torch.unravel_index(torch.tensor(worst), badness.shape))
        place = ", ".join(f"{name} {i}" for name, i in zip(expected.axes, at, strict=True))
        raise VerifyError(f"{what} at [{place}]: {found}", where=self.label, allowed=allowed, next=self.rerun,
                          details=f"  ours {actual[at].item()!r}, reference {expected.exact[at].item()!r}")
