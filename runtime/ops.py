"""flashgen.attention and the torch ops behind it.

The ops are defined through torch.library.Library, whose dispatch costs a tenth of custom_op's. Each keeps one fixed
signature (attention, attention_lse, attention_out, attention_out_lse), because optional outputs would need a fake
implementation that depends on values. What a call needs beyond its pointers is worked out once per combination of
shapes, strides and options, and memoised per thread.
"""
from __future__ import annotations

import math
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from flashgen.codegen.dtype import DTYPES
from flashgen.errors import UnsupportedError
from flashgen.log import CHATTER, logger
from flashgen.runtime.counters import CountingLauncher, counters_of
from flashgen.runtime.kernel import Kernel, Launcher
from flashgen.runtime.lookup import EMULATED, Wanted, check_head_dims, registry
from flashgen.runtime.tensor_map import fits_maps
from flashgen.runtime.values import is_persistent, launch_values, pointer_names, splits_keys

if TYPE_CHECKING:
    from flashgen.codegen.spec import Spec
    from flashgen.runtime.emulator.kernel import EmulatedKernel, EmulatedLauncher

ALIGNMENT_BYTES = 16       # one cp.async
MAX_LENGTH = 2**30         # sums of two positions and a window stay within 32 bits
MEMO_LIMIT = 4096          # varlen calls bring ever new totals
FORCE_CPU = os.environ.get("FLASHGEN_DEVICE") == "cpu"  # read once: this is on the path of every call
CAUSAL_CODES = {False: 0, True: 1, "top_left": 2}
DTYPE_NAMES = {getattr(torch, d.torch_name): d.name for d in DTYPES.values()}


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool | str = False,
              window: tuple[int, int] = (-1, -1), softmax_scale: float | None = None, return_lse: bool = False,
              cu_seqlens_q: torch.Tensor | None = None, cu_seqlens_kv: torch.Tensor | None = None,
              max_seqlen_q: int | None = None, max_seqlen_kv: int | None = None, out: torch.Tensor | None = None,
              spec: str | Path | Spec | None = None) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
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
        softmax_scale: head_dim_qk ** -0.5 by default; finite and above 0.
        return_lse: also return the natural log of the sum of exp(scores), fp32: [batch, num_heads_q, seqlen_q] or
            [num_heads_q, total_q].
        cu_seqlens_q, cu_seqlens_kv: [batch + 1] int32 prefix sums of the lengths, on the same device.
        max_seqlen_q, max_seqlen_kv: accepted for callers that have them; the kernels need neither.
        out: written in place and returned; rows and heads 16-byte aligned.
        spec: a spec file, the name of a shipped one, or a Spec, to restrict the choice of kernel.

    A row that sees no key gets out 0 and lse -inf; so do rows after the last sequence. q, k or v whose last dimension
    is not contiguous or whose rows are not 16-byte aligned are copied first. Any stride is fine otherwise.

    Raises UnsupportedError for what no kernel does, SpecError and PlanError for a spec that cannot be built,
    CompileError and EnvironmentError_ where building or loading fails. There is no backward yet: with grad enabled and
    an input that requires it, the call is refused.
    """
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
    if FORCE_CPU and q.is_cuda:
        return _on_cpu(q, k, v, causal=causal, window=window, softmax_scale=softmax_scale, return_lse=return_lse,
                       cu_seqlens_q=cu_seqlens_q, cu_seqlens_kv=cu_seqlens_kv, out=out, spec=spec)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else float(softmax_scale)
    options = (cu_seqlens_q, cu_seqlens_kv, CAUSAL_CODES[causal], window[0], window[1], scale,
               "" if spec is None else registry.spec_handle(spec))
    if not torch.compiler.is_compiling() and _nobody_listens(q, k, v):
        out, lse = _run(q, k, v, *options, out, return_lse)
        return (out, lse) if return_lse else out
    if out is None:
        return _attention_lse_op(q, k, v, *options) if return_lse else _attention_op(q, k, v, *options)
    if return_lse:
        return out, _attention_out_lse_op(q, k, v, *options, out=out)
    _attention_out_op(q, k, v, *options, out=out)
    return out


def _on_cpu(*tensors, out, **options):  # type: ignore[no-untyped-def]
    """The call with everything on the CPU, and its result back where the arguments are."""
    device = tensors[0].device
    options = {name: value.cpu() if isinstance(value, torch.Tensor) else value for name, value in options.items()}
    result = attention(*(t.cpu() for t in tensors), **options)
    results = [t.to(device) for t in (result if isinstance(result, tuple) else (result,))]
    if out is not None:
        results[0] = out.copy_(results[0])
    return tuple(results) if options["return_lse"] else results[0]


def _nobody_listens(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether going through the dispatcher would do nothing but cost time: plain tensors, and no mode that wants to see
    or replace the op (fake tensors, tracing, profiling by dispatch)."""
    return (type(q) is type(k) is type(v) is torch.Tensor and not torch._C._len_torch_dispatch_stack()
            and not torch._C._len_torch_function_stack())


