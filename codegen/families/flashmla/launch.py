"""How a decode of flashmla is launched: its schedule, unless the caller kept one, then the decode."""
from __future__ import annotations

from collections.abc import Mapping

from flashgen.codegen.families.shared.launch import LOG2_E, DecodeSizes, QuerySizes
from flashgen.codegen.plan import Plan
from flashgen.codegen.program import Buffer, Program, Step
from flashgen.codegen.warpgroup import WARPGROUP_ROWS

OVERHEAD_TILES = 5  # what a segment costs beside its tiles: queries, the first scores, the output
MOST_SINGLE_TILES = 16  # of a request that may have a partition each; with more, the merge outweighs a tile's products


def row_blocks(queries: QuerySizes) -> int:
    """Blocks of 64 rows that a request's new tokens have: the fewest."""
    return -(-queries.seqlen_q * queries.num_heads_q // WARPGROUP_ROWS)


def num_blocks(queries: QuerySizes, num_sms: int) -> int:
    """Of a decode, and records of its schedule: every block has an SM to itself, unless rows alone need more."""
    return max(num_sms, row_blocks(queries))


def smallest_queries(plan: Plan) -> QuerySizes:
    return QuerySizes(1, 1, 1)


def smallest_decode(plan: Plan) -> DecodeSizes:
    """One query, one page of keys."""
    names = ("q_outer_stride", "q_row_stride", "kv_outer_stride", "kv_row_stride")  # of the call, not of the plan
    return DecodeSizes(smallest_queries(plan), 1, 64, 1, dict.fromkeys(names, 8))


def launch_schedule(plans: Mapping[str, Plan], sizes: QuerySizes, num_sms: int) -> Program:
    """The program of a schedule, and the buffer for it."""
    plan, blocks = plans["schedule"], num_blocks(sizes, num_sms)
    values = {"batch": sizes.batch, "q_rows": sizes.seqlen_q * sizes.num_heads_q, "blocks": blocks,
              "overhead_tiles": OVERHEAD_TILES, "most_single_tiles": MOST_SINGLE_TILES}
    return Program((Step("schedule", 1, plan.launch.threads, values),),
                   (Buffer("schedule", "i32", (blocks, plan.constant("RECORD_WORDS"))),))


def launch_decode(plans: Mapping[str, Plan], sizes: DecodeSizes, num_sms: int) -> Program:
    """The program of a decode. Where `plans` have no schedule, the caller brings one for the same sizes."""
    plan, blocks = plans["decode"], num_blocks(sizes.queries, num_sms)
    _, seqlen_q, num_heads_q = sizes.queries
    values = {
        "q_outer": sizes.queries.batch, "kv_outer": sizes.num_pages, "kv_rows": sizes.page_size,
        "q_rows": seqlen_q * num_heads_q, "num_heads": num_heads_q, "seqlen_q": seqlen_q,
        "max_pages": sizes.max_pages, "page_size": sizes.page_size, "masked_keys": seqlen_q - 1 if sizes.causal else 0,
        "lse_counts_sink": int(sizes.lse_counts_sink), "scale_log2": sizes.softmax_scale * LOG2_E, **sizes.strides,
    }
    decode = Program((Step("decode", blocks, plan.launch.threads, values, cooperative=True),),
                     (Buffer("partials", "f32", (2 * blocks, plan.constant("PARTIAL_FLOATS"))),
                      Buffer("counters", "i32", (2 * blocks,), "counters")))
    if "schedule" not in plans:
        return decode
    schedule = launch_schedule(plans, sizes.queries, num_sms)
    return Program((schedule.steps[0]._replace(unless="schedule"), *decode.steps), schedule.buffers + decode.buffers)
