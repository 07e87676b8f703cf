"""Lowers the standard family: attention as three kernels (Dao 2022, algorithm 0), the baseline of FlashAttention.

scores writes S = softmax_scale * q k^T, masked, in fp32; softmax reads S, writes P in the dtype of the inputs, and lse;
values reads P and v. Tiles have one size for every head dim, because the traffic of S and P bounds a call, and not the
products. Rows of S and P are padded to whole key tiles, so that no kernel tests a column.
"""
from __future__ import annotations

from typing import TYPE_CHECKING

from flashgen.codegen.dtype import DTYPES
from flashgen.codegen.families.standard.launch import BLOCK_M, BLOCK_N, ROWS_PER_BLOCK
from flashgen.codegen.plan import Constant, Launch, Param, Plan, Region, Role
from flashgen.codegen.slots import MASKS, mask_choice
from flashgen.codegen.smem import end_of, layout_regions, round_up, smem_cols, tile_bytes
from flashgen.codegen.target import Target

if TYPE_CHECKING:
    from flashgen.codegen.families.standard.options import Spec

WARPS, NUM_STAGES = BLOCK_M // 16, 2

_SCORES = "[batch, num_heads_q, seqlen_q, score_cols], scaled, in powers of two"
_PROBS = "P = softmax(S): [batch, num_heads_q, seqlen_q, score_cols]"
_SIZES = (
    Param("seqlen_q", "i32", "queries per sequence"),
    Param("seqlen_kv", "i32", "keys per sequence"),
    Param("score_cols", "i32", "seqlen_kv up to whole key tiles"),
    Param("num_heads_q", "divisor", "query heads"),
    Param("heads_per_kv_head", "divisor", "num_heads_q / num_heads_kv"),
    Param("m_tiles", "divisor", "query tiles per head and sequence"),
    Param("n_tiles", "divisor", "key tiles per sequence"),
)
_THREADS = (Constant("NUM_THREADS", 32 * WARPS, f"{WARPS} warps"),
            Constant("MIN_BLOCKS_PER_SM", 1, "leaves 255 registers per thread"))
_TILE = (Constant("BLOCK_M", BLOCK_M, "query rows per block: 16 for each warp"),
         Constant("BLOCK_N", BLOCK_N, "keys per tile"), *_THREADS)


def lower(spec: Spec, target: Target) -> Plan:
    """The plan of one of the three kernels."""
    return {"scores": _scores, "softmax": _softmax, "values": _values}[str(spec.kernel)](spec, target)


def _scores(spec: Spec, target: Target) -> Plan:
    columns = spec.head_dim_qk
    smem = layout_regions((("Q", tile_bytes(BLOCK_M, columns), "the query tile"),
                           ("K", tile_bytes(BLOCK_N, columns), "the key tile")))
    constants = (*_TILE, Constant("HEAD_DIM_QK", columns, "columns of q and k in device memory"),
                 Constant("MMA_COLS_QK", round_up(columns, 16), "columns of the product: whole 16-column steps"),
                 Constant("SMEM_COLS_QK", smem_cols(columns), "columns stored of q and k: whole panels, surplus zero"))
    params = (Param("q", "element_ptr", "[batch, seqlen_q, num_heads_q, head_dim_qk]"),
              Param("k", "element_ptr", "[batch, seqlen_kv, num_heads_kv, head_dim_qk]"),
              Param("scores", "f32_out", _SCORES), *_strides("q", "k"), *_SIZES,
              Param("scale_log2", "f32", "softmax_scale * log2(e)"), *_mask(spec))
    return _plan(spec, target, constants, params, smem, "x = n_tiles * m_tiles * num_heads_q * batch")


def _softmax(spec: Spec, target: Target) -> Plan:
    constants = (*_THREADS, Constant("ROWS_PER_BLOCK", ROWS_PER_BLOCK, "a row for each warp"))
    params = (Param("scores", "f32_ptr", _SCORES), Param("probs", "element_out", _PROBS),
              Param("lse", "f32_out", "[batch, num_heads_q, seqlen_q], natural log, contiguous; null: not wanted"),
              Param("num_rows", "i32", "batch * num_heads_q * seqlen_q"), _SIZES[2])
    return _plan(spec, target, constants, params, (), "x = num_rows / ROWS_PER_BLOCK, rounded up")


def _values(spec: Spec, target: Target) -> Plan:
    columns = spec.head_dim_v
    smem = layout_regions((
        ("P", NUM_STAGES * tile_bytes(BLOCK_M, BLOCK_N), f"{NUM_STAGES} stages of P; at the end the output"),
        ("V", max(NUM_STAGES * tile_bytes(BLOCK_N, columns),
                  tile_bytes(BLOCK_M, columns) - NUM_STAGES * tile_bytes(BLOCK_M, BLOCK_N)),
         f"{NUM_STAGES} stages of {BLOCK_N} values; the end of the output")))
    constants = (*_TILE, Constant("NUM_STAGES", NUM_STAGES, "tiles of P and V in the ring, 1 in flight"),
                 Constant("HEAD_DIM_V", columns, "columns of v and out in device memory"),
                 Constant("MMA_COLS_V", round_up(columns, 16), "columns of the output fragments: whole steps of 16"),
                 Constant("SMEM_COLS_V", smem_cols(columns), "columns stored of v and out: whole panels, surplus zero"))
    params = (Param("probs", "element_ptr", _PROBS),
              Param("v", "element_ptr", "[batch, seqlen_kv, num_heads_kv, head_dim_v]"),
              Param("out", "element_out", "[batch, seqlen_q, num_heads_q, head_dim_v]"),
              *_strides("v", "out"), *_SIZES, *_mask(spec))
    return _plan(spec, target, constants, params, smem, "x = m_tiles * num_heads_q * batch")


def _mask(spec: Spec) -> tuple[Param, ...]:
    return MASKS[mask_choice(spec.causal, False)]


def _strides(*tensors: str) -> tuple[Param, ...]:
    return tuple(Param(f"{t}_{axis}_stride", "i64", "elements") for t in tensors for axis in ("batch", "row", "head"))


def _plan(spec: Spec, target: Target, constants: tuple[Constant, ...], params: tuple[Param, ...],
          smem: tuple[Region, ...], grid: str) -> Plan:
    return Plan(
        variant=spec.variant, target=target.name, family="standard", pass_="fwd", spec=spec.fields(),
        template=f"standard/{spec.kernel}.cu.j2", element=DTYPES[spec.dtype].element, constants=constants,
        slots=() if spec.kernel == "softmax" else (("mask", mask_choice(spec.causal, False)),), flags=(), params=params,
        smem=smem, roles=(Role("mma", WARPS),), launch=Launch(32 * WARPS, 1, end_of(smem), grid))
