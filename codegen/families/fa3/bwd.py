"""Lowers the kernel `gradients` of fa3's backward, for head dims up to 128: P anew, dK and dV, and sums for dQ.

A block owns 128 keys of a kv head; two consumer warpgroups hold dK and dV of 64 keys each in registers. The producer
warp brings query tiles of all query heads of the kv head; two more warps add dQ to device memory.
"""
from __future__ import annotations

from typing import TYPE_CHECKING

from flashgen.codegen.dtype import DTYPES
from flashgen.codegen.families.fa3 import bwd_wide
from flashgen.codegen.families.fa3.bwd_params import BLOCK_BYTES, CONSUMERS, CONSUMERS_BARRIER, gradients_params
from flashgen.codegen.families.fa3.bwd_tiles import TILES, BwdRow
from flashgen.codegen.families.shared.sums import turn_parts, turns_slot
from flashgen.codegen.plan import Barrier, Constant, Launch, Plan, Region, Role, TensorMap
from flashgen.codegen.slots import mask_choice
from flashgen.codegen.smem import end_of, layout_regions, panel_cols, round_up, smem_cols, tile_bytes
from flashgen.codegen.target import Target
from flashgen.codegen.warpgroup import WARP_ROWS, WARPGROUP_ROWS, WARPGROUP_THREADS, WARPGROUP_WARPS
from flashgen.codegen.wgmma import WgmmaShape, product_shapes
from flashgen.errors import PlanError

if TYPE_CHECKING:
    from flashgen.codegen.families.fa3.options import Spec

NARROW_HEAD_DIM = 128  # dK and dV of 64 keys of wider heads do not fit the registers of one warpgroup
REGISTERS = (24, 240)  # (load, mma) per thread of 64 Ki: dK, dV, S, dP and dS of 64 keys take more than 216
TERM_STAGES = 2        # lse and delta of a query tile: free as soon as dP is there, long before the next one's scores
TERM_BYTES = 16        # of a query: struct RowTerms
ONES_BYTES = 3 * 128   # three core matrices (row_terms.cuh)
DS_STAGES = 2          # dQ lags a step behind dS, so that a warpgroup may be half a step ahead of the other
PHASE_BARRIER = CONSUMERS_BARRIER + 1  # a named barrier; turns take the next one, too


def lower_gradients(spec: Spec, target: Target) -> Plan:
    if max(spec.head_dim_qk, spec.head_dim_v) > NARROW_HEAD_DIM:
        return bwd_wide.lower_gradients(spec, target)
    mask = mask_choice(spec.causal, spec.window)
    tile = TILES.find(target.name, mask, spec.head_dim_qk, spec.head_dim_v)
    if not target.features >= {"tma", "wgmma"} or tile is None:
        raise PlanError(f"no fa3 backward tile for head dims ({spec.head_dim_qk}, {spec.head_dim_v}) on {target.name}",
                        where=spec.variant, allowed="head dims up to (256, 256) on sm_90a")
    varlen = spec.kv_layout == "varlen"
    barriers = _barriers(tile, varlen)
    smem = _smem(spec, tile, mask, barriers)
    load_registers, mma_registers = REGISTERS
    return Plan(
        variant=spec.variant, target=target.name, family="fa3", pass_="bwd", spec=spec.fields(),
        template="fa3/bwd.cu.j2", element=DTYPES[spec.dtype].element, constants=_constants(spec, tile),
        slots=(("key_layout", spec.kv_layout), ("coordinates", spec.kv_layout), ("queries", mask),
               ("dq_order", "vector"), *turns_slot(spec, mask)),
        flags=(("varlen", varlen), ("deterministic", spec.deterministic),
               ("masks_tiles", mask != "full"), ("keeps_keys", mask == "full"),
               ("turns", tile.phase == "turns"), ("staggers", tile.phase != "turns"),
               ("staggers_after_ds", tile.phase == "after_ds"), ("staggers_after_dk", tile.phase == "after_dk")),
        params=gradients_params(spec, mask, "operand"), smem=smem,
        roles=(Role("load", WARPGROUP_WARPS, load_registers), Role("mma", WARPGROUP_WARPS * CONSUMERS, mma_registers)),
        launch=Launch(WARPGROUP_THREADS * (CONSUMERS + 1), 1, end_of(smem),
                      "x = n_tiles * num_heads_kv" + ("" if varlen else " * batch"), programmatic=True),
        tensor_maps=_tensor_maps(spec, tile), barriers=barriers, wgmma_shapes=_wgmma_shapes(spec, tile),
        register_usage_level=tile.register_usage_level, notes=(f"tile: {tile.source}",),
    )


