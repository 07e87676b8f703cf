"""flashgen.attention_backward: what it refuses, which kernels serve it, what they launch. The rest is front.py's."""
from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flashgen.codegen.families.registry import answers_by_name, op_of, program_of
from flashgen.codegen.program import Buffer
from flashgen.errors import UnsupportedError
from flashgen.runtime.ops import front
from flashgen.runtime.ops.arguments import check_unread, flag, pair, require_tensors
from flashgen.runtime.ops.attention.bound import bound_parameters, bound_to_call
from flashgen.runtime.ops.attention.checks import (
    WINDOW_ALLOWED,
    causal_code,
    check_pair,
    check_qkv,
    read_deterministic,
    side,
)
from flashgen.runtime.ops.attention.dropout import probability, taken_off
from flashgen.runtime.ops.attention.signature import ATTENTION
from flashgen.runtime.ops.attention.sizes import check_values, mappable, named_strides, read_call
from flashgen.runtime.ops.attention_backward.signature import ATTENTION_BACKWARD
from flashgen.runtime.ops.front import Arguments, Ready, kernels_for
from flashgen.runtime.ops.signature import Options, Signature, Tensors
from flashgen.runtime.ops.tensors import check_device, is_aligned, scale_number
from flashgen.runtime.ops.torch_ops import DYNAMIC
from flashgen.runtime.ops.wrapped import refuse_wrapped

if TYPE_CHECKING:
    from pathlib import Path

    from flashgen.codegen.spec.spec import Spec
    from flashgen.runtime.select.variant import Variant

FIRST_KERNEL, SAME_BITS = ("kernel", "preprocess"), ("deterministic", True)  # traits
_SCALE = 3  # its place among the options


def attention_backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *,
                       dlse: Tensor | None = None, causal: bool | str = False, window: tuple[int, int] = (-1, -1),
                       softmax_scale: float | None = None, cu_seqlens_q: Tensor | None = None,
                       cu_seqlens_kv: Tensor | None = None, max_seqlen_q: int | None = None,
                       max_seqlen_kv: int | None = None, deterministic: bool | None = None,
                       spec: str | Path | Spec | Variant | None = None, params: Mapping[str, Any] | None = None,
                       dropout_p: float = 0.0, dropout_seed: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv), contiguous, of an attention call: the explicit form of what autograd does for flashgen.attention.

    Args:
        dout: the gradient of the result, of its shape and dtype.
        q, k, v: as flashgen.attention takes them; so are causal, window, softmax_scale and cu_seqlens_*.
        out, lse: what flashgen.attention gave for them, or any other attention with the natural log of the sum.
        dlse: the gradient of lse, fp32; none by default.
        max_seqlen_q, max_seqlen_kv: accepted for callers that have them.
        deterministic: whether the same call gives the same bits each time. By default as
            torch.are_deterministic_algorithms_enabled() says.
        spec, params: as flashgen.attention takes them, or a spec of backward kernels.
        dropout_p, dropout_seed: those of the forward call.

    Rows that see no key, keys that no query sees, and rows after the last sequence get zeros. The inputs that the
    kernels cannot read as they lie are copied first. Raises as flashgen.attention. The gradients have none themselves.
    """
    if type(window) is not tuple or len(window) != 2:
        window = pair("window", window, WINDOW_ALLOWED)
    check_unread(max_seqlen_q, max_seqlen_kv)
    require_tensors(False, dout=dout, q=q, k=k, v=v, out=out, lse=lse)
    require_tensors(True, dlse=dlse, cu_seqlens_q=cu_seqlens_q, cu_seqlens_kv=cu_seqlens_kv)
    check_pair(cu_seqlens_q, cu_seqlens_kv)
    check_device("q", q)
    if dropout_seed is None and probability(dropout_p):
        raise UnsupportedError("dropout_p without the seed of the forward call", where="dropout_seed",
                               allowed="the dropout_seed that flashgen.attention was given")
    text, ints, floats, extra = bound_to_call(spec, params, dropout_p, dropout_seed, q.device)
    return gradients((dout, q, k, v, out, lse, dlse, cu_seqlens_q, cu_seqlens_kv),
                     (causal_code(causal), *window, softmax_scale, text, read_deterministic(deterministic), ints,
                      floats), extra)


def gradients(tensors: Tensors, options: Options, extra: tuple[Tensor, ...], numbers: Tensor | None = None
              ) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv). `numbers`: what stands in the place of the scale in a graph that keeps the numbers open."""
    if numbers is not None:
        options = (*options[:_SCALE], numbers, *options[_SCALE + 1:])
        found: Any = DYNAMIC[ATTENTION_BACKWARD.name].plain(*tensors, *options, extra)
    elif torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        found = front.dispatch(OPERATION, tensors, options, extra, None, False)  # for autograd to know that it went by
    else:
        found = front.call(OPERATION, tensors, options, extra)
    return found[0], found[1], found[2]


class _Refused(torch.autograd.Function):
    """What `run` computes of the tensors. Whoever asks for its gradient gets the error."""

    @staticmethod
    def forward(ctx: Any, error: UnsupportedError, run: Callable[[], Any], *tensors: Tensor | None) -> Any:
        ctx.error = error
        return run()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise ctx.error


_refused: Callable[..., Any] = _Refused.apply


def refused_later(error: UnsupportedError, run: Callable[[], Any], tensors: Tensors) -> Any:
    """What `run` computes of the tensors, and the error for a gradient of it."""
    return _refused(error, run, *tensors)


