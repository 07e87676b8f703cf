"""Bench arithmetic with timers and a device that tests make up; one small run on a real GPU."""
from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from flashgen.cli.app import app
from flashgen.cli.bench import ALL_PEERS
from flashgen.codegen.spec import Spec, load_specs, spec_path
from flashgen.errors import SpecError, UnsupportedError
from flashgen.runtime import bench, bench_device
from flashgen.runtime.bench import (
    CALLS_PER_GRAPH,
    OURS,
    SETS_MAX,
    Call,
    Case,
    Refused,
    Run,
    geomeans,
    gpu_folder,
    interleave,
    load_grid,
    sets_needed,
    variants_for,
    write_results,
)
from flashgen.runtime.reference import reference

settings.register_profile("bench", deadline=None, derandomize=True)
settings.load_profile("bench")

SPECS = load_specs(spec_path("fa2_fwd")).specs
GRID = "{batch: 2, num_heads_q: 4, head_dim_qk: [64, 128], seqlen_q: [256, 512], causal: [false, true]}"


# -- cases and grids


def test_default_grid_is_what_the_docs_compare() -> None:
    cases = load_grid(bench.default_grid("fa2", "fwd"))
    assert len(cases) == 12 and {case.head_dim_qk for case in cases} == {64, 128, 256}
    for case in cases:
        assert case.batch * case.seqlen_q == 16384 and case.num_heads_q * case.head_dim_qk == 2048
        assert variants_for(case, SPECS, ["sm_90a", "sm_90"])
    assert cases[0].label == "D64 H32 B8 S2048 full"


def test_inline_grid_multiplies() -> None:
    cases = load_grid(GRID)
    assert len(cases) == len(set(cases)) == 8
    assert load_grid("{batch: 1, hidden: 256, head_dim_qk: 64, seqlen_q: 8, seqlen_kv: 9, num_heads_kv: 2, "
                     "window: [[1, -1], [2, 3]], dtype: fp16}") == (
        Case(1, 8, 9, 4, 2, 64, 64, False, (1, -1), "fp16"), Case(1, 8, 9, 4, 2, 64, 64, False, (2, 3), "fp16"))
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
    ("{batch: [}", "not YAML"), ("no/such/file.yaml", "cannot be read"),
])
def test_grid_errors(grid: str, words: str) -> None:
    with pytest.raises(SpecError) as caught:
        load_grid(grid)
    assert words in str(caught.value)


def test_flops_and_bytes() -> None:
    full = Case(2, 1024, 1024, 16, 16, 128, 128)
    assert full.flops == 4 * 2 * 16 * 1024 * 1024 * 128
    assert full.bytes == 4 * 2 * 16 * 1024 * 128 * 2
    causal = Case(2, 1024, 1024, 16, 16, 128, 128, causal=True)
    assert causal.flops * 2 * 1024 == full.flops * 1025
    assert Case(1, 4, 8, 4, 2, 192, 128).bytes == (4 * 4 + 8 * 2) * 320 * 2
    assert Case(1, 4, 8, 1, 1, 8, 8, window=(0, 0)).flops == 2 * 4 * 16
    assert Case(1, 4, 8, 1, 1, 8, 8, causal=True, window=(0, 9)).flops == 2 * 4 * 16
    assert Case(1, 4, 8, 4, 2, 192, 128, causal=True, window=(5, -1), dtype="fp16").label == (
        "D192/128 H4/2 B1 S4/8 causal window 5,-1 fp16")


def test_variants_come_from_the_closest_target() -> None:
    case = Case(1, 64, 64, 1, 1, 128, 128, causal=True)
    assert [s.variant for s in variants_for(case, SPECS, ["sm_90a", "sm_90"])] == ["fa2_fwd_bf16_d128_causal"]
    more = [*SPECS, next(s for s in SPECS if s.arch == "sm_90" and s.variant == "fa2_fwd_bf16_d128_causal").with_(
        stages=3)]
    assert len(variants_for(case, more, ["sm_90"])) == 2
    windowed = variants_for(Case(1, 64, 64, 1, 1, 128, 128, causal=True, window=(9, -1)), SPECS, ["sm_90"])
    assert [s.window for s in windowed] == [True]
    with pytest.raises(UnsupportedError, match="D72"):
        variants_for(Case(1, 64, 64, 1, 1, 72, 72), SPECS, ["sm_90"])


# -- timing


@given(st.integers(1, 10**10), st.integers(1, 10**8))
def test_rotation_leaves_nothing_in_l2(bytes_per_set: int, l2_bytes: int) -> None:
    sets = sets_needed(bytes_per_set, l2_bytes)
    assert sets * bytes_per_set >= 2 * l2_bytes or sets == SETS_MAX
    assert sets == 1 or (sets - 1) * bytes_per_set < 2 * l2_bytes


def test_median_ignores_outliers_and_warmup() -> None:
    answers = [100.0, 100.0, 100.0, 1.0, 2.0, 500.0, 3.0, 0.1]
    assert interleave({"a": iter(answers).__next__}, rounds=5, warmup=3) == {"a": 2.0}


