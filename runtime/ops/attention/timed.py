"""Attention on the device: inputs, our calls on them, and other implementations, called as their users would."""
from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import flashgen
from flashgen.codegen.spec.spec import Spec
from flashgen.errors import VerifyError
from flashgen.runtime.measure.bench import Call, Device, Peer, Refused, sets_needed
from flashgen.runtime.ops.attention.dropout import spec_arguments
from flashgen.runtime.ops.attention.problem import Inputs, Problem

FA3_MODULES = ("flash_attn_interface", "fa3_fwd_interface")  # built from source; the wheel fa3-fwd

Prepare = Callable[[Problem], Callable[[Inputs], object]]


class AttentionJob:
    """`inputs`: sets, each with a place for the result. `first`: our result on the first set, once `ours` ran."""

    def __init__(self, case: Any, spec: Any, inputs: Sequence[tuple[Inputs, Tensor]]) -> None:
        self.case, self.spec, self.sets = case, spec, inputs
        self.inputs, self.first = [x for x, _ in inputs], inputs[0][1]

    def options(self) -> dict[str, Any]:
        """What our call is given besides the inputs."""
        return spec_arguments(self.spec, self.first.device)

    def calls(self, options: Mapping[str, Any]) -> list[Call]:
        return [functools.partial(flashgen.attention, x.q, x.k, x.v, out=out, **{**x.keywords, **options})
                for x, out in self.sets]

    def ours(self) -> Sequence[Call]:
        calls, out = self.calls(self.options()), self.sets[0][1]
        out.fill_(math.nan)
        calls[0]()
        self.first = out.clone()
        if not self.first.isfinite().all():  # a kernel that writes nothing would be fast
            raise VerifyError("out is not finite", next="flashgen verify",
                              where=f"{self.spec.variant}.{self.spec.arch}" if self.spec else self.case.label)
        return calls


job = AttentionJob


def inputs(device: Device, case: Problem, spec: Spec | None) -> list[tuple[Inputs, Tensor]]:
    """As many independent sets as rotate past L2."""
    drawn = (draw(case, device.data, seed, device.place) for seed in range(sets_needed(case.bytes, device.l2_bytes)))
    return [(x, x.q.new_full((*x.q.shape[:-1], case.head_dim_v), math.nan)) for x in drawn]


def draw(problem: Problem, data: str, seed: int, device: str) -> Inputs:
    """Inputs from N(0, 1), changed as `data` says.

    Kernels take shortcuts that depend on the data: "growing" raises the maximum of a row again and again, as keys
    scaled by 0.2 to 8 along each sequence do; "wide" (q times 8) makes the largest weight stand out.
    """
    x = replace(problem, seed=seed).make_inputs(device)
    if data == "growing":
        keys = problem.seqlen_kv if isinstance(problem.seqlen_kv, tuple) else (problem.seqlen_kv,)
        x.k.mul_(torch.cat([torch.linspace(0.2, 8.0, count) for count in keys]).to(x.k)[:, None, None])
    elif data == "wide":
        x.q.mul_(8)
    return x


# -- peers


def find(peer: str) -> Peer:
    """Refused says what is missing."""
    absent, prepare = PEERS[peer]
    if (reason := absent()) is not None:
        raise Refused(reason)

    def start(job: AttentionJob) -> list[Call]:
        attend = prepare(job.case)
        attend(job.inputs[0])
        torch.cuda.synchronize()
        return [functools.partial(attend, x) for x in job.inputs]
    return Peer(start)


def present() -> str | None:
    return None


def square_only(case: Problem) -> None:
    if case.varlen:
        raise Refused("it has no packed sequences")
    if case.causal and case.seqlen_q != case.seqlen_kv:
        raise Refused("its causal mask is aligned top-left, ours bottom-right: they differ unless seqlen_q = seqlen_kv")
    if case.window != (-1, -1):
        raise Refused("it has no window")


def _sdpa(backend: str) -> Prepare:
    def prepare(case: Problem) -> Callable[[Inputs], object]:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        square_only(case)
        chosen, gqa = getattr(SDPBackend, backend), case.num_heads_q != case.num_heads_kv

        def attend(x: Inputs) -> Tensor:
            with sdpa_kernel(chosen):
                return torch.nn.functional.scaled_dot_product_attention(
                    *x.heads_first, is_causal=bool(case.causal), enable_gqa=gqa)
        return attend
    return prepare


