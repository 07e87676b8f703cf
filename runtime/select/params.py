"""Values for a spec's parameters: sorted once a call, and checked against the spec and the call's shapes.

They travel as the ops take them: ints (and bools), floats and tensors, each in the order of their declarations.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from flashgen.codegen.expr.params import as_scalar
from flashgen.codegen.expr.tree import INT_MAX, INT_MIN, Param, ScalarParam, TensorParam
from flashgen.errors import SpecError, UnsupportedError, nearest_word
from flashgen.runtime.ops.arguments import number, shown
from flashgen.runtime.ops.wrapped import refuse_wrapped
from flashgen.runtime.select.handles import Form, signature, title

DTYPES = {"float32": torch.float32, "int32": torch.int32, "bool": torch.bool}
Bound = tuple[tuple[int, ...], tuple[float, ...], tuple[torch.Tensor, ...]]


def bind(form: Form, params: Mapping[str, Any] | None) -> Bound | None:
    """(ints, floats, tensors) of a call; None where nothing is read. torch.compile traces this, so it looks at types
    only: numbers may be unknown until the graph runs.

    Raises UnsupportedError for a value that is missing, unknown or of another type.
    """
    if not form.params and (params is None or (type(params) is dict and not params)):
        return None
    values = {} if params is None else params
    if type(values) is not dict and not isinstance(values, Mapping):
        raise UnsupportedError(f"params is {shown(params)}", where="params", allowed="a mapping of names to values")
    for name in values:
        if name not in form.unread and name not in [param[0] for param in form.params]:
            raise _unknown(form, name)
    ints, floats, tensors = [], [], []
    for name, kind, default in form.params:
        value = values.get(name)
        if kind == "tensor":
            if not isinstance(value, torch.Tensor):
                raise UnsupportedError(f"{name} is {'missing' if value is None else shown(value)}",
                                       where=f"params[{name!r}]", allowed=f"a tensor, as {title(form.handle)} says")
            tensors.append(value)
            continue
        if value is None and default:  # text, since torch.compile makes inputs of the floats that it finds
            value = float(default) if kind == "float" else int(default) if kind == "int" else default == "True"
        if kind == "float":
            if type(value) is not float and not (type(value) is int and INT_MIN <= value <= INT_MAX):
                value = _scalar(name, kind, value)
            floats.append(float(value))
        elif kind == "int" and type(value) is int and INT_MIN <= value <= INT_MAX:
            ints.append(value)
        else:
            ints.append(int(_scalar(name, kind, value)))
    return (tuple(ints), tuple(floats), tuple(tensors)) if form.params else None


def _unknown(form: Form, name: object) -> UnsupportedError:
    names, shown = [param[0] for param in form.params], str(name)[:40]
    return UnsupportedError(f"{title(form.handle)} has no parameter {shown!r}", where=f"params[{shown!r}]",
                            allowed=", ".join(names) or "no parameters", nearest=nearest_word(name, names))


def _scalar(name: str, kind: str, value: object) -> int | float | bool:
    if value is None:
        raise UnsupportedError(f"{name} is missing", where=f"params[{name!r}]", allowed=f"a value: {name}, of type "
                               f"{kind}, has no default")
    try:
        where = f"params[{name!r}]"
        return as_scalar(kind, number(where, value, f"{name}: {kind}"), where)
    except SpecError as error:
        raise UnsupportedError(error.what, where=error.where, allowed=error.allowed) from None


def unbound(known: str, declared: Sequence[Param], bound: Bound | None) -> dict[str, int | float]:
    """Values of the kernel's scalar parameters. `known`: the signature that the call was made with.

    UnsupportedError if that is not the signature of `declared`, which is so where a spec file was changed after
    torch.compile or torch.export made a graph of the call; and for numbers that no kernel can have.
    """
    ints, floats, tensors = bound or ((), (), ())
    kinds = [param.type if isinstance(param, ScalarParam) else "tensor" for param in declared]
    counts = len(kinds) - kinds.count("float") - kinds.count("tensor"), kinds.count("float"), kinds.count("tensor")
    if known != signature(declared) or counts != (len(ints), len(floats), len(tensors)):
        raise UnsupportedError(f"the call was compiled or exported with the parameters ({known})", where="spec",
                               allowed=f"({signature(declared)}), which the spec has now",
                               next="torch.compiler.reset(), or export the program again")
    values: dict[str, int | float] = {}
    whole, real = iter(ints), iter(floats)
    for param in declared:
        if isinstance(param, ScalarParam):
            value = next(real if param.type == "float" else whole)
            values[f"user_{param.name}"] = value if param.type == "bool" else _scalar(param.name, param.type, value)
    return values


def check_tensors(declared: Sequence[Param], tensors: Sequence[torch.Tensor], device: torch.device,
                  sizes: Mapping[str, int]) -> None:
    """UnsupportedError unless all are contiguous, of their dtype and shape and on `device`; `sizes` gives the dims."""
    for param, tensor in zip([p for p in declared if isinstance(p, TensorParam)], tensors, strict=True):
        where = f"params[{param.name!r}]"
        refuse_wrapped(**{where: tensor})
        shape = tuple(dim if isinstance(dim, int) else sizes.get(dim) for dim in param.shape)
        if None in shape:
            continue  # of another layout: no variant that serves the call reads it
        if tuple(tensor.shape) != shape or tensor.dtype is not DTYPES[param.dtype]:
            raise UnsupportedError(f"{param.name} is {tensor.dtype} {tuple(tensor.shape)}", where=where,
                                   allowed=f"{DTYPES[param.dtype]} {shape}, as {param} says",
                                   next=f"{where}.to({DTYPES[param.dtype]})" if tuple(tensor.shape) == shape else "")
        if tensor.device != device:
            raise UnsupportedError(f"{param.name} is on {tensor.device}, q on {device}", where=where,
                                   allowed="one device", next=f"params[{param.name!r}].to(q.device)")
        if not tensor.is_contiguous():
            raise UnsupportedError(f"{param.name} has strides {tensor.stride()}", where=where, allowed="contiguous",
                                   next=f"params[{param.name!r}].contiguous()")
