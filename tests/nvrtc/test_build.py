"""Building many: hits start no process, failures and crashes stay with their variant, every result is reported."""
from __future__ import annotations

import faulthandler
import json
import multiprocessing.context
import os
import signal
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tiny import TEXT, tiny

from flashgen.codegen import render
from flashgen.codegen.plan import Plan
from flashgen.codegen.source import Source
from flashgen.errors import PlanError, SpecError
from flashgen.runtime.compile import build as module
from flashgen.runtime.compile.build import BuildResult, build_specs
from flashgen.runtime.compile.cache import STAGING_PREFIX, Cache


@dataclass(frozen=True)
class FakeSpec:
    variant: str
    arch: str = "sm_80"
    text: str = TEXT
    refusal: type[SpecError] | type[PlanError] | None = None


def plan_and_source(spec: FakeSpec) -> tuple[Plan, Source]:
    if spec.refusal:
        raise spec.refusal("does not fit", where=spec.variant, nearest="a smaller tile")
    return tiny(spec.variant, spec.arch, spec.text)


@pytest.fixture(autouse=True)
def _fake_specs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(render, "plan_and_source", plan_and_source)


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The variants for which a process was started."""
    started: list[str] = []
    real = multiprocessing.context.ForkProcess

    def counted(*arguments: Any, args: tuple[Any, Path, dict[str, Any]], **keywords: Any) -> Any:
        started.extend({miss.plan.variant for miss in args[2].values()})
        return real(*arguments, args=args, **keywords)

    monkeypatch.setattr(multiprocessing.context.ForkContext, "Process", staticmethod(counted))
    return started


def build(specs: Sequence[FakeSpec], cache: Cache, **keywords: Any) -> list[BuildResult]:
    return build_specs(specs, cache, **keywords)  # type: ignore[arg-type]


def leftovers(directory: Path) -> list[Path]:
    return [path for path in directory.rglob("*") if path.name.startswith(STAGING_PREFIX)]


def worker(before: Callable[[str], object], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let workers call before(variant) ahead of each kernel."""
    real = module._compile

    def compile_(cache: Cache, miss: Any) -> dict[str, Any]:
        before(miss.plan.variant)
        return real(cache, miss)

    monkeypatch.setattr(module, "_compile", compile_)


ARCHS = ("sm_80", "sm_90a", "sm_120")
GRID = [FakeSpec(f"tiny_{i}", arch) for i in range(3) for arch in ARCHS]


