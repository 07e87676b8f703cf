"""Tiles of fa3's backward: 128 keys a block, 64 for each of two consumer warpgroups, which walk over query tiles."""
from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Any

from flashgen.codegen.families.shared.tiles import FULL, Row, TileTable

P_PRECISIONS = ("fp32", "element")  # of the P that dS is made of: as computed, or as rounded for the product with dO
ORDERS = ("scores_early", "scores_late")  # the next scores are issued before dQ, or as the last of a step
KINDS = ("bf16", "fp16")      # of kernels: their element types
PHASES = ("turns", "after_ds", "after_dk")  # warpgroups take turns; or the second starts after the first's dS or dK


@dataclass(frozen=True)
class BwdRow(Row):
    """`stages` are those of Q, `warps` those that multiply."""

    _: KW_ONLY
    dout_stages: int
    p_precision: str = "fp32"
    order: str = "scores_late"
    phase: str = "after_ds"
    spill_bytes: int = 0  # of stack, at most, for registers that spill


def _row(head_dim: int, **fields: Any) -> BwdRow:
    return BwdRow(head_dim, head_dim, **{
        "targets": frozenset({"sm_90a"}), "kinds": frozenset(KINDS), "n": 128, "warps": 8, "dout_stages": 2, **fields})


_TIMED = "fastest of the orders timed on an H200, 2026-12-01 (docs/lab/backward.md)"

_ROWS: tuple[BwdRow, ...] = (
    _row(64, kinds=frozenset({"bf16"}), m=128, stages=2, p_precision="element", phase="turns",
         source=f"{_TIMED}; fp32 P spills under a mask"),
    _row(64, masks=frozenset({"window"}), m=128, stages=2, phase="turns", spill_bytes=24,
         source="of the other row, but for P: fp16 P missed the accuracy contract on an H200 by a little"),
    _row(64, m=128, stages=2, p_precision="element", phase="turns", spill_bytes=8,
         source=f"{_TIMED}, with bf16; with fp16 one register spills under NVRTC 13.0"),
    _row(128, masks=FULL, kinds=frozenset({"bf16"}), m=64, stages=4, p_precision="element", order="scores_early",
         phase="after_dk", source=_TIMED),
    _row(128, masks=FULL, m=64, stages=4, source=f"{_TIMED}; 2 % behind bf16's, which spills with fp16"),
    _row(128, m=64, stages=4, source=_TIMED),
)

TILES = TileTable(_ROWS, overrides=("p_precision",), axes={}, kinds=KINDS)
