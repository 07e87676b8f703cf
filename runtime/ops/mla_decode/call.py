"""flashgen.mla_decode, flashgen.mla_schedule and what their torch ops run: a few new queries over a latent cache.

Built as ops/attention is. Which block does what depends on the lengths, which lie in device memory: a kernel works it
out, so that no call waits for the device, and a CUDA graph may be replayed with other lengths.
"""
from __future__ import annotations

import math
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from flashgen.codegen.families.flashmla.launch import DecodeSizes, QuerySizes
from flashgen.codegen.families.registry import program_of
from flashgen.errors import UnsupportedError
from flashgen.log import CHATTER, logger
from flashgen.runtime.launch.driver import api
from flashgen.runtime.launch.kernel import Kernel
from flashgen.runtime.launch.program import bind
from flashgen.runtime.launch.tensor_map import fits_maps
from flashgen.runtime.ops.arguments import RAW_ERRORS, flag, same, whole
from flashgen.runtime.ops.attention import call as ops
from flashgen.runtime.ops.attention import checks
from flashgen.runtime.ops.mla_decode.checks import (
    HEAD_DIM_V,
    check_call,
    check_types,
    raise_first,
    wrong_lengths,
    wrong_queries,
    wrong_rows,
    wrong_schedule,
    wrong_sizes,
    wrong_tensors,
)
from flashgen.runtime.ops.torch_ops import DECODE, DECODE_DYNAMIC, SCHEDULE, all_static, as_numbers
from flashgen.runtime.select.handles import handle_of
from flashgen.runtime.select.lookup import EMULATED, registry
from flashgen.runtime.select.selector import Wanted

if TYPE_CHECKING:
    from flashgen.codegen.spec.spec import Spec
    from flashgen.runtime.emulator.kernel import EmulatedKernel

BOX_ROWS = 64          # pages of a multiple of it can be copied as boxes
TENSORS = ("q", "kv", "out", "lse", "page_table", "seqlens", "sink", "schedule")


class MlaSchedule(NamedTuple):
    """Which block of a decode does what, for one set of lengths; for every layer and call that has them."""

    rows: Tensor  # int32, on the device
    batch: int
    num_heads_q: int
    seqlen_q: int


def mla_schedule(seqlens_kv: Tensor, num_heads_q: int, seqlen_q: int = 1) -> MlaSchedule:
    """Work out, on the device, how the blocks of a decode with these lengths share the work.

    Args:
        seqlens_kv: [batch] int32, keys of each request, as mla_decode takes them.
        num_heads_q, seqlen_q: of the queries.

    Give it to each mla_decode with the same lengths, heads and seqlen_q: such a call starts one kernel less. Raises as
    mla_decode.
    """
    num_heads_q, seqlen_q = whole("num_heads_q", num_heads_q, 0), whole("seqlen_q", seqlen_q, 0)
    raise_first(wrong_sizes(num_heads_q, seqlen_q))
    raise_first(wrong_lengths(seqlens_kv, None))
    checks.check_device("seqlens_kv", seqlens_kv)
    if ops.FORCE_CPU and seqlens_kv.is_cuda:
        rows = run_schedule(seqlens_kv.cpu(), num_heads_q, seqlen_q).to(seqlens_kv.device)
    elif is_dynamo_compiling() or not ops._nobody_listens(seqlens_kv, seqlens_kv, seqlens_kv):
        rows = SCHEDULE(seqlens_kv, num_heads_q, seqlen_q)
    else:
        rows = run_schedule(seqlens_kv, num_heads_q, seqlen_q)
    return MlaSchedule(rows, seqlens_kv.shape[0], num_heads_q, seqlen_q)


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
        batch, scale = q.shape[0], q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
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
    if ops.FORCE_CPU and q.is_cuda:
        return _on_cpu(q, kv_cache, seqlens_kv, page_table, sink, return_lse, out, causal=causal, spec=spec,
                       softmax_scale=softmax_scale, lse_counts_sink=lse_counts_sink)
    options = (q, kv_cache, seqlens_kv, page_table, sink, None if schedule is None else schedule.rows, causal, scale,
               lse_counts_sink, "" if spec is None else handle_of(spec))
    if is_dynamo_compiling() or not ops._nobody_listens(q, kv_cache, seqlens_kv):
        return _dispatch(*options, out, return_lse, softmax_scale is None)
    out, lse = _run(*options, out, return_lse)
    return (out, lse) if return_lse else out


