"""Standard attention as a family: the facts, and where the rest is."""
from __future__ import annotations

from flashgen.codegen.families.family import Family, Pass, lazily
from flashgen.codegen.families.shared.kernels import named
from flashgen.codegen.families.shared.launch import smallest_call
from flashgen.codegen.families.standard.launch import launch
from flashgen.codegen.families.standard.options import KERNELS, ONLY, TRAITS, Options

STANDARD = Family(
    name="standard", feature="mma_sync", rank=4, arch="sm_90", named_only=True,
    cards="any NVIDIA GPU from Ampere on: sm_80, sm_86, sm_89, sm_90, sm_120",
    passes=(Pass(
        "fwd", "attention", "many queries", lazily(f"{__package__}.lower", "lower"), launch, smallest_call,
        lazily(f"{__package__}.explain", "explain_kernel"), kernels=named(*KERNELS), shown=KERNELS[0]),),
    options=Options, only=ONLY, traits=TRAITS, generation=1,
    story="three kernels; S and P go through device memory (before 2022)")
