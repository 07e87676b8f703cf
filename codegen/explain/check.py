"""`flashgen check`: what an expression is, what a kernel makes of it, which tiles its mask visits. Builds nothing."""
from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from flashgen.codegen.explain.explain import typical
from flashgen.codegen.explain.tile_map import FULL, PARTIAL, SKIP, Question, TileMap, pairs_of, steps, tile_map
from flashgen.codegen.expr.params import as_scalar
from flashgen.codegen.expr.parse import parse
from flashgen.codegen.expr.tree import SCOPE, Const, Expr, Name, Op, Param, ScalarParam, TensorParam, walk
from flashgen.codegen.families.registry import FAMILIES, lower, pass_of
from flashgen.codegen.plan import Expression, Plan
from flashgen.codegen.spec.expressions import NONE
from flashgen.codegen.spec.spec import Spec
from flashgen.errors import SpecError, UnsupportedError, nearest_word

SHOWN = {SKIP: "·", PARTIAL: "▒", FULL: "█"}
COLUMNS, ROWS = 64, 32     # of the picture, at most
PARTS_SHOWN = 24           # typed parts of one expression
_STEPS = re.compile(r"index//([1-9][0-9]{0,8})")
_SERVED = {"full": "the built-in mask `full`", "causal": "the built-in mask `causal`", "window": "the built-in windows",
           "interval": "a range of keys for each query, in closed form: no tile is looked at",
           "expression": "tiles by class, 32 at a time; masked where a class is partial"}
_BUILT_IN = {"full": "True", "causal": "kv_pos <= q_pos"}


@dataclass(frozen=True)
class Check:
    """str() is the answer as text."""

    spec: Spec
    plan: Plan
    variants: int
    tiles: TileMap | None       # None: a mask of windows, whose bounds come with each call
    pairs: tuple[int, bool]     # of one head and sequence; whether that is exact
    values: Mapping[str, str]   # of parameters, as they were given or by default

    def __str__(self) -> str:
        return "\n".join(part.rstrip() for part in _text(self))

    def to_json(self) -> dict[str, Any]:
        trees = self.spec.expressions
        found: dict[str, Any] = {
            "variant": self.plan.variant, "arch": self.plan.target, "variants": self.variants,
            "params": [str(param) for param in trees.params], "values": dict(self.values),
            "slots": dict(self.plan.slots)}
        for kind, tree in (("score", trees.score), ("mask", trees.mask)):
            if tree is not None:
                found[kind] = {"written": getattr(self.spec, kind), "canonical": tree.text,
                               "parts": [{"text": node.text, "type": node.type} for node in parts_of(tree)]}
        found["cuda"] = {e.slot: {name: value for name, value in asdict(e).items()
                                  if name not in ("slot", "about", "whole")} for e in self.plan.expressions}
        if self.tiles is not None:
            tiles = self.tiles
            found["tiles"] = {"block_m": tiles.block_m, "block_n": tiles.block_n, "visited": tiles.visited,
                              "full": tiles.count(FULL), "partial": tiles.count(PARTIAL), "skipped": tiles.count(SKIP),
                              "of": tiles.total, "exact": not tiles.unknown, "unknown": list(tiles.unknown),
                              "pairs": self.pairs[0], "pairs_exact": self.pairs[1]}
        return found


