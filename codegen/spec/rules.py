"""The rules between the fields of a Spec: what the table of single fields cannot say.

Those of all families stand here; each family brings its own. A field that not all families have is marked in the table
itself (fields.py).
"""
from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from flashgen.codegen.families.family import Family, Pass
from flashgen.codegen.families.registry import FAMILIES, pass_of, targets_of
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
        if spec.family == family.name and (error := _first_refused(spec, _limits(family), "family", spec.family)):
            return error
    return None


def _only_in_pass(limits: tuple[Only, ...], spec: Common) -> SpecError | None:
    return _first_refused(spec, limits, "pass", spec.pass_) if pass_of(spec).only == limits else None


def _first_refused(spec: Common, limits: tuple[Only, ...], owner: str, name: str) -> SpecError | None:
    for field, values, why in limits:
        given = getattr(spec, _ATTRIBUTES.get(field, field))
        if given not in values:
            nearest = nearest_number(values, given) if field.startswith("head_dim") else shown(values[0])
            return refused(field, given, f"{owner} {name}: {why or _taken_by(field, given)}", listed(values), nearest,
                           f"{owner}: {name}")
    return None


def _kernel(spec: Common) -> SpecError | None:
    """Of passes that launch several kernels, a variant is one of them."""
    given, names = getattr(spec, "kernel", None), pass_of(spec).kernel_names
    if given in names:
        return None
    several = names != (None,)
    return refused("kernel", given, f"family {spec.family} and pass {spec.pass_}" + (
        f", a call of which launches {len(names)}" if several else ", a call of which launches one"), listed(names),
        f"kernel: [{', '.join(map(str, names))}]" if several else "null", f"pass: {spec.pass_}")


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


def _in_words(limits: tuple[Only, ...]) -> str:
    return "; ".join(f"`{name}` is {listed(values)}" for name, values, _ in limits) + "."


def _passes_by(key: Callable[[Pass], Any]) -> dict[tuple[str, Any], list[str]]:
    """Names of families by (name, key) of their passes."""
    found: dict[tuple[str, Any], list[str]] = {}
    for family in FAMILIES.values():
        for each in family.passes:
            found.setdefault((each.name, key(each)), []).append(family.name)
    return found


RULES: tuple[Rule, ...] = (
    *(Rule(f"{', '.join(family.name for family in families)}: " + _in_words(_limits(families[0])),
           functools.partial(_only, families)) for families in _alike()),
    *(Rule(f"{', '.join(families)}, `pass: {name}`: " + _in_words(limits), functools.partial(_only_in_pass, limits))
      for (name, limits), families in _passes_by(lambda each: each.only).items() if limits),
    Rule("`kernel` says which of the kernels of a call a variant is: " + "; ".join(
        f"{', '.join(families)} with `pass: {name}`: {listed(kernels)}"
        for (name, kernels), families in _passes_by(lambda each: each.kernel_names).items() if kernels != (None,))
        + ". It is null elsewhere.", _kernel),
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
