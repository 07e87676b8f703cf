"""How the numbers of a call become the parameter values and the grid of a launch, family by family. No torch, no CUDA.

A change here that gives another grid or other values for the same plan is a change of bundle.LAUNCH_RULES.
"""
from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from flashgen.codegen.dtype import DTYPES
from flashgen.codegen.plan import Plan
from flashgen.codegen.warpgroup import WARP_ROWS, WARPGROUP_ROWS, WARPGROUP_THREADS, WARPGROUP_WARPS
from flashgen.errors import PlanError, UnsupportedError
from flashgen.runtime.launch.split import Cutting, Parts, cut_launch, sections

LOG2_E = math.log2(math.e)
MAX_GRID_X = 2**31 - 1


def pointer_names(plan: Plan) -> list[str]:
    """The parameters that are pointers, in the plan's order."""
    return plan.pointers


def is_persistent(plan: Plan) -> bool:
    """Whether the grid is sized for the device, and blocks take tiles until none is left."""
    return "counters" in pointer_names(plan)


def splits_keys(plan: Plan) -> bool:
    """Whether blocks may share the keys of a tile, which makes the order of sums depend on the number of tiles."""
    return "partials" in pointer_names(plan)


def counter_words(num_sms: int) -> int:
    """int32 words of fa3's array `counters`. The kernel finds them zero and leaves them zero."""
    return 3 + num_sms  # tickets, blocks that draw none, blocks that wait no more; arrivals at each split tile


def launch_values(plan: Plan, *, num_sms: int, **call: Any) -> dict[str, Any]:
    """Parameter values, `grid_x` and, if persistent, `partials_floats` and `counter_words` of a launch; `call` as
    fa2_values takes it."""
    if plan.family == "fa2":
        return fa2_values(plan, **call)
    if plan.family == "fa3":
        return fa3_values(plan, num_sms=num_sms, **call)
    raise PlanError(f"no launch rules for family {plan.family}", where=plan.kernel_name, allowed="fa2, fa3")


def fa2_values(plan: Plan, **call: Any) -> dict[str, Any]:
    """Parameter values and grid of an fa2 forward launch: one block per tile. `call`: the arguments of _tiled."""
    values = _tiled(plan, plan.constant("BLOCK_M"), **call)
    return {**values, "grid_x": values["num_tiles"]}


