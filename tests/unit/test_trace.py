"""Timelines: what the machine times, and the pages that show it."""
from __future__ import annotations

import functools
import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from emulator_hopper import CASES
from emulator_kit import case_plan, run_case, shipped
from typer.testing import CliRunner

from flashgen.cli.app import app
from flashgen.codegen.families.registry import lower
from flashgen.codegen.target import TARGETS
from flashgen.errors import EnvironmentError_, UnsupportedError
from flashgen.runtime.emulator.costs import costs
from flashgen.runtime.emulator.kernel import Statistics
from flashgen.runtime.emulator.schedule import Schedule
from flashgen.runtime.emulator.trace import KINDS, Span, Timeline, spans, timeline
from flashgen.runtime.emulator.trace_draw import page, shortened, write

pytestmark = pytest.mark.slow

SPEC = shipped("fa2_fwd_bf16_d64")
PLAN = lower(SPEC)
WARPS, BLOCK_M, BLOCK_N = PLAN.launch.threads // 32, PLAN.constant("BLOCK_M"), PLAN.constant("BLOCK_N")
TILES = 4
ROUNDING = 0.11  # times come with one decimal
TENSOR, EXP, WAIT, COPY = (KINDS.index(kind) for kind in ("tensor cores", "exponentials", "waits", "copies"))


def traced(name: str) -> Statistics:
    case = CASES[name][0]()
    return run_case(case, case.inputs(np.random.default_rng(0)), Schedule("eager", traced_block=0))[1]


@functools.cache
def fa2(tiles: int = TILES) -> Timeline:
    return timeline(SPEC, {"seqlen_q": BLOCK_M, "seqlen_kv": tiles * BLOCK_N})


def of_line(made: Timeline, row: int, function: str) -> list[Span]:
    return [span for span in made.spans if span.row == row and f"{function}<" in made.text(span)]


def test_only_a_traced_block_is_timed() -> None:
    case = CASES["fa3"][0]()
    inputs = case.inputs(np.random.default_rng(0))
    assert run_case(case, inputs, Schedule("eager"))[1].trace == ()
    first, second = (run_case(case, inputs, Schedule("eager", traced_block=block))[1].trace for block in (0, 1))
    assert first and second


@pytest.mark.parametrize("name", CASES)
def test_a_row_does_one_thing_at_a_time(name: str) -> None:
    statistics = traced(name)
    engine = max(row for row, *_ in statistics.trace) - 1  # its copies overlap
    for row in {row for row, *_ in statistics.trace} - {engine}:
        events = sorted((begin, end) for at, _, _, begin, end in statistics.trace if at == row)
        assert all(a[0] < a[1] <= b[0] + ROUNDING for a, b in pairwise(events))


def test_products_take_what_they_cost_and_consumers_wait_for_copies() -> None:
    statistics = traced("fa3")
    flop = 7 * 2 * (4 + 4) * 2 * 64 * 64 * 16  # tiles, warpgroups, k-steps of both products
    tensor = sum(end - begin for _, kind, _, begin, end in statistics.trace if kind == TENSOR)
    assert tensor == pytest.approx(flop / costs("sm_90a")[-1], rel=0.02)
    landed = min(end for row, kind, _, _, end in statistics.trace if kind == COPY and row == 12)
    first_product = min(begin for _, kind, _, begin, _ in statistics.trace if kind == TENSOR)
    assert landed <= first_product
    waits = {row for row, kind, *_ in statistics.trace if kind == WAIT}
    assert waits >= set(range(4, 12))


