"""flashgen.mla_decode, a few new queries over a latent cache: what it refuses, which kernels serve it, and the program
that it launches (front.py has the rest).

Which block does what depends on the lengths, which lie in device memory: a kernel works it out (schedule.py), so that
no call waits for the device, and a CUDA graph may be replayed with other lengths.
"""
from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from flashgen.codegen.families.registry import program_of
from flashgen.codegen.families.shared.launch import DecodeSizes, QuerySizes
from flashgen.errors import UnsupportedError
from flashgen.runtime.launch.tensor_map import fits_maps
from flashgen.runtime.ops import front
from flashgen.runtime.ops.arguments import RAW_ERRORS, flag, whole
from flashgen.runtime.ops.front import Arguments, Ready, kernel_for
from flashgen.runtime.ops.mla_decode.checks import (
    check_call,
    raise_first,
    wrong_queries,
    wrong_rows,
    wrong_schedule,
    wrong_tensors,
)
from flashgen.runtime.ops.mla_decode.schedule import schedule_kernel
from flashgen.runtime.ops.mla_decode.signature import HEAD_DIM_V, MLA_DECODE, MlaSchedule
from flashgen.runtime.ops.signature import Options
from flashgen.runtime.ops.tensors import DTYPE_NAMES, check_out, check_scale, is_aligned, scale_number
from flashgen.runtime.select.selector import Wanted

if TYPE_CHECKING:
    from flashgen.codegen.spec.spec import Spec

BOX_ROWS = 64  # pages of a multiple of it can be copied as boxes


def mla_decode(q: Tensor, kv_cache: Tensor, seqlens_kv: Tensor | int, *, page_table: Tensor | None = None,
               causal: bool = False, softmax_scale: float | None = None, sink: Tensor | None = None,
               schedule: MlaSchedule | None = None, head_dim_v: int = HEAD_DIM_V, return_lse: bool = False,
               out: Tensor | None = None, lse_counts_sink: bool = True,
               spec: str | Path | Spec | None = None) -> Tensor | tuple[Tensor, Tensor]:
    """Multi-head latent attention of a few new queries over a cache: softmax(softmax_scale * q k^T + mask) v, where the
    value of a key is its first head_dim_v columns and all heads share one cache.

    Args:
        q: [batch, seqlen_q, num_heads_q, head_dim_qk], bf16 or fp16; seqlen_q 1 to 8, num_heads_q 1 to 128, head_dim_qk
            576, or 512 over a dense cache. On a Hopper device, or on the CPU, where the kernels run emulated.
        kv_cache: pages [num_pages, page_size, head_dim_qk] of any size, or without a page_table
            [batch, seqlen_kv, head_dim_qk]; with or without a dimension of 1 before the last. Rows and pages 16-byte
            aligned; it is never copied. Pages of 64, 128, ... rows are the fastest.
        seqlens_kv: [batch] int32 on the device: keys of each request, the new ones included; or one number for all,
            which the host knows.
        page_table: [batch, max_pages] int32: pages of each request. Nothing past ceil(length / page_size) is used.
        causal: query i of a request sees its first seqlens_kv - seqlen_q + 1 + i keys, and not all of them.
        softmax_scale: as flashgen.attention has it.
        sink: [num_heads_q] fp32, a score that joins each head's denominator, and lse, and no value.
        schedule: of mla_schedule, for the same lengths; by default the call makes its own.
        return_lse: also return the natural log of the sum of exp(scores), fp32 [batch, num_heads_q, seqlen_q].
        out: [batch, seqlen_q, num_heads_q, head_dim_v], contiguous; written in place and returned. It shares
            no memory with q or kv_cache.
        lse_counts_sink: False leaves the sink out of lse.
        spec: a spec file, the name of a shipped one, or a Spec, to restrict the choice of kernel.

    A query that sees no key gets out 0 and lse -inf (with a sink, the sink). Nothing past a request's length matters,
    even if it is NaN; a length past the table's or the cache's end gives wrong rows, never a stray access.

    Raises as flashgen.attention.
    """
    try:
        check_call(q, kv_cache, sink)
        batch = q.shape[0]
    except RAW_ERRORS:
        raise_first(wrong_queries(q, kv_cache, sink))
        raise
    if head_dim_v is not HEAD_DIM_V:
        whole("head_dim_v", head_dim_v, HEAD_DIM_V, HEAD_DIM_V, str(HEAD_DIM_V))
    if not isinstance(seqlens_kv, Tensor) or seqlens_kv.dim() == 0:
        length = whole("seqlens_kv", seqlens_kv, 0, allowed="[batch] int32, or one number from 0 for all")
        seqlens_kv = torch.full((batch,), length, dtype=torch.int32, device=q.device)
    if schedule is not None:
        raise_first(wrong_schedule(schedule, q))
    handle = ""
    if spec is not None:
        from flashgen.runtime.select.handles import handle_of  # bundles serve without specs

        handle = handle_of(spec)
    out, lse = front.call(OPERATION, (q, kv_cache, seqlens_kv, page_table, sink, schedule and schedule.rows),
                          (causal, softmax_scale, lse_counts_sink, handle), (), out, return_lse)
    return out if lse is None else (out, lse)


