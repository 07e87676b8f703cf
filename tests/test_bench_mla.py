"""`flashgen bench mla_h100` without a GPU: cases, marks, figures and tables."""
from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from flashgen.cli import bench as cli
from flashgen.codegen.spec import load_specs, spec_path
from flashgen.errors import SpecError, UnsupportedError
from flashgen.runtime.bench import gpu_folder, results_name
from flashgen.runtime.bench_cases import ROOT, default_grid
from flashgen.runtime.bench_mla import MlaCase, bench, geomeans_by_heads, load_cases, marks_for, row_of, variant_for

SPECS = load_specs(spec_path("mla_h100")).specs
MARKS = json.loads((ROOT / "benchmarks" / "marks" / "flashmla_h200.json").read_text())
CASES = load_cases(default_grid("flashmla", "decode"))


def test_the_grid_holds_every_mark_and_what_crashed_there() -> None:
    source, marks = marks_for("NVIDIA H200")
    assert len(marks) == len(MARKS["rows"]) == 67 and source.startswith("flashmla_h200.json")
    assert {*marks} <= {*CASES} and len(CASES) == 80
    assert {case for case in CASES if case not in marks and case.num_heads_q == 16} >= {
        MlaCase(8, 1, 32768, 16), MlaCase(128, 1, 32768, 16)}
    assert marks_for("NVIDIA H100 PCIe") == ("", {})


def test_work_is_counted_as_the_marks_count_it() -> None:
    for row in MARKS["rows"]:
        case = MlaCase(row["batch"], row["seqlen_q"], row["seqlen_kv"], row["num_heads_q"])
        assert case.flops / row["ms"] / 1e9 == pytest.approx(row["tflops"], rel=0.02)
        assert case.bytes / row["ms"] / 1e6 == pytest.approx(row["gbps"], rel=0.02)
    assert MlaCase(1, 2, 64, 16, "fp16").label == "H16 Q2 B1 S64 fp16"


@pytest.mark.parametrize(("grid", "words"), [
    ("{batch: 1}", "seqlen_q is missing"), ("{bach: 1}", "nearest: batch"), ("{batch: 0}", "whole numbers from 1"),
    ("{batch: 1, seqlen_q: 1, seqlen_kv: 64, num_heads_kv: 1}", "unknown key num_heads_kv"), ("[]", "no mapping")])
def test_grids_that_are_none(grid: str, words: str) -> None:
    with pytest.raises(SpecError, match=words):
        load_cases(grid) if grid != "[]" else load_cases("[1]")


def test_the_fast_path_is_timed_unless_another_is_named() -> None:
    case = MlaCase(1, 1, 64, 16)
    assert variant_for(case, SPECS).variant == "mla_h100_bf16_d576v512_paged64"
    rows = [spec for spec in SPECS if spec.page_size == 1 and spec.pass_ == "decode"]
    assert variant_for(case, rows).variant == "mla_h100_bf16_d576v512_paged1"
    assert variant_for(MlaCase(1, 1, 64, 16, "fp16"), SPECS).dtype == "fp16"
    with pytest.raises(UnsupportedError, match="H16 Q1 B1 S64"):
        variant_for(case, [spec for spec in SPECS if spec.head_dim_qk == 512])


class Device:
    """Every call takes 20 us."""

    data = "normal"

    def __init__(self) -> None:
        self.released = 0

    def facts(self) -> dict[str, Any]:
        return {"gpu": "NVIDIA H200", "driver": "580", "versions": {}}

    def timer(self, calls: Sequence[Callable[[], object]]) -> Callable[[], float]:
        assert len(calls) == 8
        return lambda: 0.02

    def release(self) -> None:
        self.released += 1


def test_results_tables_and_means() -> None:
    device, seen = Device(), []
    cases = [MlaCase(1, 1, 1024, 16), MlaCase(1, 1, 4096, 16), MlaCase(8, 1, 32768, 16), MlaCase(1, 2, 1024, 128)]
    results = bench(device, SPECS, cases, rounds=2, given_commit="abc", calls=lambda case, spec: lambda: None,  # type: ignore
                    progress=lambda done, what: seen.append(what))
    assert device.released == 4 and seen[0] == "H16 Q1 B1 S1024" and results["commit"] == "abc"
    first, _, unmarked, last = results["rows"]
    assert (first["mark_ms"], first["speed"], last["speed"]) == (0.0114, 0.57, 0.85)
    assert unmarked["mark_ms"] is None and unmarked["speed"] is None and json.dumps(results)
    means = geomeans_by_heads(results["rows"])
    assert means["H16"] == pytest.approx(math.sqrt(0.57 * 1.12)) and [*means] == ["H16", "H128", "all"]
    head, table, mean = cli.mla_tables(results)
    assert "flashmla_h200.json" in str(head) and isinstance(table, cli.Table) and "H128 0.850" in str(mean)
    assert [row[1] for row in table.rows] == [case.label for case in cases] and table.rows[2][-1] == ""
    assert results_name("flashmla", "decode", default_grid("flashmla", "decode"), "normal") == "flashmla-decode"
    row = row_of(cases[0], variant_for(cases[0], SPECS), 0.01, None)
    assert row["gbps"] == pytest.approx(cases[0].bytes / 1e4, rel=1e-4) and geomeans_by_heads([row]) == {}
    assert gpu_folder("NVIDIA H200") == "h200"
