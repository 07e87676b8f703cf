"""Lowers the backward of triton: P is recomputed from q, k and lse twice, once by the owner of each result.

preprocess makes delta = rowsum(dout * out) - dlse. key_gradients makes dK and dV of a tile of keys, query_gradients dQ
of a tile of queries (as in Dao 2023, section 3.1, and Triton's tutorial 06). Nobody adds to another block's sums, so
the same call gives the same bits, and a request's bits do not depend on its neighbours. Gradients of tensors that a
score reads are the exception: these are sums over rows, added in any order.
"""
from __future__ import annotations

from typing import TYPE_CHECKING

from flashgen.codegen.families.shared import backward_expressions as shared
from flashgen.codegen.families.triton import expressions
from flashgen.codegen.families.triton.lower import plan_of
from flashgen.codegen.plan import Param, Plan
from flashgen.codegen.slots import LAYOUTS
from flashgen.codegen.target import Target

if TYPE_CHECKING:
    from flashgen.codegen.families.triton.options import Spec

_TENSORS = {"preprocess": ("out", "dout"), "key_gradients": ("q", "k", "v", "dout", "dk", "dv"),
            "query_gradients": ("q", "k", "v", "dout", "dq")}
_RESULTS = ("dq", "dk", "dv")


def lower(spec: Spec, target: Target) -> Plan:
    """The plan of one of the three kernels."""
    kernel, varlen = str(spec.kernel), spec.kv_layout == "varlen"
    rows = {"q": "total_q", "kv": "total_kv"} if varlen else {"q": "batch, seqlen_q", "kv": "batch, seqlen_kv"}
    shapes = {name: f"[{rows['q']}, num_heads_q, {dim}]" for name, dim in (
        ("q", "head_dim_qk"), ("out", "head_dim_v"), ("dout", "head_dim_v"), ("dq", "head_dim_qk"))} | {
        name: f"[{rows['kv']}, num_heads_kv, {dim}]" for name, dim in (
            ("k", "head_dim_qk"), ("v", "head_dim_v"), ("dk", "head_dim_qk"), ("dv", "head_dim_v"))}
    tensors = [Param(name, "element_out" if name in _RESULTS else "element_ptr", shapes[name])
               for name in _TENSORS[kernel]]
    strides = [Param(f"{name}_{axis}_stride", "i64", "elements") for name in _TENSORS[kernel]
               for axis in (("row", "head") if varlen else ("batch", "row", "head"))]
    per_row = "[num_heads_q, total_q]" if varlen else "[batch, num_heads_q, seqlen_q]"
    sizes = (Param("batch", "i32", "sequences"),
             Param("seqlen_q", "i32", "total_q" if varlen else "queries per sequence"),
             Param("seqlen_kv", "i32", "total_kv" if varlen else "keys per sequence"),
             Param("num_heads_q", "i32", "query heads"),
             Param("heads_per_kv_head", "i32", "num_heads_q / num_heads_kv"))
    if kernel == "preprocess":
        sums = (Param("dlse", "f32_ptr", f"{per_row}, the gradient of lse; null: none"),
                Param("delta", "f32_out", f"{per_row}, rowsum(dout * out) - dlse"))
        return plan_of(spec, target, "bwd_preprocess", (*tensors, *sums), (*strides, *sizes),
                       "x = tiles of query rows * num_heads_q" + ("" if varlen else " * batch"))
    lists = (Param("tiles", "i32_out", "scratch: of each tile, the numbers of those that it meets"),)
    finds = shared.mask_of(spec) == "expression"
    count = ("q_tiles", "query") if kernel == "key_gradients" else ("n_tiles", "key")
    pointers = (*tensors, Param("lse", "f32_ptr", f"{per_row}, natural log, contiguous"),
                Param("delta", "f32_ptr", f"{per_row}, what preprocess leaves"), *LAYOUTS[spec.kv_layout],
                *(param for param in shared.pointer_params(spec) if param.ctype != "f32_sum" or expressions.adds(spec)),
                *(lists if finds else ()))
    numbers = (*sizes,
               Param("scale_log2", "f32", "softmax_scale * log2(e)" if spec.expressions.score is None
                     else "log2(e), since the expression gives natural units"),
               Param("softmax_scale", "f32", "of dQ and dK; scores have it in scale_log2"),
               *((Param(count[0], "i32", f"{count[1]} tiles of the longest sequence, at most"),) if finds else ()))
    grid = "x = tiles of keys * num_heads_kv" if kernel == "key_gradients" else "x = tiles of queries * num_heads_q"
    return plan_of(spec, target, f"bwd_{kernel}", pointers, (*strides, *numbers),
                   grid + ("" if varlen else " * batch"))
