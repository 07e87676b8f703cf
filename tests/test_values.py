"""Launch rules: how a call's numbers become a grid and parameter values, and what the driver is handed in the end."""
from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tensor_map_kit import fa3_like

from flashgen.codegen.lower import lower
from flashgen.codegen.plan import Plan
from flashgen.codegen.spec import Spec
from flashgen.codegen.warpgroup import MAX_WARPGROUPS
from flashgen.errors import PlanError, UnsupportedError
from flashgen.runtime.values import (
    LAST_ROUNDS,
    MAX_SPLITS,
    SECTION_BYTES,
    SECTION_HEADS,
    SPLIT_OVERHEAD_TILES,
    counter_words,
    fa2_values,
    fa3_values,
    is_persistent,
    launch_values,
    pointer_names,
    sections,
    split_tail,
    splits_keys,
    wants_split,
)

SMS = 132


def plan_of(family: str, **changes: Any) -> Plan:
    return lower(Spec(**{"name": "t", "family": family, "pass": "fwd", "arch": "sm_90a", "dtype": "bf16",  # type: ignore
                         "head_dim_qk": 128, **changes}))


def call(**changes: Any) -> dict[str, Any]:
    return {"batch": 2, "seqlen_q": 1000, "seqlen_kv": 3000, "num_heads_q": 16, "num_heads_kv": 4, "softmax_scale": 0.5,
            "top_left": False, "window": (-1, -1), "strides": {}, **changes}


@pytest.mark.parametrize("family", ["fa2", "fa3"])
@pytest.mark.parametrize("kv_layout", ["dense", "varlen"])
def test_what_all_families_share(family: str, kv_layout: str) -> None:
    plan = plan_of(family, kv_layout=kv_layout, causal=True)
    values = launch_values(plan, num_sms=SMS, **call(top_left=True, window=(-1, 7), strides={"q_row_stride": 11}))
    block_m = plan.constant("BLOCK_M")
    m_tiles = math.ceil(1000 / block_m) if kv_layout == "dense" else 1000 // block_m + 3
    tiles = m_tiles * 16 * (2 if kv_layout == "dense" else 1)
    expected = {"batch": 2, "seqlen_q": 1000, "seqlen_kv": 3000, "num_heads_q": 16, "heads_per_kv_head": 4,
                "m_tiles": m_tiles, "num_tiles": tiles, "scale_log2": 0.5 * math.log2(math.e), "align_bottom_right": 0,
                "window_left": 3000, "window_right": 7, "q_row_stride": 11}
    assert values.items() >= expected.items()
    if family == "fa2":
        assert values["grid_x"] == tiles and not is_persistent(plan)
    else:
        assert values["grid_x"] == min(SMS, tiles) and is_persistent(plan)


def test_every_parameter_gets_a_value() -> None:
    for family in ("fa2", "fa3"):
        for change in ({}, {"causal": True}, {"window": True, "kv_layout": "varlen"}, {"lse": False}):
            plan = plan_of(family, **change)
            strides = {p.name: 8 for p in plan.params if p.name.endswith("_stride")}
            values = launch_values(plan, num_sms=SMS, **call(strides=strides))
            named = {p.name for p in plan.params} - {row.name for row in plan.tensor_maps} - {*pointer_names(plan)}
            assert named <= values.keys()


def test_counters_and_partials_are_the_last_pointers() -> None:
    """CountingLauncher adds them to what flashgen.attention gives for every family."""
    for change in ({}, {"causal": True}, {"kv_layout": "varlen"}, {"lse": False}, {"batch_invariant": True}):
        plan = plan_of("fa3", **change)
        names = pointer_names(plan)
        extra = ["counters", "partials"] if splits_keys(plan) else ["counters"]
        assert names == pointer_names(plan_of("fa2", **change)) + extra


def test_too_many_tiles_are_refused() -> None:
    for family in ("fa2", "fa3"):
        with pytest.raises(UnsupportedError, match=r"(?s)tiles.*allowed: 2147483647 tiles.*split the batch"):
            launch_values(plan_of(family), num_sms=SMS, **call(batch=2**20, seqlen_q=2**19))


def test_a_family_without_rules_is_refused() -> None:
    with pytest.raises(PlanError, match="fa9"):
        launch_values(dataclasses.replace(plan_of("fa2"), family="fa9"), num_sms=SMS, **call())


