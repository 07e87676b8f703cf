"""Spec fields that fa3 alone has, and the rules that it adds."""
from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from flashgen.codegen.families.family import Option, Trait
from flashgen.codegen.families.shared.kernels import KERNEL, Kernel, kernel_trait
from flashgen.codegen.families.shared.sums import DETERMINISTIC, DETERMINISTIC_TRAIT, SUM_RULES
from flashgen.codegen.spec.rule import Only, Rule, changed, nearest_number, shown
from flashgen.codegen.warpgroup import MAX_WARPGROUPS, WARPGROUP_ROWS, WARPGROUP_WARPS
from flashgen.errors import SpecError

if TYPE_CHECKING:
    from flashgen.codegen.spec import fields


class Options:
    q_stages: Annotated[int | None, Option(
        "query tiles in flight per warpgroup; nothing means that the plan decides", "tiles", "q{}".format,
        override=True, limits={"ge": 1, "le": 2})] = None
    p_operand: Annotated[Literal["registers", "shared"] | None, Option(
        "where P waits to be multiplied with V; nothing means that the plan decides", override=True,
        short={"shared": "psmem", "registers": "preg"}.__getitem__)] = None
    schedule: Annotated[Literal["overlap", "pingpong"] | None, Option(
        "what runs under a softmax. overlap: the PV product of the key tile before; pingpong: also the products of "
        "the other warpgroups, which take turns; nothing means that the plan decides", override=True)] = None
    split: Annotated[bool, Option(
        "cut the last, incomplete wave of query tiles along the keys, so that no SM idles, and merge the parts",
        short="split".format)] = False
    pack_gqa: Annotated[bool, Option(
        "the query heads of a kv head, 64 at most, share query tiles: for few queries, so that keys are read once",
        short="packed".format)] = False
    deterministic: Annotated[bool, DETERMINISTIC] = False
    kernel: Annotated[Kernel | None, KERNEL] = None


if TYPE_CHECKING:
    class Spec(fields.Spec, Options):
        """A Spec of this family, as a type checker sees it."""


# A kernel that packs query heads serves calls that had better not be packed, and the reverse, but for calls whose heads
# no tile holds (None). Likewise with those that split.
TRAITS = (
    Trait("pack_gqa", False, lambda wanted: (False,) if wanted is None else (wanted, not wanted)),
    Trait("split", False, lambda wanted: (wanted, not wanted)),
    DETERMINISTIC_TRAIT,
    kernel_trait(None),
)

# What the backward pass takes of these fields: its kernel has one schedule for each tile.
BACKWARD_ONLY = (
    *(Only(name, (None,), "its tile table decides") for name in ("q_stages", "p_operand", "schedule")),
    *(Only(name, (False,), "its tiles are tiles of keys") for name in ("split", "pack_gqa")),
    *(Only(name, ("none",), "kernels of another family serve it") for name in ("score", "mask", "sink")),
    Only("align", ("bottom_right",), "kernels of another family serve it"),
)

_MMA_WARPS = tuple(WARPGROUP_WARPS * count for count in range(1, MAX_WARPGROUPS + 1))
_TILE_ROWS = tuple(WARPGROUP_ROWS * count for count in range(1, MAX_WARPGROUPS + 1))
# Options that are refused beside the value of a field: (option, field, value, why).
_BESIDE: tuple[tuple[str, str, object, str], ...] = (
    ("split", "batch_invariant", True, ": the other requests decide which tiles are cut"),
    ("split", "window", True, ": its tiles see few keys, whatever the sequence holds"),
    ("split", "kv_layout", "varlen", ": how many tiles there are, and how long, is known on the device only"),
    ("pack_gqa", "window", True, " true"),
    ("pack_gqa", "kv_layout", "varlen", " varlen"),
)


def _warps(spec: Spec) -> SpecError | None:
    if spec.roles is None or spec.roles.mma in _MMA_WARPS:
        return None
    return SpecError(f"roles.mma is {spec.roles.mma} with family fa3, whose warps multiply in groups of "
                     f"{WARPGROUP_WARPS}", where="Spec.roles.mma", allowed=_words(_MMA_WARPS),
                     nearest=nearest_number(_MMA_WARPS, spec.roles.mma))


def _tile(spec: Spec) -> SpecError | None:
    if spec.tile is None:
        return None
    rows = _TILE_ROWS if spec.roles is None else (spec.roles.mma // WARPGROUP_WARPS * WARPGROUP_ROWS,)
    if spec.tile.m in rows:
        return None
    given = "" if spec.roles is None else f" and roles.mma {spec.roles.mma}"
    return SpecError(f"tile.m is {spec.tile.m} with family fa3{given}", where="Spec.tile.m",
                     allowed=f"{_words(rows)}: {WARPGROUP_ROWS} rows for each group of {WARPGROUP_WARPS} mma warps",
                     nearest=nearest_number(rows, spec.tile.m))


def _turns(spec: Spec) -> SpecError | None:
    alone = ((spec.roles is not None and spec.roles.mma == WARPGROUP_WARPS)
             or (spec.tile is not None and spec.tile.m == WARPGROUP_ROWS))
    if spec.schedule != "pingpong" or not alone:
        return None
    return SpecError("schedule is pingpong with one warpgroup, which has none to take turns with",
                     where="Spec.schedule", allowed="overlap; or two warpgroups and more", nearest="overlap")


def _beside(spec: Spec) -> SpecError | None:
    for option, name, value, why in _BESIDE:
        if getattr(spec, option) and getattr(spec, name) == value:
            return SpecError(
                f"{option} is true together with {name}{why}", where=f"Spec.{option}", allowed="false",
                nearest=f"{option}: false",
                next=f"when both are lists, add `- {{{name}: {shown(value)}, {option}: true}}` to exclude")
    return None


def _plain(spec: Spec) -> SpecError | None:
    """Kernels for few queries know the softmax of plain scores alone."""
    asked = next((name for name in ("split", "pack_gqa") if getattr(spec, name)), None)
    reason = changed(spec)
    if asked is None or reason is None:
        return None
    return SpecError(f"{asked} is true together with {reason}", where=f"Spec.{asked}", allowed="false",
                     nearest=f"{asked}: false")


def _words(numbers: tuple[int, ...]) -> str:
    return ", ".join(map(str, numbers))


RULES = (
    *SUM_RULES,
    Rule(f"`roles.mma` is {_words(_MMA_WARPS)}: whole warpgroups.", _warps),
    Rule(f"`tile.m` is {WARPGROUP_ROWS} for each mma warpgroup: {_words(_TILE_ROWS)}.", _tile),
    Rule("`schedule: pingpong` needs two mma warpgroups or more.", _turns),
    Rule("`split: true` excludes `batch_invariant: true`, `window: true` and `kv_layout: varlen`, which split "
         "nothing.", _beside),
    Rule("`pack_gqa: true` excludes `window: true` and `kv_layout: varlen`.", _beside),
    Rule("`split: true` and `pack_gqa: true` exclude `score`, `mask`, `sink` and `normalize`.", _plain),
)
