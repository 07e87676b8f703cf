"""Expressions as Triton text, in float32 and int32: the third printer of the trees that cuda.py and evaluate.py read.

Operands are scalars and blocks that broadcast together: q_pos along one axis, kv_pos along the other. So what hangs on
one position alone is one row or column of work, and nothing has to be taken out beforehand. Nothing of the user's text
is printed: literals are written anew, parameters are arguments `user_NAME`, all else comes from the caller's names.
What the text calls is in templates/triton/expression.py.j2. Exponentials and logarithms are in base 2.
"""
from __future__ import annotations

import math
from collections.abc import Mapping

from flashgen.codegen.expr.canon import build
from flashgen.codegen.expr.cuda import int_bounds
from flashgen.codegen.expr.tree import Const, Expr, Index, Name, Op, float_text, round_float

PARAM_PREFIX = "user_"
# What stands for each name in a kernel: sizes of the call, and where its block stands. `dim:`, `begin:` and `size:` as
# in cuda.py.
TRITON_NAMES: dict[str, str] = {
    "score": "score", "q_pos": "q_pos", "kv_pos": "kv_pos", "batch": "sequence", "head_q": "head_q",
    "head_kv": "(head_q // heads_per_kv_head)", "seqlen_q": "len_q", "seqlen_kv": "len_kv", "q_first": "q_first",
    "dim:num_heads_q": "num_heads_q", "dim:num_heads_kv": "(num_heads_q // heads_per_kv_head)", "dim:batch": "batch",
    "dim:seqlen_q": "seqlen_q", "dim:seqlen_kv": "seqlen_kv", "dim:total_q": "len_q", "dim:total_kv": "len_kv",
    "begin:total_q": "q_begin", "begin:total_kv": "kv_begin", "size:total_q": "seqlen_q", "size:total_kv": "seqlen_kv",
}
_LOG2E, _LN2 = 1 / math.log(2), math.log(2)
_COMPARE, _OR, _AND, _SUM, _PRODUCT, _UNARY, _ATOM = 1, 2, 3, 5, 6, 7, 9  # of Python's operators, as they bind
_INFIX = {"add": ("+", _SUM), "mul": ("*", _PRODUCT), "div": ("/", _PRODUCT), "and": ("&", _AND), "or": ("|", _OR),
          "lt": ("<", _COMPARE), "le": ("<=", _COMPARE), "eq": ("==", _COMPARE), "ne": ("!=", _COMPARE)}
_CALLS = {"abs": "tl.abs", "tanh": "tanh", "sigmoid": "sigmoid", "floordiv": "floor_div", "mod": "floor_mod",
          "select": "tl.where"}


def to_triton(tree: Expr, names: Mapping[str, str] = TRITON_NAMES) -> str:
    """The canonical tree as one Python expression of Triton's language. Raises KeyError for a name that `names` lacks.
    """
    return _Printer(names).text(tree, 0)


