"""Lowers the fa3 family: FlashAttention-3 (Shah et al. 2024) on TMA, wgmma and mbarriers; sm_90a.

A persistent block has a producer warpgroup and one to four consumer warpgroups, each with 64 rows of the query
tile. Keys and values pass through rings of NUM_STAGES stages; each warpgroup has Q_STAGES query stages.
"""
from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from flashgen.codegen.dtype import DTYPES
from flashgen.codegen.families.fa3.tiles import TILES, TileRow, kernel_kind
from flashgen.codegen.families.shared import expressions
from flashgen.codegen.families.shared.params import size_params, stride_params, tensor_params
from flashgen.codegen.plan import Barrier, Constant, Launch, Param, Plan, Region, Role, TensorMap
from flashgen.codegen.slots import LAYOUTS, ORDERS, ROWS, tiled_as
from flashgen.codegen.smem import end_of, layout_regions, panel_cols, round_up, smem_cols, tile_bytes
from flashgen.codegen.target import Target
from flashgen.codegen.warpgroup import (
    MAX_WARPGROUPS,
    WARP_ROWS,
    WARPGROUP_ROWS,
    WARPGROUP_THREADS,
    WARPGROUP_WARPS,
    register_need,
)
from flashgen.codegen.wgmma import WgmmaShape, product_shapes
from flashgen.errors import PlanError

if TYPE_CHECKING:
    from flashgen.codegen.families.fa3.options import Spec

# Registers per thread by number of consumers: (load, mma). A block has 64 Ki; setmaxnreg moves them in steps of 8.
# The producer warps decode tiles and keep three rings, which takes about 32.
REGISTERS = {2: (40, 232), 3: (32, 160), 4: (32, 112)}
GATHER_REGISTERS = (40, 152)  # of three, where tiles are found by tensors that are read element by element
ALL_REGISTERS = 255       # of a thread: what each has from the start with one consumer warpgroup
MIN_STAGES = 2            # of keys and values: keys run a tile ahead
OUT_STAGES = 2            # panels of the output that a warp has under way
WORK_STAGES = 2           # work tiles published ahead: the one at work, and the one whose loads run
WORK_PREFETCH_TILES = 3   # hides the answer of a device-wide counter; more would hand out tiles too early
FILTER_WARPS = 2          # that filter NaNs: in the producer warpgroup, beside the producers of K and V, and of Q
# (8-column chunks per merge pass, splits read together). Two chunks fill a sector of device memory, and keep every SM
# busy where query tiles are few, as they are with pack-GQA; more chunks wait less often.
MERGED, MERGED_FEW = (4, 4), (2, 6)
ONE_LOOP_HEAD_DIM = 128   # beyond it, kernels that split have one: a second costs NVRTC 0.3 s of 1.4 (docs/lab/fa3.md)
GATHER_ROWS = (192, 128)  # of kernels that spill with more, up to GATHER_HEAD_DIM and above: more rows, fewer registers
GATHER_HEAD_DIM = 64
WORK_TILE_BYTES = 56      # of one WorkTileInfo, at most, and for each warpgroup
WARPGROUP_BYTES = 24