def _dispatch(  # type: ignore[no-untyped-def]
        q, kv, seqlens, page_table, sink, rows, causal, scale, counts_sink, spec, out, want_lse, is_default_scale):
    """The call through torch's dispatcher, for whoever wants to see it. Its schemas take plain types alone."""
    given = DECODE
    check_types(q, kv, seqlens, page_table, sink, rows, out)
    causal, scale, counts_sink, want_lse = _read(causal, scale, counts_sink, want_lse)
    if is_dynamo_compiling() and not (is_default_scale or all_static(scale)):
        given, scale = DECODE_DYNAMIC, as_numbers(scale)
    return given.call((q, kv, seqlens, page_table, sink, rows, causal, scale, counts_sink, spec), out, want_lse)


def run_op(  # type: ignore[no-untyped-def]
        out, want_lse, q, kv, seqlens, page_table, sink, rows, causal, scale, counts_sink, spec):
    """_run for an op. `scale` is a tensor of numbers in the ops that take one."""
    if isinstance(scale, Tensor):
        scale = scale.item()
    return _run(q, kv, seqlens, page_table, sink, rows, causal, scale, counts_sink, spec, out, want_lse)


def _on_cpu(q, kv, seqlens, page_table, sink, want_lse, out, **options):  # type: ignore[no-untyped-def]
    """The call with everything on the CPU, and its result back where the arguments are. It makes its own schedule."""
    page_table, sink = (t if t is None else t.cpu() for t in (page_table, sink))
    result, lse = mla_decode(q.cpu(), kv.cpu(), seqlens.cpu(), page_table=page_table, sink=sink, return_lse=True,
                             **options)
    result = result.to(q.device) if out is None else out.copy_(result)
    return (result, lse.to(q.device)) if want_lse else result


# ---- what a call is made of

class _Call(NamedTuple):
    """All that one combination of shapes, strides and options fixes."""

    generation: int
    copies: tuple[bool, bool]  # of q and of page_table
    out_shape: tuple[int, ...]
    lse_shape: tuple[int, ...]
    launch: Any = None  # a bound program; None: no key can be there, or no query
    extents: tuple[int, ...] = ()  # bytes of q, the cache and the caller's out


class _Memo(threading.local):
    def __init__(self) -> None:
        self.calls: dict[tuple, _Call] = {}
        self.schedules: dict[tuple, tuple[int, tuple[int, ...], Any]] = {}


_memo = _Memo()


def _run(  # type: ignore[no-untyped-def]
        q, kv, seqlens, page_table, sink, rows, causal, scale, counts_sink, spec, out, want_lse):
    """(out, lse or None). `out` None: allocated here."""
    wrong = None
    try:
        device_index, q_pointer, kv_pointer = q.get_device(), q.data_ptr(), kv.data_ptr()
        key = (q.shape, kv.shape, q.stride(), kv.stride(), q.dtype, kv.dtype, device_index, kv.get_device(),
               q_pointer & 15, kv_pointer & 15, causal, scale, counts_sink, spec, want_lse, _form(seqlens),
               _form(page_table), _form(sink), _form(rows), None if out is None else (_form(out), out.data_ptr() & 15))
        call = _memo.calls.get(key)
    except RAW_ERRORS as error:  # an argument that makes no key, such as a list or a sparse tensor
        call, wrong = None, error
    if call is None or call.generation != registry.generation:
        check_types(q, kv, seqlens, page_table, sink, rows, out)
        found = _read(causal, scale, counts_sink, want_lse)
        if not same(found, (causal, scale, counts_sink, want_lse)):
            return _run(q, kv, seqlens, page_table, sink, rows, *found[:3], spec, out, found[3])
        if wrong is not None:
            raise wrong
        call = _prepare(q, kv, seqlens, page_table, sink, rows, causal, scale, counts_sink, spec, out)
        if device_index >= 0:  # an emulated launch takes so long that preparing it anew costs nothing
            _remember(_memo.calls, key, call)
    if out is None:
        out = q.new_empty(call.out_shape)
    else:
        begin, (q_bytes, kv_bytes, out_bytes) = out.data_ptr(), call.extents
        if begin - q_bytes < q_pointer < begin + out_bytes or begin - kv_bytes < kv_pointer < begin + out_bytes:
            checks.check_shared(out, q=q, kv_cache=kv)
    lse = q.new_empty(call.lse_shape, dtype=torch.float32) if want_lse else None
    if call.launch is None:
        out.zero_()
        if lse is not None:
            lse.fill_(-math.inf) if sink is None or not counts_sink else lse.copy_(sink[:, None].expand_as(lse))
        return out, lse
    q, page_table = (t.clone(memory_format=torch.contiguous_format) if copy else t
                     for t, copy in zip((q, page_table), call.copies, strict=True))
    tensors = (q, kv, out, lse, page_table, seqlens, sink) if rows is None else (
        q, kv, out, lse, page_table, seqlens, sink, rows)
    _launch(call.launch, device_index, TENSORS, tensors)
    return out, lse


