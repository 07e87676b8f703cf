"""What a mask lets through of a whole tile, as text of CUDA (include/flashgen/span.cuh) or of Triton
(templates/triton/spans.py.j2), which have functions of the same names: the mask over intervals.

A kernel asks it of thousands of tiles, one per lane, and has to be quick. The answer is certain where it says all or
nothing. spans.py computes the same in Python.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from flashgen.codegen.expr import cuda, triton
from flashgen.codegen.expr.tree import Const, Expr, Index, Name, Op, walk

_SPANS = {"q_pos": "q_span", "kv_pos": "kv_span"}
_PACKED = ("total_q", "total_kv")


@dataclass(frozen=True)
class Dialect:
    """A language that expressions are printed in."""

    text: Callable[[Expr, Mapping[str, str]], str]
    params: str  # what names of parameters begin with
    rows: str    # what names of parts begin with that hang on rows alone


CUDA = Dialect(cuda.to_cuda, cuda.PARAM_PREFIX, "rows.")
TRITON = Dialect(triton.to_triton, triton.PARAM_PREFIX, "")


@dataclass(frozen=True)
class TileClass:
    """`text`: an expression over q_span (in CUDA of `rows`), kv_span and names, of bits VISIBLE and MASKED. It reads
    `rows`: (type, name, text) of parts that read tensors and hang on no key, worked out once for some rows."""

    text: str
    rows: tuple[tuple[str, str, str], ...]


def tile_class(mask: Expr, names: Mapping[str, str], dialect: Dialect = CUDA) -> TileClass:
    """Of a canonical mask; `names` as for the dialect's printer."""
    printer = _Printer(names, dialect)
    text = printer.truth(mask)
    return TileClass(text, tuple((kind, name, part) for part, (kind, name) in printer.rows.items()))


class _Printer:
    def __init__(self, names: Mapping[str, str], dialect: Dialect) -> None:
        self.names, self.dialect = names, dialect
        self.rows: dict[str, tuple[str, str]] = {}  # text: (type, name)
        self.inside = False  # of such a part

    def truth(self, tree: Expr) -> str:
        return self.once("int", tree, self.make_truth)

    def span(self, tree: Expr) -> str:
        return self.once("Span", tree, self.make_span)

    def once(self, kind: str, tree: Expr, make: Callable[[Expr], str]) -> str:
        """The text; by name, of the largest parts that read tensors and hang on no key."""
        nodes = list(walk(tree))
        reads = any(isinstance(node, Index) for node in nodes)
        if self.inside or not reads or any(isinstance(node, Name) and node.name == "kv_pos" for node in nodes):
            return make(tree)
        self.inside = True
        text = make(tree)
        self.inside = False
        _, name = self.rows.setdefault(text, (kind, f"part_{len(self.rows)}"))
        return self.dialect.rows + name

    def make_truth(self, tree: Expr) -> str:
        if isinstance(tree, Const):
            return "VISIBLE" if tree.value else "MASKED"
        if not _reads_positions(tree):
            return f"truth_of({self.dialect.text(tree, self.names)})"
        if isinstance(tree, Index):
            return f"truth_of_elements({self.elements(tree)})"
        assert isinstance(tree, Op)
        if tree.op in ("and", "or"):
            return self.chain(f"truth_{tree.op}", [self.truth(arg) for arg in tree.args])
        if tree.op in ("not", "select"):
            name = "truth_not" if tree.op == "not" else "truth_select"
            return f"{name}({', '.join(self.truth(arg) for arg in tree.args)})"
        kind = tree.args[0].type
        if kind == "float":
            return "VISIBLE | MASKED"
        sides = ", ".join((self.truth if kind == "bool" else self.span)(arg) for arg in tree.args)
        if tree.op == "ne":
            return f"truth_not({'truth' if kind == 'bool' else 'span'}_eq({sides}))"
        return f"{'truth' if kind == 'bool' else 'span'}_{tree.op}({sides})"

    def make_span(self, tree: Expr) -> str:
        if not _reads_positions(tree):
            return f"span_of({self.dialect.text(tree, self.names)})"
        if isinstance(tree, Name):
            return (self.dialect.rows if tree.name == "q_pos" else "") + _SPANS[tree.name]
        if isinstance(tree, Index):
            return f"{'span_of_sorted' if tree.param.sorted else 'span_of_elements'}({self.elements(tree)})"
        assert isinstance(tree, Op)
        if tree.op == "select":
            condition, *branches = tree.args
            return f"span_select({self.truth(condition)}, {', '.join(map(self.span, branches))})"
        return self.chain(f"span_{tree.op}", [self.span(arg) for arg in tree.args])

    def chain(self, name: str, args: list[str]) -> str:
        text = args[0]
        if len(args) == 1:
            return f"{name}({text})"
        for arg in args[1:]:
            text = f"{name}({text}, {arg})"
        return text

    def elements(self, tree: Index) -> str:
        """Arguments: the tensor, its rows (0 to 0 for one dimension), its columns, the length of a row."""
        spans = [self.places(arg, dim) for arg, dim in zip(tree.args, tree.param.shape, strict=True)]
        rows = spans[0] if len(spans) == 2 else "span_of(0)"
        return f"{self.dialect.params}{tree.param.name}, {rows}, {spans[-1]}, {self.size(tree.param.shape[-1])}"

    def places(self, arg: Expr, dim: str | int) -> str:
        span = self.span(arg)
        if dim in _PACKED:
            return (f"span_in(span_add(span_of({self.names[f'begin:{dim}']}), span_in({span}, "
                    f"{self.names[f'dim:{dim}']})), {self.size(dim)})")
        return f"span_in({span}, {self.size(dim)})"

    def size(self, dim: str | int) -> str:
        return str(dim) if isinstance(dim, int) else self.names[("size:" if dim in _PACKED else "dim:") + dim]


def _reads_positions(tree: Expr) -> bool:
    return any(isinstance(node, Name) and node.kind == "scope" and node.name in _SPANS for node in walk(tree))
