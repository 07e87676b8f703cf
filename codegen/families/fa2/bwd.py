"""Lowers the backward of the fa2 family: FlashAttention-2 (Dao 2023) on mma.sync, ldmatrix and cp.async.

One block owns BLOCK_N keys of one kv head and sequence, whose dK and dV grow in registers while the block walks along
the query tiles that see the keys, and along the query heads that share them. Scores are made transposed, keys as rows:
P and dS then lie in shared memory as dV and dK read them, and dQ reads dS by transposing ldmatrix.
"""
from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from flashgen.codegen.dtype import DTYPES
from flashgen.codegen.families.fa2.bwd_tiles import BWD_TILES, BwdTileRow
from flashgen.codegen.families.shared import expressions
from flashgen.codegen.plan import Constant, Launch, Param, Plan, Role, registers_per_thread_max
from flashgen.codegen.slots import LAYOUTS, MASKS, tiled_as
from flashgen.codegen.smem import layout_regions, round_up, smem_cols, tile_bytes
from flashgen.codegen.target import Target
from flashgen.errors import PlanError

if TYPE_CHECKING:
    from flashgen.codegen.spec.spec import Spec

# Registers beside accumulators: addresses, loop state, operand fragments in flight. A floor, as in the forward.
OVERHEAD_REGISTERS = 24
SUM_ROWS = 64  # rows of a group of sums of dQ


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
    row = BWD_TILES.find(target.name, tiled_as(mask), spec.head_dim_qk, spec.head_dim_v)
    if not target.features >= {"cp_async", "ldmatrix", "mma_sync"} or row is None:
        raise PlanError(f"no fa2 backward tile for head dims ({spec.head_dim_qk}, {spec.head_dim_v}) on {target.name}",
                        where=spec.variant, allowed="head dims up to (256, 256)")
    tile = BWD_TILES.overridden(spec, row)
    shares = _shares(spec, tile)
    _check_registers(spec, tile, shares, target)
    smem = layout_regions((
        ("K", tile_bytes(tile.n, spec.head_dim_qk), "the keys; at the end dK"),
        ("V", tile_bytes(tile.n, spec.head_dim_v), "their values; at the end dV"),
        ("Q", tile.stages * tile_bytes(tile.m, spec.head_dim_qk), f"{tile.stages} stages of {tile.m} queries"),
        ("DOUT", tile.stages * tile_bytes(tile.m, spec.head_dim_v), "as many of the gradients of their outputs"),
        ("P", tile_bytes(tile.n, tile.m), "P of a step, keys as rows"),
        ("DS", tile_bytes(tile.n, tile.m), "dS of a step, keys as rows"),
        ("ROWS", tile.stages * 2 * 4 * tile.m, "-lse and -delta of each stage's queries"),
    ))
    return Plan(
        variant=spec.variant, target=target.name, family="fa2", pass_=spec.pass_, spec=spec.fields(),
        template="fa2/bwd.cu.j2", element=DTYPES[spec.dtype].element,
        constants=_constants(spec, tile, shares, target),
        slots=(("key_layout", spec.kv_layout), ("key_inputs", spec.kv_layout), ("queries", mask)),
        flags=(), params=_params(spec, mask), smem=smem, roles=(Role("mma", tile.warps),),
        launch=Launch(32 * tile.warps, tile.blocks_per_sm, smem[-1].offset_bytes + smem[-1].size_bytes,
                      "x = n_tiles * num_heads_kv" + ("" if spec.kv_layout == "varlen" else " * batch")),
        register_usage_level=tile.register_usage_level, notes=(f"tile: {tile.source}",))


