"""Tests of the tests: synchronisation taken out of decode kernels, and faults put in, are caught."""
from __future__ import annotations

import math
import re
from dataclasses import replace
from functools import cache
from typing import Any
from unittest import mock

import pytest
from emulator_kit import Site, shipped
from mla_kit import decoded, with_last_keys
from mutant_kit import Mutant, sites_of
from sampling import SOAK_RUNS

from flashgen.codegen.spec.spec import Spec
from flashgen.errors import VerifyError
from flashgen.runtime.emulator.kernel import emulated_sms
from flashgen.runtime.emulator.schedule import Schedule, scheduled
from flashgen.runtime.ops.mla_decode import call as mla
from flashgen.runtime.ops.mla_decode.problem import MlaProblem
from flashgen.runtime.select.lookup import registry

MUTATED: dict[str, Spec] = {
    "boxes": shipped("mla_h100_bf16_d576v512_paged64", "sm_90a"),
    "rows": shipped("mla_h100_bf16_d576v512_paged1", "sm_90a"),
    "no RoPE": shipped("mla_h100_fp16_d512", "sm_90a"),
}
# Problem, SMs, schedule, what the last key holds. Several segments a block, of one to five tiles; requests that are
# split, also into more splits than a merge has warps for; scores that grow; values that only some rows see.
Run = tuple[MlaProblem, int, Schedule, float | None]
RUNS: tuple[Run, ...] = (
    (MlaProblem((70, 0, 300, 1, 190), 8, 2), 1, Schedule("random", 0), None),
    (MlaProblem((550, 450), 8, 2, softmax_scale=1.0), 3, Schedule("lazy", 1, resident=3), None),
    (MlaProblem((129, 260), 8, 2), 1, Schedule("lazy", 2), math.nan),
    (MlaProblem((1600,), 3, 1), 12, Schedule("random", 3, resident=12), None),
    (MlaProblem((200,), 40, 1), 12, Schedule("random", 4, resident=12), None),
)
SYNCHRONISING = re.compile(
    r"(?<![\w.>])(?:\w+\.)?(?:release|flush|wait_until_free|wait_until_equal|red_add_release|setmaxnreg_\w+<\w+>|"
    r"mbarrier_(?:wait_parity|arrive\w*)|fence_\w+|wgmma_(?:fence|commit|wait<\d>)|cp_async_(?:wait<\w+>|commit)|"
    r"sync_(?:warp|block)|bar_(?:sync|arrive)(?:_at)?<[^>]*>)\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\);")
FEW = None if SOAK_RUNS else 2  # runs of each variant with what changes nothing
# (statement, line before it, line after it): why leaving it out changes nothing.
EQUIVALENT: dict[tuple[str, str, str], str] = {
    ("setmaxnreg_inc<MMA_REGISTERS>();", "} else {", "griddepcontrol_wait();"):
        "with fewer registers the compiler spills, and the result is the same",
    ("wgmma_fence();", "pin_registers(keys);", "#pragma unroll"):
        "for ptxas, which takes no products on trust that are issued behind a wait",
}
FILES = ("kernel", "latent_rows.cuh", "merge_per_block.cuh", "segments.cuh")  # tried here; fa3 tries the others


def _wanted(site: Site) -> bool:
    return site.file in FILES


@cache
def mutant(name: str) -> Mutant:
    return Mutant(MUTATED[name], SYNCHRONISING, _wanted, FAULTS)


def report_with(name: str, fault: Site | str | None, most: int | None = None) -> str:
    """How the emulator or the reference objects to the kernel with this fault, "" if neither does in `most` runs."""
    kernel, true_kernel = mutant(name), mla.kernel_for
    kernel.alive = 0 if fault is None else kernel.numbers[fault]

    def kernel_for(wanted: Any, device: Any) -> Any:
        return kernel if wanted.op == "mla_decode" else true_kernel(wanted, device)

    spec = MUTATED[name]
    changes = {"page_size": {64: 64, 1: 16, None: None}[spec.page_size], "head_dim_qk": spec.head_dim_qk,
               "dtype": spec.dtype, "causal": True, "sink": True}
    with mock.patch.object(mla, "kernel_for", kernel_for):
        for problem, sms, schedule, special in RUNS[:most]:
            inputs = replace(problem, **changes).make_inputs()
            if special is not None:
                inputs = with_last_keys(inputs, special)
            with emulated_sms(sms), scheduled(schedule):
                try:
                    decoded(inputs, spec=spec)
                except VerifyError as error:
                    return str(error)
    return ""


@cache
def _where() -> dict[Site, list[str]]:
    found: dict[Site, list[str]] = {}
    for name, spec in MUTATED.items():
        for site in sites_of(spec, SYNCHRONISING, _wanted):
            found.setdefault(site, []).append(name)
    return found


@pytest.mark.parametrize("name", MUTATED)
def test_the_kernels_are_right_without_a_fault(name: str) -> None:
    assert report_with(name, None) == ""
    registry.generation += 1


@pytest.mark.parametrize("site", _where(), ids=str)
def test_no_synchronisation_is_idle(site: Site) -> None:
    """One variant that misses it is enough: a statement may be for the sake of some of them."""
    why = EQUIVALENT.get((site.statement, site.before, site.after))
    missed = any(report_with(name, site, FEW if why else None) for name in _where()[site])
    assert missed or why, "survives"
    assert not (missed and why), "is said to change nothing"


# name: (expression or statement, its replacement)
FAULTS: dict[str, tuple[str, str]] = {
    "hidden keys off by one": ("(row + 8 * h) / p.num_heads", "((row + 8 * h) / p.num_heads - 1)"),
    "rows past the end not cleared": ("(Tile::ROWS - first) * Tile::CHUNKS", "0"),
    "values that are not finite left in": ("pair &= ~found", "pair &= ~0u"),
    "the other's sums not rescaled": ("rows.sum[0][h] *= rescale.factor[h];", ""),
    "output not rescaled": ("rescale.apply(o);", ""),
    "half of the sums": ("sums[8 * h] + sums[BLOCK_M + 8 * h]", "sums[8 * h]"),
    "the sink left out": ("exp2_approx(extra - highest)", "0.0f"),
    "splits of two requests in one place": ("2 * blockIdx.x + (segment.split_idx == 0)", "2 * blockIdx.x"),
    "a split from its request's beginning": ("starts ? partition.first_tile : 0", "0"),
    "rows of the next block": (
        "partition.row_block * partition.block_rows", "partition.row_block * partition.block_rows + 1"),
    "results of another block of rows": (
        "split.first_partition * row_blocks + row_block", "split.first_partition * row_blocks"),
    "arrivals not put back": ("counters[0] = 0;", ""),
    "splits not weighted": ("exp2_approx(above(weights[i * ROWS], finite))", "1.0f"),
    "the next page": ("key / p.page_size", "key / p.page_size + 1"),
    "a row of another page": ("(here.first_key + lane + WARP_SIZE * h) % p.page_size", "lane % 16 / 2"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_caught(fault: str) -> None:
    assert any(report_with(name, fault) for name in MUTATED if fault in mutant(name).numbers), "not caught"
