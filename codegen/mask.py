"""The tile rule of templates/include/flashgen/mask.cuh in Python, and sums over a whole problem that follow from it.

`window` is (left, right), keys visible beside the aligned diagonal; -1 is unbounded. It stands for every mask: full is
(-1, -1), causal is (-1, 0), as in the slots. `top_left` aligns query 0 with key 0, else the last with the last.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class KeyRange(NamedTuple):
    """Positions, inclusive; empty when last < first."""

    first: int
    last: int


class KvTiles(NamedTuple):
    """KV tiles of one query tile: [begin, end) are visited, [full_begin, full_end) without a mask."""

    begin: int
    full_begin: int
    full_end: int
    end: int


@dataclass(frozen=True)
class TileCounts:
    """Sums over the query tiles of one head and sequence."""

    query_tiles: int
    visited: int
    masked: int
    keys_loaded: int  # rows of k read from device memory, and as many of v


def visible_keys(q_pos: int, seqlen_q: int, seqlen_kv: int, window: tuple[int, int] = (-1, -1),
                 top_left: bool = False) -> KeyRange:
    diagonal = q_pos + (0 if top_left else seqlen_kv - seqlen_q)
    left, right = window
    return KeyRange(0 if left < 0 else max(diagonal - left, 0),
                    seqlen_kv - 1 if right < 0 else min(diagonal + right, seqlen_kv - 1))


def kv_tiles(top: KeyRange, bottom: KeyRange, block_n: int) -> KvTiles:
    """`top` and `bottom` are the visible keys of the query tile's first and last row."""
    begin = top.first // block_n
    end = begin if bottom.last < 0 else max(bottom.last // block_n + 1, begin)
    full_end = min(max((top.last + 1) // block_n, begin), end)
    full_begin = min(max(-(-bottom.first // block_n), begin), full_end)
    return KvTiles(begin, full_begin, full_end, end)


def query_tiles(seqlen_q: int, block_m: int, group: int = 0) -> list[tuple[int, int]]:
    """First and last query of each query tile. Of queries that tiles do not divide, the last tile has fewer; with a
    `group`, the queries of a warpgroup, the first of several tiles has whole groups less (flashgen/query_groups.cuh).
    """
    group = group or block_m
    surplus = -(-seqlen_q // block_m) * block_m - -(-seqlen_q // group) * group if seqlen_q > block_m else 0
    return [(max(end - block_m, 0), min(end, seqlen_q) - 1)
            for end in range(block_m - surplus, seqlen_q + block_m, block_m) if end - block_m < seqlen_q]


def tile_counts(seqlen_q: int, seqlen_kv: int, block_m: int, block_n: int, window: tuple[int, int] = (-1, -1),
                top_left: bool = False, group: int = 0) -> TileCounts:
    """`group` as query_tiles takes it."""
    def keys(row: int) -> KeyRange:
        return visible_keys(row, seqlen_q, seqlen_kv, window, top_left)

    spans, visited, masked, keys_loaded = query_tiles(seqlen_q, block_m, group), 0, 0, 0
    for first, last in spans:
        tiles = kv_tiles(keys(first), keys(last), block_n)
        visited += tiles.end - tiles.begin
        masked += tiles.end - tiles.begin - (tiles.full_end - tiles.full_begin)
        keys_loaded += max(min(tiles.end * block_n, seqlen_kv) - tiles.begin * block_n, 0)
    return TileCounts(len(spans), visited, masked, keys_loaded)


def visible_pairs(seqlen_q: int, seqlen_kv: int, window: tuple[int, int] = (-1, -1), top_left: bool = False) -> int:
    """(query, key) pairs that the mask leaves, of one head and sequence: in closed form, for lengths of millions."""
    shift = 0 if top_left else seqlen_kv - seqlen_q
    left, right = window

    def keys_before(offset: int) -> int:
        """Sum over query rows i of i + offset, clamped to [0, seqlen_kv]."""
        return _ramp(offset, seqlen_q) - _ramp(offset - seqlen_kv, seqlen_q)

    up_to_last = seqlen_q * seqlen_kv if right < 0 else keys_before(shift + right + 1)
    return up_to_last - (0 if left < 0 else keys_before(shift - left))


def _ramp(offset: int, rows: int) -> int:
    """Sum over i < rows of max(i + offset, 0)."""
    last, before = max(offset + rows - 1, 0), max(offset - 1, 0)
    return last * (last + 1) // 2 - before * (before + 1) // 2
