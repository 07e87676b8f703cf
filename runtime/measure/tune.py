"""`flashgen tune`: candidate tiles compiled, checked against fp64, timed in turns, and ranked.

Nothing here touches a GPU: the device, the compiler and the check are arguments, and tests bring their own.
"""
from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any

from flashgen.codegen.explain.candidates import Candidate, Candidates
from flashgen.codegen.spec.spec import Spec
from flashgen.errors import CompileError, UnsupportedError, VerifyError
from flashgen.runtime.compile.build import BuildResult, build_specs
from flashgen.runtime.measure.bench import (
    ROUNDS,
    WARMUP_ROUNDS,
    Device,
    Run,
    document,
    interleave,
    repeated,
)
from flashgen.runtime.measure.suite import Bench, Case
from flashgen.runtime.ops.registry import bench_of, op_of

NOISE = 0.01           # two runs of the same kernel differ by this much

Step = Callable[[int, str], None]                          # (done so far, what)
Phase = Callable[[str, int], AbstractContextManager[Step]]  # (title, total): cli.common.progress


@dataclass(frozen=True)
class Timed:
    candidate: Candidate
    ms: tuple[float, ...]   # median per call, of each case

    @property
    def mean_ms(self) -> float:
        return statistics.geometric_mean(self.ms)


@dataclass(frozen=True)
class Fault:
    variant: str
    reason: str   # the class of it, which is counted
    message: str


@dataclass(frozen=True)
class Tuning:
    """`ranked`: fastest first. `present` is the one of them that the variant gets today, None if it cannot be had."""

    found: Candidates
    cases: tuple[Any, ...]     # of the operation
    ranked: tuple[Timed, ...]
    unbuilt: tuple[Fault, ...]
    wrong: tuple[Fault, ...]
    facts: Mapping[str, Any]   # gpu, driver, versions, commit, date

    @property
    def winner(self) -> Timed:
        return self.ranked[0]

    @property
    def present(self) -> Timed | None:
        return next((timed for timed in self.ranked if timed.candidate == self.found.present), None)

    def tflops(self, timed: Timed) -> list[float]:
        return [case.flops / ms / 1e9 for case, ms in zip(self.cases, timed.ms, strict=True)]

    def ratio(self, timed: Timed) -> float | None:
        """Speed over the present tile's, geometric mean; None where that could not be timed."""
        return self.present.mean_ms / timed.mean_ms if self.present else None

    def to_json(self) -> dict[str, Any]:
        rows = [{"variant": t.candidate.spec.variant, "tiling": asdict(t.candidate.tiling), "ms": list(t.ms),
                 "tflops": self.tflops(t), "ratio": self.ratio(t), "present": t is self.present} for t in self.ranked]
        return {**self.facts, "cases": [bench_of(self.found.spec).in_json(case) for case in self.cases], "rows": rows,
                "unbuilt": [asdict(fault) for fault in self.unbuilt], "wrong": [asdict(fault) for fault in self.wrong],
                "considered": self.found.considered, "dropped": [asdict(row) for row in self.found.dropped]}


def build(specs: Sequence[Spec], jobs: int | None, step: Step) -> list[BuildResult]:
    """In parallel processes, into the cache that calls look kernels up in."""
    from flashgen.runtime.select.lookup import default_cache

    return build_specs(specs, default_cache(), jobs, lambda result, done, total: step(done, result.variant))


def check(candidate: Candidate) -> None:
    """VerifyError unless the kernel keeps the accuracy contract on a small problem and on one of many tiles."""
    from flashgen.runtime.verify.compare import check as against_truth
    from flashgen.runtime.verify.subject import Subject
    from flashgen.runtime.verify.verify import current_device

    spec, op = candidate.spec, op_of(candidate.spec)
    subject = Subject(spec, current_device()[0])
    for problem in op.few_problems(spec, candidate.plan):
        inputs = op.inputs(problem, spec, subject.device)
        against_truth(op.run(subject, inputs), inputs, label=f"{spec.variant}.{spec.arch}, {problem}",
                      rerun="flashgen tune ... --write spec FILE, then flashgen verify FILE")


