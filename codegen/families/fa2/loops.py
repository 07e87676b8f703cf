"""Loops over tiles of keys, by mask: from the last tile to the first."""
from __future__ import annotations

from flashgen.codegen.families.shared.loops import END_TITLE, RIGHT_TITLE, WHOLE_TITLE, KvLoop
from flashgen.codegen.plan import Plan

_END = KvLoop(END_TITLE, "full_end", masks_every_tile=True)
_RIGHT = KvLoop(RIGHT_TITLE, "full_end", masks_every_tile=True)
_WHOLE = KvLoop(WHOLE_TITLE, "full_begin")
_LEFT = KvLoop("tiles that the window cuts on the left: masked", "begin", masks_every_tile=True)
_BY_MASK = {"full": (_END, _WHOLE), "causal": (_RIGHT, _WHOLE), "window": (_RIGHT, _WHOLE, _LEFT),
            "interval": (_RIGHT, _WHOLE, _LEFT), "expression": ()}  # the last finds its tiles by class


def loops(plan: Plan) -> tuple[KvLoop, ...]:
    return _BY_MASK[dict(plan.slots)["mask"]]
