"""Expressions as CUDA text, in float32 and int32, and the split into parts that a kernel computes once.

Nothing of the user's text is printed: literals are written anew, parameters are members `user_NAME` of the kernel's
parameters (NAME is checked: ASCII letters, digits, _), and all else comes from the caller's names. Special functions
are those of ptx/math.cuh, so exp and sigmoid have a relative error of about 2^-21 plus |x| 2^-23, tanh 2^-21, and log
an absolute one of 2^-22; the compiler may contract a product and a sum to one fma. What the text calls is in
flashgen/expression.cuh.
"""
from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from flashgen.codegen.expr.canon import build, canonical
from flashgen.codegen.expr.printer import ATOM, PRODUCT, SUM, Printer
from flashgen.codegen.expr.tree import (
    INT_MAX,
    INT_MIN,
    SCOPE_RANGES,
    Const,
    Expr,
    Index,
    Name,
    Op,
    float_text,
)

PARAM_PREFIX = "p.user_"
# What stands for each name. `dim:` is the size that bounds an index. A packed dimension is bounded by the sequence,
# begins at `begin:`, to which the index is added, and has `size:` in memory.
CUDA_NAMES: dict[str, str] = {
    "score": "score", "q_pos": "q_pos", "kv_pos": "kv_pos", "batch": "batch", "head_q": "head_q", "head_kv": "head_kv",
    "seqlen_q": "seqlen_q", "seqlen_kv": "seqlen_kv", "q_first": "q_first", "dim:num_heads_q": "p.num_heads_q",
    "dim:num_heads_kv": "p.num_heads_kv", "dim:batch": "p.batch", "dim:seqlen_q": "p.seqlen_q",
    "dim:seqlen_kv": "p.seqlen_kv", "dim:total_q": "seqlen_q", "dim:total_kv": "seqlen_kv", "begin:total_q": "q_begin",
    "begin:total_kv": "kv_begin", "size:total_q": "p.total_q", "size:total_kv": "p.total_kv",
}
# The same in a kernel, where `work` is its place in the call. A packed tensor's rows are counted by p.seqlen_*.
KERNEL_NAMES: dict[str, str] = CUDA_NAMES | {
    "batch": "work.batch", "head_q": "work.head_q", "head_kv": "(work.head_q / p.heads_per_kv_head)",
    "seqlen_q": "work.seqlen_q", "seqlen_kv": "work.seqlen_kv",
    "q_first": "(p.align_bottom_right ? work.seqlen_kv - work.seqlen_q : 0)",
    "dim:num_heads_kv": "(p.num_heads_q / p.heads_per_kv_head)", "dim:total_q": "work.seqlen_q",
    "dim:total_kv": "work.seqlen_kv", "begin:total_q": "work.q_begin", "begin:total_kv": "work.kv_begin",
    "size:total_q": "p.seqlen_q", "size:total_kv": "p.seqlen_kv",
}
# A part that kernels give to every score: kv_pos - q_pos as a float, without a conversion of its own.
DISTANCE = Name("distance", "float", "part")
_ROW, _COLUMN, _UNIFORM = "row", "column", "uniform"
_C_INFIX = {"add": ("+", SUM), "mul": ("*", PRODUCT), "div": ("/", PRODUCT), "lt": ("<", 4), "le": ("<=", 4),
            "eq": ("==", 3), "ne": ("!=", 3), "and": ("&&", 2), "or": ("||", 1)}
_UNARY = 8


@dataclass(frozen=True)
class Part:
    """A value to compute before `rest`, which reads it by the name of its Name node."""

    name: Name
    tree: Expr


@dataclass(frozen=True)
class Hoisted:
    """`uniform` parts hang on neither position, `row` parts on q_pos, `column` parts on kv_pos. Each is complete in
    itself: only the rest reads parts, by name.
    """

    uniform: tuple[Part, ...]
    row: tuple[Part, ...]
    column: tuple[Part, ...]
    rest: Expr


