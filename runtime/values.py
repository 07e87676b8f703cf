"""How the numbers of a call become the parameter values and the grid of a launch, family by family. No torch, no CUDA.

A change here that gives another grid or other values for the same plan is a change of bundle.LAUNCH_RULES.
"""
from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from flashgen.codegen.dtype import DTYPES
from flashgen.codegen.plan import CTYPES, Plan
from flashgen.errors import PlanError, UnsupportedError

LOG2_E = math.log2(math.e)
MAX_GRID_X = 2**31 - 1
MAX_SPLITS = 16             # blocks that share the keys of one query tile
SPLIT_OVERHEAD_TILES = 8    # key tiles that a part's way through device memory costs
SPLIT_GAIN = 0.012          # docs/fa3.md: predicted gains below it were losses
SECTION_HEADS = 16          # docs/fa3.md: 8 to 32 are as good, all heads at once cost up to a fifth
SECTION_BYTES = 32 << 20    # of K and V that L2 keeps beside what else passes through it
LAST_ROUNDS = 3             # of query tiles over all SMs, sorted by length at the end of the grid


def pointer_names(plan: Plan) -> list[str]:
    """The parameters that are pointers, in the plan's order."""
    return [p.name for p in plan.params if CTYPES[p.ctype].code == "Q"]


def is_persistent(plan: Plan) -> bool:
    """Whether the grid is sized for the device, and blocks take tiles until none is left."""
    return "counters" in pointer_names(plan)


def splits_keys(plan: Plan) -> bool:
    """Whether blocks may share the keys of a tile, which makes the order of sums depend on the number of tiles."""
    return "partials" in pointer_names(plan)


def counter_words(num_sms: int) -> int:
    """int32 words of the array `counters`. The kernel finds them zero and leaves them zero."""
    return 2 + 4 * num_sms  # tickets and blocks done; arrivals of each warpgroup at each split tile


def launch_values(plan: Plan, *, num_sms: int, **call: Any) -> dict[str, Any]:
    """Parameter values, `grid_x` and, if persistent, `partials_floats` of a launch; `call` as fa2_values takes it."""
    if plan.family == "fa2":
        return fa2_values(plan, **call)
    if plan.family == "fa3":
        return fa3_values(plan, num_sms=num_sms, **call)
    raise PlanError(f"no launch rules for family {plan.family}", where=plan.kernel_name, allowed="fa2, fa3")


def fa2_values(plan: Plan, **call: Any) -> dict[str, Any]:
    """Parameter values and grid of an fa2 forward launch: one block per tile. `call`: the arguments of _tiled."""
    values = _tiled(plan, **call)
    return {**values, "grid_x": values["num_tiles"]}


def fa3_values(plan: Plan, *, num_sms: int, **call: Any) -> dict[str, Any]:
    """Parameter values and grid of an fa3 forward launch on `num_sms` SMs: at most one block on each.

    `call`: the arguments of _tiled. `partials_floats` is the size of the fp32 array `partials`, 0 where none is needed.
    """
    values = _tiled(plan, **call)
    tiles, seqlen_kv = values["num_tiles"], values["seqlen_kv"]
    full_tiles, splits = tiles, 1
    if splits_keys(plan):
        full_tiles, splits = _split(plan, tiles, values["seqlen_q"], seqlen_kv, num_sms)
    columns = plan.spec_value("head_dim_qk") + plan.spec_value("head_dim_v")  # type: ignore[operator]
    key_bytes = seqlen_kv * columns * DTYPES[str(plan.spec_value("dtype"))].bytes
    heads = values["num_heads_q"] * (1 if _varlen(plan) else values["batch"])
    return {
        **values, "full_tiles": full_tiles, "splits": splits,
        "partials_floats": (tiles - full_tiles) * splits * plan.constant("PARTIAL_FLOATS") if splits > 1 else 0,
        **sections(heads, values["m_tiles"], num_sms, values["heads_per_kv_head"], key_bytes),
        "grid_x": min(num_sms, full_tiles + (tiles - full_tiles) * splits),
    }


def wants_split(plan: Plan, values: Mapping[str, Any], num_sms: int) -> bool:
    """Whether a launch with these values would be faster with the plan's twin that splits keys, if there is one."""
    if plan.family != "fa3" or splits_keys(plan) or any(
            plan.spec_value(name) == value for name, value in (("kv_layout", "varlen"), ("window", True),
                                                               ("batch_invariant", True))):
        return False
    return _split(plan, values["num_tiles"], values["seqlen_q"], values["seqlen_kv"], num_sms)[1] > 1


