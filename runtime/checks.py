"""What a call's tensors and options must be, whatever kernel serves it."""
from __future__ import annotations

import math

import torch

from flashgen.codegen.dtype import DTYPES
from flashgen.errors import UnsupportedError

ALIGNMENT_BYTES = 16  # one cp.async
MAX_HEAD_DIM = 256
MAX_LENGTH = 2**30    # sums of two positions and a window stay within 32 bits
CAUSAL_CODES = {False: 0, True: 1, "top_left": 2}
DTYPE_NAMES = {getattr(torch, d.torch_name): d.name for d in DTYPES.values()}


def check_call(q, k, v, causal, cu_seqlens_q, cu_seqlens_kv) -> None:  # type: ignore[no-untyped-def]
    """What a look at the arguments shows, before anything is memoised."""
    if causal not in CAUSAL_CODES:
        raise UnsupportedError(f"causal={causal!r}", where="causal", allowed='False, True or "top_left"')
    if (cu_seqlens_q is None) != (cu_seqlens_kv is None):
        raise UnsupportedError("only one of cu_seqlens_q and cu_seqlens_kv is given", where="cu_seqlens",
                               allowed="both (varlen) or neither (dense)")
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        raise UnsupportedError("a gradient is asked for, and flashgen has no backward kernel yet", where="q, k, v",
                               allowed="inputs without requires_grad", next="call it under torch.no_grad()")
    if not (q.is_cuda or q.is_cpu):
        raise UnsupportedError(f"q is on {q.device}", where="q",
                               allowed="tensors on a CUDA device, or on the CPU, where kernels run emulated")


def strides(t) -> list[int]:  # type: ignore[no-untyped-def]
    """Element strides of all but the last dimension; a dimension of size 1 has none that means anything."""
    return [stride if size != 1 else 0 for size, stride in zip(t.shape[:-1], t.stride()[:-1], strict=True)]


def is_aligned(t: torch.Tensor) -> bool:
    """Whether 16-byte copies can read every row of it."""
    if t.shape[-1] != 1 and t.stride(-1) != 1:
        return False
    step = ALIGNMENT_BYTES // t.element_size()
    return t.numel() == 0 or (t.data_ptr() % ALIGNMENT_BYTES == 0 and all(s % step == 0 for s in strides(t)))


def check_qkv(q, k, v, cu_q, cu_kv):  # type: ignore[no-untyped-def]
    varlen = cu_q is not None
    rank, shape = (3, "[total, num_heads, head_dim]") if varlen else (4, "[batch, seqlen, num_heads, head_dim]")
    for name, t in (("q", q), ("k", k), ("v", v)):
        if t.dim() != rank:
            raise UnsupportedError(f"{name} has shape {tuple(t.shape)}", where=name, allowed=shape,
                                   next="" if varlen else "packed sequences need cu_seqlens_q and cu_seqlens_kv")
        if t.dtype not in DTYPE_NAMES or t.dtype != q.dtype:
            raise UnsupportedError(f"{name} has dtype {t.dtype}, q has {q.dtype}", where=name,
                                   allowed="one dtype for all: " + ", ".join(map(str, DTYPE_NAMES)))
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
    if varlen:
        for name, t in (("cu_seqlens_q", cu_q), ("cu_seqlens_kv", cu_kv)):
            if (t.dtype != torch.int32 or t.dim() != 1 or t.shape != cu_q.shape or t.shape[0] < 1
                    or t.device != q.device or not t.is_contiguous()):
                raise UnsupportedError(f"{name} is {t.dtype} {tuple(t.shape)} on {t.device}", where=name,
                                       allowed=f"contiguous int32 [batch + 1] on {q.device}, both of one length")


def check_prefix_sums(cu_q, cu_kv, total_q: int, total_kv: int) -> None:  # type: ignore[no-untyped-def]
    """The values of cu_seqlens_*, where they are at hand: on a device, looking at them would wait for it."""
    for name, t, total in (("cu_seqlens_q", cu_q, total_q), ("cu_seqlens_kv", cu_kv, total_kv)):
        ends = t.tolist()
        bad = next((i for i, (end, last) in enumerate(zip(ends, [0, *ends], strict=False))
                    if not (last <= end <= total) or (i == 0 and end)), None)
        if bad is not None:
            raise UnsupportedError(f"{name}[{bad}] is {ends[bad]}" + (f" after {ends[bad - 1]}" if bad else ""),
                                   where=name, allowed=f"sums of lengths: 0 first, never falling, at most {total}")


def check_head_dims(head_dim_qk: int, head_dim_v: int) -> None:
    """UnsupportedError unless both are multiples of 8 up to MAX_HEAD_DIM: what 16-byte copies and the tiles cover."""
    dims = (head_dim_qk, head_dim_v)
    if any(d % 8 or not 8 <= d <= MAX_HEAD_DIM for d in dims):
        nearest = tuple(min(max(8, -(-d // 8) * 8), MAX_HEAD_DIM) for d in dims)
        raise UnsupportedError(f"head dims (head_dim_qk, head_dim_v) = {dims}",
                               allowed=f"multiples of 8 from 8 to {MAX_HEAD_DIM}",
                               nearest=f"{nearest}: pad q, k and v with zero columns and give softmax_scale")


def check_options(left: int, right: int, scale: float) -> None:
    if left < -1 or right < -1:
        raise UnsupportedError(f"window=({left}, {right})", where="window",
                               allowed="counts of keys from 0, or -1 for an unbounded side")
    if not (math.isfinite(scale) and scale > 0):
        raise UnsupportedError(f"softmax_scale={scale}", where="softmax_scale", allowed="finite, above 0",
                               nearest="negate q for a negative scale")


def check_out(out: torch.Tensor, shape: tuple[int, ...], q: torch.Tensor) -> None:
    if tuple(out.shape) != shape or out.dtype != q.dtype or out.device != q.device:
        raise UnsupportedError(f"out is {out.dtype} {tuple(out.shape)} on {out.device}", where="out",
                               allowed=f"{q.dtype} {shape} on {q.device}")
    if not is_aligned(out):
        raise UnsupportedError(f"out has strides {out.stride()} and starts at byte {out.data_ptr() % ALIGNMENT_BYTES} "
                               f"of 16", where="out", allowed="contiguous last dimension, rows 16-byte aligned",
                               next="leave out=None and copy the result")