def _shares(spec: Spec, tile: BwdTileRow) -> Shares:
    def refuse(what: str, allowed: str) -> None:
        raise PlanError(what, where=spec.variant, allowed=allowed)

    query_warps, left = divmod(tile.warps, tile.key_warps)
    if left or query_warps & (query_warps - 1):
        refuse(f"{tile.warps} warps, of which {tile.key_warps} divide the keys", "a power of two for each of these")
    if tile.n % (16 * tile.key_warps):
        refuse(f"tile.n {tile.n} does not divide into 16-row fragments for {tile.key_warps} warps",
               f"multiples of {16 * tile.key_warps}")
    if tile.m % SUM_ROWS or tile.m % (16 * query_warps):
        refuse(f"tile.m {tile.m}", f"multiples of {SUM_ROWS} and of {16 * query_warps}")
    for head_dim in (spec.head_dim_qk, spec.head_dim_v):
        if not _deals(head_dim, query_warps):
            refuse(f"{query_warps} warps divide the columns of head dim {head_dim}", "fewer query warps")
    rows, cols = _dq_warps(spec.head_dim_qk, tile)
    return Shares(tile.key_warps, query_warps, tile.n // (16 * tile.key_warps), tile.m // query_warps,
                  _blocks(spec.head_dim_qk, query_warps), _blocks(spec.head_dim_v, query_warps),
                  rows, cols, tile.m // (16 * rows), _blocks(spec.head_dim_qk, cols))


def _blocks(head_dim: int, warps: int) -> int:
    """Blocks of 16 columns that each of `warps` gets."""
    return -(-head_dim // (16 * warps))


def _deals(head_dim: int, warps: int) -> bool:
    """Whether 16 columns at a time can be dealt to warps: a round stays inside a panel, and all rounds in the tile."""
    columns = smem_cols(head_dim)
    panel = 64 if columns % 64 == 0 else 32
    return 16 * warps <= panel and _blocks(head_dim, warps) * 16 * warps <= columns


def _dq_warps(head_dim: int, tile: BwdTileRow) -> tuple[int, int]:
    """(warps along the rows of dQ, along its columns): those that read the least of dS and K for a step of 16 keys."""
    found = [(rows, tile.warps // rows) for rows in (1, 2, 4)
             if rows <= tile.m // 16 and tile.warps % rows == 0 and _deals(head_dim, tile.warps // rows)]
    if not found:
        raise PlanError(f"no way to share dQ of head dim {head_dim} among {tile.warps} warps", where="tile",
                        allowed="fewer warps")
    return min(found, key=lambda shape: tile.m * shape[1] + 16 * shape[1] * _blocks(head_dim, shape[1]) * shape[0])


def _check_registers(spec: Spec, tile: BwdTileRow, shares: Shares, target: Target) -> None:
    sums = shares.key_fragments * 8 * (shares.dk_blocks + shares.dv_blocks)
    scores = shares.key_fragments * shares.queries // 2
    dq = shares.dq_fragments * shares.dq_blocks * 8
    needed = sums + max(2 * scores, dq) + OVERHEAD_REGISTERS
    limit = registers_per_thread_max(32 * tile.warps, tile.blocks_per_sm, target)
    if needed > limit:
        raise PlanError(
            f"needs at least dK and dV {sums} + the larger of (S and dP 2 * {scores}, dQ {dq}) + "
            f"{OVERHEAD_REGISTERS} = {needed} registers per thread", where=f"{spec.variant}.{target.name}",
            allowed=f"{limit} with {tile.blocks_per_sm} blocks of {32 * tile.warps} threads per SM",
            nearest="a smaller tile, more warps, or fewer blocks_per_sm")


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
        Constant("DQ_BLOCKS", shares.dq_blocks, "blocks of 16 columns per warp"),
        Constant("HEAD_DIM_QK", spec.head_dim_qk, "columns of q, k and dk in device memory"),
        Constant("HEAD_DIM_V", spec.head_dim_v, "columns of v, dout and dv in device memory"),
        Constant("MMA_COLS_QK", round_up(spec.head_dim_qk, 16), "columns of the QK product and of the sums of dQ"),
        Constant("MMA_COLS_V", round_up(spec.head_dim_v, 16), "columns of dP's product: whole 16-column steps"),
        Constant("SMEM_COLS_QK", smem_cols(spec.head_dim_qk), "columns stored of q and k: whole panels, surplus zero"),
        Constant("SMEM_COLS_V", smem_cols(spec.head_dim_v), "columns stored of v and dout, likewise"),
    )


def _params(spec: Spec, mask: str) -> tuple[Param, ...]:
    """Pointers and 64-bit strides first, so that the struct has no holes."""
    varlen = spec.kv_layout == "varlen"
    rows_q, rows_kv = ("total_q", "total_kv") if varlen else ("batch, seqlen_q", "batch, seqlen_kv")
    axes = ("row", "head") if varlen else ("batch", "row", "head")
    return (
        Param("q", "element_ptr", f"[{rows_q}, num_heads_q, head_dim_qk]"),
        Param("k", "element_ptr", f"[{rows_kv}, num_heads_kv, head_dim_qk]"),
        Param("v", "element_ptr", f"[{rows_kv}, num_heads_kv, head_dim_v]"),
        Param("dout", "element_ptr", f"[{rows_q}, num_heads_q, head_dim_v]"),
        Param("neg_lse", "f32_ptr", "[num_heads_q, q_tiles, BLOCK_M], log2; -inf past a sequence"),
        Param("neg_delta", "f32_ptr", "likewise; 0 past a sequence"),
        Param("dq_accum", "f32_out", "[num_heads_q, q_tiles, BLOCK_M * MMA_COLS_QK] in the order of fragments"),
        Param("dk", "element_out", f"[{rows_kv}, num_heads_kv, head_dim_qk]"),
        Param("dv", "element_out", f"[{rows_kv}, num_heads_kv, head_dim_v]"),
        *LAYOUTS[spec.kv_layout],
        *(Param(f"{t}_{axis}_stride", "i64", "elements") for t in ("q", "k", "v", "dout", "dk", "dv") for axis in axes),
        Param("batch", "i32", "sequences"),
        Param("seqlen_q", "i32", "total_q" if varlen else "queries per sequence"),
        Param("seqlen_kv", "i32", "total_kv" if varlen else "keys per sequence"),
        Param("num_heads_q", "divisor", "query heads"),
        Param("num_heads_kv", "divisor", "heads of keys and values"),
        Param("heads_per_kv_head", "divisor", "num_heads_q / num_heads_kv"),
        Param("m_tiles", "divisor", "query tiles per head" if varlen else "query tiles per head and sequence"),
        Param("n_tiles", "divisor", "key tiles per head" if varlen else "key tiles per head and sequence"),
        Param("q_tiles", "i32", "query tiles per head, of all sequences"),
        Param("scale_log2", "f32", "softmax_scale * log2(e)"),
        Param("softmax_scale", "f32", "of scores, and so of dK"),
        *MASKS[mask],
    )
