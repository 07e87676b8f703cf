"""What a mask lets through of a box of positions, as kernels find it: include/flashgen/span.cuh in Python, bit for bit.

`flashgen check` and `explain` count tiles by this. Whatever a smaller box can give lies in what the larger one gives,
so that a box that is settled settles all tiles in it.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Union

from flashgen.codegen.expr.canon import canonical
from flashgen.codegen.expr.tree import INT_MAX, INT_MIN, Const, Expr, Index, Name, Op, const, walk

VISIBLE, MASKED = 1, 2
_POSITIONS = ("q_pos", "kv_pos")  # no parameter has these names
BOTH = VISIBLE | MASKED
Span = tuple[int, int]
# A tensor's elements by the spans of its indices; a name's value. None: not known.
Elements = Callable[[list[Span]], Span]
Value = Union[int, bool, float, Elements, None]  # noqa: UP007
_ALL: Span = (INT_MIN, INT_MAX)
_Node = Callable[[Span, Span], Any]  # of the spans of q_pos and kv_pos: a Span, or bits


def compiled(mask: Expr, values: Mapping[str, Value]) -> Callable[[Span, Span], int]:
    """Bits of a canonical mask for spans of q_pos and kv_pos. `values` of all else; what is missing is not known."""
    return _Compiler(values).truth(mask)


def _wrapped(low: int, high: int) -> Span:
    return _ALL if low < INT_MIN or high > INT_MAX else (low, high)


def _add(a: Span, b: Span) -> Span:
    return _wrapped(a[0] + b[0], a[1] + b[1])


def _neg(a: Span) -> Span:
    return _wrapped(-a[1], -a[0])


def _mul(a: Span, b: Span) -> Span:
    corners = [x * y for x in a for y in b]
    return _wrapped(min(corners), max(corners))


def _abs(a: Span) -> Span:
    if a[0] == INT_MIN:
        return _ALL
    return a if a[0] >= 0 else (-a[1], -a[0]) if a[1] <= 0 else (0, max(-a[0], a[1]))


def _floordiv(a: Span, b: Span) -> Span:
    if b[0] == b[1] and b[0] <= 0:
        return (0, 0) if b[0] == 0 else _neg(a) if b[0] == -1 else (a[1] // b[0], a[0] // b[0])
    if b[0] <= 0:
        return _ALL
    return min(a[0] // b[0], a[0] // b[1]), max(a[1] // b[0], a[1] // b[1])


def _mod(a: Span, b: Span) -> Span:
    if b == (0, 0):
        return 0, 0
    if b[0] == b[1] and b[0] != -1 and a[0] // b[0] == a[1] // b[0]:
        ends = a[0] % b[0], a[1] % b[0]
        return min(ends), max(ends)
    return b[0] + 1 if b[0] < 0 else 0, b[1] - 1 if b[1] > 0 else 0


def _lt(a: Span, b: Span) -> int:
    return (VISIBLE if a[0] < b[1] else 0) | (MASKED if a[1] >= b[0] else 0)


def _eq(a: Span, b: Span) -> int:
    return (VISIBLE if a[0] <= b[1] and b[0] <= a[1] else 0) | (0 if a == b and a[0] == a[1] else MASKED)


def _not(a: int) -> int:
    return (a & VISIBLE) << 1 | a >> 1


def _and(a: int, b: int) -> int:
    return (a & b & VISIBLE) | ((a | b) & MASKED)


def _or(a: int, b: int) -> int:
    return ((a | b) & VISIBLE) | (a & b & MASKED)


def _truth_select(c: int, a: int, b: int) -> int:
    return (a if c & VISIBLE else 0) | (b if c & MASKED else 0)


def _span_select(c: int, a: Span, b: Span) -> Span:
    return a if c == VISIBLE else b if c == MASKED else (min(a[0], b[0]), max(a[1], b[1]))


_SPANS: dict[str, Callable[..., Span]] = {
    "add": _add, "mul": _mul, "neg": _neg, "abs": _abs, "floordiv": _floordiv, "mod": _mod,
    "min": lambda a, b: (min(a[0], b[0]), min(a[1], b[1])), "max": lambda a, b: (max(a[0], b[0]), max(a[1], b[1]))}
_TRUTHS: dict[str, Callable[..., int]] = {
    "lt": _lt, "le": lambda a, b: _not(_lt(b, a)), "eq": _eq, "ne": lambda a, b: _not(_eq(a, b))}


def _chained(function: Callable[..., Any], args: list[_Node]) -> _Node:
    if len(args) == 1:
        [only] = args
        return lambda q, kv: function(only(q, kv))

    def fold(q: Span, kv: Span) -> Any:
        found = args[0](q, kv)
        for arg in args[1:]:
            found = function(found, arg(q, kv))
        return found
    return fold


class _Compiler:
    def __init__(self, values: Mapping[str, Value]) -> None:
        self.values = values

    def settled(self, tree: Expr) -> Expr:
        """The constant that a tree without positions comes to, which kernels work out exactly; else the tree."""
        names = [node for node in walk(tree) if isinstance(node, Name)]
        if isinstance(tree, Const) or any(isinstance(node, Index) or node.type == "float" for node in walk(tree)):
            return tree
        if any(name.name in _POSITIONS or not isinstance(self.values.get(name.name), (bool, int)) for name in names):
            return tree
        found = canonical(self.with_values(tree))
        return found if isinstance(found, Const) else tree

    def with_values(self, tree: Expr) -> Expr:
        if isinstance(tree, Name):
            value = self.values[tree.name]
            assert isinstance(value, (bool, int))  # settled() asks
            return const(bool(value) if tree.type == "bool" else int(value))
        return Op(tree.op, tuple(map(self.with_values, tree.args)), tree.type) if isinstance(tree, Op) else tree

    def truth(self, tree: Expr) -> _Node:
        tree = self.settled(tree)
        if isinstance(tree, Const):
            bits = VISIBLE if tree.value else MASKED
            return lambda q, kv: bits
        if isinstance(tree, Name):
            value = self.values.get(tree.name)
            known = BOTH if value is None else VISIBLE if value else MASKED
            return lambda q, kv: known
        if isinstance(tree, Index):
            elements = self.elements(tree)
            return lambda q, kv: {(0, 0): MASKED, (1, 1): VISIBLE}.get(elements(q, kv), BOTH)
        if tree.op in ("and", "or"):
            return _chained(_and if tree.op == "and" else _or, [self.truth(arg) for arg in tree.args])
        if tree.op == "not":
            return _chained(_not, [self.truth(tree.args[0])])
        if tree.op == "select":
            return _three(_truth_select, [self.truth(arg) for arg in tree.args])
        kind = tree.args[0].type
        if kind == "float":
            return lambda q, kv: BOTH
        if kind == "bool":
            sides = [self.truth(arg) for arg in tree.args]
            same = _chained(lambda a, b: _truth_select(a, b, _not(b)), sides)
            return same if tree.op == "eq" else lambda q, kv: _not(same(q, kv))
        return _chained(_TRUTHS[tree.op], [self.span(arg) for arg in tree.args])

    def span(self, tree: Expr) -> _Node:
        tree = self.settled(tree)
        if isinstance(tree, Const):
            number = (int(tree.value), int(tree.value))
            return lambda q, kv: number
        if isinstance(tree, Name):
            if tree.name in _POSITIONS:
                return (lambda q, kv: q) if tree.name == "q_pos" else lambda q, kv: kv
            value = self.values.get(tree.name)
            known = _ALL if value is None or callable(value) else (int(value), int(value))
            return lambda q, kv: known
        if isinstance(tree, Index):
            return self.elements(tree)
        assert isinstance(tree, Op)
        if tree.op == "select":
            condition, *branches = tree.args
            return _three(_span_select, [self.truth(condition), *map(self.span, branches)])
        return _chained(_SPANS[tree.op], [self.span(arg) for arg in tree.args])

    def elements(self, tree: Index) -> _Node:
        given = self.values.get(tree.param.name)
        places = [self.span(arg) for arg in tree.args]
        if not callable(given):
            known = _ALL if given is None else (int(given), int(given))
            return lambda q, kv: known
        return lambda q, kv: given([place(q, kv) for place in places])


def _three(function: Callable[..., Any], args: list[_Node]) -> _Node:
    first, second, third = args
    return lambda q, kv: function(first(q, kv), second(q, kv), third(q, kv))
