"""The decode over a latent cache as the engines ask for it: runtime/ops/op.py."""
from __future__ import annotations

from collections.abc import Iterator

from flashgen.codegen.plan import Plan
from flashgen.codegen.spec.spec import Spec
from flashgen.runtime.ops.mla_decode.edges import edge_problems
from flashgen.runtime.ops.mla_decode.identities import identities, run
from flashgen.runtime.ops.mla_decode.problem import MlaInputs, MlaProblem

__all__ = ["identities", "inputs", "problems", "run"]


def problems(spec: Spec, plan: Plan, seed: int, emulated: bool) -> Iterator[MlaProblem]:
    return edge_problems(spec, seed, emulated)


def few_problems(spec: Spec, plan: Plan) -> Iterator[MlaProblem]:
    return edge_problems(spec, 0, emulated=True)


def inputs(problem: MlaProblem, spec: Spec, device: str) -> MlaInputs:
    return problem.make_inputs(device)
