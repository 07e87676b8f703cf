"""Cases of the benchmarks: grids, arithmetic, and the variants that serve them. No GPU."""
from __future__ import annotations

from pathlib import Path

import pytest

from flashgen.codegen.mask import visible_pairs
from flashgen.codegen.spec.spec import load_specs, spec_path
from flashgen.errors import SpecError, UnsupportedError
from flashgen.runtime.measure.grid import ROOT, default_grid
from flashgen.runtime.ops.attention.bench import load_grid, variants_for
from flashgen.runtime.ops.attention.problem import Problem

SPECS = load_specs(spec_path("fa2_fwd")).specs
FA3_SPECS = [spec for name in ("fa3_fwd", "fa3_fwd_d192_v128") for spec in load_specs(spec_path(name)).specs]
HOPPER, SMS = ["sm_90a", "sm_90"], 132
GRID = "{batch: 2, num_heads_q: 4, head_dim_qk: [64, 128], seqlen_q: [256, 512], causal: [false, true]}"


def test_default_grid_is_what_the_docs_compare() -> None:
    cases = load_grid(default_grid("fa2", "fwd"))
    assert len(cases) == 12 and {case.head_dim_qk for case in cases} == {64, 128, 256}
    for case in cases:
        assert case.batch * case.seqlen_q == 16384 and case.num_heads_q * case.head_dim_qk == 2048
        assert variants_for(case, SPECS, ["sm_90a", "sm_90"], SMS)
    assert cases[0].label == "D64 H32 B8 S2048 full"


@pytest.mark.parametrize(("data", "words"), [  # B134
    (b"{batch: \xff}", "is not UTF-8"), (b"[" * 100_000, "is not YAML"), (b"{date: 2026-13-45}", "is not YAML"),
    (b"{a: [}", "is not YAML")])
def test_a_damaged_grid_is_an_error_of_the_spec(data: bytes, words: str, tmp_path: Path) -> None:
    path = tmp_path / "grid.yaml"
    path.write_bytes(data)
    with pytest.raises(SpecError, match=words) as caught:
        load_grid(str(path))
    assert caught.value.where.startswith(str(path))  # with line and column where they are known


def test_inline_grid_multiplies() -> None:
    cases = load_grid(GRID)
    assert len(cases) == len(set(cases)) == 8
    assert load_grid("{batch: 1, hidden: 256, head_dim_qk: 64, seqlen_q: 8, seqlen_kv: 9, num_heads_kv: 2, "
                     "window: [[1, -1], [2, 3]], dtype: fp16}") == (
        Problem(1, 8, 9, 4, 2, 64, 64, False, (1, -1), "fp16"), Problem(1, 8, 9, 4, 2, 64, 64, False, (2, 3), "fp16"))
    assert load_grid("{batch: 1, num_heads_q: 1, head_dim_qk: 8, seqlen_q: 1, window: [4, 0]}")[0].window == (4, 0)


@pytest.mark.parametrize(("grid", "words"), [
    ("{batch: 1, head_dim_qk: 64, seqlen_q: 8}", "neither of num_heads_q and hidden"),
    ("{batch: 1, num_heads_q: 1, hidden: 64, head_dim_qk: 64, seqlen_q: 8}", "both num_heads_q and hidden"),
    ("{batch: 1, num_heads_q: 1, seqlen_q: 8}", "head_dim_qk is missing"),
    ("{tokens: 100, num_heads_q: 1, head_dim_qk: 64, seqlen_q: 64}", "not a multiple"),
    ("{batch: 1, num_heads_q: 3, num_heads_kv: 2, head_dim_qk: 64, seqlen_q: 64}", "not a multiple"),
    ("{bach: 1}", "nearest: batch"), ("{batch: 0}", "batch is 0"), ("{batch: true}", "batch is True"),
    ("{batch: [1, x]}", "batch is 'x'"), ("{causal: 1}", "causal is 1"), ("{dtype: fp8}", "bf16, fp16"),
    ("{window: 5}", "window is 5"), ("{window: [1, -2]}", "window is [1, -2]"), ("{}", "no mapping"),
    ("[]", "no mapping"), ("[{batch: 1}, 3]", "no mapping"), ("{lengths: 5}", "lengths is 5"),
    ("{lengths: [0, 0]}", "lengths is [0, 0]"), ("{lengths: [[1, 2], [3, -1]]}", "lengths is [3, -1]"),
    ("{lengths: [1, 2], batch: 2, num_heads_q: 1, head_dim_qk: 64}", "both lengths and batch"),
    ("{batch: [}", "not YAML"), ("no/such/file.yaml", "no such file"),
])
def test_grid_errors(grid: str, words: str) -> None:
    with pytest.raises(SpecError) as caught:
        load_grid(grid)
    assert words in str(caught.value)


def test_flops_and_bytes() -> None:
    full = Problem(2, 1024, 1024, 16, 16, 128, 128)
    assert full.flops == 4 * 2 * 16 * 1024 * 1024 * 128
    assert full.bytes == 4 * 2 * 16 * 1024 * 128 * 2
    causal = Problem(2, 1024, 1024, 16, 16, 128, 128, causal=True)
    assert causal.flops * 2 * 1024 == full.flops * 1025
    assert Problem(1, 4, 8, 4, 2, 192, 128).bytes == (4 * 4 + 8 * 2) * 320 * 2
    assert Problem(1, 4, 8, 1, 1, 8, 8, window=(0, 0)).flops == 2 * 4 * 16
    assert Problem(1, 4, 8, 1, 1, 8, 8, causal=True, window=(0, 9)).flops == 2 * 4 * 16
    assert Problem(1, 4, 8, 4, 2, 192, 128, causal=True, window=(5, -1), dtype="fp16").label == (
        "D192/128 H4/2 B1 S4/8 causal window 5,-1 fp16")


