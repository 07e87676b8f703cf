"""Tiles of fa2: `m` query rows over `warps` warps of 16 rows or more."""
from __future__ import annotations

import functools
from dataclasses import KW_ONLY, dataclass

from flashgen.codegen.families.shared.tiles import FULL, KEYS, STAGES, Row, TileTable


@dataclass(frozen=True)
class TileRow(Row):
    _: KW_ONLY
    blocks_per_sm: int
    q_operand: str  # where the A operand of the QK product is: "shared" or "registers"


HOPPER = frozenset({"sm_90", "sm_90a"})
B200 = frozenset({"sm_100a"})
A100 = frozenset({"sm_80"})
SMALL_SMEM = frozenset({"sm_86", "sm_89", "sm_120"})

_hopper = functools.partial(TileRow, targets=HOPPER, source=(
    "fastest of the candidates timed on an H200, 2026-11-29 (docs/fa2.md)"))
_b200 = functools.partial(TileRow, targets=B200, source=(
    "the sm_90 tile, narrower where registers run out; not timed"))
_a100 = functools.partial(TileRow, targets=A100, source=(
    "the sm_90 tile shrunk to 164 KiB of shared memory per SM; not timed"))
_small = functools.partial(TileRow, targets=SMALL_SMEM, source=(
    "the sm_90 tile shrunk to 100 KiB of shared memory per SM; not timed"))

_ROWS: tuple[TileRow, ...] = (
    _hopper(32, 32, m=128, n=48, warps=4, stages=3, blocks_per_sm=3, q_operand="registers"),
    _hopper(64, 64, m=128, n=64, warps=4, stages=2, blocks_per_sm=2, q_operand="registers"),
    _hopper(96, 96, m=128, n=32, warps=4, stages=2, blocks_per_sm=2, q_operand="registers"),
    _hopper(128, 128, m=128, n=48, warps=4, stages=2, blocks_per_sm=2, q_operand="shared", register_usage_level=2),
    _hopper(192, 128, m=128, n=32, warps=4, stages=2, blocks_per_sm=2, q_operand="shared"),
    _hopper(192, 192, masks=FULL, m=128, n=64, warps=8, stages=2, blocks_per_sm=1, q_operand="registers",
            register_usage_level=2),
    _hopper(192, 192, m=64, n=32, warps=4, stages=2, blocks_per_sm=2, q_operand="registers"),
    # The row of 256 spills under a window.
    _hopper(224, 224, m=64, n=32, warps=4, stages=2, blocks_per_sm=2, q_operand="shared"),
    _hopper(256, 256, m=128, n=64, warps=8, stages=2, blocks_per_sm=1, q_operand="shared", register_usage_level=4),
    _b200(32, 32, m=128, n=48, warps=4, stages=3, blocks_per_sm=3, q_operand="registers"),
    _b200(64, 64, m=128, n=64, warps=4, stages=2, blocks_per_sm=2, q_operand="registers"),
    _b200(96, 96, m=128, n=32, warps=4, stages=2, blocks_per_sm=2, q_operand="registers"),
    _b200(128, 128, m=128, n=32, warps=4, stages=2, blocks_per_sm=2, q_operand="shared", register_usage_level=2),
    _b200(192, 128, m=128, n=32, warps=4, stages=2, blocks_per_sm=2, q_operand="shared"),
    _b200(192, 192, m=64, n=32, warps=4, stages=2, blocks_per_sm=2, q_operand="shared"),
    _b200(256, 256, m=128, n=64, warps=8, stages=2, blocks_per_sm=1, q_operand="shared", register_usage_level=2),
    _a100(32, 32, m=128, n=48, warps=4, stages=3, blocks_per_sm=3, q_operand="registers"),
    _a100(64, 64, m=128, n=64, warps=4, stages=2, blocks_per_sm=2, q_operand="registers"),
    _a100(96, 96, m=128, n=32, warps=4, stages=2, blocks_per_sm=2, q_operand="registers"),
    _a100(128, 128, m=128, n=32, warps=4, stages=2, blocks_per_sm=2, q_operand="shared", register_usage_level=2),
    _a100(192, 128, m=128, n=32, warps=4, stages=2, blocks_per_sm=1, q_operand="shared"),
    _a100(192, 192, m=64, n=32, warps=4, stages=2, blocks_per_sm=1, q_operand="registers"),
    _a100(256, 256, m=128, n=32, warps=8, stages=2, blocks_per_sm=1, q_operand="shared", register_usage_level=2),
    _small(32, 32, m=128, n=48, warps=4, stages=3, blocks_per_sm=2, q_operand="registers"),
    _small(64, 64, m=128, n=64, warps=4, stages=2, blocks_per_sm=1, q_operand="registers"),
    _small(96, 96, m=128, n=32, warps=4, stages=2, blocks_per_sm=1, q_operand="registers"),
    _small(128, 128, m=128, n=32, warps=4, stages=2, blocks_per_sm=1, q_operand="shared", register_usage_level=2),
    _small(192, 128, m=64, n=32, warps=4, stages=2, blocks_per_sm=1, q_operand="shared"),
    _small(192, 192, m=64, n=32, warps=4, stages=2, blocks_per_sm=1, q_operand="registers"),
    _small(256, 256, m=64, n=32, warps=4, stages=2, blocks_per_sm=1, q_operand="shared", register_usage_level=2),
)

TILES = TileTable(
    _ROWS, overrides=("blocks_per_sm", "q_operand"),
    axes={"m": (64, 128, 192, 256), "n": KEYS, "warps": (4, 8), "stages": STAGES, "blocks_per_sm": (1, 2, 3, 4),
          "q_operand": ("shared", "registers")})
