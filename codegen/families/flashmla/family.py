"""FlashMLA as a family: the facts, and where the rest is."""
from __future__ import annotations

from flashgen.codegen.families.family import Family, Pass, lazily
from flashgen.codegen.families.flashmla.launch import launch_decode, launch_schedule, smallest_decode, smallest_queries
from flashgen.codegen.families.flashmla.options import ONLY, RULES, TRAITS, Options

FLASHMLA = Family(
    name="flashmla", feature="wgmma", rank=1, arch="sm_90a", cards="Hopper: sm_90a",
    passes=(Pass("decode", "mla_decode", "a few new ones over a cache", lazily(f"{__package__}.lower", "lower_decode"),
                 launch_decode, smallest_decode, lazily(f"{__package__}.explain", "explain_decode")),
            Pass("schedule", "mla_schedule", "which block of a decode does what, worked out on the device",
                 lazily(f"{__package__}.lower", "lower_schedule"), launch_schedule, smallest_queries,
                 one_variant=True)),
    options=Options, only=ONLY, rules=RULES, traits=TRAITS, typical={"pass_": "decode", "page_size": 64},
    short_names=("mla",), emulated=True, trace_depth=3, generation=6,
    story="all heads share the latent cache: a key is read once and serves as its own value (2025)")
