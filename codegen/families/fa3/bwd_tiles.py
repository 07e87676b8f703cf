"""Tiles of fa3's backward: 128 keys a block, 64 for each of two consumer warpgroups, which walk over query tiles."""
from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Any

from flashgen.codegen.families.shared.tiles import FULL, Row, TileTable


@dataclass(frozen=True)
class BwdRow(Row):
    """`stages` are those of Q, `warps` those that multiply."""

    _: KW_ONLY
    dout_stages: int
    phase: str = "turns"  # of the warpgroups; or the second starts "after_ds" or "after_dk" of the first's first step


def _row(head_dim: int, **fields: Any) -> BwdRow:
    return BwdRow(head_dim, head_dim, targets=frozenset({"sm_90a"}), n=128, warps=8, dout_stages=2, **fields)


_TIMED = "fastest of the phases timed on an H200, 2026-12-01 (docs/lab/backward.md)"

_ROWS: tuple[BwdRow, ...] = (
    _row(64, masks=FULL, m=128, stages=2, phase="after_ds", source=f"{_TIMED}: 6 % ahead of turns"),
    _row(64, m=128, stages=2, source=f"{_TIMED}: 1 % ahead of the others"),
    _row(128, masks=FULL, m=64, stages=4, phase="after_dk", source=f"{_TIMED}: 2 % ahead of the others"),
    _row(128, m=64, stages=4, source=f"{_TIMED}: 2 % ahead of the others at 8k"),
)

TILES = TileTable(_ROWS, overrides=(), axes={})
