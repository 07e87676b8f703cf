"""What a spec's expressions add to the plan of a gradients kernel. There a block has keys, and meets queries of several
heads; elements are worked out one by one, since scores lie transposed and the compiler finds what they share.
"""
from __future__ import annotations

from typing import TYPE_CHECKING

from flashgen.codegen.expr.cuda import KERNEL_NAMES, to_cuda
from flashgen.codegen.expr.grad import derivative
from flashgen.codegen.expr.tiles import tile_class
from flashgen.codegen.families.shared import expressions
from flashgen.codegen.plan import Expression, Param, Part
from flashgen.codegen.slots import MASKS
from flashgen.codegen.spec.expressions import SINK

if TYPE_CHECKING:
    from flashgen.codegen.spec.spec import Spec

# The query head is a value of the step, not of the block.
NAMES = KERNEL_NAMES | {"head_q": "head_q", "head_kv": "work.head_kv", "dim:num_heads_kv": "p.num_heads_kv"}


def mask_of(spec: Spec) -> str:
    """As of the forward; intervals are found tile by tile like all other expressions."""
    mask = expressions.mask_of(spec)
    return "expression" if mask == "interval" else mask


def slots_of(spec: Spec) -> tuple[tuple[str, str], ...]:
    """The choices of the slots that a spec's mask and score decide."""
    mask = mask_of(spec)
    return (("key_mask" if mask == "expression" else "queries", mask),
            *((("score_slope", "expression"),) if spec.expressions.score is not None else ()))


def printed(spec: Spec) -> tuple[Expression, ...]:
    found, trees = [], spec.expressions
    if trees.score is not None:
        slope = expressions.quick(derivative(trees.score, "score"))
        found.append(Expression("score", trees.score.text, whole=to_cuda(expressions.quick(trees.score), NAMES),
                                slope=to_cuda(slope, NAMES)))
    if trees.mask is not None and mask_of(spec) == "expression":
        of_tiles = tile_class(trees.mask, NAMES)
        found.append(Expression("mask", trees.mask.text, whole=to_cuda(trees.mask, NAMES), tile_class=of_tiles.text,
                                class_rows=tuple(Part(*part) for part in of_tiles.rows)))
    return tuple(found)


def flags_of(spec: Spec) -> tuple[tuple[str, bool], ...]:
    """As of the forward, less the sink, which lse has in it."""
    return tuple(flag for flag in expressions.flags_of(spec) if flag[0] != "sink")


def pointer_params(spec: Spec) -> list[Param]:
    return [param for param in expressions.pointer_params(spec) if param.name != f"user_{SINK.name}"]


def slot_params(spec: Spec) -> list[Param]:
    """Of the mask slot, and scalars among the spec's own parameters."""
    align = MASKS["expression"] if spec.expressions else ()
    users = [param for param in expressions.slot_params(spec) if param.name.startswith("user_")]
    return [*dict.fromkeys((*align, *MASKS[mask_of(spec)])), *users]
