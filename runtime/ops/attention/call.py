"""flashgen.attention: what it refuses, which kernel serves it, and what that launches. The rest is front.py's."""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flashgen.codegen.families.registry import program_of
from flashgen.runtime.ops import front
from flashgen.runtime.ops.arguments import RAW_ERRORS, check_unread, pair
from flashgen.runtime.ops.attention.bound import UNBOUND, bound_parameters, bound_to_call
from flashgen.runtime.ops.attention.checks import (
    CAUSAL_CODES,
    WINDOW_ALLOWED,
    causal_code,
    check_call,
    check_qkv,
    read_deterministic,
    side,
)
from flashgen.runtime.ops.attention.dropout import taken_off
from flashgen.runtime.ops.attention.gradient import with_gradient
from flashgen.runtime.ops.attention.signature import ATTENTION
from flashgen.runtime.ops.attention.sizes import check_values, mappable, named_strides, read_call
from flashgen.runtime.ops.front import Arguments, Ready, kernels_for
from flashgen.runtime.ops.signature import Options, Tensors
from flashgen.runtime.ops.tensors import check_out, is_aligned, scale_number

if TYPE_CHECKING:
    from flashgen.codegen.spec.spec import Spec
    from flashgen.runtime.select.variant import Variant


def attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool | str = False, window: tuple[int, int] = (-1, -1),
              softmax_scale: float | None = None, return_lse: bool = False, cu_seqlens_q: Tensor | None = None,
              cu_seqlens_kv: Tensor | None = None, max_seqlen_q: int | None = None, max_seqlen_kv: int | None = None,
              out: Tensor | None = None, spec: str | Path | Spec | Variant | None = None,
              params: Mapping[str, Any] | None = None, deterministic: bool | None = None, dropout_p: float = 0.0,
              dropout_seed: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
    """Exact attention: softmax(softmax_scale * q k^T + mask) v, without the score matrix in device memory.

    Args:
        q: [batch, seqlen_q, num_heads_q, head_dim_qk], or with cu_seqlens_* [total_q, num_heads_q, head_dim_qk];
            bf16 or fp16, on a CUDA device, or on the CPU, where the kernels run emulated. Head dims are multiples of 8
            up to 256.
        k: [batch, seqlen_kv, num_heads_kv, head_dim_qk] or [total_kv, ...]. num_heads_q is a multiple of num_heads_kv;
            query head h reads kv head h // (num_heads_q // num_heads_kv).
        v: as k with head_dim_v columns.
        causal: True aligns the last query with the last key: query i sees keys j <= i + seqlen_kv - seqlen_q.
            "top_left" aligns query 0 with key 0, as torch's is_causal.
        window: keys (left, right) of the aligned diagonal, which itself always counts; -1 is unbounded.
        softmax_scale: head_dim_qk ** -0.5 by default; finite, above 0, and normal in float32, times log2(e) too.
        return_lse: also return the natural log of the sum of exp(scores), fp32: [batch, num_heads_q, seqlen_q] or
            [num_heads_q, total_q].
        cu_seqlens_q, cu_seqlens_kv: [batch + 1] int32 prefix sums of the lengths, on the same device.
        max_seqlen_q, max_seqlen_kv: accepted for callers that have them; the kernels need neither.
        out: written in place and returned; rows and heads 16-byte aligned, no memory that q, k or v lie in.
        spec: a spec file, a shipped one's name, a Spec, or what flashgen.variant gives: which kernels may serve.
        params: values for the parameters that the spec declares, by name: numbers, and tensors on the device. Other
            values never build another kernel.
        deterministic: whether gradients have the same bits each time; None: as torch's switch says. Results always do.
        dropout_p: how likely a weight is dropped, in steps of 2^-16; the others are divided by 1 - dropout_p.
        dropout_seed: [2] int64, what decides that (flashgen.dropout_mask); None: drawn from torch's generator.

    A row that sees no key gets out 0 and lse -inf; so do rows after the last sequence. q, k or v whose last dimension
    is not contiguous or whose rows are not 16-byte aligned are copied first. Any stride is fine otherwise.
    Autograd follows the call through out and lse, once; with a spec, too, unless that has normalize: none.

    Raises UnsupportedError for what no kernel does, SpecError and PlanError for a spec that cannot be built,
    CompileError and EnvironmentError_ where building or loading fails.
    """
    try:
        followed = check_call(q, k, v, cu_seqlens_q, cu_seqlens_kv)
        code = CAUSAL_CODES[causal]
    except RAW_ERRORS:
        code = causal_code(causal)
        check_qkv(q, k, v, cu_seqlens_q, cu_seqlens_kv)
        followed = check_call(q, k, v, cu_seqlens_q, cu_seqlens_kv)
    if type(window) is not tuple or len(window) != 2:
        window = pair("window", window, WINDOW_ALLOWED)
    if max_seqlen_q is not None or max_seqlen_kv is not None:
        check_unread(max_seqlen_q, max_seqlen_kv)
    text, ints, floats, extra = UNBOUND
    if spec is not None or params is not None or type(dropout_p) is not float or dropout_p:
        text, ints, floats, extra = bound_to_call(spec, params, dropout_p, dropout_seed, q.device)
    tensors = q, k, v, cu_seqlens_q, cu_seqlens_kv
    options = code, window[0], window[1], softmax_scale, text, ints, floats
    if followed or (extra and torch.is_grad_enabled() and any(t.requires_grad for t in extra)):
        return with_gradient(OPERATION, tensors, options, extra, out, return_lse, deterministic)
    if deterministic is not None:
        read_deterministic(deterministic)
    out, lse = front.call(OPERATION, tensors, options, extra, out, return_lse)
    return out if lse is None else (out, lse)