def test_families_differ_in_the_grid_alone() -> None:
    plan = fa3_like()
    common = fa2_values(plan, **call())
    assert fa3_values(plan, num_sms=SMS, **call()).items() >= {**common, "grid_x": SMS}.items()


# ---- the last round of tiles

@pytest.mark.parametrize("tiles, key_tiles, splits", [
    (0, 64, False),                        # nothing to do
    (132, 64, False), (264, 64, False),    # whole rounds
    (1, 64, True), (9, 64, True), (66, 64, True), (133, 64, True),
    (131, 64, False),                      # a piece more for each is another round
    (133, 1, False), (133, 0, False),      # one key tile has no pieces, and none has less
    (66, SPLIT_OVERHEAD_TILES, False),     # half the keys cost as much as they save
    (100 * SMS + 1, 64, False),            # nor is the last of a hundred rounds worth a slower kernel
])
def test_where_tiles_are_split(tiles: int, key_tiles: int, splits: bool) -> None:
    assert (split_tail(tiles, SMS, key_tiles)[1] > 1) == splits


@given(st.integers(0, 2000), st.integers(1, 200), st.integers(0, 3000))
def test_splits_are_few_and_pay(tiles: int, num_sms: int, key_tiles: int) -> None:
    full, splits = split_tail(tiles, num_sms, key_tiles)

    def rounds(parts: int) -> float:
        overhead = SPLIT_OVERHEAD_TILES if parts > 1 else 0
        return math.ceil((tiles - full) * parts / num_sms) * (key_tiles / parts + overhead)

    if splits == 1:
        assert full == tiles
        return
    assert full % num_sms == 0 and 0 < tiles - full < num_sms and splits <= min(MAX_SPLITS, key_tiles)
    assert rounds(splits) < rounds(1)
    assert rounds(splits) <= 1.05 * min(map(rounds, range(1, min(MAX_SPLITS, key_tiles) + 1)))
    # A word of the counters for each warpgroup of each split tile.
    assert 2 + MAX_WARPGROUPS * (tiles - full) <= counter_words(num_sms)


def few(**changes: Any) -> dict[str, Any]:
    """Five tiles of fa3_like, BLOCK_M 16 and BLOCK_N 16, with 64 key tiles."""
    return call(**{"batch": 1, "seqlen_q": 16, "seqlen_kv": 1024, "num_heads_q": 5, "num_heads_kv": 5, **changes})


def test_splits_bring_partials_and_blocks() -> None:
    plan = fa3_like()  # PARTIAL_FLOATS 32
    values = fa3_values(plan, num_sms=4, **few())
    assert (values["num_tiles"], values["full_tiles"], values["splits"]) == (5, 4, 4)
    assert values["partials_floats"] == 4 * 32 and values["grid_x"] == 4
    values = fa3_values(plan, num_sms=64, **few())
    assert values["full_tiles"] == 0 and values["splits"] > 1 and values["grid_x"] == 5 * values["splits"] <= 64
    assert values["partials_floats"] == 5 * values["splits"] * 32
    values = fa3_values(plan, num_sms=4, **few(seqlen_kv=0))
    assert (values["full_tiles"], values["splits"], values["partials_floats"], values["grid_x"]) == (5, 1, 0, 4)


def test_a_plan_without_partials_splits_nothing() -> None:
    plan = fa3_like(partials=False)
    assert not splits_keys(plan)
    values = fa3_values(plan, num_sms=4, **few())
    assert (values["full_tiles"], values["splits"], values["partials_floats"], values["grid_x"]) == (5, 1, 0, 4)


