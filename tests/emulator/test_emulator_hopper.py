"""The Hopper half of the emulator: warp-specialised kernels run right, and what is taken out of or put into them wrong
is caught."""
from __future__ import annotations

import re

import numpy as np
import pytest
from emulator_hopper import CASES, FA3, MLA, distance
from emulator_kit import run_case

from flashgen.errors import VerifyError
from flashgen.runtime.emulator.schedule import POLICIES, Schedule

SCHEDULES = [Schedule("random", 0), Schedule("lazy", 1)]
SYNCHRONISING = re.compile(
    r"(?<![\w.])(?:sync_block|bar_sync(?:_at)?<[^>]*>|bar_arrive(?:_at)?<[^>]*>|mbarrier_(?:wait_parity|arrive\w*)|"
    r"fence_\w+|wgmma_(?:fence|commit|wait<\d>)|bulk_\w+(?:<\d>)?|setmaxnreg_\w+<\d+>|release)"
    r"\((?:[^()]|\([^()]*\))*\);")
# (kernel, statement, its number among the same): why leaving it out changes nothing.
EQUIVALENT: dict[tuple[str, str, int], str] = {
    ("fa3", "setmaxnreg_inc<240>();", 0): "with fewer registers the compiler spills, and the result is the same",
    ("mla", "setmaxnreg_inc<232>();", 0): "likewise",
    ("fa3", "bar_sync_at<128>(3 + me);", 0):
        "in release(): only wgmmas read the stage, and the wait of one thread covers those of its whole warpgroup",
}


def caught(name: str, body: str) -> str:
    """How the emulator or the model objects, "" if neither does."""
    case = CASES[name][0](body)
    inputs = case.inputs(np.random.default_rng(0))
    for schedule in SCHEDULES:
        try:
            found, _ = run_case(case, inputs, schedule)
        except VerifyError as error:
            return str(error)
        error = distance(case, inputs, found)
        if not error < case.absolute:
            return f"wrong result: error {error}"
    return ""


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", CASES)
def test_kernel(name: str, policy: str) -> None:
    case = CASES[name][0]()
    for seed in range(3):
        inputs = case.inputs(np.random.default_rng(seed))
        found, statistics = run_case(case, inputs, Schedule(policy, seed))
        assert distance(case, inputs, found) < case.absolute
        assert all(wavefronts == ideal for _, _, wavefronts, ideal in statistics.banks)


def _sites() -> list[tuple[str, int, str, int]]:
    sites = []
    for name, (_, body) in CASES.items():
        seen: dict[str, int] = {}
        for m in SYNCHRONISING.finditer(body):
            number = seen[m[0]] = seen.get(m[0], -1) + 1
            sites.append((name, m.start(), m[0], number))
    return sites


@pytest.mark.parametrize("name, position, statement, number", _sites())
def test_no_synchronisation_is_idle(name: str, position: int, statement: str, number: int) -> None:
    body = CASES[name][1]
    report = caught(name, body[:position] + ";" + body[position + len(statement):])
    assert bool(report) != ((name, statement, number) in EQUIVALENT), report or "survives"


