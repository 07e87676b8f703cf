"""What printers of expressions share, whatever language they print: the trees are the same, and so is how sums, powers
of e and indices become text. cuda.py and triton.py derive from it."""
from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar

from flashgen.codegen.expr.canon import build
from flashgen.codegen.expr.tree import Const, Expr, Index, Name, Op, float_text, round_float

SUM, PRODUCT, ATOM = 5, 6, 9  # how tightly texts bind: in C++ and in Python in this order
_LOG2E, _LN2 = 1 / math.log(2), math.log(2)


class Printer:
    """`names` gives the text of each name in scope and of dimensions."""

    params: ClassVar[str]   # what names of parameters begin with
    exp2: ClassVar[str]     # the functions of these names
    log2: ClassVar[str]
    minimum: ClassVar[str]  # of two ints
    suffix: ClassVar[str]   # of float literals

    def __init__(self, names: Mapping[str, str]) -> None:
        self.names = names

    def text(self, tree: Expr, level: int) -> str:
        """The text, in parentheses where it binds less than `level`."""
        text, own = self.make(tree)
        return text if own >= level else f"({text})"

    def make(self, tree: Expr) -> tuple[str, int]:
        """The text, and how tightly it binds."""
        raise NotImplementedError

    def sum(self, tree: Op) -> str:
        text = self.text(tree.args[0], SUM)
        for arg in tree.args[1:]:
            minus = isinstance(arg, Op) and arg.op == "neg"
            text += f" - {self.text(arg.args[0], PRODUCT)}" if minus else f" + {self.text(arg, PRODUCT)}"
        return text

    def power(self, tree: Op) -> tuple[str, int]:
        """exp and log in base 2; a constant factor of the argument takes log2(e) in."""
        [arg] = tree.args
        if tree.op == "log":
            return f"{self.log2}({self.text(arg, 0)}) * {float_text(round_float(_LN2))}{self.suffix}", PRODUCT
        factor, rest = _LOG2E, arg
        if isinstance(arg, Op) and arg.op == "neg":
            factor, rest = -factor, arg.args[0]
        elif isinstance(arg, Op) and arg.op == "mul" and isinstance(arg.args[0], Const):
            scaled = round_float(arg.args[0].value * _LOG2E)
            if math.isfinite(scaled):
                factor, rest = scaled, build("mul", arg.args[1:], "float") if len(arg.args) > 2 else arg.args[1]
        return f"{self.exp2}({self.text(rest, PRODUCT)} * {float_text(round_float(factor))}{self.suffix})", ATOM

    def indices(self, tree: Index) -> tuple[str, list[str]]:
        """The tensor, and the text of each index into it."""
        places = [self.index(arg, dim) for arg, dim in zip(tree.args, tree.param.shape, strict=True)]
        return self.params + tree.param.name, places

    def size(self, dim: str | int) -> str:
        """Of a dimension in memory."""
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
        return f"{self.minimum}({self.names[f'begin:{dim}']} + {text}, {self.names[f'size:{dim}']} - 1)"


def _packed(dim: str | int) -> bool:
    return dim in ("total_q", "total_kv")