def tune(device: Device, found: Candidates, *, suite: Bench | None = None, rounds: int = ROUNDS,
         jobs: int | None = None,
         phase: Phase = lambda title, total: nullcontext(lambda done, what: None),
         build: Callable[[Sequence[Spec], int | None, Step], list[BuildResult]] = build,
         check: Callable[[Candidate], None] = check) -> Tuning:
    """Measure `found.kept` on `device`.

    What does not build and what computes a wrong result is listed, never ranked. CompileError or VerifyError where
    nothing is left to rank, UnsupportedError where the device does not run the variant.
    """
    if found.spec.arch not in device.archs():
        raise UnsupportedError(f"{found.spec.variant} is for {found.spec.arch}", where="--arch",
                               allowed=", ".join(device.archs()) + ", which is what this device runs")
    suite = suite or bench_of(found.spec)
    cases = tuple(suite.case_for(found.spec, shape) for shape in found.shapes)
    with phase("building", len(found.kept)) as step:
        results = build([candidate.spec for candidate in found.kept], jobs, step)
    failed = unbuilt(results)
    standing = [c for c, result in zip(found.kept, results, strict=True) if not result.error]
    if not standing:
        raise CompileError(f"none of {len(found.kept)} candidates builds", where=found.spec.variant,
                           details="\n".join(fault.message for fault in failed))
    wrong: list[Fault] = []
    with phase("checking", len(standing)) as step:
        for done, candidate in enumerate(tuple(standing)):
            step(done, candidate.spec.variant)
            _keep_if_right(candidate, standing, wrong, check)
    times = _times(device, suite, standing, wrong, cases, rounds, phase)
    ranked = sorted((Timed(c, tuple(times[c.spec.variant])) for c in standing), key=lambda timed: timed.mean_ms)
    return Tuning(found, cases, tuple(ranked), failed, tuple(wrong), document(device.facts()))


def _times(device: Device, suite: Bench, standing: list[Candidate], wrong: list[Fault], cases: Sequence[Case],
           rounds: int, phase: Phase) -> dict[str, list[float]]:
    """Median ms of each candidate, case by case. Every round of a case times each of them once."""
    times: dict[str, list[float]] = {c.spec.variant: [] for c in standing}
    with phase("timing", len(cases) * len(standing) * (rounds + WARMUP_ROUNDS)) as step:
        for number, case in enumerate(cases):
            runs = _runs(device, suite, standing, wrong, case)
            before = number * len(times) * (rounds + WARMUP_ROUNDS)
            for name, ms in interleave(_announced(runs, step, before, case.label), rounds).items():
                times[name].append(ms)
            del runs  # graphs hold memory that the next case may need
            device.release()
    return times


def _runs(device: Device, suite: Bench, standing: list[Candidate], wrong: list[Fault], case: Case) -> dict[str, Run]:
    timed, runs = suite.timed(), {}
    inputs = timed.inputs(device, case, standing[0].spec)

    def prepare(candidate: Candidate) -> None:
        calls = timed.job(case, candidate.spec, inputs).ours()
        runs[candidate.spec.variant] = device.timed(device.timer, repeated(calls))

    for candidate in tuple(standing):
        _keep_if_right(candidate, standing, wrong, prepare)
    return runs


def _keep_if_right(candidate: Candidate, standing: list[Candidate], wrong: list[Fault],
                   test: Callable[[Candidate], None]) -> None:
    """Run `test`; where it finds a wrong result, move the candidate from `standing` to `wrong`."""
    try:
        test(candidate)
    except VerifyError as error:
        standing.remove(candidate)
        wrong.append(Fault(candidate.spec.variant, "computes a wrong result", str(error)))
        if not standing:
            raise VerifyError("no candidate that builds computes the right result", where=candidate.spec.name,
                              details="\n".join(fault.message for fault in wrong)) from error


def _announced(runs: Mapping[str, Run], step: Step, before: int, what: str) -> dict[str, Run]:
    """The same runs, each telling the progress bar."""
    done = before

    def announced(run: Run) -> Run:
        def timed() -> float:
            nonlocal done
            done += 1
            step(done, what)
            return run()
        return timed
    return {name: announced(run) for name, run in runs.items()}


def unbuilt(results: Sequence[BuildResult]) -> tuple[Fault, ...]:
    return tuple(_unbuilt(result) for result in results if result.error)


def _unbuilt(result: BuildResult) -> Fault:
    error = result.error or {}
    what = str(error["what"])
    reason = ("spills registers" if "spills" in what else "products that the compiler serialises (C75xx, C76xx)"
              if re.search(r"\bC7[56]\d\d\b", what) else "does not compile")
    return Fault(result.variant, reason, what)
