"""Bench arithmetic with timers and a device that tests make up."""
from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from flashgen.cli.app import app
from flashgen.codegen.spec.spec import Spec, load_specs, spec_path
from flashgen.errors import UnsupportedError
from flashgen.runtime.launch import driver
from flashgen.runtime.measure import bench
from flashgen.runtime.measure import device as bench_device
from flashgen.runtime.measure.bench import (
    CALLS_PER_GRAPH,
    OURS,
    SETS_MAX,
    Call,
    Peer,
    Refused,
    Run,
    geomeans,
    gpu_folder,
    interleave,
    least,
    results_name,
    sets_needed,
    write_results,
)
from flashgen.runtime.ops import registry
from flashgen.runtime.ops.attention.bench import AttentionBench, load_grid
from flashgen.runtime.ops.attention.problem import Problem

settings.register_profile("bench", deadline=None, derandomize=True)
settings.load_profile("bench")

SPECS = load_specs(spec_path("fa2_fwd")).specs
GRID = "{batch: 2, num_heads_q: 4, head_dim_qk: [64, 128], seqlen_q: [256, 512], causal: [false, true]}"


# -- timing


@given(st.integers(1, 10**10), st.integers(1, 10**8))
def test_rotation_leaves_nothing_in_l2(bytes_per_set: int, l2_bytes: int) -> None:
    sets = sets_needed(bytes_per_set, l2_bytes)
    assert sets * bytes_per_set >= 2 * l2_bytes or sets == SETS_MAX
    assert sets == 1 or (sets - 1) * bytes_per_set < 2 * l2_bytes


def test_median_ignores_outliers_and_warmup() -> None:
    answers = [100.0, 100.0, 100.0, 1.0, 2.0, 500.0, 3.0, 0.1]
    assert interleave({"a": iter(answers).__next__}, rounds=5, warmup=3) == {"a": 2.0}


@given(st.integers(1, 5), st.integers(1, 3))
def test_every_round_times_each_once_and_nobody_has_a_place(implementations: int, cycles: int) -> None:
    """Each begins equally often, and comes after another one as often as before it."""
    order: list[str] = []

    def timed(name: str) -> Run:
        return lambda: order.append(name) or 1.0  # type: ignore[func-returns-value]

    names = [str(i) for i in range(implementations)]
    interleave({name: timed(name) for name in names}, rounds=2 * cycles * implementations, warmup=0)
    rounds = [order[i:i + implementations] for i in range(0, len(order), implementations)]
    assert all(sorted(one) == names for one in rounds)
    assert {name: sum(one[0] == name for one in rounds) for name in names} == dict.fromkeys(names, 2 * cycles)
    follows = Counter(pair for one in rounds for pair in itertools.pairwise(one))
    assert all(follows[b, a] == count for (a, b), count in follows.items())


def test_a_machine_that_slows_down_favours_nobody() -> None:
    state = {"t": 1.0}

    def timed(factor: float) -> Run:
        def once() -> float:
            state["t"] *= 1.001  # slower with every timing, as a card that heats up: one after the other, 1.5 % apart
            return factor * state["t"]
        return once

    medians = interleave({"a": timed(1.0), "b": timed(1.0), "c": timed(2.0)}, rounds=15)
    assert medians["b"] / medians["a"] == pytest.approx(1.0, abs=0.003)
    assert medians["c"] / medians["a"] == pytest.approx(2.0, abs=0.006)


def test_host_us_counts_calls_not_waits() -> None:
    now = {"t": 0.0}

    def spend(seconds: float) -> Call:
        def work() -> None:
            now["t"] += seconds
        return work

    found = bench_device.host_us({"ours": spend(12e-6), "empty": spend(4e-6)}, spend(1.0), lambda: now["t"])
    assert found == pytest.approx({"ours": 12.0, "empty": 4.0}, abs=0.01)


# -- a whole run


class FakeDevice:
    """Timings are what the calls answer."""

    l2_bytes, num_sms, place = 50 * 2**20, 132, "cpu"

    def __init__(self, timer: str = "graph", data: str = "normal") -> None:
        self.timer, self.data = timer, data
        self.calls: list[int] = []

    def facts(self) -> dict[str, Any]:
        return {"gpu": "NVIDIA H200", "driver": "580.1", "versions": {"torch": "2"}}

    def archs(self) -> Sequence[str]:
        return ["sm_90a", "sm_90"]

    def timed(self, timer: str, calls: Sequence[Call]) -> Run:
        self.calls.append(len(calls))
        return calls[0]  # type: ignore[return-value]

    def release(self) -> None: ...


class FakeJob(NamedTuple):
    """Ours takes 1 ms per GFLOP-equivalent unit of the case."""

    case: Problem
    spec: Spec
    inputs: Sequence[Any]

    def ours(self) -> Sequence[Call]:
        assert (self.spec.head_dim_qk, self.spec.causal, self.spec.arch) == (
            self.case.head_dim_qk, self.case.causal, "sm_90")
        return [lambda: self.case.flops / 1e12] * len(self.inputs)


