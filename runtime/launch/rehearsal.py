"""Whether a plan that came from a file can be launched: its smallest call is packed, as a real one would be.

What a launch reads of a plan (constants, spec fields, parameter names) is known to the launch rules alone, so they are
asked instead of a second list of names.
"""
from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

from flashgen.codegen.plan import Plan
from flashgen.errors import PlanError
from flashgen.runtime.launch.kernel import pack_params
from flashgen.runtime.launch.tensor_map import ELEMENTS, map_shapes
from flashgen.runtime.launch.values import launch_values
from flashgen.runtime.ops.mla_decode.values import mla_values, schedule_values

_SIZES: dict[str, Any] = {"num_sms": 1, "batch": 1, "seqlen_q": 1, "num_heads_q": 1}


def check_launch(plan: Plan) -> None:
    """PlanError unless the smallest call can be packed for the plan. Families without launch rules are not asked for:
    no lookup finds them."""
    rules = _RULES.get((plan.family, plan.pass_))
    if rules is None:
        return
    strides = {p.name: 8 for p in plan.params if p.name.endswith("_stride")}
    scalars = {p.name: 0 for p in plan.params if p.name.startswith("user_")}
    try:
        values = {**rules(plan, strides), **scalars}
        pack_params(plan, values)
        if values["grid_x"] != 1:
            raise PlanError(f"a grid of {values['grid_x']} for one query on one SM", allowed="1")
        if {shape.dtype for shape in map_shapes(plan, values)} - ELEMENTS.keys():
            raise PlanError(f"a tensor map of {plan.spec_value('dtype')}", allowed=", ".join(ELEMENTS))
    except (ArithmeticError, LookupError, TypeError, ValueError, struct.error) as err:
        raise PlanError(f"no call can be packed for it ({type(err).__name__}: {err})",
                        where=plan.kernel_name, allowed="what the launch rules of its family read") from err


def _attention(plan: Plan, strides: dict[str, int]) -> dict[str, Any]:
    return launch_values(plan, **_SIZES, seqlen_kv=1, num_heads_kv=1, softmax_scale=1.0, top_left=False,
                         window=(-1, -1), strides=strides)


def _decode(plan: Plan, strides: dict[str, int]) -> dict[str, Any]:
    names = ("q_batch_stride", "q_row_stride", "kv_page_stride", "kv_row_stride")  # of the call, not of the plan
    return mla_values(plan, **_SIZES, seqlen_kv=64, num_pages=1, page_size=64, max_pages=1, softmax_scale=1.0,
                      causal=False, strides=dict.fromkeys(names, 8))


_RULES: dict[tuple[str, str], Callable[[Plan, dict[str, int]], dict[str, Any]]] = {
    ("fa2", "fwd"): _attention, ("fa3", "fwd"): _attention, ("flashmla", "decode"): _decode,
    ("flashmla", "schedule"): lambda plan, strides: schedule_values(plan, **_SIZES)}
