"""What a lookup asks of a kernel: the spec fields that decide whether it can serve a call, and its arch.

Tile, stages and the like are absent: two kernels that differ only there serve the same calls. Which of several kernels
serves a call is an order of preference for each of the fields, said in PREFERENCES and in the traits of families.
"""
from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from flashgen.codegen.families.family import Family
from flashgen.codegen.families.registry import FAMILIES
from flashgen.codegen.plan import Plan
from flashgen.codegen.spec.rule import EXTRA
from flashgen.files import Arch, Name


@dataclass(frozen=True)
class Wanted:
    """What a call asks of its kernel. `spec` is "" or a handle."""

    dtype: str
    head_dim_qk: int
    head_dim_v: int
    causal: bool
    window: bool
    kv_layout: str
    lse: bool
    spec: str = ""
    tensor_maps: bool = True  # whether tensor maps can describe q, k, v and out: tensor_map.fits_maps
    op: str = "attention"     # the operation, which a pass of each family answers
    traits: tuple[tuple[str, Any], ...] = ()  # (option, wanted value) where the call says: Trait of families/family.py
    dropout: bool = False     # whether weights are dropped: no trait, since families without it must not serve


DROPOUT = "dropout"  # a spec field; it tells kernels apart as expressions do, so that no call gets one unasked


class Selector(NamedTuple):
    arch: Arch
    family: Name
    pass_: Name
    dtype: Name
    head_dim_qk: int
    head_dim_v: int
    kv_layout: Name
    score: str
    causal: bool
    window: bool
    lse: bool
    batch_invariant: bool
    traits: tuple[tuple[Name, object], ...]  # (option, value) of the family's traits, in its order


class Preference(NamedTuple):
    """Fields of a selector, and what of them serves a call, the best first."""

    fields: tuple[str, ...]
    serving: Callable[[Wanted], list[tuple[Any, ...]]]


# The first decides most; the traits of the family come behind them, in the family's order.
PREFERENCES = (
    # A window kernel also serves calls without a mask and causal ones.
    Preference(("causal", "window"),
               lambda wanted: [(wanted.causal, wanted.window)] + ([] if wanted.window else [(False, True)])),
    # A kernel that can write lse also serves calls without.
    Preference(("lse",), lambda wanted: [(True,)] if wanted.lse else [(True,), (False,)]),
    # A kernel whose bits hang on no neighbour also serves calls that do not ask for it.
    Preference(("batch_invariant",), lambda wanted: [(False,), (True,)]),
)


def serving(wanted: Wanted, arch: str, family: Family) -> Iterator[Selector]:
    """Selectors of the family's kernels that serve the call, the best first."""
    asked: dict[str, Any] = {
        "arch": arch, "family": family.name, "pass_": family.by_op[wanted.op].name, "dtype": wanted.dtype,
        "score": score_of(wanted.dropout), "head_dim_qk": wanted.head_dim_qk, "head_dim_v": wanted.head_dim_v,
        "kv_layout": wanted.kv_layout}
    own = [[(trait.option, value) for value in trait.serving(dict(wanted.traits).get(trait.option, trait.unasked))]
           for trait in family.traits]
    for values in itertools.product(*(preference.serving(wanted) for preference in PREFERENCES)):
        for preference, value in zip(PREFERENCES, values, strict=True):
            asked |= zip(preference.fields, value, strict=True)
        for traits in itertools.product(*own):
            yield Selector(**asked, traits=traits)


def score_of(dropout: bool) -> str:
    """Selector.score of kernels without expressions."""
    return f"none; {DROPOUT}: True" if dropout else "none"


def selector(fields: Iterable[tuple[str, object]], arch: str) -> Selector:
    """The selector of a variant from its spec fields, (YAML name, value) as in `Plan.spec`. KeyError if one lacks.

    `score` tells apart all that expressions and the like change, so that no call gets such a kernel unasked.
    """
    values: dict[str, Any] = dict(fields)
    changes = [f"{name}: {values[name]}" for name in EXTRA if name in values]
    if changes:
        values["score"] = "; ".join([str(values["score"]), *changes])
    family = FAMILIES.get(str(values["family"]))
    traits = tuple((trait.option, values[trait.option]) for trait in family.traits) if family else ()
    common = {name: values[name.rstrip("_")] for name in Selector._fields if name not in ("arch", "traits")}
    return Selector(**common, arch=arch, traits=traits)


def selector_of(plan: Plan) -> Selector:
    return selector(plan.spec, plan.target)
