"""The measuring loop of `flashgen tune` with a device that tests make up, what --write writes, and the command."""
from __future__ import annotations

import functools
import importlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from candidates_kit import found_for, spec_of
from kit import attention_by_reference
from typer.testing import CliRunner

import flashgen
from flashgen.cli.app import app
from flashgen.codegen.explain.candidates import Candidate
from flashgen.codegen.families.registry import FAMILIES, lower
from flashgen.codegen.families.shared.tiles import Row
from flashgen.codegen.slots import mask_choice
from flashgen.codegen.spec.spec import Spec, load_specs, spec_path
from flashgen.errors import CompileError, EnvironmentError_, UnsupportedError, VerifyError
from flashgen.runtime.compile.build import BuildResult
from flashgen.runtime.launch import driver
from flashgen.runtime.measure import device as bench_device
from flashgen.runtime.measure import tune as runner
from flashgen.runtime.measure import tune_write
from flashgen.runtime.measure.bench import WARMUP_ROUNDS, Call, Run
from flashgen.runtime.ops.attention.bench import AttentionBench
from flashgen.runtime.ops.attention.problem import Problem

# -- measuring


class FakeDevice:
    """Times come from the calls; `order` is the sequence of timings."""

    l2_bytes, num_sms, data, timer, place = 1, 132, "normal", "graph", "cpu"

    def __init__(self) -> None:
        self.order: list[str] = []

    def facts(self) -> dict[str, Any]:
        return {"gpu": "NVIDIA H200", "driver": "580.1", "versions": {"torch": "2"}}

    def archs(self) -> Sequence[str]:
        return ["sm_90a", "sm_90"]

    def timed(self, timer: str, calls: Sequence[Call]) -> Run:
        return calls[0]  # type: ignore[return-value]

    def release(self) -> None: ...


class FakeBench(AttentionBench):
    def __init__(self, order: list[str], speed: Callable[[Spec, Problem], float], nonfinite: str = "") -> None:
        self.order, self.speed, self.nonfinite = order, speed, nonfinite
        self.drawn: list[Problem] = []

    def timed(self) -> Any:
        return self

    def inputs(self, device: Any, case: Problem, spec: Spec) -> Any:
        self.drawn.append(case)
        return range(1)

    def job(self, case: Problem, spec: Spec, inputs: Any) -> Any:
        def call() -> float:
            self.order.append(spec.variant)
            return self.speed(spec, case)

        def ours() -> Sequence[Call]:
            if spec.variant == self.nonfinite:
                raise VerifyError("out is not finite")
            return [call]
        return SimpleNamespace(ours=ours)


def all_build(specs: Sequence[Spec], jobs: int | None, step: runner.Step) -> list[BuildResult]:
    return [BuildResult(spec.variant, spec.arch) for spec in specs]


def right(candidate: Candidate) -> None: ...


def by_keys(spec: Spec, case: Problem) -> float:
    """The wider the key tile, the faster; fewer stages first."""
    assert spec.tile is not None and spec.stages is not None
    return case.flops / 1e12 * (1 + 1 / spec.tile.n + spec.stages / 1000)


def measured(limit: int = 6, **options: Any) -> tuple[runner.Tuning, FakeDevice]:
    device = FakeDevice()
    suite = FakeBench(device.order, options.pop("speed", by_keys), options.pop("nonfinite", ""))
    arguments = {"suite": suite, "build": all_build, "check": right, "rounds": 4, **options}
    tuning = runner.tune(device, found_for("fa3_fwd_bf16_d128", limit=limit), **arguments)
    assert suite.drawn == [*tuning.cases]  # candidates share the inputs of a case
    return tuning, device


