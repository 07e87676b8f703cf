"""Lowers the forward of triton: FlashAttention-2 (Dao 2023), one block per query tile, head and sequence.

What a thread does is Triton's to decide, so a plan has no shared memory and no registers: it has tiles, warps and
stages, the parameters, and what is printed.
"""
from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from flashgen.codegen.dtype import DTYPES
from flashgen.codegen.families.shared import expressions as shared
from flashgen.codegen.families.shared.backward_expressions import mask_of
from flashgen.codegen.families.shared.params import size_params, stride_params, tensor_params
from flashgen.codegen.families.shared.tiles import Row
from flashgen.codegen.families.triton import expressions
from flashgen.codegen.families.triton.tiles import TILES
from flashgen.codegen.plan import Constant, Launch, Param, Plan, Role, Tile
from flashgen.codegen.slots import LAYOUTS, tiled_as
from flashgen.codegen.target import Target

if TYPE_CHECKING:
    from flashgen.codegen.families.triton.options import Spec

LEAST_COLUMNS = 16     # of an operand of tl.dot
_COUNTED = ("m_tiles",)  # kernels count these themselves, with the tile that they have
GATHERED_PAIRS = 8192  # of a tile whose score reads a tensor at a place of each: 64 KiB of addresses
CLASSES_AT_ONCE = 128  # tiles whose class a block works out at a time: one for each thread of four warps


def lower(spec: Spec, target: Target) -> Plan:
    mask = mask_of(spec)
    scratch = (Param("tiles", "i32_out", "[tiles of queries, tiles of keys], scratch: the numbers of those to visit"),)
    pointers = (*tensor_params(spec), *LAYOUTS[spec.kv_layout], *shared.pointer_params(spec),
                *(scratch if mask == "expression" else ()))
    sizes = (*size_params(spec), *((Param("n_tiles", "i32", "key tiles of the longest sequence, at most"),)
                                   if mask == "expression" else ()))
    return plan_of(spec, target, "fwd", pointers, (*stride_params(spec), *sizes),
                   "x = m_tiles * num_heads_q" + ("" if spec.kv_layout == "varlen" else " * batch"),
                   (("normalize", spec.normalize),))


def plan_of(spec: Spec, target: Target, template: str, pointers: tuple[Param, ...], sizes: tuple[Param, ...], grid: str,
            slots: tuple[tuple[str, str], ...] = ()) -> Plan:
    """The plan of any kernel of the family. `pointers` come first, `sizes` and what expressions read behind them."""
    mask, slopes = mask_of(spec), spec.pass_ != "fwd"
    row = TILES.find(target.name, tiled_as(mask), spec.head_dim_qk, spec.head_dim_v, TILES.kind_of(spec))
    # What adds to sums runs once: timing it would add to them.
    tried = () if row or spec.tile or expressions.adds(spec) else TILES.tried
    tile = TILES.overridden(spec, row or TILES.tried[0])
    if expressions.gathers(spec) and not spec.tile and tile.m * tile.n > GATHERED_PAIRS:
        tile = replace(tile, n=GATHERED_PAIRS // tile.m, source=(
            f"{tile.source}; fewer keys, as an address of 8 bytes for each pair passes through shared memory"))
    numbers = {param.name: param for param in (*expressions.slot_params(spec), *sizes) if param.name not in _COUNTED}
    return Plan(
        variant=spec.variant, target=target.name, family="triton", pass_=spec.pass_, spec=spec.fields(),
        template=f"triton/{template}.py.j2", element=DTYPES[spec.dtype].element,
        constants=_constants(spec, tile, bool(tried)),
        slots=(("positions", spec.kv_layout), ("visible", mask), *slots),
        flags=(("lse", spec.lse), ("varlen", spec.kv_layout == "varlen"), ("tuned", bool(tried)),
               *expressions.flags_of(spec)),
        params=(*pointers, *map(_plain, numbers.values())), smem=(),
        roles=(Role("mma", tile.warps),), launch=Launch(target.warp_lanes * tile.warps, 1, 0, grid),
        notes=(f"tile: {tile.source}",), expressions=expressions.printed(spec, slopes),
        tried=tuple(Tile(one.m, one.n, one.warps, one.stages) for one in tried))


def _plain(param: Param) -> Param:
    """Triton divides by its own means."""
    return replace(param, ctype="i32") if param.ctype == "divisor" else param


def _constants(spec: Spec, tile: Row, tuned: bool) -> tuple[Constant, ...]:
    least = ": the least of those that Triton times, which the grid is for" if tuned else ""
    return (
        Constant("BLOCK_M", tile.m, f"query rows of a tile{least}"),
        Constant("BLOCK_N", tile.n, f"keys of a tile{least}"),
        Constant("NUM_WARPS", tile.warps, "of a block"),
        Constant("NUM_STAGES", tile.stages, "tiles under way: Triton's pipeline of loads"),
        Constant("HEAD_DIM_QK", spec.head_dim_qk, "columns of q and k in device memory"),
        Constant("HEAD_DIM_V", spec.head_dim_v, "columns of v and out in device memory"),
        Constant("MMA_COLS_QK", _columns(spec.head_dim_qk), "columns of blocks: a power of two, surplus zero"),
        Constant("MMA_COLS_V", _columns(spec.head_dim_v), "likewise"),
        *((Constant("CLASSES_AT_ONCE", CLASSES_AT_ONCE, "tiles that are classified together"),)
          if mask_of(spec) == "expression" else ()),
    )


def _columns(head_dim: int) -> int:
    return max(LEAST_COLUMNS, 1 << (head_dim - 1).bit_length())