def followed(signature: Signature, arguments: tuple[Any, ...], run: Callable[[], Any]) -> Any:
    """The results of the torch op, which autograd follows no further; `run` is the op below autograd."""
    tensors, _, extra = signature.split(arguments)
    refuse_wrapped(**{arg.name: t for arg, t in zip(signature.tensors, tensors, strict=True)})
    return refused_later(UnsupportedError(
        "a gradient of attention's gradients is asked for, and flashgen has none", where="attention_backward",
        allowed="one backward", next="leave create_graph out, or use torch's own attention where it is needed"),
        run, (*tensors, *extra))


class AttentionBackward(front.Operation):
    signature = ATTENTION_BACKWARD

    def check(self, tensors: Tensors) -> None:
        dout, q, k, v, out, lse, dlse, cu_q, cu_kv = tensors
        check_qkv(q, k, v, cu_q, cu_kv)
        out_shape, lse_shape = ATTENTION.shapes((q, k, v, cu_q, cu_kv), ())
        for name, t, shape, dtype in (("dout", dout, out_shape, q.dtype), ("out", out, out_shape, q.dtype),
                                      ("lse", lse, lse_shape, torch.float32), ("dlse", dlse, lse_shape, torch.float32)):
            if t is not None and (tuple(t.shape) != shape or t.dtype != dtype or t.device != q.device):
                raise UnsupportedError(f"{name} is {t.dtype} {tuple(t.shape)} on {t.device}", where=name,
                                       allowed=f"{dtype} {shape} on {q.device}")

    def read(self, options: Options) -> Options:
        causal, left, right, scale, spec, deterministic, *rest = options
        return (causal, side(left), side(right), scale_number(scale), spec, flag("deterministic", deterministic), *rest)

    def prepare(self, call: Arguments) -> Ready:
        dout, q, k, v, out, _, _, cu_q, cu_kv = call.tensors
        causal, left, right, scale, text, deterministic, ints, floats = call.options
        check_values(q, k, v, cu_q, cu_kv, window=(left, right), scale=scale)
        named = zip(self.signature.tensors, call.tensors, strict=True)
        if copies := tuple(place for place, (arg, t) in enumerate(named) if not _readable(arg.name, t)):
            return Ready(copies=copies)
        sizes, wanted = read_call(q, k, v, cu_q, causal, (left, right), scale, op=ATTENTION_BACKWARD.name)
        text, (ints, floats, given), dropout_p = taken_off(text, (ints, floats, call.extra), q.device)
        extra, names_of_sums = _split(text, given)
        _, scalars, names, _ = bound_parameters(text, (ints, floats, extra), sizes, cu_q is not None, q.device)
        if sizes.batch == 0 or 0 in (*out.shape, *q.shape, *k.shape):
            return Ready()
        traits = (FIRST_KERNEL, SAME_BITS) if deterministic else (FIRST_KERNEL,)
        wanted = replace(wanted, spec=_handle(text), tensor_maps=mappable(dout, q, k, v), traits=traits,
                         dropout=dropout_p > 0)
        made = {f"d{name}": t.new_empty(t.shape, device="meta") for name, t in (("q", q), ("k", k), ("v", v))}
        sizes = sizes._replace(dropout_p=dropout_p, strides=named_strides(dout=dout, q=q, k=k, v=v, out=out, **made))
        kernels = {kernel.plan.step: kernel for kernel in kernels_for(wanted, q.device, sizes)}
        first, *others = kernels.values()
        program = program_of(first.plan, sizes, first.num_sms, *(kernel.plan for kernel in others)).with_values(scalars)
        names = ("dropout_seed", *names) if dropout_p else names
        if len(extra) == len(given):  # nobody wants the gradients of parameters: null pointers
            nothing = tuple(Buffer(name, "f32", (0,)) for name in names_of_sums)
            return Ready(program._replace(buffers=(*program.buffers, *nothing)), kernels, names)
        return Ready(program, kernels, (*names, *names_of_sums))


OPERATION = AttentionBackward()


def _readable(name: str, t: Tensor | None) -> bool:
    """Whether kernels can read a tensor as it lies. What autograd makes is often expanded, as sums make it."""
    if t is None or name in ("cu_seqlens_q", "cu_seqlens_kv"):
        return True
    if name in ("lse", "dlse"):
        return t.is_contiguous()
    return is_aligned(t) and (name != "dout" or mappable(t))


def _split(text: str, extra: tuple[Tensor, ...]) -> tuple[tuple[Tensor, ...], tuple[str, ...]]:
    """The tensors of parameters among the extra ones, and the names of those behind: sums of their gradients."""
    if not extra:
        return (), ()
    from flashgen.runtime.ops.attention.parameter_gradients import sum_names
    from flashgen.runtime.ops.attention.parameters import tensors_of

    return extra[:len(tensors_of(text))], sum_names(text)


def _handle(text: str) -> str:
    """The handle of a spec that has backward kernels, whose expressions they need, or whose family's serve by name
    alone; "" for any other."""
    if not text:
        return ""
    from flashgen.runtime.ops.attention.parameters import check_differentiable, is_changed, specs_of

    check_differentiable(text)
    handle, specs = specs_of(text)
    op = ATTENTION_BACKWARD.name
    named = is_changed(text) or any(op_of(spec) == op or answers_by_name(spec, op) for spec in specs)
    return handle if named else ""
