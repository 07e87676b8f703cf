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


def tile_counts(seqlen_q: int, seqlen_kv: int, block_m: int, block_n: int, window: tuple[int, int] = (-1, -1),
                top_left: bool = False) -> TileCounts:
    def keys(row: int) -> KeyRange:
        return visible_keys(row, seqlen_q, seqlen_kv, window, top_left)

    query_tiles, visited, masked, keys_loaded = 0, 0, 0, 0
    for start in range(0, seqlen_q, block_m):
        tiles = kv_tiles(keys(start), keys(min(start + block_m, seqlen_q) - 1), block_n)
        query_tiles += 1
        visited += tiles.end - tiles.begin
        masked += tiles.end - tiles.begin - (tiles.full_end - tiles.full_begin)
        keys_loaded += max(min(tiles.end * block_n, seqlen_kv) - tiles.begin * block_n, 0)
    return TileCounts(query_tiles, visited, masked, keys_loaded)


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