def lower(spec: Spec, target: Target) -> Plan:
    mask = expressions.mask_of(spec)
    row = TILES.find(target.name, tiled_as(mask), spec.head_dim_qk, spec.head_dim_v,
                     kernel_kind(spec.split, spec.pack_gqa))
    if not target.features >= {"tma", "wgmma"} or row is None:
        raise PlanError(f"no fa3 tile for head dims ({spec.head_dim_qk}, {spec.head_dim_v}) on {target.name}",
                        where=spec.variant, allowed="head dims up to (256, 256) on sm_90a")
    rows = GATHER_ROWS[spec.head_dim_v > GATHER_HEAD_DIM]
    if expressions.gathers(spec) and row.m > rows:
        row = replace(row, m=rows, warps=rows // WARPGROUP_ROWS * WARPGROUP_WARPS,
                      source=f"{row.source}; with fewer rows, as each score reads an element of a tensor")
    varlen = spec.kv_layout == "varlen"
    # Rows of other sequences, or masked keys: their values reach the output through a P of 0 if they are NaN.
    filters_nonfinite = varlen or mask != "full"

    def in_smem(tile: TileRow) -> tuple[tuple[Barrier, ...], tuple[Region, ...]]:
        num_consumers = tile.m // WARPGROUP_ROWS
        barriers = _barriers(tile, num_consumers, filters_nonfinite)
        return barriers, _smem(spec, tile, num_consumers, mask == "expression", _out_stages(spec, tile), barriers)

    tile = TILES.overridden(spec, row)
    _check_tile(spec, tile)
    barriers, smem = in_smem(tile)
    if tile == row and tile.stages > MIN_STAGES and end_of(smem) > target.smem_per_block_bytes:
        tile = replace(tile, stages=tile.stages - 1,
                       source=f"{tile.source}; with a stage less, as queries and output of these head dims lie apart")
        barriers, smem = in_smem(tile)
    num_consumers = tile.m // WARPGROUP_ROWS
    load_registers, mma_registers = _registers(spec, num_consumers) or (None, None)
    split = spec.split
    # Without turns, warpgroups whose softmax takes long fall into step (docs/lab/variants.md).
    slow = mask == "expression" or spec.expressions.score is not None
    pingpong = (spec.schedule or ("pingpong" if slow else tile.schedule)) == "pingpong" and num_consumers > 1
    pack_gqa = spec.pack_gqa  # for few queries, whose tiles are about equally long
    order = "in_order" if pack_gqa else "longest_first"
    out_stages = _out_stages(spec, tile)
    return Plan(
        variant=spec.variant, target=target.name, family="fa3", pass_="fwd", spec=spec.fields(),
        template="fa3/fwd.cu.j2", element=DTYPES[spec.dtype].element,
        constants=_constants(spec, tile, num_consumers, out_stages, split, pingpong, filters_nonfinite),
        slots=(("layout", "pack_gqa" if pack_gqa else spec.kv_layout), ("coordinates", spec.kv_layout),
               ("rows", "pack_gqa" if pack_gqa else "plain"), *expressions.slots_of(spec), ("order", order),
               ("p_operand", tile.p_operand), ("output", "apart" if out_stages else "over_queries"),
               ("work", "split" if split else "whole")),
        flags=(("lse", spec.lse), ("varlen", varlen), ("softmax", spec.normalize == "softmax"), ("split", split),
               ("one_loop", split and spec.head_dim_qk > ONE_LOOP_HEAD_DIM), ("tile_counter", order != "in_order"),
               ("pingpong", pingpong), ("over_queries", not out_stages),
               ("stores_boxes", not pack_gqa), ("stores_rows", varlen or pack_gqa), ("pack_gqa", pack_gqa),
               ("moves_registers", num_consumers in REGISTERS), ("filters_nonfinite", filters_nonfinite),
               ("tile_words", mask == "expression"), *expressions.flags_of(spec)),
        params=_params(spec, order, split, pingpong), smem=smem,
        roles=(Role("load", WARPGROUP_WARPS, load_registers),
               Role("mma", WARPGROUP_WARPS * num_consumers, mma_registers)),
        launch=Launch(WARPGROUP_THREADS * (num_consumers + 1), 1, end_of(smem),
                      "x = one block per SM, or per work tile where those are fewer"),
        tensor_maps=_tensor_maps(spec, tile), barriers=barriers, wgmma_shapes=_wgmma_shapes(spec, tile),
        register_usage_level=tile.register_usage_level, notes=(f"tile: {tile.source}",),
        expressions=expressions.printed(spec),
    )


def _registers(spec: Spec, num_consumers: int) -> tuple[int, int] | None:
    """(load, mma), or None where nothing moves."""
    return GATHER_REGISTERS if num_consumers == 3 and expressions.gathers(spec) else REGISTERS.get(num_consumers)