class FakeBench(AttentionBench):
    """Peers take a multiple of ours; `b` refuses causal, `c` is absent."""

    peers = ("a", "b", "c")
    factors: ClassVar = {"a": 1.5, "b": 0.5}

    def timed(self) -> Any:
        return self

    def find(self, peer: str) -> Peer:
        if peer not in self.factors:
            raise Refused(f"{peer} is not installed")

        def start(job: FakeJob) -> Sequence[Call]:
            if peer == "b" and job.case.causal:
                raise Refused("no causal mask")
            return [lambda: self.factors[peer] * job.case.flops / 1e12] * len(job.inputs)
        return Peer(start)

    def inputs(self, device: Any, case: Problem, spec: Spec) -> Any:
        return range(sets_needed(case.bytes, device.l2_bytes))

    def job(self, case: Problem, spec: Spec, inputs: Any) -> Any:
        return FakeJob(case, spec, inputs)


SUITE = FakeBench()


def results_of(peers: Sequence[str], **options: Any) -> dict[str, Any]:
    return bench.bench(FakeDevice(), SUITE, SPECS, load_grid(GRID), peers, **options)


def test_a_run_gives_the_documented_rows() -> None:
    device, seen = FakeDevice(), []
    results = bench.bench(device, SUITE, SPECS, load_grid(GRID), ["a", "b", "c"],
                          progress=lambda done, what: seen.append(done))
    assert {"gpu", "driver", "versions", "commit", "date", "rows"} <= results.keys()
    assert results["absent"] == {"c": "c is not installed"} and seen == list(range(9))
    for row in results["rows"]:
        assert row["case"].keys() >= {"batch", "seqlen_q", "head_dim_qk", "causal", "variant"}
        assert row["tflops"] == pytest.approx(1000, rel=0.01)  # 1e12 FLOPs per ms
        assert row["peers"]["a"] == pytest.approx(1.5 * row["ours_ms"], rel=0.01)
        if row["case"]["causal"]:
            assert row["refused"] == {"b": "no causal mask"} and row["ratio"] == pytest.approx(1.5, rel=0.01)
        else:
            assert row["refused"] == {} and row["ratio"] == pytest.approx(0.5, rel=0.01)
    assert all(calls >= CALLS_PER_GRAPH for calls in device.calls)


def test_means_over_the_rows_that_have_a_peer() -> None:
    rows = [{"ours_ms": 1.0, "peers": {"a": 2.0, "b": 4.0}}, {"ours_ms": 1.0, "peers": {"a": 8.0}},
            {"ours_ms": 1.0, "peers": {}}]
    assert geomeans(rows) == pytest.approx({"a": 4.0, "b": 4.0, "best": 4.0})


def test_means_by_head_dims_and_the_worst_row() -> None:
    results = results_of(["a", "b"])
    by_dims = SUITE.geomeans_by_head_dims(results["rows"])
    assert list(by_dims) == ["D64", "D128"]
    for means in by_dims.values():  # b serves the full half only, where it is the best
        assert means == pytest.approx({"a": 1.5, "b": 0.5, "best": (1.5 * 0.5) ** 0.5}, rel=0.01)
    worst = least(results["rows"])
    assert worst is not None and worst["ratio"] == min(row["ratio"] for row in results["rows"])
    assert least(results_of([])["rows"]) is None


def test_a_row_gives_its_case_back() -> None:
    for case in (Problem(2, (3, 5), (3, 5), 4, 2, 192, 128, True, (7, -1), "fp16"), Problem(1, 2, 3, 1, 1, 8, 8)):
        row = SUITE.row(FakeJob(case, SPECS[0], ()), {OURS: 1.0}, {}, "graph")
        assert SUITE.case_of(row) == SUITE.case_of(json.loads(json.dumps(row))) == case


def test_results_of_other_grids_and_data_have_files_of_their_own() -> None:
    assert results_name("fa3", "fwd", None, "normal") == "fa3-fwd"
    assert results_name("fa3", "fwd", "{batch: 1}", "wide") == "fa3-fwd-wide"
    assert results_name("fa3", "fwd", "grids/fa3_fwd_more.yaml", "growing") == "fa3-fwd-more-growing"
    assert results_name("fa3", "fwd", "grids/mine.yaml", "normal") == "fa3-fwd"


def test_a_commit_can_be_given() -> None:
    facts = FakeDevice().facts()
    assert bench.document(facts, "abc")["commit"] == "abc"
    assert bench.document(facts)["commit"] == bench.commit()


def test_our_own_refusal_is_not_swallowed() -> None:
    class Unable(FakeBench):
        def job(self, case: Problem, spec: Spec, inputs: Any) -> Any:
            raise UnsupportedError("cannot")

    with pytest.raises(UnsupportedError, match="cannot"):
        bench.bench(FakeDevice(), Unable(), SPECS, load_grid(GRID), ["a"])


