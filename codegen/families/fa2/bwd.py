"""Lowers the backward of the fa2 family: FlashAttention-2 (Dao 2023) on mma.sync, ldmatrix and cp.async.

One block owns BLOCK_N keys of one kv head and sequence, whose dK and dV grow in registers while the block walks along
the query tiles that see the keys, and along the query heads that share them. Scores are made transposed, keys as rows:
P and dS then lie in shared memory as dV and dK read them, and dQ reads dS by transposing ldmatrix.
"""
from __future__ import annotations

from typing import TYPE_CHECKING

from flashgen.codegen.dtype import DTYPES
from flashgen.codegen.families.fa2 import dropout
from flashgen.codegen.families.fa2.bwd_tiles import BWD_TILES, SLOPES
from flashgen.codegen.families.shared import backward_expressions as expressions
from flashgen.codegen.families.shared.backward_lower import gradient_params, gradient_sizes, gradient_strides
from flashgen.codegen.families.shared.backward_warps import step_constants, step_pieces
from flashgen.codegen.families.shared.sums import turn_parts, turns_slot
from flashgen.codegen.plan import Launch, Plan, Role
from flashgen.codegen.slots import tiled_as
from flashgen.codegen.smem import end_of, layout_regions
from flashgen.codegen.target import Target
from flashgen.errors import PlanError

if TYPE_CHECKING:
    from flashgen.codegen.spec.spec import Spec


# Of a thread, where the spec has expressions, since any must compile: some registers of the plain kernel's 255 wait in
# L1 while an expression is worked out, which costs less than narrower tiles would.
SPILL_BYTES = 1024
TURNS_SPILL_BYTES = 8  # of a thread that takes turns: causal bf16 of head dim 128 for sm_90, under NVRTC 13.0


def lower_gradients(spec: Spec, target: Target) -> Plan:
    mask = expressions.mask_of(spec)
    asked = target.name, tiled_as(mask), spec.head_dim_qk, spec.head_dim_v
    tile = (BWD_TILES.find(*asked, SLOPES) if expressions.keeps_slopes(spec) else None) or BWD_TILES.find(*asked)
    if not target.features >= {"cp_async", "ldmatrix", "mma_sync"} or tile is None:
        raise PlanError(f"no fa2 backward tile for head dims ({spec.head_dim_qk}, {spec.head_dim_v}) on {target.name}",
                        where=spec.variant, allowed="head dims up to (256, 256)")
    smem = layout_regions((
        *step_pieces(spec, tile),
        ("WORK", 32, "which sequence, head and key tile this block has"),
        ("TILES", 48 if mask == "expression" else 16, "the query tiles that see its keys"),
    ))
    return Plan(
        variant=spec.variant, target=target.name, family="fa2", pass_="bwd", spec=spec.fields(),
        template="fa2/bwd.cu.j2", element=DTYPES[spec.dtype].element,
        constants=step_constants(spec, tile, target, "keys per block", turn_parts(spec, tile.warps)),
        slots=(("key_layout", spec.kv_layout), ("key_inputs", spec.kv_layout), *expressions.slots_of(spec),
               ("dq_order", "component"), ("steps", "classes" if mask == "expression" else "ranges"),
               *expressions.slopes_of(spec), *turns_slot(spec, mask), *dropout.slots_of(spec)),
        flags=(("tile_words", mask == "expression"), ("deterministic", spec.deterministic),
               *expressions.flags_of(spec), *dropout.flags_of(spec)),
        params=(*gradient_params(spec), *expressions.pointer_params(spec), *dropout.pointer_params(spec),
                *gradient_strides(spec), *gradient_sizes(spec), *expressions.slot_params(spec),
                *dropout.scalar_params(spec)),
        smem=smem, roles=(Role("mma", tile.warps),),
        launch=Launch(32 * tile.warps, tile.blocks_per_sm, end_of(smem),
                      "x = n_tiles * num_heads_kv" + ("" if spec.kv_layout == "varlen" else " * batch")),
        register_usage_level=tile.register_usage_level, notes=(f"tile: {tile.source}",),
        allowed_spill_bytes=(SPILL_BYTES * bool(spec.expressions) + TURNS_SPILL_BYTES * spec.deterministic
                             + dropout.allowed_spill_bytes(spec)),
        expressions=expressions.printed(spec))
