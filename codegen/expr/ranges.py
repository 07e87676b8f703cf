"""Whether a mask lets all, none or some of a tile's positions through, from ranges alone.

Int values are linear forms over names and over opaque values (quotients, remainders, tensor elements), so that
q_pos - kv_pos is one quantity with its own range, and conditions on one quantity are combined as sets of numbers.
What is still open is split into smaller boxes, at the bounds of one position where the mask has such, else in half.
SKIP and FULL are proofs; PARTIAL is everything else. Ranges of floats are widened by more than rounding can move them.
"""
from __future__ import annotations

import difflib
import enum
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Union

from flashgen.codegen.expr.sets import NumberSet
from flashgen.codegen.expr.tree import (
    FLOAT_MAX,
    INT_MAX,
    INT_MIN,
    SCOPE_RANGES,
    Const,
    Expr,
    Index,
    Name,
    Op,
    names_of,
    round_float,
    wrap_int,
)
from flashgen.errors import SpecError

Range = Union[int, float, bool, tuple[int, int], tuple[float, float]]  # noqa: UP007
MAX_BOXES = 512
POSITIONS = ("q_pos", "kv_pos")
_ALL_INTS, _ALL_FLOATS = (INT_MIN, INT_MAX), (-math.inf, math.inf)
_SLACK = 2.0 ** -20  # eight float32 roundings, for contraction to fma and for a float64 reference


class TileClass(enum.Enum):
    SKIP = "skip"        # no position passes
    FULL = "full"        # every position passes
    PARTIAL = "partial"  # some do, or it is not known


def mask_class(tree: Expr, ranges: Mapping[str, Range], max_boxes: int = MAX_BOXES) -> TileClass:
    """The class of a box of positions.

    `ranges` gives names a value, or (lowest, highest), both inclusive; of a tensor parameter, of its elements. A name
    that is missing can be anything its type holds, and a range of a name that is no position means that the answer
    holds for each of its values. At most `max_boxes` boxes are looked at, each in the time of one evaluation in Python.
    Raises SpecError if the tree is no bool or a range is empty, or no number.
    """
    if tree.type != "bool":
        raise SpecError(f"is {tree.type}", where="mask", allowed="a bool expression")
    known = _checked(tree, ranges)
    split = [name for name in POSITIONS if name in known and name in names_of(tree)]
    boxes = [known]
    found: set[bool] = set()
    for _ in range(max_boxes):
        box = boxes.pop()
        bounds = _Bounds(box)
        truth = bounds.truth(tree)
        if truth.both:
            open_names = [name for name in split if box[name][0] < box[name][1]]
            if not open_names:
                return TileClass.PARTIAL
            boxes += _halves(box, open_names, bounds.thresholds)
        else:
            found.add(truth.can_be_true)
        if len(found) > 1:
            return TileClass.PARTIAL
        if not boxes:
            return TileClass.FULL if True in found else TileClass.SKIP
    return TileClass.PARTIAL


_Known = dict[str, tuple[float, float]]


def _checked(tree: Expr, ranges: Mapping[str, Range]) -> _Known:
    names = names_of(tree)
    known: _Known = {}
    for name, given in ranges.items():
        if name not in names:
            continue
        low, high = given if isinstance(given, tuple) else (given, given)
        kinds = (int, float) if names[name].type == "float" else (int,)
        if not (isinstance(low, kinds) and isinstance(high, kinds) and low <= high):
            raise SpecError(f"{name} is {str(given)[:60]}", where="ranges",
                            allowed=f"a value of type {names[name].type}, or (lowest, highest)",
                            nearest="".join(difflib.get_close_matches(name, names, n=1)))
        known[name] = (low, high)
    return known


def _halves(box: _Known, names: list[str], thresholds: Iterable[tuple[str, int]]) -> list[_Known]:
    """Two boxes that make up the box: cut where a condition on one position turns, else the longest side in half."""
    name = max(names, key=lambda name: box[name][1] - box[name][0])
    low, high = box[name]
    cut = int(low + high) // 2 + 1
    for candidate, first in thresholds:
        if candidate in names and box[candidate][0] < first <= box[candidate][1]:
            name, cut = candidate, first
            low, high = box[name]
            break
    return [{**box, name: (low, cut - 1)}, {**box, name: (cut, high)}]


@dataclass(frozen=True)
class _Int:
    """sum of factor * quantity, plus offset; `low` and `high` bound the value."""

    terms: tuple[tuple[str, int], ...]
    offset: int
    low: int
    high: int

    @property
    def fixed(self) -> bool:
        return self.low == self.high


