"""The `params:` of a spec: what a score or mask expression reads besides the names in scope."""
from __future__ import annotations

import keyword
import re
from collections.abc import Mapping
from typing import Any, cast, get_args

from flashgen.codegen.expr.tree import (
    DIMS,
    DTYPES,
    FLOAT_MAX,
    FUNCTIONS,
    INT_MAX,
    INT_MIN,
    SCOPE_NAMES,
    Param,
    ScalarParam,
    TensorParam,
    Type,
    round_float,
)
from flashgen.errors import SpecError, nearest_word

MAX_PARAMS, MAX_NAME = 32, 40
_KINDS = "{type: int, float or bool, default: ...} or {type: tensor, dtype: ..., shape: [...]}"


def read_params(declared: object, where: str = "params") -> dict[str, Param]:
    """Parameters by name, from the plain data of a spec: {name: {type: int, default: 4}, ...}.

    Raises SpecError whose place is `where.name` or `where.name.key`.
    """
    if not isinstance(declared, Mapping):
        raise SpecError(f"is {type(declared).__name__}", where=where, allowed=f"{{name: {_KINDS}}}")
    if len(declared) > MAX_PARAMS:
        raise SpecError(f"declares {len(declared)} parameters", where=where, allowed=f"at most {MAX_PARAMS}")
    return {_name(name, where): _param(name, fields, f"{where}.{name}") for name, fields in declared.items()}


def _name(name: object, where: str) -> str:
    if not isinstance(name, str) or not re.fullmatch(rf"[A-Za-z][A-Za-z0-9_]{{0,{MAX_NAME - 1}}}", name):
        raise SpecError(f"{str(name)[:MAX_NAME]!a} cannot name a parameter", where=where,
                        allowed=f"up to {MAX_NAME} ASCII letters, digits and _, a letter first")
    if name in SCOPE_NAMES or name in FUNCTIONS or keyword.iskeyword(name):
        raise SpecError(f"{name} means something else", where=f"{where}.{name}",
                        allowed="a name that is neither in scope, nor a function, nor a word of Python's",
                        nearest=f"{name}_param")
    return name


def _keys(fields: Mapping[Any, Any], known: tuple[str, ...], where: str) -> None:
    for key in fields:
        if key not in known:
            raise SpecError(f"unknown key {str(key)[:MAX_NAME]!a}", where=where, allowed=", ".join(known),
                            nearest=nearest_word(key, known))


def _param(name: str, fields: object, where: str) -> Param:
    if not isinstance(fields, Mapping):
        raise SpecError(f"is {type(fields).__name__}", where=where, allowed=_KINDS)
    kind = fields.get("type")
    if kind == "tensor":
        _keys(fields, ("type", "dtype", "shape", "sorted"), where)
        return _tensor(name, fields.get("dtype"), fields.get("shape"), fields.get("sorted", False), where)
    if not isinstance(kind, str) or kind not in get_args(Type):
        known = (*get_args(Type), "tensor")
        raise SpecError(f"has no type that is known: {str(kind)[:MAX_NAME]!a}" if "type" in fields else "has no type",
                        where=f"{where}.type", allowed=", ".join(known), nearest=nearest_word(kind, known))
    _keys(fields, ("type", "default"), where)
    default = fields.get("default")
    if default is not None:
        default = as_scalar(kind, default, f"{where}.default")
    return ScalarParam(name, cast(Type, kind), default)


def as_scalar(kind: str, value: object, where: str) -> int | float | bool:
    """The value of a parameter of type `kind`; a float as the float32 that a kernel gets. Raises SpecError."""
    if kind == "bool" and isinstance(value, bool):
        return value
    if kind == "int" and type(value) is int and INT_MIN <= value <= INT_MAX:
        return value
    if (kind == "float" and isinstance(value, (int, float)) and not isinstance(value, bool)
            and -FLOAT_MAX <= value <= FLOAT_MAX):
        return round_float(float(value))
    allowed = {"bool": "true or false", "int": f"a whole number, {INT_MIN} to {INT_MAX}",
               "float": f"a finite number of at most {FLOAT_MAX:.2g} in size"}
    raise SpecError(f"is {str(value)[:MAX_NAME]!a}", where=where, allowed=allowed[kind])


def _tensor(name: str, dtype: object, shape: object, is_sorted: object, where: str) -> TensorParam:
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise SpecError(f"dtype is {str(dtype)[:MAX_NAME]!a}", where=f"{where}.dtype", allowed=", ".join(DTYPES),
                        nearest=nearest_word(dtype, DTYPES))
    if not isinstance(shape, (list, tuple)) or not 1 <= len(shape) <= 2:
        raise SpecError(f"shape is {str(shape)[:MAX_NAME]!a}", where=f"{where}.shape",
                        allowed="a list of one or two dimensions")
    for dim in shape:
        if (isinstance(dim, str) and dim in DIMS) or (type(dim) is int and 1 <= dim <= INT_MAX):
            continue
        raise SpecError(f"shape holds {str(dim)[:MAX_NAME]!a}", where=f"{where}.shape",
                        allowed=f"{', '.join(DIMS)}, or a whole number from 1", nearest=nearest_word(dim, DIMS))
    if is_sorted not in (False, True) or (is_sorted and dtype != "int32"):
        raise SpecError(f"sorted is {str(is_sorted)[:MAX_NAME]}" + (f" for {dtype}" if is_sorted is True else ""),
                        where=f"{where}.sorted", allowed="true or false; true for int32 only")
    return TensorParam(name, dtype, tuple(shape), bool(is_sorted))
