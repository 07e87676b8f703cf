"""`flashgen lineage` as a command: counters by ncu, which a CSV stands for, pictures, and what is refused by name."""
from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from lineage_kit import HOPPER, measured
from typer.testing import CliRunner

from flashgen.cli.app import app
from flashgen.errors import EnvironmentError_, UnsupportedError
from flashgen.runtime.measure import ncu
from flashgen.runtime.measure.counted import chosen
from flashgen.runtime.measure.lineage import Generation, parse_problem
from flashgen.runtime.measure.lineage_plot import draw_lengths, draw_roofline, ms_of, points_of, walls
from flashgen.runtime.ops.attention.lineage import LINEAGE as ATTENTION
from flashgen.runtime.ops.mla_decode.lineage import LINEAGE as DECODE

# ---- counters

CSV = '''==PROF== Connected to process 7
a line of the program, with a comma
==PROF== Disconnected from process 7
"ID","Process ID","Kernel Name","Metric Name","Metric Unit","Metric Value"
"0","7","scores(Params)","dram__bytes_read.sum","byte","1,000"
"0","7","scores(Params)","dram__bytes_write.sum","Kbyte","2.5"
"1","7","values, with a comma","dram__bytes_read.sum","Mbyte","3"
"1","7","values, with a comma","dram__bytes_write.sum","byte","0"
"1","7","values, with a comma","gpu__time_duration.sum","ns","9"
'''


def test_counters_are_added_over_the_kernels_of_a_call() -> None:
    assert ncu.parse_csv(CSV) == {"read": 3_001_000, "written": 2_500, "kernels": 2}


@pytest.mark.parametrize(("text", "words"), [
    ("", "counted no kernel"), (CSV.splitlines()[3] + "\n", "counted no kernel"),
    ("==ERROR== ERR_NVGPUCTRPERM - no permission", "ERR_NVGPUCTRPERM"),
    (CSV.replace('"1,000"', '"n/a"'), "'n/a'"), (CSV.replace("Kbyte", "furlong"), "furlong")])
def test_what_holds_no_counts_is_refused_by_name(text: str, words: str) -> None:
    with pytest.raises(EnvironmentError_, match=words) as caught:
        ncu.parse_csv(text)
    assert caught.value.where == "--counters"


def test_a_child_counts_the_call_that_its_parent_names(monkeypatch: pytest.MonkeyPatch) -> None:
    [case] = ATTENTION.cases(parse_problem("batch=2 seqlen=64 heads=4 heads_kv=2 head_dim=64 window=5,0"))
    generation = by_name_of(ATTENTION.generations(case, HOPPER, 132, False))["fa2"]
    ran: list[list[str]] = []

    def run(command: list[str], **options: Any) -> SimpleNamespace:
        ran.append(command)
        return SimpleNamespace(returncode=0, stdout=CSV, stderr="")

    monkeypatch.setattr(ncu.subprocess, "run", run)
    assert ncu.counter("ncu", ATTENTION)(case, generation)["kernels"] == 2
    assert chosen(json.loads(ran[0][-1]), list(HOPPER), 132)[1:] == (case, generation)
    assert {"--csv", *ncu.METRICS} <= {*ran[0], *ran[0][2].split(",")}
    with pytest.raises(UnsupportedError, match="no generation fa0"):
        chosen({**json.loads(ran[0][-1]), "generation": "fa0"}, list(HOPPER), 132)


def by_name_of(generations: Sequence[Generation]) -> dict[str, Generation]:
    return {generation.name: generation for generation in generations}


def test_a_child_that_fails_is_an_error_with_its_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ncu.subprocess, "run", lambda *_, **__: SimpleNamespace(returncode=3, stdout="", stderr="boom"))
    [case] = DECODE.cases({"batch": 1, "cached": 64, "heads": 16})
    with pytest.raises(EnvironmentError_, match="ended with 3") as caught:
        ncu.counter("ncu", DECODE)(case, DECODE.generations(case, HOPPER, 132, False)[0])
    assert "boom" in caught.value.details


def test_a_child_that_hangs_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def hangs(command: list[str], timeout: int, **options: Any) -> None:
        raise ncu.subprocess.TimeoutExpired(command[0], timeout)

    monkeypatch.setattr(ncu.subprocess, "run", hangs)
    [case] = DECODE.cases({"batch": 1, "cached": 64, "heads": 16})
    with pytest.raises(EnvironmentError_, match=r"naive, H16 Q1 B1 S64: .*timed out after 300 seconds"):
        ncu.counter("ncu", DECODE)(case, DECODE.generations(case, HOPPER, 132, False)[0])


def test_ncu_absent_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ncu.shutil, "which", lambda name: None)
    with pytest.raises(EnvironmentError_, match="ncu is not on PATH"):
        ncu.find_ncu()


# ---- the command

def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["lineage", *arguments])


def test_the_command_predicts_and_draws(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    found = run("--target", "sm_90a", "--problem", "batch=8 heads=16 head_dim=128", "--seqlens", "8192,16384", "-o",
                str(tmp_path))
    assert found.exit_code == 0, found.output
    folder = tmp_path / "h200-sxm"
    results = json.loads((folder / "lineage.json").read_text())
    assert results["target"] == "sm_90a" and {row["length"] for row in results["rows"]} == {8192, 16384}
    for name in ("roofline", "lengths"):
        assert (folder / f"lineage-{name}.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert "out of memory" in found.output and "standard" in found.output and "139 GB" in found.output
    assert "ms  " not in found.output.splitlines()[1].partition("at least")[0]  # columns without a cell are left out


def test_pictures_have_what_rows_say(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    results = measured((64, 128, 8192))
    for draw in (draw_roofline, draw_lengths):
        assert draw(results, tmp_path / "picture.png").stat().st_size > 1000
    length, points = points_of(results["rows"])
    assert length == 64 and {"standard", "fa2"} <= {*points}
    assert ms_of(results["rows"][0]) == 8.0 and walls(results["rows"])["standard"] == 128
    empty = {**results, "rows": []}
    assert draw_roofline(empty, tmp_path / "empty.png").exists()


def test_pictures_need_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(EnvironmentError_, match="matplotlib cannot be imported"):
        draw_roofline(measured((64,)), tmp_path / "none.png")
    found = run("--target", "sm_90a", "-o", str(tmp_path))
    assert found.exit_code == 0 and "no picture: matplotlib" in found.output  # the figures are written all the same


def test_the_command_refuses_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    both = run("--target", "sm_90a", "--counters", "--json")
    assert both.exit_code == 6 and json.loads(both.stdout)["error"]["where"] == "--counters"
    monkeypatch.setattr(ncu.shutil, "which", lambda name: None)
    absent = run("--counters", "--json")
    assert absent.exit_code == 8 and "ncu" in json.loads(absent.stdout)["error"]["what"]
