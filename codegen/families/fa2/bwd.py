"""Lowers the backward of the fa2 family: FlashAttention-2 (Dao 2023) on mma.sync, ldmatrix and cp.async.

One block owns BLOCK_N keys of one kv head and sequence, whose dK and dV grow in registers while the block walks along
the query tiles that see the keys, and along the query heads that share them. Scores are made transposed, keys as rows:
P and dS then lie in shared memory as dV and dK read them, and dQ reads dS by transposing ldmatrix.
"""
from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from flashgen.codegen.dtype import DTYPES
from flashgen.codegen.families.fa2 import dropout
from flashgen.codegen.families.fa2.bwd_tiles import BWD_TILES, SLOPES, BwdTileRow
from flashgen.codegen.families.shared import backward_expressions as expressions
from flashgen.codegen.families.shared.backward import GROUP_ROWS
from flashgen.codegen.families.shared.backward_lower import gradient_params, gradient_sizes, gradient_strides
from flashgen.codegen.families.shared.sums import turn_parts, turns_slot
from flashgen.codegen.plan import Constant, Launch, Plan, Role, registers_per_thread_max
from flashgen.codegen.slots import tiled_as
from flashgen.codegen.smem import end_of, layout_regions, round_up, smem_cols, tile_bytes
from flashgen.codegen.target import Target
from flashgen.errors import PlanError

if TYPE_CHECKING:
    from flashgen.codegen.spec.spec import Spec


# Of a thread, where the spec has expressions, since any must compile: some registers of the plain kernel's 255 wait in
# L1 while an expression is worked out, which costs less than narrower tiles would.
SPILL_BYTES = 1024
TURNS_SPILL_BYTES = 8  # of a thread that takes turns: causal bf16 of head dim 128 for sm_90, under NVRTC 13.0


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


def lower_gradients(spec: Spec, target: Target) -> Plan:
    mask = expressions.mask_of(spec)
    asked = target.name, tiled_as(mask), spec.head_dim_qk, spec.head_dim_v
    tile = (BWD_TILES.find(*asked, SLOPES) if expressions.keeps_slopes(spec) else None) or BWD_TILES.find(*asked)
    if not target.features >= {"cp_async", "ldmatrix", "mma_sync"} or tile is None:
        raise PlanError(f"no fa2 backward tile for head dims ({spec.head_dim_qk}, {spec.head_dim_v}) on {target.name}",
                        where=spec.variant, allowed="head dims up to (256, 256)")
    shares = _shares(spec, tile)
    smem = layout_regions((
        ("K", tile_bytes(tile.n, spec.head_dim_qk), "the keys; at the end dK"),
        ("V", tile_bytes(tile.n, spec.head_dim_v), "their values; at the end dV"),
        ("Q", tile.stages * tile_bytes(tile.m, spec.head_dim_qk), f"{tile.stages} stages of {tile.m} queries"),
        ("DOUT", tile.stages * tile_bytes(tile.m, spec.head_dim_v), "as many of the gradients of their outputs"),
        ("P", tile_bytes(tile.n, tile.m), "P of a step, keys as rows"),
        ("DS", tile_bytes(tile.n, tile.m), "dS of a step, keys as rows"),
        ("ROWS", tile.stages * 2 * 4 * tile.m, "-lse and -delta of each stage's queries"),
        ("WORK", 32, "which sequence, head and key tile this block has"),
        ("TILES", 48 if mask == "expression" else 16, "the query tiles that see its keys"),
    ))
    return Plan(
        variant=spec.variant, target=target.name, family="fa2", pass_="bwd", spec=spec.fields(),
        template="fa2/bwd.cu.j2", element=DTYPES[spec.dtype].element,
        constants=_constants(spec, tile, shares, target),
        slots=(("key_layout", spec.kv_layout), ("key_inputs", spec.kv_layout), *expressions.slots_of(spec),
               ("dq_order", "component"), ("steps", "classes" if mask == "expression" else "ranges"),
               *expressions.slopes_of(spec), *turns_slot(spec, mask), *dropout.slots_of(spec)),
        flags=(("tile_words", mask == "expression"), ("deterministic", spec.deterministic),
               *expressions.flags_of(spec), *dropout.flags_of(spec)),
        params=(*gradient_params(spec), *expressions.pointer_params(spec), *dropout.pointer_params(spec),
                *gradient_strides(spec), *gradient_sizes(spec), *expressions.slot_params(spec),
                *dropout.scalar_params(spec)),
        smem=smem, roles=(Role("mma", tile.warps),),
        launch=Launch(32 * tile.warps, tile.blocks_per_sm, end_of(smem),
                      "x = n_tiles * num_heads_kv" + ("" if spec.kv_layout == "varlen" else " * batch")),
        register_usage_level=tile.register_usage_level, notes=(f"tile: {tile.source}",),
        allowed_spill_bytes=(SPILL_BYTES * bool(spec.expressions) + TURNS_SPILL_BYTES * spec.deterministic
                             + dropout.allowed_spill_bytes(spec)),
        expressions=expressions.printed(spec))


def _shares(spec: Spec, tile: BwdTileRow) -> Shares:
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


def _constants(spec: Spec, tile: BwdTileRow, shares: Shares, target: Target) -> tuple[Constant, ...]:
    threads = 32 * tile.warps
    registers = registers_per_thread_max(threads, tile.blocks_per_sm, target)
    return (
        Constant("BLOCK_M", tile.m, "queries per step"),
        Constant("BLOCK_N", tile.n, "keys per block"),
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
        *turn_parts(spec, tile.warps),
        Constant("SMEM_COLS_QK", smem_cols(spec.head_dim_qk), "columns stored of q and k: whole panels, surplus zero"),
        Constant("SMEM_COLS_V", smem_cols(spec.head_dim_v), "columns stored of v and dout, likewise"),
    )
