"""Bitwise identities of a decode: calls that differ in what must not count, and so have to give the same bits."""
from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

import flashgen
from flashgen.codegen.plan import Plan
from flashgen.codegen.spec.spec import Spec
from flashgen.runtime.ops.mla_decode.edges import identity_problem
from flashgen.runtime.ops.mla_decode.problem import MlaInputs, MlaProblem, run_poisoned
from flashgen.runtime.ops.op import Identity
from flashgen.runtime.verify.compare import Accuracy, Results, named
from flashgen.runtime.verify.subject import Subject


def identities(spec: Spec, plan: Plan, seed: int) -> Iterator[tuple[str, Identity, MlaProblem]]:
    problem = identity_problem(spec, seed)
    yield "layout of the cache", layouts, problem
    yield "a schedule kept", kept_schedule, problem


def run(subject: Subject, inputs: MlaInputs, **more: Any) -> Results:
    """A schedule's variant is under test in every decode; so then any decode will do."""
    return named(*run_poisoned(inputs, spec=None if subject.spec.pass_ == "schedule" else subject.spec, **more))


def layouts(subject: Subject, problem: MlaProblem) -> Accuracy:
    """Other strides of the cache, and other places of the pages in it, give the same bits; q may lie anyhow."""
    inputs = problem.make_inputs(subject.device)
    plain, cache = run(subject, inputs), inputs.kv_cache
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
        subject.same(problem, name, run(subject, changed), plain)
    return Accuracy()


def kept_schedule(subject: Subject, problem: MlaProblem) -> Accuracy:
    """A schedule made once serves calls with other numbers, and gives the bits of those that make their own."""
    inputs = problem.make_inputs(subject.device)
    schedule = flashgen.mla_schedule(inputs.seqlens_kv, problem.num_heads_q, problem.seqlen_q)
    for changed in (inputs, inputs.with_(q=-inputs.q)):
        subject.same(problem, "schedule given", run(subject, changed, schedule=schedule), run(subject, changed))
    return Accuracy()