class Uncapturable(FakeDevice):
    """Graphs hold ours alone."""

    def timed(self, timer: str, calls: Sequence[Call]) -> Run:
        if timer == "graph" and self.calls:
            raise Refused("cannot be captured in a CUDA graph")
        return super().timed(timer, calls)


def test_a_peer_that_no_graph_holds_is_refused_or_all_are_timed_as_plain_calls() -> None:
    class FallsBack(FakeBench):
        falls_back = True

        def row(self, job: Any, medians: Any, refused: Any, timer: str) -> dict[str, Any]:
            return {**super().row(job, medians, refused, timer), "timer": timer}

    case = load_grid(GRID)[:1]
    row, = bench.bench(Uncapturable(), SUITE, SPECS, case, ["a"])["rows"]
    assert row["peers"] == {} and row["refused"] == {"a": "cannot be captured in a CUDA graph"}
    row, = bench.bench(Uncapturable(), FallsBack(), SPECS, case, ["a"])["rows"]
    assert [*row["peers"]] == ["a"] and row["refused"] == {} and row["timer"] == "events"


def test_results_are_stored_after_every_row() -> None:
    stored: list[int] = []
    results_of(["a"], store=lambda results: stored.append(len(results["rows"])))
    assert stored == [*range(1, 9)]


def test_gpu_folder() -> None:
    assert gpu_folder("NVIDIA H200") == "h200" and gpu_folder("NVIDIA A100-SXM4-80GB") == "a100-sxm4-80gb"
    assert gpu_folder("NVIDIA GeForce RTX 5090") == "rtx-5090" and gpu_folder("../..") == "unknown"


def test_results_are_replaced_as_a_whole(tmp_path: Path) -> None:
    for rows in ([1, 2, 3], [4]):
        path = write_results({"gpu": "NVIDIA H200", "rows": rows}, tmp_path, "fa2-fwd")
    assert path == tmp_path / "h200" / "fa2-fwd.json" and json.loads(path.read_text())["rows"] == [4]


def on_a_fake_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_device, "CudaDevice", FakeDevice)
    monkeypatch.setattr(driver, "need_device", lambda purpose, nearest: None)
    monkeypatch.setattr(registry, "bench_of", lambda spec: SUITE)


def test_command_writes_json_and_a_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    on_a_fake_device(monkeypatch)
    arguments = ["bench", "fa2_fwd", "--peers", "a,b,c", "--problem-grid", GRID, "-o", str(tmp_path)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    for words in ("NVIDIA H200", "fa2_fwd_bf16_d64_causal.sm_90", "absent: c: c is not installed",
                  "refused: b: no causal mask", "geometric mean: a 1.5", str(tmp_path / "h200" / "fa2-fwd.json")):
        assert words in result.stdout
    stored = json.loads((tmp_path / "h200" / "fa2-fwd.json").read_text())
    assert len(stored["rows"]) == 8
    assert (tmp_path / "h200" / "fa2-fwd.png").read_bytes().startswith(b"\x89PNG")
    for words in ("  D64: a 1.5", "  D128: a 1.5", "least over the best peer: 0.500, D64 H4 B2 S256 full"):
        assert words in result.stdout
    assert json.loads(CliRunner().invoke(app, [*arguments, "--json"]).stdout)["rows"] == stored["rows"]


def test_command_with_data_and_a_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_a_fake_device(monkeypatch)
    arguments = ["bench", "fa2_fwd", "fa2_fwd_d192_v128", "--peers", "", "--problem-grid", GRID, "-o", str(tmp_path)]
    for more, environment in ((["--commit", "abc"], {}), ([], {"FLASHGEN_COMMIT": "abc"})):
        result = CliRunner().invoke(app, [*arguments, "--data", "growing", *more], env=environment)
        assert result.exit_code == 0 and "growing data" in result.stdout
        stored = json.loads((tmp_path / "h200" / "fa2-fwd-growing.json").read_text())
        assert stored["commit"] == "abc" and stored["data"] == "growing"
        (tmp_path / "h200" / "fa2-fwd-growing.json").unlink()


def test_without_matplotlib_the_figures_are_still_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_a_fake_device(monkeypatch)
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    result = CliRunner().invoke(app, ["bench", "fa2_fwd", "--peers", "a", "--problem-grid", GRID, "-o", str(tmp_path)])
    assert result.exit_code == 0 and "pip install flashgen[plots]" in result.stdout
    assert (tmp_path / "h200" / "fa2-fwd.json").exists()


def test_series_of_the_picture() -> None:
    from flashgen.runtime.measure.plot import series

    results = results_of(["a", "b"])
    labels, bars = series(SUITE, results)
    assert len(labels) == 8 and list(bars) == [OURS, "a", "b"] and all(len(values) == 8 for values in bars.values())
    assert [value is None for value in bars["b"]] == [row["case"]["causal"] for row in results["rows"]]
