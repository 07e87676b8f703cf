"""Tiles of fa3: 64 query rows per four warps."""
from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Any

from flashgen.codegen.families.shared.tiles import CAUSAL, FULL, KEYS, STAGES, Row, TileTable
from flashgen.codegen.warpgroup import MAX_WARPGROUPS, WARP_ROWS, WARPGROUP_ROWS

# Kernels that take whole query tiles; that split keys, for few tiles or a last round that leaves SMs idle; and that
# pack the query heads of a kv head as well, for few queries.
KINDS = ("whole", "split", "packed")
EVERY = frozenset(KINDS)
SPLIT = frozenset({"split"})    # rows of the full mask: long sequences; of the causal one: few query tiles
PACKED = frozenset({"packed"})


@dataclass(frozen=True)
class TileRow(Row):
    _: KW_ONLY
    kinds: frozenset[str] = EVERY
    q_stages: int                 # query tiles in flight per warpgroup
    schedule: str = "pingpong"    # in which warpgroups take turns to issue products; or "overlap"
    p_operand: str = "registers"  # where the A operand of the PV product is: or in "shared" memory


def kernel_kind(split: bool, pack_gqa: bool) -> str:
    """One of KINDS."""
    return "packed" if pack_gqa else "split" if split else "whole"


def _row(head_dim_qk: int, head_dim_v: int, *, m: int, **fields: Any) -> TileRow:
    return TileRow(head_dim_qk, head_dim_v, targets=frozenset({"sm_90a"}), m=m, warps=m // WARP_ROWS, **fields)


_TIMED = "fastest of the candidates timed on an H200, 2026-11-30 (docs/fa3.md)"
_FEW = "for few query tiles, which are of one or two warpgroups: more would leave producer warps too few registers"
_BESIDE = "the tile of a neighbouring head size, as shared memory and registers allow; not timed"

_ROWS: tuple[TileRow, ...] = (
    _row(64, 64, kinds=PACKED, m=128, n=64, stages=4, q_stages=2, source=_FEW),
    _row(64, 64, masks=CAUSAL, kinds=SPLIT, m=128, n=64, stages=4, q_stages=2, source=_FEW),
    _row(96, 96, kinds=PACKED, m=128, n=80, stages=4, q_stages=2, source=_FEW),
    _row(32, 32, m=256, n=64, stages=4, q_stages=2, source=_BESIDE),
    _row(64, 64, masks=FULL, kinds=SPLIT, m=192, n=128, stages=3, q_stages=2, source=_TIMED),
    _row(64, 64, m=256, n=64, stages=4, q_stages=2, source=_TIMED),
    _row(96, 96, masks=CAUSAL, kinds=SPLIT, m=128, n=80, stages=4, q_stages=2, source=_FEW),
    _row(96, 96, m=192, n=80, stages=4, q_stages=2, source=_TIMED),
    _row(128, 128, kinds=PACKED, m=64, n=64, stages=4, q_stages=2, schedule="overlap", source=_TIMED),
    _row(128, 128, masks=CAUSAL, kinds=SPLIT, m=128, n=64, stages=4, q_stages=2, source=_TIMED),
    _row(128, 128, m=192, n=64, stages=4, q_stages=2, source=_TIMED),
    _row(192, 128, m=128, n=112, stages=2, q_stages=1, source=_BESIDE),
    _row(192, 192, m=128, n=96, stages=2, q_stages=1, source=_BESIDE),
    _row(256, 256, m=128, n=64, stages=2, q_stages=1, source=_TIMED),
)

TILES = TileTable(
    _ROWS, overrides=("q_stages", "p_operand"),
    axes={"m": tuple(WARPGROUP_ROWS * count for count in range(1, MAX_WARPGROUPS + 1)), "n": KEYS, "stages": STAGES,
          "q_stages": (1, 2), "p_operand": ("registers", "shared"), "schedule": ("overlap", "pingpong")},
    kinds=KINDS, kind_of=lambda spec: kernel_kind(spec.split, spec.pack_gqa), rows_per_warp=WARP_ROWS)
