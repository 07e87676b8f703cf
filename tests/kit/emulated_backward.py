"""A backward call on the emulator, all three kernels, against fp64: autograd of plain attention."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from flashgen.codegen.families.registry import lower, program_of
from flashgen.codegen.families.shared.launch import UNBOUNDED, Sizes, kept_of_65536
from flashgen.codegen.render import render
from flashgen.codegen.spec.rule import changed
from flashgen.codegen.spec.spec import Spec
from flashgen.runtime.emulator.kernel import EmulatedKernel
from flashgen.runtime.emulator.program import EmulatedProgram
from flashgen.runtime.emulator.schedule import Schedule, scheduled
from flashgen.runtime.ops.attention.dropout import dropout_mask
from flashgen.runtime.verify.expression_mods import ExpressionMods
from flashgen.runtime.verify.reference import reference

KERNELS = ("preprocess", "gradients", "postprocess")
# Relative to the norm of the true gradient: P and dS are rounded to the element type, and each result is.
TOLERANCE = {"bf16": 4e-3, "fp16": 5e-4}
SEED = torch.tensor([0x123456789ABCDEF, 7])
OF_TENSORS = 5  # times that: sums of dS over many rows cancel, and `out` is rounded, of which delta is made


@dataclass(frozen=True)
class Call:
    """`lengths`: (queries, keys) of each sequence, equal where the layout is dense. `rest`: rows behind the last."""

    lengths: tuple[tuple[int, int], ...]
    num_heads_q: int = 2
    num_heads_kv: int = 1
    top_left: bool = False
    window: tuple[int, int] = UNBOUNDED
    rest: tuple[int, int] = (0, 0)
    dlse: bool = False
    dropout_p: float = 0.0
    params: Mapping[str, Any] = field(default_factory=dict)  # of the spec's expressions


def check_backward(spec: Spec, call: Call, schedule: Schedule, data: int | None = None) -> dict[str, Tensor]:
    """The gradients and dq_accum. AssertionError, with the figures, if one is wrong or a row of one is not written.
    `data`: the seed of the inputs, else the schedule's."""
    varlen, dtype = spec.kv_layout == "varlen", {"bf16": torch.bfloat16, "fp16": torch.float16}[spec.dtype]
    make = torch.Generator().manual_seed(schedule.seed if data is None else data)

    def rows(side: int, heads: int, columns: int) -> Tensor:
        count = sum(pair[side] for pair in call.lengths) + call.rest[side]
        return torch.randn(count, heads, columns, generator=make).to(dtype)

    q, dout = (rows(0, call.num_heads_q, columns) for columns in (spec.head_dim_qk, spec.head_dim_v))
    k, v = (rows(1, call.num_heads_kv, columns) for columns in (spec.head_dim_qk, spec.head_dim_v))
    dlse = torch.randn(call.num_heads_q, len(q), generator=make) if call.dlse else None
    out, lse, wanted = _truth(spec, call, q, k, v, dout, dlse)
    given = {"dropout_seed": SEED, "q": q, "k": k, "v": v, "out": out.to(dtype), "dout": dout}
    made = {name: torch.full_like(like, torch.nan) for name, like in (("dq", q), ("dk", k), ("dv", v))}
    per_row = {"lse": lse, **({} if dlse is None else {"dlse": dlse})}
    if varlen:
        starts = [torch.tensor([0, *(pair[side] for pair in call.lengths)]).cumsum(0).int() for side in (0, 1)]
        given |= {"cu_seqlens_q": starts[0], "cu_seqlens_kv": starts[1]}
    else:
        per_row = {name: t.unflatten(1, (len(call.lengths), -1)).transpose(0, 1).contiguous()
                   for name, t in per_row.items()}
    shaped = {name: t if varlen or t.dim() == 1 else t.unflatten(0, (len(call.lengths), -1))
              for name, t in {**given, **made}.items()}
    tensors = {f"d_{name}": torch.zeros_like(t) for name, t in call.params.items() if f"d_{name}" in wanted}
    made |= tensors
    sums = _launch(spec, call, {**shaped, **per_row, **tensors}, schedule)
    for name, truth in wanted.items():
        error = (made[name].double() - truth).norm() / truth.norm().clamp_min(1e-9)
        allowed = TOLERANCE[spec.dtype] * (OF_TENSORS if name in tensors else 1)
        assert error < allowed, f"{name}: relative error {error:.2e} of {call}, {schedule}"
    return {**made, "dq_accum": sums}


def _launch(spec: Spec, call: Call, tensors: dict[str, Tensor], schedule: Schedule) -> Tensor:
    """The sums of dQ, as the last kernel finds them."""
    varlen = spec.kv_layout == "varlen"
    plans = [lower(spec.with_(kernel=kernel)) for kernel in KERNELS]
    axes = ("row", "head") if varlen else ("batch", "row", "head")
    strides = {f"{name}_{axis}_stride": stride for name in ("q", "k", "v", "out", "dout", "dq", "dk", "dv")
               for axis, stride in zip(axes, tensors[name].stride(), strict=False)}
    seqlen_q, seqlen_kv = (len(tensors[name]) for name in "qk") if varlen else call.lengths[0]
    sizes = Sizes(len(call.lengths), seqlen_q, seqlen_kv, call.num_heads_q, call.num_heads_kv, spec.head_dim_qk**-0.5,
                  call.top_left, call.window, strides, call.dropout_p)
    program = program_of(plans[0], sizes, 4, *plans[1:])
    values = {f"user_{name}": value for name, value in ExpressionMods.of(spec, call.params).values.items()}
    tensors |= {name: value for name, value in values.items() if isinstance(value, Tensor)}
    program = program.with_values({name: value for name, value in values.items() if not isinstance(value, Tensor)})
    sums = torch.zeros(program.buffer("dq_accum").shape)
    with scheduled(schedule):
        kernels = {plan.step: EmulatedKernel(plan, render(plan)) for plan in plans}
        EmulatedProgram(program.given({"dq_accum"}), kernels)({**tensors, "dq_accum": sums})
    return sums


