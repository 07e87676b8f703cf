"""The table of docs/lineage.md is made by benchmarks/lineage_claims.py, from plans and from files of results."""
from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

from flashgen.runtime.measure.grid import ROOT

PAGE = ROOT / "docs" / "lineage.md"


@pytest.fixture
def claims(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("lineage_claims")


def lines_of(text: str) -> dict[str, list[str]]:
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]
    return {row[0]: row[1:] for row in rows}


def test_the_page_says_what_the_script_makes(claims: Any) -> None:
    """Rows that wait for a family may be behind."""
    text = PAGE.read_text(encoding="utf-8")
    page = lines_of(text.partition(claims.BEGIN)[2].partition(claims.END)[0])
    made = lines_of(claims.table(claims.results(ROOT / "benchmarks" / "results" / "h200")))
    assert page.keys() == made.keys() and len(made) > 15
    assert {claim: cells for claim, cells in page.items() if claims.ABSENT not in cells} == {
        claim: made[claim] for claim, cells in page.items() if claims.ABSENT not in cells}


def test_what_is_predicted(claims: Any) -> None:
    made = {claim: cells[0] for claim, cells in lines_of(claims.table(claims.results(None))).items()}
    traffic = "S and P move 537 MB a head, S = 8192, fp16: "
    assert made[traffic + "with S and P in 16 bits"] == "537 MB"
    heads, tensors = 128, 4 * 8192 * 128 * 2 + 4 * 8192
    assert made[traffic + "our standard, S in fp32"] == f"{(8 * 2 * 8192**2 + tensors) / 1e9:.2f} GB"
    more = "recomputing costs 25 to 33 % more FLOPs: "
    assert [made[more + of] for of in ("S alone again, of the backward", "S alone again, of a step",
                                       "the whole forward again, of a step")] == ["+25 %", "+17 %", "+33 %"]
    assert made["no memory of S x S: P alone, in 16 bits"] == f"{heads * 2 * 8192**2 / 1e9:.1f} GB"
    cache = "the KV cache is 13 times smaller: than "
    assert made[cache + "DeepSeek-V2-Lite's own 16 heads"] == "8.9" and made[cache + "32 heads of 128"] == "14.2"
    length = float(made["longer contexts in the same memory: standard"].split()[0]) * 1e3
    assert 8 * 16 * (6 * length**2 + 4 * 2 * 128 * length) == pytest.approx(141e9, rel=0.01)


def test_measured_figures_stand_beside_them(claims: Any, tmp_path: Path) -> None:
    found = claims.results(None)
    speeds = {"standard": 20.0, "fa2": 5.0, "fa3": 2.5}
    rows = [{**row, "status": "ok", "measured": {"ms": speeds[row["generation"]], "peak_bytes": 3 * 10**9,
                                                 "read": 128 * 10**9, "written": 0}}
            for row in found.said if row["predicted"] and row["generation"] in speeds]
    other = {**rows[-1], "case": {**rows[-1]["case"], "batch": 1}, "length": 10**6}  # of another problem
    decodes = [{**row, "status": "ok", "measured": {"ms": row["predicted"]["bytes"] / 2400e6}} for row in found.decodes]
    models = [{"model": "deepseek-v2-lite", "kind": "decode", "attention": name, "batch": 1, "length": 8192,
               "cache_bytes": size} for name, size in (("naive", 80), ("flashgen", 10))]
    for name, own in (("lineage", [*rows, other]), ("lineage-mla-decode", decodes), ("end-to-end", models)):
        (tmp_path / f"{name}.json").write_text(json.dumps({"rows": own}))
    made = lines_of(claims.table(claims.results(tmp_path)))
    assert made["claim"] == ["predicted", "measured"]
    measured = {claim: cells[1] for claim, cells in made.items()}
    assert measured["FA3 is 1.5 to 2 times as fast as FA2"] == "2.00"
    assert measured["S and P move 537 MB a head, S = 8192, fp16: our standard, S in fp32"] == "1.00 GB"
    assert measured["no memory of S x S: a step of fa3"] == "3.00 GB"
    assert measured["FlashMLA is near the card's bandwidth: 64 heads"] == "50 %"
    assert measured["the KV cache is 13 times smaller: than DeepSeek-V2-Lite's own 16 heads"] == "8.0"
    assert measured["longer contexts in the same memory: fa3"] == "8192"
    assert measured["recomputing costs 25 to 33 % more FLOPs: S alone again, of a step"] == "-"


def test_a_page_without_marks_is_refused(claims: Any) -> None:
    assert claims.written(f"a\n{claims.BEGIN}\nold\n{claims.END}\nb\n", "new\n") == (
        f"a\n{claims.BEGIN}\nnew\n{claims.END}\nb\n")
    for page in ("a\n", f"{claims.END} {claims.BEGIN}"):
        with pytest.raises(SystemExit, match="the page has no"):
            claims.written(page, "new\n")
