"""How a call of fa3 is launched: at most one block per SM, each of which takes query tiles until none is left."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flashgen.codegen.dtype import DTYPES
from flashgen.codegen.families.fa3.split import ProblemShape, SplitPlan, TileConfig, best_variant, cut_launch, sections
from flashgen.codegen.families.fa3.tiles import KINDS, TILES
from flashgen.codegen.families.family import DenseCall
from flashgen.codegen.families.shared.launch import Sizes, is_varlen, splits_keys, tiled_values
from flashgen.codegen.plan import Plan
from flashgen.codegen.program import Buffer, Program, Step
from flashgen.codegen.slots import mask_choice
from flashgen.codegen.warpgroup import WARP_ROWS, WARPGROUP_ROWS, WARPGROUP_THREADS, WARPGROUP_WARPS


def launch(plans: Mapping[str, Plan], sizes: Sizes, num_sms: int) -> Program:
    """The program of a forward call on `num_sms` SMs."""
    plan = plans["fwd"]
    tallest = tile_config_of(plan)
    config, split_plan = cut_launch(tallest, num_sms, _shape(plan, sizes), splits=splits_keys(plan),
                                    fixed=bool(dict(plan.spec).get("batch_invariant")))
    values: dict[str, Any] = tiled_values(plan, config.rows, sizes)
    rows, group_rows = sizes.seqlen_q, WARPGROUP_ROWS  # of a sequence and head; of a warpgroup
    if config.pack_gqa:
        group = values["heads_per_kv_head"]
        values["m_tiles"] = -(-sizes.seqlen_q // config.queries(group))
        values["num_tiles"] = values["m_tiles"] * sizes.num_heads_kv * sizes.batch
        values["queries_per_warpgroup"] = WARPGROUP_ROWS // group
        rows, group_rows = rows * group, values["queries_per_warpgroup"] * group
    tiles, heads = values["num_tiles"], sizes.num_heads_q * sizes.batch
    if is_varlen(plan):
        split_plan, heads = SplitPlan.none(tiles), sizes.num_heads_q
    values |= {
        **sections(config, num_sms, heads, values["m_tiles"], sizes.seqlen_kv, values["heads_per_kv_head"]),
        **split_plan._asdict(),
        "warpgroups": config.warpgroups, "block_rows": config.rows,
        "pingpong_threads": WARPGROUP_THREADS * min(config.warpgroups, 2),
        "partial_tiles": min(rows // group_rows * WARPGROUP_WARPS + -(-(rows % group_rows) // WARP_ROWS),
                          config.rows // WARP_ROWS),
    }
    threads = plan.launch.threads - WARPGROUP_THREADS * (tallest.warpgroups - config.warpgroups)
    shares = split_plan.max_splits > 1  # then blocks wait for each other's splits
    return Program((Step("fwd", min(num_sms, split_plan.num_work_tiles), threads, values, cooperative=shares),),
                   _buffers(plan, num_sms, (tiles - split_plan.full_tiles) * split_plan.max_splits if shares else 0))


def prefer(call: DenseCall, sizes: Sizes, num_sms: int) -> tuple[tuple[str, Any], ...] | None:
    """`split` and `pack_gqa` for a call, by the tile table alone, so that no kernel is loaded to find out."""
    mask, head_dims = mask_choice(call.causal, False), (call.head_dim_qk, call.head_dim_v)
    tiles = [TILES.find(call.arch, mask, *head_dims, kind) for kind in KINDS]
    configs = [TileConfig(tile.m, tile.n, call.causal, kind == "packed", *head_dims, DTYPES[call.dtype].bytes)
               for tile, kind in zip(tiles, KINDS, strict=True) if tile is not None]
    if len(configs) < len(KINDS):
        return None
    splits, packs = best_variant(configs, num_sms, ProblemShape.of(sizes))
    return ("split", splits), ("pack_gqa", packs)


def _buffers(plan: Plan, num_sms: int, num_parts: int) -> tuple[Buffer, ...]:
    counters = Buffer("counters", "i32", (counter_words(num_sms),), "counters")
    if not splits_keys(plan):
        return (counters,)
    return counters, Buffer("partials", "f32", (num_parts, plan.constant("PARTIAL_FLOATS")))


def counter_words(num_sms: int) -> int:
    """int32 words of the array `counters`."""
    return 3 + num_sms  # tile counter, blocks done fetching, blocks done merging; arrivals at each split tile


def tile_config_of(plan: Plan) -> TileConfig:
    """What of a plan decides how its tiles are split and ordered."""
    fields: dict[str, Any] = dict(plan.spec)
    return TileConfig(plan.constant("BLOCK_M"), plan.constant("BLOCK_N"), fields.get("causal", False),
                      fields.get("pack_gqa", False), fields["head_dim_qk"], fields["head_dim_v"],
                      DTYPES[fields["dtype"]].bytes, by_class=("walk", "classes") in plan.slots)


def _shape(plan: Plan, sizes: Sizes) -> ProblemShape:
    """The problem shape of a call; of a varlen call that of a dense one with as many rows in sequences of equal
    lengths, since the host knows no more of them."""
    shape = ProblemShape.of(sizes)
    if not is_varlen(plan):
        return shape
    batch = max(shape.batch, 1)
    return shape._replace(seqlen_q=-(-shape.seqlen_q // batch), seqlen_kv=-(-shape.seqlen_kv // batch))
