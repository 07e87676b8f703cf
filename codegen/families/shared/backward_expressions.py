"""What a spec's expressions add to the plan of a gradients kernel. There a block has keys, and meets queries of several
heads; elements are worked out one by one, since scores lie transposed and the compiler finds what they share.
"""
from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from flashgen.codegen.expr.cuda import KERNEL_NAMES, PARAM_PREFIX, to_cuda
from flashgen.codegen.expr.grad import derivative, tensor_derivative
from flashgen.codegen.expr.tiles import tile_class
from flashgen.codegen.expr.tree import Expr, Index, Name, const, walk
from flashgen.codegen.families.shared import expressions
from flashgen.codegen.plan import Expression, Param, Part, Term
from flashgen.codegen.slots import MASKS
from flashgen.codegen.spec.expressions import SINK

if TYPE_CHECKING:
    from flashgen.codegen.spec.spec import Spec

_ONE = to_cuda(const(1.0), KERNEL_NAMES)
_GRADIENT = "_gradient"  # as no parameter can be called
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


def slopes_of(spec: Spec) -> tuple[tuple[str, str], ...]:
    """The choice of the slot `slopes`, of a spec with a score. Gradients of parameters need dS without slopes, and
    dropout marks P by its sign."""
    if spec.expressions.score is None:
        return ()
    return (("slopes", "times_ds" if gradients_of(spec) else "times_ds_alone" if spec.dropout else "times_p"),)


def printed(spec: Spec) -> tuple[Expression, ...]:
    found, trees = [], spec.expressions
    if trees.score is not None:
        slope = expressions.quick(derivative(trees.score, "score"))
        found.append(Expression("score", trees.score.text, whole=to_cuda(expressions.quick(trees.score), NAMES),
                                slope=to_cuda(slope, NAMES), terms=_terms(trees.score)))
    if trees.mask is not None and mask_of(spec) == "expression":
        of_tiles = tile_class(trees.mask, NAMES)
        found.append(Expression("mask", trees.mask.text, whole=to_cuda(trees.mask, NAMES), tile_class=of_tiles.text,
                                class_rows=tuple(Part(*part) for part in of_tiles.rows)))
    return tuple(found)


def flags_of(spec: Spec) -> tuple[tuple[str, bool], ...]:
    """As of the forward, less the sink, which lse has in it."""
    own = (("parameter_gradients", True),) if gradients_of(spec) else ()
    return (*(flag for flag in expressions.flags_of(spec) if flag[0] != "sink"), *own)


def gradients_of(spec: Spec) -> list[str]:
    """The parameters that point at gradients of tensors."""
    return list(dict.fromkeys(term.gradient for found in printed(spec) for term in found.terms))


def keeps_slopes(spec: Spec) -> bool:
    """Whether slopes that are not 1 wait for dS: it is added to gradients of tensors first, or has dropout's."""
    return any((found.terms or spec.dropout) and found.slope not in ("", _ONE) for found in printed(spec))


def pointer_params(spec: Spec) -> list[Param]:
    read = [param for param in expressions.pointer_params(spec) if param.name != f"user_{SINK.name}"]
    return [*read, *(Param(name, "f32_sum", "the gradient of that; null: not wanted") for name in gradients_of(spec))]


def _terms(score: Expr) -> tuple[Term, ...]:
    """Of all float tensors that a score reads."""
    found: list[Term] = []
    for name in sorted({node.param.name for node in walk(score) if isinstance(node, Index) and node.type == "float"}):
        for term in tensor_derivative(score, name):
            tensor = next(node.param for node in walk(score) if isinstance(node, Index) and node.param.name == name)
            place = to_cuda(Index(replace(tensor, name=_GRADIENT), term.indices), NAMES)
            depends = {leaf.name for index in term.indices for leaf in walk(index) if isinstance(leaf, Name)}
            each = depends & {"q_pos", "kv_pos", "score"}
            found.append(Term(f"term_{len(found)}", f"d_{name}", to_cuda(expressions.quick(term.multiplier), NAMES),
                              place.replace(PARAM_PREFIX + _GRADIENT, f"p.d_{name}"),
                              "SumOfEach" if each else "SumOfWarp"))
    return tuple(found)


def slot_params(spec: Spec) -> list[Param]:
    """Of the mask slot, and scalars among the spec's own parameters."""
    align = MASKS["expression"] if spec.expressions else ()
    users = [param for param in expressions.slot_params(spec) if param.name.startswith("user_")]
    return [*dict.fromkeys((*align, *MASKS[mask_of(spec)])), *users]
