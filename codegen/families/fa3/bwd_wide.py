"""Lowers the gradients of fa3's backward for head dims above 128: sm_90a.

A block owns a tile of 64 keys. One warpgroup makes S, P and dV, the other dP, dS and dK; P goes from the first to the
second through shared memory, dS to both. Each makes dQ of some columns, and adds it to sums in device memory.
"""
from __future__ import annotations

from typing import TYPE_CHECKING

from flashgen.codegen.dtype import DTYPES
from flashgen.codegen.families.fa3.bwd_params import BLOCK_BYTES, CONSUMERS, CONSUMERS_BARRIER, gradients_params
from flashgen.codegen.families.shared.sums import turn_parts, turns_slot
from flashgen.codegen.plan import Barrier, Constant, Launch, Plan, Region, Role, TensorMap
from flashgen.codegen.slots import mask_choice
from flashgen.codegen.smem import ELEMENT_BYTES, end_of, layout_regions, round_up
from flashgen.codegen.target import Target
from flashgen.codegen.warpgroup import WARP_ROWS, WARPGROUP_ROWS, WARPGROUP_THREADS, WARPGROUP_WARPS
from flashgen.codegen.wgmma import WgmmaShape, product_shapes
from flashgen.errors import PlanError

if TYPE_CHECKING:
    from flashgen.codegen.families.fa3.options import Spec

BLOCK = WARPGROUP_ROWS  # queries, and keys: more of either would not leave dK, dV and dQ their registers
STAGES = 2              # of all that passes between warps: shared memory is full with them at D256
PANEL_COLS = 64         # of 128-byte rows; narrower panels would save loads of zeros, and cut dQ at fewer places
REGISTERS = (24, 240)   # (load, mma): with more for the loads the compiler falls back to fewer, and spills
FLOAT_BYTES = 4
# (P of which dS is made, its stages), of which the first that fits is taken. The error of dS is a fifth less with fp32.
# At D256 one stage of fp32 would fit, too. Two stages of elements are what was timed there.
P_PRECISIONS = (("fp32", 2), ("element", 2))


def lower_gradients(spec: Spec, target: Target) -> Plan:
    dims = f"({spec.head_dim_qk}, {spec.head_dim_v})"
    if not target.features >= {"tma", "wgmma"} or max(spec.head_dim_qk, spec.head_dim_v) > 256:
        raise PlanError(f"no fa3 backward for head dims {dims} on {target.name}", where=spec.variant,
                        allowed="head dims up to (256, 256) on sm_90a")
    if spec.head_dim_qk <= PANEL_COLS:
        raise PlanError(f"no fa3 backward for head dims {dims}: two warpgroups share the columns of dQ",
                        where=spec.variant, allowed=f"head_dim_qk above {PANEL_COLS} where one is above 128")
    varlen = spec.kv_layout == "varlen"
    mask = mask_choice(spec.causal, spec.window)
    barriers = _barriers(varlen)
    p_precision, p_stages, smem = next(
        (precision, stages, smem) for precision, stages in P_PRECISIONS
        if end_of(smem := _smem(spec, precision, stages, barriers)) <= target.smem_per_block_bytes)
    load_registers, mma_registers = REGISTERS
    return Plan(
        variant=spec.variant, target=target.name, family="fa3", pass_="bwd", spec=spec.fields(),
        template="fa3/bwd_wide.cu.j2", element=DTYPES[spec.dtype].element,
        constants=_constants(spec, p_precision, p_stages),
        slots=(("key_layout", spec.kv_layout), ("coordinates", spec.kv_layout), ("queries", mask),
               ("dq_order", "vector"), ("p_precision", p_precision), *turns_slot(spec, mask)),
        flags=(("varlen", varlen), ("deterministic", spec.deterministic), ("masks_tiles", True)),
        params=gradients_params(spec, mask, "numbers"), smem=smem,
        roles=(Role("load", WARPGROUP_WARPS, load_registers),
               Role("mma", WARPGROUP_WARPS * CONSUMERS, mma_registers)),
        launch=Launch(WARPGROUP_THREADS * (CONSUMERS + 1), 1, end_of(smem),
                      "x = n_tiles * num_heads_kv" + ("" if varlen else " * batch"), programmatic=True),
        tensor_maps=_tensor_maps(spec), barriers=barriers, wgmma_shapes=_wgmma_shapes(spec),
        notes=("tile: 64 queries x 64 keys: dK and dV of 64 keys take 128 registers of each mma thread at D256",),
    )


