"""Standard attention as a family: the facts, and where the rest is."""
from __future__ import annotations

from typing import Any

from flashgen.codegen.families.family import Family, Pass
from flashgen.codegen.families.shared.launch import smallest_call
from flashgen.codegen.families.standard.launch import launch
from flashgen.codegen.families.standard.options import KERNELS, ONLY, RULES, TRAITS, Options


def _lower(spec: Any, target: Any) -> Any:
    from flashgen.codegen.families.standard.lower import lower

    return lower(spec, target)


def _explain(plan: Any, spec: Any, **call: Any) -> Any:
    from flashgen.codegen.families.standard.explain import explain_kernel

    return explain_kernel(plan, **call)


STANDARD = Family(
    name="standard", feature="mma_sync", rank=3, arch="sm_90",
    cards="any NVIDIA GPU from Ampere on: sm_80, sm_86, sm_89, sm_90, sm_120",
    passes=(Pass("fwd", "attention", "many queries", _lower, launch, smallest_call, _explain,
                 kernels=tuple((("kernel", name),) for name in KERNELS)),),
    options=Options, only=ONLY, rules=RULES, traits=TRAITS, typical={"kernel": KERNELS[0]})
