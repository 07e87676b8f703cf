"""How calls of triton are launched: one block per tile, and lists of tiles where a mask by expression makes them."""
from __future__ import annotations

from collections.abc import Mapping

from flashgen.codegen.families.shared.launch import LOG2_E, MAX_GRID_X, Sizes, is_varlen, tiled_values
from flashgen.codegen.plan import Plan
from flashgen.codegen.program import Buffer, Program, Step
from flashgen.errors import UnsupportedError


def launch(plans: Mapping[str, Plan], sizes: Sizes, num_sms: int) -> Program:
    """The program of a forward call, on any number of SMs."""
    plan = plans["fwd"]
    values = tiled_values(plan, plan.constant("BLOCK_M"), sizes)
    values["n_tiles"] = -(-sizes.seqlen_kv // plan.constant("BLOCK_N"))
    grid = int(values["num_tiles"])
    lists = (Buffer("tiles", "i32", (grid, int(values["n_tiles"]))),) if "tiles" in plan.pointers else ()
    return Program((Step("fwd", grid, plan.launch.threads, values),), lists)


def launch_backward(plans: Mapping[str, Plan], sizes: Sizes, num_sms: int) -> Program:
    """The program of a backward call: a step for each of the given plans. UnsupportedError if a grid is too large."""
    steps, buffers = [], []
    for name, plan in plans.items():
        block_m, block_n, varlen = plan.constant("BLOCK_M"), plan.constant("BLOCK_N"), is_varlen(plan)
        values = tiled_values(plan, block_m, sizes)
        changed = plan.spec_value("score") != "none"
        values["scale_log2"] = LOG2_E if changed else sizes.softmax_scale * LOG2_E
        values |= {"q_tiles": -(-sizes.seqlen_q // block_m), "n_tiles": -(-sizes.seqlen_kv // block_n)}
        if name == "key_gradients":
            tiles = sizes.seqlen_kv // block_n + sizes.batch + 1 if varlen else int(values["n_tiles"]) * sizes.batch
            grid, met = tiles * sizes.num_heads_kv, int(values["q_tiles"])
        else:
            grid, met = int(values["num_tiles"]), int(values["n_tiles"])
        if grid > MAX_GRID_X:
            raise UnsupportedError(f"{grid} tiles", where=plan.kernel_name, allowed=f"{MAX_GRID_X} tiles",
                                   next="split the batch")
        if "tiles" in plan.pointers:
            buffers.append(Buffer("tiles", "i32", (grid, met)))
        steps.append(Step(name, grid, plan.launch.threads, values))
    rows = (sizes.num_heads_q, sizes.seqlen_q) if varlen else (sizes.batch, sizes.num_heads_q, sizes.seqlen_q)
    lists = (max(buffers, key=lambda buffer: buffer.size),) if buffers else ()  # steps run one after the other
    return Program(tuple(steps), (Buffer("delta", "f32", rows), *lists))