def dq_split(cols: int) -> int:
    """Columns of dQ that the first warpgroup makes: whole panels, about half."""
    return PANEL_COLS * max(1, round(cols / 2 / PANEL_COLS))


def _cols(head_dim: int) -> int:
    return round_up(head_dim, PANEL_COLS)


def _tile_bytes(head_dim: int) -> int:
    return BLOCK * _cols(head_dim) * ELEMENT_BYTES


def _p_bytes(p_precision: str) -> int:
    return BLOCK * BLOCK * (ELEMENT_BYTES if p_precision == "element" else FLOAT_BYTES)


def _barriers(varlen: bool) -> tuple[Barrier, ...]:
    warps = WARPGROUP_WARPS
    return (
        Barrier("K_FULL", 1, 1, "the keys have landed"),
        Barrier("V_FULL", 1, 1, "the values have landed"),
        Barrier("Q_FULL", STAGES, 1, "a tile of queries has landed, with its -lse"),
        Barrier("Q_EMPTY", STAGES, CONSUMERS * warps, "every mma warp is done with it"),
        Barrier("DOUT_FULL", STAGES, 1, "a tile of dO has landed, with its -delta"),
        Barrier("DOUT_EMPTY", STAGES, CONSUMERS * warps, "every mma warp is done with it"),
        Barrier("P_FULL", STAGES, warps, "P is written"),
        Barrier("P_EMPTY", STAGES, warps, "the other warpgroup has read P"),
        Barrier("DS_FULL", STAGES, warps, "dS is written"),
        Barrier("DS_EMPTY", STAGES, CONSUMERS * warps, "dQ of this dS is there"),
        *((Barrier("Q_LANDED", STAGES, 1, "a query tile has landed that is cut by the end of its sequence"),
           Barrier("DOUT_LANDED", STAGES, 1, "a tile of dO, likewise")) if varlen else ()),
    )


def _smem(spec: Spec, p_precision: str, p_stages: int, barriers: tuple[Barrier, ...]) -> tuple[Region, ...]:
    block_bytes = BLOCK * BLOCK * ELEMENT_BYTES
    return layout_regions((
        ("K", _tile_bytes(spec.head_dim_qk), f"{BLOCK} keys; at the end dK"),
        ("V", _tile_bytes(spec.head_dim_v), f"{BLOCK} values; at the end dV"),
        ("Q", STAGES * _tile_bytes(spec.head_dim_qk), f"{STAGES} stages of {BLOCK} queries"),
        ("DOUT", STAGES * _tile_bytes(spec.head_dim_v), f"{STAGES} stages of {BLOCK} rows of dO"),
        ("DS", STAGES * block_bytes, f"{STAGES} stages of dS, a row for each query"),
        ("P", p_stages * _p_bytes(p_precision), f"{p_stages} stages of P, in the order of fragments"),
        ("LSE", STAGES * BLOCK * FLOAT_BYTES, f"{STAGES} stages of -lse in powers of two"),
        ("DELTA", STAGES * BLOCK * FLOAT_BYTES, f"{STAGES} stages of -delta"),
        ("TILES", round_up(4 * STAGES, 16), "which query tile is in a stage, and whether it is masked"),
        ("BLOCK", BLOCK_BYTES, "what the block has to do"),
        ("BARRIERS", 8 * sum(b.count for b in barriers), "the mbarriers"),
    ))


