"""FlashAttention-2 as a family: the facts, and where the rest is."""
from __future__ import annotations

from flashgen.codegen.families.fa2.launch import launch
from flashgen.codegen.families.fa2.loops import loops
from flashgen.codegen.families.fa2.options import BACKWARD_ONLY, RULES, TRAITS, Options
from flashgen.codegen.families.fa2.tiles import TILES
from flashgen.codegen.families.family import Family, lazily
from flashgen.codegen.families.shared.backward import backward
from flashgen.codegen.families.shared.forward import ONLY, forward

FA2 = Family(
    name="fa2", feature="mma_sync", rank=2, arch="sm_90",
    cards="any NVIDIA GPU from Ampere on: sm_80, sm_86, sm_89, sm_90, sm_120",
    passes=(forward(lazily(f"{__package__}.lower", "lower"), launch, loops),
            backward(f"{__package__}.bwd", only=BACKWARD_ONLY)),
    options=Options, only=ONLY, rules=RULES, traits=TRAITS, tiles=TILES, default=True, emulated=True,
    generation=3, story="each block owns a query tile: O, m and l stay in registers for the whole walk (2023)")
