"""How warps divide a step of the backward on mma.sync: a tile of keys against a tile of queries, five products.

Scores are made transposed, keys as rows. P and dS then lie in shared memory as dV and dK read them, and dQ reads dS by
transposing ldmatrix (templates/include/flashgen/backward_fragments.cuh).
"""
from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, NamedTuple

from flashgen.codegen.families.shared.backward import GROUP_ROWS
from flashgen.codegen.families.shared.tiles import Row
from flashgen.codegen.plan import Constant, registers_per_thread_max
from flashgen.codegen.smem import round_up, smem_cols, tile_bytes
from flashgen.codegen.target import Target

if TYPE_CHECKING:
    from flashgen.codegen.spec.spec import Spec


@dataclass(frozen=True)
class BwdTileRow(Row):
    """`key_warps` of the warps divide the keys; the others repeat them for further queries and columns."""

    _: KW_ONLY
    key_warps: int
    dq_passes: int = 1  # dQ is made in so many parts of its columns
    blocks_per_sm: int = 1


class Shares(NamedTuple):
    """How warps divide the products of one step."""

    key_warps: int       # along keys
    query_warps: int     # along queries of S and dP, along columns of dK and dV
    key_fragments: int   # of 16 keys, of one warp
    queries: int         # of S and dP, of one warp
    dk_blocks: int       # of 16 columns, of one warp
    dv_blocks: int
    dq_row_warps: int
    dq_col_warps: int
    dq_fragments: int
    dq_blocks: int


def shares_of(spec: Spec, tile: BwdTileRow) -> Shares:
    query_warps = tile.warps // tile.key_warps
    rows, cols = _dq_warps(spec.head_dim_qk, tile)
    shares = Shares(tile.key_warps, query_warps, tile.n // (16 * tile.key_warps), tile.m // query_warps,
                    _blocks(spec.head_dim_qk, query_warps), _blocks(spec.head_dim_v, query_warps),
                    rows, cols, tile.m // (16 * rows), _blocks(spec.head_dim_qk, cols * tile.dq_passes))
    assert tile.m % GROUP_ROWS == 0 and shares.queries % 16 == 0 and tile.n % (16 * tile.key_warps) == 0
    assert not query_warps & (query_warps - 1) and not cols & (cols - 1), "columns are dealt to a power of two"
    return shares


def _blocks(head_dim: int, warps: int) -> int:
    """Blocks of 16 columns that each of `warps` gets."""
    return -(-head_dim // (16 * warps))


def _dq_warps(head_dim: int, tile: BwdTileRow) -> tuple[int, int]:
    """(warps along the rows of dQ, along its columns): those that read the least of dS and K for a step of 16 keys."""
    shapes = [(rows, tile.warps // rows) for rows in (4, 2, 1) if tile.warps % rows == 0]
    return min(shapes, key=lambda shape: tile.m * shape[1] + 16 * shape[1] * _blocks(head_dim, shape[1]) * shape[0])


def step_constants(spec: Spec, tile: BwdTileRow, target: Target, keys: str,
                   more: tuple[Constant, ...] = ()) -> tuple[Constant, ...]:
    """The constants of a gradients kernel. `keys`: what BLOCK_N counts there. `more`: the family's own."""
    threads, shares = 32 * tile.warps, shares_of(spec, tile)
    registers = registers_per_thread_max(threads, tile.blocks_per_sm, target)
    return (
        Constant("BLOCK_M", tile.m, "queries per step"),
        Constant("BLOCK_N", tile.n, keys),
        Constant("NUM_STAGES", tile.stages, "query tiles in shared memory"),
        Constant("NUM_THREADS", threads, f"{tile.warps} warps"),
        Constant("MIN_BLOCKS_PER_SM", tile.blocks_per_sm, f"leaves {registers} registers per thread"),
        Constant("KEY_WARPS", shares.key_warps, "warps along keys"),
        Constant("QUERY_WARPS", shares.query_warps, "along queries of S and dP, along columns of dK and dV"),
        Constant("KEY_FRAGMENTS", shares.key_fragments, "16-key fragments per warp: a B fragment serves them all"),
        Constant("WARP_QUERIES", shares.queries, "queries of S and dP per warp"),
        Constant("DK_BLOCKS", shares.dk_blocks, "blocks of 16 columns per warp"),
        Constant("DV_BLOCKS", shares.dv_blocks, "likewise"),
        Constant("DQ_ROW_WARPS", shares.dq_row_warps, "warps along queries of dQ"),
        Constant("DQ_COL_WARPS", shares.dq_col_warps, "along its columns"),
        Constant("DQ_FRAGMENTS", shares.dq_fragments, "16-query fragments per warp"),
        Constant("DQ_PASSES", tile.dq_passes, "parts of its columns, one after the other: fewer registers"),
        Constant("DQ_BLOCKS", shares.dq_blocks, "blocks of 16 columns per warp and pass"),
        Constant("HEAD_DIM_QK", spec.head_dim_qk, "columns of q, k and dk in device memory"),
        Constant("HEAD_DIM_V", spec.head_dim_v, "columns of v, dout and dv in device memory"),
        Constant("MMA_COLS_QK", round_up(spec.head_dim_qk, 16), "columns of the QK product and of the sums of dQ"),
        Constant("MMA_COLS_V", round_up(spec.head_dim_v, 16), "columns of dP's product: whole 16-column steps"),
        *more,
        Constant("SMEM_COLS_QK", smem_cols(spec.head_dim_qk), "columns stored of q and k: whole panels, surplus zero"),
        Constant("SMEM_COLS_V", smem_cols(spec.head_dim_v), "columns stored of v and dout, likewise"),
    )


def step_pieces(spec: Spec, tile: BwdTileRow) -> tuple[tuple[str, int, str], ...]:
    """What a step has in shared memory: (name, bytes, what it holds)."""
    return (
        ("K", tile_bytes(tile.n, spec.head_dim_qk), "the keys; at the end dK"),
        ("V", tile_bytes(tile.n, spec.head_dim_v), "their values; at the end dV"),
        ("Q", tile.stages * tile_bytes(tile.m, spec.head_dim_qk), f"{tile.stages} stages of {tile.m} queries"),
        ("DOUT", tile.stages * tile_bytes(tile.m, spec.head_dim_v), "as many of the gradients of their outputs"),
        ("P", tile_bytes(tile.n, tile.m), "P of a step, keys as rows"),
        ("DS", tile_bytes(tile.n, tile.m), "dS of a step, keys as rows"),
        ("ROWS", tile.stages * 2 * 4 * tile.m, "-lse and -delta of each stage's queries"),
    )