def _constants(spec: Spec, p_precision: str, p_stages: int) -> tuple[Constant, ...]:
    cols = round_up(spec.head_dim_qk, 16)
    load_registers, mma_registers = REGISTERS
    return (
        Constant("BLOCK_M", BLOCK, "queries per tile"),
        Constant("BLOCK_N", BLOCK, "keys per block"),
        Constant("Q_STAGES", STAGES, "query tiles in shared memory"),
        Constant("DOUT_STAGES", STAGES, "tiles of dO, likewise"),
        Constant("P_STAGES", p_stages, "tiles of P on their way from one warpgroup to the other"),
        Constant("P_BYTES", _p_bytes(p_precision), f"of one, {p_precision}"),
        Constant("NUM_THREADS", WARPGROUP_THREADS * (CONSUMERS + 1), "with the producer warpgroup"),
        Constant("LOAD_WARPS", WARPGROUP_WARPS, "of the producer warpgroup"),
        Constant("HEAD_DIM_QK", spec.head_dim_qk, "columns of q and k in device memory"),
        Constant("HEAD_DIM_V", spec.head_dim_v, "columns of v and dout in device memory"),
        Constant("MMA_COLS_QK", cols, "columns of the products with q and k, surplus zero"),
        Constant("MMA_COLS_V", round_up(spec.head_dim_v, 16), "columns of the products with v and dout, likewise"),
        Constant("SMEM_COLS_QK", _cols(spec.head_dim_qk), "columns stored of q and k: whole panels, surplus zero"),
        Constant("SMEM_COLS_V", _cols(spec.head_dim_v), "columns stored of v and dout, likewise"),
        Constant("DQ_COLS_FIRST", dq_split(cols), "columns of dQ that the first warpgroup makes: whole panels of K"),
        Constant("DQ_COLS_SECOND", cols - dq_split(cols), "those of the second, behind them"),
        Constant("STORED_ROWS", WARP_ROWS if spec.kv_layout == "varlen" else 1,
                 "of a warp's 16 that must exist for a box: it ends where the tensor does"),
        Constant("LOAD_REGISTERS", load_registers, "per thread of the producer warpgroup"),
        Constant("MMA_REGISTERS", mma_registers, "per consumer thread: what the producers leave of 64 Ki"),
        Constant("CONSUMERS_BARRIER", CONSUMERS_BARRIER, "the named barrier of both consumer warpgroups"),
        *turn_parts(spec, CONSUMERS * WARPGROUP_WARPS),
    )


def _tensor_maps(spec: Spec) -> tuple[TensorMap, ...]:
    return tuple(TensorMap(f"{name}_map", name, PANEL_COLS, rows, 2 * PANEL_COLS)
                 for name, rows in (("q", BLOCK), ("k", BLOCK), ("v", BLOCK), ("dout", BLOCK), ("dk", WARP_ROWS),
                                    ("dv", WARP_ROWS)))


def _wgmma_shapes(spec: Spec) -> tuple[WgmmaShape, ...]:
    element = DTYPES[spec.dtype].element
    cols_qk, cols_v = round_up(spec.head_dim_qk, 16), round_up(spec.head_dim_v, 16)
    split = dq_split(cols_qk)
    return (*product_shapes(element, BLOCK, "shared", "K_MAJOR", "K_MAJOR", cols_qk),
            *product_shapes(element, BLOCK, "shared", "K_MAJOR", "K_MAJOR", cols_v),
            *product_shapes(element, cols_v, "registers", "K_MAJOR", "MN_MAJOR", BLOCK),
            *product_shapes(element, cols_qk, "registers", "K_MAJOR", "MN_MAJOR", BLOCK),
            *product_shapes(element, split, "shared", "K_MAJOR", "MN_MAJOR", BLOCK),
            *product_shapes(element, cols_qk - split, "shared", "K_MAJOR", "MN_MAJOR", BLOCK))
