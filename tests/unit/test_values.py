"""Launch rules: how a call's numbers become a grid and parameter values, and what the driver is handed in the end."""
from __future__ import annotations

import dataclasses
import math
import struct
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tensor_map_kit import fa3_like
from typer.testing import CliRunner

from flashgen.cli.app import app
from flashgen.codegen.families.registry import lower, program_of
from flashgen.codegen.families.shared.launch import Sizes, is_persistent, splits_keys, tiled_values
from flashgen.codegen.plan import Plan
from flashgen.codegen.program import Step
from flashgen.codegen.spec.spec import Spec
from flashgen.errors import PlanError, UnsupportedError
from flashgen.runtime.launch.kernel import divisor_bytes

SMS = 132


def plan_of(family: str, **changes: Any) -> Plan:
    return lower(Spec(**{"name": "t", "family": family, "pass": "fwd", "arch": "sm_90a", "dtype": "bf16",  # type: ignore
                         "head_dim_qk": 128, **changes}))


def call(**changes: Any) -> Sizes:
    return Sizes(**{"batch": 2, "seqlen_q": 1000, "seqlen_kv": 3000, "num_heads_q": 16, "num_heads_kv": 4,
                    "softmax_scale": 0.5, **changes})


def step(plan: Plan, num_sms: int = SMS, **changes: Any) -> Step:
    """The only launch of a call."""
    [found] = program_of(plan, call(**changes), num_sms).steps
    return found


@pytest.mark.parametrize("family", ["fa2", "fa3"])
@pytest.mark.parametrize("kv_layout", ["dense", "varlen"])
def test_what_all_families_share(family: str, kv_layout: str) -> None:
    plan = plan_of(family, kv_layout=kv_layout, causal=True)
    launch = step(plan, top_left=True, window=(-1, 7), strides={"q_row_stride": 11})
    values = launch.values
    block_m = plan.constant("BLOCK_M") if family == "fa2" else values["block_rows"]
    m_tiles = math.ceil(1000 / block_m) if kv_layout == "dense" else 1000 // block_m + 3
    tiles = m_tiles * 16 * (2 if kv_layout == "dense" else 1)
    expected = {"batch": 2, "seqlen_q": 1000, "seqlen_kv": 3000, "num_heads_q": 16, "heads_per_kv_head": 4,
                "m_tiles": m_tiles, "num_tiles": tiles, "scale_log2": 0.5 * math.log2(math.e), "align_bottom_right": 0,
                "window_left": 3000, "window_right": 7, "q_row_stride": 11}
    assert values.items() >= expected.items()
    if family == "fa2":
        assert launch.grid_x == tiles and not is_persistent(plan)
    else:
        assert launch.grid_x == min(SMS, tiles) and is_persistent(plan)


def test_every_parameter_gets_a_value() -> None:
    for family in ("fa2", "fa3"):
        for change in ({}, {"causal": True}, {"window": True, "kv_layout": "varlen"}, {"lse": False}):
            plan = plan_of(family, **change)
            strides = {p.name: 8 for p in plan.params if p.name.endswith("_stride")}
            named = {p.name for p in plan.params} - {row.name for row in plan.tensor_maps} - {*plan.pointers}
            assert named <= step(plan, strides=strides).values.keys()


def test_every_pointer_is_a_tensor_or_a_buffer() -> None:
    """fa3 needs what fa2 needs, and the buffers of its programs."""
    for change in ({}, {"causal": True}, {"kv_layout": "varlen"}, {"lse": False}, {"batch_invariant": True}):
        plan = plan_of("fa3", **change)
        buffers = [buffer.name for buffer in program_of(plan, call(), SMS).buffers]
        assert buffers == ["counters", "partials"][:1 + splits_keys(plan)]
        assert {*plan.pointers} == {*plan_of("fa2", **change).pointers, *buffers}


def test_too_many_tiles_are_refused() -> None:
    for family in ("fa2", "fa3"):
        with pytest.raises(UnsupportedError, match=r"(?s)tiles.*allowed: 2147483647 tiles.*split the batch"):
            step(plan_of(family), batch=2**20, seqlen_q=2**19)


def test_a_family_without_rules_is_refused() -> None:
    with pytest.raises(PlanError, match="fa9"):
        step(dataclasses.replace(plan_of("fa2"), family="fa9"))


def test_families_differ_in_the_grid_alone() -> None:
    plan = fa3_like()
    launch = step(plan)
    assert launch.values.items() >= tiled_values(plan, 16, call()).items() and launch.grid_x == SMS


def test_no_launch_is_empty() -> None:
    plan = fa3_like()
    for seqlen_q in (1, 16, 17):
        assert step(plan, seqlen_q=seqlen_q, seqlen_kv=0).grid_x >= 1
    varlen = fa3_like(kv_layout="varlen", partials=False)
    assert step(varlen, seqlen_q=1, batch=1, num_heads_q=1, num_heads_kv=1).grid_x == 2


INT_MAX = 2**31 - 1


@given(st.integers(0, INT_MAX), st.integers(1, INT_MAX), st.integers(0, 3))
@example(INT_MAX, 1, 0)
@example(INT_MAX, INT_MAX, 0)
@example(INT_MAX - 1, INT_MAX, 0)
@example(INT_MAX, 2**30 + 1, 0)
def test_a_divisor_divides(number: int, value: int, beside: int) -> None:
    """By the instructions of divisor.cuh. Near multiples of the divisor, where a quotient could be one off, too."""
    _, multiplier, shift = struct.unpack("<iII", divisor_bytes(value))
    for n in (number, min(max(number // value * value + beside - 2, 0), INT_MAX)):
        assert 2 * n * multiplier >> 32 >> shift == n // value
    assert multiplier < 2**32


def test_a_divisor_of_nothing_can_be_packed() -> None:
    """Calls without rows have no tiles, and launch nothing."""
    assert struct.unpack("<iII", divisor_bytes(0))[0] == 0


def test_explain_shows_the_blocks_of_a_launch() -> None:
    """Which may be of fewer rows than the plan's."""
    def run(*options: str) -> str:
        return CliRunner().invoke(app, ["explain", *options]).stdout

    def launch(variant: str, sizes: str) -> str:
        text = run("fa3_fwd", "--variant", f"{variant}.sm_90a", "--problem", sizes)
        return text.partition("launch\n")[2].partition("look-up")[0]

    few = launch("fa3_fwd_bf16_d128", "batch=1 seqlen_q=1024 seqlen_kv=1024 num_heads_q=8 num_heads_kv=8")
    assert "128 blocks of 256 threads" in few and "64 rows, where the work above has 192, by 1 of 3" in few
    many = launch("fa3_fwd_bf16_d128_varlen", "batch=4 seqlen_q=4096 num_heads_q=32 num_heads_kv=8")
    assert "132 blocks of 512 threads" in many and "192 rows, by 3 of 3" in many and "none split" in many
    assert "in up to" in launch("fa3_fwd_bf16_d128_split",
                                "batch=1 seqlen_q=64 seqlen_kv=16384 num_heads_q=1 num_heads_kv=1")
    assert "launch" not in run("fa2_fwd")
