"""Where query tiles are split along their keys, and in which order a grid takes heads."""
from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tensor_map_kit import fa3_like
from test_values import SMS, call, plan_of, step

from flashgen.codegen.families.fa3.launch import counter_words, tile_config_of
from flashgen.codegen.families.fa3.split import (
    BYTE_CYCLES,
    LAST_WAVES,
    MANY_WAVES,
    MAX_SPLITS,
    MAX_WAVES,
    MERGE_CYCLES,
    SECTION_BYTES,
    SECTION_HEADS,
    WAVE_CYCLES,
    ProblemShape,
    SplitPlan,
    TileConfig,
    TileGrid,
    best_variant,
    cut_launch,
    sections,
    split_last_wave,
)
from flashgen.codegen.families.fa3.tiles import KINDS, kernel_kind
from flashgen.codegen.families.registry import lower, program_of
from flashgen.codegen.families.shared.launch import splits_keys
from flashgen.codegen.mask import query_tiles
from flashgen.codegen.plan import Plan
from flashgen.codegen.program import Step
from flashgen.codegen.spec.spec import load_specs, spec_path
from flashgen.runtime.measure.grid import ROOT

FULL = TileConfig(192, 64, False, False, 128, 128, 2)
STEP = FULL.step_cycles


def plan_splits(config: TileConfig, num_sms: int, **call: Any) -> SplitPlan:
    return TileGrid.of(config, num_sms, ProblemShape(**call)).plan_splits()[0]


# ---- the last wave of tiles

@pytest.mark.parametrize("tiles, key_tiles, splits", [
    (0, 64, False),                        # nothing to do
    (132, 64, False), (264, 64, False),    # whole waves
    (1, 64, True), (9, 64, True), (66, 64, True), (133, 64, True),
    (131, 64, False),                      # a piece more for each is another wave
    (133, 1, False),                       # one key tile has no splits
    (66, int(2 * MERGE_CYCLES / STEP), False),  # half the keys cost as much as they save
    (100 * SMS + 1, 64, False),            # nor is the last of a hundred waves worth a slower kernel
])
def test_where_tiles_are_split(tiles: int, key_tiles: int, splits: bool) -> None:
    split_plan, saved = split_last_wave(tiles, {key_tiles: tiles % SMS} if tiles % SMS else {}, SMS, 10**4, FULL)
    assert (split_plan.max_splits > 1) == (saved > 0) == splits


@given(st.integers(0, 2000), st.integers(1, 200), st.lists(st.integers(1, 3000), max_size=20),
       st.integers(0, 2**22))
def test_splits_are_few_and_pay(full: int, num_sms: int, many: list[int], split_bytes: int) -> None:
    many = many[:num_sms - 1]
    lengths = {length: many.count(length) for length in many}
    tiles, longest = full * num_sms + len(many), max(many, default=1)
    found, saved = split_last_wave(tiles, lengths, num_sms, split_bytes, FULL)

    def cost(size: int) -> float:
        num_splits = sum(math.ceil(length / size) for length in many)
        return (math.ceil(num_splits / num_sms) * (STEP * size + WAVE_CYCLES) + MERGE_CYCLES
                + num_splits * split_bytes * BYTE_CYCLES)

    if found.max_splits == 1:
        assert found == (tiles, 1, 1, tiles) and saved == 0
        return
    assert found.full_tiles == full * num_sms and found.max_splits == math.ceil(longest / found.tiles_per_split)
    assert found.num_work_tiles == full * num_sms + sum(math.ceil(length / found.tiles_per_split) for length in many)
    assert found.max_splits <= MAX_SPLITS and cost(found.tiles_per_split) < STEP * longest + WAVE_CYCLES
    assert saved == pytest.approx(STEP * longest + WAVE_CYCLES - cost(found.tiles_per_split))
    sizes = {math.ceil(longest / count) for count in range(2, min(MAX_SPLITS, longest) + 1)}
    few = [size for size in sizes if sum(math.ceil(length / size) for length in many) <= MAX_WAVES * num_sms]
    assert all(cost(found.tiles_per_split) <= cost(size) / 0.98 for size in few)
    assert 3 + len(many) <= counter_words(num_sms)


# ---- rows of tiles, kinds of kernels

ROWS = json.loads((ROOT / "benchmarks" / "results" / "h200" / "fa3-rows.json").read_text())["rows"]
KERNELS = {(spec.head_dim_qk, spec.head_dim_v, spec.causal, kernel_kind(spec.split, spec.pack_gqa)):
           tile_config_of(lower(spec)) for name in ("fa3_fwd", "fa3_fwd_d192_v128")
           for spec in load_specs(spec_path(name)).specs
           if spec.dtype == "bf16" and spec.kv_layout == "dense" and not spec.window}