class _Call:
    """All that one combination of shapes, strides and options fixes: copies to make, what to allocate, the launch."""

    __slots__ = ("copies", "generation", "launcher", "lse_shape", "out_like_q", "out_shape", "takes_lse")

    def __init__(self, copies: tuple[bool, ...] | None, out_shape: tuple[int, ...], lse_shape: tuple[int, ...],
                 launcher: Launcher | CountingLauncher | EmulatedLauncher | None, out_like_q: bool = False,
                 takes_lse: bool = True) -> None:
        self.copies, self.out_shape, self.lse_shape, self.launcher = copies, out_shape, lse_shape, launcher
        self.out_like_q, self.takes_lse = out_like_q, takes_lse
        self.generation = registry.generation


class _Memo(threading.local):
    def __init__(self) -> None:
        self.calls: dict[tuple, _Call] = {}


_memo = _Memo()
_current_stream = torch._C._cuda_getCurrentRawStream if hasattr(torch._C, "_cuda_getCurrentRawStream") else (
    lambda index: torch.cuda.current_stream(index).cuda_stream)


def _run(q, k, v, cu_q, cu_kv, causal, left, right, scale, spec, out, want_lse):  # type: ignore[no-untyped-def]
    """(out, lse or None). `out` None: allocated here."""
    q_pointer, k_pointer, v_pointer, device_index = q.data_ptr(), k.data_ptr(), v.data_ptr(), q.get_device()
    if not (q.dtype is k.dtype is v.dtype and device_index == k.get_device() == v.get_device()):
        _check_tensors(q, k, v, cu_q, cu_kv)  # raises: the key below speaks of q's alone
    key = (q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(), q.dtype, device_index, q_pointer & 15,
           k_pointer & 15, v_pointer & 15, causal, left, right, scale, spec, want_lse,
           None if out is None else (out.shape, out.stride(), out.dtype, out.get_device(), out.data_ptr() & 15),
           None if cu_q is None else (cu_q.shape, cu_q.stride(), cu_q.dtype, cu_q.get_device(),
                                      cu_kv.shape, cu_kv.stride(), cu_kv.dtype, cu_kv.get_device()))
    calls = _memo.calls
    call = calls.get(key)
    if call is None or call.generation != registry.generation:
        call = _prepare(q, k, v, cu_q, cu_kv, causal, left, right, scale, spec, out, want_lse)
        if device_index >= 0:  # an emulated launch takes so long that preparing it anew costs nothing
            if len(calls) >= MEMO_LIMIT:
                calls.clear()
            calls[key] = call
    if call.copies is not None:
        q, k, v = (t.clone(memory_format=torch.contiguous_format) if copy else t
                   for t, copy in zip((q, k, v), call.copies, strict=True))
        return _run(q, k, v, cu_q, cu_kv, causal, left, right, scale, spec, out, want_lse)
    if out is None:
        out = torch.empty_like(q) if call.out_like_q else q.new_empty(call.out_shape)  # the first is faster
    lse = q.new_empty(call.lse_shape, dtype=torch.float32) if want_lse else None
    if call.launcher is None:  # no key to look at, or no query
        out.zero_()
        if lse is not None:
            lse.fill_(-math.inf)
        return out, lse
    if device_index < 0:
        call.launcher(q=q, k=k, v=v, out=out, lse=lse, cu_seqlens_q=cu_q, cu_seqlens_kv=cu_kv)
        return out, lse
    pointers = [q_pointer, k_pointer, v_pointer, *_more_pointers(call.takes_lse, out, lse, cu_q, cu_kv)]
    if torch._C._cuda_getDevice() == device_index:
        call.launcher(_current_stream(device_index), *pointers)
    else:
        with torch.cuda.device(device_index):
            call.launcher(_current_stream(device_index), *pointers)
    return out, lse


def _more_pointers(takes_lse, out, lse, cu_q, cu_kv):  # type: ignore[no-untyped-def]
    """What follows q, k and v among a plan's pointers, but for what a CountingLauncher adds."""
    pointers = [out.data_ptr()]
    if takes_lse:
        pointers.append(0 if lse is None else lse.data_ptr())
    if cu_q is not None:
        pointers += (cu_q.data_ptr(), cu_kv.data_ptr())
    return pointers