def _truth(spec: Spec, call: Call, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, dlse: Tensor | None
           ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """out in fp64, lse in fp32 and the gradients. Rows of no sequence have zeros."""
    if changed(spec):
        return _truth_of_expressions(spec, call, q, k, v, dout, dlse)
    leaves = [t.double().requires_grad_() for t in (q, k, v)]
    kept = dropout_mask(SEED, call.dropout_p, num_heads=call.num_heads_q, seqlen_q=len(q), cu_seqlens_q=torch.tensor(
        [0, *(pair[0] for pair in call.lengths)]).cumsum(0).int(), seqlen_kv=max(pair[1] for pair in call.lengths))
    kept = kept * (65536 / kept_of_65536(call.dropout_p))
    outs, lses, begin = [], [], (0, 0)
    for pair in call.lengths:
        end = begin[0] + pair[0], begin[1] + pair[1]
        queries, keys, values = (t[begin[side]:end[side]].transpose(0, 1)
                                 for t, side in zip(leaves, (0, 1, 1), strict=True))
        group = call.num_heads_q // call.num_heads_kv
        keys, values = keys.repeat_interleave(group, 0), values.repeat_interleave(group, 0)
        seen = _seen(spec, call, *pair)
        exists = seen.any(-1, keepdim=True)  # a row that sees no key has 0 / 1 in place of 0 / 0
        scores = (queries @ keys.mT * spec.head_dim_qk**-0.5).masked_fill(~seen, -torch.inf).masked_fill(~exists, 0.0)
        p = torch.softmax(scores, -1).masked_fill(~exists, 0.0)
        outs.append((p * kept[:, begin[0]:end[0], :pair[1]] @ values).transpose(0, 1))
        sums = scores.logsumexp(-1) if pair[1] else torch.zeros(scores.shape[:2], dtype=torch.float64)
        lses.append(sums.masked_fill(~exists[:, 0], -torch.inf))
        begin = end
    out = torch.cat((*outs, torch.zeros(call.rest[0], *outs[0].shape[1:]).double()))
    lse = torch.cat((*lses, torch.full((call.num_heads_q, call.rest[0]), -torch.inf).double()), 1)
    loss = (out * dout.double()).sum()
    if dlse is not None:
        loss = loss + torch.where(lse == -torch.inf, 0.0, lse * dlse.double()).sum()
    loss.backward()
    wanted = {name: torch.zeros_like(t) if t.grad is None else t.grad
              for name, t in zip(("dq", "dk", "dv"), leaves, strict=True)}
    return out.detach(), lse.detach().float(), wanted


def _truth_of_expressions(spec: Spec, call: Call, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, dlse: Tensor | None
                          ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """The same by autograd of the fp64 reference."""
    leaves = [t.double().requires_grad_() for t in (q, k, v)]
    params = {name: t.double().requires_grad_() if isinstance(t, Tensor) and t.is_floating_point() else t
              for name, t in call.params.items()}
    varlen, batch = spec.kv_layout == "varlen", len(call.lengths)
    inputs = leaves if varlen else [t.unflatten(0, (batch, -1)) for t in leaves]
    starts = [torch.tensor([0, *(pair[side] for pair in call.lengths)]).cumsum(0) for side in (0, 1)]
    packed = {"cu_seqlens_q": starts[0], "cu_seqlens_kv": starts[1]} if varlen else {}
    causal = ("top_left" if call.top_left else True) if spec.causal else False
    out, lse = reference(*inputs, causal=causal, window=call.window if spec.window else UNBOUNDED,
                         mods=ExpressionMods.of(spec, params), **packed)
    if not varlen:
        out, lse = out.flatten(0, 1), lse.transpose(0, 1).flatten(1, 2)
    loss = (out * dout.double()).sum()
    if dlse is not None:
        loss = loss + torch.where(lse == -torch.inf, 0.0, lse * dlse.double()).sum()
    loss.backward()
    found = dict(zip(("dq", "dk", "dv"), leaves, strict=True)) | {
        f"d_{name}": t for name, t in params.items() if isinstance(t, Tensor) and name != "sink"}
    return out.detach(), lse.detach().float(), {name: t.grad for name, t in found.items() if t.grad is not None}


def _seen(spec: Spec, call: Call, seqlen_q: int, seqlen_kv: int) -> Tensor:
    left, right = call.window if spec.window else (-1, 0 if spec.causal else -1)
    offset = 0 if call.top_left else seqlen_kv - seqlen_q
    distance = torch.arange(seqlen_kv) - torch.arange(seqlen_q)[:, None] - offset
    return (distance >= (-left if left >= 0 else -seqlen_kv - seqlen_q)) & (
        distance <= (right if right >= 0 else seqlen_kv + seqlen_q))


def backward_spec(family: str, arch: str, head_dims: tuple[int, int], **fields: object) -> Spec:
    given: dict[str, object] = {"dtype": "bf16", **fields}
    return Spec.model_validate({"name": "t", "family": family, "pass": "bwd", "arch": arch, "kernel": "gradients",
                                "head_dim_qk": head_dims[0], "head_dim_v": head_dims[1], **given})


def in_all_orders(spec: Spec, calls: Sequence[Call], seeds: int = 1) -> None:
    for number, call in enumerate(calls):
        for policy in ("random", "lazy", "eager"):
            for seed in range(seeds):
                check_backward(spec, call, Schedule(policy, seed + number))