def chosen(row: dict[str, Any]) -> tuple[float, float]:
    """Microseconds of what a timed call gets; of the best that was timed. A number of splits that was not timed counts
    as one that is near, or as the slower of its neighbours."""
    heads, kv_heads = row["num_heads"]
    shape = ProblemShape(row["batch"], row["seqlen_q"], row["seqlen_kv"], heads, kv_heads)
    kernels = {kind: KERNELS[(*row["head_dims"], row["causal"], kind)] for kind in KINDS}
    whole, cut, packed = kernels.values()
    splits, packs = best_variant((whole, cut, packed), SMS, shape)
    kind = kernel_kind(splits, bool(packs))
    rows, split_plan = cut_launch(kernels[kind], SMS, shape, splits=splits)
    timed = {int(name.split()[2]): us for name, us in row["us"].items()
             if name.startswith(f"{kind} {rows.warpgroups} ")}
    count = split_plan.max_splits
    neighbours = [side(timed) for side in (
        lambda counts: max((c for c in counts if c <= count), default=0),
        lambda counts: min((c for c in counts if c >= count), default=0)) if side(timed)]
    near = [c for c in neighbours if 0.9 * count <= c <= 1.1 * count] or neighbours
    return max(timed[c] for c in near), min(row["us"].values())


def test_calls_get_about_the_fastest_that_was_timed() -> None:
    """The model of families/fa3/split.py against every number of warpgroups and splits of 250 calls."""
    # Few queries that were timed packed alone, but are served unpacked: as many rows either way.
    rows = [row for row in ROWS if not (row["num_heads"] == [32, 8] and row["seqlen_q"] == 64)]
    assert len(rows) > 240
    lost = [us / best for us, best in map(chosen, rows)]
    assert sum(lost) / len(lost) < 1.015 and max(lost) < 1.25
    assert sum(loss > 1.05 for loss in lost) < len(lost) / 10


def test_timed_calls_beat_fa3() -> None:
    """Where few tiles make the choice matter; 512 queries over 4k keys come in two waves, either way."""
    ratios = [row["fa3_us"] / chosen(row)[0] for row in ROWS if "fa3_us" in row]
    assert min(ratios) > 0.965 and sum(ratio < 1.03 for ratio in ratios) <= 6 < 200 < len(ratios)


def test_of_batch_invariant_kernels_all_tiles_are_tall() -> None:
    for invariant, rows in ((True, 192), (False, 64)):
        plan = plan_of("fa3", batch_invariant=invariant)
        launch = step(plan, batch=1, seqlen_q=300, seqlen_kv=300)
        assert launch.values["block_rows"] == rows and launch.threads == 2 * rows + 128


def test_many_tiles_are_tall() -> None:
    for seqlen_q, rows in ((64, 64), (192 * MANY_WAVES * SMS + 1, 192)):
        found, split_plan = cut_launch(FULL, SMS, ProblemShape(1, seqlen_q, 512, 1, 1), splits=False)
        assert found == FULL._replace(rows=rows)
        assert split_plan == (math.ceil(seqlen_q / rows), 1, 1, split_plan.full_tiles)


@given(st.integers(1, 4), st.integers(1, 40), st.integers(1, 3000), st.integers(1, 6000), st.booleans(),
       st.booleans(), st.sampled_from([(-1, -1), (100, 0), (7, 700)]))
def test_rows_are_those_that_cost_least(batch: int, heads: int, seqlen_q: int, seqlen_kv: int, causal: bool,
                                        splits: bool, window: tuple[int, int]) -> None:
    shape = ProblemShape(batch, seqlen_q, seqlen_kv, heads, 1, window=window)
    found, split_plan = cut_launch(FULL._replace(causal=causal), SMS, shape, splits=splits)
    tallest = TileGrid.of(FULL._replace(causal=causal), SMS, shape)
    assert split_plan.num_work_tiles >= TileGrid.of(found, SMS, shape).tiles and (splits or split_plan.max_splits == 1)
    if tallest.waves > MANY_WAVES:
        assert found.rows == 192
    elif not splits:
        cycles = {rows: TileGrid.of(tallest.config._replace(rows=rows), SMS, shape).cycles() for rows in (64, 128, 192)}
        assert cycles[found.rows] == min(cycles.values())


@pytest.mark.parametrize("warpgroups, cycles", [(1, 960), (2, 1150), (3, 1540)])
def test_a_step_takes_about_what_was_timed(warpgroups: int, cycles: int) -> None:
    assert FULL._replace(rows=64 * warpgroups).step_cycles == pytest.approx(cycles, rel=0.1)


