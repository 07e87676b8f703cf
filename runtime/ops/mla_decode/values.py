"""How the numbers of an MLA decode become the parameter values and the grids of its two launches. No torch, no CUDA."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flashgen.codegen.plan import Plan
from flashgen.codegen.warpgroup import WARPGROUP_ROWS
from flashgen.runtime.launch.values import LOG2_E

OVERHEAD_TILES = 5  # what a segment costs beside its tiles: queries, the first scores, the output
MOST_SINGLE_TILES = 16  # of a request that may have a part each; with more parts the merge outweighs a tile's products


def row_blocks(seqlen_q: int, num_heads: int) -> int:
    """Blocks of 64 rows that a request's new tokens have: the fewest."""
    return -(-seqlen_q * num_heads // WARPGROUP_ROWS)


def num_blocks(num_sms: int, seqlen_q: int, num_heads: int) -> int:
    """Of a decode, and records of its schedule: every block has an SM to itself, unless rows alone need more."""
    return max(num_sms, row_blocks(seqlen_q, num_heads))


def schedule_values(plan: Plan, *, num_sms: int, batch: int, seqlen_q: int, num_heads_q: int) -> dict[str, Any]:
    """Parameter values and grid of the schedule's launch; `schedule_words` is the size of its int32 array."""
    blocks = num_blocks(num_sms, seqlen_q, num_heads_q)
    return {"batch": batch, "q_rows": seqlen_q * num_heads_q, "blocks": blocks, "overhead_tiles": OVERHEAD_TILES,
            "most_single_tiles": MOST_SINGLE_TILES, "grid_x": 1,
            "schedule_words": blocks * plan.constant("RECORD_WORDS")}


def mla_values(plan: Plan, *, num_sms: int, batch: int, seqlen_q: int, num_heads_q: int, seqlen_kv: int, num_pages: int,
               page_size: int, max_pages: int, softmax_scale: float, causal: bool, strides: Mapping[str, int],
               lse_counts_sink: bool = True) -> dict[str, Any]:
    """Parameter values and grid of a decode's launch.

    `strides` in elements: q_batch_stride, q_row_stride (row = token * num_heads + head), kv_page_stride, kv_row_stride.
    A dense cache is num_pages = batch pages of page_size = seqlen_kv rows. `partials_floats` and `counter_words` are
    the sizes of those arrays; the schedule must have been made for the same sizes.
    """
    blocks = num_blocks(num_sms, seqlen_q, num_heads_q)
    return {
        "q_outer_stride": strides["q_batch_stride"], "q_row_stride": strides["q_row_stride"], "q_outer": batch,
        "kv_outer_stride": strides["kv_page_stride"], "kv_row_stride": strides["kv_row_stride"], "kv_outer": num_pages,
        "kv_rows": page_size, "q_rows": seqlen_q * num_heads_q, "num_heads": num_heads_q, "seqlen_q": seqlen_q,
        "max_pages": max_pages, "page_size": page_size,
        "hidden_keys": seqlen_q - 1 if causal else 0,
        "lse_counts_sink": int(lse_counts_sink), "scale_log2": softmax_scale * LOG2_E,
        "grid_x": blocks, "cooperative": 1, "partials_floats": 2 * blocks * plan.constant("PART_FLOATS"),
        "counter_words": 2 * blocks,
    }
