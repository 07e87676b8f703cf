"""FlashMLA as a family: the facts, and where the rest is."""
from __future__ import annotations

from typing import Any

from flashgen.codegen.families.family import Family, Pass
from flashgen.codegen.families.flashmla.launch import launch_decode, launch_schedule, smallest_decode, smallest_queries
from flashgen.codegen.families.flashmla.options import ONLY, RULES, TRAITS, Options


def _decode(spec: Any, target: Any) -> Any:
    from flashgen.codegen.families.flashmla.lower import lower_decode

    return lower_decode(spec, target)


def _schedule(spec: Any, target: Any) -> Any:
    from flashgen.codegen.families.flashmla.lower import lower_schedule

    return lower_schedule(spec, target)


def _explain(plan: Any, spec: Any, **call: Any) -> Any:
    from flashgen.codegen.families.flashmla.explain import explain_decode

    return explain_decode(plan, **call)


FLASHMLA = Family(
    name="flashmla", feature="wgmma", rank=1, arch="sm_90a", cards="Hopper: sm_90a",
    passes=(Pass("decode", "mla_decode", "a few new ones over a cache", _decode,
                 launch_decode, smallest_decode, _explain),
            Pass("schedule", "mla_schedule", "which block of a decode does what, worked out on the device", _schedule,
                 launch_schedule, smallest_queries, one_variant=True)),
    options=Options, only=ONLY, rules=RULES, traits=TRAITS, typical={"pass_": "decode", "page_size": 64},
    short_names=("mla",), emulated=True, trace_depth=3)
