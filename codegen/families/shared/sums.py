"""Sums that several blocks add to: the spec field that gives them a fixed order, and what goes with it."""
from __future__ import annotations

from typing import Any

from flashgen.codegen.families.family import Option, Trait
from flashgen.codegen.plan import Constant, Param
from flashgen.codegen.spec.rule import Rule
from flashgen.errors import SpecError

DETERMINISTIC = Option("the same call gives the same gradients bit for bit: blocks add to dQ in turns",
                       short="det".format)

# A call that does not ask takes the faster kernels, where there are such.
DETERMINISTIC_TRAIT = Trait("deterministic", False, lambda wanted: (True,) if wanted else (False, True))


def _invariant(spec: Any) -> SpecError | None:
    if spec.pass_ != "bwd" or not spec.batch_invariant or spec.deterministic:
        return None
    return SpecError("batch_invariant is true with pass bwd, whose blocks add to dQ in any order",
                     where="Spec.batch_invariant", allowed="false, or true together with deterministic: true",
                     nearest="deterministic: true",
                     next="when both are lists, add `- {batch_invariant: true, deterministic: false}` to exclude")


def _bounded(spec: Any) -> SpecError | None:
    if not spec.deterministic or spec.mask == "none":
        return None
    return SpecError("deterministic is true with a mask by expression, which does not say whose turn it is",
                     where="Spec.deterministic", allowed="false; or causal, window, or no mask",
                     nearest="deterministic: false",
                     next="when both are lists, add `- {deterministic: true, mask: ...}` to exclude")


SUM_RULES = (Rule("`batch_invariant: true` needs `deterministic: true` in `pass: bwd`.", _invariant),
             Rule("`deterministic: true` excludes `mask`.", _bounded))

TURN_PARTS = "TURN_PARTS"  # the constant of this name


def turns_params(spec: Any) -> tuple[Param, ...]:
    about = f"[num_heads_q, q_tiles, {TURN_PARTS}], how many key tiles have added to a part of dQ"
    return (Param("turns", "i32_out", about),) if spec.deterministic else ()


def turn_parts(spec: Any, parts: int) -> tuple[Constant, ...]:
    about = "of a query tile's dQ, each with a semaphore, as different warps add them"
    return (Constant(TURN_PARTS, parts, about),) if spec.deterministic else ()


def turns_slot(spec: Any, mask: str) -> tuple[tuple[str, str], ...]:
    return (("turns", mask),) if spec.deterministic else ()