def test_ranking_is_by_the_geometric_mean() -> None:
    def speed(spec: Spec, case: Problem) -> float:
        return by_keys(spec, case) * (3.0 if case.seqlen_q == 512 and spec.stages == 2 else 1.0)

    tuning, _ = measured(12, speed=speed)
    means = [timed.mean_ms for timed in tuning.ranked]
    assert means == sorted(means) and len(means) == 12
    assert tuning.winner.candidate.tiling.stages != 2
    assert tuning.present is not None and tuning.ratio(tuning.present) == 1.0
    ratio = tuning.ratio(tuning.winner)
    assert ratio is not None and ratio == pytest.approx(tuning.present.mean_ms / means[0])
    assert tuning.tflops(tuning.winner)[1] == pytest.approx(tuning.cases[1].flops / tuning.winner.ms[1] / 1e9)


def test_candidates_are_timed_in_turns() -> None:
    tuning, device = measured(5)
    per_case = 5 * (4 + WARMUP_ROUNDS)
    assert len(device.order) == per_case * len(tuning.cases)
    for start in range(0, len(device.order), 5):
        assert len(set(device.order[start:start + 5])) == 5  # each once per round
    assert device.order[0] != device.order[5]                # and another one first in each


def test_the_progress_adds_up() -> None:
    seen: list[tuple[int, int]] = []

    def phase(title: str, total: int) -> Any:
        import contextlib
        return contextlib.nullcontext(lambda done, what: seen.append((done, total)) if title == "timing" else None)

    measured(5, phase=phase)
    assert [done for done, _ in seen] == list(range(1, seen[0][1] + 1))


def test_a_wrong_kernel_is_listed_and_never_ranked() -> None:
    plain, _ = measured()
    fastest, second = (timed.candidate.spec.variant for timed in plain.ranked[:2])

    def check(candidate: Candidate) -> None:
        if candidate.spec.variant == fastest:
            raise VerifyError("off by one", where=fastest)

    tuning, device = measured(check=check, nonfinite=second)
    assert [(fault.variant, fault.message) for fault in tuning.wrong] == [
        (fastest, f"{fastest}: off by one"), (second, "out is not finite")]
    assert {fastest, second}.isdisjoint(t.candidate.spec.variant for t in tuning.ranked)
    assert {fastest, second}.isdisjoint(device.order)

    def none(candidate: Candidate) -> None:
        raise VerifyError("off by two")

    with pytest.raises(VerifyError, match="no candidate") as caught:
        measured(check=none)
    assert caught.value.details.count("off by two") == 6


def test_the_check_judges_against_fp64(monkeypatch: pytest.MonkeyPatch) -> None:
    from flashgen.runtime.ops.attention import op
    from flashgen.runtime.verify import verify

    monkeypatch.setattr(verify, "current_device", lambda: ("cpu", 90))
    monkeypatch.setattr(flashgen, "attention", attention_by_reference)
    candidate = found_for("fa3_fwd_bf16_d64_window", limit=1).kept[0]
    runner.check(candidate)
    plain = op.run

    def late(subject: Any, inputs: Any) -> Any:  # a value that is off by a few roundings in one place
        results = plain(subject, inputs)
        results["out"][-1, -1, -1, -1] += 0.05
        return results

    monkeypatch.setattr(op, "run", late)
    with pytest.raises(VerifyError, match="column 63"):
        runner.check(candidate)


def test_what_does_not_build_is_counted_by_reason() -> None:
    whats = ["v for sm_90a: spills 8 bytes of stores", "v: (C7510) Potential Performance Loss", "refuses v: expected ;"]

    def build(specs: Sequence[Spec], jobs: int | None, step: runner.Step) -> list[BuildResult]:
        errors = [{"what": what} for what in whats]
        return [BuildResult(spec.variant, spec.arch, error=error)
                for spec, error in zip(specs, [*errors, *[None] * (len(specs) - 3)], strict=True)]

    tuning, _ = measured(build=build)
    assert [fault.reason.split()[0] for fault in tuning.unbuilt] == ["spills", "products", "does"]
    assert len(tuning.ranked) == 3

    def nothing(specs: Sequence[Spec], jobs: int | None, step: runner.Step) -> list[BuildResult]:
        return [BuildResult(spec.variant, spec.arch, error={"what": whats[0]}) for spec in specs]

    with pytest.raises(CompileError, match="none of 6 candidates builds"):
        measured(build=nothing)


