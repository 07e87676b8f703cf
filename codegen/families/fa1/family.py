"""FlashAttention-1 as a family: the facts, and where the rest is."""
from __future__ import annotations

from dataclasses import replace

from flashgen.codegen.families.fa1.launch import backward_grid, launch
from flashgen.codegen.families.fa1.options import ONLY, TRAITS, Options
from flashgen.codegen.families.family import Family, Pass, lazily
from flashgen.codegen.families.shared.backward import backward
from flashgen.codegen.families.shared.launch import smallest_call

FA1 = Family(
    name="fa1", feature="mma_sync", rank=3, arch="sm_90", named_only=True,
    cards="any NVIDIA GPU from Ampere on: sm_80, sm_86, sm_89, sm_90, sm_120",
    passes=(
        Pass("fwd", "attention", "many queries", lazily(f"{__package__}.lower", "lower"), launch, smallest_call,
             lazily(f"{__package__}.explain", "explain_forward")),
        replace(backward(f"{__package__}.bwd", grid=backward_grid),
                explain=lazily(f"{__package__}.explain", "explain_backward")),
    ),
    options=Options, only=ONLY, traits=TRAITS, generation=2,
    story="S and P stay on chip; O, m and l go to device memory and back for each tile of keys (2022)")
