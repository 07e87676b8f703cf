"""A call of attention with a spec: what its text and the values of its parameters mean. Loads specs; call.py does not.
"""
from __future__ import annotations

import os
from collections.abc import Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from flashgen.codegen.expr.tree import TensorParam
from flashgen.codegen.spec.expressions import SINK
from flashgen.codegen.spec.rule import changed
from flashgen.errors import UnsupportedError
from flashgen.runtime.select.handles import SEPARATOR, handle_of, title
from flashgen.runtime.select.lookup import form_of, registry
from flashgen.runtime.select.params import Bound, bind, check_tensors, unbound
from flashgen.runtime.select.variant import Variant

if TYPE_CHECKING:
    from flashgen.codegen.families.shared.launch import Sizes
    from flashgen.codegen.spec.spec import Spec

Parameters = tuple[str, dict[str, int | float], tuple[str, ...], bool]


def bound_to(spec: str | os.PathLike[str] | Spec | Variant | None, params: Mapping[str, Any] | None
             ) -> tuple[str, tuple[int, ...], tuple[float, ...], tuple[torch.Tensor, ...]]:
    """(the text that names the spec, ints, floats and tensors of its parameters) of a call."""
    if spec is None:
        if isinstance(params, Mapping) and not params:
            return "", (), (), ()
        raise UnsupportedError("params without a spec that declares them", where="params", allowed="spec=... beside it",
                               next="flashgen.variant(score=..., params=...) makes one")
    form = form_of(spec.handle if isinstance(spec, Variant) else handle_of(spec))
    return (form.text, *(bind(form, params) or ((), (), ())))


def specs_of(text: str) -> tuple[str, tuple[Spec, ...]]:
    """The handle in a call's text, and its specs; none of a Variant, whose specs follow from the call."""
    handle = text.rpartition(SEPARATOR)[0]
    found = registry._open(handle)
    return handle, () if isinstance(found, Variant) else found


def is_changed(text: str) -> bool:
    """Whether the spec of a call makes it another attention than softmax's of plain scores."""
    return any(changed(spec) is not None for spec in _fields_of(text))


def has_softmax(text: str) -> bool:
    return all(spec.normalize == "softmax" for spec in _fields_of(text))


has_softmax.__dict__["_dynamo_marked_constant"] = True  # torch.compile calls it while it traces


def _fields_of(text: str) -> tuple[Any, ...]:
    found = registry._open(text.rpartition(SEPARATOR)[0])
    return (SimpleNamespace(**found.fields),) if isinstance(found, Variant) else found


def check_differentiable(text: str) -> None:
    """UnsupportedError for the gradient of a call whose spec has no backward kernels."""
    if not has_softmax(text):
        where = f"spec={title(text.rpartition(SEPARATOR)[0])!r}"
        raise UnsupportedError("a gradient is asked for of attention without softmax, which no backward kernel knows",
                               where=where, allowed="specs with normalize: softmax", next="torch.no_grad()")


def tensors_of(text: str) -> tuple[tuple[str, bool], ...]:
    """(name, whether kernels add up its gradient) of the tensors among the parameters of a call's spec, in the order of
    a call's tensors; the sink is the last."""
    handle = text.rpartition(SEPARATOR)[0]
    return tuple((param.name, param.dtype == "float32" and param != SINK)
                 for param in registry.params(handle) if isinstance(param, TensorParam)) if handle else ()


tensors_of.__dict__["_dynamo_marked_constant"] = True  # torch.compile calls it while it traces


def read_parameters(text: str, bound: Bound, sizes: Sizes, varlen: bool, device: torch.device) -> Parameters:
    """(handle, values of scalar parameters, tensors as pointers of plans, whether the last of these is a sink)."""
    handle, _, known = text.rpartition(SEPARATOR)
    declared = registry.params(handle) if handle else ()
    scalars = unbound(known, declared, bound)
    check_tensors(declared, bound[2], device, {
        "num_heads_q": sizes.num_heads_q, "num_heads_kv": sizes.num_heads_kv, "batch": sizes.batch,
        **({"total_q": sizes.seqlen_q, "total_kv": sizes.seqlen_kv} if varlen else
           {"seqlen_q": sizes.seqlen_q, "seqlen_kv": sizes.seqlen_kv})})
    return handle, scalars, tuple(f"user_{p.name}" for p in declared if isinstance(p, TensorParam)), SINK in declared
