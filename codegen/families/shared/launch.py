"""What launch rules of several families share: the numbers of a call, and how they become tiles. No torch, no CUDA.

A change in a module of launch rules that gives another program for the same plan is a change of bundle.LAUNCH_RULES.
"""
from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from flashgen.codegen.plan import Plan
from flashgen.codegen.program import Number
from flashgen.errors import UnsupportedError

LOG2_E = math.log2(math.e)
MAX_GRID_X = 2**31 - 1
UNBOUNDED = (-1, -1)


class Sizes(NamedTuple):
    """The numbers of an attention call. Varlen: seqlen_q and seqlen_kv are total_q and total_kv."""

    batch: int
    seqlen_q: int
    seqlen_kv: int
    num_heads_q: int
    num_heads_kv: int
    softmax_scale: float = 1.0
    top_left: bool = False
    window: tuple[int, int] = UNBOUNDED  # as in the API
    strides: Mapping[str, int] = {}      # in elements, named as in the plan
    dropout_p: float = 0.0               # which only plans with `dropout` read


class QuerySizes(NamedTuple):
    """What the schedule of a decode depends on, beside the lengths in device memory."""

    batch: int
    seqlen_q: int
    num_heads_q: int


class DecodeSizes(NamedTuple):
    """The numbers of a decode over a cache of latents. A dense cache has one page for each request."""

    queries: QuerySizes
    num_pages: int
    page_size: int
    max_pages: int              # columns of the page table, 0 of a dense cache
    strides: Mapping[str, int]  # in elements: q_outer_stride, q_row_stride (row = token * num_heads + head), kv_...
    softmax_scale: float = 1.0
    causal: bool = False
    lse_counts_sink: bool = True


def smallest_call(plan: Plan) -> Sizes:
    """One query, one key."""
    return Sizes(1, 1, 1, 1, 1, strides={p.name: 8 for p in plan.params if p.name.endswith("_stride")})


def is_persistent(plan: Plan) -> bool:
    """Whether the grid is sized for the device, and blocks take tiles until none is left."""
    return "counters" in plan.pointers


def splits_keys(plan: Plan) -> bool:
    """Whether blocks may share the keys of a tile, which makes the order of sums depend on the number of tiles."""
    return "partials" in plan.pointers


def is_varlen(plan: Plan) -> bool:
    return plan.spec_value("kv_layout") == "varlen"


def kept_of_65536(dropout_p: float) -> int:
    """Of so many equally likely 16-bit numbers, those that keep a weight: dropout_p counts in steps of 2^-16. One at
    least, for a probability next to 1."""
    return max(round((1.0 - dropout_p) * 65536), 1)


def tiled_values(plan: Plan, block_m: int, sizes: Sizes) -> dict[str, Number]:
    """Sizes, tiles of `block_m` query rows, mask and strides.

    An unbounded side of the window becomes a count that reaches past both sequences, so that the kernel's sums cannot
    wrap. UnsupportedError if the tiles are too many.
    """
    batch, seqlen_q, seqlen_kv, num_heads_q, num_heads_kv, softmax_scale, top_left, window, strides, dropout_p = sizes
    reach = max(seqlen_q, seqlen_kv)
    top_left = top_left or dict(plan.spec).get("align") == "top_left"
    # A score expression takes the scale in; what it gives is in natural units.
    scale = 1.0 if any(p.name == "softmax_scale" for p in plan.params) else softmax_scale
    left, right = (reach if side < 0 else min(side, reach) for side in window)
    varlen, kept = is_varlen(plan), kept_of_65536(dropout_p)
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
        "align_bottom_right": int(not top_left), "window_left": left, "window_right": right,
        "keep_last": kept - 1, "keep_scale": 65536 / kept, **strides,
    }
