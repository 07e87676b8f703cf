"""Loops over tiles of keys, by mask: from the first tile to the last."""
from __future__ import annotations

from flashgen.codegen.families.shared.loops import END_TITLE, RIGHT_TITLE, WHOLE_TITLE, KvLoop
from flashgen.codegen.plan import Plan

_WHOLE = KvLoop(WHOLE_TITLE, "whole_end()", rows_started=True)
_RIGHT = KvLoop(RIGHT_TITLE, "tiles.end", masks_every_tile=True)
_END = KvLoop(END_TITLE, "tiles.end", masks_every_tile=True)
# Both ends of a mask that cuts on two sides: one text less to compile (a fifth of the kernel).
_SIDES = KvLoop("tiles that the mask cuts, or in which a row may meet its first key: masked", "masked_end",
                masks_every_tile=True, subtract="max_if_new_row", may_reach_end=True)
# Instead of one loop for whole tiles and one for the others, where that takes the compiler too long (flag one_loop).
_ONE_LOOP = (KvLoop("all tiles, masked from where the mask cuts", "tiles.end", masks_cut_tiles=True,
                    rows_started=True),)
_BY_CLASS = KvLoop("tiles that some row of the block sees, from the last to the first", subtract="max_if_new_row")
_BY_MASK = {"full": (_WHOLE, _END), "causal": (_WHOLE, _RIGHT), "window": (_SIDES, _WHOLE),
            "interval": (_SIDES, _WHOLE), "expression": (_BY_CLASS,)}


def loops(plan: Plan) -> tuple[KvLoop, ...]:
    return _ONE_LOOP if dict(plan.flags).get("one_loop") else _BY_MASK[dict(plan.slots)["mask"]]
