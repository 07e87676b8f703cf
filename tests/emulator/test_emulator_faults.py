"""Tests of the tests: synchronisation taken out of FA2 kernels, and faults put in, are caught."""
from __future__ import annotations

import pytest
from emulator_kit import SCHEDULES, caught, changed, report_of_fault, shipped, synchronising

from flashgen.codegen.families.registry import lower
from flashgen.codegen.render import render

MUTATED = ("fa2_fwd_bf16_d32_window", "fa2_fwd_bf16_d64_causal_varlen", "fa2_fwd_bf16_d128")

def _sites() -> list[tuple[str, str, int, str, int]]:
    sites = []
    for variant in MUTATED:
        seen: dict[tuple[str, str], int] = {}
        for file, position, statement in synchronising(shipped(variant)):
            number = seen[file, statement] = seen.get((file, statement), -1) + 1
            sites.append((variant, file, position, statement, number))
    return sites


@pytest.mark.parametrize("variant, file, position, statement, number", _sites(),
                         ids=lambda x: str(x).replace("flashgen/", ""))
def test_no_synchronisation_is_idle(variant: str, file: str, position: int, statement: str, number: int) -> None:
    spec = shipped(variant)
    source = changed(render(lower(spec)), file, lambda text: text[:position] + ";" + text[position + len(statement):])
    report = caught(spec, source, SCHEDULES)
    assert report, "survives"


# name: (variant, file, part of the report, text, its replacement)
FAULTS = {
    "causal off by one": (
        "fa2_fwd_bf16_d64_causal", "kernel", "error",
        "q_pos + diagonal,",
        "q_pos + diagonal + 1,"),
    "window off by one": (
        "fa2_fwd_bf16_d64_window", "kernel", "error",
        "diagonal - p.window_left,",
        "diagonal - p.window_left + 1,"),
    "last key dropped": (
        "fa2_fwd_bf16_d64", "kernel", "error",
        "seqlen_kv - 1",
        "seqlen_kv - 2"),
    "mask one key late": (
        "fa2_fwd_bf16_d64_causal", "kernel", "error",
        "return col <= keys.last;",
        "return col <= keys.last + 1;"),
    "whole tiles start too early": (
        "fa2_fwd_bf16_d64_causal", "mask.cuh", "error",
        "(top.last + 1) / BLOCK_N",
        "(top.last + BLOCK_N) / BLOCK_N"),
    "swizzle": (
        "fa2_fwd_bf16_d64", "tile.cuh", "",
        "(lane_offset ^ (2 * cols16",
        "(lane_offset + (2 * cols16"),
    "V read as K": (
        "fa2_fwd_bf16_d64", "kernel", "error",
        "unsigned char* const values = smem + SMEM_V + stage",
        "unsigned char* const values = smem + SMEM_K + stage"),
    "stages overlap": (
        "fa2_fwd_bf16_d64", "kernel", "",
        "load_stage * ValueTile::BYTES",
        "load_stage * (ValueTile::BYTES - 1024)"),
    "wait too short": (
        "fa2_fwd_bf16_d32", "kernel", "in flight",
        "cp_async_wait<NUM_STAGES - 2>();",
        "cp_async_wait<NUM_STAGES - 1>();"),
    "stage refilled too early": (
        "fa2_fwd_bf16_d64", "kernel", "",
        "int load_stage = 1;",
        "int load_stage = 0;"),
    "stage not advanced": (
        "fa2_fwd_bf16_d64", "kernel", "",
        "stage = stage + 1 == NUM_STAGES ? 0 : stage + 1;\n  }\n  // ---- tiles",
        "\n  }\n  // ---- tiles"),
    "ring one stage short": (
        "fa2_fwd_bf16_d32", "kernel", "",
        "load_stage + 1 == NUM_STAGES",
        "load_stage + 1 == NUM_STAGES - 1"),
    "store past the end": (
        "fa2_fwd_bf16_d64", "epilogue.cuh", "outside the tensor",
        "if (row < valid_rows) {",
        "if (row <= valid_rows) {"),
    "lse past the end": (
        "fa2_fwd_bf16_d64", "epilogue.cuh", "lse",
        "if (r < valid_rows)",
        "if (r <= valid_rows)"),
    "load past the end": (
        "fa2_fwd_bf16_d64", "tile.cuh", "outside the tensor",
        "exists = row < valid_rows &&",
        "exists = row <= valid_rows &&"),
    "missing rows not zeroed": (
        "fa2_fwd_bf16_d64", "tile.cuh", "uninitialised",
        "      cp_async_16_zfill(target + Shape::step(first, chunk), exists ? source",
        "      if (exists) cp_async_16_zfill(target + Shape::step(first, chunk), exists ? source"),
    "shared memory too small": (
        "fa2_fwd_bf16_d64", "kernel", "shared memory",
        "constexpr int SMEM_WORK =",
        "constexpr int SMEM_WORK = 64 +"),
    "tile coordinates stored by nobody": (
        "fa2_fwd_bf16_d64", "kernel", "uninitialised",
        "if (threadIdx.x == 0) *reinter",
        "if (threadIdx.x == 999) *reinter"),
    "barrier in a branch": (
        "fa2_fwd_bf16_d64", "kernel", "",
        "sync_block();  // the tile",
        "if (threadIdx.x < 96) sync_block();  // the tile"),
    "shuffle in a branch": (
        "fa2_fwd_bf16_d64", "softmax.cuh", "",
        "  x += shfl_xor(x, 1);\n",
        "  if (threadIdx.x % 2) x += shfl_xor(x, 1);\n"),
    "lse without its maximum": (
        "fa2_fwd_bf16_d64", "epilogue.cuh", "lse",
        "rows.reference_log2(m, h, scale_log2) + log2",
        "log2"),
    "output not rescaled": (
        "fa2_fwd_bf16_d64", "softmax.cuh", "error",
        "o[m][v][2 * h + 1] *= rescale;",
        ""),
    "queries of another head": (
        "fa2_fwd_bf16_d64", "kernel", "error",
        "w.head_q * p.q_head_stride",
        "w.head_q / 2 * p.q_head_stride"),
    "rows of the next sequence": (
        "fa2_fwd_bf16_d64_varlen", "kernel", "",
        "p.k + w.kv_begin",
        "p.k + (w.kv_begin + 1)"),
    "NaN search skips rows": (
        "fa2_fwd_bf16_d64_causal", "nonfinite.cuh", "NaN",
        "first < Shape::ROWS; first +=",
        "first < Shape::ROWS / 2; first +="),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_caught(name: str) -> None:
    variant, file, expected, old, new = FAULTS[name]
    report = report_of_fault(shipped(variant), file, old, new)
    assert report, "not caught"
    assert expected in report, report
