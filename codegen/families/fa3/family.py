"""FlashAttention-3 as a family: the facts, and where the rest is."""
from __future__ import annotations

from flashgen.codegen.families.fa3.bwd_launch import grid
from flashgen.codegen.families.fa3.bwd_loops import loops as backward_loops
from flashgen.codegen.families.fa3.launch import launch, prefer
from flashgen.codegen.families.fa3.loops import loops
from flashgen.codegen.families.fa3.options import BACKWARD_ONLY, RULES, TRAITS, Options
from flashgen.codegen.families.fa3.tiles import TILES
from flashgen.codegen.families.family import Family, lazily
from flashgen.codegen.families.shared.backward import backward
from flashgen.codegen.families.shared.forward import ONLY, forward

FA3 = Family(
    name="fa3", feature="wgmma", rank=1, arch="sm_90a", cards="Hopper: sm_90a",
    passes=(forward(lazily(f"{__package__}.lower", "lower"), launch, loops, prefer),
            backward(f"{__package__}.bwd", loops=backward_loops, grid=grid, only=BACKWARD_ONLY)),
    options=Options, only=ONLY, rules=RULES, traits=TRAITS, tiles=TILES, needs_maps=True, trace_depth=2,
    generation=5, story="TMA copies and wgmma run beside the softmax of another tile (2024)")