def _prepare(  # type: ignore[no-untyped-def]
        q, k, v, cu_q, cu_kv, causal, left, right, scale, spec, out, want_lse) -> _Call:
    """Checks everything about a call that its shapes, strides and options decide, and finds its kernel."""
    varlen = cu_q is not None
    _check_tensors(q, k, v, cu_q, cu_kv)
    _check_options(left, right, scale)
    check_head_dims(q.shape[-1], v.shape[-1])
    batch, seqlen_q = (cu_q.shape[0] - 1, q.shape[0]) if varlen else (q.shape[0], q.shape[1])
    seqlen_kv = k.shape[-3]
    num_heads_q, num_heads_kv, head_dim_qk, head_dim_v = q.shape[-2], k.shape[-2], q.shape[-1], v.shape[-1]
    out_shape = (*q.shape[:-1], head_dim_v)
    lse_shape = (num_heads_q, seqlen_q) if varlen else (batch, num_heads_q, seqlen_q)
    if out is not None:
        _check_out(out, out_shape, q)
    copies = tuple(not _is_aligned(t) for t in (q, k, v))
    if any(copies):
        logger().log(CHATTER, "copied first, since rows are not 16-byte aligned: %s",
                     ", ".join(name for name, copy in zip("qkv", copies, strict=True) if copy))
        return _Call(copies, out_shape, lse_shape, None)
    reach = max(seqlen_q, seqlen_kv)
    left, right = (-1 if side >= reach else side for side in (left, right))
    windowed = left >= 0 or (right >= 0 and not causal)  # causal bounds the right side anyway
    wanted = Wanted(DTYPE_NAMES[q.dtype], head_dim_qk, head_dim_v, bool(causal) and not windowed, windowed,
                    "varlen" if varlen else "dense", want_lse, spec,
                    all(fits_maps(t.shape, t.stride(), t.element_size()) for t in (q, k, v, out) if t is not None))
    if 0 in out_shape:
        return _Call(None, out_shape, lse_shape, None)
    axes = ("row", "head") if varlen else ("batch", "row", "head")
    row_layout = out if out is not None else _Contiguous(out_shape)
    strides = {f"{name}_{axis}_stride": stride for name, t in (("q", q), ("k", k), ("v", v), ("out", row_layout))
               for axis, stride in zip(axes, _strides(t), strict=True)}
    call = dict(batch=batch, seqlen_q=seqlen_q, seqlen_kv=seqlen_kv, num_heads_q=num_heads_q,
                num_heads_kv=num_heads_kv, softmax_scale=scale, top_left=causal == 2,
                window=(left, 0 if causal else right), strides=strides)
    kernel = _kernel(wanted, q.device, call)
    values = launch_values(kernel.plan, num_sms=kernel.num_sms, **call)
    if seqlen_kv == 0 and kernel.plan.tensor_maps:  # a map describes one row at least
        return _Call(None, out_shape, lse_shape, None)
    out_like_q = out_shape == q.shape and q.is_contiguous()
    return _Call(None, out_shape, lse_shape, _launcher(kernel, values, q.device), out_like_q,
                 "lse" in pointer_names(kernel.plan))


def _kernel(wanted: Wanted, device: torch.device, call: dict[str, Any]) -> Kernel | EmulatedKernel:
    """The kernel for a call; `call` as launch_values takes it."""
    if device.type == "cpu":
        return registry.kernel(registry.for_sizes(wanted, EMULATED, call), EMULATED)
    with torch.cuda.device(device):
        torch.cuda.current_stream()  # makes this thread's context torch's
        return registry.kernel(registry.for_sizes(wanted, device.index, call), device.index)


def _launcher(kernel: Kernel | EmulatedKernel, values: dict[str, Any],
              device: torch.device) -> Launcher | CountingLauncher | EmulatedLauncher:
    """What launches the kernel; on a device it takes the pointers of the call's tensors and no others."""
    launcher = kernel.launcher(values)
    if not isinstance(launcher, Launcher) or not is_persistent(kernel.plan):
        return launcher
    floats = values["partials_floats"] if splits_keys(kernel.plan) else None
    return CountingLauncher(launcher, counters_of(device.index), floats, device)


