"""Lowers the flashmla family: decode over a latent cache (DeepSeek's FlashMLA, 2025), and its schedule; sm_90a.

One latent of head_dim_qk columns per token serves all heads as key, its first head_dim_v columns as value. A block has
64 rows (token * num_heads + head) of one request at a time. Two warpgroups hold half of the output columns each, and
make S and P of every other key tile: the softmax of one runs under the products of the other, and
each tile is read from device memory once. docs/flashmla.md has the schedule drawn in time, docs/lab/flashmla.md
what else was tried.
"""
from __future__ import annotations

from typing import TYPE_CHECKING

from flashgen.codegen.dtype import DTYPES
from flashgen.codegen.plan import Barrier, Constant, Launch, Param, Plan, Region, Role, TensorMap
from flashgen.codegen.smem import end_of, layout_regions, tile_bytes
from flashgen.codegen.target import Target
from flashgen.codegen.warpgroup import WARPGROUP_ROWS, WARPGROUP_THREADS, WARPGROUP_WARPS
from flashgen.codegen.wgmma import product_shapes
from flashgen.errors import PlanError

if TYPE_CHECKING:
    from flashgen.codegen.families.flashmla.options import Spec

BLOCK_N = 64                  # keys per tile: a page of the cache in its usual size
PANEL_COLS = 64               # of a tile, 128 bytes
SUB_TILE_COLS = 128           # of a tile, that are loaded at once: scores start when the first have landed
KV_STAGES = {"boxes": 10, "rows": 8}  # two tiles and what fits: loads run ahead of products that free their stages
REGISTER_QUERY_PANELS = 3     # which spares products 24 KiB of what they read for each tile, and makes room for loads
LOAD_REGISTERS, MMA_REGISTERS = 24, 240
SEGMENTS = 8                  # published at most: two tiles ahead and two behind, each of another request, and some
SEGMENT_BYTES = 40
RECORD_WORDS = 16             # of the schedule, per block
PARTIAL_ROW_FLOATS = 2        # reference and sum
MIN_BLOCK_ROWS = 16           # those of a warp: with fewer there is no less to merge


def lower_decode(spec: Spec, target: Target) -> Plan:
    _check(spec, target)
    rope = spec.head_dim_qk > spec.head_dim_v
    cache = "dense" if spec.kv_layout == "dense" else "pages"
    copy = "rows" if spec.page_size == 1 else "boxes"
    barriers = _barriers(rope, copy)
    smem = _smem(spec, barriers, copy)
    element, half = DTYPES[spec.dtype].element, spec.head_dim_v // 2
    return Plan(
        variant=spec.variant, target=target.name, family="flashmla", pass_="decode", spec=spec.fields(),
        template="flashmla/decode.cu.j2", element=element, constants=_constants(spec, copy),
        slots=(("cache", cache), ("copy", copy)), flags=(("rope", rope), ("p_awaits_room", not rope)),
        params=_params(rope, copy),
        smem=smem, roles=(Role("load", WARPGROUP_WARPS, LOAD_REGISTERS),
                          Role("mma", 2 * WARPGROUP_WARPS, MMA_REGISTERS)),
        launch=Launch(3 * WARPGROUP_THREADS, 1, end_of(smem),
                      "x = records of the schedule, all resident at once", programmatic=True),
        tensor_maps=_tensor_maps(spec, rope, copy), barriers=barriers,
        wgmma_shapes=tuple(shape for n, b_major in ((BLOCK_N, "K_MAJOR"), (half, "MN_MAJOR"))
                           for a_source in ("shared", "registers")
                           for shape in product_shapes(element, n, a_source, "K_MAJOR", b_major, PANEL_COLS)),
    )


def lower_schedule(spec: Spec, target: Target) -> Plan:
    return Plan(
        variant=spec.variant, target=target.name, family="flashmla", pass_="schedule", spec=spec.fields(),
        template="flashmla/schedule.cu.j2", element=DTYPES[spec.dtype].element,
        constants=(Constant("NUM_THREADS", 32, "one warp, whose lanes try a capacity each"),
                   Constant("BLOCK_N", BLOCK_N, "keys per tile"),
                   Constant("RECORD_WORDS", RECORD_WORDS, "words of a block's record"),
                   Constant("BLOCK_M", WARPGROUP_ROWS, "rows of a block, at most"),
                   Constant("MIN_BLOCK_ROWS", MIN_BLOCK_ROWS, "at least: those of a warp")),
        slots=(), flags=(), params=(
            Param("seqlens", "i32_ptr", "[batch], keys of each request"),
            Param("schedule", "i32_out", "[blocks][RECORD_WORDS]"),
            Param("batch", "i32", "requests"),
            Param("q_rows", "i32", "seqlen_q * num_heads of the decode"),
            Param("blocks", "i32", "of the decode: at least one for every 64 rows"),
            Param("overhead_tiles", "i32", "what a segment costs beside its tiles, in tiles"),
            Param("most_single_tiles", "i32", "tiles of a request that may have a partition each"),
        ),
        smem=(), roles=(Role("schedule", 1),), launch=Launch(32, 1, 0, "x = 1"),
    )


