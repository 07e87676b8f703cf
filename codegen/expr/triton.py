"""Expressions as Triton text, in float32 and int32: the third printer of the trees that cuda.py and evaluate.py read.

Operands are scalars and blocks that broadcast together: q_pos along one axis, kv_pos along the other. So what hangs on
one position alone is one row or column of work, and nothing has to be taken out beforehand. Nothing of the user's text
is printed: literals are written anew, parameters are arguments `user_NAME`, all else comes from the caller's names.
What the text calls is in templates/triton/expression.py.j2. Exponentials and logarithms are in base 2.
"""
from __future__ import annotations

from collections.abc import Mapping

from flashgen.codegen.expr.cuda import int_bounds
from flashgen.codegen.expr.printer import ATOM, PRODUCT, SUM, Printer
from flashgen.codegen.expr.tree import Const, Expr, Index, Name, Op, float_text

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
_COMPARE, _OR, _AND, _UNARY = 1, 2, 3, 7  # how Python's operators bind, beside those of printer.py
_INFIX = {"add": ("+", SUM), "mul": ("*", PRODUCT), "div": ("/", PRODUCT), "and": ("&", _AND), "or": ("|", _OR),
          "lt": ("<", _COMPARE), "le": ("<=", _COMPARE), "eq": ("==", _COMPARE), "ne": ("!=", _COMPARE)}
_CALLS = {"abs": "tl.abs", "tanh": "tanh", "sigmoid": "sigmoid", "floordiv": "floor_div", "mod": "floor_mod",
          "select": "tl.where"}


def to_triton(tree: Expr, names: Mapping[str, str] = TRITON_NAMES) -> str:
    """The canonical tree as one Python expression of Triton's language. Raises KeyError for a name that `names` lacks.
    """
    return _Printer(names).text(tree, 0)


class _Printer(Printer):
    params, exp2, log2, minimum, suffix = PARAM_PREFIX, "tl.exp2", "tl.log2", "tl.minimum", ""

    def make(self, tree: Expr) -> tuple[str, int]:
        if isinstance(tree, Const):
            text = float_text(tree.value) if tree.type == "float" else str(tree.value)
            return text, _UNARY if text.startswith("-") else ATOM
        if isinstance(tree, Name):
            return self.name(tree)
        if isinstance(tree, Index):
            return self.element(tree), ATOM
        if tree.op in ("exp", "log"):
            return self.power(tree)
        if tree.op == "neg":
            return f"-{self.text(tree.args[0], ATOM)}", _UNARY
        if tree.op == "not":
            return f"{self.text(tree.args[0], _OR)} == 0", _COMPARE
        if tree.op == "add":
            return self.sum(tree), SUM
        if tree.op in _INFIX:
            sign, own = _INFIX[tree.op]
            first = self.text(tree.args[0], own + (own == _COMPARE))
            return f" {sign} ".join([first, *(self.text(arg, own + 1) for arg in tree.args[1:])]), own
        return self.call(tree)

    def name(self, tree: Name) -> tuple[str, int]:
        if tree.kind == "param":
            text = PARAM_PREFIX + tree.name
            return (f"{text} != 0", _COMPARE) if tree.type == "bool" else (text, ATOM)
        return (tree.name if tree.kind == "part" else self.names[tree.name]), ATOM

    def call(self, tree: Op) -> tuple[str, int]:
        args = [self.text(arg, 0) for arg in tree.args]
        if tree.op in ("min", "max"):
            text = args[0]
            for arg in args[1:]:
                text = f"tl.{tree.op}imum({text}, {arg})"
            return text, ATOM
        if tree.op == "float":
            return f"({args[0]}).to(tl.float32)", ATOM
        if tree.op in ("floordiv", "mod") and self.is_simple(tree):
            sign = "//" if tree.op == "floordiv" else "%"
            return f"{self.text(tree.args[0], PRODUCT)} {sign} {self.text(tree.args[1], _UNARY)}", PRODUCT
        return f"{_CALLS[tree.op]}({', '.join(args)})", ATOM

    @staticmethod
    def is_simple(tree: Op) -> bool:
        """Whether Triton's division, which rounds to zero, gives the same: of no negative number, by one above 0."""
        return int_bounds(tree.args[0])[0] >= 0 and int_bounds(tree.args[1])[0] > 0

    def element(self, tree: Index) -> str:
        """Of a contiguous tensor."""
        name, places = self.indices(tree)
        row, width = ("0", "0") if len(places) == 1 else (places[0], self.size(tree.param.shape[1]))
        return f"element({name}, {row}, {width}, {places[-1]})"
