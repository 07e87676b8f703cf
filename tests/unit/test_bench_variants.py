"""The benchmark of variants on the CPU: its grid, its peers' answers, a run with small problems and made-up timers."""
from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from flashgen.cli.app import app
from flashgen.cli.bench import tables
from flashgen.errors import SpecError
from flashgen.runtime.measure.bench import Refused, bench, write_results
from flashgen.runtime.measure.grid import ROOT
from flashgen.runtime.ops.attention import flex as bench_flex
from flashgen.runtime.ops.attention import timed
from flashgen.runtime.ops.attention.variants import VariantBench, VariantCase, load_variants
from flashgen.runtime.verify.expression_mods import ExpressionMods
from flashgen.runtime.verify.reference import reference

GRID = str(ROOT / "benchmarks" / "grids" / "fa3_variants.yaml")
SMALL: dict[str, Any] = {"seqlen_q": 160, "seqlen_kv": 160, "num_heads_q": 2, "num_heads_kv": 2}


def small_cases() -> list[VariantCase]:
    found = []
    for case in load_variants(GRID):
        if case.problem.batch == 2:
            values = {**case.values, **({"window": 40} if "window" in case.values else {}),
                      **({"doc": "documents 40"} if "doc" in case.values else {})}
            built_in = case.built_in and {**case.built_in, **({"window": (39, -1)} if "window" in case.values else {})}
            found.append(replace(case, problem=replace(case.problem, **SMALL), values=values, built_in=built_in))
    return found


def test_the_grid() -> None:
    cases = load_variants(GRID)
    assert {(case.problem.batch, case.problem.seqlen_q) for case in cases} == {(2, 8192), (1, 16384)}
    assert {case.flex for case in cases} == set(bench_flex.MODS)
    kinds = {case.spec.expressions.signature if case.spec else "" for case in cases}
    assert len(kinds) == 8 and all(case.problem.head_dim_qk == 128 for case in cases)


@pytest.mark.parametrize("change", [{"wariants": 1}, {"variants": 3}, {"variants": [{"spec": "alibi"}]},
                                    {"variants": [{"name": "x", "masc": "True"}]},
                                    {"variants": [{"name": "x", "spec": "differential"}]}])
def test_grids_that_are_none(change: dict[str, Any]) -> None:
    text = json.dumps({"batch": 1, "seqlen_q": 64, "num_heads_q": 1, "head_dim_qk": 128, "variants": []} | change)
    with pytest.raises(SpecError):
        load_variants(text)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("case", small_cases(), ids=lambda case: case.name)
def test_flex_answers_the_same_question(case: VariantCase, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    x = case.problem.make_inputs()
    single = x.with_(q=x.q.float(), k=x.k.float(), v=x.v.float())
    mods = ExpressionMods.of(case.spec, bench_flex.drawn(case, "cpu")) if case.spec else ExpressionMods()
    expected, _ = reference(single.q, single.k, single.v, causal=case.problem.causal, mods=mods)
    found = bench_flex.flex(case, "cpu")(single).transpose(1, 2)
    torch.testing.assert_close(found.double(), expected, atol=1e-4, rtol=1e-4)
    if case.built_in:
        same, _ = reference(single.q, single.k, single.v, **case.built_in)
        torch.testing.assert_close(same, expected)


def test_pairs_are_those_of_the_mask() -> None:
    pairs = {case.name: bench_flex.visible_pairs(case, bench_flex.drawn(case, "cpu"), "cpu") for case in small_cases()}
    heads = 4
    assert pairs["causal"] == pairs["causal by tile classes"] == pairs["alibi"] == heads * 160 * 161 // 2
    assert pairs["window 1k"] == heads * (160 * 161 - 120 * 121) // 2
    assert pairs["prefix-LM"] == heads * (160 * 161 // 2 + 40 * 39 // 2)
    by_head = replace(small_cases()[1], spec=small_cases()[1].spec.with_(mask="head_q == 1"))  # type: ignore[union-attr]
    assert bench_flex.visible_pairs(by_head, {}, "cpu") == 2 * 160 * 160


def test_documents_do_not_fall() -> None:
    case = next(case for case in load_variants(GRID) if "doc" in case.values)
    ids = bench_flex.drawn(case, "cpu")["doc"]
    assert ids.shape == (2, 8192) and bool((ids.diff() >= 0).all()) and 3 < int(ids[:, -1].min()) < 40
    assert not torch.equal(ids[0], ids[1])


class OnCpu:
    """Timers made up; one peer cannot be captured."""

    l2_bytes, num_sms, timer, data, place = 1, 4, "graph", "normal", "cpu"

    def __init__(self) -> None:
        self.times = itertools.count(1)

    def facts(self) -> dict[str, Any]:
        return {"gpu": "NVIDIA H200", "driver": "1", "versions": {}}

    def archs(self) -> Sequence[str]:
        return ["sm_90a"]

    def timed(self, timer: str, calls: Sequence[Any]) -> Any:
        if timer == "graph" and next(self.times) % 5 == 0:
            raise Refused("cannot be captured in a CUDA graph")
        return lambda: 0.25

    def release(self) -> None: ...


class Cold(VariantBench):
    """Nothing is compiled: kernels are emulated."""

    def warm(self, cases: Sequence[VariantCase], peers: Sequence[str]) -> None: ...


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_a_whole_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(timed, "find", lambda name: None)
    cases, stored = [case for case in small_cases() if case.name in ("causal by tile classes", "window 1k",
                                                                     "softcap")], []
    results = bench(OnCpu(), suite := Cold(), (), cases, ["flex", "built-in"], rounds=1, store=stored.append)
    assert [row["name"] for row in results["rows"]] == [case.name for case in cases] and len(stored) == 3
    assert {row["timer"] for row in results["rows"]} == {"graph", "events"}
    for row in results["rows"]:
        assert set(row["peers"]) | set(row["refused"]) == {"flex", "built-in"}, row["refused"]
        assert row["speed"]["flex"] == 1.0 and row["tflops"] > 0 and row["flex_block_mask_ms"] > 0
    assert set(results["rows"][0]["peers"]) == {"flex", "built-in"}, results["rows"][0]["refused"]
    text = json.loads(write_results(results, tmp_path, "fa3-variants").read_text())
    assert text["rows"] == results["rows"]
    assert len(tables(suite, results, ["flex", "built-in"])) >= 2


def test_the_command_asks_for_a_grid() -> None:
    result = CliRunner().invoke(app, ["bench"])
    assert result.exit_code == 2 and "fa3_variants.yaml" in result.output
    if not torch.cuda.is_available():
        result = CliRunner().invoke(app, ["bench", "--problem-grid", GRID])
        assert result.exit_code == 8 and "no CUDA device" in result.output
