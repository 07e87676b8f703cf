"""flashgen.attention: what it refuses, which kernel serves it, and what that launches. The rest is front.py's."""
from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from flashgen.codegen.families.registry import program_of
from flashgen.codegen.families.shared.launch import Sizes
from flashgen.runtime.launch.tensor_map import fits_maps
from flashgen.runtime.ops import front
from flashgen.runtime.ops.arguments import RAW_ERRORS, check_unread, pair
from flashgen.runtime.ops.attention.checks import (
    CAUSAL_CODES,
    WINDOW_ALLOWED,
    causal_code,
    check_call,
    check_head_dims,
    check_prefix_sums,
    check_qkv,
    check_window,
    side,
)
from flashgen.runtime.ops.attention.signature import ATTENTION
from flashgen.runtime.ops.front import Arguments, Ready, kernels_for
from flashgen.runtime.ops.signature import Options, Tensors
from flashgen.runtime.ops.tensors import DTYPE_NAMES, check_out, check_scale, is_aligned, scale_number, strides
from flashgen.runtime.select.selector import Wanted

if TYPE_CHECKING:
    import torch

    from flashgen.codegen.spec.spec import Spec
    from flashgen.runtime.ops.attention.parameters import Parameters
    from flashgen.runtime.select.params import Bound
    from flashgen.runtime.select.variant import Variant


def attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool | str = False,
              window: tuple[int, int] = (-1, -1), softmax_scale: float | None = None, return_lse: bool = False,
              cu_seqlens_q: Tensor | None = None, cu_seqlens_kv: Tensor | None = None,
              max_seqlen_q: int | None = None, max_seqlen_kv: int | None = None, out: Tensor | None = None,
              spec: str | Path | Spec | Variant | None = None,
              params: Mapping[str, Any] | None = None) -> Tensor | tuple[Tensor, Tensor]:
    """Exact attention, forward: softmax(softmax_scale * q k^T + mask) v, without the score matrix in device memory.

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
        spec: a spec file, the name of a shipped one, a Spec, or what flashgen.variant gives, to restrict the choice of
            kernel.
        params: values for the parameters that the spec declares, by name: numbers, and tensors on the device. Other
            values never build another kernel.

    A row that sees no key gets out 0 and lse -inf; so do rows after the last sequence. q, k or v whose last dimension
    is not contiguous or whose rows are not 16-byte aligned are copied first. Any stride is fine otherwise.

    Raises UnsupportedError for what no kernel does, SpecError and PlanError for a spec that cannot be built,
    CompileError and EnvironmentError_ where building or loading fails. There is no backward yet: with grad enabled and
    an input that requires it, the call is refused.
    """
    try:
        check_call(q, k, v, cu_seqlens_q, cu_seqlens_kv)
        code = CAUSAL_CODES[causal]
    except RAW_ERRORS:
        code = causal_code(causal)
        check_qkv(q, k, v, cu_seqlens_q, cu_seqlens_kv)
        check_call(q, k, v, cu_seqlens_q, cu_seqlens_kv)
    if type(window) is not tuple or len(window) != 2:
        window = pair("window", window, WINDOW_ALLOWED)
    if max_seqlen_q is not None or max_seqlen_kv is not None:
        check_unread(max_seqlen_q, max_seqlen_kv)
    text, ints, floats, extra = _UNBOUND
    if spec is not None or params is not None:
        from flashgen.runtime.ops.attention.parameters import bound_to  # bundles serve without specs

        text, ints, floats, extra = bound_to(spec, params)
    out, lse = front.call(OPERATION, (q, k, v, cu_seqlens_q, cu_seqlens_kv),
                          (code, window[0], window[1], softmax_scale, text, ints, floats), extra, out, return_lse)
    return out if lse is None else (out, lse)


_UNBOUND: tuple[str, tuple[int, ...], tuple[float, ...], tuple[Tensor, ...]] = ("", (), (), ())


def _parameters(text: str, bound: Bound, sizes: Sizes, varlen: bool, device: torch.device) -> Parameters:
    if (text, *bound) == _UNBOUND:
        return "", {}, (), False
    from flashgen.runtime.ops.attention.parameters import read_parameters

    return read_parameters(text, bound, sizes, varlen, device)


class Attention(front.Operation):
    signature = ATTENTION

    def check(self, tensors: Tensors) -> None:
        check_qkv(*tensors)

    def read(self, options: Options) -> Options:
        causal, left, right, scale, *rest = options
        return (causal, side(left), side(right), scale_number(scale), *rest)

    def prepare(self, call: Arguments) -> Ready:
        q, k, v, cu_q, cu_kv = call.tensors
        causal, left, right, scale, text, ints, floats = call.options
        varlen = cu_q is not None
        if varlen and q.is_cpu:
            check_prefix_sums(cu_q, cu_kv, q.shape[0], k.shape[0])
        check_window(left, right)
        check_scale(scale)
        check_head_dims(q.shape[-1], v.shape[-1])
        batch, seqlen_q = (cu_q.shape[0] - 1, q.shape[0]) if varlen else (q.shape[0], q.shape[1])
        reach = max(seqlen_q, k.shape[-3])
        left, right = (-1 if x >= reach else x for x in (left, right))
        sizes = Sizes(batch, seqlen_q, k.shape[-3], q.shape[-2], k.shape[-2], scale, causal == 2,
                      (left, 0 if causal else right))
        handle, scalars, names, has_sink = _parameters(text, (ints, floats, call.extra), sizes, varlen, q.device)
        out_shape = ATTENTION.shapes(call.tensors, call.options)[0]
        if call.out is not None:
            check_out(call.out, out_shape, q)
        if copies := tuple(place for place, t in enumerate((q, k, v)) if not is_aligned(t)):
            return Ready(copies=copies)
        # Of an empty call with a sink, which is the last of the parameters' tensors, lse holds the sink.
        nothing = Ready(lse=len(call.tensors) + len(call.extra) - 1 if has_sink else None)
        windowed = left >= 0 or (right >= 0 and not causal)  # causal bounds the right side anyway
        wanted = Wanted(DTYPE_NAMES[q.dtype], q.shape[-1], v.shape[-1], bool(causal) and not windowed, windowed,
                        "varlen" if varlen else "dense", call.want_lse, handle, all(
                            fits_maps(t.shape, t.stride(), t.element_size()) for t in (q, k, v, call.out)
                            if t is not None))
        if 0 in out_shape or (batch == 0 and (scalars or names)):
            return nothing
        rows = {"q": q, "k": k, "v": v, "out": q.new_empty(out_shape, device="meta") if call.out is None else call.out}
        axes = ("row", "head") if varlen else ("batch", "row", "head")
        sizes = sizes._replace(strides={f"{name}_{axis}_stride": stride for name, t in rows.items()
                                        for axis, stride in zip(axes, strides(t), strict=True)})
        kernels = {kernel.plan.step: kernel for kernel in kernels_for(wanted, q.device, sizes)}
        first, *others = kernels.values()
        # A tensor map describes one row at least, and scratch memory has no rows of no keys.
        if sizes.seqlen_kv == 0 and (first.plan.tensor_maps or others):
            return nothing
        program = program_of(first.plan, sizes, first.num_sms, *(kernel.plan for kernel in others)).with_values(scalars)
        return Ready(program, kernels, names)


OPERATION = Attention()
