"""Trees of score and mask expressions: typed, frozen nodes, the names they may hold, and their text.

Every value is an int (32 bits, wraps), a float (float32 in CUDA) or a bool. All operations are total: nothing that a
tree says can trap, in CUDA, numpy or torch. x // 0 and x % 0 are 0, and an index outside a tensor reads the nearest
element. Conversions are nodes of their own ("float"), so that a tree means the same wherever it stands.
"""
from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Literal, Union

Type = Literal["int", "float", "bool"]
INT_MIN, INT_MAX = -(1 << 31), (1 << 31) - 1
# Of float32: the largest, the least that is normal (a GPU may flush those below it to 0), the least above 0.
FLOAT_MAX, FLOAT_NORMAL, FLOAT_LEAST = 3.4028234663852886e38, 2.0**-126, 2.0**-149

SCOPE: dict[str, Type] = {"score": "float", "q_pos": "int", "kv_pos": "int", "batch": "int", "head_q": "int",
                          "head_kv": "int", "seqlen_q": "int", "seqlen_kv": "int", "q_first": "int"}
ROW = "q_index"  # short for q_pos - q_first: the query's own row in its sequence, however positions are aligned
SCOPE_NAMES = (*SCOPE, ROW)
# What bounds a name that is not a parameter. Positions may be negative: queries may begin before the first key.
SCOPE_RANGES: dict[str, tuple[int, int]] = {
    "q_pos": (-(1 << 30), (1 << 30) - 1), "kv_pos": (0, (1 << 30) - 1), "batch": (0, (1 << 30) - 1),
    "head_q": (0, (1 << 30) - 1), "head_kv": (0, (1 << 30) - 1), "seqlen_q": (0, 1 << 30), "seqlen_kv": (0, 1 << 30),
    "q_first": (-(1 << 30), 1 << 30),
}
# A total_q or total_kv is indexed by the token's number in its own sequence; the rest index the whole tensor.
DIMS = ("num_heads_q", "num_heads_kv", "batch", "seqlen_q", "seqlen_kv", "total_q", "total_kv")
DTYPES: dict[str, Type] = {"float32": "float", "int32": "int", "bool": "bool"}
INFIX = {"add": "+", "mul": "*", "div": "/", "floordiv": "//", "mod": "%", "lt": "<", "le": "<=", "eq": "==",
         "ne": "!=", "and": "and", "or": "or"}
FUNCTIONS = ("min", "max", "abs", "exp", "log", "tanh", "sigmoid", "float")
_LEVEL = {"select": 0, "or": 1, "and": 2, "not": 3, "lt": 4, "le": 4, "eq": 4, "ne": 4, "add": 5, "mul": 6, "div": 6,
          "floordiv": 6, "mod": 6, "neg": 7}
_ATOM = 8


@dataclass(frozen=True)
class ScalarParam:
    """A number given at each call. `default` is None where the call must give it."""

    name: str
    type: Type
    default: int | float | bool | None = None

    def __str__(self) -> str:
        return f"{self.name}: {self.type}"


@dataclass(frozen=True)
class TensorParam:
    """A contiguous tensor given at each call, of one or two dimensions: names from DIMS, or whole numbers from 1.

    `sorted`: the caller promises that elements never fall along the last dimension (of each sequence, if packed), so
    that the first and the last of a range bound it.
    """

    name: str
    dtype: str
    shape: tuple[str | int, ...]
    sorted: bool = False

    @property
    def type(self) -> Type:
        return DTYPES[self.dtype]

    def __str__(self) -> str:
        return f"{self.name}: {'sorted ' * self.sorted}{self.dtype}[{', '.join(map(str, self.shape))}]"


Param = Union[ScalarParam, TensorParam]  # noqa: UP007 (evaluated at import, by Python 3.10 too)


class _Node:
    """What all nodes share. Two nodes of one type are the same expression exactly if their texts are equal."""

    args: tuple[Expr, ...]

    def __post_init__(self) -> None:
        _ = self.text, self.size, self.depth  # from the arguments', which know theirs, and so without recursion

    @cached_property
    def text(self) -> str:
        """The expression in the user's language; parse() gives this tree back."""
        return _text(self)  # type: ignore[arg-type]

    @cached_property
    def size(self) -> int:
        """Nodes in the tree."""
        return 1 + sum(arg.size for arg in self.args)

    @cached_property
    def depth(self) -> int:
        """Nodes on the longest way down."""
        return 1 + max((arg.depth for arg in self.args), default=0)


@dataclass(frozen=True)
class Const(_Node):
    """A literal; a float is finite and exactly a float32."""

    value: int | float | bool
    type: Type
    args: ClassVar[tuple[Expr, ...]] = ()  # type: ignore[misc]