def _flex(case: Problem, device: str = "cuda") -> Callable[[Inputs], object]:
    if case.varlen:
        raise Refused("packed sequences are not set up for it")
    (seqlen_q, seqlen_kv), (left, right) = case.lengths[0], case.window
    shift = seqlen_kv - seqlen_q

    def visible(b: Tensor, h: Tensor, q_pos: Tensor, kv_pos: Tensor) -> Tensor:
        seen = kv_pos <= q_pos + shift if case.causal else kv_pos >= 0
        if left >= 0:
            seen = seen & (kv_pos >= q_pos + shift - left)
        return seen & (kv_pos <= q_pos + shift + right) if right >= 0 else seen

    return compiled_flex(case, visible if case.causal or case.window != (-1, -1) else None, device)


def compiled_flex(problem: Problem, mask_mod: Callable[..., Any] | None, device: str,
                  score_mod: Callable[..., Any] | None = None, batch: int | None = None,
                  made: list[float] | None = None) -> Callable[[Inputs], Tensor]:
    """FlexAttention on inputs, result as [batch, heads, rows, head_dim]. Its block mask is made here, outside the
    timing of the kernels; `made` gets the milliseconds that this takes, the second time."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def block_mask() -> Any:
        return create_block_mask(mask_mod, batch, None, *problem.lengths[0], device=device) if mask_mod else None

    torch.compiler.reset()  # past its limit of recompilations it would turn to an eager path without a word
    mask = block_mask()
    if made is not None:
        torch.cuda.synchronize()
        start = time.perf_counter()
        block_mask()
        torch.cuda.synchronize()
        made.append(1e3 * (time.perf_counter() - start))
    compiled = torch.compile(flex_attention, fullgraph=True, dynamic=False)
    return lambda x: compiled(*x.heads_first, score_mod=score_mod, block_mask=mask,
                              enable_gqa=problem.num_heads_q != problem.num_heads_kv)


def _fa3_module() -> str | None:
    return next((name for name in FA3_MODULES if importlib.util.find_spec(name) is not None), None)


def _fa3_absent() -> str | None:
    return None if _fa3_module() else f"none of {', '.join(FA3_MODULES)} can be imported; pip install fa3-fwd"


def _fa3(num_splits: int) -> Prepare:
    """`num_splits`: blocks that share the keys of a query tile; 0 leaves it to its own rule, 1 is its default."""
    def prepare(case: Problem) -> Callable[[Inputs], object]:
        module: Any = importlib.import_module(_fa3_module() or "")
        options: dict[str, Any] = {"causal": case.causal}
        if case.window != (-1, -1):
            options["window_size"] = case.visible
        if num_splits != 1:
            options["num_splits"] = num_splits
        if not case.varlen:
            return lambda x: module.flash_attn_func(x.q, x.k, x.v, **options)
        longest = [max(side) for side in zip(*case.lengths, strict=True)]
        return lambda x: module.flash_attn_varlen_func(x.q, x.k, x.v, x.cu_seqlens_q, x.cu_seqlens_kv, *longest,
                                                       **options)
    return prepare


def _torch_varlen(case: Problem, device: str = "cuda") -> Callable[[Inputs], object]:
    """torch's FlashAttention-2 by the way that takes packed sequences and windows, which sdpa does not."""
    from torch.nn.attention.varlen import varlen_attn

    if not case.varlen and case.window == (-1, -1):
        raise Refused("without packed sequences or a window it is what sdpa-fa2 is")
    known, (left, right) = inspect.signature(varlen_attn).parameters, case.visible
    options: dict[str, Any] = {"enable_gqa": case.num_heads_q != case.num_heads_kv} if "enable_gqa" in known else {}
    if "window_size" in known:
        options["window_size"] = (left, right)
    elif left < 0 and right <= 0:
        options["is_causal"] = right == 0
    else:
        raise Refused("this torch's varlen_attn has no window")
    sides = list(zip(*case.lengths, strict=True))
    rest: list[Any] = [*(torch.tensor((0, *side)).cumsum(0).to(device, torch.int32) for side in sides),
                       *map(max, sides)]
    return lambda x: varlen_attn(x.q.flatten(0, -3), x.k.flatten(0, -3), x.v.flatten(0, -3), *rest, **options)


# (why it is absent, or None; preparation for a case)
PEERS: dict[str, tuple[Callable[[], str | None], Prepare]] = {
    "sdpa-fa2": (present, _sdpa("FLASH_ATTENTION")),
    "sdpa-cudnn": (present, _sdpa("CUDNN_ATTENTION")),
    "flex": (lambda: None if importlib.util.find_spec("triton") else "triton is not installed", _flex),
    "fa3": (_fa3_absent, _fa3(1)),
    "fa3-split": (_fa3_absent, _fa3(0)),
    "torch-varlen": (lambda: None if importlib.util.find_spec("torch.nn.attention.varlen")
                     else "this torch has no torch.nn.attention.varlen", _torch_varlen),
}
