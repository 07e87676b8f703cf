"""What mla_decode and mla_schedule refuse: all that shapes, strides, dtypes and devices decide.

Each function yields problems in an order in which a check may rely on those before it.
"""
from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from flashgen.errors import UnsupportedError
from flashgen.runtime.ops import tensors
from flashgen.runtime.ops.arguments import check_tensor, number, require_tensors
from flashgen.runtime.ops.mla_decode.signature import MlaSchedule

MAX_SEQLEN_Q, MAX_HEADS = 8, 128
HEAD_DIMS_QK = (512, 576)


def raise_first(problems: Iterator[UnsupportedError]) -> None:
    for problem in problems:
        raise problem


def wrong_sizes(num_heads_q: int, seqlen_q: int) -> Iterator[UnsupportedError]:
    for name, size, most, advice in (("num_heads_q", num_heads_q, MAX_HEADS, "split the heads over calls"),
                                     ("seqlen_q", seqlen_q, MAX_SEQLEN_Q, "flashgen.attention takes longer queries")):
        if not 0 <= size <= most:
            yield UnsupportedError(f"{name} is {size}", where=name, allowed=f"1 to {most}", nearest=str(most),
                                   next=advice)


def check_call(q: Tensor, kv: Tensor, sink: Tensor | None) -> None:
    """What a look at the arguments shows, before anything is memoised."""
    if torch.is_grad_enabled() and (q.requires_grad or kv.requires_grad or (sink is not None and sink.requires_grad)):
        raise UnsupportedError("a gradient is asked for, and a decode has none", where="q, kv_cache, sink",
                               allowed="inputs without requires_grad", next="call it under torch.no_grad()")
    if not (q.is_cuda or q.is_cpu):
        tensors.check_device("q", q)


def wrong_queries(q: Tensor, kv: Tensor, sink: Tensor | None) -> Iterator[UnsupportedError]:
    """What a first look at q and the cache stumbles over. Raises itself for what is no tensor."""
    require_tensors(False, q=q, kv_cache=kv)
    require_tensors(True, sink=sink)
    if q.dim() != 4 or q.shape[-1] not in HEAD_DIMS_QK:
        yield UnsupportedError(f"q has shape {tuple(q.shape)}", where="q",
                               allowed="[batch, seqlen_q, num_heads_q, head_dim_qk], head_dim_qk "
                               + " or ".join(map(str, HEAD_DIMS_QK)))


def wrong_tensors(q: Tensor, kv: Tensor, seqlens: Tensor, page_table: Tensor | None,
                   sink: Tensor | None) -> Iterator[UnsupportedError]:
    paged = page_table is not None
    form = "[num_pages, page_size, head_dim_qk]" if paged else "[batch, seqlen_kv, head_dim_qk]"
    yield from wrong_queries(q, kv, sink)
    if kv.dim() not in (3, 4) or (kv.dim() == 4 and kv.shape[2] != 1) or kv.shape[-1] != q.shape[-1]:
        yield UnsupportedError(f"kv_cache has shape {tuple(kv.shape)} beside q's head_dim_qk {q.shape[-1]}",
                               where="kv_cache", allowed=f"{form}, or with a dimension of 1 before the last",
                               next="" if paged else "pages need a page_table")
    for name, t in (("q", q), ("kv_cache", kv)):
        tensors.check_dtype(name, t, q)
        if t.device != q.device:
            yield UnsupportedError(f"{name} is on {t.device}, q on {q.device}", where=name, allowed="one device")
    yield from wrong_sizes(q.shape[2], q.shape[1])
    yield from wrong_lengths(seqlens, q)
    if page_table is not None:
        yield from _wrong_ints("page_table", page_table, 2, "[batch, max_pages]", q)
    elif kv.shape[0] != q.shape[0]:
        yield UnsupportedError(f"kv_cache has {kv.shape[0]} requests, q {q.shape[0]}", where="kv_cache", allowed=form,
                               next="pages need a page_table")
    if max(kv.shape[:2]) >= tensors.MAX_LENGTH:
        yield UnsupportedError(f"kv_cache has shape {tuple(kv.shape)}", where="kv_cache",
                               allowed=f"fewer than {tensors.MAX_LENGTH} pages, and rows in each")
    if not tensors.is_aligned(kv):
        yield UnsupportedError(f"kv_cache has strides {kv.stride()} and starts at byte "
                               f"{kv.data_ptr() % tensors.ALIGNMENT_BYTES} of 16; it is never copied", where="kv_cache",
                               allowed="contiguous last dimension, rows and pages 16-byte aligned")
    if sink is not None and (sink.dtype != torch.float32 or sink.shape != q.shape[2:3] or sink.device != q.device
                             or not sink.is_contiguous()):
        yield UnsupportedError(f"sink is {sink.dtype} {tuple(sink.shape)} on {sink.device}", where="sink",
                               allowed=f"contiguous float32 [num_heads_q] = [{q.shape[2]}] on {q.device}",
                               next=f"sink.to({q.device.type!r}, torch.float32).contiguous()"
                               if sink.shape == q.shape[2:3] else "")


def wrong_lengths(seqlens: Tensor, q: Tensor | None) -> Iterator[UnsupportedError]:
    check_tensor("seqlens_kv", seqlens, "a tensor, [batch] int32")
    yield from _wrong_ints("seqlens_kv", seqlens, 1, "[batch]", q)
    if not seqlens.is_contiguous():
        yield UnsupportedError(f"seqlens_kv has stride {seqlens.stride(0)}", where="seqlens_kv",
                               allowed="a contiguous tensor")


def _wrong_ints(name: str, t: Tensor, rank: int, form: str, q: Tensor | None) -> Iterator[UnsupportedError]:
    if (t.dtype != torch.int32 or t.dim() != rank
            or (q is not None and (t.shape[0] != q.shape[0] or t.device != q.device))):
        beside = "" if q is None else f", batch {q.shape[0]}, on {q.device}"
        yield UnsupportedError(f"{name} is {t.dtype} {tuple(t.shape)} on {t.device}", where=name,
                               allowed=f"int32 {form}{beside}")


def wrong_schedule(schedule: MlaSchedule, q: Tensor) -> Iterator[UnsupportedError]:
    if not hasattr(schedule, "rows"):
        yield UnsupportedError(f"schedule is of type {type(schedule).__name__}", where="schedule",
                               allowed="what flashgen.mla_schedule returns, or None")
    sizes = tuple(number(f"schedule.{name}", getattr(schedule, name))
                  for name in ("batch", "seqlen_q", "num_heads_q"))
    if q.dim() == 4 and sizes != tuple(q.shape[:3]):
        yield UnsupportedError(f"schedule is for batch {schedule.batch}, seqlen_q {schedule.seqlen_q}, num_heads_q "
                               f"{schedule.num_heads_q}; q has shape {tuple(q.shape)}", where="schedule",
                               allowed="one of the same sizes, and lengths",
                               next="flashgen.mla_schedule(seqlens_kv, num_heads_q, seqlen_q)")


def wrong_rows(rows: Tensor, q: Tensor, shape: tuple[int, ...]) -> Iterator[UnsupportedError]:
    if rows.dtype != torch.int32 or rows.shape != shape or rows.device != q.device or not rows.is_contiguous():
        yield UnsupportedError(f"schedule holds {rows.dtype} {tuple(rows.shape)} on {rows.device}", where="schedule",
                               allowed=f"int32 {shape} on {q.device}: what flashgen.mla_schedule makes for this device")