class Decode(front.Operation):
    signature = MLA_DECODE

    def read(self, options: Options) -> Options:
        causal, scale, counts_sink, spec = options
        return flag("causal", causal), scale_number(scale), flag("lse_counts_sink", counts_sink), spec

    def prepare(self, call: Arguments) -> Ready:
        q, kv, seqlens, page_table, sink, rows = call.tensors
        causal, scale, counts_sink, spec = call.options
        raise_first(wrong_tensors(q, kv, seqlens, page_table, sink))
        check_scale(scale)
        out_shape = MLA_DECODE.shapes(call.tensors, call.options)[0]
        if call.out is not None:
            check_out(call.out, out_shape, q)
            if not call.out.is_contiguous():
                raise UnsupportedError(f"out has strides {call.out.stride()}", where="out",
                                       allowed="a contiguous tensor", next="leave out=None and copy the result")
        paged = page_table is not None
        max_pages = page_table.shape[1] if paged else 0
        if 0 in out_shape or 0 in kv.shape or (paged and not max_pages):
            return Ready(lse=4 if sink is not None and counts_sink else None)
        kernel = kernel_for(_wanted(q, kv, paged, spec), q.device)
        copies = (() if _flat_rows(q) else (0,)) + (() if not paged or page_table.is_contiguous() else (3,))
        if copies:
            return Ready(copies=copies)
        queries = QuerySizes(q.shape[0], q.shape[1], q.shape[2])
        kernels = {"decode": kernel, "schedule": schedule_kernel(q.device)}
        sizes = DecodeSizes(queries, kv.shape[0], kv.shape[1], max_pages, _strides(q, kv), scale, causal, counts_sink)
        program = program_of(kernel.plan, sizes, kernel.num_sms, kernels["schedule"].plan)
        if rows is not None:
            raise_first(wrong_rows(rows, q, program.buffer("schedule").shape))
        return Ready(program, kernels)


OPERATION = Decode()


def _wanted(q: Tensor, kv: Tensor, paged: bool, spec: str) -> Wanted:
    """UnsupportedError for a dense cache that no tensor map describes."""
    boxes = fits_maps(kv.shape, kv.stride(), kv.element_size())
    if not (boxes or paged):
        raise UnsupportedError(f"kv_cache {tuple(kv.shape)} has strides {kv.stride()}: rows or requests overlap, or "
                               "lie 2^40 bytes apart", where="kv_cache", allowed="what a tensor map can describe",
                               next="give a page_table: pages of any stride will do")
    unit = None if not paged else BOX_ROWS if boxes and kv.shape[1] % BOX_ROWS == 0 else 1
    return Wanted(DTYPE_NAMES[q.dtype], q.shape[-1], HEAD_DIM_V, False, False, "paged" if paged else "dense", True,
                  spec, op="mla_decode", traits=(("page_size", unit),))


def _flat_rows(q: Tensor) -> bool:
    """Whether the kernels can read q as it lies: (token, head) as one dimension of 16-byte aligned rows."""
    tokens, heads = q.shape[1:3]
    flat = tokens == 1 or heads == 1 or q.stride(1) == heads * q.stride(2)
    return flat and is_aligned(q) and fits_maps(q.shape, q.stride(), q.element_size())


def _strides(q: Tensor, kv: Tensor) -> dict[str, int]:
    """In elements. Those of dimensions of size 1 mean nothing, and are as if the tensor were contiguous."""
    (batch, tokens, heads, head_dim), (pages, page_size) = q.shape, kv.shape[:2]
    row = head_dim if tokens == heads == 1 else q.stride(1 if heads == 1 else 2)
    kv_row = head_dim if page_size == 1 else kv.stride(1)
    return {"q_outer_stride": tokens * heads * row if batch == 1 else q.stride(0), "q_row_stride": row,
            "kv_outer_stride": page_size * kv_row if pages == 1 else kv.stride(0), "kv_row_stride": kv_row}