def _barriers(tile: BwdRow, varlen: bool) -> tuple[Barrier, ...]:
    warps = WARPGROUP_WARPS * CONSUMERS
    return (
        Barrier("K_FULL", 1, 1, "the keys have landed"),
        Barrier("V_FULL", 1, 1, "the values have landed"),
        Barrier("Q_FULL", tile.stages, 1, "a query tile has landed"),
        Barrier("Q_EMPTY", tile.stages, warps, "every consumer warp has released it"),
        Barrier("TERMS_FULL", TERM_STAGES, 1, "the terms of a query tile have landed"),
        Barrier("TERMS_EMPTY", TERM_STAGES, warps, "every consumer warp has them in S and dP"),
        Barrier("DOUT_FULL", tile.dout_stages, 1, "a tile of dO has landed"),
        Barrier("DOUT_EMPTY", tile.dout_stages, warps, "every consumer warp has released it"),
        Barrier("DS_FULL", DS_STAGES, warps, "every consumer warp has stored its keys of dS"),
        Barrier("DS_EMPTY", DS_STAGES, warps, "every consumer warp has multiplied it with K"),
        Barrier("DQ_FULL", CONSUMERS, WARPGROUP_WARPS, "a warpgroup's part of dQ is in shared memory"),
        Barrier("DQ_EMPTY", CONSUMERS, 1, "it has been read from there"),
        *((Barrier("Q_LANDED", tile.stages, 1, "a query tile has landed that is cut by the end of its sequence"),
           Barrier("DOUT_LANDED", tile.dout_stages, 1, "a tile of dO, likewise")) if varlen else ()),
    )


def _smem(spec: Spec, tile: BwdRow, mask: str, barriers: tuple[Barrier, ...]) -> tuple[Region, ...]:
    m, n = tile.m, tile.n
    return layout_regions((
        ("K", tile_bytes(n, spec.head_dim_qk), f"{n} keys; at the end dK"),
        ("V", tile_bytes(n, spec.head_dim_v), f"{n} values; at the end dV"),
        ("Q", tile.stages * tile_bytes(m, spec.head_dim_qk), f"{tile.stages} stages of {m} queries"),
        ("DOUT", tile.dout_stages * tile_bytes(m, spec.head_dim_v), f"{tile.dout_stages} stages of {m} rows of dO"),
        ("DS", DS_STAGES * tile_bytes(m, n), f"{DS_STAGES} stages of dS: {m} queries, {n} keys"),
        ("DQ", CONSUMERS * WARPGROUP_ROWS * 4 * _dq_cols(spec, tile)[0],
         f"[{CONSUMERS} warpgroups] part of a tile of dQ, fp32 in fragment order"),
        ("TERMS", TERM_STAGES * TERM_BYTES * m, f"{TERM_STAGES} stages of what is added to S and dP"),
        ("ONES", ONES_BYTES, "the operand that selects it"),
        *((("TILES", round_up(4 * tile.stages, 16), "[stages] number of the query tile, and whether it is masked"),)
          if mask != "full" else ()),
        ("BLOCK", BLOCK_BYTES, "what the block has to do"),
        ("BARRIERS", 8 * sum(b.count for b in barriers), "the mbarriers"),
    ))


