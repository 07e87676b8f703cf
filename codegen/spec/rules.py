"""The rules between the fields of a Spec: what the table of single fields cannot say.

Those of all families stand here; each family brings its own. A field that not all families have is marked in the table
itself (fields.py).
"""
from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from flashgen.codegen.families.family import Family
from flashgen.codegen.families.registry import FAMILIES, targets_of
from flashgen.codegen.spec import expressions as spec_expr
from flashgen.codegen.spec.rule import Only, Rule, listed, nearest_number, refused, shown
from flashgen.codegen.target import FEATURES, TARGETS
from flashgen.errors import SpecError

if TYPE_CHECKING:
    from flashgen.codegen.spec.fields import Common

_ATTRIBUTES = {"pass": "pass_"}  # of Spec, where it is not the field's name


def broken(spec: Common) -> SpecError | None:
    """The error of the first rule that the Spec breaks, or None."""
    return next((error for rule in RULES if (error := rule.check(spec))), None)


def _masks(spec: Common) -> SpecError | None:
    if not (spec.causal and spec.window):
        return None
    return SpecError("window is true together with causal", where="Spec.window",
                     allowed="one of the two; a window kernel serves causal calls with right = 0",
                     nearest="causal: false, window: true",
                     next="when both are lists, add `- {causal: true, window: true}` to exclude")


def _arch(spec: Common) -> SpecError | None:
    feature = FAMILIES[spec.family].feature
    if feature in TARGETS[spec.arch].features:
        return None
    fitting = targets_of(spec.family)
    same_card = [name for name in fitting if TARGETS[name].cc == TARGETS[spec.arch].cc]
    others = [family for family in FAMILIES if spec.arch in targets_of(family)]
    return SpecError(f"arch is {spec.arch} with family {spec.family}, which needs {FEATURES[feature]}",
                     where="Spec.arch", allowed=", ".join(fitting),
                     nearest=", ".join(same_card) or f"family {others[0]} for {spec.arch}",
                     next=f"when both are lists, add `- {{family: {spec.family}, arch: {spec.arch}}}` to exclude")


def _only(families: tuple[Family, ...], spec: Common) -> SpecError | None:
    for family in families:
        for name, values, why in _limits(family) if spec.family == family.name else ():
            given = getattr(spec, _ATTRIBUTES.get(name, name))
            if given not in values:
                nearest = nearest_number(values, given) if name.startswith("head_dim") else shown(values[0])
                return refused(name, given, f"family {spec.family}: {why or _taken_by(name, given)}", listed(values),
                               nearest, f"family: {spec.family}")
    return None


def _limits(family: Family) -> tuple[Only, ...]:
    return Only("pass", tuple(found.name for found in family.passes)), *family.only


def _taken_by(name: str, value: object) -> str:
    takers = [family.name for family in FAMILIES.values()
              if all(value in only.values for only in _limits(family) if only.field == name)]
    return f"{name} {shown(value)} is " + " or ".join(f"{taker}'s" for taker in takers)


def _of_family(family: str, rule: Rule, spec: Common) -> SpecError | None:
    return rule.check(spec) if spec.family == family else None


def _alike() -> list[tuple[Family, ...]]:
    """The families, together where they take the same of every field."""
    found: dict[tuple[Any, ...], tuple[Family, ...]] = {}
    for family in FAMILIES.values():
        key = tuple((only.field, tuple(only.values)) for only in _limits(family))
        found[key] = (*found.get(key, ()), family)
    return list(found.values())


RULES: tuple[Rule, ...] = (
    *(Rule(f"{', '.join(family.name for family in families)}: "
           + "; ".join(f"`{name}` is {listed(values)}" for name, values, _ in _limits(families[0])) + ".",
           functools.partial(_only, families)) for families in _alike()),
    Rule("`causal` and `window` exclude each other.", _masks),
    Rule("; ".join(f"{name}: `arch` is {', '.join(targets_of(name))}, for {FEATURES[family.feature]}"
                   for name, family in FAMILIES.items() if targets_of(name) != list(TARGETS)) + ".", _arch),
    *(Rule(f"{family.name}: {rule.about}", functools.partial(_of_family, family.name, rule))
      for family in FAMILIES.values() for rule in family.rules),
    Rule("`score` and `mask` are expressions of known names and right types; `sink` is no parameter's name where it is "
         "`per_head`.", spec_expr.readable),
    Rule("Tensor parameters have dims `total_q`, `total_kv` with `kv_layout: varlen` only, `seqlen_q`, `seqlen_kv` "
         "without it.", spec_expr.shapes),
    Rule("A `mask` excludes `causal` and `window`.", spec_expr.one_mask),
    Rule("`align: top_left` needs an expression, and neither `causal` nor `window`.", spec_expr.alignment),
    Rule("`normalize: none` needs `lse: false` and excludes `sink`.", spec_expr.unnormalized),
)
