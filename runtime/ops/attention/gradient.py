"""flashgen.attention under autograd: the function whose backward is the operation attention_backward, and refusals."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flashgen.errors import UnsupportedError
from flashgen.runtime.ops import front
from flashgen.runtime.ops.arguments import flag
from flashgen.runtime.ops.attention.checks import read_deterministic
from flashgen.runtime.ops.attention.dropout import without_seed
from flashgen.runtime.ops.attention_backward.call import gradients, refused_later
from flashgen.runtime.ops.signature import Options, Signature, Tensors
from flashgen.runtime.ops.wrapped import refuse_wrapped

_SCALE, _SPEC = 3, 4  # places among the options
_EXTRA = 8  # the first parameter among what _Followed.forward takes


class _Followed(torch.autograd.Function):
    """(out, lse) of what `run` computes of the tensors, and the way back to q, k and v. Behind the call's own tensors
    come those of parameters."""

    @staticmethod
    def forward(ctx: Any, run: Callable[[], tuple[Tensor, Tensor]], options: Options, deterministic: bool,
                *tensors: Tensor) -> Any:
        out, lse = run()
        scale = options[_SCALE]  # a tensor where a graph keeps the numbers open
        ctx.save_for_backward(*tensors, out, lse, scale if isinstance(scale, Tensor) else None)
        ctx.options, ctx.deterministic = options, deterministic
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> Any:
        q, k, v, cu_seqlens_q, cu_seqlens_kv, *extra, out, lse, numbers = ctx.saved_tensors
        if dout is None:
            dout = torch.zeros_like(out)
        causal, left, right, scale, spec, ints, floats = ctx.options
        text, seed, own = without_seed(spec, extra)
        needed, sums = ctx.needs_input_grad[_EXTRA + len(seed):], tuple[Tensor, ...]()
        if any(needed):
            from flashgen.runtime.ops.attention import parameter_gradients

            parameter_gradients.check_parameters(text, own, ctx.deterministic)
            sums = parameter_gradients.sums_for(text, own, needed)
        dq, dk, dv = None, None, None
        if any(ctx.needs_input_grad[:_EXTRA]) or any(t.numel() for t in sums):
            dq, dk, dv = gradients((dout, q, k, v, out, lse, dlse, cu_seqlens_q, cu_seqlens_kv),
                                   (causal, left, right, scale, spec, ctx.deterministic, ints, floats),
                                   (*extra, *sums), numbers)
        made: list[Tensor | None] = [None] * len(own)
        if any(needed):
            made = parameter_gradients.of_all(text, own, needed, sums, (dout, out, lse, dlse, cu_seqlens_q))
        return None, None, None, dq, dk, dv, None, None, *(None for _ in seed), *made


# Function.apply less what it does for tensors of torch.func, which are refused: half of its time.
_follow: Callable[..., Any] = super(torch.autograd.Function, _Followed).apply


def with_gradient(op: front.Operation, tensors: Tensors, options: Options, extra: tuple[Tensor, ...],
                  out: Tensor | None, want_lse: Any, deterministic: Any) -> Tensor | tuple[Tensor, Tensor]:
    """A call that autograd follows: its out, or (out, lse). UnsupportedError for what has no gradient."""
    same_bits = read_deterministic(deterministic)
    if options[_SPEC]:
        _check(options, extra, same_bits)
    if out is not None:
        raise UnsupportedError("a gradient is asked for, and autograd follows no result that is written into `out`",
                               where="out", allowed="None where q, k or v requires a gradient",
                               next="leave out=None, or call it under torch.no_grad()")
    if type(want_lse) is not bool:
        want_lse = flag("return_lse", want_lse)
    if front.listened():  # the op that the dispatcher finds is followed in the same way; torch's switch is all it knows
        if same_bits != read_deterministic(None):
            raise UnsupportedError(f"deterministic={same_bits} differs from torch's switch, and the call is traced",
                                   where="deterministic", allowed="what the switch says, in graphs and under modes",
                                   next=f"torch.use_deterministic_algorithms({same_bits})")
        found, lse = front.dispatch(op, tensors, options, extra, None, True)
    else:
        found, lse = _follow(lambda: front.call(op, tensors, options, extra, None, True), options, same_bits,
                             *tensors, *extra)
    return (found, lse) if want_lse else found


def followed(signature: Signature, arguments: tuple[Any, ...], run: Callable[[], Any]) -> Any:
    """(out, lse) of a torch op that autograd follows; `run` is the op below autograd. Programs that were exported run
    with grad enabled as well, so what has no gradient is refused when the gradient is asked for."""
    tensors, options, extra = signature.split(arguments)
    refuse_wrapped(**{arg.name: t for arg, t in zip(signature.tensors, tensors, strict=True)})
    deterministic = read_deterministic(None)
    try:
        _check(options, extra, deterministic)
    except UnsupportedError as error:
        return refused_later(error, run, (*tensors, *extra))
    return _follow(run, options, deterministic, *tensors, *extra)


def _check(options: Options, extra: tuple[Tensor, ...], deterministic: bool) -> None:
    """UnsupportedError where the options have no gradient."""
    text, _, own = without_seed(options[_SPEC], extra)
    if text:
        from flashgen.runtime.ops.attention.parameters import check_differentiable  # bundles serve without specs

        check_differentiable(text)
        if own:
            from flashgen.runtime.ops.attention.parameter_gradients import check_parameters

            check_parameters(text, own, deterministic)
