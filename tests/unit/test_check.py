"""`flashgen check` and `flashgen new`: answers, tile counts against brute force, refusals, and how much work it is."""
from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from counted import python_calls
from typer.testing import CliRunner

from flashgen.cli.app import app
from flashgen.codegen.explain.check import check, picture
from flashgen.codegen.explain.explain import explain
from flashgen.codegen.explain.tile_map import FULL, PARTIAL, SKIP
from flashgen.codegen.expr.evaluate import evaluate
from flashgen.codegen.families.registry import op_of
from flashgen.codegen.spec.spec import Spec, load_specs, shipped_spec_paths, spec_path, variant_spec_paths

VARIANTS = [path.stem for path in variant_spec_paths()]
SHIPPED = [path.stem for path in shipped_spec_paths() if op_of(load_specs(path).specs[0]) == "attention"]


def run(*arguments: str, exit_code: int = 0) -> Any:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == exit_code, result.output
    return result


def run_json(*arguments: str, exit_code: int = 0) -> Any:
    return json.loads(run(*arguments, "--json", exit_code=exit_code).stdout)


# ---- check


@pytest.mark.parametrize("name", VARIANTS + SHIPPED)
def test_every_shipped_spec_is_shown_with_little_work(name: str) -> None:
    """A second is the target; tiles that are all alike must not be looked at one by one."""
    shown: list[str] = []
    assert python_calls(lambda: shown.append(run("check", name, "--seqlen-q", "8192").stdout)) < 3_000_000
    (text,) = shown
    assert "visited:" in text
    for param in load_specs(spec_path(name)).specs[-1].expressions.params:
        assert str(param) in text


@pytest.mark.parametrize("name, pass_", [("mla_h100", "decode"), ("fa2_bwd", "bwd"), ("fa3_bwd", "bwd")])
def test_other_operations_have_nothing_to_check(name: str, pass_: str) -> None:
    text = run("check", name, exit_code=6).output
    assert f"check shows attention, not a {pass_}" in text and "fa2 (pass fwd)" in text
    assert f"flashgen list {name}" in text


def test_types_folding_and_cuda() -> None:
    found = run_json("check", "window_sinks", "--param", "window=700")
    mask = found["mask"]
    assert {"text": "kv_pos < num_sink", "type": "bool"} in mask["parts"]
    assert {"text": "q_pos - kv_pos", "type": "int"} in mask["parts"]
    assert found["values"] == {"num_sink": "4", "window": "700"} and "sink: float32[num_heads_q]" in found["params"]
    assert found["slots"]["mask"] == "expression" and "truth_and" in found["cuda"]["mask"]["tile_class"]
    text = run("check", "softcap").stdout
    assert "once a tile     float uniform_0 = 1.0f / p.user_softcap;" in text and "tanh_accurate" in text
    assert "served by the built-in mask `causal`" in run("check", "sigmoid").stdout
    folded = check([Spec(family="fa2", pass_="fwd", arch="sm_90", dtype="bf16", head_dim_qk=64, name="a",
                         score="score * (2 + 3) + 0 * kv_pos")])
    assert "folded and put in order: " in str(folded) and "5.0 * score" in str(folded)


def brute(spec: Spec, tiles: Any, values: dict[str, Any]) -> list[list[int]]:
    mask = spec.expressions.mask
    assert mask is not None
    shift = 0 if spec.align == "top_left" else tiles.seqlen_kv - tiles.seqlen_q
    seen = evaluate(mask, {"q_pos": np.arange(tiles.seqlen_q)[:, None] + shift, "head_q": 0, "batch": 0,
                           "kv_pos": np.arange(tiles.seqlen_kv)[None], "seqlen_q": tiles.seqlen_q,
                           "seqlen_kv": tiles.seqlen_kv, **values}, np)
    seen = np.broadcast_to(seen, (tiles.seqlen_q, tiles.seqlen_kv))
    found = []
    for first, last in tiles.queries:
        rows = seen[first:last + 1]
        found.append([SKIP if not tile.any() else FULL if tile.all() and tile.shape[1] == tiles.block_n else PARTIAL
                      for tile in (rows[:, at:at + tiles.block_n] for at in range(0, tiles.seqlen_kv, tiles.block_n))])
    return found


