"""What a spec's expressions add to a plan: CUDA text, parameters and flags. Nothing for specs without."""
from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from flashgen.codegen.expr.canon import build, canonical
from flashgen.codegen.expr.cuda import DISTANCE, KERNEL_NAMES, hoist, to_cuda
from flashgen.codegen.expr.cuda import Part as ExprPart
from flashgen.codegen.expr.interval import interval
from flashgen.codegen.expr.tiles import tile_class
from flashgen.codegen.expr.tree import Expr, Index, Name, Op, ScalarParam, TensorParam, const, names_of, walk
from flashgen.codegen.plan import Expression, Param, Part
from flashgen.codegen.slots import EXPRESSION_FLAGS, MASKS, SCORES, mask_choice

if TYPE_CHECKING:
    from flashgen.codegen.spec.spec import Spec

_POINTERS = {"float32": "f32_ptr", "int32": "i32_ptr", "bool": "bool_ptr"}
_SCALARS = {"float": "f32", "int": "i32", "bool": "i32"}


def mask_of(spec: Spec) -> str:
    """The mask slot's choice. An expression that a built-in mask or an interval serves gets that, which is faster."""
    tree = spec.expressions.mask
    if tree is None:
        return mask_choice(spec.causal, spec.window)
    built_in = {"kv_pos <= q_pos": "causal", "True": "full"}
    return built_in.get(tree.text) or ("interval" if interval(tree) else "expression")


def slots_of(spec: Spec) -> tuple[tuple[str, str], ...]:
    """The choices of the slots that a spec's mask, expressions and `normalize` decide."""
    mask = mask_of(spec)
    return (*((("score", "expression"),) if spec.expressions.score is not None else ()), ("mask", mask),
            ("walk", "classes" if mask == "expression" else "ranges"), ("normalize", spec.normalize))


def printed(spec: Spec) -> tuple[Expression, ...]:
    found = []
    if spec.expressions.score is not None:
        found.append(_printed("score", spec.expressions.score))
    if spec.expressions.mask is not None and mask_of(spec) in ("interval", "expression"):
        found.append(_printed("mask", spec.expressions.mask))
    return tuple(found)


def flags_of(spec: Spec) -> tuple[tuple[str, bool], ...]:
    """Those of EXPRESSION_FLAGS that hold."""
    trees = [tree for tree in (spec.expressions.score, spec.expressions.mask) if tree is not None]
    holds = {
        "score_mod": spec.expressions.score is not None, "evaluates": bool(printed(spec)),
        "sink": spec.sink == "per_head", "parameter_gradients": False,
        "names_batch": any("batch" in names_of(tree) for tree in trees),
    }
    return tuple((name, True) for name in EXPRESSION_FLAGS if holds[name])


def pointer_params(spec: Spec) -> list[Param]:
    """Tensors among the parameters, in the order of Expressions.params."""
    return [Param(f"user_{param.name}", _POINTERS[param.dtype], f"[{', '.join(map(str, param.shape))}]")
            for param in spec.expressions.params if isinstance(param, TensorParam)]


def slot_params(spec: Spec) -> list[Param]:
    """Of the score and mask slots, and scalars among the spec's own parameters."""
    score = () if spec.expressions.score is None else SCORES["expression"]
    slots = dict.fromkeys((*score, *MASKS[mask_of(spec)]))
    return [*slots, *(Param(f"user_{param.name}", _SCALARS[param.type], "parameter of the spec")
                      for param in spec.expressions.params if isinstance(param, ScalarParam))]


def gathers(spec: Spec) -> bool:
    """Whether an element of a tensor is read for each score, which takes registers for addresses and loads on their
    way."""
    return any(isinstance(node, Index) for tree in (spec.expressions.score, spec.expressions.mask) if tree is not None
               for node in walk(hoist(tree).rest))


def quick(tree: Expr) -> Expr:
    """What gives nearly the same number as a score expression in fewer instructions."""
    return _with_reciprocals(_with_distances(tree))


def _printed(slot: str, tree: Expr) -> Expression:
    bounds = interval(tree) if slot == "mask" else None
    if bounds:
        return Expression(slot, tree.text, first=bounds.first, last=bounds.last)
    made = quick(tree) if slot == "score" else tree  # a mask's last bit decides
    hoisted = hoist(made)
    found = Expression(slot, tree.text, _parts(hoisted.uniform), _parts(hoisted.row), _parts(hoisted.column),
                       to_cuda(hoisted.rest, KERNEL_NAMES), to_cuda(made, KERNEL_NAMES))
    if slot == "score":
        return found
    of_tiles = tile_class(tree, KERNEL_NAMES)
    return replace(found, tile_class=of_tiles.text, class_rows=tuple(Part(*part) for part in of_tiles.rows))


def _parts(parts: tuple[ExprPart, ...]) -> tuple[Part, ...]:
    return tuple(Part(part.tree.type, part.name.name, to_cuda(part.tree, KERNEL_NAMES)) for part in parts)


def _with_reciprocals(tree: Expr) -> Expr:
    """Divisions of each score by what is the same for all of them, as products with a reciprocal that is worked out
    once: a division takes eight instructions, and a product is as close, within half a unit in the last place."""
    if isinstance(tree, Index):
        return Index(tree.param, tuple(map(_with_reciprocals, tree.args)))
    if not isinstance(tree, Op):
        return tree
    args = tuple(map(_with_reciprocals, tree.args))
    if tree.op == "div" and _varies(args[0]) and not _varies(args[1]):
        return build("mul", [args[0], canonical(Op("div", (const(1.0), args[1]), "float"))], "float")
    return Op(tree.op, args, tree.type)


_DISTANCES: dict[str, Expr] = {
    "kv_pos - q_pos": DISTANCE, "q_pos - kv_pos": Op("neg", (DISTANCE,), "float"),
    "abs(kv_pos - q_pos)": Op("abs", (DISTANCE,), "float"),
}


def _with_distances(tree: Expr) -> Expr:
    """Distances as floats, which cost a sum instead of a conversion, at an eighth of its rate."""
    if not isinstance(tree, Op):
        return tree
    if tree.op == "float" and tree.args[0].text in _DISTANCES:
        return _DISTANCES[tree.args[0].text]
    return Op(tree.op, tuple(map(_with_distances, tree.args)), tree.type)


def _varies(tree: Expr) -> bool:
    names = ("score", "q_pos", "kv_pos", DISTANCE.name)
    return any(isinstance(node, Name) and node.name in names for node in walk(tree))
