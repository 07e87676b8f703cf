"""The gradients of attention as the engines ask for them (runtime/ops/op.py), with their bitwise identities.

dQ is added up by blocks in whatever order they come, so that its bits may differ from run to run; those of dK and dV
may not. Of calls whose keys fill one tile, dQ is a sum of one part, and has to keep its bits as well.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor

import flashgen
from flashgen.codegen.explain.counts import Shape
from flashgen.codegen.families.registry import lower, pass_of
from flashgen.codegen.plan import Plan
from flashgen.codegen.spec.rule import changed
from flashgen.codegen.spec.spec import Spec
from flashgen.runtime.ops.attention.dropout import spec_arguments
from flashgen.runtime.ops.attention.edges import masks
from flashgen.runtime.ops.attention.op import head_major, spread
from flashgen.runtime.ops.attention.problem import Problem
from flashgen.runtime.ops.attention_backward import edges
from flashgen.runtime.ops.attention_backward.problem import BackwardInputs, BackwardProblem, by_name
from flashgen.runtime.ops.op import Example, Identity
from flashgen.runtime.verify.compare import Accuracy, Results, check_bits
from flashgen.runtime.verify.reference import visible
from flashgen.runtime.verify.subject import NAN, Subject

FEW = 4  # problems of a variant that is a kernel beside the main one: each call launches all three

EXAMPLES = {"bwd": {"batch": 1, "seqlen_q": 128, "seqlen_kv": 128, "num_heads_q": 1}}


def example(spec: Spec, shape: Shape) -> Example:
    varlen = spec.kv_layout == "varlen"
    seqlen_q, seqlen_kv = ((n,) * shape.batch if varlen else n for n in (shape.seqlen_q, shape.seqlen_kv))
    problem = BackwardProblem.of(Problem(
        shape.batch, seqlen_q, seqlen_kv, shape.num_heads_q, shape.num_heads_kv, spec.head_dim_qk,
        spec.head_dim_v or spec.head_dim_qk, spec.causal, shape.window, spec.dtype))

    def prepare() -> Callable[[], object]:
        x = problem.make_inputs()
        return lambda: flashgen.attention_backward(*x.tensors, **{**x.keywords, **spec_arguments(spec, x.q.device)})
    return Example(prepare)


def main_kernel(spec: Spec) -> str | None:
    """Of the kernels that a call launches, the one that stands for it."""
    return pass_of(spec).shown


def problems(spec: Spec, plan: Plan, seed: int, emulated: bool) -> Iterator[BackwardProblem]:
    made = (edges.emulated_problems if emulated else edges.backward_problems)(spec, edges.tile_shape(plan), seed)
    return made if plan.step == main_kernel(spec) else islice(made, FEW)


def few_problems(spec: Spec, plan: Plan) -> Iterator[BackwardProblem]:
    return edges.few_problems(spec, edges.tile_shape(plan))


def inputs(problem: BackwardProblem, spec: Spec, device: str) -> BackwardInputs:
    found = problem.make_inputs(device)
    return found.with_mods(spec, seed=problem.seed) if changed(spec) else found


def unordered(spec: Spec) -> tuple[str, ...]:
    """The results whose bits may differ from run to run: dq, where no turns are taken."""
    return () if getattr(spec, "deterministic", False) else ("dq",)


def run(subject: Subject, inputs: BackwardInputs) -> Results:
    """The call that users make, into memory that held NaN before."""
    for t in (inputs.q, inputs.k, inputs.v):
        torch.full_like(t, NAN, memory_format=torch.contiguous_format)  # the allocator hands these blocks out again
    return by_name(flashgen.attention_backward(*inputs.tensors, **{
        **inputs.keywords, **spec_arguments(subject.spec, inputs.q.device)}))


def identities(spec: Spec, plan: Plan, seed: int) -> Iterator[tuple[str, Identity, BackwardProblem]]:
    """Of each mask, over keys of several tiles and of one."""
    for mask in masks(spec) if plan.step == main_kernel(spec) and not changed(spec) else ():
        for problem in edges.company_problems(spec, edges.tile_shape(plan), mask, seed):
            for name, identity in IDENTITIES.items():
                yield name, identity, problem


# ---- bitwise identities

def _same(subject: Subject, problem: BackwardProblem, what: str, found: Results, expected: Results) -> None:
    """The same bits, of dq where each element is a sum of one part."""
    sides = problem.seqlen_kv if isinstance(problem.seqlen_kv, tuple) else (problem.seqlen_kv,)
    loose = unordered(subject.spec) if max(sides) > edges.tile_shape(lower(subject.spec))[1] else ()
    subject.same(problem, what, found, {name: x for name, x in expected.items() if name not in loose})


def alone_and_in_company(subject: Subject, problem: BackwardProblem) -> Accuracy:
    """Each request's bits are the same alone, and beside neighbours that are NaN in all that a call reads."""
    inputs = problem.make_inputs(subject.device)
    together = run(subject, inputs)
    for i in range(problem.batch):
        alone = run(subject, _request(inputs, i))
        for name, results in (("in company", together), ("beside NaN", run(subject, _beside_nan(inputs, i)))):
            _same(subject, problem, f"request {i} {name}", _part(results, inputs, i), alone)
    return Accuracy()


