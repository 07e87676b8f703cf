"""flashgen.variant: expressions without a spec file. Head dims, dtype, layout and card follow from each call."""
from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from flashgen.codegen.expr.tree import Param
from flashgen.codegen.families.registry import DEFAULT, FAMILIES
from flashgen.codegen.spec.expressions import plain_params
from flashgen.errors import SpecError, UnsupportedError

if TYPE_CHECKING:
    from flashgen.codegen.spec.spec import Spec

# The other fields of the spec in which a variant is first checked.
_MODEL: dict[str, Any] = {"family": DEFAULT, "pass_": FAMILIES[DEFAULT].by_op["attention"].name, "dtype": "bf16",
                          "head_dim_qk": 64}


@dataclass(frozen=True)
class Variant:
    """What `spec=` takes of flashgen.attention. `handle` holds all of it as text, so that programs which name it run
    in other processes; it is equal for equal variants."""

    fields: dict[str, Any] = field(hash=False)
    handle: str
    params: tuple[Param, ...]  # that its expressions read, the sink last

    def spec(self, **call: Any) -> Spec:
        """The Spec of one kind of call; what the variant fixes itself counts. Raises SpecError."""
        from flashgen.codegen.spec.spec import Spec

        return Spec(**{**call, **self.fields})

    def specs(self, calls: Sequence[Mapping[str, Any]]) -> tuple[Spec, ...]:
        """Of several kinds of calls, those that it can serve, each once. UnsupportedError, with the reason, if none."""
        found: dict[Spec, None] = {}
        reasons: list[SpecError] = []
        for call in calls:
            if self.fields.get("window"):
                call = {**call, "causal": False}  # which its kernel serves with right = 0
            try:
                found[self.spec(**call)] = None
            except SpecError as error:  # a family for another arch, a layout without a parameter's dims
                reasons.append(error)
        if not found:
            reason = next((error for error in reasons if error.where != "Spec.arch"), reasons[0])
            raise UnsupportedError(f"{reason.what}", where=f"spec=variant {self.fields['name']}",
                                   allowed=reason.allowed, nearest=reason.nearest)
        return tuple(found)


def as_json(fields: Mapping[str, Any]) -> str:
    """Fields of a spec as text that gives them back; tile and roles become mappings. One spelling per value."""
    return json.dumps(fields, sort_keys=True, separators=(",", ":"), default=dict)


def _is(value: object, text: str) -> bool:
    """Whether it is the text. Objects of other types are not asked: they may have no answer."""
    return isinstance(value, str) and value == text


def variant(score: str = "none", mask: str = "none", *, params: Mapping[str, Any] | None = None, sink: str = "none",
            normalize: str = "softmax", align: str = "bottom_right", name: str = "variant", **fields: Any) -> Variant:
    """A variant of attention for `flashgen.attention(..., spec=variant, params=values)`.

    Args:
        score: an expression over the scaled score, positions, heads and params, such as
            "softcap * tanh(score / softcap)"; "none" leaves scores as they are.
        mask: an expression that is true where a query sees a key, such as "kv_pos <= q_pos"; "none" for the call's own
            causal or window.
        params: declarations by name, as in a spec: {"softcap": {"type": "float", "default": 30.0}}.
        sink: "per_head" lets params["sink"], a logit for each query head, join the denominator.
        normalize: "none" takes scores as weights, without a softmax.
        align: "top_left" counts q_pos from the first key.
        name: first part of the kernels' names.
        fields: any other field of a spec, such as kv_layout="varlen" or causal=True.

    Raises SpecError, with the column, for an expression that is none. Nothing is compiled before the first call.
    """
    from flashgen.codegen.spec.spec import Spec

    given = {"name": name, "score": score, "mask": mask, "params": {} if params is None else params, "sink": sink,
             "normalize": normalize, "align": align, **({"lse": False} if _is(normalize, "none") else {}), **fields}
    family = next((found for name, found in FAMILIES.items() if _is(fields.get("family"), name)), FAMILIES[DEFAULT])
    model = _MODEL | {"arch": family.arch} | given
    layouts = [fields["kv_layout"]] if "kv_layout" in fields else ["dense", "varlen"]
    errors: list[SpecError] = []
    for layout in layouts:
        try:
            checked = Spec(**{**model, "kv_layout": layout})
            break
        except SpecError as error:
            errors.append(error)
    else:
        first = errors[0]
        raise SpecError(first.what, where=first.where.replace("Spec", "variant", 1), allowed=first.allowed,
                        nearest=first.nearest, next=first.next, details=first.details)
    given["params"] = checked.params
    handle = "variant " + as_json({**given, "params": plain_params(checked.params)})
    return Variant(given, handle, checked.expressions.params)


variant._dynamo_marked_constant = True  # type: ignore[attr-defined]  # torch.compile calls it while it traces
