"""Tiles of fa1: what shared memory and registers hold, as in the paper's block sizes M / 4d.

The more keys a tile has, the fewer visits each query tile gets, and each visit moves O. So keys come first.
"""
from __future__ import annotations

from typing import NamedTuple

from flashgen.codegen.families.shared.backward_warps import BwdTileRow
from flashgen.codegen.families.shared.tiles import TileTable
from flashgen.codegen.smem import round_up, tile_bytes
from flashgen.codegen.target import TARGETS, Target

NUM_STAGES = 2           # query tiles in shared memory: one is copied while the other is used
ACCUMULATORS = 160       # registers of S and O in a thread; the other 95 hold fragments, addresses and loop state
_SHAPES = ((128, 128), (128, 64), (128, 32), (64, 32))  # (rows, keys), the best first; 16 rows for each warp


class Tile(NamedTuple):
    m: int
    n: int

    @property
    def warps(self) -> int:
        return self.m // 16

    def q_bytes(self, head_dim_qk: int, head_dim_v: int) -> int:
        """Of the query stages, whose room carries the output in the end."""
        return max(NUM_STAGES * tile_bytes(self.m, head_dim_qk), tile_bytes(self.m, head_dim_v))


def forward_tile(head_dim_qk: int, head_dim_v: int, target: Target) -> Tile:
    """The first shape that fits; the last fits every head dim on every target."""
    def fits(tile: Tile) -> bool:
        smem = tile.q_bytes(head_dim_qk, head_dim_v) + tile_bytes(tile.n, head_dim_qk) + tile_bytes(tile.n, head_dim_v)
        return smem <= target.smem_per_block_bytes and (tile.n + round_up(head_dim_v, 16)) // 2 <= ACCUMULATORS

    return next(tile for tile in (Tile(*shape) for shape in _SHAPES) if fits(tile))


_HOPPER = frozenset({"sm_90", "sm_90a"})
_B200 = frozenset({"sm_100a"})
_A100 = frozenset({"sm_80"})
_SMALL = frozenset(name for name, target in TARGETS.items() if target.smem_per_block_bytes < 100 * 1024)
_SOURCE = "keys first, then queries, as far as shared memory and 255 registers reach with NVRTC 13.0 and 13.5"


def _row(targets: frozenset[str], head_dim: int, n: int, stages: int, warps: int = 8, dq_passes: int = 1) -> BwdTileRow:
    """Half of the warps divide the keys, or as many as have 16 of them."""
    return BwdTileRow(head_dim, head_dim, targets=targets, m=64, n=n, warps=warps, key_warps=min(warps // 2, n // 16),
                      stages=stages, dq_passes=dq_passes, source=_SOURCE)


# Of the backward, each for head dims up to the first number.
BWD_TILES = TileTable((
    _row(_HOPPER | _A100 | _B200, 96, 128, 2),
    _row(_HOPPER | _A100 | _B200, 192, 64, 2),
    _row(_HOPPER | _B200, 256, 32, 2),
    _row(_A100, 256, 32, 1),
    _row(_SMALL, 64, 128, 2),
    _row(_SMALL, 128, 64, 1),
    _row(_SMALL, 224, 32, 1),
    _row(_SMALL, 256, 16, 1, warps=4, dq_passes=2),
), overrides=(), axes={})
