"""The rules between the fields of a Spec: what the table of single fields cannot say.

A rule's `about` is what specs/README.md prints, and its `check` gives the error, whose `where` names the field to
point at. Fields that one family alone has are marked in the table itself (fields.py).
"""
from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from flashgen.codegen.spec import expressions as spec_expr
from flashgen.codegen.spec.view import SpecView
from flashgen.codegen.spec.yaml_tree import show
from flashgen.codegen.target import FEATURES, TARGETS
from flashgen.codegen.warpgroup import MAX_WARPGROUPS, WARPGROUP_ROWS, WARPGROUP_WARPS
from flashgen.errors import SpecError

# family -> the feature that its targets have
FAMILIES: dict[str, str] = {"fa2": "mma_sync", "fa3": "wgmma", "flashmla": "wgmma"}
DEFAULT_FAMILY = "fa2"  # of a name that does not begin with a family
SHORT_NAMES = {"mla": "flashmla"}  # what a name may begin with instead
FORWARD_HEAD_DIMS = range(8, 257, 8)
_MMA_WARPS = tuple(WARPGROUP_WARPS * count for count in range(1, MAX_WARPGROUPS + 1))
_TILE_ROWS = tuple(WARPGROUP_ROWS * count for count in range(1, MAX_WARPGROUPS + 1))

# (field, value, why): what no tile is cut under.
_UNSPLIT: tuple[tuple[str, object, str], ...] = (
    ("batch_invariant", True, "the other requests decide which tiles are cut"),
    ("window", True, "its tiles see few keys, whatever the sequence holds"),
    ("kv_layout", "varlen", "how many tiles there are, and how long, is known on the device only"),
)


# What families have of fields that can hold more: (field, values, why).
_ONLY: dict[tuple[str, ...], tuple[tuple[str, Sequence[Any], str], ...]] = {("fa2", "fa3"): (
    ("pass", ("fwd",), "a decode is flashmla's"),
    ("head_dim_qk", FORWARD_HEAD_DIMS, "what their tiles cover"),
    ("head_dim_v", FORWARD_HEAD_DIMS, "what their tiles cover"),
    ("kv_layout", ("dense", "varlen"), "a paged cache is flashmla's"),
), ("flashmla",): (
    ("pass", ("decode", "schedule"), "it reads a cache for a few new queries"),
    ("head_dim_qk", (512, 576), "columns of the latent cache, without and with the rotary ones"),
    ("head_dim_v", (512,), "a value is the first 512 columns of its key"),
    ("kv_layout", ("dense", "paged"), "the forms of a cache"),
    ("causal", (False,), "it comes with each call"),
    ("window", (False,), "it has none"),
    ("lse", (True,), "a call leaves it out or not"),
    ("batch_invariant", (False,), "the schedule cuts a request according to the others"),
    ("score", ("none",), "its scores are as they come"),
    ("mask", ("none",), "causal comes with each call"),
    ("align", ("bottom_right",), "it has no expressions"),
    ("sink", ("none",), "it comes with each call"),
    ("normalize", ("softmax",), "it has no expressions"),
    ("tile", (None,), "it has one"),
    ("stages", (None,), "its tile decides"),
    ("roles", (None,), "its tile decides"),
)}
_ATTRIBUTES = {"pass": "pass_"}  # of Spec, where it is not the field's name
# pass schedule: one variant, since its kernel reads nothing that these fields speak of.
_SCHEDULE: tuple[tuple[str, Any], ...] = (
    ("dtype", "bf16"), ("head_dim_qk", 576), ("kv_layout", "paged"), ("page_size", 64))


def implied_family(name: str) -> str:
    """The family that a variant's name need not say again."""
    first = name.partition("_")[0]
    return first if first in FAMILIES else SHORT_NAMES.get(first, DEFAULT_FAMILY)


@dataclass(frozen=True)
class Rule:
    about: str
    check: Callable[[SpecView], SpecError | None]


def broken(spec: SpecView) -> SpecError | None:
    """The error of the first rule that the Spec breaks, or None."""
    return next((error for rule in RULES if (error := rule.check(spec))), None)


def targets_of(family: str) -> list[str]:
    return [name for name, target in TARGETS.items() if FAMILIES[family] in target.features]


def _masks(spec: SpecView) -> SpecError | None:
    if not (spec.causal and spec.window):
        return None
    return SpecError("window is true together with causal", where="Spec.window",
                     allowed="one of the two; a window kernel serves causal calls with right = 0",
                     nearest="causal: false, window: true",
                     next="when both are lists, add `- {causal: true, window: true}` to exclude")


