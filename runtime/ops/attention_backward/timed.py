"""The backward on the device: inputs, our calls on them, and other implementations.

Peers are called below autograd, by the functions that their autograd calls, so that CUDA graphs can hold them.
"""
from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

import torch

import flashgen
from flashgen.codegen.spec.spec import Spec
from flashgen.errors import VerifyError
from flashgen.runtime.measure.bench import Call, Device, Peer, Refused, sets_needed
from flashgen.runtime.ops.attention.dropout import spec_arguments
from flashgen.runtime.ops.attention.timed import draw, present, square_only
from flashgen.runtime.ops.attention_backward.problem import BackwardInputs, BackwardProblem

Prepare = Callable[[BackwardProblem], Callable[[BackwardInputs], Callable[[], object]]]


class BackwardJob:
    def __init__(self, case: BackwardProblem, spec: Spec | None, inputs: Sequence[BackwardInputs]) -> None:
        self.case, self.spec, self.inputs = case, spec, inputs

    def ours(self) -> Sequence[Call]:
        calls = [functools.partial(flashgen.attention_backward, *x.tensors, **{
            **x.keywords, **spec_arguments(self.spec, x.q.device)})
                 for x in self.inputs]
        for name, gradient in zip(("dq", "dk", "dv"), calls[0](), strict=True):
            if not gradient.isfinite().all() or not gradient.any():
                raise VerifyError(f"{name} is not finite, or all zero", next="flashgen verify", where=self.case.label)
        return calls


job = BackwardJob


def inputs(device: Device, case: BackwardProblem, spec: Spec | None) -> list[BackwardInputs]:
    """As many independent sets as rotate past L2; out and lse are those of our forward."""
    return [_with_results(case, seed, device) for seed in range(sets_needed(2 * case.bytes, device.l2_bytes))]


def _with_results(case: BackwardProblem, seed: int, device: Device) -> BackwardInputs:
    x = draw(case.plain, device.data, seed, device.place)
    out, lse = flashgen.attention(x.q, x.k, x.v, **x.keywords, return_lse=True)
    known = {field.name: getattr(x, field.name) for field in fields(x)}
    return BackwardInputs(**known, dout=torch.randn_like(out), out=out, lse=lse)


# -- peers


def find(peer: str) -> Peer:
    """Refused says what is missing."""
    absent, prepare = PEERS[peer]
    if (reason := absent()) is not None:
        raise Refused(reason)

    def start(job: BackwardJob) -> list[Call]:
        prepared = prepare(job.case)
        calls = [prepared(x) for x in job.inputs]
        calls[0]()
        torch.cuda.synchronize()
        return calls
    return Peer(start)


def _cudnn(case: BackwardProblem) -> Callable[[BackwardInputs], Callable[[], object]]:
    square_only(case)
    aten, causal = torch.ops.aten, bool(case.causal)

    def prepare(x: BackwardInputs) -> Callable[[], object]:
        q, k, v = x.heads_first
        out, lse, cum_q, cum_k, max_q, max_k, seed, offset, _ = aten._scaled_dot_product_cudnn_attention(
            q, k, v, None, True, 0.0, causal, False)
        dout = x.dout.transpose(1, 2)
        return lambda: aten._scaled_dot_product_cudnn_attention_backward(
            dout, q, k, v, out, lse, seed, offset, None, cum_q, cum_k, max_q, max_k, 0.0, causal)
    return prepare


def _flash(case: BackwardProblem) -> Callable[[BackwardInputs], Callable[[], object]]:
    square_only(case)
    if case.num_heads_q != case.num_heads_kv:
        raise Refused("below autograd it has a key head for each query head")
    aten, causal = torch.ops.aten, bool(case.causal)

    def prepare(x: BackwardInputs) -> Callable[[], object]:
        q, k, v = x.heads_first
        out, lse, cum_q, cum_k, max_q, max_k, seed, offset, _ = aten._scaled_dot_product_flash_attention(
            q, k, v, 0.0, causal, False)
        dout = x.dout.transpose(1, 2)
        return lambda: aten._scaled_dot_product_flash_attention_backward(
            dout, q, k, v, out, lse, cum_q, cum_k, max_q, max_k, 0.0, causal, seed, offset)
    return prepare


def _torch_varlen(case: BackwardProblem) -> Callable[[BackwardInputs], Callable[[], object]]:
    """torch's FlashAttention-2 below the way that takes packed sequences and windows."""
    if not case.varlen and case.window == (-1, -1):
        raise Refused("without packed sequences or a window SDPA calls the same")
    if case.num_heads_q != case.num_heads_kv:
        raise Refused("below autograd it has a key head for each query head")
    left, right = case.visible
    aten, causal = torch.ops.aten, bool(case.causal)
    windows = {"window_size_left": left, "window_size_right": right} if case.window != (-1, -1) else {}
    longest_q, longest_kv = (max(side) for side in zip(*case.lengths, strict=True))

    def prepare(x: BackwardInputs) -> Callable[[], object]:
        cu_q, cu_kv = x.cu_seqlens_q, x.cu_seqlens_kv
        out, lse, state, unused, _ = aten._flash_attention_forward(
            x.q, x.k, x.v, cu_q, cu_kv, longest_q, longest_kv, 0.0, causal, False, **windows)
        return lambda: aten._flash_attention_backward(
            x.dout, x.q, x.k, x.v, out, lse, cu_q, cu_kv, longest_q, longest_kv, 0.0, causal, state, unused, **windows)
    return prepare


def _fa4(case: BackwardProblem) -> Callable[[BackwardInputs], Callable[[], object]]:
    if case.varlen:
        raise Refused("packed sequences are not set up for it")
    from flash_attn.cute.interface import _flash_attn_bwd

    left, right = case.window
    options: dict[str, Any] = {"causal": bool(case.causal)}
    if case.window != (-1, -1):
        options |= {"window_size_left": left, "window_size_right": right}

    def prepare(x: BackwardInputs) -> Callable[[], object]:
        return lambda: _flash_attn_bwd(x.q, x.k, x.v, x.out, x.dout, x.lse, **options)
    return prepare


# (why it is absent, or None; preparation for a case)
PEERS: dict[str, tuple[Callable[[], str | None], Prepare]] = {
    "sdpa-cudnn": (present, _cudnn),
    "sdpa-fa2": (present, _flash),
    "torch-varlen": (present, _torch_varlen),
    "fa4": (lambda: None if importlib.util.find_spec("flash_attn") else "flash_attn.cute is not installed; pip install "
            "flash-attn-4", _fa4),
}