def _check_tile(spec: Spec, tile: TileRow) -> None:
    def refuse(what: str, allowed: str, nearest: str = "") -> None:
        raise PlanError(what, where=f"{spec.variant}.{spec.arch}", allowed=allowed, nearest=nearest)

    num_consumers = tile.m // WARPGROUP_ROWS
    if tile.m % WARPGROUP_ROWS or tile.warps != WARPGROUP_WARPS * num_consumers or num_consumers > MAX_WARPGROUPS:
        refuse(f"tile.m {tile.m} with {tile.warps} mma warps", "64, 128, 192 or 256 rows, with 4 warps for every 64")
    if tile.n % 16:
        refuse(f"tile.n {tile.n} is not a multiple of 16", "multiples of 16 (one k-step of the PV product)")
    if tile.p_operand == "shared" and tile.n % 32:
        refuse(f"tile.n {tile.n} with p_operand shared", "multiples of 32 (whole panels of P)")
    need = register_need(tile.n, round_up(spec.head_dim_v, 16), tile.p_operand)
    _, limit = _registers(spec, num_consumers) or (0, ALL_REGISTERS)
    if need.total > limit:
        refuse(f"needs at least {need} registers per mma thread", f"{limit} with {num_consumers} mma warpgroups",
               "a smaller tile.n, or fewer warpgroups")


def _barriers(tile: TileRow, num_consumers: int, filters_nonfinite: bool) -> tuple[Barrier, ...]:
    q_stages = tile.q_stages * num_consumers
    return (
        Barrier("K_FULL", tile.stages, 1, "a tile of keys has landed"),
        Barrier("K_EMPTY", tile.stages, 0, "every consumer warp has released it", WARPGROUP_WARPS),
        Barrier("V_FULL", tile.stages, 1, "a tile of values has landed"),
        Barrier("V_EMPTY", tile.stages, 0, "every consumer warp has released it", WARPGROUP_WARPS),
        Barrier("Q_FULL", q_stages, 1, "the queries of a warpgroup have landed; [warpgroup][stage]"),
        Barrier("Q_EMPTY", q_stages, WARPGROUP_WARPS, "every warp of it is done with them; [warpgroup][stage]"),
        Barrier("WORK_FULL", WORK_STAGES, 1, "the next work tile has been published"),
        Barrier("WORK_EMPTY", WORK_STAGES, 1 + (FILTER_WARPS if filters_nonfinite else 0),
                "the other warps are done with it", WARPGROUP_WARPS),
        *((Barrier("V_LANDED", tile.stages, 1, "a tile of values has landed that not every row sees whole"),)
          if filters_nonfinite else ()),
    )


def _smem(spec: Spec, tile: TileRow, num_consumers: int, walked: bool, out_stages: int,
          barriers: tuple[Barrier, ...]) -> tuple[Region, ...]:
    q_stages = tile.q_stages * num_consumers
    return layout_regions((
        ("Q", q_stages * tile_bytes(WARPGROUP_ROWS, spec.head_dim_qk),
         f"[{num_consumers} warpgroups][{tile.q_stages} stages] of 64 queries"),
        ("K", tile.stages * tile_bytes(tile.n, spec.head_dim_qk), f"{tile.stages} stages of {tile.n} keys"),
        ("V", tile.stages * tile_bytes(tile.n, spec.head_dim_v), f"{tile.stages} stages of {tile.n} values"),
        *((("OUT", WARPGROUP_WARPS * num_consumers * out_stages * WARP_ROWS * 2 * panel_cols(spec.head_dim_v),
            f"[{WARPGROUP_WARPS * num_consumers} warps][{out_stages} panels] of {WARP_ROWS} rows of the output"),)
          if out_stages else ()),
        *((("P", num_consumers * tile_bytes(WARPGROUP_ROWS, tile.n), f"[{num_consumers} warpgroups] of 64 rows of P"),)
          if tile.p_operand == "shared" else ()),
        ("WORK", WORK_STAGES * (WORK_TILE_BYTES + num_consumers * WARPGROUP_BYTES),
         f"{WORK_STAGES} work tiles"),
        *((("TILES", round_up(4 * tile.stages * (num_consumers + 1), 16),
            f"[stages][{num_consumers} warpgroups] tile of keys in a stage; [stages] of values"),) if walked else ()),
        ("BARRIERS", 8 * sum(b.count for b in barriers), "the mbarriers"),
    ))