def fa3_values(plan: Plan, *, num_sms: int, **call: Any) -> dict[str, Any]:
    """Parameter values and grid of an fa3 forward launch on `num_sms` SMs: at most one block on each.

    `call`: the arguments of _tiled. `threads`: of a block. `cooperative`: whether all blocks must run at once.
    `partials_floats` is the size of the fp32 array `partials`, 0 where none is needed; `counter_words` that of the
    int32 array `counters`.
    """
    tallest = cutting_of(plan)
    cut, parts = cut_launch(tallest, num_sms, splits=splits_keys(plan), fixed=_batch_invariant(plan),
                            **_dense_twin(plan, call))
    values = _tiled(plan, cut.rows, **call)
    rows, group_rows = values["seqlen_q"], WARPGROUP_ROWS  # of a sequence and head; of a warpgroup
    if cut.packed:
        group = values["heads_per_kv_head"]
        values["m_tiles"] = -(-values["seqlen_q"] // cut.queries(group))
        values["num_tiles"] = values["m_tiles"] * values["num_heads_kv"] * values["batch"]
        values["group_queries"] = WARPGROUP_ROWS // group
        rows, group_rows = rows * group, values["group_queries"] * group
    tiles = values["num_tiles"]
    heads = values["num_heads_q"] * (1 if _varlen(plan) else values["batch"])
    if _varlen(plan):
        parts = Parts.none(tiles)
    return {
        **values, **sections(cut, num_sms, heads, values["m_tiles"], values["seqlen_kv"], values["heads_per_kv_head"]),
        **parts._asdict(),
        "warpgroups": cut.warpgroups, "block_rows": cut.rows,
        "turn_threads": WARPGROUP_THREADS * min(cut.warpgroups, 2),
        "threads": plan.launch.threads - WARPGROUP_THREADS * (tallest.warpgroups - cut.warpgroups),
        "part_slabs": min(rows // group_rows * WARPGROUP_WARPS + -(-(rows % group_rows) // WARP_ROWS),
                          cut.rows // WARP_ROWS),
        "cooperative": parts.max_parts > 1,  # blocks wait for each other's parts
        "partials_floats": (tiles - parts.full_tiles) * parts.max_parts * plan.constant("PARTIAL_FLOATS")
        if parts.max_parts > 1 else 0,
        "grid_x": min(num_sms, parts.num_units), "counter_words": counter_words(num_sms),
    }


def cutting_of(plan: Plan) -> Cutting:
    """What of an fa3 plan decides how its tiles are cut and ordered."""
    fields: dict[str, Any] = dict(plan.spec)
    return Cutting(plan.constant("BLOCK_M"), plan.constant("BLOCK_N"), fields.get("causal", False),
                   fields.get("pack_gqa", False), fields["head_dim_qk"], fields["head_dim_v"],
                   DTYPES[fields["dtype"]].bytes, walked=("walk", "classes") in plan.slots)


def _tiled(plan: Plan, block_m: int, *, batch: int, seqlen_q: int, seqlen_kv: int, num_heads_q: int, num_heads_kv: int,
           softmax_scale: float, top_left: bool, window: tuple[int, int],
           strides: Mapping[str, int]) -> dict[str, Any]:
    """What all families share: sizes, tiles, mask and strides.

    Varlen: seqlen_q and seqlen_kv are total_q and total_kv. `window` as in the API; an unbounded side becomes a count
    that reaches past both sequences, so that the kernel's sums cannot wrap. `strides` count elements, named as in
    the plan. UnsupportedError if the tiles are too many.
    """
    reach = max(seqlen_q, seqlen_kv)
    top_left = top_left or dict(plan.spec).get("align") == "top_left"
    # A score expression takes the scale in; what it gives is in natural units.
    scale = 1.0 if any(p.name == "softmax_scale" for p in plan.params) else softmax_scale
    left, right = (reach if side < 0 else min(side, reach) for side in window)
    varlen = _varlen(plan)
    # Varlen: what slots/layout/varlen.cuh.j2 sets aside, one tile per sequence beyond the floor, and one for the rest.
    m_tiles = seqlen_q // block_m + batch + 1 if varlen else -(-seqlen_q // block_m)
    num_tiles = m_tiles * num_heads_q * (1 if varlen else batch)
    if num_tiles > MAX_GRID_X:
        raise UnsupportedError(f"{num_tiles} tiles ({m_tiles} of queries, {num_heads_q} heads, batch {batch})",
                               where=plan.kernel_name, allowed=f"{MAX_GRID_X} tiles", next="split the batch")
    return {
        "batch": batch, "seqlen_q": seqlen_q, "seqlen_kv": seqlen_kv, "num_heads_q": num_heads_q,
        "num_heads_kv": num_heads_kv, "heads_per_kv_head": num_heads_q // num_heads_kv, "m_tiles": m_tiles,
        "num_tiles": num_tiles,
        "scale_log2": scale * LOG2_E, "softmax_scale": softmax_scale,
        "align_bottom_right": int(not top_left), "window_left": left, "window_right": right, **strides,
    }


def _dense_twin(plan: Plan, call: Mapping[str, Any]) -> Mapping[str, Any]:
    """Of a varlen call, a dense one with as many rows in sequences of equal lengths: the host knows no more of them."""
    if not _varlen(plan):
        return call
    return {**call, **{name: -(-call[name] // max(call["batch"], 1)) for name in ("seqlen_q", "seqlen_kv")}}


def _batch_invariant(plan: Plan) -> bool:
    return bool(dict(plan.spec).get("batch_invariant"))


def _varlen(plan: Plan) -> bool:
    return plan.spec_value("kv_layout") == "varlen"