def _check(spec: Spec, target: Target) -> None:
    if not target.features >= {"tma", "wgmma"}:
        raise PlanError(f"flashmla on {target.name}", where=spec.variant, allowed="sm_90a", nearest="arch: sm_90a")


def _query_panels(spec: Spec) -> tuple[int, int]:
    """(in shared memory, in registers) of 64 columns each."""
    return spec.head_dim_qk // PANEL_COLS - REGISTER_QUERY_PANELS, REGISTER_QUERY_PANELS


def _barriers(rope: bool, copy: str) -> tuple[Barrier, ...]:
    return (
        Barrier("KV_FULL", KV_STAGES[copy], 1, "a sub-tile has landed"),
        Barrier("KV_EMPTY", KV_STAGES[copy], WARPGROUP_WARPS,
                "the warpgroup whose output columns it is has multiplied it"),
        *((Barrier("ROPE_P_FULL", 2, WARPGROUP_WARPS if copy == "rows" else 1,
                   "the RoPE columns of a tile have landed"),) if rope else ()),
        Barrier("ROPE_P_EMPTY", 2, WARPGROUP_WARPS, "the other warpgroup has multiplied the P that took their place"),
        Barrier("P_FULL", 2, WARPGROUP_WARPS, "P of a tile has been stored, with its row references"),
        Barrier("SEGMENT_FULL", 1, 1, "the next segment has been published"),
        Barrier("Q_FULL", 1, 1, "its queries have landed"),
        Barrier("Q_EMPTY", 1, 2 * WARPGROUP_WARPS, "both warpgroups have made their last scores of it"),
        Barrier("SPLITS_FULL", 2, 1, "all splits of the block's first, or last, request are written"),
    )


def _smem(spec: Spec, barriers: tuple[Barrier, ...], copy: str) -> tuple[Region, ...]:
    panels, _ = _query_panels(spec)
    return layout_regions((
        ("KV", KV_STAGES[copy] * tile_bytes(BLOCK_N, SUB_TILE_COLS),
         f"{KV_STAGES[copy]} sub-tiles of {SUB_TILE_COLS} columns of {BLOCK_N} keys"),
        ("ROPE_P", 2 * tile_bytes(BLOCK_N, PANEL_COLS), "RoPE columns of two tiles, then P in their place"),
        ("Q", tile_bytes(WARPGROUP_ROWS, PANEL_COLS * panels), f"the first {panels} panels of the queries"),
        ("REFERENCES", 2 * 4 * WARPGROUP_ROWS, "[2 tiles][row] row references of P"),
        ("RAISED", 2 * 4 * WARPGROUP_WARPS, "[2 tiles][warp] whether it has changed"),
        ("SUMS", 2 * 2 * 4 * WARPGROUP_ROWS, "[2 segments][warpgroup][row] shares of the denominators"),
        ("SEGMENTS", SEGMENTS * SEGMENT_BYTES, f"{SEGMENTS} segments"),
        *((("ROWS", WARPGROUP_WARPS * 8 * BLOCK_N, "[producer warp][key of a tile] where it lies"),)
          if copy == "rows" else ()),
        ("BARRIERS", 8 * sum(b.count for b in barriers), "the mbarriers"),
    ))


