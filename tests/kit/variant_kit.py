"""What the tests of variants share: a call of one, judged against torch's evaluation of the same expressions."""
from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

import flashgen
from flashgen.codegen.spec.spec import Spec
from flashgen.runtime.emulator.schedule import Schedule, scheduled
from flashgen.runtime.ops.attention.problem import Inputs, Problem
from flashgen.runtime.select import lookup
from flashgen.runtime.select.variant import Variant
from flashgen.runtime.verify.compare import check, named

FAMILIES = ("fa2", "fa3")
SMALL: dict[str, dict[str, Any]] = {  # tiles so small that short sequences have many
    "fa2": {"family": "fa2", "arch": "sm_90", "tile": {"m": 64, "n": 32}, "roles": {"mma": 4}, "stages": 2},
    "fa3": {"family": "fa3", "arch": "sm_90a", "tile": {"m": 128, "n": 32}, "stages": 2}}


def small(family: str, *expressions: str, **more: Any) -> Variant:
    return flashgen.variant(*expressions, **{**SMALL[family], **more})


def spec_of(variant: Variant, problem: Problem) -> Spec:
    return variant.spec(pass_="fwd", dtype=problem.dtype, head_dim_qk=problem.head_dim_qk,
                        head_dim_v=problem.head_dim_v, kv_layout="varlen" if problem.varlen else "dense")


def solve(variant: Variant, problem: Problem, params: Mapping[str, Any] | None = None, *, nans: bool = False,
          policies: tuple[str, ...] = ("random", "lazy"), inputs: Inputs | None = None) -> torch.Tensor:
    """`out` of the variant on the emulator, judged against fp64. `nans`: in some values, so that hidden ones count."""
    spec = spec_of(variant, problem)
    given = problem.make_inputs() if inputs is None else inputs
    if nans:
        v = given.v.clone()
        v.view(-1, *v.shape[-2:])[5::29, :, ::3] = float("nan")
        given = given.with_(v=v)
    given = given.with_mods(spec, params, problem.seed)
    out = torch.empty(0)
    for policy in policies:
        with scheduled(Schedule(policy, problem.seed)):
            result = flashgen.attention(given.q, given.k, given.v, **given.keywords, return_lse=spec.lse, spec=variant)
        out, lse = result if spec.lse else (result, None)
        check(named(out, lse), given, label=f"{spec.variant}, {problem}, {spec.expressions.signature}")
    return out


@contextmanager
def counted_builds() -> Iterator[list[str]]:
    """The variants that are built in this context."""
    built: list[str] = []
    emulated = lookup._emulated

    def counting(spec: Spec) -> Any:
        built.append(spec.variant)
        return emulated(spec)
    with mock.patch.object(lookup, "_emulated", counting):
        yield built