class Attention(front.Operation):
    signature = ATTENTION

    def check(self, tensors: Tensors) -> None:
        check_qkv(*tensors)

    def read(self, options: Options) -> Options:
        causal, left, right, scale, *rest = options
        return (causal, side(left), side(right), scale_number(scale), *rest)

    def prepare(self, call: Arguments) -> Ready:
        q, k, v, cu_q, _ = call.tensors
        causal, left, right, scale, text, ints, floats = call.options
        varlen = cu_q is not None
        check_values(*call.tensors, window=(left, right), scale=scale)
        sizes, wanted = read_call(q, k, v, cu_q, causal, (left, right), scale, op=ATTENTION.name)
        text, bound, dropout_p = taken_off(text, (ints, floats, call.extra), q.device)
        handle, scalars, names, has_sink = bound_parameters(text, bound, sizes, varlen, q.device)
        out_shape = ATTENTION.shapes(call.tensors, call.options)[0]
        if call.out is not None:
            check_out(call.out, out_shape, q)
        if copies := tuple(place for place, t in enumerate((q, k, v)) if not is_aligned(t)):
            return Ready(copies=copies)
        # Of an empty call with a sink, which is the last of the parameters' tensors, lse holds the sink.
        nothing = Ready(lse=-1 if has_sink else None)
        wanted = replace(wanted, lse=call.want_lse, spec=handle, tensor_maps=mappable(q, k, v, call.out),
                         dropout=dropout_p > 0)
        if 0 in out_shape or (sizes.batch == 0 and (scalars or names)):
            return nothing
        if dropout_p:
            names = ("dropout_seed", *names)
        sizes = sizes._replace(dropout_p=dropout_p, strides=named_strides(
            q=q, k=k, v=v, out=q.new_empty(out_shape, device="meta") if call.out is None else call.out))
        kernels = {kernel.plan.step: kernel for kernel in kernels_for(wanted, q.device, sizes)}
        first, *others = kernels.values()
        # A tensor map describes one row at least, and scratch memory has no rows of no keys.
        if sizes.seqlen_kv == 0 and (first.plan.tensor_maps or others):
            return nothing
        program = program_of(first.plan, sizes, first.num_sms, *(kernel.plan for kernel in others)).with_values(scalars)
        return Ready(program, kernels, names)


OPERATION = Attention()
