"""The canonical form of an expression: one tree for all the ways of writing the same thing, as far as rules reach.

Rules keep every value, NaN and infinity included, with two exceptions: float sums and products are reordered, which
changes their rounding, and so are min and max, which of 0.0 and -0.0 give either. So all that computes a value (CUDA,
reference, derivative) starts from the canonical tree, and then `a + b` and `b + a` are the same program. Constants come
first in a chain: folding them is what a computer would do first. What would overflow, or divide by zero, is left for
run time.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from flashgen.codegen.expr.tree import (
    INT_MAX,
    INT_MIN,
    Const,
    Expr,
    Index,
    Op,
    Type,
    const,
    is_negative,
    round_float,
    wrap_int,
)

CHAINS = ("add", "mul", "min", "max", "and", "or")
_IDEMPOTENT = ("min", "max", "and", "or")


def canonical(tree: Expr) -> Expr:
    """The canonical tree; canonical(canonical(t)) is canonical(t)."""
    if isinstance(tree, Index):
        return Index(tree.param, tuple(canonical(arg) for arg in tree.args))
    if not isinstance(tree, Op):
        return tree
    return build(tree.op, [canonical(arg) for arg in tree.args], tree.type)


def build(op: str, args: Sequence[Expr], type_: Type) -> Expr:
    """The canonical tree of an operation on canonical arguments."""
    folded = _fold(op, args, type_)
    if folded is not None:
        return folded
    return _RULES[op](list(args), type_)


def constant_value(op: str, values: Sequence[int | float | bool], type_: Type) -> int | float | bool | None:
    """The operation on literals, in the arithmetic of the device; None where floats overflow or are not defined.

    A float64 result rounded to float32 is the float32 result of + - * /: 53 bits are enough for that.
    """
    try:
        value = _CONSTANT[op](*values)
    except (ValueError, OverflowError, ZeroDivisionError):  # log(-1), exp(1000), x / 0
        return None
    if type_ == "int":
        return wrap_int(int(value))
    if type_ == "float":
        value = round_float(value)
        return value if math.isfinite(value) else None
    return bool(value)


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))


_CONSTANT: dict[str, Callable[..., int | float | bool]] = {
    "add": lambda a, b: a + b, "mul": lambda a, b: a * b, "div": lambda a, b: a / b, "neg": lambda a: -a,
    "floordiv": lambda a, b: a // b if b else 0, "mod": lambda a, b: a % b if b else 0,
    "min": min, "max": max, "abs": abs, "exp": math.exp, "log": math.log, "tanh": math.tanh, "sigmoid": _sigmoid,
    "float": float, "lt": lambda a, b: a < b, "le": lambda a, b: a <= b, "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b, "and": lambda a, b: a and b, "or": lambda a, b: a or b, "not": lambda a: not a,
}


def _fold(op: str, args: Sequence[Expr], type_: Type) -> Expr | None:
    if op in CHAINS or op == "select" or not all(isinstance(arg, Const) for arg in args):
        return None
    value = constant_value(op, [arg.value for arg in args if isinstance(arg, Const)], type_)
    return None if value is None else const(value)


def _is(tree: Expr, value: int | float | bool) -> bool:
    """Whether a tree is this literal, the sign of zero included."""
    return isinstance(tree, Const) and tree.value == value and math.copysign(1, tree.value) == math.copysign(1, value)


def _op(tree: Expr, op: str) -> bool:
    return isinstance(tree, Op) and tree.op == op


def negate(tree: Expr) -> Expr:
    """-tree, canonical."""
    return build("neg", [tree], tree.type)


def _neg(args: list[Expr], type_: Type) -> Expr:
    [arg] = args
    if isinstance(arg, Op) and arg.op == "neg":
        return arg.args[0]
    if type_ == "int" and isinstance(arg, Op) and arg.op == "add":
        return build("add", [negate(term) for term in arg.args], type_)  # of floats, a zero would change its sign
    if isinstance(arg, Op) and arg.op in ("mul", "div") and isinstance(arg.args[0], Const):
        # Signs are exact: -(c * x) is (-c) * x, in wrapping ints too.
        return build(arg.op, [negate(arg.args[0]), *arg.args[1:]], type_)
    return Op("neg", (arg,), type_)


def _ordered(args: Sequence[Expr]) -> list[Expr]:
    """Literals first, what is subtracted last."""
    return sorted(args, key=lambda arg: (not isinstance(arg, Const), is_negative(arg), arg.text))


def _chain(op: str, args: Sequence[Expr], type_: Type) -> list[Expr]:
    """Flat, ordered, with the leading literals folded."""
    flat: list[Expr] = []
    for arg in args:
        flat += arg.args if _op(arg, op) else [arg]
    flat = _ordered(flat)
    if op in _IDEMPOTENT:
        flat = list({arg.text: arg for arg in flat}.values())
    while len(flat) > 1 and isinstance(flat[0], Const) and isinstance(flat[1], Const):
        value = constant_value(op, [flat[0].value, flat[1].value], type_)
        if value is None:
            break
        flat = _ordered([const(value), *flat[2:]])
    return flat


def _add(args: list[Expr], type_: Type) -> Expr:
    flat = _chain("add", args, type_)
    if type_ == "int":
        for term in [term.args[0] for term in flat if isinstance(term, Op) and term.op == "neg"]:
            if term in flat:  # x - x is 0 for ints, and NaN for an infinite float
                flat.remove(term)
                flat.remove(Op("neg", (term,), "int"))
    zero = const(0) if type_ == "int" else const(-0.0)  # x + 0.0 is not x: it turns -0.0 into 0.0
    flat = [term for term in flat if not _is(term, zero.value)]
    if len(flat) < 2:
        return flat[0] if flat else zero
    return Op("add", tuple(flat), type_)


def _mul(args: list[Expr], type_: Type) -> Expr:
    plain: list[Expr] = []
    odd = False
    for arg in args:
        if isinstance(arg, Op) and arg.op == "neg":
            odd, arg = not odd, arg.args[0]
        plain.append(arg)
    flat = _chain("mul", plain, type_)
    if odd and isinstance(flat[0], Const):
        flat[0], odd = negate(flat[0]), False
        flat = _ordered(flat)
    if type_ == "int" and _is(flat[0], 0):
        return const(0)  # of floats it stays: 0 * inf is NaN
    one = const(1) if type_ == "int" else const(1.0)
    flat = [factor for factor in flat if not _is(factor, one.value)] or [one]
    if len(flat) > 1 and _is(flat[0], -one.value):
        odd, flat = not odd, flat[1:]
    result = flat[0] if len(flat) == 1 else Op("mul", tuple(flat), type_)
    return negate(result) if odd else result


def _div(args: list[Expr], type_: Type) -> Expr:
    top, bottom = args
    odd = False
    if isinstance(top, Op) and top.op == "neg":
        top, odd = top.args[0], True
    if isinstance(bottom, Op) and bottom.op == "neg":
        bottom, odd = bottom.args[0], not odd
    result: Expr = Op("div", (top, bottom), type_)
    if isinstance(bottom, Const) and bottom.value:
        inverse = 1 / bottom.value
        if math.frexp(bottom.value)[0] in (0.5, -0.5) and 2.0 ** -126 <= abs(inverse) < 2.0 ** 127:
            result = build("mul", [const(inverse), top], type_)  # exact: a power of two
    return negate(result) if odd else result


def _floordiv(args: list[Expr], type_: Type) -> Expr:
    top, bottom = args
    if _is(bottom, 1):
        return top
    return negate(top) if _is(bottom, -1) else Op("floordiv", (top, bottom), type_)


def _mod(args: list[Expr], type_: Type) -> Expr:
    return const(0) if _is(args[1], 1) or _is(args[1], -1) else Op("mod", tuple(args), type_)


def _extreme(op: str) -> Callable[[list[Expr], Type], Expr]:
    def rule(args: list[Expr], type_: Type) -> Expr:
        flat = _chain(op, args, type_)
        return flat[0] if len(flat) == 1 else Op(op, tuple(flat), type_)
    return rule


def _logic(op: str) -> Callable[[list[Expr], Type], Expr]:
    decides = op == "or"

    def rule(args: list[Expr], type_: Type) -> Expr:
        flat = [arg for arg in _chain(op, args, type_) if not _is(arg, not decides)]
        if any(_is(arg, decides) for arg in flat):
            return const(decides)
        if len(flat) < 2:
            return flat[0] if flat else const(not decides)
        return Op(op, tuple(flat), type_)
    return rule


def _abs(args: list[Expr], type_: Type) -> Expr:
    [arg] = args
    if isinstance(arg, Op) and arg.op in ("neg", "abs"):
        return arg if arg.op == "abs" else build("abs", [arg.args[0]], type_)
    if isinstance(arg, Op) and arg.op == "add":
        # a - b and b - a have one size, and the one whose text comes first stands for both.
        other = build("add", [negate(term) for term in arg.args], type_)
        arg = min(arg, other, key=lambda tree: tree.text)
    if isinstance(arg, Op) and arg.op == "mul" and isinstance(arg.args[0], Const) and INT_MIN != arg.args[0].value < 0:
        return build("abs", [negate(arg)], type_)
    return Op("abs", (arg,), type_)


def _order(op: str) -> Callable[[list[Expr], Type], Expr]:
    def rule(args: list[Expr], type_: Type) -> Expr:
        left, right = args
        if left.type == "int":
            if left.text == right.text:
                return const(op == "le")
            if op == "le" and isinstance(right, Const) and right.value < INT_MAX:
                return build("lt", [left, const(int(right.value) + 1)], type_)
            if op == "le" and isinstance(left, Const) and left.value > INT_MIN:
                return build("lt", [const(int(left.value) - 1), right], type_)
        return Op(op, (left, right), type_)
    return rule


def _equal(op: str) -> Callable[[list[Expr], Type], Expr]:
    def rule(args: list[Expr], type_: Type) -> Expr:
        left, right = _ordered(args)
        if left.type != "float" and left.text == right.text:  # a NaN differs from itself
            return const(op == "eq")
        if left.type == "bool" and isinstance(left, Const):
            return right if left.value == (op == "eq") else build("not", [right], type_)
        return Op(op, (left, right), type_)
    return rule


def _not(args: list[Expr], type_: Type) -> Expr:
    [arg] = args
    if isinstance(arg, Op) and arg.op == "not":
        return arg.args[0]
    if isinstance(arg, Op) and arg.op in ("eq", "ne"):
        return build("ne" if arg.op == "eq" else "eq", arg.args, type_)
    if isinstance(arg, Op) and arg.op in ("lt", "le") and arg.args[0].type == "int":  # not so with a NaN
        return build("le" if arg.op == "lt" else "lt", arg.args[::-1], type_)
    return Op("not", (arg,), type_)


def _select(args: list[Expr], type_: Type) -> Expr:
    condition, then, otherwise = args
    if isinstance(condition, Const):
        return then if condition.value else otherwise
    if then.text == otherwise.text:
        return then
    if isinstance(condition, Op) and condition.op in ("not", "ne"):
        return build("select", [build("not", [condition], "bool"), otherwise, then], type_)
    return Op("select", (condition, then, otherwise), type_)


def _plain(op: str) -> Callable[[list[Expr], Type], Expr]:
    return lambda args, type_: Op(op, tuple(args), type_)


_RULES: dict[str, Callable[[list[Expr], Type], Expr]] = {
    "add": _add, "mul": _mul, "div": _div, "floordiv": _floordiv, "mod": _mod, "neg": _neg, "abs": _abs,
    "min": _extreme("min"), "max": _extreme("max"), "and": _logic("and"), "or": _logic("or"), "not": _not,
    "lt": _order("lt"), "le": _order("le"), "eq": _equal("eq"), "ne": _equal("ne"), "select": _select,
    **{op: _plain(op) for op in ("exp", "log", "tanh", "sigmoid", "float")},
}
