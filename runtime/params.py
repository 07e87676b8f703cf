"""Values for a spec's parameters: bound to their declarations once a call, and checked against its shapes.

Scalars travel in the text that names the spec, so that all which is memoised per call knows them; tensors travel as a
list, in the order of their declarations.
"""
from __future__ import annotations

import difflib
import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from flashgen.codegen.expr_params import as_scalar
from flashgen.codegen.expr_tree import Param, TensorParam
from flashgen.errors import SpecError, UnsupportedError

SEPARATOR = "\n"  # between a spec's handle and its scalars: in no path, and in no handle of the registry's
DTYPES = {"float32": torch.float32, "int32": torch.int32, "bool": torch.bool}


def bind(declared: Sequence[Param], params: Mapping[str, Any] | None, spec: object,
         unread: Collection[str] = ()) -> tuple[str, list[torch.Tensor]]:
    """(the scalars as text, the tensors). Raises UnsupportedError for a value that is missing, unknown or no value.

    `declared`: what the expressions read. `unread`: names that are declared, and gone from the canonical form.
    """
    values = dict(params or {})
    names = [param.name for param in declared]
    for name in values:
        if name not in names and name not in unread:
            close = difflib.get_close_matches(str(name), names, n=1)
            raise UnsupportedError(f"{spec} has no parameter {str(name)[:40]!r}", where=f"params[{str(name)[:40]!r}]",
                                   allowed=", ".join(names) or "no parameters", nearest=close[0] if close else "")
    scalars: dict[str, int | float | bool] = {}
    tensors: list[torch.Tensor] = []
    for param in declared:
        where, value = f"params[{param.name!r}]", values.get(param.name)
        if isinstance(param, TensorParam):
            if not isinstance(value, torch.Tensor):
                raise UnsupportedError(f"{param.name} is {'missing' if value is None else type(value).__name__}",
                                       where=where, allowed=f"a tensor {param}")
            tensors.append(value)
            continue
        value = param.default if value is None else value
        if value is None:
            raise UnsupportedError(f"{param.name} is missing", where=where, allowed=f"a value: {param} has no default")
        try:
            scalars[param.name] = as_scalar(param.type, value, where)
        except SpecError as error:
            raise UnsupportedError(error.what, where=where, allowed=error.allowed) from None
    return json.dumps(scalars) if scalars else "", tensors


def joined(handle: str, scalars: str) -> str:
    return f"{handle}{SEPARATOR}{scalars}" if scalars else handle


def parted(text: str) -> tuple[str, dict[str, int | float]]:
    """(handle, values of the kernel's scalar parameters) of what `joined` made."""
    handle, _, scalars = text.partition(SEPARATOR)
    return handle, {f"user_{name}": int(value) if isinstance(value, bool) else value
                    for name, value in (json.loads(scalars) if scalars else {}).items()}


def check_tensors(declared: Sequence[Param], tensors: Sequence[torch.Tensor], device: torch.device,
                  sizes: Mapping[str, int]) -> None:
    """UnsupportedError unless all are contiguous, of their dtype and shape and on `device`; `sizes` gives the dims."""
    for param, tensor in zip([p for p in declared if isinstance(p, TensorParam)], tensors, strict=True):
        where = f"params[{param.name!r}]"
        shape = tuple(dim if isinstance(dim, int) else sizes.get(dim) for dim in param.shape)
        if None in shape:
            continue  # of another layout: no variant that serves the call reads it
        if tuple(tensor.shape) != shape or tensor.dtype is not DTYPES[param.dtype]:
            raise UnsupportedError(f"{param.name} is {tensor.dtype} {tuple(tensor.shape)}", where=where,
                                   allowed=f"{DTYPES[param.dtype]} {shape}, as {param} says")
        if tensor.device != device:
            raise UnsupportedError(f"{param.name} is on {tensor.device}, q on {device}", where=where,
                                   allowed="one device", next=f"params[{param.name!r}].to(q.device)")
        if not tensor.is_contiguous():
            raise UnsupportedError(f"{param.name} has strides {tensor.stride()}", where=where, allowed="contiguous",
                                   next=f"params[{param.name!r}].contiguous()")
        if tensor.requires_grad and torch.is_grad_enabled():
            raise UnsupportedError(f"a gradient of {param.name} is asked for, and flashgen has no backward kernel yet",
                                   where=where, allowed="tensors without requires_grad", next="torch.no_grad()")