def _split(plan: Plan, tiles: int, seqlen_q: int, seqlen_kv: int, num_sms: int) -> tuple[int, int]:
    # Blocks that draw tickets, long tiles first, end together without splitting, unless tiles are few or equally long.
    if dict(plan.flags)["tickets"] and tiles >= num_sms and seqlen_kv < 2 * seqlen_q:
        return tiles, 1
    return split_tail(tiles, num_sms, -(-seqlen_kv // plan.constant("BLOCK_N")))


def split_tail(num_tiles: int, num_sms: int, key_tiles: int) -> tuple[int, int]:
    """(full_tiles, splits): the first full_tiles tiles go to one block each, the rest to `splits` blocks, which share
    the keys.

    Whole rounds of num_sms tiles keep every SM busy. The remainder would leave SMs idle in a last round of its own, so
    its tiles are cut along the keys into parts, whose rounds are shorter. A part costs its share of the `key_tiles`
    and SPLIT_OVERHEAD_TILES for writing it out and adding it up; a kernel that splits is itself a little slower, so
    less than SPLIT_GAIN of the whole is no reason to.
    """
    rest = num_tiles % num_sms

    def cost(splits: int) -> float:
        rounds = -(-rest * splits // num_sms)
        return rounds * (key_tiles / splits + (SPLIT_OVERHEAD_TILES if splits > 1 else 0))

    counts = range(1, max(1, min(MAX_SPLITS, key_tiles)) + 1) if rest else range(1, 2)
    least = min(map(cost, counts))
    splits = next(count for count in counts if cost(count) <= 1.05 * least)  # of those about as good, the fewest
    if cost(1) - cost(splits) <= SPLIT_GAIN * -(-num_tiles // num_sms) * key_tiles:
        return num_tiles, 1
    return num_tiles - rest, splits


def sections(num_heads: int, m_tiles: int, num_sms: int, heads_per_kv_head: int, key_bytes: int) -> dict[str, int]:
    """How slots/order/longest_first.cuh.j2 goes through the `num_heads` query heads of all sequences.

    heads_per_section: as many as read SECTION_BYTES of K and V together (`key_bytes`: of one kv head and sequence), so
    that L2 keeps them while the query tiles of a section are worked on; at least 1, at most SECTION_HEADS.
    heads_at_the_end: enough for LAST_ROUNDS rounds of all SMs, whose tiles end in order of length.
    """
    per_section = max(1, min(SECTION_HEADS, num_heads, SECTION_BYTES * heads_per_kv_head // max(key_bytes, 1)))
    at_the_end = min(num_heads, -(-LAST_ROUNDS * num_sms // max(m_tiles, 1)))
    before = (num_heads - at_the_end) // per_section * per_section  # whole sections
    return {"heads_per_section": per_section, "heads_at_the_end": num_heads - before}


def _tiled(plan: Plan, *, batch: int, seqlen_q: int, seqlen_kv: int, num_heads_q: int, num_heads_kv: int,
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
    block_m, varlen = plan.constant("BLOCK_M"), _varlen(plan)
    # Varlen: what slots/layout/varlen.cuh.j2 sets aside, one tile per sequence beyond the floor, and one for the rest.
    m_tiles = seqlen_q // block_m + batch + 1 if varlen else -(-seqlen_q // block_m)
    num_tiles = m_tiles * num_heads_q * (1 if varlen else batch)
    if num_tiles > MAX_GRID_X:
        raise UnsupportedError(f"{num_tiles} tiles ({m_tiles} of queries, {num_heads_q} heads, batch {batch})",
                               where=plan.kernel_name, allowed=f"{MAX_GRID_X} tiles", next="split the batch")
    return {
        "batch": batch, "seqlen_q": seqlen_q, "seqlen_kv": seqlen_kv, "num_heads_q": num_heads_q,
        "heads_per_kv_head": num_heads_q // num_heads_kv, "m_tiles": m_tiles, "num_tiles": num_tiles,
        "scale_log2": scale * LOG2_E, "softmax_scale": softmax_scale,
        "align_bottom_right": int(not top_left), "window_left": left, "window_right": right, **strides,
    }


def _varlen(plan: Plan) -> bool:
    return plan.spec_value("kv_layout") == "varlen"
