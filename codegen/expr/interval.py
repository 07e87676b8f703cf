"""Masks whose visible keys are one interval that moves right with the query: windows, in all the ways to write them.

For those the tiles of a query tile are a range with bounds in closed form, as for the built-in masks, and no tile has
to be looked at.
"""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from flashgen.codegen.expr.canon import negate
from flashgen.codegen.expr.cuda import CUDA_NAMES, to_cuda
from flashgen.codegen.expr.tree import Const, Expr, Index, Name, Op, walk

_UNIFORM = ("seqlen_q", "seqlen_kv")
_MOST = 1 << 28  # of a literal beside positions: no sum of them wraps


@dataclass(frozen=True)
class Interval:
    """Bounds of kv_pos, inclusive, as CUDA texts of 64 bits over q_pos, seqlen_q, seqlen_kv and parameters."""

    first: tuple[str, ...]
    last: tuple[str, ...]


def interval(mask: Expr) -> Interval | None:
    """The bounds, or None where a canonical mask is no such interval."""
    first: list[str] = []
    last: list[str] = []
    for atom in mask.args if isinstance(mask, Op) and mask.op == "and" else (mask,):
        found = list(_bounds(atom))
        if not found:
            return None
        for is_last, text in found:
            (last if is_last else first).append(text)
    return Interval(tuple(first), tuple(last))


def _bounds(atom: Expr) -> Iterator[tuple[bool, str]]:
    """(whether an upper bound, text) of each bound that a condition sets; nothing where it is no bound."""
    if not isinstance(atom, Op) or atom.op not in ("lt", "le") or atom.args[0].type != "int":
        return
    low, high = atom.args
    if isinstance(low, Op) and low.op == "abs" and _uniform(high):
        sides = [(low.args[0], high), (negate(low.args[0]), high)]
    else:
        sides = [(low, high)]
    found = [_bound(*pair, strict=atom.op == "lt") for pair in sides]
    yield from (bound for bound in found if bound and None not in found)


def _bound(low: Expr, high: Expr, strict: bool) -> tuple[bool, str] | None:
    """Of low < high or low <= high, where positions and literals stand on one side, or both, and all else by itself."""
    left, right = _positions(low), _positions(high)
    if left is None and right is None:
        return None
    q, kv, number = ((left or (0, 0, 0))[i] - (right or (0, 0, 0))[i] for i in range(3))  # ... + rest < or <= 0
    rest = ""
    for side, sign, known in ((low, 1, left), (high, -1, right)):
        if known is None:
            if not _uniform(side):
                return None
            rest = f"{'-' if sign * -kv < 0 else '+'} (int64_t)({to_cuda(side, CUDA_NAMES)})"
    if kv not in (1, -1) or q not in (0, -kv):
        return None
    # kv_pos <= q_pos - number - rest - strict, or kv_pos >= q_pos + number + rest + strict
    offset = -kv * (number + strict)
    return kv == 1, f"{'q_pos' if q else '0'} + {offset} {rest}".rstrip().replace("+ -", "- ").replace(" + 0", "")


def _positions(tree: Expr) -> tuple[int, int, int] | None:
    """(factor of q_pos, factor of kv_pos, literal) of a sum of positions and literals that cannot wrap."""
    total = [0, 0, 0]
    for term in tree.args if isinstance(tree, Op) and tree.op == "add" else (tree,):
        sign = -1 if isinstance(term, Op) and term.op == "neg" else 1
        inner = term.args[0] if sign < 0 else term
        if isinstance(inner, Name) and inner.kind == "scope" and inner.name in ("q_pos", "kv_pos"):
            total[inner.name == "kv_pos"] += sign
        elif isinstance(inner, Const) and abs(inner.value) < _MOST:
            total[2] += sign * int(inner.value)
        else:
            return None
    return (total[0], total[1], total[2]) if abs(total[2]) < _MOST else None


def _uniform(tree: Expr) -> bool:
    return not any(isinstance(node, Index) or (
        isinstance(node, Name) and node.kind == "scope" and node.name not in _UNIFORM) for node in walk(tree))