def test_variants_come_from_the_closest_target() -> None:
    case = Problem(1, 64, 64, 1, 1, 128, 128, causal=True)
    assert [s.variant for s in variants_for(case, SPECS, ["sm_90a", "sm_90"], SMS)] == ["fa2_fwd_bf16_d128_causal"]
    more = [*SPECS, next(s for s in SPECS if s.arch == "sm_90" and s.variant == "fa2_fwd_bf16_d128_causal").with_(
        stages=3)]
    assert len(variants_for(case, more, ["sm_90"], SMS)) == 2
    windowed = variants_for(Problem(1, 64, 64, 1, 1, 128, 128, causal=True, window=(9, -1)), SPECS, ["sm_90"], SMS)
    assert [s.window for s in windowed] == [True]
    with pytest.raises(UnsupportedError, match="D72"):
        variants_for(Problem(1, 64, 64, 1, 1, 72, 72), SPECS, ["sm_90"], SMS)


# -- varlen, windows, several grids in one file


def test_a_grid_of_grids() -> None:
    cases = load_grid("[{batch: 1, num_heads_q: 1, head_dim_qk: 8, seqlen_q: 1}, "
                      "{lengths: [[3, 0, 5], [7]], hidden: 16, head_dim_qk: 8, causal: true}]")
    assert cases == (Problem(1, 1, 1, 1, 1, 8, 8), Problem(3, (3, 0, 5), (3, 0, 5), 2, 2, 8, 8, True),
                     Problem(1, (7,), (7,), 2, 2, 8, 8, True))
    assert [case.varlen for case in cases] == [False, True, True]
    assert cases[1].lengths == ((3, 3), (0, 0), (5, 5)) and cases[1].label == "D8 H2 B3 S0-5 varlen causal"


def pairs_one_by_one(case: Problem) -> int:
    left, right = case.window
    seen = 0
    for queries, keys in case.lengths:
        for i in range(queries):
            diagonal = i + keys - queries
            for j in range(keys):
                seen += ((not case.causal or j <= diagonal) and (left < 0 or j >= diagonal - left)
                         and (right < 0 or j <= diagonal + right))
    return seen


@pytest.mark.parametrize("case", [
    Problem(3, (3, 0, 5), (3, 0, 5), 2, 2, 8, 8), Problem(3, (3, 1, 5), (9, 1, 2), 2, 1, 8, 16, True),
    Problem(2, (13, 4), (13, 4), 2, 1, 8, 8, True, (3, -1)), Problem(2, 13, 20, 2, 1, 8, 8, True, (3, 0)),
    Problem(2, 13, 20, 2, 1, 8, 8, False, (3, 2)), Problem(1, 20, 13, 1, 1, 8, 8, True),
], ids=lambda case: case.label)
def test_flops_are_those_of_the_visible_pairs(case: Problem) -> None:
    assert case.flops == 2 * case.num_heads_q * pairs_one_by_one(case) * (case.head_dim_qk + case.head_dim_v)


def test_varlen_and_gqa_in_bytes_and_labels() -> None:
    case = Problem(2, (3, 5), (30, 50), 4, 2, 192, 128)
    assert case.bytes == (8 * 4 + 80 * 2) * 320 * 2
    assert case.label == "D192/128 H4/2 B2 S3-5/30-50 varlen full" and case.head_dims == "D192/128"
    long = Problem(1, (2**20,), (2**20,), 1, 1, 64, 64, True)  # in closed form
    assert long.flops == 256 * visible_pairs(2**20, 2**20, (-1, 0)) == 256 * (2**20 * (2**20 + 1) // 2)


def test_fa3_grids() -> None:
    """Every case has one variant, the one that a call gets."""
    cases = load_grid(default_grid("fa3", "fwd"))
    assert len(cases) == 36 and {case.seqlen_q for case in cases} == {2**n for n in range(9, 15)}
    more = load_grid(str(ROOT / "benchmarks" / "grids" / "fa3_fwd_more.yaml"))
    assert {case.varlen for case in more} == {False, True} and {case.dtype for case in more} == {"bf16", "fp16"}
    assert {sum(rows for rows, _ in case.lengths) for case in more if case.varlen} == {32768, 2001}
    assert {case.head_dims for case in more} == {"D64", "D96", "D128", "D192/128", "D256"}
    for case in (*cases, *more):
        found = variants_for(case, FA3_SPECS, HOPPER, SMS)
        assert len(found) == 1 and found[0].arch == "sm_90a"
        assert (found[0].kv_layout == "varlen") == case.varlen and found[0].window == (case.window != (-1, -1))


def test_of_two_that_split_or_not_a_call_gets_one() -> None:
    for tiles, splits in ((SMS, False), (1, True)):  # whole waves of query tiles, and one tile for all SMs
        case = Problem(tiles, 128, 16384, 1, 1, 128, 128)
        assert [spec.split for spec in variants_for(case, FA3_SPECS, HOPPER, SMS)] == [splits]
    unsplit = [spec for spec in FA3_SPECS if not spec.split]
    assert [spec.split for spec in variants_for(case, unsplit, HOPPER, SMS)] == [False]
    for some in ([spec for spec in FA3_SPECS if spec.split], [spec for spec in FA3_SPECS if not spec.pack_gqa]):
        assert [(spec.split, spec.pack_gqa) for spec in variants_for(case, some, HOPPER, SMS)] == [(True, False)]
