"""Spec fields of fa2, and the trait that tells its kernels apart."""
from __future__ import annotations

from typing import Annotated, Literal

from flashgen.codegen.families.family import Option
from flashgen.codegen.families.shared.kernels import KERNEL, Kernel, kernel_trait
from flashgen.codegen.families.shared.sums import DETERMINISTIC, DETERMINISTIC_TRAIT, SUM_RULES
from flashgen.codegen.spec.rule import Only


class Options:
    blocks_per_sm: Annotated[int | None, Option(
        "blocks the register budget leaves room for; nothing means that the plan decides", "blocks per SM",
        "b{}".format, override=True, limits={"ge": 1, "le": 8})] = None
    q_operand: Annotated[Literal["shared", "registers"] | None, Option(
        "where q waits between key tiles; nothing means that the plan decides", override=True,
        short={"shared": "qsmem", "registers": "qreg"}.__getitem__)] = None
    deterministic: Annotated[bool, DETERMINISTIC] = False
    kernel: Annotated[Kernel | None, KERNEL] = None


TRAITS = (DETERMINISTIC_TRAIT, kernel_trait(None))
RULES = SUM_RULES

# What the backward pass takes of these fields: its kernel has one schedule for each tile.
BACKWARD_ONLY = tuple(Only(name, (None,), "its tile table decides") for name in ("blocks_per_sm", "q_operand"))