def check(specs: Sequence[Spec], seqlen_q: int = 2048, seqlen_kv: int | None = None,
          params: Sequence[str] = ()) -> Check:
    """Of the most ordinary variant among `specs`. `params`: "name=value", of a parameter or of head_q, head_kv, batch.

    A tensor takes one number for all its elements, or index//N: element i along the last dimension is i // N.
    """
    ranks = [FAMILIES[spec.family].rank for spec in specs]
    spec = typical([spec for spec, rank in zip(specs, ranks, strict=True) if rank == min(ranks)])
    seqlen_kv = seqlen_q if seqlen_kv is None else seqlen_kv
    for name, length in (("seqlen_q", seqlen_q), ("seqlen_kv", seqlen_kv)):
        if not 1 <= length <= 1 << 20:
            raise UnsupportedError(f"{name} is {length}", where=f"--{name.replace('_', '-')}", allowed="1 to 1048576")
    values, texts = _values(spec, params)
    plan = lower(spec.with_(**dict(pass_of(spec).kernels[-1])))  # of several kernels the last knows the whole tile
    mask = spec.expressions.mask
    if mask is None and not spec.window:
        mask = parse(_BUILT_IN["causal" if spec.causal else "full"], {}, "mask")
    if mask is None:
        return Check(spec, plan, len(specs), None, (0, False), texts)
    question = Question(mask, seqlen_q, seqlen_kv, spec.align == "top_left", values)
    tiles = tile_map(question, plan.constant("BLOCK_M"), plan.constant("BLOCK_N"), plan.rows_alone)
    return Check(spec, plan, len(specs), tiles, pairs_of(question, tiles), texts)


def _values(spec: Spec, params: Sequence[str]) -> tuple[dict[str, Any], dict[str, str]]:
    """(what Question takes, the same as text): defaults, and over them what is given."""
    declared = {param.name: param for param in spec.expressions.params}
    values: dict[str, Any] = {p.name: p.default for p in declared.values()
                              if isinstance(p, ScalarParam) and p.default is not None}
    texts = {name: str(value) for name, value in values.items()}
    known = [*declared, "head_q", "head_kv", "batch"]
    for word in params:
        name, equals, text = word.partition("=")
        if not equals or name not in known:
            raise UnsupportedError(f"{word!r} sets no parameter of {spec.name}", where="--param",
                                   allowed=", ".join(f"{each}=..." for each in known),
                                   nearest=f"{near}=" if (near := nearest_word(name, known)) else "")
        values[name], texts[name] = _value(declared.get(name), text, name), text
    return values, texts


def _value(param: Param | None, text: str, name: str) -> Any:
    found = _STEPS.fullmatch(text)
    if isinstance(param, TensorParam) and param.type == "int" and found:
        return steps(int(found[1]))
    kind = "int" if param is None else param.type
    plain: object = {"true": True, "false": False}.get(text.lower(), text)
    with contextlib.suppress(ValueError):
        plain = plain if kind == "bool" else int(text) if kind == "int" else float(text)
    try:
        return as_scalar(kind, plain, f"--param {name}")
    except SpecError as error:
        more = ", for all its elements; or index//N" if isinstance(param, TensorParam) else ""
        raise UnsupportedError(error.what, where=error.where, allowed=error.allowed + more) from None


def parts_of(tree: Expr) -> list[Expr]:
    """Every part that is worked out, each once, in the order in which its value is known."""
    found: dict[str, Expr] = {}
    for node in reversed(list(walk(tree))):
        if not isinstance(node, (Const, Name)):
            found.setdefault(node.text, node)
    return list(found.values())


# -- text


def _text(c: Check) -> Iterator[str]:
    more = f"   (1 of {c.variants} variants; --variant and --arch choose another)" if c.variants > 1 else ""
    yield f"{c.plan.kernel_name}{more}"
    trees = c.spec.expressions
    for param in trees.params:
        about = f"{c.values[param.name]}" if param.name in c.values else (
            "given by each call" if isinstance(param, TensorParam) else "no default: each call gives it")
        yield f"  param {param!s:<40} {about}"
    for kind, tree in (("score", trees.score), ("mask", trees.mask)):
        if tree is not None:
            yield from _expression(c, kind, tree)
    if not trees:
        yield f"  no expressions; mask {_mask(c.plan)}"
    if c.spec.normalize == NONE:
        yield "  P is the scores themselves: no softmax, no lse"
    if c.tiles is None:
        yield "  a window's bounds come with each call: flashgen explain --problem window=1023,0 counts"
    else:
        yield from _tiles(c.tiles, c.pairs)