@dataclass(frozen=True)
class Name(_Node):
    """A name in scope ("scope"), a scalar parameter ("param"), or a value computed before ("part", see hoist)."""

    name: str
    type: Type
    kind: Literal["scope", "param", "part"] = "scope"
    args: ClassVar[tuple[Expr, ...]] = ()  # type: ignore[misc]


@dataclass(frozen=True)
class Index(_Node):
    param: TensorParam
    args: tuple[Expr, ...]

    @property
    def type(self) -> Type:
        return self.param.type


@dataclass(frozen=True)
class Op(_Node):
    """An operation. add, mul, min, max, and, or take two arguments or more, evaluated from left to right; a
    subtraction is an addition of neg; select is (condition, then, else)."""

    op: str
    args: tuple[Expr, ...]
    type: Type


Expr = Union[Const, Name, Index, Op]  # noqa: UP007


def const(value: int | float | bool) -> Const:
    """The literal, of the type of the Python value; a float must already be a float32."""
    return Const(value, "bool" if isinstance(value, bool) else "int" if isinstance(value, int) else "float")


def round_float(value: float) -> float:
    """The nearest float32; an infinity where it is too large, as in hardware."""
    if math.isnan(value) or math.isinf(value):
        return value
    try:
        return float(struct.unpack("f", struct.pack("f", value))[0])
    except OverflowError:
        return math.copysign(math.inf, value)


def wrap_int(value: int) -> int:
    """The 32-bit int with the same low bits."""
    return ((value - INT_MIN) & 0xFFFFFFFF) + INT_MIN


def float_text(value: float) -> str:
    """The shortest decimal that reads back as this float32, with a point or an exponent."""
    shortest = (float(f"{value:.{digits}g}") for digits in range(1, 18))
    return repr(next(number for number in shortest if round_float(number) == value))


def walk(tree: Expr) -> Iterator[Expr]:
    """Every node, parents first."""
    yield tree
    for arg in tree.args:
        yield from walk(arg)


def names_of(tree: Expr) -> dict[str, Name | TensorParam]:
    """The names that a tree reads, in order of first use."""
    found: dict[str, Name | TensorParam] = {}
    for node in walk(tree):
        if isinstance(node, Name):
            found.setdefault(node.name, node)
        elif isinstance(node, Index):
            found.setdefault(node.param.name, node.param)
    return found


def is_negative(tree: Expr) -> bool:
    """Whether a tree is written with a sign in front: neg(...) or a literal below zero."""
    if isinstance(tree, Const):
        return tree.type != "bool" and math.copysign(1, tree.value) < 0
    return isinstance(tree, Op) and tree.op == "neg"


def _level(tree: Expr) -> int:
    if isinstance(tree, Op):
        return _LEVEL.get(tree.op, _ATOM)
    return _LEVEL["neg"] if is_negative(tree) else _ATOM


def _at(tree: Expr, level: int) -> str:
    return tree.text if _level(tree) >= level else f"({tree.text})"


def _text(tree: Expr) -> str:
    if isinstance(tree, Const):
        return float_text(tree.value) if tree.type == "float" else str(tree.value)
    if isinstance(tree, Name):
        return tree.name
    listed = ", ".join(arg.text for arg in tree.args)
    if isinstance(tree, Index):
        return f"{tree.param.name}[{listed}]"
    level, args = _level(tree), tree.args
    if tree.op == "select":
        return f"{_at(args[1], 1)} if {_at(args[0], 1)} else {_at(args[2], 0)}"
    if tree.op in ("neg", "not"):
        return f"-{_at(args[0], _ATOM)}" if tree.op == "neg" else f"not {_at(args[0], level)}"
    if tree.op == "add":
        return _at(args[0], level + 1) + "".join(map(_addend, args[1:]))
    if tree.op in INFIX:
        # A chain reads as one n-ary node, so arguments of the same level are put in parentheses: all of them, or,
        # where the operation is not a chain's, all but the first.
        chain = tree.op in ("mul", "and", "or") and isinstance(args[0], Op) and args[0].op == tree.op
        first = _at(args[0], level + 1 if chain or level == _LEVEL["lt"] else level)
        return f" {INFIX[tree.op]} ".join([first, *(_at(arg, level + 1) for arg in args[1:])])
    return f"{tree.op}({listed})"


def _addend(arg: Expr) -> str:
    if isinstance(arg, Op) and arg.op == "neg" and not is_negative(arg.args[0]):
        return f" - {_at(arg.args[0], 6)}"
    return f" + {_at(arg, 6)}"