class _Printer:
    def __init__(self, names: Mapping[str, str]) -> None:
        self.names = names

    def text(self, tree: Expr, level: int) -> str:
        """The text, in parentheses where it binds less than `level`."""
        text, own = self.make(tree)
        return text if own >= level else f"({text})"

    def make(self, tree: Expr) -> tuple[str, int]:
        if isinstance(tree, Const):
            text = float_text(tree.value) if tree.type == "float" else str(tree.value)
            return text, _UNARY if text.startswith("-") else _ATOM
        if isinstance(tree, Name):
            return self.name(tree)
        if isinstance(tree, Index):
            return self.element(tree), _ATOM
        if tree.op in ("exp", "log"):
            return self.power(tree)
        if tree.op == "neg":
            return f"-{self.text(tree.args[0], _ATOM)}", _UNARY
        if tree.op == "not":
            return f"{self.text(tree.args[0], _OR)} == 0", _COMPARE
        if tree.op == "add":
            return self.sum(tree), _SUM
        if tree.op in _INFIX:
            sign, own = _INFIX[tree.op]
            first = self.text(tree.args[0], own + (own == _COMPARE))
            return f" {sign} ".join([first, *(self.text(arg, own + 1) for arg in tree.args[1:])]), own
        return self.call(tree)

    def name(self, tree: Name) -> tuple[str, int]:
        if tree.kind == "param":
            text = PARAM_PREFIX + tree.name
            return (f"{text} != 0", _COMPARE) if tree.type == "bool" else (text, _ATOM)
        return (tree.name if tree.kind == "part" else self.names[tree.name]), _ATOM

    def call(self, tree: Op) -> tuple[str, int]:
        args = [self.text(arg, 0) for arg in tree.args]
        if tree.op in ("min", "max"):
            text = args[0]
            for arg in args[1:]:
                text = f"tl.{tree.op}imum({text}, {arg})"
            return text, _ATOM
        if tree.op == "float":
            return f"({args[0]}).to(tl.float32)", _ATOM
        if tree.op in ("floordiv", "mod") and self.is_simple(tree):
            sign = "//" if tree.op == "floordiv" else "%"
            return f"{self.text(tree.args[0], _PRODUCT)} {sign} {self.text(tree.args[1], _UNARY)}", _PRODUCT
        return f"{_CALLS[tree.op]}({', '.join(args)})", _ATOM

    @staticmethod
    def is_simple(tree: Op) -> bool:
        """Whether Triton's division, which rounds to zero, gives the same: of no negative number, by one above 0."""
        return int_bounds(tree.args[0])[0] >= 0 and int_bounds(tree.args[1])[0] > 0

    def sum(self, tree: Op) -> str:
        text = self.text(tree.args[0], _SUM)
        for arg in tree.args[1:]:
            minus = isinstance(arg, Op) and arg.op == "neg"
            text += f" - {self.text(arg.args[0], _PRODUCT)}" if minus else f" + {self.text(arg, _PRODUCT)}"
        return text

    def power(self, tree: Op) -> tuple[str, int]:
        """exp and log in base 2; a constant factor of the argument takes log2(e) in."""
        [arg] = tree.args
        if tree.op == "log":
            return f"tl.log2({self.text(arg, 0)}) * {float_text(round_float(_LN2))}", _PRODUCT
        factor, rest = _LOG2E, arg
        if isinstance(arg, Op) and arg.op == "neg":
            factor, rest = -factor, arg.args[0]
        elif isinstance(arg, Op) and arg.op == "mul" and isinstance(arg.args[0], Const):
            scaled = round_float(arg.args[0].value * _LOG2E)
            if math.isfinite(scaled):
                factor, rest = scaled, build("mul", arg.args[1:], "float") if len(arg.args) > 2 else arg.args[1]
        return f"tl.exp2({self.text(rest, _PRODUCT)} * {float_text(round_float(factor))})", _ATOM

    def element(self, tree: Index) -> str:
        """Of a contiguous tensor."""
        shape, name = tree.param.shape, PARAM_PREFIX + tree.param.name
        indices = [self.index(arg, dim) for arg, dim in zip(tree.args, shape, strict=True)]
        width = "0" if len(indices) == 1 else self.size(shape[1])
        return f"element({name}, {indices[0] if len(indices) == 2 else '0'}, {width}, {indices[-1]})"

    def size(self, dim: str | int) -> str:
        return str(dim) if isinstance(dim, int) else self.names[("size:" if _packed(dim) else "dim:") + dim]

    def index(self, arg: Expr, dim: str | int) -> str:
        text = self.text(arg, 0)
        inside = str(dim) if isinstance(dim, int) else self.names[f"dim:{dim}"]
        own = {"num_heads_q": "head_q", "num_heads_kv": "head_kv", "batch": "batch"}.get(str(dim))
        if not ((isinstance(arg, Name) and arg.name == own) or (isinstance(arg, Const) and isinstance(dim, int))):
            text = f"clamp_index({text}, {inside})"
        if not _packed(dim):
            return text
        # A sequence without rows may begin where the tensor ends.
        return f"tl.minimum({self.names[f'begin:{dim}']} + {text}, {self.names[f'size:{dim}']} - 1)"


def _packed(dim: str | int) -> bool:
    return dim in ("total_q", "total_kv")