@given(st.integers(1, 5), st.integers(1, 12))
def test_every_round_times_each_once_and_starts_elsewhere(implementations: int, rounds: int) -> None:
    order: list[str] = []

    def timed(name: str) -> Run:
        return lambda: order.append(name) or 1.0  # type: ignore[func-returns-value]

    names = [str(i) for i in range(implementations)]
    interleave({name: timed(name) for name in names}, rounds=rounds, warmup=0)
    for number in range(rounds):
        own = order[number * implementations:(number + 1) * implementations]
        assert sorted(own) == names and own[0] == names[number % implementations]


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
    """Ours takes 1 ms per GFLOP-equivalent unit of the case, peers a multiple; `b` refuses causal, `c` is absent."""

    l2_bytes = 50 * 2**20
    factors: ClassVar = {"a": 1.5, "b": 0.5}

    def __init__(self, timer: str = "graph") -> None:
        self.sets: list[int] = []
        self.calls: list[int] = []

    def facts(self) -> dict[str, Any]:
        return {"gpu": "NVIDIA H200", "driver": "580.1", "versions": {"torch": "2"}}

    def archs(self) -> Sequence[str]:
        return ["sm_90a", "sm_90"]

    def absent(self, peer: str) -> str | None:
        return None if peer in self.factors else f"{peer} is not installed"

    def inputs(self, case: Case, sets: int) -> Sequence[int]:
        assert sets * case.bytes >= 2 * self.l2_bytes
        self.sets.append(sets)
        return range(sets)

    def ours(self, case: Case, spec: Spec, inputs: Sequence[int]) -> Sequence[Call]:
        assert (spec.head_dim_qk, spec.causal, spec.arch) == (case.head_dim_qk, case.causal, "sm_90")
        return [lambda: case.flops / 1e12] * len(inputs)

    def peer(self, name: str, case: Case, inputs: Sequence[int]) -> Sequence[Call]:
        if name == "b" and case.causal:
            raise Refused("no causal mask")
        return [lambda: self.factors[name] * case.flops / 1e12] * len(inputs)

    def timer(self, calls: Sequence[Call]) -> Run:
        self.calls.append(len(calls))
        return calls[0]  # type: ignore[return-value]

    def release(self) -> None: ...


