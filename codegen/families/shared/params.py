"""What the lowerings of several families share."""
from __future__ import annotations

from typing import TYPE_CHECKING

from flashgen.codegen.plan import Param

if TYPE_CHECKING:
    from flashgen.codegen.spec.spec import Spec


def tensor_params(spec: Spec) -> list[Param]:
    varlen = spec.kv_layout == "varlen"
    rows_q, rows_kv = ("total_q", "total_kv") if varlen else ("batch, seqlen_q", "batch, seqlen_kv")
    pointers = [
        Param("q", "element_ptr", f"[{rows_q}, num_heads_q, head_dim_qk]"),
        Param("k", "element_ptr", f"[{rows_kv}, num_heads_kv, head_dim_qk]"),
        Param("v", "element_ptr", f"[{rows_kv}, num_heads_kv, head_dim_v]"),
        Param("out", "element_out", f"[{rows_q}, num_heads_q, head_dim_v]"),
    ]
    if spec.lse:
        shape = "[num_heads_q, total_q]" if varlen else "[batch, num_heads_q, seqlen_q]"
        pointers.append(Param("lse", "f32_out", f"{shape}, natural log, contiguous; null: not wanted"))
    return pointers


def stride_params(spec: Spec) -> list[Param]:
    """Strides count elements."""
    axes = ("row", "head") if spec.kv_layout == "varlen" else ("batch", "row", "head")
    return [Param(f"{t}_{axis}_stride", "i64", "elements") for t in ("q", "k", "v", "out") for axis in axes]


def size_params(spec: Spec) -> list[Param]:
    varlen = spec.kv_layout == "varlen"
    return [
        Param("batch", "i32", "sequences"),
        Param("seqlen_q", "i32", "total_q" if varlen else "queries per sequence"),
        Param("seqlen_kv", "i32", "total_kv" if varlen else "keys per sequence"),
        Param("num_heads_q", "divisor", "query heads"),
        Param("heads_per_kv_head", "divisor", "num_heads_q / num_heads_kv"),
        Param("m_tiles", "divisor", "query tiles per head" if varlen else "query tiles per head and sequence"),
        Param("scale_log2", "f32", "softmax_scale * log2(e)" if spec.expressions.score is None
              else "log2(e), since the expression gives natural units"),
    ]
