"""How a call of standard attention is launched: three kernels, with S and P in scratch memory."""
from __future__ import annotations

from collections.abc import Mapping

from flashgen.codegen.families.shared.launch import LOG2_E, MAX_GRID_X, Sizes
from flashgen.codegen.plan import Plan
from flashgen.codegen.program import Buffer, Number, Program, Step
from flashgen.codegen.smem import round_up
from flashgen.errors import UnsupportedError

BLOCK_M, BLOCK_N = 128, 64  # rows and keys of a tile, in all three kernels
ROWS_PER_BLOCK = 8          # of the softmax kernel: each of 8 warps has a row


def launch(plans: Mapping[str, Plan], sizes: Sizes, num_sms: int) -> Program:
    """The program of a forward call: a step for each of the given plans. UnsupportedError if a grid is too large."""
    m_tiles, n_tiles = -(-sizes.seqlen_q // BLOCK_M), -(-sizes.seqlen_kv // BLOCK_N)
    heads, score_cols = sizes.batch * sizes.num_heads_q, round_up(sizes.seqlen_kv, BLOCK_N)
    num_rows = heads * sizes.seqlen_q
    grids = {"scores": n_tiles * m_tiles * heads, "softmax": -(-num_rows // ROWS_PER_BLOCK), "values": m_tiles * heads}
    if max(grids.values()) > MAX_GRID_X or num_rows > MAX_GRID_X:
        raise UnsupportedError(f"{num_rows} rows of scores in {max(grids.values())} tiles", where="standard",
                               allowed=f"{MAX_GRID_X} of each", next="split the batch")
    values: dict[str, Number] = {
        "seqlen_q": sizes.seqlen_q, "seqlen_kv": sizes.seqlen_kv, "score_cols": score_cols, "num_rows": num_rows,
        "num_heads_q": sizes.num_heads_q, "heads_per_kv_head": sizes.num_heads_q // sizes.num_heads_kv,
        "m_tiles": m_tiles, "n_tiles": n_tiles, "scale_log2": sizes.softmax_scale * LOG2_E,
        "align_bottom_right": int(not sizes.top_left), **sizes.strides,
    }
    shape, plan = (sizes.batch, sizes.num_heads_q, sizes.seqlen_q, score_cols), next(iter(plans.values()))
    return Program(tuple(Step(name, grids[name], plan.launch.threads, values) for name, plan in plans.items()),
                   (Buffer("scores", "f32", shape), Buffer("probs", str(plan.spec_value("dtype")), shape)))
