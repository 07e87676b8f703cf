"""Attention as the engines ask for it (runtime/ops/op.py), with its bitwise identities: calls that differ in what must
not count, and so have to give the same bits.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

import flashgen
from flashgen.codegen.explain.counts import Shape
from flashgen.codegen.families.registry import lower
from flashgen.codegen.families.shared.launch import is_persistent, splits_keys
from flashgen.codegen.plan import Plan
from flashgen.codegen.spec.spec import Spec
from flashgen.runtime.ops.attention.dropout import spec_arguments
from flashgen.runtime.ops.attention.edges import (
    MANY_TILES,
    company_problem,
    edge_problems,
    emulated_problems,
    masks,
    problem_of,
    tile_shape,
)
from flashgen.runtime.ops.attention.problem import Inputs, Problem
from flashgen.runtime.ops.op import Example, Identity
from flashgen.runtime.select.handles import with_siblings
from flashgen.runtime.verify.compare import Accuracy, Results, check_bits, named
from flashgen.runtime.verify.subject import NAN, Subject, poisoned, same_tensor


def problems(spec: Spec, plan: Plan, seed: int, emulated: bool) -> Iterator[Problem]:
    tiles = _tiles(spec)
    if emulated:
        return emulated_problems(spec, *tiles, seed, persistent=is_persistent(plan))
    return edge_problems(spec, *tiles, seed)


def _tiles(spec: Spec) -> tuple[int, int, int]:
    """The tile shape of a call. Where it launches several kernels, the last of them knows all of it."""
    return tile_shape(lower(with_siblings(spec)[-1]))


def few_problems(spec: Spec, plan: Plan) -> Iterator[Problem]:
    """A small call, and one with several tiles for every block that stays."""
    (tile_m, tile_n, stages), window = _tiles(spec), (97, 30) if spec.window else (-1, -1)
    for batch, seqlen_q, seqlen_kv, heads in ((2, tile_m + 17, (stages + 2) * tile_n + 5, (4, 2)),
                                              (MANY_TILES[0], 2 * tile_m + 1, 2 * tile_n + 1, MANY_TILES[1])):
        yield problem_of(spec, batch, seqlen_q, seqlen_kv, heads, (spec.causal, window))


def inputs(problem: Problem, spec: Spec, device: str) -> Inputs:
    found = problem.make_inputs(device)
    return found.with_mods(spec, seed=problem.seed) if has_score_mod(spec) else found


EXAMPLES = {"fwd": {"batch": 1, "seqlen_q": 256, "num_heads_q": 1}}


def example(spec: Spec, shape: Shape) -> Example:
    varlen = spec.kv_layout == "varlen"
    seqlen_q, seqlen_kv = ((n,) * shape.batch if varlen else n for n in (shape.seqlen_q, shape.seqlen_kv))
    problem = Problem(shape.batch, seqlen_q, seqlen_kv, shape.num_heads_q, shape.num_heads_kv, spec.head_dim_qk,
                      spec.head_dim_v or spec.head_dim_qk, spec.causal, shape.window, spec.dtype)

    def prepare() -> Callable[[], object]:
        x = problem.make_inputs()
        return lambda: flashgen.attention(x.q, x.k, x.v, **x.keywords, **spec_arguments(spec, x.q.device))
    return Example(prepare)


def identities(spec: Spec, plan: Plan, seed: int) -> Iterator[tuple[str, Identity, Problem]]:
    """Of each mask; none where a call means something else than plain attention."""
    tile_m = _tiles(spec)[0]
    for mask in () if has_score_mod(spec) else masks(spec):
        problem = company_problem(spec, tile_m, mask, seed)
        for name, identity in IDENTITIES.items():
            if name != "future keys" or mask == (True, (-1, -1)):
                yield name, identity, problem


def has_score_mod(spec: Spec) -> bool:
    """Whether a call of it means something else than plain attention, and so needs parameters."""
    return bool(spec.expressions) or spec.sink != "none" or spec.normalize != "softmax"


def run_poisoned(inputs: Inputs, *, spec: Spec | None = None, lse: bool = True,
                 out: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """(out, lse or None) of flashgen.attention, into memory that held NaN before."""
    q, v = inputs.q, inputs.v
    out = poisoned(q.new_empty(*q.shape[:-1], v.shape[-1]) if out is None else out,
                   q.numel() // max(1, q.shape[-1]) if lse else 0)
    result: Any = flashgen.attention(q, inputs.k, v, **inputs.keywords, return_lse=lse, out=out,
                                     **spec_arguments(spec, q.device))
    returned, returned_lse = result if lse else (result, None)
    return same_tensor(returned, out, "attention"), returned_lse


def unordered(spec: Spec) -> tuple[str, ...]:
    return ()


def run(subject: Subject, inputs: Inputs, out: Tensor | None = None) -> Results:
    return named(*run_poisoned(inputs, spec=subject.spec, lse=subject.spec.lse, out=out))


def alone_and_in_company(subject: Subject, problem: Problem) -> Accuracy:
    """Each request's bits are the same alone, and beside neighbours whose keys and values are NaN.

    Where the number of tiles decides which ones are cut along the keys, a request alone is cut otherwise: there it
    only has the same bits in both companies.
    """
    inputs, invariant = problem.make_inputs(subject.device), not splits_keys(lower(subject.spec))
    together = run(subject, inputs)
    for i in range(problem.batch):
        alone = run(subject, request(inputs, i)) if invariant else _part(together, inputs.cu_seqlens_q, i)
        poisoned = inputs.with_(k=_only(inputs.k, inputs.cu_seqlens_kv, i), v=_only(inputs.v, inputs.cu_seqlens_kv, i))
        for name, results in (("in company", together), ("beside NaN", run(subject, poisoned))):
            subject.same(problem, f"request {i} {name}", _part(results, inputs.cu_seqlens_q, i), alone)
    return Accuracy()


def strided(subject: Subject, problem: Problem) -> Accuracy:
    """Any row and head stride gives the same bits, and rows between those of `out` stay untouched."""
    inputs = problem.make_inputs(subject.device)
    plain = run(subject, inputs)
    for name, k, v in (("k", spread(inputs.k), inputs.v), ("v", inputs.k, spread(inputs.v)),
                       ("k and v head-major", head_major(inputs.k), head_major(inputs.v))):
        subject.same(problem, f"{name} strided", run(subject, inputs.with_(k=k, v=v)), plain)
    subject.same(problem, "q head-major", run(subject, inputs.with_(q=head_major(inputs.q))), plain)
    out = spread(plain["out"])
    subject.same(problem, "out strided", run(subject, inputs, out), plain)
    guard = _gaps(out)
    check_bits(guard, torch.full_like(guard, NAN), "rows between those of out", label=subject.label(problem),
               rerun=subject.rerun)
    return Accuracy()


def future_keys(subject: Subject, problem: Problem) -> Accuracy:
    """Under causal, NaN in the second half of a request changes no bit of the first half and reaches the rest."""
    inputs = problem.make_inputs(subject.device)
    plain = run(subject, inputs)
    k, v = inputs.k.clone(), inputs.v.clone()
    for x in (k, v):
        for i in range(problem.batch):
            rows = _rows(x, inputs.cu_seqlens_kv, i)
            rows[rows.shape[0] // 2:] = NAN
    found = run(subject, inputs.with_(k=k, v=v))
    for i in range(problem.batch):
        now, before = (_part(results, inputs.cu_seqlens_q, i) for results in (found, plain))
        axes = {"out": -3, "lse": -1}
        half = now["out"].shape[-3] // 2
        subject.same(problem, f"past rows of request {i}", *(
            {name: x.narrow(axes[name], 0, half) for name, x in part.items()} for part in (now, before)))
        seen = now["out"].narrow(-3, half, now["out"].shape[-3] - half)
        check_bits(seen.isnan().to(torch.int16), torch.ones_like(seen, dtype=torch.int16),
                   f"NaN in rows of request {i} that see one", label=subject.label(problem), rerun=subject.rerun)
    return Accuracy()


IDENTITIES: dict[str, Callable[[Subject, Problem], Accuracy]] = {
    "alone and in company": alone_and_in_company, "strided": strided, "future keys": future_keys,
}


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


def _part(results: Results, cu_seqlens_q: Tensor | None, i: int) -> Results:
    """Request i of the results, in the form that the same request alone gives."""
    if cu_seqlens_q is None:
        return {name: x[i:i + 1] for name, x in results.items()}
    first, last = cu_seqlens_q[i:i + 2].tolist()
    return {name: x[:, first:last] if name == "lse" else x[first:last] for name, x in results.items()}