def test_which_twin_serves_a_call() -> None:
    cut, packed = FULL, TileConfig(64, 64, False, True, 128, 128, 2)

    def best(cut: TileConfig, batch: int, seqlen_q: int, seqlen_kv: int, heads: int, kv_heads: int) -> tuple[bool, Any]:
        return best_variant((FULL, cut, packed), SMS, ProblemShape(batch, seqlen_q, seqlen_kv, heads, kv_heads))

    assert best(cut, 1, 1, 8192, 32, 8) == (True, True) and best(cut, 1, 16, 8192, 32, 8) == (True, True)
    assert best(cut, SMS, 192, 8192, 1, 1) == (False, False)    # a whole wave of full tiles
    assert best(cut, 1, 128, 8192, 8, 8)[1] is False            # keys would be read twice
    assert best(cut, 1, 2048, 2048, 32, 8)[1] is False          # no rows to spare
    assert best(cut, 1, 1, 8192, 130, 2)[1] is None             # a warpgroup does not hold 65 heads
    wide = cut._replace(keys=128)
    many = 5 * SMS
    assert best(wide, many, 192, 4096, 1, 1) == (True, False) and best(wide, many, 192, 2048, 1, 1) == (False, False)


@pytest.mark.parametrize("top_left", [False, True])
@given(st.integers(1, 5), st.integers(1, 700), st.integers(1, 900), st.integers(1, 40))
def test_causal_tiles_are_as_long_as_the_kernel_finds_them(top_left: bool, heads: int, seqlen_q: int, seqlen_kv: int,
                                                           num_sms: int) -> None:
    """The host counts the units that the kernel counts, tile by tile in its order: else it would wait forever."""
    cutting = TileConfig(192, 16, True, False, 64, 64, 2)
    shape = dict(batch=1, seqlen_q=seqlen_q, seqlen_kv=seqlen_kv, num_heads_q=heads, num_heads_kv=1, top_left=top_left)
    found = plan_splits(cutting, num_sms, **shape)  # type: ignore[arg-type]
    spans = query_tiles(seqlen_q, 192, 64)
    m_tiles = len(spans)
    order = sections(cutting, num_sms, heads, m_tiles, seqlen_kv, heads)
    units = found.full_tiles
    for tile in range(found.full_tiles, heads * m_tiles):
        m_tile = m_tiles - 1 - ordered_tile(tile, m_tiles, **order) % m_tiles
        keys = min(spans[m_tile][1] + (0 if top_left else seqlen_kv - seqlen_q), seqlen_kv - 1) + 1
        units += math.ceil(max(math.ceil(keys / 16), 1) / found.tiles_per_split)
    assert found.num_work_tiles == units


def few(plan: Plan, num_sms: int, seqlen_kv: int = 1024) -> tuple[Step, int]:
    """Launch and floats of partials of five tiles of fa3_like, BLOCK_M 16 and BLOCK_N 16, with 64 key tiles."""
    sizes = call(batch=1, seqlen_q=16, seqlen_kv=seqlen_kv, num_heads_q=5, num_heads_kv=5)
    program = program_of(plan, sizes, num_sms)
    return program.steps[0], sum(buffer.size for buffer in program.buffers if buffer.name == "partials")


def test_splits_bring_partials_and_blocks() -> None:
    plan = fa3_like()  # PARTIAL_FLOATS 32
    launch, floats = few(plan, 4)
    values = launch.values
    assert (values["num_tiles"], values["full_tiles"], values["max_splits"], values["num_work_tiles"]) == (5, 4, 4, 8)
    assert floats == 4 * 32 and launch.grid_x == 4 and launch.cooperative
    launch, floats = few(plan, 64)
    values = launch.values
    assert values["full_tiles"] == 0 and values["max_splits"] > 1
    assert launch.grid_x == values["num_work_tiles"] == 5 * values["max_splits"] <= 64
    assert floats == 5 * values["max_splits"] * 32
    launch, floats = few(plan, 4, seqlen_kv=0)
    assert (launch.values["full_tiles"], launch.values["max_splits"], floats, launch.grid_x) == (5, 1, 0, 4)
    assert not launch.cooperative


def test_a_plan_without_partials_splits_nothing() -> None:
    plan = fa3_like(partials=False)
    assert not splits_keys(plan)
    launch, floats = few(plan, 4)
    assert (launch.values["full_tiles"], launch.values["num_work_tiles"], floats, launch.grid_x) == (5, 5, 0, 4)


