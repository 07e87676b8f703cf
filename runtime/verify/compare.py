"""The comparison kit: contracts.md, Accuracy. A kernel's result is judged against fp64, in units of torch's own error.

Order of checks: shape and dtype, NaN and inf positions, the error of the whole tensor, the error of each row
relative to that row, lse. The first failure raises VerifyError with the coordinate, both values and the rerun.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import Tensor

from flashgen.errors import VerifyError
from flashgen.runtime.ops.attention.problem import Inputs
from flashgen.runtime.verify.reference import lowprec, reference

OUT_FACTOR, OUT_ABSOLUTE = 2.0, 1e-5
LSE_ABSOLUTE, LSE_RELATIVE = 1e-5, 1e-6
# A row's error is measured against that row's largest value, but never below this part of the tensor's largest:
# values that cancel to almost nothing say nothing about the kernel.
ROW_FLOOR = 1e-3


@dataclass(frozen=True)
class Accuracy:
    """Largest absolute errors found and what was allowed; 0 for an empty tensor."""

    out_error: float = 0.0
    out_allowed: float = 0.0
    lse_error: float = 0.0


def check(out: Tensor, lse: Tensor | None, inputs: Inputs, *, label: str = "", rerun: str = "") -> Accuracy:
    """Raise VerifyError unless `out` (and `lse`, if given) keep the accuracy contract for `inputs`.

    The reference is computed here, after the kernel, so that recycled memory cannot hold the answer.
    `label` names spec, variant, problem and seed; `rerun` is the command that repeats the failure.
    """
    expected = reference(inputs.q, inputs.k, inputs.v, **inputs.meaning)
    plain = lowprec(inputs.q, inputs.k, inputs.v, **inputs.meaning)
    head_dim = inputs.q.shape[-1]
    return check_against(out, lse, expected, plain, lse_absolute(head_dim, inputs.softmax_scale), label=label,
                         rerun=rerun)


def check_against(out: Tensor, lse: Tensor | None, expected: tuple[Tensor, Tensor], plain: Tensor, lse_allowed: float,
                  *, label: str = "", rerun: str = "") -> Accuracy:
    """`check` with the reference's (out, lse) in fp64, and the output of torch's plain attention, at hand."""
    judge = _Judge(label, rerun)
    judge.same_form("out", out, expected[0].shape, plain.dtype)
    judge.same_specials("out", out, expected[0])
    out_error, out_allowed = judge.out_close(out, expected[0], plain)
    lse_error = 0.0
    if lse is not None:
        judge.same_form("lse", lse, expected[1].shape, torch.float32)
        judge.same_specials("lse", lse, expected[1])
        lse_error = judge.lse_close(lse, expected[1], lse_allowed)
    return Accuracy(out_error, out_allowed, lse_error)


def lse_absolute(head_dim: int, softmax_scale: float | None) -> float:
    """LSE_ABSOLUTE is for scores of unit variance; the rounding of q . k in fp32 grows with what multiplies it."""
    scale = head_dim ** -0.5 if softmax_scale is None else softmax_scale
    return LSE_ABSOLUTE * max(1.0, scale * head_dim ** 0.5)


def check_bits(actual: Tensor, expected: Tensor, what: str, *, label: str = "", rerun: str = "") -> None:
    """Raise VerifyError unless both tensors hold the same bits (NaN equals itself, -0 differs from 0)."""
    judge = _Judge(label, rerun)
    judge.same_form(what, actual, expected.shape, expected.dtype)
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[actual.element_size()]
    differs = actual.contiguous().view(bits) != expected.contiguous().view(bits)
    if differs.any():
        judge.fail(what, differs.to(torch.int8), actual, expected,
                   f"{int(differs.sum())} of {differs.numel()} elements are not bitwise equal", "the same bits")


@dataclass(frozen=True)
class _Judge:
    label: str
    rerun: str

    def same_form(self, what: str, actual: Tensor, shape: torch.Size, dtype: torch.dtype) -> None:
        if actual.shape != shape or actual.dtype != dtype:
            raise VerifyError(f"{what} is {actual.dtype} {tuple(actual.shape)}", where=self.label,
                              allowed=f"{dtype} {tuple(shape)}", next=self.rerun)

    def same_specials(self, what: str, actual: Tensor, expected: Tensor) -> None:
        """NaN, +inf and -inf in the same places. NaN in both is a match of places, never of values."""
        for name, test in (("NaN", torch.isnan), ("+inf", torch.isposinf), ("-inf", torch.isneginf)):
            differs = test(actual) != test(expected)
            if differs.any():
                self.fail(what, differs.to(torch.int8), actual, expected,
                          f"{name} in {int(differs.sum())} wrong places", f"{name} exactly where the reference has it")

    def out_close(self, out: Tensor, expected: Tensor, plain: Tensor) -> tuple[float, float]:
        """(largest error, allowed error). Rows are the last dimension."""
        if not expected.numel():
            return 0.0, 0.0
        finite = expected.isfinite()
        zero = torch.zeros((), dtype=torch.float64, device=expected.device)
        size = expected.abs().where(finite, zero)
        error = (out.double() - expected).abs().where(finite, zero)
        # Storing the result rounds it, so no output can promise less than half a unit in the last place.
        rounding = size * (torch.finfo(out.dtype).eps / 2)
        plain_error = (plain.double() - expected).abs().where(finite, zero).maximum(rounding)
        allowed = OUT_FACTOR * plain_error.max().item() + OUT_ABSOLUTE
        if error.max().item() > allowed:
            self.fail("out", error, out, expected, f"error {error.max().item():.3e}",
                      f"{allowed:.3e} = {OUT_FACTOR:g} * torch's plain attention + {OUT_ABSOLUTE:g}")
        row_size = size.amax(-1, keepdim=True).clamp_min(max(ROW_FLOOR * size.max().item(), OUT_ABSOLUTE))
        row_error, row_allowed = error / row_size, OUT_FACTOR * (plain_error / row_size).max().item()
        excess = (error - OUT_ABSOLUTE) / row_size
        if excess.max().item() > row_allowed:
            self.fail("out", excess, out, expected, f"error relative to its row {row_error.max().item():.3e}",
                      f"{row_allowed:.3e} = {OUT_FACTOR:g} * torch's plain attention")
        return error.max().item(), allowed

    def lse_close(self, lse: Tensor, expected: Tensor, absolute: float) -> float:
        finite = expected.isfinite()
        if not finite.any():
            return 0.0
        zero = torch.zeros((), dtype=torch.float64, device=expected.device)
        error = (lse.double() - expected).abs().where(finite, zero)
        excess = error - absolute - LSE_RELATIVE * expected.abs().where(finite, zero)
        if excess.max().item() > 0:
            self.fail("lse", excess, lse, expected, f"error {error.max().item():.3e}",
                      f"{absolute:g} + {LSE_RELATIVE:g} * |lse|")
        return error.max().item()

    def fail(self, what: str, badness: Tensor, actual: Tensor, expected: Tensor, found: str, allowed: str) -> NoReturn:
        """Point at the worst element."""
        worst = int(badness.flatten().argmax())
        at = tuple(int(i) for i in torch.unravel_index(torch.tensor(worst), badness.shape))
        names = _axes(what, len(at))
        place = ", ".join(f"{name} {i}" for name, i in zip(names, at, strict=True))
        raise VerifyError(f"{what} at [{place}]: {found}", where=self.label, allowed=allowed, next=self.rerun,
                          details=f"  ours {actual[at].item()!r}, reference {expected[at].item()!r}")


def _axes(what: str, rank: int) -> tuple[str, ...]:
    """Names of the dimensions of out and lse, dense and varlen."""
    named = {("out", 4): ("batch", "row", "head", "column"), ("out", 3): ("token", "head", "column"),
             ("lse", 3): ("batch", "head", "row"), ("lse", 2): ("head", "token")}
    return named.get((what, rank), tuple(f"axis{i}" for i in range(rank)))