def test_a_call_asks_for_the_twin_that_splits_where_that_saves_time() -> None:
    """And the twin then does split."""
    def asks(num_sms: int, changes: dict[str, Any], **problem: Any) -> bool:
        plan, sizes = plan_of("fa3", **changes), call(batch=1, num_heads_q=1, num_heads_kv=1, **problem)
        wanted = wants_split(plan, launch_values(plan, num_sms=num_sms, **sizes), num_sms)
        if wanted:
            assert launch_values(plan_of("fa3", split=True, **changes), num_sms=num_sms, **sizes)["splits"] > 1
        return wanted

    few_tiles = {"seqlen_q": 2000, "seqlen_kv": 4000}
    assert asks(SMS, {}, **few_tiles) and asks(SMS, {"causal": True}, **few_tiles)
    assert not asks(1, {}, **few_tiles)
    assert asks(5, {}, seqlen_q=2000, seqlen_kv=3000)
    # With tickets and many tiles, the longest first, the blocks end together.
    assert not asks(5, {"causal": True}, seqlen_q=2000, seqlen_kv=3000)
    for never in ({"window": True}, {"kv_layout": "varlen"}, {"batch_invariant": True}, {"split": True}):
        plan = plan_of("fa3", **never)
        assert not wants_split(plan, launch_values(plan, num_sms=SMS, **call(**few_tiles)), SMS)
    plan = plan_of("fa2")
    assert not wants_split(plan, launch_values(plan, num_sms=SMS, **call(**few_tiles)), SMS)


def test_no_launch_is_empty() -> None:
    plan = fa3_like()
    for seqlen_q in (1, 16, 17):
        assert fa3_values(plan, num_sms=SMS, **call(seqlen_q=seqlen_q, seqlen_kv=0))["grid_x"] >= 1
    varlen = fa3_like(kv_layout="varlen", partials=False)
    assert fa3_values(varlen, num_sms=SMS, **call(seqlen_q=1, batch=1, num_heads_q=1, num_heads_kv=1))["grid_x"] == 2


# ---- sections of heads

@pytest.mark.parametrize("heads, ratio, key_bytes, expected", [
    (64, 1, SECTION_BYTES // 8, 8),       # what fits
    (64, 1, SECTION_BYTES // 8 + 1, 7),
    (64, 1, SECTION_BYTES, 1),
    (64, 1, 100 * SECTION_BYTES, 1),        # never none
    (64, 4, SECTION_BYTES, 4),              # query heads that share K and V count once
    (64, 1, 0, SECTION_HEADS),              # no keys
    (3, 1, 1, 3),                           # all heads
])
def test_heads_per_section(heads: int, ratio: int, key_bytes: int, expected: int) -> None:
    assert sections(heads, 10**6, SMS, ratio, key_bytes)["heads_per_section"] == expected


def ordered_tile(tile: int, heads: int, m_tiles: int, heads_per_section: int, heads_at_the_end: int) -> int:
    """slots/order/longest_first.cuh.j2."""
    last_begin = heads - heads_at_the_end
    section = min(tile // (heads_per_section * m_tiles), last_begin // heads_per_section)
    first = section * heads_per_section
    here = heads_per_section if first < last_begin else heads_at_the_end
    place = tile - first * m_tiles
    return (first + place % here) * m_tiles + place // here


@given(st.integers(1, 70), st.integers(1, 40), st.integers(1, 30), st.sampled_from([1, 3, 8]),
       st.integers(0, 2 * SECTION_BYTES))
def test_sections_give_every_tile_once(heads: int, m_tiles: int, num_sms: int, ratio: int, key_bytes: int) -> None:
    """A section ends before the next begins, and the last one is long enough to end the grid with short tiles."""
    found = sections(heads, m_tiles, num_sms, ratio, key_bytes)
    order = [ordered_tile(tile, heads, m_tiles, **found) for tile in range(heads * m_tiles)]
    assert sorted(order) == list(range(heads * m_tiles))
    last, size = found["heads_at_the_end"], found["heads_per_section"]
    assert last * m_tiles >= min(LAST_ROUNDS * num_sms, heads * m_tiles) and (heads - last) % size == 0
    for begin in range(0, heads - last, size):
        part = order[begin * m_tiles:(begin + size) * m_tiles]
        assert {tile // m_tiles for tile in part} == set(range(begin, begin + size))
    assert [tile % m_tiles for tile in order[(heads - last) * m_tiles:]] == sorted(
        tile % m_tiles for tile in order[(heads - last) * m_tiles:])


def test_sections_count_the_heads_of_all_sequences() -> None:
    many = call(batch=3, num_heads_q=8, num_heads_kv=8, seqlen_q=1, seqlen_kv=1)
    assert fa3_values(fa3_like(), num_sms=SMS, **many)["heads_at_the_end"] == 24
    assert fa3_values(fa3_like(kv_layout="varlen"), num_sms=SMS, **many)["heads_at_the_end"] == 8
