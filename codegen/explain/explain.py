"""`flashgen explain`: what a variant will do before any GPU is touched."""
from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from flashgen.codegen.explain.counts import Counts, Shape, count
from flashgen.codegen.explain.mla import DecodeExplanation, explain_decode
from flashgen.codegen.explain.text import draw
from flashgen.codegen.families.registry import lower
from flashgen.codegen.plan import Plan
from flashgen.codegen.spec.spec import Spec, load_specs, spec_path
from flashgen.errors import UnsupportedError

# The variant shown for a file when the caller names none: what most people run.
TYPICAL = {"arch": "sm_90", "dtype": "bf16", "head_dim_qk": 128, "causal": True, "window": False, "kv_layout": "dense"}


class Explanation(Counts):
    """str() is one screen of text."""

    def __str__(self) -> str:
        return draw(self)


def explain(spec: Spec | str | os.PathLike[str], *, registers: int | None = None, variants: int = 1,
            **problem: Any) -> Explanation | DecodeExplanation:
    """What the kernel of `spec` does for a call of these sizes (fields of Shape or DecodeShape: batch, seqlen_q, ...).

    Of a spec file (a path, or the name of a shipped one) the most ordinary variant is taken, see TYPICAL. `registers`
    per thread are a build's. Raises SpecError, PlanError, and UnsupportedError for sizes that make no call.
    """
    if not isinstance(spec, Spec):
        specs = load_specs(spec_path(spec)).specs
        spec, variants = typical(specs), len(specs)
    return explain_plan(lower(spec), spec, registers=registers, variants=variants, **problem)


def explain_plan(plan: Plan, spec: Spec, *, registers: int | None = None, variants: int = 1, **problem: Any
                 ) -> Explanation | DecodeExplanation:
    """`explain` for a plan that is there already, made from `spec`."""
    if spec.pass_ == "decode":
        return explain_decode(plan, registers=registers, variants=variants, **problem)
    if spec.pass_ != "fwd":
        raise UnsupportedError(f"{spec.variant} is of pass {spec.pass_}, whose work is not counted here",
                               where="explain", allowed="passes fwd and decode",
                               next="flashgen build SPEC -o DIR writes the plan and the kernel")
    return Explanation(**vars(count(plan, spec, Shape.of(**problem), registers=registers, variants=variants)))


def typical(specs: Sequence[Spec]) -> Spec:
    """The variant that agrees with TYPICAL in most fields; the first of several."""
    return max(specs, key=lambda spec: (spec.page_size == 64 and spec.pass_ == "decode",
                                        sum(getattr(spec, name) == value for name, value in TYPICAL.items())))
