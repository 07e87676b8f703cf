"""Tensors on the CPU have gradients: flashgen.attention both ways, by emulated kernels."""
from __future__ import annotations

import pytest
import torch

import flashgen
from flashgen.runtime.ops.attention_backward.problem import BackwardProblem, by_name
from flashgen.runtime.verify.compare import check


@pytest.mark.parametrize("problem", [
    BackwardProblem(2, 33, 45, 2, 1, causal=True, lse_gradient=True), BackwardProblem(1, 45, 20, 1, 1, causal=True),
    BackwardProblem(3, (5, 0, 70), (3, 4, 90), 2, 1, tail=2, lse_gradient=True)], ids=str)
def test_autograd(problem: BackwardProblem) -> None:
    x = problem.make_inputs()
    inputs = tuple(t.detach().clone().requires_grad_() for t in (x.q, x.k, x.v))
    options = {name: value for name, value in x.keywords.items() if name != "dlse"}
    out, lse = flashgen.attention(*inputs, **options, return_lse=True)
    outputs = (out, lse) if x.dlse is not None else (out,)
    check(by_name(torch.autograd.grad(outputs, inputs, (x.dout, x.dlse)[:len(outputs)])), x)
