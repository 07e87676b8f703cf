"""Arguments by value: what counts as a number, a flag, a pair or a tensor, and the error for what does not.

A number counts by its value, whatever its type: 3, numpy.int64(3), 3.0 and torch.tensor(3) are one window. Equal values
are equal keys of a memo, so a call that was made before may be answered without a look at the types.
"""
from __future__ import annotations

import math
import numbers
import operator
from typing import Any, cast

import torch
from torch.compiler import is_dynamo_compiling

from flashgen.codegen.expr.tree import INT_MAX
from flashgen.errors import UnsupportedError
from flashgen.runtime.ops.wrapped import refuse_wrapped

# What Python and torch raise of arguments that no check has seen; errors of flashgen's are none of them.
RAW_ERRORS = (AttributeError, TypeError, LookupError, ArithmeticError, RuntimeError)
MAX_SHOWN = 40  # characters of a wrong value in a message
_PLAIN = (int, float, bool)
_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)  # numbers of a graph that is being traced


def shown(value: object) -> str:
    """A wrong value in a few printable words; of a tensor no values, for which a call would wait."""
    if isinstance(value, torch.Tensor):
        return f"a {value.dtype} tensor of {value.dim()} dimensions on {value.device}"
    if isinstance(value, int) and value.bit_length() > 4 * MAX_SHOWN:
        return f"a whole number of {value.bit_length()} bits"
    if type(value) in (*_PLAIN, str, bytes, type(None)):
        text = ascii(value[:MAX_SHOWN] if isinstance(value, (str, bytes)) else value)
        return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."
    return f"of type {type(value).__name__}"


def _python_number(value: Any) -> Any:
    """An int, float or bool where the value is one in another type; anything else where it is none."""
    if isinstance(value, torch.Tensor) or type(value).__module__ == "numpy":
        value = value.item() if value.shape == () else None
    if isinstance(value, numbers.Complex) and not value.imag:
        value = value.real
    if type(value) in _PLAIN:
        return value
    if hasattr(value, "__index__"):
        return operator.index(value)
    # Decimals are numbers that are not complex; fractions and numpy's long doubles are real.
    if isinstance(value, numbers.Real) or (isinstance(value, numbers.Number) and not isinstance(value, complex)):
        return float(cast(Any, value))
    return None


def number(name: str, value: Any, allowed: str = "a number") -> Any:
    """The int, float or bool that `value` is worth; UnsupportedError where it is no number that the host knows."""
    if type(value) in _PLAIN or isinstance(value, _SYMBOLIC):
        return value
    if isinstance(value, torch.Tensor) and value.device.type != "cpu" and value.dim() == 0:
        raise UnsupportedError(f"{name} is {shown(value)}, for which the call would wait", where=name,
                               allowed=f"{allowed} that the host knows", next=f"{name}.item() where waiting is fine")
    try:
        found = _python_number(value)
    except Exception:  # a class of the caller's may raise anything
        found = None
    if type(found) not in _PLAIN:
        raise UnsupportedError(f"{name} is {shown(value)}", where=name, allowed=allowed)
    return found


def whole(name: str, value: Any, low: int, high: int = INT_MAX, allowed: str = "", least: bool = False) -> int:
    """The whole number from `low` to `high` that `value` is worth; UnsupportedError otherwise.

    `least`: a larger number counts as `high`.
    """
    allowed = allowed or f"a whole number, {low} to {high}"
    found = number(name, value, allowed)
    if type(found) in _SYMBOLIC:
        return cast(int, found)
    if least and isinstance(found, int):
        found = min(found, high)
    if not ((isinstance(found, int) or math.isfinite(found)) and low <= found <= high and found == int(found)):
        raise UnsupportedError(f"{name} is {shown(value)}", where=name, allowed=allowed)
    return int(found)


def flag(name: str, value: Any) -> bool:
    """True or False; UnsupportedError for what is worth neither."""
    if type(value) is bool:
        return value
    found = number(name, value, "True or False")
    if found not in (0, 1):
        raise UnsupportedError(f"{name} is {shown(value)}", where=name, allowed="True or False")
    return bool(found)


def pair(name: str, value: Any, allowed: str) -> tuple[Any, Any]:
    """The two items of a tuple, a list, or a tensor or an array on the host; UnsupportedError otherwise."""
    items = value
    if isinstance(value, torch.Tensor) and value.device.type != "cpu":
        raise UnsupportedError(f"{name} is {shown(value)}, for which the call would wait", where=name,
                               allowed=f"{allowed} that the host knows", next=f"{name}.tolist() where waiting is fine")
    if isinstance(value, torch.Tensor) or type(value).__module__ == "numpy":
        try:
            items = value.tolist() if len(value) == 2 else None
        except (*RAW_ERRORS, ValueError):  # sparse and quantized tensors, arrays of no dimensions
            items = None
    if not isinstance(items, (tuple, list)) or len(items) != 2:
        count = f" with {len(items)} items" if isinstance(items, (tuple, list)) else ""
        raise UnsupportedError(f"{name} is {shown(value)}{count}", where=name, allowed=allowed)
    return items[0], items[1]


def check_tensor(name: str, value: Any, allowed: str = "a tensor") -> None:
    """UnsupportedError unless it is a tensor, and a plain one."""
    if not isinstance(value, torch.Tensor):
        raise UnsupportedError(f"{name} is {shown(value)}", where=name, allowed=allowed,
                               next=f"torch.as_tensor({name})" if type(value).__module__ == "numpy" else "")
    if not is_dynamo_compiling():
        refuse_wrapped(**{name: value})


def require_tensors(optional: bool, **tensors: Any) -> None:
    """check_tensor of each; None passes where the arguments are optional."""
    for name, value in tensors.items():
        if not (optional and value is None):
            check_tensor(name, value, "a tensor, or None" if optional else "a tensor")


def same(found: tuple[Any, ...], given: tuple[Any, ...]) -> bool:
    """Whether all values that were read are those that were given: plain ones already."""
    return all(new is old for new, old in zip(found, given, strict=True))


def check_unread(max_seqlen_q: Any, max_seqlen_kv: Any) -> None:
    """UnsupportedError for what is no whole number. A tensor's value is not read, since nothing needs it."""
    if type(max_seqlen_q) is int and type(max_seqlen_kv) is int:
        return
    for name, value in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_kv", max_seqlen_kv)):
        if value is not None and not (isinstance(value, torch.Tensor) and value.numel() == 1):
            whole(name, value, -INT_MAX, allowed="a count, which the kernels do not need, or None")