def test_short_tiles_of_a_mask_have_fewer_parts() -> None:
    """And those that fit into one split are written by its block."""
    plan = plan_of("fa3", causal=True, split=True)
    values = step(plan, batch=1, seqlen_q=2048, seqlen_kv=2048, num_heads_q=2, num_heads_kv=2).values
    assert values["full_tiles"] == 0 and values["num_work_tiles"] < values["num_tiles"] * values["max_splits"]


def test_few_tiles_are_cut_and_many_are_not() -> None:
    def cuts(num_sms: int, causal: bool, seqlen_kv: int = 4000) -> bool:
        cutting = tile_config_of(plan_of("fa3", split=True, causal=causal))
        return plan_splits(cutting, num_sms, batch=1, num_heads_q=1, num_heads_kv=1, seqlen_q=2000,
                        seqlen_kv=seqlen_kv).max_splits > 1

    assert cuts(SMS, False) and cuts(SMS, True)
    assert not cuts(1, False)
    assert cuts(5, False, 3000)
    assert not cuts(5, True, 3000)  # with a tile counter and many tiles, the longest first, the blocks end together


# ---- sections of heads

def head(key_bytes: int) -> tuple[TileConfig, int]:
    """A kernel, and how many keys of it fill so many bytes (a multiple of 4)."""
    return TileConfig(16, 16, True, False, 1, 1, 2), key_bytes // 4


@pytest.mark.parametrize("heads, ratio, key_bytes, expected", [
    (64, 1, SECTION_BYTES // 8, 8),       # what fits
    (64, 1, SECTION_BYTES // 8 + 4, 7),
    (64, 1, SECTION_BYTES, 1),
    (64, 1, 100 * SECTION_BYTES, 1),        # never none
    (64, 4, SECTION_BYTES, 4),              # query heads that share K and V count once
    (64, 1, 0, SECTION_HEADS),              # no keys
    (3, 1, 4, 3),                           # all heads
])
def test_heads_per_section(heads: int, ratio: int, key_bytes: int, expected: int) -> None:
    cutting, seqlen_kv = head(key_bytes)
    assert sections(cutting, SMS, heads, 10**6, seqlen_kv, ratio)["heads_per_section"] == expected


def test_sections_where_data_decide_which_keys_count() -> None:
    cutting, seqlen_kv = head(100 * SECTION_BYTES)
    for heads in (3, 64):
        found = sections(cutting._replace(by_class=True), SMS, heads, 10**6, seqlen_kv, 1)
        assert found["heads_per_section"] == min(heads, SECTION_HEADS)


def ordered_tile(tile: int, m_tiles: int, heads_per_section: int, heads_before_the_end: int, heads_at_the_end: int
                 ) -> int:
    """slots/order/longest_first.cuh.j2."""
    section = min(tile // (heads_per_section * m_tiles), heads_before_the_end // heads_per_section)
    first = section * heads_per_section
    here = heads_per_section if first < heads_before_the_end else heads_at_the_end
    place = tile - first * m_tiles
    return (first + place % here) * m_tiles + place // here


@given(st.integers(1, 70), st.integers(1, 40), st.integers(1, 30), st.sampled_from([1, 3, 8]),
       st.integers(0, 2 * SECTION_BYTES))
def test_sections_give_every_tile_once(heads: int, m_tiles: int, num_sms: int, ratio: int, key_bytes: int) -> None:
    """A section ends before the next begins, and the last one is long enough to end the grid with short tiles."""
    cutting, seqlen_kv = head(key_bytes)
    found = sections(cutting, num_sms, heads, m_tiles, seqlen_kv, ratio)
    order = [ordered_tile(tile, m_tiles, **found) for tile in range(heads * m_tiles)]
    assert sorted(order) == list(range(heads * m_tiles))
    last, size = found["heads_at_the_end"], found["heads_per_section"]
    assert last * m_tiles >= min(LAST_WAVES * num_sms, heads * m_tiles) and (heads - last) % size == 0
    for begin in range(0, heads - last, size):
        part = order[begin * m_tiles:(begin + size) * m_tiles]
        assert {tile // m_tiles for tile in part} == set(range(begin, begin + size))
    assert [tile % m_tiles for tile in order[(heads - last) * m_tiles:]] == sorted(
        tile % m_tiles for tile in order[(heads - last) * m_tiles:])


def test_sections_count_the_heads_of_all_sequences() -> None:
    """Dense; the sequences of a varlen call lie side by side."""
    many = dict(batch=3, num_heads_q=8, num_heads_kv=8, seqlen_q=1, seqlen_kv=1)
    for kv_layout, heads in (("dense", 24), ("varlen", 8)):
        values = step(plan_of("fa3", causal=True, kv_layout=kv_layout), **many).values
        assert values["heads_at_the_end"] + values["heads_before_the_end"] == heads
