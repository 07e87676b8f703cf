"""What a lookup asks of a kernel: the spec fields that decide whether it can serve a call, and its arch.

Tile, stages and the like are absent: two kernels that differ only there serve the same calls.
"""
from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from flashgen.codegen.plan import Plan
from flashgen.files import Arch, Name

# Spec fields that only variants which they change have (spec_fields.EXTRA; bundles are read without the generator).
EXTRA = ("mask", "params", "align", "sink", "normalize")


class Selector(NamedTuple):
    arch: Arch
    family: Name
    pass_: Name
    dtype: Name
    head_dim_qk: int
    head_dim_v: int
    causal: bool
    window: bool
    kv_layout: Name
    page_size: int | None
    score: str
    lse: bool
    batch_invariant: bool
    split: bool
    pack_gqa: bool


def selector(fields: Iterable[tuple[str, object]], arch: str) -> Selector:
    """The selector of a variant from its spec fields, (YAML name, value) as in `Plan.spec`. KeyError if one lacks.

    `score` tells apart all that expressions and the like change, so that no call gets such a kernel unasked.
    """
    values = dict(fields)
    changes = [f"{name}: {values[name]}" for name in EXTRA if name in values]
    if changes:
        values["score"] = "; ".join([str(values["score"]), *changes])
    return Selector(arch, *(values[name.rstrip("_")] for name in Selector._fields[1:]))  # type: ignore[arg-type]


def selector_of(plan: Plan) -> Selector:
    return selector(plan.spec, plan.target)
