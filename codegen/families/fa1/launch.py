"""How a call of fa1 is launched: one block for each head and sequence, with O, m and l in scratch memory."""
from __future__ import annotations

from collections.abc import Mapping

from flashgen.codegen.families.shared.launch import Sizes, tiled_values
from flashgen.codegen.plan import Plan
from flashgen.codegen.program import Buffer, Number, Program, Step


def launch(plans: Mapping[str, Plan], sizes: Sizes, num_sms: int) -> Program:
    """The program of a forward call. UnsupportedError if there are too many tiles."""
    plan = plans["fwd"]
    block_m, block_n = plan.constant("BLOCK_M"), plan.constant("BLOCK_N")
    values = tiled_values(plan, block_m, sizes)
    values["n_tiles"] = -(-sizes.seqlen_kv // block_n)
    heads, rows = sizes.batch * sizes.num_heads_q, int(values["m_tiles"]) * block_m
    return Program((Step("fwd", heads, plan.launch.threads, values),), (
        Buffer("o_accum", "f32", (heads, rows, plan.constant("MMA_COLS_V"))),
        Buffer("row_max", "f32", (heads, rows)), Buffer("row_sum", "f32", (heads, rows))))


def backward_grid(plan: Plan, values: Mapping[str, Number], num_sms: int) -> tuple[int, Mapping[str, Number]]:
    """Blocks of the gradients kernel, and no more values: one for each kv head and sequence."""
    return int(values["num_heads_kv"] * values["batch"]), {}