def _dq_cols(spec: Spec, tile: BwdRow) -> tuple[int, int, int]:
    """Columns of dQ that a warpgroup multiplies, and that the first and the second store. Each has 64 rows of a tile of
    128, or of 64 rows whole panels of columns: the product reads K from the start of a panel on. What the second
    multiplies beyond the last column is not stored."""
    columns = round_up(spec.head_dim_qk, 16)
    if tile.m > WARPGROUP_ROWS:
        return columns, columns, columns
    part = round_up(-(-columns // CONSUMERS), panel_cols(spec.head_dim_qk))
    return part, min(part, columns), max(columns - part, 0)


def _tensor_maps(spec: Spec, tile: BwdRow) -> tuple[TensorMap, ...]:
    return tuple(
        TensorMap(f"{name}_map", name, panel_cols(dim), rows, 2 * panel_cols(dim))
        for name, dim, rows in (
            ("q", spec.head_dim_qk, tile.m), ("k", spec.head_dim_qk, tile.n), ("v", spec.head_dim_v, tile.n),
            ("dout", spec.head_dim_v, tile.m), ("dk", spec.head_dim_qk, WARP_ROWS), ("dv", spec.head_dim_v, WARP_ROWS)))


def _wgmma_shapes(spec: Spec, tile: BwdRow) -> tuple[WgmmaShape, ...]:
    element = DTYPES[spec.dtype].element
    return (
        WgmmaShape("bf16", tile.m),                                                           # lse and delta
        *product_shapes(element, tile.m, "shared", "K_MAJOR", "K_MAJOR", spec.head_dim_qk),   # S = K Q^T
        *product_shapes(element, tile.m, "shared", "K_MAJOR", "K_MAJOR", spec.head_dim_v),    # dP = V dO^T
        *product_shapes(element, round_up(spec.head_dim_v, 16), "registers", "K_MAJOR", "MN_MAJOR", tile.m),   # dV
        *product_shapes(element, round_up(spec.head_dim_qk, 16), "registers", "K_MAJOR", "MN_MAJOR", tile.m),  # dK
        *product_shapes(element, _dq_cols(spec, tile)[0], "shared", "K_MAJOR", "MN_MAJOR", tile.n),            # dQ
    )


def _constants(spec: Spec, tile: BwdRow) -> tuple[Constant, ...]:
    dq_cols, first, second = _dq_cols(spec, tile)
    by_rows = tile.m > WARPGROUP_ROWS
    return (
        Constant("BLOCK_M", tile.m, "queries per tile"),
        Constant("BLOCK_N", tile.n, "keys per block: 64 for each consumer warpgroup"),
        Constant("Q_STAGES", tile.stages, "query tiles in shared memory"),
        Constant("DOUT_STAGES", tile.dout_stages, "tiles of dO, likewise"),
        Constant("TERM_STAGES", TERM_STAGES, "query tiles' lse and delta, likewise"),
        Constant("NUM_THREADS", WARPGROUP_THREADS * (CONSUMERS + 1), "with the producer warpgroup"),
        Constant("HEAD_DIM_QK", spec.head_dim_qk, "columns of q and k in device memory"),
        Constant("HEAD_DIM_V", spec.head_dim_v, "columns of v and dO in device memory"),
        Constant("MMA_COLS_QK", round_up(spec.head_dim_qk, 16), "columns of q, k and dK in products, surplus zero"),
        Constant("MMA_COLS_V", round_up(spec.head_dim_v, 16), "columns of v, dO and dV, likewise"),
        Constant("SMEM_COLS_QK", smem_cols(spec.head_dim_qk), "columns stored of q and k: whole panels, surplus zero"),
        Constant("SMEM_COLS_V", smem_cols(spec.head_dim_v), "columns stored of v and dO, likewise"),
        Constant("DQ_COLS", dq_cols, "columns of dQ that a warpgroup multiplies, for 64 rows: whole panels of K"),
        Constant("DQ_COLS_FIRST", first, "of them, those that the first warpgroup adds to device memory"),
        Constant("DQ_COLS_SECOND", second, "of them, those that the second one adds"),
        Constant("DQ_COL_STEP", 0 if by_rows else dq_cols, "columns from the first warpgroup's part to the second's"),
        Constant("DQ_ROW_STEP", WARPGROUP_ROWS if by_rows else 0, "rows likewise"),
        Constant("STORED_ROWS", WARP_ROWS if spec.kv_layout == "varlen" else 1,
                 "of a warp's 16 that must exist for a box: it ends where the tensor does"),
        Constant("LOAD_REGISTERS", REGISTERS[0], "per thread of the producer warpgroup"),
        Constant("MMA_REGISTERS", REGISTERS[1], "per consumer thread: what the producers leave of 64 Ki"),
        Constant("CONSUMERS_BARRIER", CONSUMERS_BARRIER, "the named barrier of both consumer warpgroups"),
        *turn_parts(spec, CONSUMERS),
        Constant("TURN_BARRIER", PHASE_BARRIER, "first of two named barriers, one per warpgroup: its turn to multiply")
        if tile.phase == "turns" else
        Constant("STAGGER_BARRIER", PHASE_BARRIER, "the named barrier at which the second warpgroup waits to start"),
    )