def test_a_run_gives_the_documented_rows() -> None:
    device, seen = FakeDevice(), []
    results = bench.bench(device, SPECS, load_grid(GRID), ["a", "b", "c"],
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


def test_our_own_refusal_is_not_swallowed() -> None:
    class Unable(FakeDevice):
        def ours(self, case: Case, spec: Spec, inputs: Sequence[int]) -> Sequence[Call]:
            raise UnsupportedError("cannot")

    with pytest.raises(UnsupportedError, match="cannot"):
        bench.bench(Unable(), SPECS, load_grid(GRID), ["a"])


def test_gpu_folder() -> None:
    assert gpu_folder("NVIDIA H200") == "h200" and gpu_folder("NVIDIA A100-SXM4-80GB") == "a100-sxm4-80gb"
    assert gpu_folder("NVIDIA GeForce RTX 5090") == "rtx-5090" and gpu_folder("../..") == "unknown"


def test_results_are_replaced_as_a_whole(tmp_path: Path) -> None:
    for rows in ([1, 2, 3], [4]):
        path = write_results({"gpu": "NVIDIA H200", "rows": rows}, tmp_path, "fa2-fwd")
    assert path == tmp_path / "h200" / "fa2-fwd.json" and json.loads(path.read_text())["rows"] == [4]


def test_command_writes_json_and_a_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(bench_device, "CudaDevice", FakeDevice)
    monkeypatch.setattr(bench_device, "PEERS", dict.fromkeys("abc"))
    arguments = ["bench", "fa2_fwd", "--peers", "a,b,c", "--problem-grid", GRID, "-o", str(tmp_path)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    for words in ("NVIDIA H200", "fa2_fwd_bf16_d64_causal.sm_90", "absent: c: c is not installed",
                  "refused: b: no causal mask", "geometric mean: a 1.5", str(tmp_path / "h200" / "fa2-fwd.json")):
        assert words in result.stdout
    stored = json.loads((tmp_path / "h200" / "fa2-fwd.json").read_text())
    assert len(stored["rows"]) == 8
    assert (tmp_path / "h200" / "fa2-fwd.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads(CliRunner().invoke(app, [*arguments, "--json"]).stdout)["rows"] == stored["rows"]


def test_without_matplotlib_the_figures_are_still_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_device, "CudaDevice", FakeDevice)
    monkeypatch.setattr(bench_device, "PEERS", dict.fromkeys("abc"))
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    result = CliRunner().invoke(app, ["bench", "fa2_fwd", "--peers", "a", "--problem-grid", GRID, "-o", str(tmp_path)])
    assert result.exit_code == 0 and "pip install flashgen[plots]" in result.stdout
    assert (tmp_path / "h200" / "fa2-fwd.json").exists()


def test_series_of_the_picture() -> None:
    from flashgen.runtime.bench_plot import series

    results = bench.bench(FakeDevice(), SPECS, load_grid(GRID), ["a", "b"])
    labels, bars = series(results)
    assert len(labels) == 8 and list(bars) == [OURS, "a", "b"] and all(len(values) == 8 for values in bars.values())
    assert [value is None for value in bars["b"]] == [row["case"]["causal"] for row in results["rows"]]


def test_peers_by_name() -> None:
    assert ",".join(bench_device.PEERS) == ALL_PEERS


def test_peers_refuse_masks_they_align_otherwise() -> None:
    for name in ("sdpa-fa2", "sdpa-cudnn"):
        prepare = bench_device.PEERS[name][1]
        with pytest.raises(Refused, match="top-left"):
            prepare(Case(1, 4, 8, 1, 1, 64, 64, causal=True))
        with pytest.raises(Refused, match="window"):
            prepare(Case(1, 4, 4, 1, 1, 64, 64, window=(1, 1)))
        prepare(Case(1, 4, 8, 1, 1, 64, 64))


SMALL_CASES = [Case(2, 33, 33, 4, 2, 16, 16), Case(1, 33, 33, 2, 2, 16, 16, causal=True),
               Case(1, 20, 33, 2, 1, 16, 16, causal=True), Case(1, 20, 33, 2, 1, 16, 16, window=(5, 3)),
               Case(1, 20, 33, 2, 1, 16, 16, causal=True, window=(5, -1))]


@pytest.mark.parametrize("case", SMALL_CASES, ids=lambda case: case.label)
@pytest.mark.parametrize("name", ["sdpa", "flex"])
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_peers_answer_the_same_question(name: str, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU, uncompiled: heads, layout and mask as ours."""
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    generator = torch.Generator().manual_seed(0)

    def normal(seqlen: int, heads: int) -> torch.Tensor:
        return torch.randn(case.batch, seqlen, heads, 16, generator=generator)

    x = bench_device.Inputs(normal(case.seqlen_q, case.num_heads_q), normal(case.seqlen_kv, case.num_heads_kv),
                            normal(case.seqlen_kv, case.num_heads_kv), torch.empty(0))
    try:
        attend = bench_device._flex(case, "cpu") if name == "flex" else bench_device._sdpa("MATH")(case)
    except Refused:
        assert name == "sdpa" and (case.window != (-1, -1) or case.seqlen_q != case.seqlen_kv)
        return
    expected, _ = reference(x.q, x.k, x.v, causal=case.causal, window=case.window)
    found: Any = attend(x)
    torch.testing.assert_close(found.transpose(1, 2).double(), expected.double(), atol=1e-4, rtol=1e-4)


def test_fa3_is_found_under_either_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    absent, prepare = bench_device.PEERS["fa3"]
    assert "fa3_fwd_interface" in (absent() or "")
    (tmp_path / "fa3_fwd_interface.py").write_text(
        "def flash_attn_func(q, k, v, causal=False, window_size=(-1, -1)): return q, k, v, causal, window_size")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert absent() is None
    x = bench_device.Inputs("q", "k", "v", "out")  # type: ignore[arg-type]
    assert prepare(SMALL_CASES[2])(x) == ("q", "k", "v", True, (-1, -1))
    assert prepare(SMALL_CASES[3])(x) == ("q", "k", "v", False, (5, 3))


def test_the_empty_op_takes_the_arguments_of_ours() -> None:
    q = torch.empty(1, 16, 1, 64, device="meta")
    for _ in range(2):  # its library goes, and can come again
        with bench_device._empty_op() as empty:
            assert empty(q, q, q, None, None, 0, -1, -1, 0.125, "", out=q) is None
    import flashgen.runtime.ops  # noqa: F401  defines ours

    ours = torch.ops.flashgen.attention_out.default._schema
    with bench_device._empty_op():
        assert str(torch.ops.flashgen_bench.empty.default._schema).partition("(")[2] == str(ours).partition("(")[2]


# -- on a real GPU


@pytest.mark.gpu
@pytest.mark.time_limit(300)
def test_a_small_run(cuda: str) -> None:
    grid = "{batch: 2, num_heads_q: 4, num_heads_kv: 2, head_dim_qk: 64, seqlen_q: 1024, causal: [false, true]}"
    for timer in ("graph", "events"):
        results = bench.bench(bench_device.CudaDevice(timer), SPECS, load_grid(grid), ["sdpa-fa2", "fa3"], rounds=3)
        for row in results["rows"]:
            assert row["ours_ms"] > 0 and math.isfinite(row["tflops"]) and "sdpa-fa2" in row["peers"]


@pytest.mark.gpu
def test_overhead_is_near_that_of_an_empty_op(cuda: str) -> None:
    found = bench_device.measure_overhead()
    assert 0 < found["empty_op_us"] < found["attention_out_us"] < 100  # the target, 15 us beyond, is the bench's