@dataclass(frozen=True)
class _Float:
    low: float
    high: float
    can_be_nan: bool = False


_ANY_FLOAT = _Float(*_ALL_FLOATS, True)


@dataclass(frozen=True)
class _Truth:
    """What a condition can be, and, where it hangs on one quantity, for which of its values it holds."""

    can_be_true: bool
    can_be_false: bool
    quantity: tuple[tuple[str, int], ...] = ()
    span: tuple[int, int] = (0, 0)
    holds: NumberSet | None = None

    @property
    def both(self) -> bool:
        return self.can_be_true and self.can_be_false

    def negated(self) -> _Truth:
        holds = None if self.holds is None else self.holds.complement()
        return _Truth(self.can_be_false, self.can_be_true, self.quantity, self.span, holds)


def _of_set(quantity: tuple[tuple[str, int], ...], span: tuple[int, int], holds: NumberSet) -> _Truth:
    return _Truth(holds.meets(*span), holds.complement().meets(*span), quantity, span, holds)


class _Bounds:
    """The bounds of every node in one box."""

    def __init__(self, known: _Known) -> None:
        self.known = known
        self.spans: dict[str, tuple[int, int]] = {}  # of quantities
        self.thresholds: dict[tuple[str, int], None] = {}  # (position, the first value of another kind), in order
        self.memo: dict[str, _Int] = {}

    def int_of(self, tree: Expr) -> _Int:
        if tree.text not in self.memo:
            self.memo[tree.text] = self.int_of_op(tree) if isinstance(tree, Op) else self.int_of_leaf(tree)
        return self.memo[tree.text]

    def int_of_leaf(self, tree: Expr) -> _Int:
        if isinstance(tree, Const):
            return self.linear({}, int(tree.value), tree)
        name = tree.param.name if isinstance(tree, Index) else tree.name if isinstance(tree, Name) else ""
        default = SCOPE_RANGES.get(name, _ALL_INTS) if isinstance(tree, Name) and tree.kind == "scope" else _ALL_INTS
        low, high = self.known.get(name, default)
        return self.opaque(tree, int(low), int(high))

    def opaque(self, tree: Expr, low: int, high: int) -> _Int:
        """A quantity of its own, equal wherever its text is, with these bounds before wrapping."""
        shift = wrap_int(low) - low
        low, high = (low + shift, high + shift) if high + shift <= INT_MAX else _ALL_INTS
        if low == high:
            return _Int((), low, low, low)
        self.spans[tree.text] = (low, high)
        return _Int(((tree.text, 1),), 0, low, high)

    def linear(self, terms: Mapping[str, int], offset: int, tree: Expr) -> _Int:
        kept = tuple(sorted((text, factor) for text, factor in terms.items() if factor))
        low, high = self.span(kept)
        offset += wrap_int(low + offset) - (low + offset)
        if high + offset > INT_MAX:  # some values wrap and some do not
            return self.opaque(tree, *_ALL_INTS)
        return _Int(kept, offset, low + offset, high + offset)

    def span(self, terms: Iterable[tuple[str, int]]) -> tuple[int, int]:
        low = high = 0
        for text, factor in terms:
            ends = [factor * end for end in self.spans[text]]
            low, high = low + min(ends), high + max(ends)
        return low, high

    def int_of_op(self, tree: Op) -> _Int:
        if tree.op == "select":
            return self.int_of_select(tree)
        args = [self.int_of(arg) for arg in tree.args]
        if tree.op in ("add", "neg"):
            sign = -1 if tree.op == "neg" else 1
            terms: dict[str, int] = {}
            for arg in args:
                for text, factor in arg.terms:
                    terms[text] = terms.get(text, 0) + sign * factor
            return self.linear(terms, sign * sum(arg.offset for arg in args), tree)
        if tree.op == "mul":
            return self.int_of_product(tree, args)
        if tree.op in ("min", "max"):
            choose = min if tree.op == "min" else max
            low, high = choose(arg.low for arg in args), choose(arg.high for arg in args)
            for arg in args:
                others = [other for other in args if other is not arg]
                if all(arg.high <= o.low if tree.op == "min" else arg.low >= o.high for o in others):
                    return arg
            return self.opaque(tree, low, high)
        if tree.op == "abs":
            [arg] = args
            if arg.low >= 0:
                return arg
            if arg.high <= 0:
                return self.linear({text: -factor for text, factor in arg.terms}, -arg.offset, tree)
            return self.opaque(tree, 0, max(-arg.low, arg.high))
        return self.opaque(tree, *(_quotient if tree.op == "floordiv" else _remainder)(*args))

    def int_of_product(self, tree: Op, args: list[_Int]) -> _Int:
        scale = math.prod(arg.low for arg in args if arg.fixed)
        free = [arg for arg in args if not arg.fixed]
        if len(free) < 2:
            terms = free[0].terms if free else ()
            return self.linear({text: factor * scale for text, factor in terms},
                               scale * (free[0].offset if free else 1), tree)
        low, high = scale, scale
        for arg in free:
            corners = [a * b for a in (low, high) for b in (arg.low, arg.high)]
            low, high = min(corners), max(corners)
        return self.opaque(tree, low, high)

    def int_of_select(self, tree: Op) -> _Int:
        truth = self.truth(tree.args[0])
        if not truth.both:
            return self.int_of(tree.args[1 if truth.can_be_true else 2])
        then, otherwise = self.int_of(tree.args[1]), self.int_of(tree.args[2])
        return self.opaque(tree, min(then.low, otherwise.low), max(then.high, otherwise.high))

    def truth(self, tree: Expr) -> _Truth:
        if isinstance(tree, Const):
            return _Truth(bool(tree.value), not tree.value)
        if isinstance(tree, (Name, Index)):
            low, high = self.known.get(tree.name if isinstance(tree, Name) else tree.param.name, (0, 1))
            return _of_set(((tree.text, 1),), (int(low), int(high)), NumberSet.at(1))
        args = tree.args
        if tree.op in ("and", "or"):
            return _join(tree.op, [self.truth(arg) for arg in args])
        if tree.op == "not":
            return self.truth(args[0]).negated()
        if tree.op == "select":
            return _choice(*(self.truth(arg) for arg in args))
        if args[0].type == "bool":
            left, right = self.truth(args[0]), self.truth(args[1])
            equal = _choice(left, right, right.negated())
            return equal if tree.op == "eq" else equal.negated()
        if args[0].type == "float":
            return _compare_floats(tree.op, self.float_of(args[0]), self.float_of(args[1]))
        return self.compare_ints(tree.op, self.int_of(args[0]), self.int_of(args[1]))

    def compare_ints(self, op: str, left: _Int, right: _Int) -> _Truth:
        """left - right against 0, as the numbers that one quantity may be: the difference's terms without their
        common factor and without the offset, the first of them positive."""
        terms = dict(left.terms)
        for text, factor in right.terms:
            terms[text] = terms.get(text, 0) - factor
        kept = sorted((text, factor) for text, factor in terms.items() if factor)
        offset = left.offset - right.offset
        divisor = math.gcd(*(factor for _, factor in kept)) if kept else 1
        sign = -1 if kept and kept[0][1] < 0 else 1
        quantity = tuple((text, sign * factor // divisor) for text, factor in kept)
        if op in ("eq", "ne"):
            holds = NumberSet.at(-sign * offset // divisor) if offset % divisor == 0 else NumberSet()
            holds = holds if op == "eq" else holds.complement()
        else:
            limit = offset - (op == "le")  # x <= 0 is x - 1 < 0
            holds = NumberSet.up_to((-limit - 1) // divisor) if sign > 0 else NumberSet.from_(limit // divisor + 1)
        if len(quantity) == 1 and quantity[0] in ((name, 1) for name in POSITIONS):
            self.thresholds.update({(quantity[0][0], first): None for first in holds.turns()})
        return _of_set(quantity, self.span(quantity), holds)

    def float_of(self, tree: Expr) -> _Float:
        if isinstance(tree, Const):
            return _Float(tree.value, tree.value)
        if isinstance(tree, (Name, Index)):
            name = tree.name if isinstance(tree, Name) else tree.param.name
            return _rounded(*self.known[name]) if name in self.known else _ANY_FLOAT
        if tree.op == "float":
            value = self.int_of(tree.args[0])
            return _rounded(value.low, value.high)
        if tree.op == "select":
            truth = self.truth(tree.args[0])
            return _hull([self.float_of(arg) for arg, taken in
                          zip(tree.args[1:], (truth.can_be_true, truth.can_be_false), strict=True) if taken])
        args = [self.float_of(arg) for arg in tree.args]
        nan = any(arg.can_be_nan for arg in args)
        low, high = args[0].low, args[0].high
        if tree.op == "neg":
            return _Float(-high, -low, nan)
        if tree.op == "abs":
            return _Float(max(low, -high, 0.0), max(-low, high), nan)
        if tree.op in ("min", "max"):
            choose = min if tree.op == "min" else max
            return _hull(args) if nan else _Float(choose(a.low for a in args), choose(a.high for a in args))
        if tree.op in ("add", "mul"):
            return _arithmetic(tree.op, args)
        if tree.op in ("tanh", "sigmoid"):
            return _Float(-1 - _SLACK, 1 + _SLACK, nan)
        return _Float(0.0, math.inf, nan) if tree.op == "exp" else _ANY_FLOAT


def _rounded(low: float, high: float) -> _Float:
    """Of a number that is rounded to float32, or, in a reference, is not."""
    return _Float(min(low, round_float(low)), max(high, round_float(high)), low != low or high != high)


def _hull(parts: list[_Float]) -> _Float:
    return _Float(min(part.low for part in parts), max(part.high for part in parts),
                  any(part.can_be_nan for part in parts))


def _arithmetic(op: str, args: list[_Float]) -> _Float:
    low, high = args[0].low, args[0].high
    size = max(-low, high)  # of the steps' results: what rounding is relative to
    for arg in args[1:]:
        ends = [low + arg.low, high + arg.high] if op == "add" else [a * b for a in (low, high)
                                                                      for b in (arg.low, arg.high)]
        low, high = min(ends), max(ends)
        size += max(map(abs, (arg.low, arg.high, low, high)))
    if any(arg.can_be_nan for arg in args) or not size <= FLOAT_MAX / 2:
        return _ANY_FLOAT  # an overflow, and so perhaps inf - inf
    slack = size * len(args) * _SLACK + 2.0 ** -120
    return _Float(low - slack, high + slack)


def _compare_floats(op: str, left: _Float, right: _Float) -> _Truth:
    """A comparison with NaN is false, and != is true."""
    nan = left.can_be_nan or right.can_be_nan
    if op == "lt":
        return _Truth(left.low < right.high, left.high >= right.low or nan)
    if op == "le":
        return _Truth(left.low <= right.high, left.high > right.low or nan)
    same = left.low == left.high == right.low == right.high
    equal = _Truth(left.low <= right.high and right.low <= left.high, not same or nan)
    return equal if op == "eq" else equal.negated()


def _join(op: str, truths: list[_Truth]) -> _Truth:
    """and, or: exact among conditions on one quantity, else as if the conditions had nothing to do with each other."""
    if op == "or":
        return _join("and", [truth.negated() for truth in truths]).negated()
    groups: dict[tuple[tuple[str, int], ...] | None, _Truth] = {}
    for truth in truths:
        key = None if truth.holds is None else truth.quantity
        known = groups.get(key)
        if known is None:
            groups[key] = truth
        elif known.holds is not None and truth.holds is not None:
            groups[key] = _of_set(truth.quantity, truth.span, known.holds.both(truth.holds))
        else:
            groups[key] = _Truth(known.can_be_true and truth.can_be_true, known.can_be_false or truth.can_be_false)
    joined = list(groups.values())
    if len(joined) == 1:
        return joined[0]
    return _Truth(all(truth.can_be_true for truth in joined), any(truth.can_be_false for truth in joined))


def _choice(condition: _Truth, then: _Truth, otherwise: _Truth) -> _Truth:
    return _join("or", [_join("and", [condition, then]), _join("and", [condition.negated(), otherwise])])


def _quotient(top: _Int, bottom: _Int) -> tuple[int, int]:
    """Of divisors of one sign, the quotient rises or falls with either argument, so corners bound it."""
    divisors = [(max(bottom.low, 1), bottom.high), (bottom.low, min(bottom.high, -1))]
    ends = [a // b for low, high in divisors if low <= high for b in (low, high) for a in (top.low, top.high)]
    if bottom.low <= 0 <= bottom.high:
        ends.append(0)
    return min(ends), max(ends)


def _remainder(top: _Int, bottom: _Int) -> tuple[int, int]:
    if bottom.fixed and (bottom.low == 0 or top.low // bottom.low == top.high // bottom.low):
        return (top.low % bottom.low, top.high % bottom.low) if bottom.low else (0, 0)
    return min(bottom.low + 1, 0), max(bottom.high - 1, 0)
