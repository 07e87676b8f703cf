"""Tests of the tests: synchronisation taken out of FA3 kernels, and faults put in, are caught."""
from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from itertools import islice, zip_longest

import pytest
from emulator_kit import (
    SCHEDULES,
    Site,
    problems_of,
    replaced,
    report_of_fault,
    shipped,
    solve,
    with_nans_in_v,
)
from kit import tiles_of_warpgroups
from mutant_kit import Mutant, sites_of
from sampling import SOAK_RUNS

from flashgen.codegen.families.registry import lower
from flashgen.codegen.slots import PIECES, SLOTS
from flashgen.codegen.spec.spec import Spec
from flashgen.errors import VerifyError
from flashgen.runtime.emulator.kernel import emulated_sms
from flashgen.runtime.emulator.schedule import Schedule
from flashgen.runtime.ops.attention.problem import Inputs


@pytest.fixture(autouse=True)
def _tall_tiles() -> Iterator[None]:
    """The lengths of problems are about tiles of all warpgroups."""
    with tiles_of_warpgroups():
        yield


def _small(head_dim: int = 64, **changes: object) -> Spec:
    """Tiles of two warpgroups and few keys: they compile and run fast, and have every statement of their choices."""
    spec = shipped("fa3_fwd_bf16_d64", "sm_90a")
    return spec.with_(**{"head_dim_qk": head_dim, "tile": {"m": 128, "n": 32}, "stages": 2, **changes})


MUTATED: dict[str, Spec] = {
    "turns, splits, output over queries": _small(split=True, schedule="pingpong"),
    # fp16, whose range has the reference raised by ordinary scores
    "tile counter, output over queries": _small(causal=True, schedule="overlap", dtype="fp16"),
    "turns, output apart": _small(192, causal=True, q_stages=1, split=True, schedule="pingpong"),
    "packed": _small(split=True, causal=True, pack_gqa=True, schedule="overlap"),
    "P in shared memory": _small(p_operand="shared", schedule="pingpong"),
    "varlen": _small(kv_layout="varlen", causal=True, q_stages=1, schedule="overlap"),
}
SYNCHRONISING = re.compile(
    r"(?<![\w.>])(?:\w+\.)?(?:wait_full|wait_empty|release|release_previous|reset_tile_counter|setmaxnreg_\w+<\w+>|"
    r"mbarrier_(?:wait_parity|arrive\w*)|fence_\w+|wgmma_(?:fence|commit|wait<\d>)|bulk_\w+(?:<[\w\s-]*>)?|"
    r"sync_(?:warp|block)|bar_(?:sync|arrive)(?:(?:_at)?<[^>]*>|_of))\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\);")
FEW = None if SOAK_RUNS else 2  # runs of each variant with what changes nothing
# (statement, line before it, line after it): why leaving it out changes nothing.
EQUIVALENT: dict[tuple[str, str, str], str] = {
    ("setmaxnreg_inc<MMA_REGISTERS>();", "} else {", "wait_for_setup(p);"):
        "with fewer registers the compiler spills, and the result is the same",
}


def _wanted(site: Site) -> bool:
    return (site.file, site.statement) != ("nonfinite.cuh", "sync_block();")  # of functions that only fa2 calls


@cache
def _mutant(name: str) -> Mutant:
    return Mutant(MUTATED[name], SYNCHRONISING, _wanted, {})


@cache
def _where() -> dict[Site, list[str]]:
    """The variants that have a site."""
    found: dict[Site, list[str]] = {}
    for name, spec in MUTATED.items():
        for site in sites_of(spec, SYNCHRONISING, _wanted):
            found.setdefault(site, []).append(name)
    return found


def _runs(name: str) -> Iterator[tuple[str, Schedule, Inputs]]:
    for schedule in SCHEDULES:
        for problem in problems_of(MUTATED[name]):
            yield name, schedule, problem.make_inputs()
            yield name, schedule, with_nans_in_v(problem.make_inputs())


