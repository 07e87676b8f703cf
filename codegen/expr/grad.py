"""Derivatives of score expressions, as expressions.

Where an expression has a kink, one of the derivatives beside it is taken: abs has 0 at 0, and a min or max of equal
arguments has that of the first of them in the canonical order. Arguments that are NaN are passed over, as by the
value. Conditions, // and % are steps: their own derivative is 0, and a conditional has that of the branch it takes.
Where a value inside is infinite, the chain rule may give NaN (0 times infinity), as autograd does.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flashgen.codegen.expr.canon import build, canonical, negate
from flashgen.codegen.expr.tree import Expr, Index, Name, Op, TensorParam, const, names_of, walk
from flashgen.errors import SpecError, nearest_word

_ZERO, _ONE = const(0.0), const(1.0)
MAX_SIZE = 20_000  # nodes of a derivative; a product's has its factors once for each of them


@dataclass(frozen=True)
class TensorTerm:
    """What one element of a tensor adds: d tree / d tensor[indices] is `multiplier`, beside the other terms'.

    Indices are as in the expression: they are clamped into the tensor as they are where it is read. Two terms may name
    one element, and then both count.
    """

    multiplier: Expr
    indices: tuple[Expr, ...]


def derivative(tree: Expr, name: str) -> Expr:
    """d tree / d name, canonical, for a float expression and `score` or a float parameter; 0.0 where it is not read.

    Raises SpecError if the tree is no float, if `name` is read as an int, a bool or a tensor, or if the result would
    have more than MAX_SIZE nodes.
    """
    tree = _float_tree(tree)
    known = names_of(tree).get(name)
    if known is not None and (isinstance(known, TensorParam) or known.type != "float"):
        raise SpecError(f"no derivative with respect to {known if isinstance(known, TensorParam) else known.type}",
                        where=name, allowed="a float: score, or a parameter of type float",
                        next="tensor_derivative() takes tensors" if isinstance(known, TensorParam) else "")
    return _derivative(tree, Name(name, "float").text)


def tensor_derivative(tree: Expr, name: str) -> tuple[TensorTerm, ...]:
    """The terms of d tree / d tensor `name`, one for each way in which the tree indexes it; zero terms are left out.

    Raises SpecError if the tree is no float, reads no float32 tensor of that name, or has too large a derivative.
    """
    tree = _float_tree(tree)
    param = names_of(tree).get(name)
    if not isinstance(param, TensorParam) or param.type != "float":
        tensors = [key for key, item in names_of(tree).items() if isinstance(item, TensorParam)
                   and item.type == "float"]
        raise SpecError("is no float32 tensor that the expression reads", where=name,
                        allowed=", ".join(tensors) or "it reads none", nearest=nearest_word(name, tensors))
    reads = {node.text: node for node in walk(tree) if isinstance(node, Index) and node.param.name == name}
    terms = [TensorTerm(_derivative(tree, text), node.args) for text, node in reads.items()]
    return tuple(term for term in terms if term.multiplier != _ZERO)


def _float_tree(tree: Expr) -> Expr:
    if tree.type != "float":
        raise SpecError(f"{tree.text[:60]} is {tree.type}, which has no derivative", allowed="a float expression")
    return canonical(tree)


def _derivative(tree: Expr, leaf: str) -> Expr:
    return _Derivative(leaf).of(tree)


def _build(op: str, *args: Expr) -> Expr:
    result = build(op, args, "bool" if op in ("lt", "eq") else "float")
    if result.size > MAX_SIZE:
        raise SpecError("the derivative is too large", allowed=f"at most {MAX_SIZE} nodes",
                        next="write the expression with fewer nested products, divisions, min and max")
    return result


class _Derivative:
    """With respect to the leaf that has this text."""

    def __init__(self, leaf: str) -> None:
        self.leaf = leaf
        self.memo: dict[str, Expr] = {}

    def of(self, tree: Expr) -> Expr:
        """Of a float expression."""
        if tree.text == self.leaf:
            return _ONE
        if not isinstance(tree, Op) or tree.op == "float":
            return _ZERO
        if tree.text not in self.memo:
            parts = [self.of(arg) for arg in tree.args if arg.type == "float"]
            self.memo[tree.text] = self.rule(tree, parts) if any(part != _ZERO for part in parts) else _ZERO
        return self.memo[tree.text]

    def rule(self, tree: Op, parts: Sequence[Expr]) -> Expr:
        args = tree.args
        if tree.op == "add":
            return _sum(parts)
        if tree.op == "mul":
            return _sum([_times(part, *(arg for j, arg in enumerate(args) if j != i)) for i, part in enumerate(parts)])
        if tree.op == "div":
            # d(a / b) = da / b - (a / b) db / b: the square of a large b would overflow.
            below = _times(parts[1], tree)
            return _sum([_over(parts[0], args[1]), negate(_over(below, args[1])) if below != _ZERO else _ZERO])
        if tree.op == "select":
            return build("select", [args[0], parts[0], parts[1]], "float")
        if tree.op in ("min", "max"):
            return self.extreme(tree, parts)
        return _outer(tree, parts[0])

    def extreme(self, tree: Op, parts: Sequence[Expr]) -> Expr:
        """A later argument counts where the earlier ones' value is not the result: they may be NaN, it may not."""
        value, slope = tree.args[0], parts[0]
        for arg, part in zip(tree.args[1:], parts[1:], strict=True):
            result = _build(tree.op, value, arg)
            slope = _build("select", _build("eq", value, result), slope, part)
            value = result
        return slope


def _outer(tree: Op, part: Expr) -> Expr:
    """Of a function of one argument, whose own derivative is `part`."""
    [arg] = tree.args
    if tree.op == "neg":
        return negate(part)
    if tree.op == "log":
        return _over(part, arg)
    if tree.op == "abs":
        rising = _build("select", _build("lt", _ZERO, arg), part, _ZERO)
        return _build("select", _build("lt", arg, _ZERO), negate(part), rising)
    if tree.op == "exp":
        return _times(part, tree)
    left = _build("add", _ONE, negate(_build("mul", tree, tree) if tree.op == "tanh" else tree))
    return _times(part, left) if tree.op == "tanh" else _times(part, tree, left)


def _sum(terms: Sequence[Expr]) -> Expr:
    kept = [term for term in terms if term != _ZERO]
    return kept[0] if len(kept) == 1 else _build("add", *kept) if kept else _ZERO


def _times(part: Expr, *factors: Expr) -> Expr:
    """A product whose literal zero is not multiplied: what a tree does not depend on adds nothing, even at infinity."""
    return _ZERO if part == _ZERO else _build("mul", part, *factors)


def _over(part: Expr, divisor: Expr) -> Expr:
    return _ZERO if part == _ZERO else _build("div", part, divisor)