def test_a_variant_for_another_card_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="sm_80"):
        runner.tune(FakeDevice(), found_for("fa2_fwd_bf16_d64", "sm_80", 4), build=all_build, check=right)


# -- what is written


def rows_of(text: str, family: str) -> tuple[Row, ...]:
    """The text as the tiles.py of the family would read it."""
    module = importlib.import_module(f"flashgen.codegen.families.{family}.tiles")
    rows: tuple[Row, ...] = eval(f"({text}\n)", dict(vars(module)))
    return rows


@pytest.mark.parametrize(("variant", "arch"), [
    ("fa3_fwd_bf16_d128", "sm_90a"), ("fa3_fwd_bf16_d64_causal_split", "sm_90a"), ("fa3_fwd_bf16_d192v128", "sm_90a"),
    ("fa2_fwd_bf16_d128_causal", "sm_90"), ("fa2_fwd_bf16_d32", "sm_89")])
def test_the_row_gives_the_winner_when_it_stands_in_the_table(variant: str, arch: str,
                                                              monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeDevice()
    monkeypatch.setattr(device, "archs", lambda: [arch])
    found = found_for(variant, arch, 9)
    tuning = runner.tune(device, found, suite=FakeBench([], by_keys), build=all_build, check=right, rounds=1)
    text = tune_write.table_text(tuning)
    assert max(map(len, text.splitlines())) <= 112  # 8 columns of indentation come on top
    (row,) = rows_of(text, found.spec.family)
    assert row.source == tune_write.source_text(tuning)
    assert row.source.startswith(f"fastest of 9 candidates timed on NVIDIA H200, {tuning.facts['date'][:10]}: ")
    assert row.masks == {mask_choice(found.spec.causal, found.spec.window)} and arch in row.targets
    table = FAMILIES[found.spec.family].tiles
    assert table is not None
    monkeypatch.setitem(vars(table), "rows", (row, *table.rows))
    winner, plan = tuning.winner.candidate.plan, lower(found.spec)
    for name in ("constants", "smem", "roles", "launch", "flags", "register_usage_level"):
        assert getattr(winner, name) == getattr(plan, name), name


@pytest.mark.parametrize(("variant", "arch"), [("fa3_fwd_bf16_d128_split", "sm_90a"),
                                               ("fa2_fwd_bf16_d192v128_window", "sm_90")])
def test_the_written_spec_is_the_winner(variant: str, arch: str, tmp_path: Path) -> None:
    tuning = runner.tune(FakeDevice(), found_for(variant, arch, 5), suite=FakeBench([], by_keys), build=all_build,
                         check=right, rounds=1)
    path = tmp_path / "tuned.yaml"
    tune_write.write_new(path, tune_write.spec_text(tuning))
    (spec,) = load_specs(path).specs
    assert spec == tuning.winner.candidate.spec
    assert lower(spec).constants == tuning.winner.candidate.plan.constants
    assert "NVIDIA H200" in path.read_text()
    with pytest.raises(EnvironmentError_):
        tune_write.write_new(path, "")
    with pytest.raises(EnvironmentError_, match="exists already"):
        tune_write.refuse_existing(path)


def test_the_variants_that_share_a_row() -> None:
    specs = load_specs(spec_path("fa3_fwd")).specs
    shared = {spec.variant for spec in tune_write.same_row(spec_of("fa3_fwd_bf16_d128"), specs)}
    assert shared == {"fa3_fwd_fp16_d128", "fa3_fwd_bf16_d128_varlen", "fa3_fwd_fp16_d128_varlen"}


# -- the command


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["tune", *arguments])


ONE = ("fa3_fwd", "--variant", "fa3_fwd_bf16_d128_causal")


