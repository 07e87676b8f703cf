"""flashgen.attention, and what its torch ops (torch_ops.py) run.

What a call needs beyond its pointers is worked out once per combination of shapes, strides and options, and memoised
per thread.
"""
from __future__ import annotations

import math
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling

from flashgen.codegen.expr.tree import TensorParam
from flashgen.codegen.families.registry import program_of
from flashgen.codegen.families.shared.launch import Sizes
from flashgen.codegen.spec.expressions import SINK
from flashgen.errors import UnsupportedError
from flashgen.log import CHATTER, logger
from flashgen.runtime.launch.driver import api
from flashgen.runtime.launch.kernel import Kernel
from flashgen.runtime.launch.program import bind as bind_program
from flashgen.runtime.launch.tensor_map import fits_maps
from flashgen.runtime.ops.arguments import RAW_ERRORS, check_unread, pair, require_tensors, same
from flashgen.runtime.ops.attention.checks import (
    CAUSAL_CODES,
    DTYPE_NAMES,
    WINDOW_ALLOWED,
    causal_code,
    check_call,
    check_head_dims,
    check_options,
    check_out,
    check_prefix_sums,
    check_qkv,
    check_shared,
    default_scale,
    extents,
    is_aligned,
    read_options,
    strides,
)
from flashgen.runtime.ops.torch_ops import ATTENTION, ATTENTION_DYNAMIC, all_static, as_numbers
from flashgen.runtime.ops.wrapped import refuse_wrapped
from flashgen.runtime.select.handles import SEPARATOR, handle_of
from flashgen.runtime.select.lookup import EMULATED, form_of, registry
from flashgen.runtime.select.params import bind, check_tensors, unbound
from flashgen.runtime.select.selector import Wanted
from flashgen.runtime.select.variant import Variant

if TYPE_CHECKING:
    from flashgen.codegen.spec.spec import Spec
    from flashgen.runtime.emulator.kernel import EmulatedKernel

POINTERS = ("q", "k", "v", "out", "lse", "cu_seqlens_q", "cu_seqlens_kv")  # then tensors of params, "user_<name>"
MEMO_LIMIT = 4096          # varlen calls bring ever new totals
FORCE_CPU = os.environ.get("FLASHGEN_DEVICE") == "cpu"  # read once: this is on the path of every call


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool | str = False,
              window: tuple[int, int] = (-1, -1), softmax_scale: float | None = None, return_lse: bool = False,
              cu_seqlens_q: torch.Tensor | None = None, cu_seqlens_kv: torch.Tensor | None = None,
              max_seqlen_q: int | None = None, max_seqlen_kv: int | None = None, out: torch.Tensor | None = None,
              spec: str | Path | Spec | Variant | None = None,
              params: Mapping[str, Any] | None = None) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
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
        scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    except RAW_ERRORS:
        code, scale = causal_code(causal), default_scale(q, k, v, cu_seqlens_q, cu_seqlens_kv, softmax_scale)
    if type(window) is not tuple or len(window) != 2:
        window = pair("window", window, WINDOW_ALLOWED)
    if max_seqlen_q is not None or max_seqlen_kv is not None:
        check_unread(max_seqlen_q, max_seqlen_kv)
    if FORCE_CPU and q.is_cuda:
        return _on_cpu(q, k, v, causal=causal, window=window, softmax_scale=softmax_scale, return_lse=return_lse,
                       cu_seqlens_q=cu_seqlens_q, cu_seqlens_kv=cu_seqlens_kv, out=out, spec=spec, params=params)
    text, bound = "", None
    if spec is not None or params is not None:
        text, bound = _bound(spec, params)
    options = (cu_seqlens_q, cu_seqlens_kv, code, window[0], window[1], scale, text, bound)
    if is_dynamo_compiling() or not _nobody_listens(q, k, v):
        return _dispatch(q, k, v, *options, out, return_lse, softmax_scale is None)
    out, lse = _run(q, k, v, *options, out, return_lse)
    return (out, lse) if return_lse else out


def _bound(spec, params):  # type: ignore[no-untyped-def]
    """(the text that names the spec, the values of its parameters) of a call."""
    if spec is None:
        if isinstance(params, Mapping) and not params:
            return "", None
        raise UnsupportedError("params without a spec that declares them", where="params", allowed="spec=... beside it",
                               next="flashgen.variant(score=..., params=...) makes one")
    form = form_of(spec.handle if isinstance(spec, Variant) else handle_of(spec))
    return form.text, bind(form, params)