CASES: list[tuple[str, list[str], dict[str, Any]]] = [
    ("sliding_window", ["window=300"], {"window": 300}), ("chunked", ["chunk=256"], {"chunk": 256}),
    ("window_sinks", ["window=300", "num_sink=40"], {"window": 300, "num_sink": 40}),
    ("prefix_lm", ["prefix=400"], {"prefix": np.array([400])}), ("sigmoid", [], {}),
    ("document", ["doc=index//300"], {"doc": np.arange(1100)[None] // 300}),
    ("block_sparse", ["blocks=true"], {"blocks": np.ones((512, 512), bool)})]


@pytest.mark.parametrize(("name", "params", "values"), CASES, ids=[case[0] for case in CASES])
@pytest.mark.parametrize("lengths", [(1100, 1100), (300, 1100)])
def test_tiles_are_those_of_the_mask(name: str, params: list[str], values: dict[str, Any],
                                     lengths: tuple[int, int]) -> None:
    specs = load_specs(spec_path(name)).specs
    found = check(specs, *lengths, params)
    assert found.tiles is not None and not found.tiles.unknown
    expected = brute(found.spec, found.tiles, values)
    for mine, row in zip(found.tiles.cells, expected, strict=True):
        for cell, kind in zip(mine, row, strict=True):
            assert cell == kind or (cell == PARTIAL and kind == FULL)  # two reasons that share a tile
    data = found.to_json()["tiles"]
    assert data["skipped"] == sum(row.count(SKIP) for row in expected) and data["exact"]
    mask = found.spec.expressions.mask
    assert mask is not None and found.pairs[1]
    seen = evaluate(mask, {"q_pos": np.arange(lengths[0])[:, None] + lengths[1] - lengths[0], "batch": 0,
                           "kv_pos": np.arange(lengths[1])[None], **values}, np)
    assert found.pairs[0] == int(seen.sum())


def test_windows_come_with_each_call() -> None:
    assert "bounds come with each call" in run("check", "fa3_fwd", "--variant", "*d64_window").stdout
    run("check", "fa3_fwd", "--variant", "*d64_window", "--png", "x.png", exit_code=8)


def test_what_is_not_known_is_an_upper_bound() -> None:
    data = run_json("check", "document", "--seqlen-q", "1024")["tiles"]
    assert not data["exact"] and data["unknown"] == ["doc"] and not data["pairs_exact"]
    known = run_json("check", "document", "--seqlen-q", "1024", "--param", "doc=index//256")["tiles"]
    assert known["exact"] and known["visited"] < data["visited"]
    assert "at most, for doc is not known" in run("check", "document").stdout


def test_explain_counts_the_same_tiles() -> None:
    for name, unknown in (("sliding_window", ()), ("prefix_lm", ("prefix",)), ("alibi", ())):
        explained, found = explain(name, seqlen_q=6000), check(load_specs(spec_path(name)).specs, 6000)
        spec = next(s for s in load_specs(spec_path(name)).specs if s.variant == explained.plan.variant
                    and s.arch == explained.plan.target)
        own = check([spec], 6000)
        assert own.tiles is not None and found.tiles is not None
        assert explained.work.tiles == own.tiles.counts() and explained.unknown == unknown
        assert explained.work.pairs == 2 * 16 * own.pairs[0]
        assert ("at most: prefix unknown" in str(explained)) == bool(unknown)


def test_the_picture() -> None:
    found = check(load_specs(spec_path("sliding_window")).specs, 100_000, params=["window=9000"])
    assert found.tiles is not None
    lines = picture(found.tiles)
    assert len(lines) == 32 and {len(line) for line in lines} == {64}
    assert set("".join(lines)) == {"·", "▒", "█"} and lines[0].endswith("·" * 50)


def test_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "tiles.png"
    assert f"wrote {path}" in run("check", "document", "--param", "doc=index//500", "--png", str(path)).stdout
    assert path.read_bytes().startswith(b"\x89PNG")
    run("check", "document", "--png", str(tmp_path / "no" / "such.png"), exit_code=8)


@pytest.mark.parametrize(("arguments", "where", "words"), [
    (["--param", "windw=3"], "--param", "window="), (["--param", "window=x"], "--param window", "whole number"),
    (["--param", "window"], "--param", "sets no parameter"), (["--seqlen-q", "0"], "--seqlen-q", "1 to")])
def test_refusals(arguments: list[str], where: str, words: str) -> None:
    error = run_json("check", "sliding_window", *arguments, exit_code=6)["error"]
    assert error["where"] == where and words in " ".join(map(str, error.values()))


def test_a_wrong_expression_is_pointed_at(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("name: v\nfamily: fa3\npass: fwd\narch: sm_90a\ndtype: bf16\nhead_dim_qk: 64\n"
                    "mask: kv_pos <= q_pso\n")
    error = run_json("check", str(path), exit_code=2)["error"]
    assert error["where"] == f"{path}:7:7:11" and error["nearest"] == "q_pos"


# ---- new


@pytest.mark.parametrize("base", ["fa3_fwd", "fa2_fwd", *VARIANTS])
def test_what_new_writes_checks(base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = run_json("new", "mine", "--from", base)
    assert found == {"written": "mine.yaml", "next": "flashgen check mine.yaml"}
    specs = load_specs("mine.yaml").specs
    source = load_specs(spec_path(base)).specs
    assert {spec.name for spec in specs} == {"mine"} and specs[0].family in {spec.family for spec in source}
    if source[0].expressions:
        assert specs[0].expressions.signature == source[0].expressions.signature
        assert (specs[0].sink, specs[0].normalize) == (source[0].sink, source[0].normalize)
    text = Path("mine.yaml").read_text()
    assert text.count("#") > 8 and max(map(len, text.splitlines())) <= 120
    assert "visited" in run("check", "mine.yaml").stdout
    again = run_json("new", "mine", exit_code=8)["error"]
    assert "exists already" in again["what"] and Path("mine.yaml").read_text() == text


def test_new_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    error = run_json("new", "My Spec", exit_code=2)["error"]
    assert error["nearest"] == "my_spec" and error["where"] == "NAME"
    assert run_json("new", "../x", exit_code=2)["error"]["type"] == "SpecError"
    assert run_json("new", "mine", "--from", "fa3_fdw", exit_code=2)["error"]["what"] == "no such file"
    error = run_json("new", "mine", "--from", "fa2_bwd", exit_code=2)["error"]
    assert "pass bwd" in error["what"] and "forward specs" in error["allowed"]
    for name, family in (("standard", "standard"), ("fa1_fwd", "fa1")):  # which take no expressions
        error = run_json("new", "mine", "--from", name, exit_code=2)["error"]
        assert f"family {family}" in error["what"] and error["allowed"] == "forward specs of fa2, fa3 and triton"
    assert not list(tmp_path.iterdir())


# ---- the page


def test_the_page_shows_every_shipped_variant_as_it_is() -> None:
    page = (shipped_spec_paths()[0].parent.parent / "docs" / "variants.md").read_text(encoding="utf-8")
    for path in variant_spec_paths():
        row = next(line for line in page.splitlines() if line.startswith(f"| `{path.stem}` |"))
        spec = load_specs(path).specs[0]
        for text in (spec.score, spec.mask):
            assert text == "none" or f"`{text}`" in row
        assert ("sink: per_head" in row) == (spec.sink != "none")
        assert ("normalize: none" in row) == (spec.normalize == "none")
