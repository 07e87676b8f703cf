"""Spec fields that fa2 alone has."""
from __future__ import annotations

from typing import Annotated, Literal

from flashgen.codegen.families.family import Option


class Options:
    blocks_per_sm: Annotated[int | None, Option(
        "blocks the register budget leaves room for; nothing means that the plan decides", "blocks per SM",
        "b{}".format, override=True, limits={"ge": 1, "le": 8})] = None
    q_operand: Annotated[Literal["shared", "registers"] | None, Option(
        "where q waits between key tiles; nothing means that the plan decides", override=True,
        short={"shared": "qsmem", "registers": "qreg"}.__getitem__)] = None
