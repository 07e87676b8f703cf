"""What a call's tensors and options must be, whatever kernel serves it."""
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from flashgen.errors import UnsupportedError
from flashgen.runtime.ops.arguments import RAW_ERRORS, flag, require_tensors, whole
from flashgen.runtime.ops.tensors import MAX_LENGTH, check_device, check_dtype

MAX_HEAD_DIM = 256
MAX_SCHEMA_INT = 2**63 - 1
CAUSAL_CODES = {False: 0, True: 1, "top_left": 2}
WINDOW_ALLOWED = "(left, right), counts of keys from 0, or -1 for an unbounded side"


def check_call(q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor | None, cu_seqlens_kv: Tensor | None) -> bool:
    """What a look at the arguments shows, before anything is memoised. Whether autograd follows the call."""
    if (cu_seqlens_q is None) != (cu_seqlens_kv is None):
        check_pair(cu_seqlens_q, cu_seqlens_kv)
    followed = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    if not (q.is_cuda or q.is_cpu):
        check_device("q", q)
    return followed


def check_pair(cu_seqlens_q: Tensor | None, cu_seqlens_kv: Tensor | None) -> None:
    """UnsupportedError where one of the two is missing."""
    if (cu_seqlens_q is None) != (cu_seqlens_kv is None):
        raise UnsupportedError("only one of cu_seqlens_q and cu_seqlens_kv is given", where="cu_seqlens",
                               allowed="both (varlen) or neither (dense)")


def read_deterministic(value: Any) -> bool:
    """Whether gradients have to have the same bits each time; None: as torch's switch says."""
    if value is not None:
        return flag("deterministic", value)
    return torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()


def causal_code(causal: Any) -> int:
    """What CAUSAL_CODES says, also of numbers of other types."""
    allowed = " or ".join(repr(name) for name in CAUSAL_CODES)
    try:
        return CAUSAL_CODES[causal]
    except (*RAW_ERRORS, ValueError):  # none of them, or nothing that can be looked up
        return CAUSAL_CODES[whole("causal", causal, 0, 1, allowed) == 1]


def side(value: object) -> int:
    """A side of a window. No sequence is longer than what an op's schema holds, so larger numbers mean the same.

    A graph that is being traced keeps it open: a look at its value would make it a constant.
    """
    if type(value) is int and is_dynamo_compiling():
        return value
    return whole("window", value, -1, MAX_SCHEMA_INT, WINDOW_ALLOWED, least=True)


def check_qkv(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor | None, cu_kv: Tensor | None) -> None:
    varlen = cu_q is not None
    rank, shape = (3, "[total, num_heads, head_dim]") if varlen else (4, "[batch, seqlen, num_heads, head_dim]")
    require_tensors(False, q=q, k=k, v=v)
    require_tensors(True, cu_seqlens_q=cu_q, cu_seqlens_kv=cu_kv)
    for name, t in (("q", q), ("k", k), ("v", v)):
        if t.dim() != rank:
            raise UnsupportedError(f"{name} has shape {tuple(t.shape)}", where=name, allowed=shape,
                                   next="" if varlen else "packed sequences need cu_seqlens_q and cu_seqlens_kv")
        check_dtype(name, t, q)
        if t.device != q.device:
            raise UnsupportedError(f"{name} is on {t.device}, q on {q.device}", where=name, allowed="one device")
        if t.shape[-3] >= MAX_LENGTH:
            raise UnsupportedError(f"{name} has {t.shape[-3]} rows", where=name, allowed=f"fewer than {MAX_LENGTH}")
    if k.shape[:-1] != v.shape[:-1] or (not varlen and k.shape[0] != q.shape[0]) or k.shape[-1] != q.shape[-1]:
        raise UnsupportedError(f"q {tuple(q.shape)}, k {tuple(k.shape)} and v {tuple(v.shape)} do not fit together",
                               where="q, k, v", allowed="one batch; k and v equal but for the last dimension; q and k "
                               "of one head_dim_qk")
    if q.shape[-2] % k.shape[-2] if k.shape[-2] else q.shape[-2]:
        raise UnsupportedError(f"{q.shape[-2]} query heads over {k.shape[-2]} kv heads", where="q, k",
                               allowed="num_heads_q a multiple of num_heads_kv")
    if cu_q is not None and cu_kv is not None:
        for name, t in (("cu_seqlens_q", cu_q), ("cu_seqlens_kv", cu_kv)):
            if (t.dtype != torch.int32 or t.dim() != 1 or t.shape != cu_q.shape or t.shape[0] < 1
                    or t.device != q.device or not t.is_contiguous()):
                raise UnsupportedError(f"{name} is {t.dtype} {tuple(t.shape)} on {t.device}", where=name,
                                       allowed=f"contiguous int32 [batch + 1] on {q.device}, both of one length")


def check_prefix_sums(cu_q: Tensor, cu_kv: Tensor, total_q: int, total_kv: int) -> None:
    """The values of cu_seqlens_*, where they are at hand: on a device, looking at them would wait for it."""
    for name, t, total in (("cu_seqlens_q", cu_q, total_q), ("cu_seqlens_kv", cu_kv, total_kv)):
        ends = t.tolist()
        bad = next((i for i, (end, last) in enumerate(zip(ends, [0, *ends], strict=False))
                    if not (last <= end <= total) or (i == 0 and end)), None)
        if bad is not None:
            raise UnsupportedError(f"{name}[{bad}] is {ends[bad]}" + (f" after {ends[bad - 1]}" if bad else ""),
                                   where=name, allowed=f"sums of lengths: 0 first, never falling, at most {total}")


def check_window(left: int, right: int) -> None:
    """UnsupportedError for a side below -1."""
    if left < -1 or right < -1:
        raise UnsupportedError(f"window=({left}, {right})", where="window", allowed=WINDOW_ALLOWED)


def check_head_dims(head_dim_qk: int, head_dim_v: int) -> None:
    """UnsupportedError unless both are multiples of 8 up to MAX_HEAD_DIM: what 16-byte copies and the tiles cover."""
    dims = (head_dim_qk, head_dim_v)
    if any(d % 8 or not 8 <= d <= MAX_HEAD_DIM for d in dims):
        nearest = tuple(min(max(8, -(-d // 8) * 8), MAX_HEAD_DIM) for d in dims)
        raise UnsupportedError(f"head dims (head_dim_qk, head_dim_v) = {dims}",
                               allowed=f"multiples of 8 from 8 to {MAX_HEAD_DIM}",
                               nearest=f"{nearest}: pad q, k and v with zero columns and give softmax_scale")
