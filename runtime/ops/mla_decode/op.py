"""The decode over a latent cache as the engines ask for it (runtime/ops/op.py): problems at the edges, and bitwise
identities.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch

import flashgen
from flashgen.codegen.explain.counts import Shape
from flashgen.codegen.families.flashmla.launch import row_blocks
from flashgen.codegen.families.shared.launch import QuerySizes
from flashgen.codegen.plan import Plan
from flashgen.codegen.spec.spec import Spec
from flashgen.runtime.ops.mla_decode.problem import MlaInputs, MlaProblem, run_poisoned
from flashgen.runtime.ops.op import Example, Identity
from flashgen.runtime.verify.compare import Accuracy, Results, named
from flashgen.runtime.verify.subject import Subject

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


def problems(spec: Spec, plan: Plan, seed: int, emulated: bool) -> Iterator[MlaProblem]:
    sizes = PAGE_SIZES[spec.page_size]
    for number, (lengths, heads, seqlen_q, causal, sink, scale) in enumerate(EMULATED_CALLS if emulated else CALLS):
        yield MlaProblem(lengths, heads, seqlen_q, sizes[number % len(sizes)], spec.head_dim_qk, causal, sink,
                         spec.dtype, scale, seed)


def few_problems(spec: Spec, plan: Plan) -> Iterator[MlaProblem]:
    return problems(spec, plan, 0, emulated=True)


def inputs(problem: MlaProblem, spec: Spec, device: str) -> MlaInputs:
    return problem.make_inputs(device)


EXAMPLES = {"decode": {"batch": 1, "seqlen_q": 1, "seqlen_kv": 320, "num_heads_q": 64}}


def example(spec: Spec, shape: Shape) -> Example:
    """On as many SMs as a request has blocks of rows: none is cut, whose parts would have to be resident together."""
    problem = MlaProblem((shape.seqlen_kv,) * shape.batch, shape.num_heads_q, shape.seqlen_q, spec.page_size,
                         spec.head_dim_qk, dtype=spec.dtype)

    def prepare() -> Callable[[], object]:
        x = problem.make_inputs()
        schedule = flashgen.mla_schedule(x.seqlens_kv, shape.num_heads_q, shape.seqlen_q)
        return lambda: flashgen.mla_decode(x.q, x.kv_cache, x.seqlens_kv, **x.keywords, schedule=schedule, spec=spec)
    return Example(prepare, row_blocks(QuerySizes(shape.batch, shape.seqlen_q, shape.num_heads_q)))


def identities(spec: Spec, plan: Plan, seed: int) -> Iterator[tuple[str, Identity, MlaProblem]]:
    problem = MlaProblem((300, 1, 0, 900, 64), 16, 2, PAGE_SIZES[spec.page_size][-1], spec.head_dim_qk, True, False,
                         spec.dtype, seed=seed)
    yield "layout of the cache", layouts, problem
    yield "a schedule kept", kept_schedule, problem


def unordered(spec: Spec) -> tuple[str, ...]:
    return ()


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