def test_dry_run() -> None:
    result = run(*ONE, "--dry-run", "--top", "3")
    assert result.exit_code == 0, result.output
    assert "more registers than a thread has" in result.stdout and "nothing was timed" in result.stdout
    lines = result.stdout.splitlines()
    table = lines[next(i for i, line in enumerate(lines) if line.startswith("tile ")) + 1:]
    assert sum(" warps, " in line for line in table) in (3, 4) and sum("present" in line for line in table) == 1
    data = json.loads(run(*ONE, "--dry-run", "--max", "20", "--problem", "batch=1 seqlen_q=512", "--json").stdout)
    assert len(data["candidates"]) == 20 and sum(row["present"] for row in data["candidates"]) == 1
    assert data["considered"] == 20 + sum(row["count"] for row in data["dropped"])
    assert data["considered"] == 4 * 15 * 4 * 2 * 2 * 2


@pytest.mark.parametrize(("arguments", "exit_code", "words"), [
    (("fa3_fwd", "--variant", "*_varlen", "--dry-run"), 6, "nearest: fa3_fwd_bf16_d64\n"),
    ((*ONE, "--dry-run", "--write", "table", "x"), 6, "no winner"),
    ((*ONE, "--write", "tabel", "x"), 6, "nearest: table"),
    ((*ONE, "--write", "spec", "README.md"), 8, "exists already"),
    ((*ONE, "--dry-run", "--problem", "bach=2"), 6, "nearest: batch"),
])
def test_refusals(arguments: tuple[str, ...], exit_code: int, words: str, tmp_path: Path,
                  monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("README.md").touch()
    result = run(*arguments)
    assert result.exit_code == exit_code and words in result.stderr, result.output


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a GPU")
def test_without_a_gpu_it_names_the_dry_run() -> None:
    result = run(*ONE)
    assert result.exit_code == 8 and "--dry-run" in result.stderr and "flashgen doctor" in result.stderr


@pytest.fixture
def on_a_fake_device(monkeypatch: pytest.MonkeyPatch) -> None:
    tune = functools.partial(runner.tune, suite=FakeBench([], by_keys), build=all_build, check=right)
    monkeypatch.setattr(bench_device, "CudaDevice", FakeDevice)
    monkeypatch.setattr(driver, "need_device", lambda purpose, nearest: None)
    monkeypatch.setattr(runner, "tune", tune)
    monkeypatch.setattr(runner, "build", all_build)


def test_command_ranks_and_writes(tmp_path: Path, on_a_fake_device: None) -> None:
    path = tmp_path / "row.txt"
    result = run(*ONE, "--max", "8", "--top", "2", "--write", "table", str(path))
    assert result.exit_code == 0, result.output
    assert path.read_text().rstrip("\n") in result.stdout and f"wrote {path}" in result.stdout
    assert "also builds for the 3 other variants" in result.stdout and "speed / present" in result.stdout
    assert len(rows_of(path.read_text(), "fa3")) == 1
    spec = tmp_path / "tuned.yaml"
    data = json.loads(run(*ONE, "--max", "8", "--write", "spec", str(spec), "--json").stdout)
    assert len(data["rows"]) == 8 and data["written"] == str(spec) and data["rows"][0]["variant"] == load_specs(
        spec).specs[0].variant
    ratios = [row["ratio"] for row in data["rows"]]
    assert ratios == sorted(ratios, reverse=True) and sum(row["present"] for row in data["rows"]) == 1


def test_command_fails_on_a_wrong_kernel(monkeypatch: pytest.MonkeyPatch, on_a_fake_device: None) -> None:
    def check(candidate: Candidate) -> None:
        if dict(candidate.tiling.own)["schedule"] == "pingpong":
            raise VerifyError("off by one")

    monkeypatch.setattr(runner, "tune", functools.partial(runner.tune, check=check))
    result = run(*ONE, "--max", "8")
    assert result.exit_code == 7 and "computes a wrong result" in result.stdout and "off by one" in result.stdout
