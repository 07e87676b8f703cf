"""Lowers the fa2 family: FlashAttention-2 (Dao 2023) on mma.sync, ldmatrix and cp.async; sm_80 and later.

One block owns BLOCK_M query rows of one head and sequence; each warp owns 16 * M_FRAGMENTS of them, so a row's softmax
stays inside a quad of lanes. K and V tiles of BLOCK_N rows pass through a ring of NUM_STAGES stages.
"""
from __future__ import annotations

from typing import TYPE_CHECKING

from flashgen.codegen.dtype import DTYPES
from flashgen.codegen.families.fa2 import dropout
from flashgen.codegen.families.fa2.tiles import TILES, TileRow
from flashgen.codegen.families.shared import expressions
from flashgen.codegen.families.shared.params import size_params, stride_params, tensor_params
from flashgen.codegen.plan import Constant, Launch, Param, Plan, Role, registers_per_thread_max
from flashgen.codegen.slots import LAYOUTS, tiled_as
from flashgen.codegen.smem import end_of, layout_regions, round_up, smem_cols, tile_bytes
from flashgen.codegen.target import Target
from flashgen.errors import PlanError

if TYPE_CHECKING:
    from flashgen.codegen.spec.spec import Spec

# Registers beside accumulators and operand fragments: addresses, loop state, one B fragment in flight. A floor: below
# it a kernel certainly spills, so such a plan is refused before the compiler sees it.
OVERHEAD_REGISTERS = 24


def lower(spec: Spec, target: Target) -> Plan:
    mask = expressions.mask_of(spec)
    row = TILES.find(target.name, tiled_as(mask), spec.head_dim_qk, spec.head_dim_v)
    if not target.features >= {"cp_async", "ldmatrix", "mma_sync"} or row is None:
        raise PlanError(f"no fa2 tile for head dims ({spec.head_dim_qk}, {spec.head_dim_v}) on {target.name}",
                        where=spec.variant, allowed="head dims up to (256, 256)")
    tile = TILES.overridden(spec, row)
    cols_qk, cols_v = round_up(spec.head_dim_qk, 16), round_up(spec.head_dim_v, 16)
    _check_tile(spec, tile, target, cols_qk, cols_v)
    smem = layout_regions((
        ("Q", tile_bytes(tile.m, max(spec.head_dim_qk, spec.head_dim_v)), "the query tile; at the end the output"),
        ("K", tile.stages * tile_bytes(tile.n, spec.head_dim_qk), f"{tile.stages} stages of {tile.n} keys"),
        ("V", tile.stages * tile_bytes(tile.n, spec.head_dim_v), f"{tile.stages} stages of {tile.n} values"),
        ("WORK", 32, "which sequence, head and query tile this block has"),
        *((("TILES", 16 * -(-tile.stages // 4), "which tile each stage holds"),) if mask == "expression" else ()),
    ))
    return Plan(
        variant=spec.variant, target=target.name, family="fa2", pass_="fwd", spec=spec.fields(),
        template="fa2/fwd.cu.j2", element=DTYPES[spec.dtype].element,
        constants=_constants(spec, tile, cols_qk, cols_v, target),
        slots=(("layout", spec.kv_layout), ("inputs", spec.kv_layout), *expressions.slots_of(spec),
               ("query", tile.q_operand), *dropout.slots_of(spec)),
        flags=(("lse", spec.lse), ("varlen", spec.kv_layout == "varlen"), ("softmax", spec.normalize == "softmax"),
               ("q_in_shared", tile.q_operand == "shared"), ("tile_words", mask == "expression"),
               *expressions.flags_of(spec), *dropout.flags_of(spec)),
        params=_params(spec), smem=smem, roles=(Role("mma", tile.warps),),
        launch=Launch(32 * tile.warps, tile.blocks_per_sm, end_of(smem),
                      "x = m_tiles * num_heads_q" + ("" if spec.kv_layout == "varlen" else " * batch")),
        register_usage_level=tile.register_usage_level,
        notes=(f"tile: {tile.source}",), allowed_spill_bytes=dropout.allowed_spill_bytes(spec),
        expressions=expressions.printed(spec),
    )


def _check_tile(spec: Spec, tile: TileRow, target: Target, cols_qk: int, cols_v: int) -> None:
    def refuse(what: str, allowed: str, nearest: str = "") -> None:
        raise PlanError(what, where=f"{spec.variant}.{target.name}", allowed=allowed, nearest=nearest)

    if tile.m % (16 * tile.warps):
        refuse(f"tile.m {tile.m} does not divide into 16-row fragments for {tile.warps} warps",
               f"multiples of {16 * tile.warps}", f"tile.m {max(1, tile.m // (16 * tile.warps)) * 16 * tile.warps}")
    if tile.n % 16:
        refuse(f"tile.n {tile.n} is not a multiple of 16", "multiples of 16 (one k-step of the PV product)")
    fragments = tile.m // (16 * tile.warps)
    scores, out = tile.n // 8 * 4, cols_v // 8 * 4
    query = cols_qk // 16 * 4 if tile.q_operand == "registers" else 4
    needed = fragments * (scores + out + query) + OVERHEAD_REGISTERS
    limit = registers_per_thread_max(32 * tile.warps, tile.blocks_per_sm, target)
    if needed > limit:
        refuse(f"needs at least {fragments} * (scores {scores} + output {out} + query {query}) + "
               f"{OVERHEAD_REGISTERS} = {needed} registers per thread",
               f"{limit} with {tile.blocks_per_sm} blocks of {32 * tile.warps} threads per SM",
               "a smaller tile.n or tile.m, more warps, or fewer blocks_per_sm")


def _constants(spec: Spec, tile: TileRow, cols_qk: int, cols_v: int, target: Target) -> tuple[Constant, ...]:
    threads = 32 * tile.warps
    registers = registers_per_thread_max(threads, tile.blocks_per_sm, target)
    return (
        Constant("BLOCK_M", tile.m, "query rows per block"),
        Constant("BLOCK_N", tile.n, "keys per tile"),
        Constant("NUM_STAGES", tile.stages, f"K and V tiles in the ring, {tile.stages - 1} in flight"),
        Constant("NUM_THREADS", threads, f"{tile.warps} warps"),
        Constant("MIN_BLOCKS_PER_SM", tile.blocks_per_sm, f"leaves {registers} registers per thread"),
        Constant("M_FRAGMENTS", tile.m // (16 * tile.warps), "16-row fragments per warp: a B fragment serves them all"),
        Constant("HEAD_DIM_QK", spec.head_dim_qk, "columns of q and k in device memory"),
        Constant("HEAD_DIM_V", spec.head_dim_v, "columns of v and out in device memory"),
        Constant("MMA_COLS_QK", cols_qk, "columns the QK product runs over: whole 16-column steps, surplus zero"),
        Constant("MMA_COLS_V", cols_v, "columns of the output fragments, likewise"),
        Constant("SMEM_COLS_QK", smem_cols(spec.head_dim_qk), "columns stored of q and k: whole panels, surplus zero"),
        Constant("SMEM_COLS_V", smem_cols(spec.head_dim_v), "columns stored of v and out, likewise"),
    )


def _params(spec: Spec) -> tuple[Param, ...]:
    """Pointers and 64-bit strides first, so that the struct has no holes."""
    return (*tensor_params(spec), *LAYOUTS[spec.kv_layout], *expressions.pointer_params(spec),
            *dropout.pointer_params(spec), *stride_params(spec), *size_params(spec), *expressions.slot_params(spec),
            *dropout.scalar_params(spec))
