"""What the lowerings of several families share."""
from __future__ import annotations

from flashgen.codegen.families.shared.tiles import TileRow
from flashgen.codegen.plan import Param
from flashgen.codegen.spec.spec import Spec
from flashgen.codegen.warpgroup import WARPGROUP_ROWS, WARPGROUP_WARPS


def overridden(spec: Spec, row: TileRow) -> TileRow:
    """The table's row with the spec's explicit overrides in place.

    fa3: of rows and warps, each follows the other where the spec sets one of them.
    """
    changes: dict[str, object] = {}
    if spec.tile is not None:
        changes |= {"m": spec.tile.m, "n": spec.tile.n}
    if spec.roles is not None:
        changes["warps"] = spec.roles.mma
    if spec.family == "fa3" and spec.tile is not None and spec.roles is None:
        changes["warps"] = spec.tile.m // WARPGROUP_ROWS * WARPGROUP_WARPS
    if spec.family == "fa3" and spec.roles is not None and spec.tile is None:
        changes["m"] = spec.roles.mma // WARPGROUP_WARPS * WARPGROUP_ROWS
    for name in ("stages", "blocks_per_sm", "q_operand", "q_stages", "p_operand"):
        if getattr(spec, name) is not None:
            changes[name] = getattr(spec, name)
    if changes:
        changes["source"] = "overridden in the spec: " + ", ".join(f"{k} {v}" for k, v in changes.items())
    return TileRow(**{**row.__dict__, **changes})


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
