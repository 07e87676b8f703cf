"""The backward pass of families that have one: three kernels a call, with P recomputed from q, k and lse.

preprocess makes delta = rowsum(dout * out) and clears dq_accum. gradients makes dK and dV of a tile of keys in
registers and adds its share of dQ to dq_accum, in fp32. postprocess scales dQ and rounds it. The first and the last are
the same for all families, and so is the layout of what they leave each other (docs/backward.md). No torch, no CUDA.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from flashgen.codegen.families.family import Pass
from flashgen.codegen.families.shared.kernels import named
from flashgen.codegen.families.shared.launch import LOG2_E, MAX_GRID_X, Sizes, is_varlen, smallest_call, tiled_values
from flashgen.codegen.families.shared.loops import KvLoop
from flashgen.codegen.families.shared.sums import TURN_PARTS
from flashgen.codegen.plan import Plan
from flashgen.codegen.program import Buffer, Number, Program, Step
from flashgen.codegen.spec.rule import Only
from flashgen.errors import UnsupportedError

GROUP_ROWS = 64  # rows of dQ that lie together in dq_accum: what a warpgroup's accumulator, or four warps', holds

SMALLEST_SCALE = 2.0 ** -100  # of softmax, where lse is divided by it

ONLY = (
    Only("lse", (True,), "it reads lse"),
    Only("normalize", ("softmax",), "it recomputes P from lse"),
    *(Only(name, (None,), "its tile table decides") for name in ("tile", "stages", "roles")),
)

# From the gradients' plan, values of the call and SMs to more values of that kernel, and its number of blocks.
Grid = Callable[[Plan, Mapping[str, Number], int], tuple[int, Mapping[str, Number]]]


def backward(gradients: str, *, grid: Grid | None = None, only: tuple[Only, ...] = (),
             loops: Callable[[Plan], tuple[KvLoop, ...]] | None = None) -> Pass:
    """`gradients`: the module whose lower_gradients(spec, target) makes the plan of the kernel of that name. `grid`:
    its blocks, where they are not one for each tile of keys. `only`: what else that kernel takes of a spec."""

    def lower(spec: Any, target: Any) -> Any:
        shared = import_module("flashgen.codegen.families.shared.backward_lower")
        return shared.lower(spec, target, import_module(gradients).lower_gradients)

    def launch(plans: Mapping[str, Plan], sizes: Sizes, num_sms: int) -> Program:
        return _launch(plans, sizes, num_sms, grid or _one_block_per_tile)

    def explain(plan: Plan, spec: Any, **call: Any) -> Any:
        found = import_module("flashgen.codegen.families.shared.backward_explain").explain_backward
        return found(plan, lambda sizes: launch({plan.step: plan}, sizes, 1), **call)

    return Pass("bwd", "attention_backward", "gradients of fwd", lower, launch, smallest_call, explain,
                kernels=named("preprocess", "gradients", "postprocess"), shown="gradients", loops=loops,
                only=(*ONLY, *only), follows=True)


def key_tiles(plan: Plan, values: Mapping[str, Number]) -> int:
    """Tiles of keys of a call, one for each kv head; varlen: at most, as in slots/layout/varlen.cuh.j2."""
    return int(values["n_tiles"] * values["num_heads_kv"] * (1 if is_varlen(plan) else values["batch"]))


def row_terms_of(plan: Plan) -> str:
    """How lse and delta come to the products: a choice of slot `row_terms`."""
    return "operand" if {"row_terms", "lse_scale"} & {param.name for param in plan.params} else "numbers"


def _one_block_per_tile(plan: Plan, values: Mapping[str, Number], num_sms: int) -> tuple[int, Mapping[str, Number]]:
    return key_tiles(plan, values), {}


def _launch(plans: Mapping[str, Plan], sizes: Sizes, num_sms: int, grid: Grid) -> Program:
    """The program of a backward call: a step for each of the given plans. UnsupportedError if a grid is too large."""
    plan = next(iter(plans.values()))
    in_turns = {bool(each.spec_value("deterministic")) for each in plans.values()}
    if len(in_turns) > 1:
        raise UnsupportedError("kernels of one call differ in `deterministic`", where=plan.kernel_name,
                               allowed="all of them true, or all false", next="a spec file or bundle that has both")
    block_m, block_n, varlen = plan.constant("BLOCK_M"), plan.constant("BLOCK_N"), is_varlen(plan)
    values = tiled_values(plan, block_m, sizes)
    values["n_tiles"] = sizes.seqlen_kv // block_n + sizes.batch + 1 if varlen else -(-sizes.seqlen_kv // block_n)
    q_tiles = int(values["m_tiles"]) * (1 if varlen else sizes.batch)
    values["q_tiles"] = q_tiles
    if any(("score_slope", "expression") in each.slots for each in plans.values()):
        values["scale_log2"] = LOG2_E  # scores come in natural units
    operand = any(row_terms_of(each) == "operand" for each in plans.values())
    if operand:
        # lse is divided by the scale. One so small that no score counts beside lse may as well be larger.
        scale = math.copysign(max(abs(values["softmax_scale"]), SMALLEST_SCALE), values["softmax_scale"])
        values["lse_scale"], values["scale_log2"] = -1 / scale, scale * LOG2_E
    groups = q_tiles * sizes.num_heads_q * (block_m // GROUP_ROWS)
    if max(groups, key_tiles(plan, values)) > MAX_GRID_X:
        raise UnsupportedError(f"{groups} tiles of {GROUP_ROWS} queries, {key_tiles(plan, values)} of {block_n} keys",
                               where=plan.kernel_name, allowed=f"{MAX_GRID_X} of each", next="split the batch")
    values |= {param.name: 0 for each in plans.values() for param in each.params
               if param.name.endswith("_batch_stride") and varlen}
    blocks = {"preprocess": q_tiles * sizes.num_heads_q, "postprocess": groups}

    def step(name: str, plan: Plan) -> Step:
        grid_x, more = (blocks[name], {}) if name in blocks else grid(plan, values, num_sms)
        return Step(name, grid_x, plan.launch.threads, {**values, **more})

    rows, columns = q_tiles * block_m, -(-int(str(plan.spec_value("head_dim_qk"))) // 16) * 16
    return Program(tuple(step(*item) for item in plans.items()), (
        *((Buffer("row_terms", "f32", (sizes.num_heads_q, rows, 4)),) if operand else
          (Buffer("neg_lse", "f32", (sizes.num_heads_q, rows)), Buffer("neg_delta", "f32", (sizes.num_heads_q, rows)))),
        Buffer("dq_accum", "f32", (sizes.num_heads_q, rows, columns)),
        *(Buffer("turns", "i32", (sizes.num_heads_q, q_tiles, plan.constant(TURN_PARTS)))
          for each in in_turns if each)))
