"""`flashgen verify`: every variant for this device against the fp64 reference, and bit by bit against itself.

Works through the calls that users make, so lookup, launch and argument handling are under test too.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from flashgen.codegen.families.registry import lower
from flashgen.codegen.spec.spec import Spec
from flashgen.codegen.target import TARGETS
from flashgen.errors import EnvironmentError_, FlashgenError, UnsupportedError
from flashgen.runtime.launch.driver import device_facts, of_another_vendor
from flashgen.runtime.ops.op import Identity, Problem
from flashgen.runtime.ops.registry import op_of
from flashgen.runtime.verify.compare import Accuracy, check
from flashgen.runtime.verify.subject import Subject


@dataclass(frozen=True)
class Result:
    """One row of the report: what was checked of which variant, and how it went."""

    variant: str
    arch: str
    check: str          # "reference" or the name of a bitwise identity
    problem: str        # repr of the Problem: seed included
    ok: bool
    out_error: float = 0.0
    out_allowed: float = 0.0
    lse_error: float = 0.0
    message: str = ""   # of the error, where not ok


def verify_spec(specs: Iterable[Spec], *, seed: int = 0, problems: Sequence[Problem] | None = None,
                progress: Callable[[int, int, str], None] | None = None, path: str = "",
                emulate: bool = False) -> list[Result]:
    """Check every spec that runs on the current device; a failure becomes a row with ok = False, not an exception.

    With `emulate`, check all of them on the CPU, each on fewer blocks and under every policy of the emulator.

    `problems` replaces the edge problems that are built from each variant's tiles (the identities are then left out).
    `progress(variants done, of how many, what)` is called before each variant, after each check, and at the end. `path`
    is the spec file for the rerun command. Raises EnvironmentError_ without a CUDA device, UnsupportedError if no spec
    is for this device.
    """
    specs = list(specs)
    device, cc = ("cpu", 0) if emulate else current_device()
    chosen = [spec for spec in specs if emulate or TARGETS[spec.arch].runs_on(cc)]
    if not chosen:
        raise UnsupportedError(f"no variant of this spec runs on compute capability {cc / 10}", where=path,
                               allowed=", ".join(sorted({spec.arch for spec in specs})) or "an empty list of specs",
                               nearest=", ".join(name for name, target in TARGETS.items() if target.runs_on(cc)))
    results: list[Result] = []
    tell = progress or (lambda done, total, what: None)
    for done, spec in enumerate(chosen):
        tell(done, len(chosen), spec.variant)
        for checks, result in enumerate(_verify_variant(Subject(spec, device, seed, path, emulate), problems), 1):
            results.append(result)
            tell(done, len(chosen), f"{spec.variant}, {checks} checks done")
    tell(len(chosen), len(chosen), "")
    return results


def current_device() -> tuple[str, int]:
    """(torch device, 10 * major + minor of its compute capability). Raises EnvironmentError_ without one."""
    if not torch.cuda.is_available():
        raise EnvironmentError_(
            "verify runs kernels, and torch sees no CUDA device", where="torch.cuda.is_available()",
            allowed="a CUDA device with its driver, and a torch build with CUDA",
            nearest="flashgen build and flashgen explain work without a GPU", next="flashgen doctor")
    if of_another_vendor():
        return f"cuda:{torch.cuda.current_device()}", device_facts(torch.cuda.current_device()).cc
    major, minor = torch.cuda.get_device_capability()
    return f"cuda:{torch.cuda.current_device()}", 10 * major + minor


def _verify_variant(subject: Subject, problems: Sequence[Problem] | None) -> Iterator[Result]:
    spec = subject.spec
    try:
        plan = lower(spec)
    except FlashgenError as error:
        yield Result(spec.variant, spec.arch, "lower", "", False, message=str(error))
        return
    op = op_of(spec)
    made = op.problems(spec, plan, subject.seed, subject.emulated) if problems is None else problems
    for problem in made:
        yield _row(subject, "reference", against_reference, problem)
    if problems is None and not subject.emulated:
        for name, identity, problem in op.identities(spec, plan, subject.seed):
            yield _row(subject, name, identity, problem)


def _row(subject: Subject, name: str, test: Identity, problem: Problem) -> Result:
    spec = subject.spec
    try:
        found = test(subject, problem)
    except FlashgenError as error:
        return Result(spec.variant, spec.arch, name, repr(problem), False, message=str(error))
    return Result(spec.variant, spec.arch, name, repr(problem), True, found.out_error, found.out_allowed,
                  found.lse_error)


def against_reference(subject: Subject, problem: Problem) -> Accuracy:
    """The accuracy contract, and the same bits from every run, where the operation promises them."""
    op, results = op_of(subject.spec), []
    inputs = op.inputs(problem, subject.spec, subject.device)
    for schedule in subject.schedules():
        with schedule:
            results.append(op.run(subject, inputs))
    loose = op.unordered(subject.spec)
    for again in results[1:]:
        subject.same(problem, "another run", again, {name: x for name, x in results[0].items() if name not in loose})
    others = [{name: again[name] for name in loose} for again in results[1:]]
    return check(results[0], inputs, *others, label=subject.label(problem), rerun=subject.rerun)
