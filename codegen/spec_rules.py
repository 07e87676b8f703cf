"""The rules between the fields of a Spec: what the table of single fields cannot say.

A rule's `about` is what specs/README.md prints, and its `check` gives the error, whose `where` names the field to
point at. Fields that one family alone has are marked in the table itself (spec_fields.py).
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flashgen.codegen import spec_expr
from flashgen.codegen.target import FEATURES, TARGETS
from flashgen.codegen.warpgroup import MAX_WARPGROUPS, WARPGROUP_ROWS, WARPGROUP_WARPS
from flashgen.errors import SpecError

if TYPE_CHECKING:
    from flashgen.codegen.spec_fields import Spec

FAMILIES: dict[str, str] = {"fa2": "mma_sync", "fa3": "wgmma"}  # family -> the feature that its targets have
DEFAULT_FAMILY = "fa2"  # of a name that does not begin with a family
_MMA_WARPS = tuple(WARPGROUP_WARPS * count for count in range(1, MAX_WARPGROUPS + 1))
_TILE_ROWS = tuple(WARPGROUP_ROWS * count for count in range(1, MAX_WARPGROUPS + 1))

# (field, value, why): what no tile is cut under.
_UNSPLIT: tuple[tuple[str, object, str], ...] = (
    ("batch_invariant", True, "the other requests decide which tiles are cut"),
    ("window", True, "its tiles see few keys, whatever the sequence holds"),
    ("kv_layout", "varlen", "how many tiles there are, and how long, is known on the device only"),
)


@dataclass(frozen=True)
class Rule:
    about: str
    check: Callable[[Spec], SpecError | None]


def broken(spec: Spec) -> SpecError | None:
    """The error of the first rule that the Spec breaks, or None."""
    return next((error for rule in RULES if (error := rule.check(spec))), None)


def targets_of(family: str) -> list[str]:
    return [name for name, target in TARGETS.items() if FAMILIES[family] in target.features]


def _masks(spec: Spec) -> SpecError | None:
    if not (spec.causal and spec.window):
        return None
    return SpecError("window is true together with causal", where="Spec.window",
                     allowed="one of the two; a window kernel serves causal calls with right = 0",
                     nearest="causal: false, window: true",
                     next="when both are lists, add `- {causal: true, window: true}` to exclude")


def _arch(spec: Spec) -> SpecError | None:
    feature = FAMILIES[spec.family]
    if feature in TARGETS[spec.arch].features:
        return None
    fitting = targets_of(spec.family)
    same_card = [name for name in fitting if TARGETS[name].cc == TARGETS[spec.arch].cc]
    others = [family for family in FAMILIES if spec.arch in targets_of(family)]
    return SpecError(f"arch is {spec.arch} with family {spec.family}, which needs {FEATURES[feature]}",
                     where="Spec.arch", allowed=", ".join(fitting),
                     nearest=", ".join(same_card) or f"family {others[0]} for {spec.arch}",
                     next=f"when both are lists, add `- {{family: {spec.family}, arch: {spec.arch}}}` to exclude")


def _warps(spec: Spec) -> SpecError | None:
    if spec.family != "fa3" or spec.roles is None or spec.roles.mma in _MMA_WARPS:
        return None
    return SpecError(f"roles.mma is {spec.roles.mma} with family fa3, whose warps multiply in groups of "
                     f"{WARPGROUP_WARPS}", where="Spec.roles.mma", allowed=_words(_MMA_WARPS),
                     nearest=_nearest(_MMA_WARPS, spec.roles.mma))


def _tile(spec: Spec) -> SpecError | None:
    if spec.family != "fa3" or spec.tile is None:
        return None
    rows = _TILE_ROWS if spec.roles is None else (spec.roles.mma // WARPGROUP_WARPS * WARPGROUP_ROWS,)
    if spec.tile.m in rows:
        return None
    given = "" if spec.roles is None else f" and roles.mma {spec.roles.mma}"
    return SpecError(f"tile.m is {spec.tile.m} with family fa3{given}", where="Spec.tile.m",
                     allowed=f"{_words(rows)}: {WARPGROUP_ROWS} rows for each group of {WARPGROUP_WARPS} mma warps",
                     nearest=_nearest(rows, spec.tile.m))


def _turns(spec: Spec) -> SpecError | None:
    alone = ((spec.roles is not None and spec.roles.mma == WARPGROUP_WARPS)
             or (spec.tile is not None and spec.tile.m == WARPGROUP_ROWS))
    if spec.schedule != "pingpong" or not alone:
        return None
    return SpecError("schedule is pingpong with one warpgroup, which has none to take turns with",
                     where="Spec.schedule", allowed="overlap; or two warpgroups and more", nearest="overlap")


def _split(spec: Spec) -> SpecError | None:
    if not spec.split:
        return None
    for name, value, why in _UNSPLIT:
        if getattr(spec, name) == value:
            shown = str(value).lower()
            return SpecError(f"split is true together with {name}: {why}", where="Spec.split",
                             allowed="false", nearest="split: false",
                             next=f"when both are lists, add `- {{{name}: {shown}, split: true}}` to exclude")
    return None


def _packed(spec: Spec) -> SpecError | None:
    if not spec.pack_gqa or not (spec.window or spec.kv_layout == "varlen"):
        return None
    name, value = ("window", "true") if spec.window else ("kv_layout", "varlen")
    return SpecError(f"pack_gqa is true together with {name} {value}", where="Spec.pack_gqa", allowed="false",
                     nearest="pack_gqa: false",
                     next=f"when both are lists, add `- {{{name}: {value}, pack_gqa: true}}` to exclude")


def _words(numbers: tuple[int, ...]) -> str:
    return ", ".join(map(str, numbers))


def _nearest(numbers: tuple[int, ...], given: int) -> str:
    return str(min(numbers, key=lambda number: abs(number - given)))


RULES: tuple[Rule, ...] = (
    Rule("`causal` and `window` exclude each other.", _masks),
    Rule("; ".join(f"{family}: `arch` is {', '.join(targets_of(family))}, for {FEATURES[feature]}"
                   for family, feature in FAMILIES.items() if targets_of(family) != list(TARGETS)) + ".", _arch),
    Rule(f"fa3: `roles.mma` is {_words(_MMA_WARPS)}: whole warpgroups.", _warps),
    Rule(f"fa3: `tile.m` is {WARPGROUP_ROWS} for each mma warpgroup: {_words(_TILE_ROWS)}.", _tile),
    Rule("fa3: `schedule: pingpong` needs two mma warpgroups or more.", _turns),
    Rule("fa3: `split: true` excludes `batch_invariant: true`, `window: true` and `kv_layout: varlen`, which split "
         "nothing.", _split),
    Rule("fa3: `pack_gqa: true` excludes `window: true` and `kv_layout: varlen`.", _packed),
    Rule("`score` and `mask` are expressions of known names and right types; `sink` is no parameter's name where it is "
         "`per_head`.", spec_expr.readable),
    Rule("Tensor parameters have dims `total_q`, `total_kv` with `kv_layout: varlen` only, `seqlen_q`, `seqlen_kv` "
         "without it.", spec_expr.shapes),
    Rule("A `mask` excludes `causal` and `window`.", spec_expr.one_mask),
    Rule("`align: top_left` needs an expression, and neither `causal` nor `window`.", spec_expr.alignment),
    Rule("`normalize: none` needs `lse: false` and excludes `sink`.", spec_expr.unnormalized),
    Rule("`split: true` and `pack_gqa: true` exclude `score`, `mask`, `sink` and `normalize`.", spec_expr.whole),
)
