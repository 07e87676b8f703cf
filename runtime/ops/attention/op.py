"""Attention as the engines ask for it: runtime/ops/op.py."""
from __future__ import annotations

from collections.abc import Iterator

from flashgen.codegen.plan import Plan
from flashgen.codegen.spec.spec import Spec
from flashgen.runtime.launch.values import is_persistent
from flashgen.runtime.ops.attention.edges import edge_problems, emulated_problems, few_problems, tile_shape
from flashgen.runtime.ops.attention.identities import changes_scores, identities, run
from flashgen.runtime.ops.attention.problem import Inputs, Problem

__all__ = ["few_problems", "identities", "inputs", "problems", "run"]


def problems(spec: Spec, plan: Plan, seed: int, emulated: bool) -> Iterator[Problem]:
    tiles = tile_shape(plan)
    if emulated:
        return emulated_problems(spec, *tiles, seed, persistent=is_persistent(plan))
    return edge_problems(spec, *tiles, seed)


def inputs(problem: Problem, spec: Spec, device: str) -> Inputs:
    found = problem.make_inputs(device)
    return found.changed_by(spec, seed=problem.seed) if changes_scores(spec) else found