def test_every_instruction_of_a_warp_is_there() -> None:
    head_dim, rows = SPEC.head_dim_qk, BLOCK_M // WARPS
    products = 2 * (rows // 16) * (BLOCK_N // 8) * (head_dim // 16)  # mma of a tile, both products
    copied = 2 * head_dim * (BLOCK_M + 2 * TILES * BLOCK_N)          # bytes of q, k and v
    for warp in range(WARPS):
        own = [span for span in fa2().spans if span.row == warp]
        assert sum(span.events[TENSOR] for span in own) == TILES * products
        assert sum(span.events[COPY] for span in own) == copied / (WARPS * 32 * 16)
        scores = [span for span in own if "exponentiate(" in fa2().text(span)]
        assert [span.events[EXP] for span in scores] == [rows * BLOCK_N // 32] * TILES
    assert sum(span.events[COPY] for span in fa2().spans if span.row == WARPS) == copied / (32 * 16)


def test_a_copy_lands_before_its_tile_is_used_and_flies_while_another_is() -> None:
    flights = [span for span in fa2().spans if span.row == WARPS]
    assert all(span.begin < span.end for span in flights)
    for tile, product in (("KeyTile", "gemm_scores"), ("ValueTile", "gemm_values")):
        copies = sorted((s for s in flights if fa2().label(s) == tile), key=lambda s: s.begin)
        assert len(copies) == TILES
        for warp in range(WARPS):
            uses = of_line(fa2(), warp, product)
            assert len(uses) == TILES
            assert all(copy.end <= use.begin + ROUNDING for copy, use in zip(copies, uses, strict=True))
            assert all(copy.begin < use.end for copy, use in zip(copies[1:], uses, strict=False))


def test_no_warp_passes_a_barrier_before_the_last_has_come() -> None:
    uses = [of_line(fa2(), warp, "gemm_scores") for warp in range(WARPS)]
    values = [of_line(fa2(), warp, "gemm_values") for warp in range(WARPS)]
    for trip in range(1, TILES):
        assert min(own[trip].begin for own in uses) >= max(own[trip - 1].end for own in values) - ROUNDING
    waits = [span for span in fa2().spans if span.kind == WAIT]
    assert {span.row for span in waits} == set(range(WARPS))
    assert all("wait" in fa2().text(span) or "sync" in fa2().text(span) or "nonfinite" in fa2().text(span)
               for span in waits)


def test_a_run_is_repeatable_and_more_keys_take_longer() -> None:
    fresh = timeline(SPEC, {"seqlen_q": BLOCK_M, "seqlen_kv": TILES * BLOCK_N})
    assert fresh == fa2()
    clocks = [fa2(tiles).clocks for tiles in (TILES, 2 * TILES, 4 * TILES)]
    assert clocks[2] - clocks[1] == pytest.approx(2 * (clocks[1] - clocks[0]), rel=0.1)


def test_trips_follow_each_other_under_the_headings_of_the_kernel() -> None:
    trips = fa2().trips()
    assert all(a[2] == b[1] for a, b in pairwise(trips))
    assert trips[0][1] == 0 and trips[-1][2] <= fa2().clocks
    assert [name for name, *_ in trips if "row sees whole" in name or name == "next trip"][1:] == ["next trip"] * 3


def test_a_block_that_is_not_there() -> None:
    with pytest.raises(UnsupportedError, match=r"(?s)block 9.*nearest: --block 0"):
        timeline(SPEC, {"seqlen_q": 128}, 9)


def test_costs_know_every_target_and_its_datasheet() -> None:
    assert all(min(costs(name)) > 0 for name, target in TARGETS.items() if target.is_nvidia)
    assert costs("sm_80")[2] == 8.0 and costs("sm_90")[2] < costs("sm_89")[2]


def test_page() -> None:
    text = page(fa2())
    assert all(name in text for name in ("gemm_scores", "gemm_values", "exponentiate", "mma, warp 3", "KeyTile",
                                         "copies in flight", "tiles that every row sees whole", "not a measurement"))
    assert "<script" not in text and "http" not in text
    case, statistics = CASES["mla"][0](), traced("mla")
    plan = case_plan(case)
    own = Timeline(plan, "a < b", ["", "x < y"], spans(statistics), statistics.warps)
    assert "a &lt; b" in page(own) and "a < b" not in page(own)
    assert "products in flight" in page(own)


@pytest.mark.parametrize("label, width, shown", [
    ("exponentiate", 12, "exponentiate"), ("exponentiate", 9.5, "exponent…"), ("exponentiate", 5, ""), ("", 3, "")])
def test_labels_fit_their_bars(label: str, width: float, shown: str) -> None:
    assert shortened(label, width) == shown


def test_png_is_1600_pixels_wide(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    write(fa2(), tmp_path / "a.png")
    header = (tmp_path / "a.png").read_bytes()[:24]
    assert header.startswith(b"\x89PNG") and int.from_bytes(header[16:20], "big") == 1600


def test_command(tmp_path: Path) -> None:
    out = tmp_path / "page.html"
    options = ["trace", "fa2_fwd", "--arch", "sm_90", "--variant", SPEC.variant, "--problem", "seqlen_q=64"]
    done = CliRunner().invoke(app, [*options, "-o", str(out), "--json"])
    assert done.exit_code == 0 and out.read_text().startswith("<!doctype")
    data = json.loads(done.stdout)
    assert data["variant"] == SPEC.variant and data["clocks"] == max(span["end"] for span in data["spans"])
    assert {"row", "line", "begin", "end", "text", "events"} <= data["spans"][0].keys()
    nowhere = CliRunner().invoke(app, [*options, "-o", str(tmp_path / "none" / "page.html")])
    assert nowhere.exit_code == EnvironmentError_.exit_code
    wrong = CliRunner().invoke(app, [*options[:-1], "seqlen=64", "-o", str(out)])
    assert wrong.exit_code == UnsupportedError.exit_code


def test_lines_of_a_kernel_with_roles_are_those_of_the_roles_bodies() -> None:
    """Its entry only hands them out: all of a warp's time would be one line of it."""
    made = timeline(shipped("fa3_fwd_bf16_d64", "sm_90a"), {"seqlen_q": 256, "seqlen_kv": 192})
    rows = {label: {made.label(span) for span in spans_of} for label, spans_of in made.rows() if label}
    assert {"load_keys", "load_values"} <= rows["load, warp 0"] and "wait" in rows["load, warp 1"]
    assert {"subtract_new_max", "exp_and_check", "wgmma_wait"} <= rows["mma, warp 4"]
    assert "QueryTile" in {made.label(span) for span in made.spans if span.row == made.warps}


def test_of_a_call_of_several_kernels_the_one_of_the_spec_is_shown() -> None:
    """Beside lines of its own text: the backward's first kernel multiplies nothing."""
    sizes = {"seqlen_q": 64, "seqlen_kv": 64}
    made = timeline(shipped("fa2_bwd_bf16_d64_gradients"), sizes)
    products = [span for span in made.spans if "gemm_" in made.text(span)]
    assert products and all(span.events[TENSOR] for span in products)
    with pytest.raises(UnsupportedError, match="nothing that is timed"):
        timeline(shipped("fa2_bwd_bf16_d64_postprocess"), sizes)