def _dispatch(  # type: ignore[no-untyped-def]
        q, k, v, cu_q, cu_kv, causal, left, right, scale, text, bound, out, want_lse, is_default_scale):
    """The call through torch's dispatcher, for whoever wants to see it. Its schemas take plain types alone."""
    require_tensors(False, q=q, k=k, v=v)
    require_tensors(True, cu_seqlens_q=cu_q, cu_seqlens_kv=cu_kv, out=out)
    left, right, scale, want_lse = read_options(left, right, scale, want_lse)
    ints, floats, tensors = bound or ((), (), ())
    ops = ATTENTION
    if not is_dynamo_compiling():
        refuse_wrapped(**_named(bound))
    elif not all_static(*floats) or not (is_default_scale or all_static(scale)):
        ops, scale, floats = ATTENTION_DYNAMIC, as_numbers(scale, *floats), ()
    return ops.call((q, k, v, cu_q, cu_kv, causal, left, right, scale, text, ints, floats, tensors), out, want_lse)


def run_op(  # type: ignore[no-untyped-def]
        out, want_lse, q, k, v, cu_q, cu_kv, causal, left, right, scale, text, ints=(), floats=(), tensors=None):
    """_run for an op. `scale` is a tensor of numbers in the ops that take one."""
    if isinstance(scale, torch.Tensor):
        scale, *floats = scale.tolist()
    bound = (tuple(ints), tuple(floats), tuple(tensors or ())) if ints or floats or tensors else None
    return _run(q, k, v, cu_q, cu_kv, causal, left, right, scale, text, bound, out, want_lse)


def _on_cpu(*tensors, out, **options):  # type: ignore[no-untyped-def]
    """The call with everything on the CPU, and its result back where the arguments are."""
    device = tensors[0].device
    options = {name: value.cpu() if isinstance(value, torch.Tensor) else value for name, value in options.items()}
    options["params"] = {name: value.cpu() if isinstance(value, torch.Tensor) else value
                         for name, value in (options.get("params") or {}).items()}
    result = attention(*(t.cpu() for t in tensors), **options)
    results = [t.to(device) for t in (result if isinstance(result, tuple) else (result,))]
    if out is not None:
        results[0] = out.copy_(results[0])
    return tuple(results) if options["return_lse"] else results[0]