class _Contiguous:
    """Shape and strides of a tensor that is yet to be allocated."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape

    def stride(self) -> tuple[int, ...]:
        strides = [1]
        for size in reversed(self.shape[1:]):
            strides.insert(0, strides[0] * size)
        return tuple(strides)


def _strides(t) -> list[int]:  # type: ignore[no-untyped-def]
    """Element strides of all but the last dimension; a dimension of size 1 has none that means anything."""
    return [stride if size != 1 else 0 for size, stride in zip(t.shape[:-1], t.stride()[:-1], strict=True)]


def _is_aligned(t: torch.Tensor) -> bool:
    """Whether 16-byte copies can read every row of it."""
    if t.shape[-1] != 1 and t.stride(-1) != 1:
        return False
    step = ALIGNMENT_BYTES // t.element_size()
    return t.numel() == 0 or (t.data_ptr() % ALIGNMENT_BYTES == 0 and all(s % step == 0 for s in _strides(t)))


def _check_tensors(q, k, v, cu_q, cu_kv):  # type: ignore[no-untyped-def]
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
    if k.shape[-2] == 0 or q.shape[-2] % k.shape[-2]:
        raise UnsupportedError(f"{q.shape[-2]} query heads over {k.shape[-2]} kv heads", where="q, k",
                               allowed="num_heads_q a multiple of num_heads_kv")
    if varlen:
        for name, t in (("cu_seqlens_q", cu_q), ("cu_seqlens_kv", cu_kv)):
            if (t.dtype != torch.int32 or t.dim() != 1 or t.shape != cu_q.shape or t.shape[0] < 1
                    or t.device != q.device or not t.is_contiguous()):
                raise UnsupportedError(f"{name} is {t.dtype} {tuple(t.shape)} on {t.device}", where=name,
                                       allowed=f"contiguous int32 [batch + 1] on {q.device}, both of one length")


def _check_options(left: int, right: int, scale: float) -> None:
    if left < -1 or right < -1:
        raise UnsupportedError(f"window=({left}, {right})", where="window",
                               allowed="counts of keys from 0, or -1 for an unbounded side")
    if not (math.isfinite(scale) and scale > 0):
        raise UnsupportedError(f"softmax_scale={scale}", where="softmax_scale", allowed="finite, above 0",
                               nearest="negate q for a negative scale")


def _check_out(out: torch.Tensor, shape: tuple[int, ...], q: torch.Tensor) -> None:
    if tuple(out.shape) != shape or out.dtype != q.dtype or out.device != q.device:
        raise UnsupportedError(f"out is {out.dtype} {tuple(out.shape)} on {out.device}", where="out",
                               allowed=f"{q.dtype} {shape} on {q.device}")
    if not _is_aligned(out):
        raise UnsupportedError(f"out has strides {out.stride()} and starts at byte {out.data_ptr() % ALIGNMENT_BYTES} "
                               f"of 16", where="out", allowed="contiguous last dimension, rows 16-byte aligned",
                               next="leave out=None and copy the result")


# ---- the ops

_ARGUMENTS = ("Tensor q, Tensor k, Tensor v, Tensor? cu_seqlens_q, Tensor? cu_seqlens_kv, int causal, int window_left, "
              "int window_right, float softmax_scale, str spec")
_library = torch.library.Library("flashgen", "DEF")  # kept alive: its ops go with it
_library.define(f"attention({_ARGUMENTS}) -> Tensor")
_library.define(f"attention_lse({_ARGUMENTS}) -> (Tensor, Tensor)")
_library.define(f"attention_out({_ARGUMENTS}, *, Tensor(a!) out) -> ()")
_library.define(f"attention_out_lse({_ARGUMENTS}, *, Tensor(a!) out) -> Tensor")


def _attention(*arguments):  # type: ignore[no-untyped-def]
    return _run(*arguments, None, False)[0]


def _attention_lse(*arguments):  # type: ignore[no-untyped-def]
    return _run(*arguments, None, True)


def _attention_out(*arguments, out):  # type: ignore[no-untyped-def]
    _run(*arguments, out, False)


def _attention_out_lse(*arguments, out):  # type: ignore[no-untyped-def]
    return _run(*arguments, out, True)[1]


def _fake_out(q, v):  # type: ignore[no-untyped-def]
    return q.new_empty((*q.shape[:-1], v.shape[-1]))


def _fake_lse(q, cu_q):  # type: ignore[no-untyped-def]
    shape = (q.shape[-2], q.shape[0]) if cu_q is not None else (q.shape[0], q.shape[2], q.shape[1])
    return q.new_empty(shape, dtype=torch.float32)


for _name, _function, _fake in (
    ("attention", _attention, lambda q, k, v, *_: _fake_out(q, v)),
    ("attention_lse", _attention_lse, lambda q, k, v, cu_q, *_: (_fake_out(q, v), _fake_lse(q, cu_q))),
    ("attention_out", _attention_out, lambda *_, out: None),
    ("attention_out_lse", _attention_out_lse, lambda q, k, v, cu_q, *_, out: _fake_lse(q, cu_q)),
):
    _library.impl(_name, _function, "CUDA")
    _library.impl(_name, _function, "CPU")
    torch.library.register_fake(f"flashgen::{_name}", _fake, lib=_library)

_attention_op = torch.ops.flashgen.attention.default
_attention_lse_op = torch.ops.flashgen.attention_lse.default
_attention_out_op = torch.ops.flashgen.attention_out.default
_attention_out_lse_op = torch.ops.flashgen.attention_out_lse.default