def _read(causal: Any, scale: Any, counts_sink: Any, want_lse: Any) -> tuple[bool, float, bool, bool]:
    """The four as bool, float, bool and bool; UnsupportedError for what they are not."""
    return (flag("causal", causal), checks.scale_number(scale), flag("lse_counts_sink", counts_sink),
            flag("return_lse", want_lse))


def _form(t):  # type: ignore[no-untyped-def]
    """What decides whether a kernel takes a tensor, but for its values."""
    return None if t is None else (t.shape, t.stride(), t.dtype, t.get_device())


def _remember(memo: dict[tuple, Any], key: tuple, value: Any) -> None:
    if len(memo) >= ops.MEMO_LIMIT:
        memo.clear()
    memo[key] = value


def _launch(launch, device_index: int, names, tensors) -> None:  # type: ignore[no-untyped-def]
    if device_index < 0:
        launch(dict(zip(names, tensors, strict=False)))
        return
    addresses = [0 if t is None else t.data_ptr() for t in tensors]
    if torch._C._cuda_getDevice() == device_index:
        launch(ops._current_stream(device_index), addresses)
    else:
        with torch.cuda.device(device_index):
            launch(ops._current_stream(device_index), addresses)


def run_schedule(seqlens: Tensor, num_heads_q: int, seqlen_q: int) -> Tensor:
    """The rows of a schedule. Nothing is launched where no request is there."""
    device_index = seqlens.get_device()
    key = (seqlens.shape[0], num_heads_q, seqlen_q, device_index)
    found = _memo.schedules.get(key)
    if found is None or found[0] != registry.generation:
        kernel = _schedule_kernel(seqlens.device)
        program = program_of(kernel.plan, QuerySizes(key[0], seqlen_q, num_heads_q), kernel.num_sms)
        names = ("seqlens", "schedule")
        found = registry.generation, program.buffer("schedule").shape, (
            bind(program.given({"schedule"}), {"schedule": kernel}, names, seqlens.device) if key[0] else None)
        if device_index >= 0:
            _remember(_memo.schedules, key, found)
    rows = seqlens.new_empty(found[1])
    if found[2] is not None:
        _launch(found[2], device_index, ("seqlens", "schedule"), (seqlens, rows))
    return rows


def _schedule_kernel(device: torch.device) -> Kernel | EmulatedKernel:
    return _kernel(Wanted("bf16", 576, 512, False, False, "paged", True, op="mla_schedule",
                          traits=(("page_size", 64),)), device)


def _kernel(wanted: Wanted, device: torch.device) -> Kernel | EmulatedKernel:
    if device.type == "cpu":
        return registry.kernel(wanted, EMULATED)
    api()  # refuses a fork by name, before torch and the driver meet it
    with torch.cuda.device(device):
        torch.cuda.current_stream()  # makes this thread's context torch's
        return registry.kernel(wanted, device.index)


