"""Lowers the kernels around a backward pass, which are the same for all families: preprocess and postprocess.

Both take tiles and the order of dq_accum from the plan of the family's gradients kernel, so the three always agree.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from flashgen.codegen.families.shared.backward import GROUP_ROWS, row_terms_of
from flashgen.codegen.families.shared.sums import TURN_PARTS, turns_params
from flashgen.codegen.plan import Constant, Launch, Param, Plan, Region, Role
from flashgen.codegen.slots import LAYOUTS
from flashgen.codegen.smem import end_of, round_up, smem_cols, tile_bytes
from flashgen.codegen.target import Target

if TYPE_CHECKING:
    from flashgen.codegen.spec.spec import Spec

ROW_READS = 8          # rows of out and dout that a thread has under way
MIN_THREADS = 128
POST_THREADS = 128     # a thread has the elements of dq_accum that a thread of a warpgroup added to

_LSE = "natural log, contiguous"
# What the gradients kernel adds to the columns of S and dP: numbers that lanes load, or an operand of the products.
_ROW_TERMS = {
    "numbers": (("neg_lse", "[num_heads_q, q_tiles * BLOCK_M], -lse in powers of two; -inf where no key is seen"),
                ("neg_delta", "likewise, -rowsum(dout * out), plus dlse")),
    "operand": (("row_terms", "[num_heads_q, q_tiles * BLOCK_M, 4], RowTerms: -lse / softmax_scale, -delta"),),
}
_DQ_ACCUM = ("dq_accum", "[num_heads_q, q_tiles, BLOCK_M, MMA_COLS_QK], fragment order (docs/backward.md)")


def lower(spec: Any, target: Target, lower_gradients: Callable[[Any, Target], Plan]) -> Plan:
    """The plan of one of the three kernels."""
    gradients = lower_gradients(spec, target)
    if spec.kernel == "gradients":
        return gradients
    return {"preprocess": _preprocess, "postprocess": _postprocess}[spec.kernel](spec, gradients)


def gradient_params(spec: Spec, row_terms: str = "numbers") -> tuple[Param, ...]:
    """Pointers of the gradients kernel, in their order; those of a slot come behind."""
    rows_q, rows_kv = _rows(spec)
    return (
        Param("q", "element_ptr", f"[{rows_q}, num_heads_q, head_dim_qk]"),
        Param("k", "element_ptr", f"[{rows_kv}, num_heads_kv, head_dim_qk]"),
        Param("v", "element_ptr", f"[{rows_kv}, num_heads_kv, head_dim_v]"),
        Param("dout", "element_ptr", f"[{rows_q}, num_heads_q, head_dim_v]"),
        *(Param(name, "f32_ptr", about) for name, about in _ROW_TERMS[row_terms]),
        Param(_DQ_ACCUM[0], "f32_out", _DQ_ACCUM[1]), *turns_params(spec),
        Param("dk", "element_out", "as k"), Param("dv", "element_out", "as v"), *LAYOUTS[spec.kv_layout])


def gradient_strides(spec: Spec) -> tuple[Param, ...]:
    axes = ("row", "head") if spec.kv_layout == "varlen" else ("batch", "row", "head")
    return tuple(Param(f"{t}_{axis}_stride", "i64", "elements")
                 for t in ("q", "k", "v", "dout", "dk", "dv") for axis in axes)


def gradient_sizes(spec: Spec) -> tuple[Param, ...]:
    varlen = spec.kv_layout == "varlen"
    per = "per head" if varlen else "per head and sequence"
    return (
        *_lengths(spec),
        Param("num_heads_q", "divisor", "query heads"),
        Param("num_heads_kv", "divisor", "heads of keys and values"),
        Param("heads_per_kv_head", "divisor", "num_heads_q / num_heads_kv"),
        Param("m_tiles", "divisor", f"query tiles {per}"),
        Param("n_tiles", "divisor", f"key tiles {per}"),
        Param("q_tiles", "i32", "query tiles per head, of all sequences"),
        Param("scale_log2", "f32", "softmax_scale * log2(e)" if spec.expressions.score is None
              else "log2(e), since the expression gives natural units"),
        Param("softmax_scale", "f32", "of dK; scores have it in scale_log2"),
    )


def _rows(spec: Spec) -> tuple[str, str]:
    return ("total_q", "total_kv") if spec.kv_layout == "varlen" else ("batch, seqlen_q", "batch, seqlen_kv")


def _lengths(spec: Spec) -> tuple[Param, ...]:
    varlen = spec.kv_layout == "varlen"
    return (Param("batch", "i32", "sequences"),
            Param("seqlen_q", "i32", "total_q" if varlen else "queries per sequence"),
            Param("seqlen_kv", "i32", "total_kv" if varlen else "keys per sequence"))


def _preprocess(spec: Spec, gradients: Plan) -> Plan:
    block_m, columns = gradients.constant("BLOCK_M"), spec.head_dim_v
    chunks = columns // 8
    lanes = 1 << (chunks - 1).bit_length()
    threads = min(max(MIN_THREADS, block_m * lanes // ROW_READS), block_m * lanes)  # whole rows, each read once
    row_terms = row_terms_of(gradients)
    rows_q, _ = _rows(spec)
    lse = "[num_heads_q, total_q]" if spec.kv_layout == "varlen" else "[batch, num_heads_q, seqlen_q]"
    constants = (
        Constant("LANES_PER_ROW", lanes, f"16 bytes of out and dout for each of {chunks}, in a power of two"),
        Constant("CHUNKS_PER_ROW", chunks, "16-byte pieces of a row"),
    )
    params = (Param("out", "element_ptr", f"[{rows_q}, num_heads_q, head_dim_v]"),
              Param("dout", "element_ptr", f"[{rows_q}, num_heads_q, head_dim_v]"),
              Param("lse", "f32_ptr", f"{lse}, {_LSE}"),
              Param("dlse", "f32_ptr", f"{lse}, the gradient of lse; null: none"),
              *(Param(name, "f32_out", about) for name, about in (*_ROW_TERMS[row_terms], _DQ_ACCUM)),
              *turns_params(spec))
    return _around(spec, gradients, constants, params, ("out", "dout"), (), threads,
                   (("row_terms", row_terms),), "x = q_tiles * num_heads_q")


def _postprocess(spec: Spec, gradients: Plan) -> Plan:
    order = dict(gradients.slots)["dq_order"]
    columns = spec.head_dim_qk
    constants = (
        Constant("GROUP_ROWS", GROUP_ROWS, "rows of dQ per block, which lie together in dq_accum"),
        Constant("HEAD_DIM_QK", columns, "columns of dq"),
        Constant("SMEM_COLS_QK", smem_cols(columns), "columns stored of dq: whole panels"),
    )
    rows_q, _ = _rows(spec)
    params = (Param(_DQ_ACCUM[0], "f32_ptr", _DQ_ACCUM[1]),
              Param("dq", "element_out", f"[{rows_q}, num_heads_q, head_dim_qk]"))
    smem = (Region("DQ", 0, tile_bytes(GROUP_ROWS, columns), f"{GROUP_ROWS} rows of dq"),)
    return _around(spec, gradients, constants, params, ("dq",), smem, POST_THREADS, (("dq_order", order),),
                   "x = q_tiles * num_heads_q * BLOCK_M / GROUP_ROWS")


def _around(spec: Spec, gradients: Plan, constants: tuple[Constant, ...], params: tuple[Param, ...],
            tensors: tuple[str, ...], smem: tuple[Region, ...], threads: int, slots: tuple[tuple[str, str], ...],
            grid: str) -> Plan:
    tiles = (
        Constant("BLOCK_M", gradients.constant("BLOCK_M"), "query rows of a tile: the gradients kernel's"),
        Constant("BLOCK_N", gradients.constant("BLOCK_N"), "keys of a tile there"),
        Constant("MMA_COLS_QK", round_up(spec.head_dim_qk, 16), "columns of dq_accum: whole 16-column steps"),
        Constant("NUM_THREADS", threads, f"{threads // 32} warps"),
        *(constant for constant in gradients.constants if constant.name == TURN_PARTS))
    strides = tuple(Param(f"{t}_{axis}_stride", "i64", "elements") for t in tensors
                    for axis in ("batch", "row", "head"))
    sizes = (*_lengths(spec)[:2], Param("num_heads_q", "divisor", "query heads"),
             Param("m_tiles", "divisor", "query tiles per head and sequence; varlen: per head"),
             Param("q_tiles", "divisor", "query tiles per head, of all sequences"))
    if spec.kernel == "postprocess":
        sizes += Param("softmax_scale", "f32", "of dQ"),
    elif ("row_terms", "operand") in slots:
        sizes += Param("lse_scale", "f32", "-1 / softmax_scale"),
    programmatic = gradients.launch.programmatic
    flags = (("programmatic", programmatic),
             *((("deterministic", spec.deterministic), ("row_operand", ("row_terms", "operand") in slots))
               if spec.kernel == "preprocess" else ()))
    return replace(
        gradients, variant=spec.variant, spec=spec.fields(), template=f"backward/{spec.kernel}.cu.j2",
        constants=(*tiles, *constants), slots=(("row_tile", spec.kv_layout), *slots), flags=flags,
        params=(*params, *LAYOUTS[spec.kv_layout][:1], *strides, *sizes), smem=smem,
        roles=(Role(str(spec.kernel), threads // 32),),
        launch=Launch(threads, 1, end_of(smem), grid,
                      programmatic=programmatic and spec.kernel == "postprocess"), tensor_maps=(), barriers=(),
        wgmma_shapes=(), register_usage_level=None, notes=(), allowed_spill_bytes=0, expressions=())