def _report_without(site: Site | None, names: list[str], most: int | None = None) -> str:
    """How the emulator or the reference objects to a variant, "" if neither does to any in its first `most` runs. The
    first run of each variant comes before the second of any: what one is blind to, another sees at once."""
    for runs in islice(zip_longest(*map(_runs, names)), most):
        for name, schedule, inputs in filter(None, runs):
            mutant = _mutant(name)
            mutant.alive = 0 if site is None else mutant.numbers[site]
            with replaced(mutant):
                try:
                    solve(MUTATED[name], inputs, schedule)
                except VerifyError as error:
                    return str(error)
    return ""


@pytest.mark.parametrize("name", MUTATED)
def test_the_kernels_are_right_without_a_fault(name: str) -> None:
    assert _report_without(None, [name], FEW) == ""


@pytest.mark.parametrize("site", _where(), ids=str)
def test_no_synchronisation_is_idle(site: Site) -> None:
    """One variant that misses it is enough: a statement may be for the sake of some of them."""
    why = EQUIVALENT.get((site.statement, site.before, site.after))
    missed = _report_without(site, _where()[site], FEW if why else None)
    assert missed or why, "survives"
    assert not (missed and why), "is said to change nothing"


def test_the_variants_have_every_statement_of_the_templates() -> None:
    """What is under a flag that none of them has would not be tried."""
    plans = [lower(spec) for spec in MUTATED.values()]
    flags = [dict(plan.flags) for plan in plans]
    for flag in flags[0]:
        assert any(f[flag] for f in flags) or flag in ("lse", "tile_words"), flag
    assert {choice for plan in plans for choice in plan.slots} >= {
        (slot, choice) for slot in ("rows", "order", "p_operand", "output", "work", "coordinates")
        for choice in {**SLOTS, **PIECES}[slot]}