def _arch(spec: SpecView) -> SpecError | None:
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


def _only(families: tuple[str, ...], spec: SpecView) -> SpecError | None:
    for name, allowed, why in _ONLY[families] if spec.family in families else ():
        given = getattr(spec, _ATTRIBUTES.get(name, name))
        if given not in allowed:
            numbers = name.startswith("head_dim")
            nearest = _nearest(tuple(allowed), given) if numbers else _shown(allowed[0])
            return _refused(name, given, f"family {spec.family}: {why}", _listed(allowed), nearest,
                            f"family: {spec.family}")
    return None


def _pages(spec: SpecView) -> SpecError | None:
    paged = spec.kv_layout == "paged"
    if paged == (spec.page_size is not None):
        return None
    return _refused("page_size", spec.page_size, f"kv_layout {spec.kv_layout}", "1, 64" if paged else "null",
                    "64" if paged else "null", f"kv_layout: {spec.kv_layout}")


def _schedule(spec: SpecView) -> SpecError | None:
    for name, value in _SCHEDULE if spec.pass_ == "schedule" else ():
        if getattr(spec, name) != value:
            return _refused(name, getattr(spec, name), "pass schedule, whose one kernel serves all", _shown(value),
                            _shown(value), "pass: schedule")
    return None


def _refused(name: str, value: object, beside: str, allowed: str, nearest: str, match: str) -> SpecError:
    """`match`: the other half of an entry of exclude."""
    return SpecError(f"{name} is {show(value)} with {beside}", where=f"Spec.{name}", allowed=allowed, nearest=nearest,
                     next=f"when both are lists, add `- {{{match}, {name}: {show(value)}}}` to exclude")


def _shown(value: object) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _listed(values: Sequence[Any]) -> str:
    if isinstance(values, range):
        return f"multiples of {values.step} from {values[0]} to {values[-1]}"
    return ", ".join(map(_shown, values))


def _warps(spec: SpecView) -> SpecError | None:
    if spec.family != "fa3" or spec.roles is None or spec.roles.mma in _MMA_WARPS:
        return None
    return SpecError(f"roles.mma is {spec.roles.mma} with family fa3, whose warps multiply in groups of "
                     f"{WARPGROUP_WARPS}", where="Spec.roles.mma", allowed=_words(_MMA_WARPS),
                     nearest=_nearest(_MMA_WARPS, spec.roles.mma))


def _tile(spec: SpecView) -> SpecError | None:
    if spec.family != "fa3" or spec.tile is None:
        return None
    rows = _TILE_ROWS if spec.roles is None else (spec.roles.mma // WARPGROUP_WARPS * WARPGROUP_ROWS,)
    if spec.tile.m in rows:
        return None
    given = "" if spec.roles is None else f" and roles.mma {spec.roles.mma}"
    return SpecError(f"tile.m is {spec.tile.m} with family fa3{given}", where="Spec.tile.m",
                     allowed=f"{_words(rows)}: {WARPGROUP_ROWS} rows for each group of {WARPGROUP_WARPS} mma warps",
                     nearest=_nearest(rows, spec.tile.m))


def _turns(spec: SpecView) -> SpecError | None:
    alone = ((spec.roles is not None and spec.roles.mma == WARPGROUP_WARPS)
             or (spec.tile is not None and spec.tile.m == WARPGROUP_ROWS))
    if spec.schedule != "pingpong" or not alone:
        return None
    return SpecError("schedule is pingpong with one warpgroup, which has none to take turns with",
                     where="Spec.schedule", allowed="overlap; or two warpgroups and more", nearest="overlap")


def _split(spec: SpecView) -> SpecError | None:
    if not spec.split:
        return None
    for name, value, why in _UNSPLIT:
        if getattr(spec, name) == value:
            shown = str(value).lower()
            return SpecError(f"split is true together with {name}: {why}", where="Spec.split",
                             allowed="false", nearest="split: false",
                             next=f"when both are lists, add `- {{{name}: {shown}, split: true}}` to exclude")
    return None


def _packed(spec: SpecView) -> SpecError | None:
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
    *(Rule(f"{', '.join(families)}: " + "; ".join(f"`{name}` is {_listed(values)}" for name, values, _ in fields) + ".",
           functools.partial(_only, families)) for families, fields in _ONLY.items()),
    Rule("`page_size` is given with `kv_layout: paged`, and only then.", _pages),
    Rule("`pass: schedule` has one variant: " + ", ".join(f"`{name}: {value}`" for name, value in _SCHEDULE) + ".",
         _schedule),
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