def strided(subject: Subject, problem: BackwardProblem) -> Accuracy:
    """Any row and head stride gives the same bits, and so does a dout that is expanded."""
    inputs = problem.make_inputs(subject.device)
    plain = run(subject, inputs)
    for name in ("q", "k", "v", "dout", "out"):
        for lies, change in (("strided", spread), ("head-major", head_major)):
            changed = inputs.with_(**{name: change(getattr(inputs, name))})
            _same(subject, problem, f"{name} {lies}", run(subject, changed), plain)
    wide = inputs.dout.new_full((), 0.75).expand_as(inputs.dout)  # as the gradient of a sum is
    results = [run(subject, inputs.with_(dout=dout)) for dout in (wide, wide.contiguous())]
    _same(subject, problem, "dout expanded", *results)
    return Accuracy()


def reversed_order(subject: Subject, problem: BackwardProblem) -> Accuracy:
    """Requests in another order give the same bits, in that order."""
    inputs = problem.make_inputs(subject.device)
    plain, order = run(subject, inputs), range(problem.batch)[::-1]
    permuted = _permuted(inputs, order)
    found = run(subject, permuted)
    for now, before in enumerate(order):
        _same(subject, problem, f"request {before} in place {now}", _part(found, permuted, now),
              _part(plain, inputs, before))
    return Accuracy()


def rows_without_keys(subject: Subject, problem: BackwardProblem) -> Accuracy:
    """dq of rows that see no key, and dk and dv of keys that no row sees, are exactly zero. A dlse of zeros is none."""
    inputs = problem.make_inputs(subject.device)
    plain = run(subject, inputs.with_(dlse=None))
    unseeing = inputs.lse.isneginf()
    places = {"dq": unseeing.mT if problem.varlen else unseeing.transpose(1, 2)}
    places["dk"] = places["dv"] = _unseen(inputs)
    for name, there in places.items():
        found = plain[name][there]
        check_bits(found, torch.zeros_like(found), f"{name} without a pair", label=subject.label(problem),
                   rerun=subject.rerun)
    zeros = run(subject, inputs.with_(dlse=torch.zeros_like(inputs.lse)))
    _same(subject, problem, "dlse of zeros", zeros, plain)
    return Accuracy()


IDENTITIES: dict[str, Callable[[Subject, BackwardProblem], Accuracy]] = {
    "alone and in company": alone_and_in_company, "strided": strided, "another order": reversed_order,
    "rows without keys": rows_without_keys,
}

# What follows the rows of queries, and what those of keys.
_QUERY_ROWS, _KEY_ROWS, _LSE = ("q", "dout", "out", "dq"), ("k", "v", "dk", "dv"), ("lse", "dlse")


def _rows(name: str, x: Tensor, inputs: BackwardInputs, i: int) -> Tensor:
    """View of request i of a tensor or result, in the form that the request alone has."""
    cu_seqlens = inputs.cu_seqlens_kv if name in _KEY_ROWS else inputs.cu_seqlens_q
    if cu_seqlens is None:
        return x[i:i + 1]
    first, last = cu_seqlens[i:i + 2].tolist()
    return x[:, first:last] if name in _LSE else x[first:last]


def _tensors(inputs: BackwardInputs) -> dict[str, Tensor]:
    found = {name: getattr(inputs, name) for name in (*_QUERY_ROWS[:3], *_KEY_ROWS[:2], *_LSE)}
    return {name: t for name, t in found.items() if t is not None}


def _part(results: Results, inputs: BackwardInputs, i: int) -> Results:
    return {name: _rows(name, x, inputs, i) for name, x in results.items()}


def _request(inputs: BackwardInputs, i: int) -> BackwardInputs:
    """Request i as a call of its own."""
    return _permuted(inputs, [i])


def _permuted(inputs: BackwardInputs, order: Sequence[int]) -> BackwardInputs:
    """The requests of `order`, one after the other; varlen, without what lies behind the last."""
    changes: dict[str, Any] = {}
    for name, t in _tensors(inputs).items():
        axis = 1 if name in _LSE and inputs.cu_seqlens_q is not None else 0
        changes[name] = torch.cat([_rows(name, t, inputs, i) for i in order], axis)
    for name in ("cu_seqlens_q", "cu_seqlens_kv"):
        old = getattr(inputs, name)
        if old is not None:
            lengths = [0, *(int(old[i + 1] - old[i]) for i in order)]
            changes[name] = torch.tensor(lengths, dtype=torch.int32).cumsum(0, dtype=torch.int32).to(old.device)
    return inputs.with_(**changes)


def _beside_nan(inputs: BackwardInputs, i: int) -> BackwardInputs:
    """A copy with NaN in every request but i."""
    changes = {}
    for name, t in _tensors(inputs).items():
        changes[name] = torch.full_like(t, NAN)
        _rows(name, changes[name], inputs, i).copy_(_rows(name, t, inputs, i))
    return inputs.with_(**changes)


def _unseen(inputs: BackwardInputs) -> Tensor:
    """Bool [rows of k, heads]: whether no query sees the key."""
    found = torch.ones(inputs.k.shape[:-1], dtype=torch.bool, device=inputs.k.device)
    for i in range(inputs.batch):
        keys = _rows("k", found, inputs, i)
        seen = visible(_rows("q", inputs.q, inputs, i).shape[-3], keys.shape[-2], causal=inputs.causal,
                       window=inputs.window, device=found.device).any(0)
        keys.copy_(~seen[:, None].expand_as(keys))
    return found
