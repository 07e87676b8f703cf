"""Loops over query tiles of fa3's backward: each goes on as long as tiles are of its kind."""
from __future__ import annotations

from flashgen.codegen.families.shared.loops import KvLoop
from flashgen.codegen.plan import Plan

_ALL = KvLoop("query tiles", "j < steps")
# A test of each tile in one loop cost a tenth of the kernel, as ptxas moves nothing across its branch
# (docs/lab/backward.md).
_MASKED = KvLoop("tiles that the mask cuts", "j < steps && is_masked(j)", masks_every_tile=True)
_WHOLE = KvLoop("tiles whose queries see every key", "j < steps && !is_masked(j)")


def loops(plan: Plan) -> tuple[KvLoop, ...]:
    if plan.step != "gradients":
        return ()
    return (_MASKED, _WHOLE) if dict(plan.flags).get("masks_tiles") else (_ALL,)