def to_cuda(tree: Expr, names: Mapping[str, str] = CUDA_NAMES) -> str:
    """The tree as one C++ expression of type float, int or bool; for a kernel, the canonical tree or a part of hoist().

    `names` gives the text of each name in scope, of dimensions and of parts (CUDA_NAMES lists the keys); a text that is
    not one word must be in parentheses. Raises KeyError for a name it lacks.
    """
    return _Printer(names).text(tree, 0)


class _Printer(Printer):
    params, exp2, log2, minimum, suffix = PARAM_PREFIX, "exp2_approx", "log2_approx", "min_int", "f"

    def make(self, tree: Expr) -> tuple[str, int]:
        if isinstance(tree, Const):
            return _literal(tree)
        if isinstance(tree, Name):
            if tree.kind == "param":
                return PARAM_PREFIX + tree.name, ATOM
            return (tree.name if tree.kind == "part" else self.names[tree.name]), ATOM
        if isinstance(tree, Index):
            return self.element(tree), ATOM
        if tree.type == "int" and tree.op in ("add", "mul", "neg", "abs"):
            return self.int_arithmetic(tree)
        if tree.op in ("exp", "log"):
            return self.power(tree)
        if tree.op == "select":
            condition, then, otherwise = (self.text(arg, 1) for arg in tree.args)
            return f"{condition} ? {then} : {otherwise}", 0
        if tree.op in ("neg", "not"):
            return ("-" if tree.op == "neg" else "!") + self.text(tree.args[0], ATOM), _UNARY
        if tree.op == "add":
            return self.sum(tree), SUM
        if tree.op in _C_INFIX:
            sign, own = _C_INFIX[tree.op]
            # && inside || and < inside == need no parentheses, but compilers warn of their absence.
            inner = {"or": 3, "eq": 5, "ne": 5}.get(tree.op, own + 1)
            first = self.text(tree.args[0], own if tree.op in ("mul", "div") else inner)
            return f" {sign} ".join([first, *(self.text(arg, inner) for arg in tree.args[1:])]), own
        return self.call(tree), ATOM

    def call(self, tree: Op) -> str:
        args = [self.text(arg, 0) for arg in tree.args]
        if tree.op in ("min", "max"):
            function = f"{tree.op}_int" if tree.type == "int" else f"f{tree.op}f"
            text = args[0]
            for arg in args[1:]:
                text = f"{function}({text}, {arg})"
            return text
        if tree.op == "float":
            return f"float({args[0]})"
        names = {"abs": "fabsf", "tanh": "tanh_accurate", "sigmoid": "sigmoid", "floordiv": "floor_div",
                 "mod": "floor_mod"}
        return f"{names[tree.op]}({', '.join(args)})"

    def int_arithmetic(self, tree: Op) -> tuple[str, int]:
        """In C++ operators where no step can overflow, else by helpers that wrap."""
        if tree.op == "abs":
            return f"abs_int({self.text(tree.args[0], 0)})", ATOM
        if _steps_fit(tree):
            if tree.op == "neg":
                return f"-{self.text(tree.args[0], ATOM)}", _UNARY
            if tree.op == "add":
                return self.sum(tree), SUM
            return " * ".join(self.text(arg, PRODUCT + (i > 0)) for i, arg in enumerate(tree.args)), PRODUCT
        if tree.op == "neg":
            return f"wrap_sub(0, {self.text(tree.args[0], 0)})", ATOM
        text = self.text(tree.args[0], 0)
        for arg in tree.args[1:]:
            if tree.op == "add" and isinstance(arg, Op) and arg.op == "neg":
                text = f"wrap_sub({text}, {self.text(arg.args[0], 0)})"
            else:
                text = f"wrap_{tree.op}({text}, {self.text(arg, 0)})"
        return text, ATOM

    def element(self, tree: Index) -> str:
        """Of a contiguous tensor. Where there are two dimensions, a row first, so that its place is worked out once."""
        name, places = self.indices(tree)
        if len(places) == 1:
            return f"{name}[{places[0]}]"
        return f"({name} + (int64_t)({places[0]}) * {self.size(tree.param.shape[1])})[{places[1]}]"


