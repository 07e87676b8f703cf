"""What a spec's expressions add to the plan of a Triton kernel: text, parameters and flags."""
from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from flashgen.codegen.expr.grad import derivative, tensor_derivative
from flashgen.codegen.expr.tiles import TRITON, tile_class
from flashgen.codegen.expr.tree import Expr, Index, Name, walk
from flashgen.codegen.expr.triton import PARAM_PREFIX, TRITON_NAMES, to_triton
from flashgen.codegen.families.shared import expressions
from flashgen.codegen.families.shared.backward_expressions import gradients_of, mask_of
from flashgen.codegen.plan import Expression, Param, Part, Term
from flashgen.codegen.slots import MASKS, SCORES

if TYPE_CHECKING:
    from flashgen.codegen.spec.spec import Spec


def printed(spec: Spec, slopes: bool = False) -> tuple[Expression, ...]:
    """`slopes`: with the derivative of the score, for the backward."""
    found, trees = [], spec.expressions
    if trees.score is not None:
        slope = to_triton(expressions.quick(derivative(trees.score, "score"))) if slopes else ""
        whole = to_triton(expressions.quick(trees.score))
        found.append(Expression("score", trees.score.text, whole=whole, slope=slope,
                                terms=_terms(trees.score) if slopes else ()))
    if trees.mask is not None and mask_of(spec) == "expression":
        of_tiles = tile_class(trees.mask, TRITON_NAMES, TRITON)
        found.append(Expression("mask", trees.mask.text, whole=to_triton(trees.mask), tile_class=of_tiles.text,
                                class_rows=tuple(Part(*part) for part in of_tiles.rows)))
    return tuple(found)


def _terms(score: Expr) -> tuple[Term, ...]:
    """What the score adds to gradients of the float tensors that it reads. `sums` are of templates/triton/slope.py.j2.
    """
    found: list[Term] = []
    for param in sorted({node.param for node in walk(score) if isinstance(node, Index) and node.type == "float"},
                        key=lambda param: param.name):
        for term in tensor_derivative(score, param.name):
            depends = _names(term.indices)
            both = {"q_pos", "kv_pos"} <= depends or "score" in depends
            sums = ("add_each" if both else "add_of_queries" if "q_pos" in depends
                    else "add_of_keys" if "kv_pos" in depends else "add_one")
            place = to_triton(Index(replace(param, name="_"), term.indices))
            found.append(Term(f"term_{len(found)}", f"d_{param.name}", to_triton(expressions.quick(term.multiplier)),
                              place.replace(f"element({PARAM_PREFIX}_,", f"place_of(d_{param.name},"), sums))
    return tuple(found)


def gathers(spec: Spec) -> bool:
    """Whether the score reads a tensor at a place of its own for each pair of a query and a key."""
    score = spec.expressions.score
    return score is not None and any(isinstance(node, Index) and {"q_pos", "kv_pos"} <= _names(node.args)
                                     for node in walk(score))


def _names(indices: Iterable[Expr]) -> set[str]:
    return {leaf.name for index in indices for leaf in walk(index) if isinstance(leaf, Name)}


def flags_of(spec: Spec) -> tuple[tuple[str, bool], ...]:
    return (("score_mod", spec.expressions.score is not None), ("evaluates", bool(printed(spec))),
            ("finds_tiles", mask_of(spec) == "expression"), ("sink", spec.sink == "per_head"),
            ("parameter_gradients", adds(spec)))


def adds(spec: Spec) -> bool:
    """Whether a kernel adds to gradients of tensors, in any order."""
    return spec.kernel == "key_gradients" and bool(gradients_of(spec))


def slot_params(spec: Spec) -> tuple[Param, ...]:
    """Of the mask and the score, and scalars among the spec's own parameters. Every kernel can align its queries."""
    score = () if spec.expressions.score is None else SCORES["expression"]
    users = [param for param in expressions.slot_params(spec) if param.name.startswith("user_")]
    return tuple(dict.fromkeys((*MASKS["causal"], *score, *MASKS[mask_of(spec)], *users)))
