"""The gradients of a spec that names no backward kernels: the same expressions, with pass bwd.

What a spec says of its forward kernels' tiles and the like says nothing of other kernels, so only what an answer
depends on is kept. Families that cannot serve it are passed over, and so are fallbacks on devices that others have.
The family counts where it serves by name alone: who names its forward kernels means its backward, too, and nobody else.
"""
from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from flashgen.codegen.families.registry import FAMILIES, answers_by_name, op_of, served_unasked
from flashgen.codegen.spec.fields import rows_by_name
from flashgen.errors import SpecError, UnsupportedError
from flashgen.runtime.select.handles import title
from flashgen.runtime.select.variant import Variant

if TYPE_CHECKING:
    from flashgen.codegen.spec.spec import Spec

# What kernels of both passes have in common; in a file of specs, each variant says all of it.
_CALL = ("dtype", "head_dim_qk", "head_dim_v", "kv_layout")
_KEPT = ("name", *_CALL, "causal", "window", "score", "mask", "params", "align", "sink", "normalize")


def backward_specs(handle: str, found: Variant | tuple[Spec, ...], kinds: Sequence[Mapping[str, Any]], op: str
                   ) -> tuple[Spec, ...]:
    """Specs of what a handle names for an operation that answers with gradients: its own, or those made of others.

    `kinds`: the fields of the kernels that could serve the call. UnsupportedError, with the reason, if there are none.
    """
    if not isinstance(found, Variant) and (own := tuple(spec for spec in found if op_of(spec) == op)):
        return own
    made: dict[Spec, None] = {}
    reasons: list[SpecError] = []
    for fields in _meanings(found, op):
        for kind in kinds:
            if any(fields.get(name, kind[name]) != kind[name] for name in (*_CALL, "family")):
                continue
            family = FAMILIES[kind["family"]]
            asked = not (family.named_only or (family.fallback and served_unasked([kind["arch"]], op)))
            if not asked and "family" not in fields:
                continue
            try:
                made[_spec({**kind, **fields, "lse": True})] = None
            except SpecError as error:
                reasons.append(error)
    if not made:
        reason = reasons[-1] if reasons else SpecError("no variant of it is of the call's dtype and shapes")
        raise UnsupportedError(f"a gradient is asked for: {reason.what}", where=f"spec={title(handle)!r}",
                               allowed=reason.allowed, nearest=reason.nearest)
    return tuple(made)


def _meanings(found: Variant | tuple[Spec, ...], op: str) -> Iterator[dict[str, Any]]:
    if isinstance(found, Variant):
        yield {name: value for name, value in found.fields.items() if name in _KEPT}
        return
    seen: list[dict[str, Any]] = []
    for spec in found:
        fields = {name: getattr(spec, rows_by_name()[name].attribute) for name in _KEPT}
        if answers_by_name(spec, op):
            fields["family"] = spec.family
        if fields not in seen:
            seen.append(fields)
            yield fields


def _spec(fields: dict[str, Any]) -> Spec:
    from flashgen.codegen.spec.spec import Spec

    if fields["window"]:
        fields["causal"] = False  # which a window kernel serves with right = 0
    return Spec(**fields)