def _prepare(  # type: ignore[no-untyped-def]
        q, kv, seqlens, page_table, sink, rows, causal, scale, counts_sink, spec, out) -> _Call:
    """Checks everything about a call that its shapes, strides and options decide, and finds its kernel."""
    raise_first(wrong_tensors(q, kv, seqlens, page_table, sink))
    checks.check_options(-1, -1, scale)
    batch, seqlen_q, num_heads_q, head_dim_qk = q.shape
    out_shape, lse_shape = (*q.shape[:-1], HEAD_DIM_V), (batch, num_heads_q, seqlen_q)
    if out is not None:
        checks.check_out(out, out_shape, q)
        if not out.is_contiguous():
            raise UnsupportedError(f"out has strides {out.stride()}", where="out", allowed="a contiguous tensor",
                                   next="leave out=None and copy the result")
    spans = () if out is None else checks.extents(q, kv, out)
    paged = page_table is not None
    page_size, max_pages = kv.shape[1], page_table.shape[1] if paged else 0
    if 0 in out_shape or 0 in kv.shape or (paged and not max_pages):
        return _Call(registry.generation, (False, False), out_shape, lse_shape, extents=spans)
    boxes = fits_maps(kv.shape, kv.stride(), kv.element_size())
    if not (boxes or paged):
        raise UnsupportedError(f"kv_cache {tuple(kv.shape)} has strides {kv.stride()}: rows or requests overlap, or "
                               "lie 2^40 bytes apart", where="kv_cache", allowed="what a tensor map can describe",
                               next="give a page_table: pages of any stride will do")
    unit = None if not paged else BOX_ROWS if boxes and page_size % BOX_ROWS == 0 else 1
    wanted = Wanted(ops.DTYPE_NAMES[q.dtype], head_dim_qk, HEAD_DIM_V, False, False, "paged" if paged else "dense",
                    True, spec, op="mla_decode", traits=(("page_size", unit),))
    kernel = _kernel(wanted, q.device)
    copies = (not _flat_rows(q), paged and not page_table.is_contiguous())
    if any(copies):
        logger().log(CHATTER, "copied first, since kernels cannot read them as they lie: %s",
                     ", ".join(name for name, copy in zip(("q", "page_table"), copies, strict=True) if copy))
    sizes = DecodeSizes(QuerySizes(batch, seqlen_q, num_heads_q), kv.shape[0], page_size, max_pages,
                        _strides(q, kv, copies[0]), scale, causal, counts_sink)
    kernels = {"decode": kernel, "schedule": _schedule_kernel(q.device)}
    program = program_of(kernel.plan, sizes, kernel.num_sms, kernels["schedule"].plan)
    if rows is not None:
        raise_first(wrong_rows(rows, q, program.buffer("schedule").shape))
        program = program.given({"schedule"})
    launch = bind(program, kernels, TENSORS[:7 + (rows is not None)], q.device)
    return _Call(registry.generation, copies, out_shape, lse_shape, launch, spans)


def _flat_rows(q: Tensor) -> bool:
    """Whether the kernels can read q as it lies: (token, head) as one dimension of 16-byte aligned rows."""
    tokens, heads = q.shape[1:3]
    flat = tokens == 1 or heads == 1 or q.stride(1) == heads * q.stride(2)
    return flat and checks.is_aligned(q) and fits_maps(q.shape, q.stride(), q.element_size())


def _strides(q: Tensor, kv: Tensor, copied: bool) -> dict[str, int]:
    """In elements. Those of dimensions of size 1 mean nothing, and are as if the tensor were contiguous."""
    (batch, tokens, heads, head_dim), (pages, page_size) = q.shape, kv.shape[:2]
    row = head_dim if copied or tokens == heads == 1 else q.stride(1 if heads == 1 else 2)
    kv_row = head_dim if page_size == 1 else kv.stride(1)
    return {"q_outer_stride": tokens * heads * row if copied or batch == 1 else q.stride(0), "q_row_stride": row,
            "kv_outer_stride": page_size * kv_row if pages == 1 else kv.stride(0), "kv_row_stride": kv_row}


def fake_schedule(seqlens: Tensor, num_heads_q: int, seqlen_q: int) -> Tensor:
    """As run_schedule, for tensors without elements."""
    kernel = _schedule_kernel(seqlens.device)
    program = program_of(kernel.plan, QuerySizes(seqlens.shape[0], seqlen_q, num_heads_q), kernel.num_sms)
    return seqlens.new_empty(program.buffer("schedule").shape)
