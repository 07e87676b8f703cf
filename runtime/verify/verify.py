"""`flashgen verify`: every variant for this device against the fp64 reference, and bit by bit against itself.

Works through `flashgen.attention(..., spec=...)`, so lookup, launch and argument handling are under test too.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flashgen.codegen.families.registry import lower
from flashgen.codegen.families.shared.launch import is_persistent, splits_keys
from flashgen.codegen.spec.spec import Spec
from flashgen.codegen.target import TARGETS
from flashgen.errors import EnvironmentError_, FlashgenError, UnsupportedError
from flashgen.runtime.ops.attention.edges import company_problem, edge_problems, emulated_problems, masks, tile_shape
from flashgen.runtime.ops.attention.problem import Inputs, Problem
from flashgen.runtime.verify.compare import Accuracy, check, check_bits
from flashgen.runtime.verify.subject import Subject

NAN = float("nan")


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
    major, minor = torch.cuda.get_device_capability()
    return f"cuda:{torch.cuda.current_device()}", 10 * major + minor


def changes_scores(spec: Spec) -> bool:
    """Whether a call of it means something else than plain attention, and so needs parameters."""
    return bool(spec.expressions) or spec.sink != "none" or spec.normalize != "softmax"


def _verify_variant(subject: Subject, problems: Sequence[Problem] | None) -> Iterator[Result]:
    spec = subject.spec
    try:
        plan = lower(spec)
    except FlashgenError as error:
        yield Result(spec.variant, spec.arch, "lower", "", False, message=str(error))
        return
    if spec.family == "flashmla":
        from flashgen.runtime.ops.mla_decode import verify as verify_mla

        for name, check_of, decode in verify_mla.checks(spec, subject.seed, subject.emulated):
            yield _row(subject, name, check_of, decode)
        return
    tiles = tile_shape(plan)
    made = (emulated_problems(spec, *tiles, subject.seed, persistent=is_persistent(plan)) if subject.emulated
            else edge_problems(spec, *tiles, subject.seed))
    for problem in made if problems is None else problems:
        yield _row(subject, "reference", against_reference, problem)
    if problems is None and not subject.emulated and not changes_scores(spec):
        for mask in masks(spec):
            problem = company_problem(spec, tiles[0], mask, subject.seed)
            for name, identity in IDENTITIES.items():
                if name != "future keys" or mask == (True, (-1, -1)):
                    yield _row(subject, name, identity, problem)


def _row(subject: Subject, name: str, test: Callable[[Subject, Any], Accuracy], problem: object) -> Result:
    spec = subject.spec
    try:
        found = test(subject, problem)
    except FlashgenError as error:
        return Result(spec.variant, spec.arch, name, repr(problem), False, message=str(error))
    return Result(spec.variant, spec.arch, name, repr(problem), True, found.out_error, found.out_allowed,
                  found.lse_error)


def against_reference(subject: Subject, problem: Problem) -> Accuracy:
    """The accuracy contract, and the same bits from every run."""
    inputs = problem.make_inputs(subject.device)
    if changes_scores(subject.spec):
        inputs = inputs.changed_by(subject.spec, seed=problem.seed)
    results = []
    for schedule in subject.schedules():
        with schedule:
            results.append(subject.run(inputs))
    out, lse = results[0]
    for again in results[1:]:
        _same(subject, problem, "another run", again, (out, lse))
    return check(out, lse, inputs, label=subject.label(problem), rerun=subject.rerun)


def alone_and_in_company(subject: Subject, problem: Problem) -> Accuracy:
    """Each request's bits are the same alone, and beside neighbours whose keys and values are NaN.

    Where the number of tiles decides which ones are cut along the keys, a request alone is cut otherwise: there it
    only has the same bits in both companies.
    """
    inputs, invariant = problem.make_inputs(subject.device), not splits_keys(lower(subject.spec))
    together = subject.run(inputs)
    for i in range(problem.batch):
        alone = subject.run(request(inputs, i)) if invariant else _part(*together, inputs.cu_seqlens_q, i)
        poisoned = inputs.with_(k=_only(inputs.k, inputs.cu_seqlens_kv, i), v=_only(inputs.v, inputs.cu_seqlens_kv, i))
        for name, run in (("in company", together), ("beside NaN", subject.run(poisoned))):
            mine = _part(*run, inputs.cu_seqlens_q, i)
            _same(subject, problem, f"request {i} {name}", mine, alone)
    return Accuracy()


def strided(subject: Subject, problem: Problem) -> Accuracy:
    """Any row and head stride gives the same bits, and rows between those of `out` stay untouched."""
    inputs = problem.make_inputs(subject.device)
    plain = subject.run(inputs)
    for name, k, v in (("k", spread(inputs.k), inputs.v), ("v", inputs.k, spread(inputs.v)),
                       ("k and v head-major", head_major(inputs.k), head_major(inputs.v))):
        _same(subject, problem, f"{name} strided", subject.run(inputs.with_(k=k, v=v)), plain)
    _same(subject, problem, "q head-major", subject.run(inputs.with_(q=head_major(inputs.q))), plain)
    out = spread(plain[0])
    _same(subject, problem, "out strided", subject.run(inputs, out), plain)
    guard = _gaps(out)
    check_bits(guard, torch.full_like(guard, NAN), "rows between those of out", label=subject.label(problem),
               rerun=subject.rerun)
    return Accuracy()


def future_keys(subject: Subject, problem: Problem) -> Accuracy:
    """Under causal, NaN in the second half of a request changes no bit of the first half and reaches the rest."""
    inputs = problem.make_inputs(subject.device)
    plain, plain_lse = subject.run(inputs)
    k, v = inputs.k.clone(), inputs.v.clone()
    for x in (k, v):
        for i in range(problem.batch):
            rows = _rows(x, inputs.cu_seqlens_kv, i)
            rows[rows.shape[0] // 2:] = NAN
    out, lse = subject.run(inputs.with_(k=k, v=v))
    for i in range(problem.batch):
        half = _rows(out, inputs.cu_seqlens_q, i).shape[0] // 2
        (now, now_lse), (before, before_lse) = (
            _part(*run, inputs.cu_seqlens_q, i) for run in ((out, lse), (plain, plain_lse)))
        past = [x if x is None else x.movedim(-1, 0)[:half] for x in (now_lse, before_lse)]
        axis = 0 if problem.varlen else 1
        _same(subject, problem, f"past rows of request {i}", (now.narrow(axis, 0, half), past[0]),
              (before.narrow(axis, 0, half), past[1]))
        seen = now.narrow(axis, half, now.shape[axis] - half)
        check_bits(seen.isnan().to(torch.int16), torch.ones_like(seen, dtype=torch.int16),
                   f"NaN in rows of request {i} that see one", label=subject.label(problem), rerun=subject.rerun)
    return Accuracy()


IDENTITIES: dict[str, Callable[[Subject, Problem], Accuracy]] = {
    "alone and in company": alone_and_in_company, "strided": strided, "future keys": future_keys,
}


def _same(subject: Subject, problem: Problem, what: str, actual: tuple[Tensor, Tensor | None],
          expected: tuple[Tensor, Tensor | None]) -> None:
    for name, a, b in zip(("out", "lse"), actual, expected, strict=True):
        if a is not None and b is not None:
            check_bits(a, b, f"{name} ({what})", label=subject.label(problem), rerun=subject.rerun)


def spread(x: Tensor) -> Tensor:
    """The same values with NaN rows in between: twice the row stride."""
    axis = x.dim() - 3
    shape = list(x.shape)
    shape[axis] *= 2
    wide = x.new_full(shape, NAN)
    view = wide[:, ::2] if axis else wide[::2]
    view.copy_(x)
    return view


def _gaps(x: Tensor) -> Tensor:
    """The rows in between of a tensor made by `spread`."""
    axis = x.dim() - 3
    return x.as_strided(x.shape, x.stride(), x.storage_offset() + x.stride(axis) // 2)


def head_major(x: Tensor) -> Tensor:
    """The same values and shape, stored heads before rows."""
    return x.transpose(-3, -2).contiguous().transpose(-3, -2)


def request(inputs: Inputs, i: int) -> Inputs:
    """Request i of a batch as a call of its own."""
    if inputs.cu_seqlens_q is None or inputs.cu_seqlens_kv is None:
        return inputs.with_(q=inputs.q[i:i + 1], k=inputs.k[i:i + 1], v=inputs.v[i:i + 1])
    q, k, v = (_rows(x, cu, i) for x, cu in (
        (inputs.q, inputs.cu_seqlens_q), (inputs.k, inputs.cu_seqlens_kv), (inputs.v, inputs.cu_seqlens_kv)))
    return inputs.with_(q=q, k=k, v=v, cu_seqlens_q=inputs.cu_seqlens_q.new_tensor([0, q.shape[0]]),
                        cu_seqlens_kv=inputs.cu_seqlens_kv.new_tensor([0, k.shape[0]]))


def _rows(x: Tensor, cu_seqlens: Tensor | None, i: int) -> Tensor:
    """View [rows, heads, columns] of request i."""
    if cu_seqlens is None:
        return x[i]
    first, last = cu_seqlens[i:i + 2].tolist()
    return x[first:last]


def _only(x: Tensor, cu_seqlens: Tensor | None, i: int) -> Tensor:
    """A copy with NaN in every request but i."""
    copy = torch.full_like(x, NAN)
    _rows(copy, cu_seqlens, i).copy_(_rows(x, cu_seqlens, i))
    return copy


def _part(out: Tensor, lse: Tensor | None, cu_seqlens_q: Tensor | None, i: int) -> tuple[Tensor, Tensor | None]:
    """Request i of a result, in the form that the same request alone gives."""
    if cu_seqlens_q is None:
        return out[i:i + 1], None if lse is None else lse[i:i + 1]
    first, last = cu_seqlens_q[i:i + 2].tolist()
    return out[first:last], None if lse is None else lse[:, first:last]
