"""Attention in Triton as a family: the facts, and where the rest is."""
from __future__ import annotations

from flashgen.codegen.families.family import Family, Pass, lazily
from flashgen.codegen.families.shared.kernels import named
from flashgen.codegen.families.shared.launch import smallest_call
from flashgen.codegen.families.triton.launch import launch, launch_backward
from flashgen.codegen.families.triton.options import BACKWARD, BACKWARD_ONLY, ONLY, RULES, TRAITS, Options
from flashgen.codegen.families.triton.tiles import TILES

TRITON = Family(
    name="triton", feature="triton", rank=2, arch="gfx942",
    cards="any GPU that Triton compiles for: MI300X (gfx942), and NVIDIA GPUs from Ampere on",
    passes=(Pass("fwd", "attention", "many queries", lazily(f"{__package__}.lower", "lower"), launch, smallest_call,
                 lazily(f"{__package__}.explain", "explain_kernel")),
            Pass("bwd", "attention_backward", "gradients of fwd", lazily(f"{__package__}.bwd", "lower"),
                 launch_backward, smallest_call, lazily(f"{__package__}.explain", "explain_kernel"),
                 kernels=named(*BACKWARD), shown=BACKWARD[1], only=BACKWARD_ONLY, follows=True)),
    options=Options, only=ONLY, rules=RULES, traits=TRAITS, tiles=TILES, engine="triton", fallback=True,
    generation=4,
    story="the loops of FlashAttention-2 in a tenth of the lines; a compiler schedules them (2022)")