# name: (variant, file, part of the report, text, its replacement)
FAULTS = {
    "causal off by one": (
        "tile counter, output over queries", "kernel", "error", "q_pos + diagonal,", "q_pos + diagonal + 1,"),
    "last tile not masked": (
        "turns, splits, output over queries", "mask.cuh", "error",
        "clamp_int((top.last + 1) / BLOCK_N", "clamp_int((top.last + BLOCK_N) / BLOCK_N"),
    "phase of a ring not turned": (
        "turns, splits, output over queries", "ring.cuh", "", "phase ^= stage == 0;", ""),
    "values read as keys": (
        "turns, splits, output over queries", "kernel", "", "descriptor(smem + SMEM_V)", "descriptor(smem + SMEM_K)"),
    "another warpgroup's queries": (
        "turns, output apart", "kernel", "", "a.first_query[w]", "a.first_query[0]"),
    "idle warpgroups at the end": (
        "tile counter, output over queries", "query_groups.cuh", "", "+ 1 - w.m_tile) * p.warpgroups",
        "+ 1 - w.m_tile) * p.warpgroups + 1"),
    "output not rescaled": ("tile counter, output over queries", "kernel", "error", "rescale.apply(o);", ""),
    "sum not rescaled": (
        "tile counter, output over queries", "softmax_lazy.cuh", "error", "rows.sum[0][h] *= factor;", ""),
    "reference never raised": (
        "tile counter, output over queries", "softmax_lazy_exp.cuh", "", "rows.far || fmaxf(sums[0], sums[1]) >",
        "rows.far || 0.0f * fmaxf(sums[0], sums[1]) >"),
    "P of another warpgroup": (
        "P in shared memory", "kernel", "", "warpgroup * PTile::BYTES", "0 * warpgroup * PTile::BYTES"),
    "splits not weighted": (
        "turns, splits, output over queries", "merge_per_warp.cuh", "error",
        "fmaf(weight, columns", "fmaf(1.0f, columns"),
    "arrivals not put back": (
        "turns, splits, output over queries", "merge_per_warp.cuh", "leaves counter", "arrivals[i] = 0;", ""),
    "one split left out": (
        "turns, splits, output over queries", "merge_per_warp.cuh", "error",
        "for (int begin = 0; begin < splits;", "for (int begin = 1; begin < splits;"),
    "blocks that are done not put back": (
        "turns, splits, output over queries", "merge_per_warp.cuh", "leaves counter", "*done = 0;", ";"),
    "splits not waited for": (
        "turns, splits, output over queries", "kernel", "", "splits * 4 * p.warpgroups);\n",
        "splits * 4 * p.warpgroups - 1);\n"),
    "a split of the wrong tile": (
        "turns, splits, output over queries", "kernel", "",
        "p.counters + ARRIVALS + a.split_tile", "p.counters + ARRIVALS"),
    "rows of another head": ("packed", "kernel", "", "head = row % p.heads_per_kv_head", "head = 0"),
    "rows are queries": ("packed", "kernel", "error", "row = row / p.heads_per_kv_head;", ""),
    "the first masked tile": (
        "turns, output apart", "kernel", "", "if (tile >= tiles.full_end)", "if (tile > tiles.full_end)"),
    "quotients of divisors": ("packed", "divisor.cuh", "", ">> 32 >> by.shift", ">> 32 >> by.shift + 1"),
    "rows that hold no query": (
        "packed", "kernel", "", "int row = p.queries_per_warpgroup * p.heads_per_kv_head; row < 64",
        "int row = 64; row < 64"),
    "rows of the next sequence overwritten": (
        "varlen", "kernel", "", "constexpr int STORED_ROWS = 16;", "constexpr int STORED_ROWS = 1;"),
    "a sequence's own rows": ("varlen", "kernel", "", "return w.kv_begin;", "return w.kv_begin + 1;"),
    "lanes store the row of others": (
        "varlen", "store_rows.cuh", "error",
        "Rows16::offset(stored_row(), chunk)", "Rows16::offset(stored_row() ^ 1, chunk)"),
    "the image of a row not awaited": (
        "varlen", "store_rows.cuh", "", "    sync_warp();\n    store(panel, target);", "    store(panel, target);"),
    "NaN not looked for": (
        "tile counter, output over queries", "nonfinite.cuh", "NaN",
        "!any_in_warp(((zeros[0] | zeros[1])", "!any_in_warp((0"),
    "NaN of masked keys added": (
        "tile counter, output over queries", "nonfinite.cuh", "NaN",
        "holds(visible(q_pos + 8 * h), key);", "holds(visible(q_pos + 8 * h), key - 1);"),
    "NaN added before the output": (
        "varlen", "kernel", "", "if (lane == 0) bulk_wait<0>();  // the output is there", ""),
    "NaN not added to the output": (
        "varlen", "kernel", "NaN", "return a.found_nonfinite[0] + a.found_nonfinite[1] != 0", "return false"),
    "a work tile fetched twice": (
        "tile counter, output over queries", "kernel", "", "gridDim.x + fetch_next_work(p.counters)", "gridDim.x"),
}


# Of launches with one warpgroup of two.
FAULTS_OF_FEW = {
    "arrivals of all that there could be": ("kernel", "K_EMPTY + i, 4 * p.warpgroups)",
                                            "K_EMPTY + i, 4 * WARPGROUPS)"),
    "splits of all that there could be": ("kernel", "splits * 4 * p.warpgroups)", "splits * PARTIAL_TILES)"),
    "queries of all that there could be": ("kernel", "int w = 0; w < p.warpgroups", "int w = 0; w < WARPGROUPS"),
    "a turn for two": ("kernel", "bar_arrive_of(next_turn, p.pingpong_threads)", "bar_arrive_of(next_turn, 256)"),
    "a start for more than there are": ("kernel", "p.block_rows * 2 + 128", "NUM_THREADS"),
    "tiles as tall as they could be": ("query_groups.cuh", "64 * (groups - 1) / p.block_rows + 1",
                                       "(groups - 1) / 2 + 1"),
}


@pytest.mark.parametrize("name", FAULTS_OF_FEW)
def test_a_fault_of_few_warpgroups_is_caught(name: str) -> None:
    with tiles_of_warpgroups(1), emulated_sms(5):  # so many that a last round is ragged
        assert report_of_fault(MUTATED["turns, splits, output over queries"], *FAULTS_OF_FEW[name]), "not caught"


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_caught(name: str) -> None:
    variant, file, expected, old, new = FAULTS[name]
    report = report_of_fault(MUTATED[variant], file, old, new)
    assert report, "not caught"
    assert expected in report, report
