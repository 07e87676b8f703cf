"""What `flashgen verify` checks of a flashmla variant, through flashgen.mla_decode and the schedule kernel in it."""
from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

import flashgen
from flashgen.codegen.spec.spec import Spec
from flashgen.errors import UnsupportedError
from flashgen.runtime.ops.mla_decode.problem import HEAD_DIM_V, MlaInputs, MlaProblem, check_mla
from flashgen.runtime.verify.compare import Accuracy, check_bits
from flashgen.runtime.verify.subject import Subject

Check = tuple[str, Callable[["Subject", MlaProblem], Accuracy], MlaProblem]

PAGE_SIZES = {64: (64, 128), 1: (1, 16, 61), None: (None,)}  # by a spec's page_size
# (lengths, num_heads_q, seqlen_q, causal, sink, softmax_scale). Emulated: each tile of keys takes its time.
_Call = tuple[tuple[int, ...], int, int, bool, bool, float | None]
EMULATED_CALLS: tuple[_Call, ...] = (
    ((1, 0, 65), 16, 1, False, False, None), ((130, 2), 33, 2, True, True, 0.1))
CALLS: tuple[_Call, ...] = (
    ((0,), 16, 1, False, False, None),
    ((0, 0, 0), 128, 2, True, True, None),
    ((1,), 1, 1, True, False, None),
    ((63, 64, 65, 127, 128, 129, 0, 1), 16, 1, False, False, 0.3),
    ((5, 9, 1, 3, 64, 0, 0, 0), 4, 2, True, False, None),
    ((3000, 17, 513), 31, 3, True, True, None),
    ((200,) * 9, 33, 1, False, True, 1.0),
    ((8, 7, 600), 8, 8, True, False, None),
    ((1, 2, 3, 4), 24, 4, True, False, 0.01),
    ((4096,), 64, 1, False, False, None),
    ((70000, 1), 128, 1, False, False, None),
    (tuple(range(0, 5000, 37)), 128, 2, True, False, None),
    ((33000,) * 4, 16, 1, False, True, None),
    (tuple(i * i % 900 for i in range(700)), 64, 1, False, False, None),
)


def checks(spec: Spec, seed: int, emulated: bool) -> Iterator[Check]:
    """(name, check, problem) in order."""
    sizes = PAGE_SIZES[spec.page_size]
    for number, (lengths, heads, seqlen_q, causal, sink, scale) in enumerate(EMULATED_CALLS if emulated else CALLS):
        yield "reference", against_reference, MlaProblem(
            lengths, heads, seqlen_q, sizes[number % len(sizes)], spec.head_dim_qk, causal, sink, spec.dtype, scale,
            seed)
    if not emulated:
        problem = MlaProblem((300, 1, 0, 900, 64), 16, 2, sizes[-1], spec.head_dim_qk, True, False, spec.dtype,
                             seed=seed)
        yield "layout of the cache", layouts, problem
        yield "a schedule kept", kept_schedule, problem


def run_poisoned(inputs: MlaInputs, *, spec: Spec | None = None, **more: Any) -> tuple[Tensor, Tensor]:
    """(out, lse) of flashgen.mla_decode, into memory that held NaN before."""
    q = inputs.q
    out = q.new_full((*q.shape[:-1], HEAD_DIM_V), math.nan)
    torch.full((q.shape[0], q.shape[2], q.shape[1]), math.nan, dtype=torch.float32, device=q.device)
    returned, lse = flashgen.mla_decode(q, inputs.kv_cache, inputs.seqlens_kv, **inputs.keywords, return_lse=True,
                                        out=out, spec=spec, **more)
    if returned.data_ptr() != out.data_ptr():
        raise UnsupportedError("mla_decode did not return the tensor given as out", where="out")
    return out, lse


def _run(subject: Subject, inputs: MlaInputs, **more: Any) -> tuple[Tensor, Tensor]:
    """A schedule's variant is under test in every decode; so then any decode will do."""
    return run_poisoned(inputs, spec=None if subject.spec.pass_ == "schedule" else subject.spec, **more)


def against_reference(subject: Subject, problem: MlaProblem) -> Accuracy:
    """The accuracy contract, and the same bits from every run."""
    inputs, results = problem.make_inputs(subject.device), []
    for schedule in subject.schedules():
        with schedule:
            results.append(_run(subject, inputs))
    for again in results[1:]:
        _same(subject, problem, "another run", again, results[0])
    return check_mla(*results[0], inputs, label=subject.label(problem), rerun=subject.rerun)


def layouts(subject: Subject, problem: MlaProblem) -> Accuracy:
    """Other strides of the cache, and other places of the pages in it, give the same bits; q may lie anyhow."""
    inputs = problem.make_inputs(subject.device)
    plain, cache = _run(subject, inputs), inputs.kv_cache
    pool = torch.full((cache.shape[0], 2, *cache.shape[1:]), math.nan, dtype=cache.dtype, device=cache.device)
    pool[:, 1].copy_(cache)
    wide = torch.full((*cache.shape[:-1], cache.shape[-1] + 8), math.nan, dtype=cache.dtype, device=cache.device)
    wide[..., :cache.shape[-1]].copy_(cache)
    variants = {"every second page of a pool": inputs.with_(kv_cache=pool[:, 1]),
                "rows of a wider cache": inputs.with_(kv_cache=wide[..., :cache.shape[-1]]),
                "a dimension of 1": inputs.with_(kv_cache=cache[:, :, None]),
                "q head-major": inputs.with_(q=inputs.q.transpose(1, 2).contiguous().transpose(1, 2))}
    if inputs.page_table is not None:
        table, valid = inputs.page_table, inputs.page_table.lt(cache.shape[0]) & inputs.page_table.ge(0)
        flipped = torch.where(valid, cache.shape[0] - 1 - table, table)
        variants["pages in another order"] = inputs.with_(kv_cache=cache.flip(0), page_table=flipped)
    for name, changed in variants.items():
        _same(subject, problem, name, _run(subject, changed), plain)
    return Accuracy()


def kept_schedule(subject: Subject, problem: MlaProblem) -> Accuracy:
    """A schedule made once serves calls with other numbers, and gives the bits of those that make their own."""
    inputs = problem.make_inputs(subject.device)
    schedule = flashgen.mla_schedule(inputs.seqlens_kv, problem.num_heads_q, problem.seqlen_q)
    for changed in (inputs, inputs.with_(q=-inputs.q)):
        _same(subject, problem, "schedule given", _run(subject, changed, schedule=schedule), _run(subject, changed))
    return Accuracy()


def _same(subject: Subject, problem: MlaProblem, what: str, actual: tuple[Tensor, Tensor],
          expected: tuple[Tensor, Tensor]) -> None:
    for name, a, b in zip(("out", "lse"), actual, expected, strict=True):
        check_bits(a, b, f"{name} ({what})", label=subject.label(problem), rerun=subject.rerun)
