"""Spec fields of fa2, the trait that tells its kernels apart, and the rule that it adds."""
from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from flashgen.codegen.families.family import Option
from flashgen.codegen.families.shared.kernels import KERNEL, Kernel, kernel_trait
from flashgen.codegen.families.shared.sums import DETERMINISTIC, DETERMINISTIC_TRAIT, SUM_RULES
from flashgen.codegen.spec.rule import Only, Rule
from flashgen.errors import SpecError

if TYPE_CHECKING:
    from flashgen.codegen.spec import fields


class Options:
    blocks_per_sm: Annotated[int | None, Option(
        "blocks the register budget leaves room for; nothing means that the plan decides", "blocks per SM",
        "b{}".format, override=True, limits={"ge": 1, "le": 8})] = None
    q_operand: Annotated[Literal["shared", "registers"] | None, Option(
        "where q waits between key tiles; nothing means that the plan decides", override=True,
        short={"shared": "qsmem", "registers": "qreg"}.__getitem__)] = None
    dropout: Annotated[bool, Option(
        "drop weights at random, with a probability that comes with each call; other calls never get such a kernel",
        short=lambda _: "dropout")] = False
    deterministic: Annotated[bool, DETERMINISTIC] = False
    kernel: Annotated[Kernel | None, KERNEL] = None


if TYPE_CHECKING:
    class Spec(fields.Spec, Options):
        """A Spec of this family, as a type checker sees it."""


TRAITS = (DETERMINISTIC_TRAIT, kernel_trait(None))

# What the backward pass takes of these fields: its kernel has one schedule for each tile.
BACKWARD_ONLY = tuple(Only(name, (None,), "its tile table decides") for name in ("blocks_per_sm", "q_operand"))


def _dropout(spec: Spec) -> SpecError | None:
    if not spec.dropout or spec.normalize == "softmax":
        return None
    return SpecError("dropout is true together with normalize: none", where="Spec.dropout", allowed="false",
                     nearest="dropout: false")


RULES = (*SUM_RULES, Rule("`dropout: true` excludes `normalize: none`.", _dropout),)
