"""The tile table: which tile a head size gets on which target, and who measured it. The only copy of these numbers.

fa2: `m` query rows over `warps` warps of 16 rows or more. fa3: 64 query rows per four warps.
A row serves head sizes up to its own (a smaller head uses the next larger row); rows of one family are tried in order
and the first that covers the head and lists the target wins.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

# Of fa3 kernels: those that take whole query tiles; that split keys, for few tiles or a last round that leaves SMs
# idle; and that pack the query heads of a kv head as well, for few queries.
KINDS = ("whole", "split", "packed")


@dataclass(frozen=True)
class TileRow:
    family: str
    targets: frozenset[str]
    masks: frozenset[str]
    head_dim_qk: int
    head_dim_v: int
    m: int                            # query rows per block
    n: int                            # keys per tile
    warps: int
    stages: int
    blocks_per_sm: int
    q_operand: str                    # where the A operand of the score product is: "shared" or "registers"
    register_usage_level: int | None  # ptxas option, 0 to 10; None is its default, 5
    source: str
    q_stages: int = 1                 # fa3: query tiles in flight per warpgroup
    schedule: str = "overlap"         # fa3: or "pingpong", in which warpgroups take turns to issue products
    kinds: frozenset[str] = frozenset(KINDS)  # fa3: which kernels it is for
    p_operand: str = "registers"      # fa3: where the A operand of the value product is: or in "shared" memory


ANY = frozenset({"full", "causal", "window"})
FULL = frozenset({"full"})
HOPPER = frozenset({"sm_90", "sm_90a"})
B200 = frozenset({"sm_100a"})
A100 = frozenset({"sm_80"})
SMALL_SMEM = frozenset({"sm_86", "sm_89", "sm_120"})


def _rows(targets: frozenset[str], source: str, *tiles: tuple[Any, ...]) -> tuple[TileRow, ...]:
    return tuple(TileRow(*("fa2", targets, *tile, source)) for tile in tiles)


#    masks dqk  dv   m    n  warps stages blocks q_operand  level
TILES: tuple[TileRow, ...] = (
    *_rows(
        HOPPER, "fastest of the candidates timed on an H200, 2026-11-29 (docs/fa2.md)",
        (ANY, 32, 32, 128, 48, 4, 3, 3, "registers", None),
        (ANY, 64, 64, 128, 64, 4, 2, 2, "registers", None),
        (ANY, 96, 96, 128, 32, 4, 2, 2, "registers", None),
        (ANY, 128, 128, 128, 48, 4, 2, 2, "shared", 2),
        (ANY, 192, 128, 128, 32, 4, 2, 2, "shared", None),
        (FULL, 192, 192, 128, 64, 8, 2, 1, "registers", 2),
        (ANY, 192, 192, 64, 32, 4, 2, 2, "registers", None),
        (ANY, 224, 224, 64, 32, 4, 2, 2, "shared", None),  # the row of 256 spills there under a window
        (ANY, 256, 256, 128, 64, 8, 2, 1, "shared", 4),
    ),
    *_rows(
        B200, "the sm_90 tile, narrower where registers run out; not timed",
        (ANY, 32, 32, 128, 48, 4, 3, 3, "registers", None),
        (ANY, 64, 64, 128, 64, 4, 2, 2, "registers", None),
        (ANY, 96, 96, 128, 32, 4, 2, 2, "registers", None),
        (ANY, 128, 128, 128, 32, 4, 2, 2, "shared", 2),
        (ANY, 192, 128, 128, 32, 4, 2, 2, "shared", None),
        (ANY, 192, 192, 64, 32, 4, 2, 2, "shared", None),
        (ANY, 256, 256, 128, 64, 8, 2, 1, "shared", 2),
    ),
    *_rows(
        A100, "the sm_90 tile shrunk to 164 KiB of shared memory per SM; not timed",
        (ANY, 32, 32, 128, 48, 4, 3, 3, "registers", None),
        (ANY, 64, 64, 128, 64, 4, 2, 2, "registers", None),
        (ANY, 96, 96, 128, 32, 4, 2, 2, "registers", None),
        (ANY, 128, 128, 128, 32, 4, 2, 2, "shared", 2),
        (ANY, 192, 128, 128, 32, 4, 2, 1, "shared", None),
        (ANY, 192, 192, 64, 32, 4, 2, 1, "registers", None),
        (ANY, 256, 256, 128, 32, 8, 2, 1, "shared", 2),
    ),
    *_rows(
        SMALL_SMEM, "the sm_90 tile shrunk to 100 KiB of shared memory per SM; not timed",
        (ANY, 32, 32, 128, 48, 4, 3, 2, "registers", None),
        (ANY, 64, 64, 128, 64, 4, 2, 1, "registers", None),
        (ANY, 96, 96, 128, 32, 4, 2, 1, "registers", None),
        (ANY, 128, 128, 128, 32, 4, 2, 1, "shared", 2),
        (ANY, 192, 128, 64, 32, 4, 2, 1, "shared", None),
        (ANY, 192, 192, 64, 32, 4, 2, 1, "registers", None),
        (ANY, 256, 256, 64, 32, 4, 2, 1, "shared", 2),
    ),
)

_TIMED = "fastest of the candidates timed on an H200, 2026-11-30 (docs/fa3.md)"
_FEW = "for few query tiles, which are of one or two warpgroups: more would leave copy warps too few registers"
_BESIDE = "the tile of a neighbouring head size, as shared memory and registers allow; not timed"

CAUSAL = frozenset({"causal"})
EVERY = frozenset(KINDS)
SPLIT = frozenset({"split"})    # of the full mask: long sequences; of the causal one: few query tiles
WHOLE = frozenset({"whole"})
PACKED = frozenset({"packed"})

# fa3: without blocks and q_operand; with q_stages, p_operand, schedule and kinds.
#    masks dqk  dv   m    n  warps stages q_stages p_operand schedule kinds
TILES += tuple(
    TileRow("fa3", frozenset({"sm_90a"}), masks, dqk, dv, m, n, warps, stages, 1, "shared", None, source, q_stages,
            schedule, kinds, p_operand)
    for masks, dqk, dv, m, n, warps, stages, q_stages, p_operand, schedule, kinds, source in (
        (ANY, 64, 64, 128, 64, 8, 4, 2, "registers", "pingpong", PACKED, _FEW),
        (CAUSAL, 64, 64, 128, 64, 8, 4, 2, "registers", "pingpong", SPLIT, _FEW),
        (ANY, 96, 96, 128, 80, 8, 4, 2, "registers", "pingpong", PACKED, _FEW),
        (ANY, 32, 32, 256, 64, 16, 4, 2, "registers", "pingpong", EVERY, _BESIDE),
        (FULL, 64, 64, 192, 128, 12, 3, 2, "registers", "pingpong", SPLIT, _TIMED),
        (ANY, 64, 64, 256, 64, 16, 4, 2, "registers", "pingpong", EVERY, _TIMED),
        (CAUSAL, 96, 96, 128, 80, 8, 4, 2, "registers", "pingpong", SPLIT, _FEW),
        (ANY, 96, 96, 192, 80, 12, 4, 2, "registers", "pingpong", EVERY, _TIMED),
        (ANY, 128, 128, 64, 64, 4, 4, 2, "registers", "overlap", PACKED, _TIMED),
        (CAUSAL, 128, 128, 128, 64, 8, 4, 2, "registers", "pingpong", SPLIT, _TIMED),
        (ANY, 128, 128, 192, 64, 12, 4, 2, "registers", "pingpong", EVERY, _TIMED),
        (ANY, 192, 128, 128, 112, 8, 2, 1, "registers", "pingpong", EVERY, _BESIDE),
        (ANY, 192, 192, 128, 96, 8, 2, 1, "registers", "pingpong", EVERY, _BESIDE),
        (ANY, 256, 256, 128, 64, 8, 2, 1, "registers", "pingpong", EVERY, _TIMED),
    )
)


def kernel_kind(split: bool, pack_gqa: bool) -> str:
    """One of KINDS."""
    return "packed" if pack_gqa else "split" if split else "whole"


def find_tile(family: str, target: str, mask: str, head_dim_qk: int, head_dim_v: int, kind: str = "whole"
              ) -> TileRow | None:
    """The first row that lists the target, mask and kind of kernel and covers the head; None where no row does."""
    for row in TILES:
        if (row.family == family and target in row.targets and mask in row.masks and kind in row.kinds
                and head_dim_qk <= row.head_dim_qk and head_dim_v <= row.head_dim_v):
            return row
    return None