def _out_stages(spec: Spec, tile: TileRow) -> int:
    """Panels of shared memory that each warp has for its output. 0: none, because it goes where its queries were, which
    is possible when they are as wide, and the next ones have a stage of their own.
    """
    if spec.pack_gqa:
        return 1  # plain stores wait for nothing
    fits = (tile.q_stages > 1 and panel_cols(spec.head_dim_qk) == panel_cols(spec.head_dim_v)
            and smem_cols(spec.head_dim_v) <= smem_cols(spec.head_dim_qk))
    return 0 if fits else OUT_STAGES


def _tensor_maps(spec: Spec, tile: TileRow) -> tuple[TensorMap, ...]:
    return tuple(
        TensorMap(f"{name}_map", name, panel_cols(dim), rows, 2 * panel_cols(dim),
                  packed=spec.pack_gqa and name == "q")
        for name, dim, rows in (
            ("q", spec.head_dim_qk, WARPGROUP_ROWS), ("k", spec.head_dim_qk, tile.n), ("v", spec.head_dim_v, tile.n),
            ("out", spec.head_dim_v, WARP_ROWS)) if _has_map(spec, name))


def _has_map(spec: Spec, tensor: str) -> bool:
    return tensor != "out" or not spec.pack_gqa  # 16 packed rows are no box


def _wgmma_shapes(spec: Spec, tile: TileRow) -> tuple[WgmmaShape, ...]:
    element = DTYPES[spec.dtype].element
    return (*product_shapes(element, tile.n, "shared", "K_MAJOR", "K_MAJOR", spec.head_dim_qk),
            *product_shapes(element, round_up(spec.head_dim_v, 16), tile.p_operand, "K_MAJOR", "MN_MAJOR", tile.n))


