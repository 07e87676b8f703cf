"""Lowers the forward of fa1: FlashAttention as first published (Dao et al. 2022, algorithm 1).

A block has one head of one sequence. Its outer loop goes over tiles of keys, its inner loop over tiles of queries, and
each visit reads O, m and l of the query tile from device memory and writes them back. O waits there in fp32, not in the
output's dtype, so that no visit rounds to 16 bits.
"""
from __future__ import annotations

from typing import TYPE_CHECKING

from flashgen.codegen.dtype import DTYPES
from flashgen.codegen.families.fa1.tiles import NUM_STAGES, Tile, forward_tile
from flashgen.codegen.families.shared.params import stride_params, tensor_params
from flashgen.codegen.plan import Constant, Launch, Param, Plan, Role, registers_per_thread_max
from flashgen.codegen.slots import MASKS, mask_choice
from flashgen.codegen.smem import end_of, layout_regions, round_up, smem_cols, tile_bytes
from flashgen.codegen.target import Target

if TYPE_CHECKING:
    from flashgen.codegen.families.fa1.options import Spec

_ROWS = "[batch * num_heads_q, m_tiles * BLOCK_M]"
_STORED = (
    Param("o_accum", "f32_out", "[batch * num_heads_q, m_tiles, BLOCK_M, MMA_COLS_V], O, normalised, as fragments"),
    Param("row_max", "f32_out", f"{_ROWS}, m: the maximum of scores, before the scale"),
    Param("row_sum", "f32_out", f"{_ROWS}, l: the sum of exponentials"),
)
_SIZES = (
    Param("seqlen_q", "i32", "queries per sequence"),
    Param("seqlen_kv", "i32", "keys per sequence"),
    Param("num_heads_q", "divisor", "query heads"),
    Param("heads_per_kv_head", "divisor", "num_heads_q / num_heads_kv"),
    Param("m_tiles", "i32", "query tiles per head and sequence"),
    Param("n_tiles", "i32", "key tiles per sequence"),
    Param("scale_log2", "f32", "softmax_scale * log2(e)"),
)


def lower(spec: Spec, target: Target) -> Plan:
    tile, mask = forward_tile(spec.head_dim_qk, spec.head_dim_v, target), mask_choice(spec.causal, False)
    smem = layout_regions((
        ("Q", tile.q_bytes(spec.head_dim_qk, spec.head_dim_v), f"{NUM_STAGES} stages of queries; at the end, output"),
        ("K", tile_bytes(tile.n, spec.head_dim_qk), "the keys of the outer loop"),
        ("V", tile_bytes(tile.n, spec.head_dim_v), "their values"),
    ))
    return Plan(
        variant=spec.variant, target=target.name, family="fa1", pass_="fwd", spec=spec.fields(),
        template="fa1/fwd.cu.j2", element=DTYPES[spec.dtype].element, constants=_constants(spec, tile, target),
        slots=(("mask", mask), ("queries", mask)), flags=(),
        params=(*tensor_params(spec), *_STORED, *stride_params(spec), *_SIZES, *MASKS[mask]), smem=smem,
        roles=(Role("mma", tile.warps),), launch=Launch(32 * tile.warps, 1, end_of(smem), "x = num_heads_q * batch"))


def _constants(spec: Spec, tile: Tile, target: Target) -> tuple[Constant, ...]:
    registers = registers_per_thread_max(32 * tile.warps, 1, target)
    return (
        Constant("BLOCK_M", tile.m, "query rows per tile of the inner loop: 16 for each warp"),
        Constant("BLOCK_N", tile.n, "keys per tile of the outer loop: as many as shared memory and registers hold"),
        Constant("NUM_STAGES", NUM_STAGES, "query tiles in shared memory, 1 in flight"),
        Constant("WARPS", tile.warps, "of a block"),
        Constant("NUM_THREADS", 32 * tile.warps, f"{tile.warps} warps"),
        Constant("MIN_BLOCKS_PER_SM", 1, f"leaves {registers} registers per thread"),
        Constant("HEAD_DIM_QK", spec.head_dim_qk, "columns of q and k in device memory"),
        Constant("HEAD_DIM_V", spec.head_dim_v, "columns of v and out in device memory"),
        Constant("MMA_COLS_QK", round_up(spec.head_dim_qk, 16), "columns of the QK product: whole 16-column steps"),
        Constant("MMA_COLS_V", round_up(spec.head_dim_v, 16), "columns of the output fragments, likewise"),
        Constant("SMEM_COLS_QK", smem_cols(spec.head_dim_qk), "columns stored of q and k: whole panels, surplus zero"),
        Constant("SMEM_COLS_V", smem_cols(spec.head_dim_v), "columns stored of v and out, likewise"),
    )
