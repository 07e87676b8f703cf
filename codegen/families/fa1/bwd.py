"""Lowers the backward of fa1: FlashAttention as first published (Dao et al. 2022, algorithm 4).

A block has one kv head of one sequence. Its outer loop goes over tiles of keys, whose dK and dV grow in registers while
the inner loop goes over the tiles of queries of all heads that share the keys. dQ of each query tile is read, added to
and written back in device memory at each visit: by one block, so without atomics, and with the same bits each time.
"""
from __future__ import annotations

from typing import TYPE_CHECKING

from flashgen.codegen.dtype import DTYPES
from flashgen.codegen.families.fa1.tiles import BWD_TILES
from flashgen.codegen.families.shared.backward_lower import gradient_params, gradient_sizes, gradient_strides
from flashgen.codegen.families.shared.backward_warps import step_constants, step_pieces
from flashgen.codegen.plan import Launch, Plan, Role
from flashgen.codegen.slots import MASKS, mask_choice
from flashgen.codegen.smem import end_of, layout_regions
from flashgen.codegen.target import Target
from flashgen.errors import PlanError

if TYPE_CHECKING:
    from flashgen.codegen.families.fa1.options import Spec


def lower_gradients(spec: Spec, target: Target) -> Plan:
    mask = mask_choice(spec.causal, False)
    tile = BWD_TILES.find(target.name, mask, spec.head_dim_qk, spec.head_dim_v)
    if tile is None:
        raise PlanError(f"no fa1 backward tile for head dims ({spec.head_dim_qk}, {spec.head_dim_v}) on {target.name}",
                        where=spec.variant, allowed="head dims up to (256, 256)")
    smem = layout_regions((
        *step_pieces(spec, tile),
        ("WORK", 32, "which sequence, head and key tile this block is at"),
        ("TILES", 16, "the query tiles that see its keys"),
    ))
    return Plan(
        variant=spec.variant, target=target.name, family="fa1", pass_="bwd", spec=spec.fields(),
        template="fa1/bwd.cu.j2", element=DTYPES[spec.dtype].element,
        constants=step_constants(spec, tile, target, "keys per tile of the outer loop"),
        slots=(("key_layout", "dense"), ("key_inputs", "dense"), ("queries", mask), ("dq_order", "vector")), flags=(),
        params=(*gradient_params(spec), *gradient_strides(spec), *gradient_sizes(spec), *MASKS[mask]), smem=smem,
        roles=(Role("mma", tile.warps),),
        launch=Launch(32 * tile.warps, tile.blocks_per_sm, end_of(smem), "x = num_heads_kv * batch"),
        register_usage_level=tile.register_usage_level, notes=(f"tile: {tile.source}",))