def _constants(spec: Spec, tile: TileRow, num_consumers: int, out_stages: int, split: bool, pingpong: bool,
               filters_nonfinite: bool) -> tuple[Constant, ...]:
    cols_v = round_up(spec.head_dim_v, 16)
    constants = [
        Constant("WARPGROUPS", num_consumers, "of consumers, at most; a launch with few query rows uses fewer"),
        Constant("BLOCK_M", tile.m, "query rows per block, at most: 64 for each of them"),
        Constant("BLOCK_N", tile.n, "keys per tile"),
        Constant("NUM_STAGES", tile.stages, "K tiles, and V tiles, in shared memory"),
        Constant("Q_STAGES", tile.q_stages, "query tiles of each warpgroup"),
        Constant("WORK_STAGES", WORK_STAGES, "work tiles published ahead"),
        Constant("WORK_PREFETCH_TILES", WORK_PREFETCH_TILES, "key tiles left when a block fetches its next work tile"),
        Constant("NUM_THREADS", WARPGROUP_THREADS * (num_consumers + 1), "at most, with the producer warpgroup"),
        Constant("HEAD_DIM_QK", spec.head_dim_qk, "columns of q and k in device memory"),
        Constant("HEAD_DIM_V", spec.head_dim_v, "columns of v and out in device memory"),
        Constant("MMA_COLS_QK", round_up(spec.head_dim_qk, 16), "columns the QK product runs over, surplus zero"),
        Constant("MMA_COLS_V", cols_v, "columns of the output fragments, likewise"),
        Constant("SMEM_COLS_QK", smem_cols(spec.head_dim_qk), "columns stored of q and k: whole panels, surplus zero"),
        Constant("SMEM_COLS_V", smem_cols(spec.head_dim_v), "columns stored of v, likewise"),
    ]
    panels = smem_cols(spec.head_dim_v) // panel_cols(spec.head_dim_v)
    if spec.pack_gqa:
        stored = WARPGROUP_ROWS + 1, "more than there are: no box takes rows of heads"
    else:
        stored = (WARP_ROWS if spec.kv_layout == "varlen" else 1,
                  "of a warp's 16 that must exist for a box: it ends where the tensor does")
    constants += [
        Constant("OUT_STAGES", out_stages or panels, "panels of 16 rows of output that a warp has room for"),
        Constant("STORED_ROWS", *stored),
    ]
    if registers := _registers(spec, num_consumers):
        constants += [
            Constant("LOAD_REGISTERS", registers[0], "per producer thread"),
            Constant("MMA_REGISTERS", registers[1], "per consumer thread: what the producers leave of 64 Ki"),
        ]
    if filters_nonfinite:
        constants += [
            Constant("FILTER_WARPS", FILTER_WARPS, "of the producer warpgroup: those that filter NaNs"),
            Constant("FILTER_BARRIER", 1 + 2 * num_consumers, "the named barrier at which they meet"),
        ]
    if pingpong:
        constants.append(Constant("PINGPONG_BARRIER", 1, "first of the named barriers for pingpong, one per warpgroup"))
    if split:
        chunks, at_once = MERGED if cols_v % (8 * MERGED[0]) == 0 and not spec.pack_gqa else MERGED_FEW
        constants += [
            Constant("PARTIAL_FLOATS", num_consumers * (cols_v // 2 + 4) * WARPGROUP_THREADS,
                     "one split: output, row references and row sums of all consumer threads"),
            Constant("MERGED_CHUNKS", chunks, "8 columns each, of the rows that a warp adds up at a time"),
            Constant("SPLITS_AT_ONCE", at_once, "read together"),
            Constant("MERGE_BARRIER", 1 + num_consumers, "the named barrier: all warps have merged"),
        ]
    return tuple(constants)


def _params(spec: Spec, order: str, split: bool, pingpong: bool) -> tuple[Param, ...]:
    """Tensor maps first, for their alignment; then pointers and 64-bit strides, so that the struct has no holes."""
    maps = [Param(f"{name}_map", "tensor_map", f"of {name}: [head_dim, rows, heads, batch]")
            for name in ("q", "k", "v", "out") if _has_map(spec, name)]
    pointers = [*tensor_params(spec), *LAYOUTS[spec.kv_layout], *expressions.pointer_params(spec),
                Param("counters", "i32_out", "tile counter and arrival counts, zero between launches")]
    sizes = [*size_params(spec), Param("warpgroups", "i32", "of consumers, in this launch"),
             Param("block_rows", "divisor", "64 * warpgroups"),
             *((Param("pingpong_threads", "i32", "at a pingpong barrier: of two warpgroups, or of the only one"),)
               if pingpong else ()),
             Param("num_work_tiles", "i32", "query tiles of all heads and sequences, or their splits")]
    sizes += ROWS["pack_gqa" if spec.pack_gqa else "plain"]
    if split:
        pointers.append(Param("partials", "f32_out", "[num_tiles - full_tiles][max_splits] splits of PARTIAL_FLOATS"))
        sizes += [Param("num_tiles", "i32", "query tiles, over all heads and sequences"),
                  Param("full_tiles", "i32", "the first of them, which are not split"),
                  Param("tiles_per_split", "divisor", "key tiles of each split of the others, at most"),
                  Param("max_splits", "i32", "splits of a query tile, at most"),
                  Param("partial_tiles", "divisor", "of a split, those that hold rows: 16 each")]
    return (*maps, *pointers, *stride_params(spec), *sizes, *ORDERS[order], *expressions.slot_params(spec))