def _mask(plan: Plan) -> str:
    """The choice of the slot that holds the mask, whose name is a language's."""
    slots = dict(plan.slots)
    return slots.get("mask") or slots["visible"]


def _expression(c: Check, kind: str, tree: Expr) -> Iterator[str]:
    written = " ".join(getattr(c.spec, kind).split())
    yield f"{kind}: {written}"
    if tree.text != written:
        yield f"  folded and put in order: {tree.text}"
    parts = parts_of(tree)
    width = max((len(node.text) for node in parts[:PARTS_SHOWN]), default=0)
    for node in parts[:PARTS_SHOWN]:
        yield f"  {node.type:<6}{node.text:<{width}}{_conversion(node)}"
    if len(parts) > PARTS_SHOWN:
        yield f"  and {len(parts) - PARTS_SHOWN} parts more"
    scope = [node for node in dict.fromkeys(n.name for n in walk(tree) if isinstance(n, Name) and n.kind == "scope")]
    yield f"  reads {', '.join(f'{name} ({SCOPE[name]})' for name in scope) or 'no position'}"
    if kind == "mask":
        yield f"  served by {_SERVED[_mask(c.plan)]}"
    for expression in c.plan.expressions:
        if expression.slot == kind:
            yield from _cuda(expression)


def _conversion(node: Expr) -> str:
    return "   an int as a float" if isinstance(node, Op) and node.op == "float" else ""


def _cuda(e: Expression) -> Iterator[str]:
    yield "  in CUDA"
    for when, parts in (("once a tile", e.uniform), ("for each query", e.row), ("for each key", e.column)):
        for part in parts:
            yield f"    {when:<16}{part.cuda_type} {part.name} = {part.text};"
    if e.rest:
        yield f"    {'for each score':<16}{e.rest}"
    for name, texts in (("first key", e.first), ("last key", e.last)):
        for text in texts:
            yield f"    {name:<16}{text}"
    for part in e.class_rows:
        yield f"    {'for some queries':<16}{part.cuda_type} rows.{part.name} = {part.text};"
    if e.tile_class:
        yield f"    {'for each tile':<16}{e.tile_class}"


def _tiles(tiles: TileMap, pairs: tuple[int, bool]) -> Iterator[str]:
    yield f"tiles of {tiles.block_m} queries and {tiles.block_n} keys, {tiles.seqlen_q} x {tiles.seqlen_kv}"
    yield from (f"  {line}" for line in picture(tiles))
    yield "  " + ", ".join(f"{SHOWN[kind]} {tiles.count(kind)} {name}" for kind, name in (
        (FULL, "full"), (PARTIAL, "masked"), (SKIP, "skipped")))
    bound = f"; at most, for {', '.join(tiles.unknown)} is not known: --param gives it" if tiles.unknown else ""
    yield (f"  visited: {tiles.visited} of {tiles.total}, {100 * tiles.visited / tiles.total:.1f} % of a full mask's"
           f"{bound}")
    every = tiles.seqlen_q * tiles.seqlen_kv
    yield f"  pairs seen: {'' if pairs[1] else 'at most '}{pairs[0]}, {100 * pairs[0] / every:.1f} %"


def picture(tiles: TileMap) -> list[str]:
    """One character for a tile, or for as many as fit: what is mixed shows as masked."""
    def cuts(count: int, most: int) -> list[tuple[int, int]]:
        cells = min(count, most)
        return [(i * count // cells, (i + 1) * count // cells) for i in range(cells)]
    columns = cuts(len(tiles.cells[0]), COLUMNS)
    lines = []
    for top, bottom in cuts(len(tiles.cells), ROWS):
        kinds = [{kind for row in tiles.cells[top:bottom] for kind in row[left:right]} for left, right in columns]
        lines.append("".join(SHOWN[kind.pop()] if len(kind) == 1 else SHOWN[PARTIAL] for kind in kinds))
    return lines