# name: (kernel, part of the report, text, its replacement)
FAULTS = {
    "wait for the scores too weak": (
        "fa3", "registers",
        "wgmma_wait<1>(s);",
        "wgmma_wait<2>(s);"),
    "scores read before their wait": (
        "fa3", "registers",
        "  wgmma_wait<0>(s);\n  release",
        "  release"),
    "wait that does not list its registers": (
        "fa3", "registers",
        "wgmma_wait<1>(s);",
        "wgmma_wait<1>();"),
    "weights rewritten in flight": (
        "fa3", "registers",
        "    wgmma_wait<0>(o, weights);\n    release(empty_v + before);",
        "    pack();\n    wgmma_wait<0>(o, weights);\n    release(empty_v + before);"),
    "fence that forgets the weights": (
        "fa3", "wgmma_fence",
        "wgmma_fence(o, weights);",
        "wgmma_fence(o);"),
    "no proxy fence before the store": (
        "fa3", "unfenced",
        "fence_proxy_async_shared();",
        ""),
    "no proxy fence for the weights": (
        "mla", "unfenced",
        "fence_proxy_async_shared();\n      bar_sync<1",
        "bar_sync<1"),
    "proxy fence after the barrier": (
        "fa3", "unfenced",
        "fence_proxy_async_shared();\n  bar_sync_at<128>(3 + me);",
        "bar_sync_at<128>(3 + me);\n  if (threadIdx.x % 128 == 0) fence_proxy_async_shared();"),
    "V released before its product ended": (
        "fa3", "",
        "wgmma_wait<0>(o, weights);\n    release(empty_v + before);",
        "release(empty_v + before);\n    wgmma_wait<0>(o, weights);"),
    "producer's parity": (
        "fa3", "deadlock",
        "j / STAGES % 2 ^ 1;",
        "j / STAGES % 2;"),
    "consumer's parity": (
        "fa3", "",
        "full_k + stage, j / STAGES % 2)",
        "full_k + stage, j / STAGES % 2 ^ 1)"),
    "count of an mbarrier too high": (
        "fa3", "deadlock",
        "mbarrier_init(empty_k + i, 2);",
        "mbarrier_init(empty_k + i, 3);"),
    "count of an mbarrier too low": (
        "fa3", "",
        "mbarrier_init(empty_k + i, 2);",
        "mbarrier_init(empty_k + i, 1);"),
    "expects too few bytes": (
        "fa3", "",
        "full_k + stage, TILE_BYTES)",
        "full_k + stage, TILE_BYTES - 128)"),
    "expects too many bytes": (
        "fa3", "deadlock",
        "full_k + stage, TILE_BYTES)",
        "full_k + stage, TILE_BYTES + 128)"),
    "no wait for an empty stage": (
        "fa3", "",
        "mbarrier_wait_parity(empty_k + stage, parity);",
        ""),
    "inits not shown": (
        "fa3", "unfenced",
        "    fence_mbarrier_init();\n",
        ""),
    "count of a named barrier": (
        "fa3", "barrier",
        "bar_sync_at<256>(1 + me);\n  scores",
        "bar_sync_at<128>(1 + me);\n  scores"),
    "number of a named barrier": (
        "fa3", "",
        "bar_arrive_of(2 - me, 256);\n    wgmma",
        "bar_arrive_of(1 + me, 256);\n    wgmma"),
    "registers beyond the pool": (
        "fa3", "setmaxnreg",
        "setmaxnreg_inc<240>",
        "setmaxnreg_inc<248>"),
    "stride of K's descriptor": (
        "fa3", "",
        "TILE_BYTES + 32 * k, SWIZZLE_128B, 16, 1024)",
        "TILE_BYTES + 32 * k, SWIZZLE_128B, 16, 512)"),
    "swizzle of K's descriptor": (
        "fa3", "",
        "TILE_BYTES + 32 * k, SWIZZLE_128B, 16, 1024)",
        "TILE_BYTES + 32 * k, SWIZZLE_64B, 16, 1024)"),
    "leading bytes of V's descriptor": (
        "mla", "",
        "SWIZZLE_128B, PANEL_BYTES, 1024)",
        "SWIZZLE_128B, 1024, 1024)"),
    "V read K-major": (
        "fa3", "",
        "wgmma_rs<D, MN_MAJOR>",
        "wgmma_rs<D, K_MAJOR>"),
    "scores add to what was there": (
        "fa3", "",
        "SWIZZLE_128B, 16, 1024), k > 0);",
        "SWIZZLE_128B, 16, 1024), 1);"),
    "stored with another swizzle": (
        "fa3", "wrong result",
        "(chunk ^ row % 8) * 16, r",
        "chunk * 16, r"),
    "box loaded at the wrong key": (
        "fa3", "wrong result",
        "full_k + stage, 0, j * BLOCK_N)",
        "full_k + stage, 0, j * BLOCK_N + 1)"),
    "wrong stage's values": (
        "fa3", "",
        "values(before);\n    bar_arrive",
        "values(stage);\n    bar_arrive"),
    "keys past the end count": (
        "fa3", "wrong result",
        "key < KEYS ?",
        "key < KEYS + 64 ?"),
    "exits before the store has read": (
        "fa3", "unwaited",
        "    bulk_wait_read<0>();\n",
        ""),
    "weights overwritten while read": (
        "mla", "",
        "      bar_sync<2, 256>();  // the other",
        "      bar_arrive<2, 256>();  // the other"),
    "rescales before they are there": (
        "mla", "",
        "      bar_sync<1, 256>();\n      rescale[0]",
        "      bar_arrive<1, 256>();\n      rescale[0]"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_caught(fault: str) -> None:
    name, expected, old, new = FAULTS[fault]
    body = {"fa3": FA3, "mla": MLA}[name]
    assert old in body, f"the text that {fault!r} replaces is gone"
    report = caught(name, body.replace(old, new, 1))
    assert report, "not caught"
    assert expected in report, report