def test_one_process_per_variant_builds_all_its_archs_and_the_second_build_starts_none(
        tmp_path: Path, processes: list[str]) -> None:
    seen: list[tuple[BuildResult, int, int]] = []
    first = build(GRID, Cache(tmp_path / "c"), progress=lambda *row: seen.append(row))
    assert [(result.variant, result.arch) for result in first] == [(spec.variant, spec.arch) for spec in GRID]
    assert all(result.error is None and not result.hit and result.seconds > 0 for result in first)
    assert all(result.resources and result.resources.registers > 0 and result.path for result in first)
    assert [row[1:] for row in seen] == [(i + 1, 9) for i in range(9)] and {id(row[0]) for row in seen} == set(
        map(id, first))
    assert processes == ["tiny_0", "tiny_1", "tiny_2"]
    assert not leftovers(tmp_path)
    second = build(GRID, Cache(tmp_path / "c"))
    assert len(processes) == 3 and all(result.hit for result in second)
    assert [(a.key, a.path, a.resources) for a in first] == [(b.key, b.path, b.resources) for b in second]
    assert all(b.entry is not None and a.entry is not None and a.entry.cubin == b.entry.cubin
               for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("jobs", [1, 2])
def test_no_more_workers_than_jobs_run_at_a_time(jobs: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted where they are started and joined: whether they overlap is up to the machine."""
    real, running, seen = multiprocessing.context.ForkProcess, set[Any](), list[int]()

    class Counted(real):  # type: ignore[misc, valid-type]
        def start(self) -> None:
            running.add(self)
            seen.append(len(running))
            super().start()

        def join(self, timeout: float | None = None) -> None:
            super().join(timeout)
            running.discard(self)

    monkeypatch.setattr(multiprocessing.context.ForkContext, "Process", Counted)
    assert all(result.error is None for result in build(GRID, Cache(tmp_path / "c"), jobs=jobs))
    assert len(seen) == 3 and max(seen) == jobs and not running


def test_only_what_changed_is_built_again_and_a_single_one_in_this_process(
        tmp_path: Path, processes: list[str]) -> None:
    build(GRID, Cache(tmp_path))
    processes.clear()
    changed = [*GRID[:4], FakeSpec("tiny_1", "sm_90a", TEXT + "// changed\n"), *GRID[5:]]
    results = build(changed, Cache(tmp_path))
    assert [result.hit for result in results] == [i != 4 for i in range(9)]
    assert not processes and results[4].path is not None


def test_a_variant_listed_twice_is_built_once(tmp_path: Path, processes: list[str]) -> None:
    same = build([GRID[0], GRID[0]], Cache(tmp_path / "a"))
    assert not processes and same[0].key == same[1].key and [result.hit for result in same] == [False, True]
    both = build([GRID[0], GRID[0], GRID[1]], Cache(tmp_path / "b"))
    assert all(result.error is None for result in both) and both[0].path == both[1].path


def test_failures_and_crashes_stay_with_their_variant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def before(variant: str) -> None:
        if variant == "tiny_crash":
            os.write(1, b"about to fail")
            faulthandler.disable()  # pytest's would write a traceback into the output of a run that passes
            os.kill(os.getpid(), signal.SIGSEGV)

    worker(before, monkeypatch)
    specs = [FakeSpec("tiny_spec", refusal=SpecError), FakeSpec("tiny_good"), FakeSpec("tiny_crash"),
             FakeSpec("tiny_half", "sm_80"), FakeSpec("tiny_half", "sm_90a", TEXT + "oops"),
             FakeSpec("tiny_plan", refusal=PlanError), FakeSpec("tiny_last")]
    seen: list[BuildResult] = []
    results = build(specs, Cache(tmp_path / "c"), progress=lambda result, *_: seen.append(result))
    kinds = [result.error and result.error["type"] for result in results]
    assert kinds == ["SpecError", None, "FlashgenError", None, "CompileError", "PlanError", None]
    assert results[0].error is not None and results[0].error["nearest"] == "a smaller tile"
    assert results[0].error["exit_code"] == SpecError.exit_code
    crash, refused = results[2].error, results[4].error
    assert crash is not None and "SIGSEGV" in crash["what"] and crash["where"] == "tiny_crash.sm_80"
    assert "about to fail" in crash["details"]
    assert refused is not None and refused["where"].startswith("tiny_half.sm_90a.cu:") and "oops" in refused["details"]
    assert len(seen) == len(specs) and not leftovers(tmp_path)
    again = build(specs, Cache(tmp_path / "c"))
    assert [result.hit for result in again] == [False, True, False, True, False, False, True]


def test_a_worker_that_raises_or_vanishes_is_reported_with_what_it_said(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def before(variant: str) -> None:
        if variant == "tiny_raise":
            raise ZeroDivisionError("unforeseen")
        if variant == "tiny_exit":
            sys.exit(0)

    worker(before, monkeypatch)
    results = build([FakeSpec("tiny_raise"), FakeSpec("tiny_exit"), FakeSpec("tiny_good")], Cache(tmp_path / "c"))
    raised, vanished = results[0].error, results[1].error
    assert raised is not None and "exit status 1" in raised["what"] and "unforeseen" in raised["details"]
    assert vanished is not None and "no result" in vanished["what"]
    assert results[2].error is None


def test_keep_going_off_stops_at_the_first_failure(tmp_path: Path, processes: list[str]) -> None:
    results = build([FakeSpec(f"tiny_{i}", text="oops") for i in range(4)], Cache(tmp_path / "c"), jobs=1,
                    keep_going=False)
    kinds = [str(result.error and (result.error["type"], result.error["what"])) for result in results]
    assert sum("CompileError" in kind for kind in kinds) == 1  # whichever ran first
    assert sum("earlier variant failed" in kind for kind in kinds) == 3
    processes.clear()
    specs = [FakeSpec("tiny_0"), FakeSpec("tiny_spec", refusal=SpecError), FakeSpec("tiny_1")]
    results = build(specs, Cache(tmp_path / "d"), keep_going=False)
    assert not processes and all(result.error for result in results)


def test_without_a_writable_cache_kernels_come_back_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                             processes: list[str]) -> None:
    (tmp_path / "file").touch()
    cache = Cache(tmp_path / "file" / "c")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        results = build(GRID, cache)
    assert len(caught) == 1 and "stay in memory" in str(caught[0].message)
    assert all(result.error is None and result.path is None and result.entry is not None for result in results)
    assert len(processes) == 3 and all(result.hit for result in build(GRID, cache)) and len(processes) == 3


def test_an_interrupt_ends_the_workers_and_leaves_no_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def before(variant: str) -> None:
        (tmp_path / "pids").open("a").write(f"{os.getpid()} ")
        if variant == "tiny_slow":
            signal.pause()  # until it is ended

    worker(before, monkeypatch)

    def stop(result: BuildResult, done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build([FakeSpec("tiny_slow"), FakeSpec("tiny_quick")], Cache(tmp_path / "c"), jobs=2, progress=stop)
    assert not leftovers(tmp_path)
    for pid in (tmp_path / "pids").read_text().split():  # joined: it has not only been signalled
        assert not Path("/proc", pid).exists()


def test_no_compile_does_not_forbid_a_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHGEN_NO_COMPILE", "1")
    assert all(result.error is None for result in build(GRID[:1] + GRID[3:5], Cache(tmp_path)))
    assert build([FakeSpec("tiny_new")], Cache(tmp_path))[0].error is None


def test_results_are_json(tmp_path: Path) -> None:
    rows = [result.to_json() for result in build([GRID[0], FakeSpec("tiny_bad", text="oops")], Cache(tmp_path))]
    assert json.loads(json.dumps(rows)) == rows
    assert rows[0]["path"].endswith(rows[0]["key"]) and rows[1]["path"] is None


def test_jobs_are_bounded_by_processors_and_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    for free, jobs in ((0, 1), (1 << 29, 1), (3 << 29, 3), (1 << 40, 64)):
        monkeypatch.setattr(module, "_memory_available_bytes", lambda free=free: free)
        assert module.jobs_default() == jobs
    monkeypatch.undo()
    assert (1 << 20) < module._memory_available_bytes() < (1 << 50)


def test_no_specs_no_work(tmp_path: Path, processes: list[str]) -> None:
    assert build([], Cache(tmp_path / "c")) == [] and not processes