def _nobody_listens(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether going through the dispatcher would do nothing but cost time: plain tensors, no mode that wants to see or
    replace the op (fake tensors, tracing, profiling by dispatch), no transform of torch.func, no forward-mode AD."""
    return (type(q) is type(k) is type(v) is torch.Tensor and not _dispatch_modes() and not _function_modes()
            and forward_ad._current_level < 0 and _transform_level() is None)


class _Call:
    """All that one combination of shapes, strides and options fixes: copies to make, what to allocate, the launch."""

    __slots__ = ("copies", "extents", "generation", "launch", "lse_shape", "names", "out_like_q", "out_shape", "sink")

    def __init__(self, copies: tuple[bool, ...] | None, out_shape: tuple[int, ...], lse_shape: tuple[int, ...],
                 launch: Any = None, out_like_q: bool = False, names: tuple[str, ...] = (), sink: bool = False) -> None:
        """`launch`: a bound program. `names`: of its tensors, in order. `sink`: the last parameter joins lse."""
        self.names, self.sink = names, sink
        self.copies, self.out_shape, self.lse_shape, self.launch = copies, out_shape, lse_shape, launch
        self.out_like_q = out_like_q
        self.extents: tuple[int, ...] = ()  # bytes of q, k, v and the caller's out
        self.generation = registry.generation


class _Memo(threading.local):
    def __init__(self) -> None:
        self.calls: dict[tuple, _Call] = {}


_memo = _Memo()
_dispatch_modes, _function_modes = torch._C._len_torch_dispatch_stack, torch._C._len_torch_function_stack
_transform_level = torch._C._functorch.maybe_current_level
_current_stream = torch._C._cuda_getCurrentRawStream if hasattr(torch._C, "_cuda_getCurrentRawStream") else (
    lambda index: torch.cuda.current_stream(index).cuda_stream)


def _run(  # type: ignore[no-untyped-def]
        q, k, v, cu_q, cu_kv, causal, left, right, scale, text, bound, out, want_lse):
    """(out, lse or None). `out` None: allocated here."""
    wrong = None
    try:
        q_pointer, k_pointer, v_pointer, device_index = q.data_ptr(), k.data_ptr(), v.data_ptr(), q.get_device()
        if not (q.dtype is k.dtype is v.dtype and device_index == k.get_device() == v.get_device()):
            check_qkv(q, k, v, cu_q, cu_kv)  # raises: the key below speaks of q's alone
        begin = 0 if out is None else out.data_ptr()
        key = (q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(), q.dtype, device_index, q_pointer & 15,
               k_pointer & 15, v_pointer & 15, causal, left, right, scale, text, want_lse,
               None if out is None else (out.shape, out.stride(), out.dtype, out.get_device(), begin & 15),
               None if cu_q is None else (cu_q.shape, cu_q.stride(), cu_q.dtype, cu_q.get_device(),
                                          cu_kv.shape, cu_kv.stride(), cu_kv.dtype, cu_kv.get_device()),
               None if bound is None else _bound_key(*bound))
        call = _memo.calls.get(key)
    except RAW_ERRORS as error:  # an argument that makes no key, such as a list or a sparse tensor
        call, wrong = None, error
    if call is None or call.generation != registry.generation:
        check_qkv(q, k, v, cu_q, cu_kv)
        require_tensors(True, out=out, **_named(bound))
        found = read_options(left, right, scale, want_lse)
        if not same(found, (left, right, scale, want_lse)):
            return _run(q, k, v, cu_q, cu_kv, causal, *found[:3], text, bound, out, found[3])
        if wrong is not None:
            raise wrong
        call = _prepare(q, k, v, cu_q, cu_kv, causal, left, right, scale, text, bound, out, want_lse)
        _keep(key, call, q, k, v, out)
    if call.copies is not None:
        q, k, v = (t.clone(memory_format=torch.contiguous_format) if copy else t
                   for t, copy in zip((q, k, v), call.copies, strict=True))
        return _run(q, k, v, cu_q, cu_kv, causal, left, right, scale, text, bound, out, want_lse)
    if out is None:
        out = torch.empty_like(q) if call.out_like_q else q.new_empty(call.out_shape)  # the first is faster
    else:
        q_bytes, k_bytes, v_bytes, out_bytes = call.extents
        end = begin + out_bytes
        if (begin - q_bytes < q_pointer < end or begin - k_bytes < k_pointer < end
                or begin - v_bytes < v_pointer < end):
            check_shared(out, q=q, k=k, v=v)
    lse = q.new_empty(call.lse_shape, dtype=torch.float32) if want_lse else None
    if call.launch is None:  # no key to look at, or no query
        out.zero_()
        if lse is not None:
            lse.copy_(bound[2][-1][:, None]) if call.sink else lse.fill_(-math.inf)
        return out, lse
    users = () if bound is None else bound[2]
    if device_index < 0:
        call.launch(dict(zip(call.names, (q, k, v, out, lse, cu_q, cu_kv, *users), strict=True)))
        return out, lse
    addresses = [q_pointer, k_pointer, v_pointer, out.data_ptr(), 0 if lse is None else lse.data_ptr()]
    addresses += (0, 0) if cu_q is None else (cu_q.data_ptr(), cu_kv.data_ptr())
    if users:
        addresses += [t.data_ptr() for t in users]
    if torch._C._cuda_getDevice() == device_index:
        call.launch(_current_stream(device_index), addresses)
    else:
        with torch.cuda.device(device_index):
            call.launch(_current_stream(device_index), addresses)
    return out, lse


def _named(bound):  # type: ignore[no-untyped-def]
    return {f"tensor {place} of params": t for place, t in enumerate(bound[2] if bound else (), 1)}


def _bound_key(ints, floats, tensors):  # type: ignore[no-untyped-def]
    """What the values of parameters decide. As text, since 0.0 equals -0.0 and kernels tell them apart."""
    return ints, floats and str(floats), tuple((t.shape, t.stride(), t.dtype, t.get_device()) for t in tensors)


def _keep(key: tuple, call: _Call, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor | None) -> None:
    """Memoises a call. An emulated launch takes so long that preparing it anew costs nothing."""
    call.extents = () if out is None else extents(q, k, v, out)
    if q.is_cuda:
        if len(_memo.calls) >= MEMO_LIMIT:
            _memo.calls.clear()
        _memo.calls[key] = call


def _prepare(  # type: ignore[no-untyped-def]
        q, k, v, cu_q, cu_kv, causal, left, right, scale, text, bound, out, want_lse) -> _Call:
    """Checks everything about a call that its shapes, strides and options decide, and finds its kernel."""
    varlen = cu_q is not None
    if varlen and q.is_cpu:
        check_prefix_sums(cu_q, cu_kv, q.shape[0], k.shape[0])
    check_options(left, right, scale)
    check_head_dims(q.shape[-1], v.shape[-1])
    batch, seqlen_q = (cu_q.shape[0] - 1, q.shape[0]) if varlen else (q.shape[0], q.shape[1])
    seqlen_kv = k.shape[-3]
    num_heads_q, num_heads_kv, head_dim_qk, head_dim_v = q.shape[-2], k.shape[-2], q.shape[-1], v.shape[-1]
    handle, _, known = text.rpartition(SEPARATOR)
    declared = registry.params(handle) if handle else ()
    scalars = unbound(known, declared, bound)
    check_tensors(declared, bound[2] if bound else (), q.device, {
        "num_heads_q": num_heads_q, "num_heads_kv": num_heads_kv, "batch": batch,
        **({"total_q": seqlen_q, "total_kv": seqlen_kv} if varlen else
           {"seqlen_q": seqlen_q, "seqlen_kv": seqlen_kv})})
    sink = SINK in declared
    out_shape = (*q.shape[:-1], head_dim_v)
    lse_shape = (num_heads_q, seqlen_q) if varlen else (batch, num_heads_q, seqlen_q)
    if out is not None:
        check_out(out, out_shape, q)
    copies = tuple(not is_aligned(t) for t in (q, k, v))
    if any(copies):
        logger().log(CHATTER, "copied first, since rows are not 16-byte aligned: %s",
                     ", ".join(name for name, copy in zip("qkv", copies, strict=True) if copy))
        return _Call(copies, out_shape, lse_shape)
    reach = max(seqlen_q, seqlen_kv)
    left, right = (-1 if side >= reach else side for side in (left, right))
    windowed = left >= 0 or (right >= 0 and not causal)  # causal bounds the right side anyway
    wanted = Wanted(DTYPE_NAMES[q.dtype], head_dim_qk, head_dim_v, bool(causal) and not windowed, windowed,
                    "varlen" if varlen else "dense", want_lse, handle,
                    all(fits_maps(t.shape, t.stride(), t.element_size()) for t in (q, k, v, out) if t is not None))
    if 0 in out_shape or (batch == 0 and declared):
        return _Call(None, out_shape, lse_shape, sink=sink)
    axes = ("row", "head") if varlen else ("batch", "row", "head")
    row_layout = out if out is not None else q.new_empty(out_shape, device="meta")
    by_name = {f"{name}_{axis}_stride": stride for name, t in (("q", q), ("k", k), ("v", v), ("out", row_layout))
               for axis, stride in zip(axes, strides(t), strict=True)}
    sizes = Sizes(batch, seqlen_q, seqlen_kv, num_heads_q, num_heads_kv, scale, causal == 2,
                  (left, 0 if causal else right), by_name)
    kernel = _kernel(wanted, q.device, sizes)
    program = program_of(kernel.plan, sizes, kernel.num_sms).with_values(scalars)
    if seqlen_kv == 0 and kernel.plan.tensor_maps:  # a map describes one row at least
        return _Call(None, out_shape, lse_shape, sink=sink)
    names = (*POINTERS, *(f"user_{p.name}" for p in declared if isinstance(p, TensorParam)))
    return _Call(None, out_shape, lse_shape, bind_program(program, {"fwd": kernel}, names, q.device),
                 out_shape == q.shape and q.is_contiguous(), names, sink)


def _kernel(wanted: Wanted, device: torch.device, sizes: Sizes) -> Kernel | EmulatedKernel:
    if device.type == "cpu":
        return registry.kernel(registry.for_sizes(wanted, EMULATED, sizes), EMULATED)
    api()  # refuses a fork by name, before torch and the driver meet it
    with torch.cuda.device(device):
        torch.cuda.current_stream()  # makes this thread's context torch's
        return registry.kernel(registry.for_sizes(wanted, device.index, sizes), device.index)
