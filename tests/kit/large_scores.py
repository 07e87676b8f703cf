"""Inputs whose scores are far from zero and exact, for the tests of B114 on the emulator and on the card."""
from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from mla_kit import truth_of
from torch import Tensor

from flashgen.runtime.ops.attention.problem import Inputs, Problem
from flashgen.runtime.ops.mla_decode.problem import MlaInputs, MlaProblem

if TYPE_CHECKING:
    from flashgen.codegen.spec.spec import Spec

HUGE = 1.0e9  # half a unit in the last place of its reference is 64 powers of two; fp16 q and k still reach it
SOFT = [2.0**i for i in (9, 12, 13, 14, 17)]
FAR_UP = 2.0**15  # a query's first column
EPS = {"bf16": 2.0**-8, "fp16": 2.0**-11}


def _ordinary(n: int) -> list[float]:
    return [(j * 5 % 23 - 11) / 4 for j in range(n)]


# Scores of n keys, as far as elements of a dtype can make them.
PATTERNS: dict[str, Callable[[int, str], list[float]]] = {
    "one huge score": lambda n, dtype: [HUGE] * n,
    "one hugely negative score": lambda n, dtype: [-HUGE] * n,
    "near the largest product": lambda n, dtype: [2.0e38 if dtype == "bf16" else 2.0e9] * n,
    "small, then huge": lambda n, dtype: _ordinary(n // 4) + [HUGE] * (n - n // 4),
    "far below, then ordinary": lambda n, dtype: [-HUGE] * (n // 4) + _ordinary(n - n // 4),
    "ordinary, then far below": lambda n, dtype: _ordinary(n - n // 4) + [-HUGE] * (n // 4),
    "far below, then huge": lambda n, dtype: [-HUGE] * (n // 4) + [HUGE / 2] * (n - n // 4),
    "growing": lambda n, dtype: [10.0 ** (9 * (j // 10 * 10) / n) for j in range(n)],
    "falling": lambda n, dtype: [10.0 ** (9 - 9 * (j // 10 * 10) / n) for j in range(n)],
    "growing from far below": lambda n, dtype: [-(10.0 ** (9 - 9 * (j // 10 * 10) / n)) for j in range(n)],
}


def _columns(scores: Sequence[float], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Two columns of keys that give a query (FAR_UP, 1) these scores. The second holds what is left of small ones."""
    exact = torch.tensor(scores, dtype=torch.float64)
    far = (exact / FAR_UP).to(dtype)
    far = torch.where(exact.abs() < 16, torch.zeros_like(far), far)
    rest = exact - far.double() * FAR_UP
    return far, torch.where(rest.abs() < 16, rest, torch.zeros_like(rest)).to(dtype)


def inputs_of(spec: Spec, scores: Sequence[float], rows_between: int = 1, device: str = "cpu") -> Inputs:
    """70 queries, every `rows_between`-th of which has these scores with the keys; those between have ordinary ones."""
    n, varlen = len(scores), spec.kv_layout == "varlen"
    problem = Problem(1, (70,) if varlen else 70, (n,) if varlen else n, 2, 1, spec.head_dim_qk, spec.head_dim_v,
                      causal=spec.causal, window=(n // 2, n // 2) if spec.window else (-1, -1), dtype=spec.dtype,
                      softmax_scale=1.0)
    inputs = problem.make_inputs()
    q, k = torch.zeros_like(inputs.q), torch.zeros_like(inputs.k)
    q[..., 2] = 1.0
    far_rows = q.narrow(-3, 0, 70).unflatten(-3, (-1, rows_between)).select(-3, 0) if 70 % rows_between == 0 else q
    far_rows[..., 0], far_rows[..., 1], far_rows[..., 2] = FAR_UP, 1.0, 0.0
    columns = _columns(scores, k.dtype)
    k[..., 0, 0], k[..., 0, 1] = columns
    k[..., 0, 2] = torch.tensor(_ordinary(n)).to(k.dtype)
    inputs = inputs.with_(q=q, k=k)
    return inputs.with_(**{name: value.to(device) for name, value in vars(inputs).items() if isinstance(value, Tensor)})


def mla_inputs_of(spec: Spec, scores: Sequence[float], device: str = "cpu") -> MlaInputs:
    """One request; the scores are made by the last columns of the keys, which no value has."""
    n = len(scores)
    problem = MlaProblem((n, n // 2), 3, 1, page_size=spec.page_size, head_dim_qk=spec.head_dim_qk, dtype=spec.dtype)
    inputs = replace(problem.make_inputs(), softmax_scale=1.0)
    q, cache = torch.zeros_like(inputs.q), inputs.kv_cache.clone()
    q[..., -2], q[..., -1] = FAR_UP, 1.0
    columns = torch.stack(_columns(scores, q.dtype), -1)
    for i, length in enumerate(problem.lengths):
        for position in range(length):
            at = (i, position) if inputs.page_table is None else (
                int(inputs.page_table[i, position // cache.shape[1]]), position % cache.shape[1])
            cache[at][-2:] = columns[position]
    made = inputs.with_(q=q, kv_cache=cache)
    return made.with_(**{name: value.to(device) for name, value in vars(made).items() if isinstance(value, Tensor)})


def judge(out: Tensor, lse: Tensor | None, inputs: Inputs | MlaInputs, scores: Sequence[float],
          level: float = 0.0) -> None:
    """Against fp64. Weights are 0 and 1 parts of a sum, or their scores lie around `level`, which one of fp32's last
    places moves by level * 2^-23. A tile's weights may be made from differences to an earlier reference, rounded at its
    size: those of references below 2^13 powers of two show in lse (contracts.md)."""
    from flashgen.runtime.verify.reference import reference

    if isinstance(inputs, MlaInputs):
        exact, exact_lse, _ = truth_of(inputs)
    else:
        exact, exact_lse = reference(inputs.q, inputs.k, inputs.v, **inputs.meaning)
    eps = EPS["bf16" if out.dtype is torch.bfloat16 else "fp16"]
    size = float(exact.abs().max())
    error = float((out.double() - exact).abs().max())
    assert error <= (2 * eps + level * 2.0**-22) * size, f"error {error}, values up to {size}"
    if lse is not None:
        passed = max((abs(score) for score in scores if abs(score) < 2**13 * math.log(2)), default=0.0)
        atol = 1e-5 + passed * 2.0**-24
        assert torch.allclose(lse.double(), exact_lse, rtol=1e-6, atol=atol), f"lse {lse}, expected {exact_lse}"
