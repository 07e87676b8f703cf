"""The tiles of keys that each query tile of a mask visits, and how many pairs the mask leaves: counted, not run."""
from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from flashgen.codegen.expr.spans import MASKED, VISIBLE, Span, Value, compiled
from flashgen.codegen.expr.tree import Expr, Index, Name, Op, walk
from flashgen.codegen.mask import TileCounts, query_tiles

SKIP, PARTIAL, FULL = 0, 1, 2
_CLASS = {VISIBLE: FULL, MASKED: SKIP, VISIBLE | MASKED: PARTIAL}
MAX_BOXES = 200_000  # looked at for pairs, before an upper bound has to do


@dataclass(frozen=True)
class TileMap:
    """Classes of tiles, of one head and sequence; rows are query tiles, columns tiles of keys."""

    cells: tuple[bytes, ...]
    queries: tuple[tuple[int, int], ...]  # first and last of each query tile
    block_m: int
    block_n: int
    seqlen_q: int
    seqlen_kv: int
    unknown: tuple[str, ...]  # what the mask reads and nobody said: tiles that hang on it count as partial

    def count(self, kind: int) -> int:
        return sum(row.count(kind) for row in self.cells)

    @property
    def visited(self) -> int:
        return self.count(PARTIAL) + self.count(FULL)

    @property
    def total(self) -> int:
        return sum(map(len, self.cells))

    @property
    def pairs(self) -> int:
        """(query, key) pairs of visited tiles: an upper bound of what the mask leaves."""
        return sum(self._keys(row) * (last + 1 - first)
                   for row, (first, last) in zip(self.cells, self.queries, strict=True))

    def _keys(self, row: bytes) -> int:
        return sum(min((column + 1) * self.block_n, self.seqlen_kv) - column * self.block_n
                   for column, kind in enumerate(row) if kind != SKIP)

    def counts(self) -> TileCounts:
        return TileCounts(len(self.cells), self.visited, self.count(PARTIAL), sum(map(self._keys, self.cells)))


@dataclass(frozen=True)
class Question:
    """A mask over one head and sequence. `values`: of parameters and names in scope, as expr_spans takes them."""

    mask: Expr
    seqlen_q: int
    seqlen_kv: int
    top_left: bool
    values: Mapping[str, Value]

    def known(self) -> dict[str, Value]:
        return {"batch": 0, "head_q": 0, "head_kv": 0, **self.values, "seqlen_q": self.seqlen_q,
                "seqlen_kv": self.seqlen_kv, "q_first": self.first}

    @property
    def first(self) -> int:
        """q_pos of the first query."""
        return 0 if self.top_left else self.seqlen_kv - self.seqlen_q

    def unknown(self) -> tuple[str, ...]:
        known = self.known()
        names: dict[str, None] = {}
        for node in walk(self.mask):
            name = node.param.name if isinstance(node, Index) else node.name if isinstance(node, Name) else "q_pos"
            if name not in ("q_pos", "kv_pos") and known.get(name) is None:
                names[name] = None
            if isinstance(node, Op) and node.type == "bool" and node.args[0].type == "float":
                names["a comparison of floats"] = None
        return tuple(names)


def tile_map(question: Question, block_m: int, block_n: int, group: int = 0) -> TileMap:
    """Boxes of many tiles first: what is settled for a box is so for each of its tiles, as the kernel finds them.
    `group` as mask.query_tiles takes it.
    """
    bits = compiled(question.mask, question.known())
    queries = query_tiles(question.seqlen_q, block_m, group)
    rows, columns = len(queries), -(-question.seqlen_kv // block_n)
    cells = [bytearray(columns) for _ in range(rows)]

    def bits_of(r0: int, r1: int, c0: int, c1: int) -> int:
        q = (question.first + queries[r0][0], question.first + queries[r1 - 1][1])
        return bits(q, (c0 * block_n, min(c1 * block_n, question.seqlen_kv) - 1))

    for (r0, r1, c0, c1), found in _settled(bits_of, rows, columns):
        for row in range(r0, r1):
            cells[row][c0:c1] = bytes([_CLASS[found]]) * (c1 - c0)
    if question.seqlen_kv % block_n:  # the last tile has keys that do not exist
        for cell in cells:
            cell[-1] = min(cell[-1], PARTIAL)
    return TileMap(tuple(map(bytes, cells)), tuple(queries), block_m, block_n, question.seqlen_q, question.seqlen_kv,
                   question.unknown())


def pairs_of(question: Question, tiles: TileMap) -> tuple[int, bool]:
    """(visible pairs of one head and sequence, whether that is exact; else it is an upper bound)."""
    if tiles.unknown:
        return tiles.pairs, False
    bits = compiled(question.mask, question.known())
    total, exact = 0, True
    for (r0, r1, c0, c1), found in _settled(
            lambda r0, r1, c0, c1: bits((question.first + r0, question.first + r1 - 1), (c0, c1 - 1)),
            question.seqlen_q, question.seqlen_kv, MAX_BOXES):
        if found & VISIBLE:
            total += (r1 - r0) * (c1 - c0)
            exact &= found == VISIBLE
    return min(total, tiles.pairs), exact


def _settled(bits_of: Callable[[int, int, int, int], int], rows: int, columns: int, most: float = math.inf
             ) -> Iterator[tuple[tuple[int, int, int, int], int]]:
    """Boxes (first row, end, first column, end) that cover all, with their bits: halved until each is of one kind or
    has one place, or until `most` have been looked at."""
    boxes, looked = [(0, rows, 0, columns)] if rows and columns else [], 0
    while boxes:
        r0, r1, c0, c1 = box = boxes.pop()
        found, looked = bits_of(*box), looked + 1
        if found != VISIBLE | MASKED or (r1 - r0, c1 - c0) == (1, 1) or looked >= most:
            yield box, found
        elif r1 - r0 >= c1 - c0:
            boxes += [(r0, (r0 + r1) // 2, c0, c1), ((r0 + r1) // 2, r1, c0, c1)]
        else:
            boxes += [(r0, r1, c0, (c0 + c1) // 2), (r0, r1, (c0 + c1) // 2, c1)]


def steps(width: int) -> Value:
    """A tensor whose element at i along the last dimension is i // width, such as documents of one length."""
    def elements(places: list[Span]) -> Span:
        low, high = places[-1]
        return max(low, 0) // width, max(high, 0) // width
    return elements