def _literal(tree: Const) -> tuple[str, int]:
    if tree.type == "bool":
        return ("true" if tree.value else "false"), ATOM
    if tree.value == INT_MIN and tree.type == "int":
        return f"({INT_MIN + 1} - 1)", ATOM  # C++ has no negative literals, and 2147483648 is no int
    text = float_text(tree.value) + "f" if tree.type == "float" else str(tree.value)
    return text, _UNARY if text.startswith("-") else ATOM


def int_bounds(tree: Expr) -> tuple[int, int]:
    """What a value of type int can be, before wrapping; all ints where that is not known at once."""
    if isinstance(tree, Const):
        return int(tree.value), int(tree.value)
    if isinstance(tree, Name) and tree.kind == "scope":
        return SCOPE_RANGES[tree.name]
    if isinstance(tree, Op) and tree.op in ("add", "mul", "neg") and _steps_fit(tree):
        return list(_steps(tree))[-1]
    return INT_MIN, INT_MAX


def _steps(tree: Op) -> Iterator[tuple[int, int]]:
    """Bounds after each step of a chain, from left to right."""
    low, high = int_bounds(tree.args[0])
    if tree.op == "neg":
        yield -high, -low
    for arg in tree.args[1:]:
        other = int_bounds(arg)
        if tree.op == "add":
            low, high = low + other[0], high + other[1]
        else:
            corners = [a * b for a in (low, high) for b in other]
            low, high = min(corners), max(corners)
        yield low, high


def _steps_fit(tree: Op) -> bool:
    return all(low >= INT_MIN and high <= INT_MAX for low, high in _steps(tree))


def _depends(tree: Expr) -> str:
    """_UNIFORM, _ROW, _COLUMN, or "" for what hangs on both positions or on the score."""
    if isinstance(tree, Name):
        return {"q_pos": _ROW, "kv_pos": _COLUMN, "score": "", DISTANCE.name: ""}.get(tree.name, _UNIFORM)
    kinds = {_depends(arg) for arg in tree.args} - {_UNIFORM}
    return _UNIFORM if not kinds else kinds.pop() if len(kinds) == 1 else ""


def _is_free(tree: Expr) -> bool:
    return isinstance(tree, (Const, Name)) or (isinstance(tree, Op) and tree.op == "neg" and _is_free(tree.args[0]))


def hoist(tree: Expr) -> Hoisted:
    """The canonical tree with its largest parts that hang on at most one position taken out and named.

    Names, literals and their negations stay, since they cost nothing. Of a chain of ints, the terms of one kind become
    one part; a chain of floats is not regrouped, which would change its rounding. All operations are total, so a part
    may be computed where the rest would not have asked for it. evaluate() and to_cuda() take the parts as they are.
    """
    parts: dict[str, dict[str, Part]] = {_UNIFORM: {}, _ROW: {}, _COLUMN: {}}

    def named(kind: str, part: Expr) -> Expr:
        if _is_free(part):
            return part
        known = parts[kind]
        if part.text not in known:
            known[part.text] = Part(Name(f"{kind}_{len(known)}", part.type, "part"), part)
        return known[part.text].name

    def visit(node: Expr) -> Expr:
        kind = _depends(node)
        if kind:
            return named(kind, node)
        if isinstance(node, Index):
            return Index(node.param, tuple(map(visit, node.args)))
        if not isinstance(node, Op):
            return node
        return Op(node.op, tuple(map(visit, grouped(node))), node.type)

    def grouped(node: Op) -> list[Expr]:
        if node.op not in ("add", "mul", "and", "or", "min", "max") or node.type == "float":
            return list(node.args)
        rows = [arg for arg in node.args if _depends(arg) in (_ROW, _UNIFORM)]
        columns = [arg for arg in node.args if _depends(arg) == _COLUMN]
        rest = [arg for arg in node.args if not _depends(arg)]
        groups = [group for group in (rows, columns) if group]
        joined = [build(node.op, group, node.type) if len(group) > 1 else group[0] for group in groups]
        return [*joined, *rest]

    rest = visit(canonical(tree))
    uniform, row, column = (tuple(parts[kind].values()) for kind in (_UNIFORM, _ROW, _COLUMN))
    return Hoisted(uniform, row, column, rest)