def _constants(spec: Spec, copy: str) -> tuple[Constant, ...]:
    in_smem, in_registers = _query_panels(spec)
    half = spec.head_dim_v // 2
    return (
        Constant("BLOCK_M", WARPGROUP_ROWS, "rows of a wgmma: of a block, at most"),
        Constant("BLOCK_N", BLOCK_N, "keys per tile"),
        Constant("SUB_TILE_COLS", SUB_TILE_COLS, "columns of a sub-tile: what is loaded and freed at once"),
        Constant("KV_STAGES", KV_STAGES[copy], "sub-tiles in shared memory"),
        Constant("SMEM_QUERY_PANELS", in_smem, "of 64 columns of the queries in shared memory"),
        Constant("REGISTER_QUERY_PANELS", in_registers, "of them in registers: the last"),
        Constant("HEAD_DIM_QK", spec.head_dim_qk, "columns of the cache: latent, then RoPE"),
        Constant("HALF_COLS", half, "columns of the output that a warpgroup holds"),
        Constant("SEGMENTS", SEGMENTS, "published at most: two tiles ahead and two behind, and the next"),
        Constant("RECORD_WORDS", RECORD_WORDS, "words of a block's record in the schedule"),
        Constant("PARTIAL_FLOATS", WARPGROUP_ROWS * (spec.head_dim_v + PARTIAL_ROW_FLOATS),
                 "one split of a request: output, row references and row sums"),
        Constant("SCORES_BARRIER", 1, "first of two named barriers, one per warpgroup"),
        Constant("SUMS_BARRIER", 3, "the named barrier at which both warpgroups meet"),
        Constant("PINGPONG_BARRIER", 4, "the one at which the right warpgroup waits for its turn to make scores"),
        Constant("VALUES_BARRIER", 5, "the one at which it waits to multiply the values of its own tile"),
        Constant("NUM_THREADS", 3 * WARPGROUP_THREADS, "with the producer warpgroup"),
        Constant("LOAD_REGISTERS", LOAD_REGISTERS, "per thread that copies"),
        Constant("MMA_REGISTERS", MMA_REGISTERS, "per consumer thread: what the producers leave of 64 Ki"),
    )


def _tensor_maps(spec: Spec, rope: bool, copy: str) -> tuple[TensorMap, ...]:
    def panels(name: str, tensor: str, count: int, rows: int) -> TensorMap:
        return TensorMap(name, tensor, PANEL_COLS, rows, 2 * PANEL_COLS, box_panels=count)

    queries = panels("q_map", "q", _query_panels(spec)[0], WARPGROUP_ROWS)
    if copy == "rows":
        return (queries,)
    return (queries, panels("kv_map", "kv", SUB_TILE_COLS // PANEL_COLS, BLOCK_N),
            *((panels("rope_map", "kv", 1, BLOCK_N),) if rope else ()))


def _params(rope: bool, copy: str) -> tuple[Param, ...]:
    """Tensor maps first, for their alignment; then pointers and 64-bit strides, so that the struct has no holes."""
    rows = copy == "rows"
    maps = ["q", *(["kv"] if not rows else []), *(["rope"] if rope and not rows else [])]
    return (
        *(Param(f"{name}_map", "tensor_map", f"of {'kv' if name == 'rope' else name}: [64, rows, panels, "
                                             f"{'batch' if name == 'q' else 'pages'}]") for name in maps),
        Param("q", "element_ptr", "[batch, q_rows, head_dim_qk]"),
        Param("kv", "element_ptr", "[num_pages, page_size, head_dim_qk]"),
        Param("out", "element_out", "[batch, q_rows, head_dim_v], contiguous"),
        Param("lse", "f32_out", "[batch, num_heads, seqlen_q], natural log, contiguous; null: not wanted"),
        Param("page_table", "i32_ptr", "[batch, max_pages], pages of each request; null: dense"),
        Param("seqlens", "i32_ptr", "[batch], keys of each request"),
        Param("sink", "f32_ptr", "[num_heads], logit that joins the denominator; null: none"),
        Param("schedule", "i32_ptr", "[blocks][RECORD_WORDS], of the schedule kernel"),
        Param("partials", "f32_out", "[blocks][2] results of PARTIAL_FLOATS"),
        Param("counters", "i32_out", "[blocks] arrivals and departures, zero between launches"),
        Param("q_outer_stride", "i64", "elements from request to request"),
        Param("q_row_stride", "i64", "elements"),
        *((Param("kv_outer_stride", "i64", "elements from page to page"),
           Param("kv_row_stride", "i64", "elements"),
           Param("kv_outer", "i32", "pages")) if rows else ()),
        Param("q_rows", "i32", "seqlen_q * num_heads: row = token * num_heads + head"),
        Param("num_heads", "divisor", "query heads"),
        Param("seqlen_q", "i32", "new tokens of each request"),
        Param("max_pages", "i32", "columns of the page table"),
        Param("page_size", "divisor", "rows of a page"),
        Param("masked_keys", "i32", "last keys that the first token does not see: seqlen_q - 1 if causal, else 0"),
        Param("lse_counts_sink", "i32", "1: lse has the sink in it"),
        Param("scale_log2", "f32", "softmax_scale * log2(e)"),
    )
