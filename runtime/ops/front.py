"""The way of every call, whatever the operation: to torch's dispatcher, to the CPU, or straight to its kernels.

What a call needs beyond its addresses is worked out once per combination of shapes, strides and options, and memoised
per thread. Tensors and options come in the order of the operation's signature (signature.py).
"""
from __future__ import annotations

import importlib
import math
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling

from flashgen.codegen.families.registry import pass_of
from flashgen.codegen.program import Program
from flashgen.errors import UnsupportedError
from flashgen.log import CHATTER, logger
from flashgen.runtime.launch.driver import adopt_context, api, of_another_vendor
from flashgen.runtime.launch.kernel import Kernel
from flashgen.runtime.launch.program import bind
from flashgen.runtime.ops.arguments import RAW_ERRORS, flag, require_tensors, same
from flashgen.runtime.ops.key import form, reader
from flashgen.runtime.ops.signature import Options, Signature, Tensors
from flashgen.runtime.ops.tensors import check_shared, extents
from flashgen.runtime.ops.torch_ops import DYNAMIC, OPS, Results, all_static, as_numbers
from flashgen.runtime.ops.wrapped import refuse_wrapped
from flashgen.runtime.select.lookup import EMULATED, registry
from flashgen.runtime.select.selector import Wanted

if TYPE_CHECKING:
    from flashgen.codegen.families.shared.launch import Sizes
    from flashgen.runtime.emulator.kernel import EmulatedKernel

MEMO_LIMIT = 4096          # varlen calls bring ever new totals
FORCE_CPU = os.environ.get("FLASHGEN_DEVICE") == "cpu"  # read once: this is on the path of every call


class Arguments(NamedTuple):
    tensors: Tensors
    options: Options
    extra: tuple[Tensor, ...]
    out: Tensor | None
    want_lse: bool


class Ready(NamedTuple):
    """What an operation makes of a call."""

    program: Program | None = None  # None: no key to look at, or no query. Then out is 0, and lse -inf
    kernels: Mapping[str, Kernel | EmulatedKernel] = {}  # by name of the program's steps
    extra: tuple[str, ...] = ()     # the extra tensors as pointers of plans
    copies: tuple[int, ...] = ()    # places of tensors that have to be copied first; the call is then made with those
    lse: int | None = None          # of an empty call: the place of what lse holds for each head; -1: the last of extra


class Operation:
    """What is asked and what is right; a folder beside this module for each."""

    signature: Signature

    def __init__(self) -> None:
        self.read_key = reader(self.signature)

    def all_plain(self, tensors: Tensors) -> bool:
        """Whether the tensors that every call has are of type torch.Tensor itself."""
        return all(type(t) is Tensor for t in tensors[:self.signature.required])

    def check(self, tensors: Tensors) -> None:
        """UnsupportedError for tensors that do not go with each other, whatever the options."""

    def read(self, options: Options) -> Options:
        """The options as plain values; UnsupportedError for what they are not. torch.compile traces this."""
        return options

    def prepare(self, call: Arguments) -> Ready:
        """Check everything about a call that its shapes, strides and options decide, and find its kernels."""
        raise NotImplementedError


def run_op(signature: Signature, arguments: tuple[Any, ...], out: Tensor | None, want_lse: bool) -> Results:
    """What a torch op runs. A tensor in the place of the float option holds that number and all of `floats`."""
    op: Operation = importlib.import_module(signature.home).OPERATION
    tensors, options, extra = signature.split(arguments)
    if signature.number is not None and isinstance(options[signature.number], Tensor):
        options = _with_numbers(signature, options, *options[signature.number].tolist())
    return call(op, tensors, options, extra, out, want_lse, direct=True)


def _with_numbers(signature: Signature, options: Options, number: Any, *floats: float) -> Options:
    """The options with another float option, and other `floats` where the signature has them."""
    given = list(options)
    if signature.number is not None:
        given[signature.number] = number
    if signature.floats is not None:
        given[signature.floats] = floats
    return tuple(given)


def dispatch(op: Operation, tensors: Tensors, options: Options, extra: tuple[Tensor, ...], out: Tensor | None,
             want_lse: bool) -> Results:
    """The call through torch's dispatcher, for whoever wants to see it. Its schemas take plain types alone."""
    signature, ops = op.signature, OPS[op.signature.name]
    _require(signature, tensors, extra, out)
    number = signature.number
    open_number = number is not None and options[number] is not None  # not made of the shapes of tensors
    options = op.read(_with_defaults(signature, tensors, options))
    want_lse = flag("return_lse", want_lse)
    if not is_dynamo_compiling():
        refuse_wrapped(**_named(extra))
    elif number is not None:
        floats = () if signature.floats is None else options[signature.floats]
        if not all_static(*floats) or (open_number and not all_static(options[number])):
            ops, options = DYNAMIC[signature.name], _with_numbers(signature, options,
                                                                  as_numbers(options[number], *floats))
    return ops.call((*tensors, *options, extra) if signature.extra else (*tensors, *options), out, want_lse)


def on_cpu(op: Operation, tensors: Tensors, options: Options, extra: tuple[Tensor, ...], out: Tensor | None,
           want_lse: bool) -> Results:
    """The call with everything on the CPU, and its result back where the arguments are."""
    device = tensors[0].device
    here = tuple(None if arg.device_made else t.cpu() if isinstance(t, Tensor) else t
                 for arg, t in zip(op.signature.tensors, tensors, strict=True))
    *results, lse = call(op, here, options, tuple(t.cpu() for t in extra), None, want_lse)
    found = [result.to(device) for result in results] if out is None else [out.copy_(results[0])]
    return *found, None if lse is None else lse.to(device)


def listened() -> bool:
    """Whether somebody listens to calls of plain tensors: a mode that wants to see or replace ops (fake tensors,
    tracing, profiling by dispatch), a transform of torch.func, or forward-mode AD."""
    return bool(is_dynamo_compiling() or _dispatch_modes() or _function_modes() or forward_ad._current_level >= 0
                or _transform_level() is not None)


_dispatch_modes, _function_modes = torch._C._len_torch_dispatch_stack, torch._C._len_torch_function_stack
_transform_level = torch._C._functorch.maybe_current_level
_current_stream = torch._C._cuda_getCurrentRawStream if hasattr(torch._C, "_cuda_getCurrentRawStream") else (
    lambda index: torch.cuda.current_stream(index).cuda_stream)


def kernel_for(wanted: Wanted, device: torch.device, sizes: Sizes | None = None) -> Kernel | EmulatedKernel:
    """The kernel that serves a call on a device. `sizes` may make one of several the better choice."""
    if device.type == "cpu":
        return registry.kernel(wanted if sizes is None else registry.for_sizes(wanted, EMULATED, sizes), EMULATED)
    if not of_another_vendor():
        api()  # refuses a fork by name, before torch and the driver meet it
    with torch.cuda.device(device):
        adopt_context(device.index)
        return registry.kernel(wanted if sizes is None else registry.for_sizes(wanted, device.index, sizes),
                               device.index)


def kernels_for(wanted: Wanted, device: torch.device, sizes: Sizes) -> list[Kernel | EmulatedKernel]:
    """All kernels that a call launches, of the family that serves it: the first, as kernel_for finds it, and those that
    its pass names beside it. `wanted` names the first where the family does not by itself."""
    first = kernel_for(wanted, device, sizes)
    beside = [replace(wanted, traits=tuple({**dict(wanted.traits), **dict(traits)}.items()))
              for traits in pass_of(first.plan).kernels[1:]]
    found = [first, *(kernel_for(each, device) for each in beside)]
    if any(kernel.plan.family != first.plan.family for kernel in found):  # a bundle holds some of its kernels
        raise UnsupportedError(f"{first.plan.kernel_name} was found without a kernel that calls launch beside it",
                               where="bundle", allowed="all kernels of a pass", next="flashgen bundle SPEC -o DIR")
    return found


# ---- what a call is made of

class _Call:
    """All that one combination of shapes, strides and options fixes: copies to make, what to allocate, the launch."""

    __slots__ = ("copies", "detour", "device_index", "extents", "generation", "launch", "lse", "lse_shape", "names",
                 "out_bytes", "out_like", "out_shape", "shapes")

    def __init__(self, signature: Signature, given: Arguments, ready: Ready) -> None:
        first = given.tensors[0]
        self.device_index = first.get_device()
        self.generation, self.copies, self.lse = registry.generation, ready.copies, ready.lse
        self.shapes = signature.shapes(given.tensors, given.options)
        self.detour = bool(ready.copies) or len(signature.results) > 1  # of few calls: the others look no further
        self.out_shape, self.lse_shape = self.shapes[0], self.shapes[-1]
        self.out_like = self.out_shape == first.shape and first.is_contiguous()  # empty_like is faster than new_empty
        self.out_bytes, self.extents = 0, tuple[tuple[int, int], ...]()  # by place, of what `out` must not overlap
        if given.out is not None:
            rows = [place for place, arg in enumerate(signature.tensors) if arg.rows]
            *sizes, self.out_bytes = extents(*(given.tensors[place] for place in rows), given.out)
            self.extents = tuple(zip(rows, sizes, strict=True))
        lse = ("lse",) if len(signature.results) == 1 else ()
        self.names, self.launch = (*signature.pointers, *signature.results, *lse, *ready.extra), None
        if ready.program is not None:
            there = {name for name, t in zip(signature.pointers, given.tensors, strict=True) if t is not None}
            program = ready.program.given({*there, *signature.results})
            self.launch = bind(program, ready.kernels, self.names, first.device)


class _Memo(threading.local):
    def __init__(self) -> None:
        self.calls: dict[tuple[Any, ...], _Call] = {}


_memo = _Memo()


def call(op: Operation, tensors: Tensors, options: Options, extra: tuple[Tensor, ...] = (), out: Tensor | None = None,
         want_lse: bool = False, direct: bool = False) -> Results:
    """The results of a call, and lse or None. `out` None: allocated here. `direct`: whoever listens has been told."""
    if not direct:
        if FORCE_CPU and tensors[0].is_cuda:
            return on_cpu(op, tensors, options, extra, out, want_lse)
        # Going through the dispatcher would do nothing but cost time where nobody listens: `listened`, written out.
        if (is_dynamo_compiling() or _dispatch_modes() or _function_modes() or forward_ad._current_level >= 0
                or _transform_level() is not None):
            return dispatch(op, tensors, options, extra, out, want_lse)
    wrong, key = None, tuple[Any, ...]()
    try:
        addresses, key = op.read_key(tensors, options, want_lse, out, direct)
        if extra:
            key += tuple(map(form, extra))
        known = _memo.calls.get(key)
    except RAW_ERRORS as error:  # an argument that makes no key, such as a list or a sparse tensor
        known, wrong = None, error
    if known is None or known.generation != registry.generation:
        if not direct and not op.all_plain(tensors):
            return dispatch(op, tensors, options, extra, out, want_lse)
        given, is_plain = _plain(op, Arguments(tensors, options, extra, out, want_lse))
        if not is_plain:
            return call(op, *given, direct=True)
        if wrong is not None:
            raise wrong
        known = _prepare(op, given, key)
    if known.detour:
        if known.copies:
            return call(op, _copied(op.signature, tensors, known.copies), options, extra, out, want_lse, direct=True)
        return _several(known, tensors, extra, addresses)
    first = tensors[0]
    if out is None:
        out = torch.empty_like(first) if known.out_like else first.new_empty(known.out_shape)
        addresses[-1] = out.data_ptr()
    elif known.extents:
        begin, end = addresses[-1], addresses[-1] + known.out_bytes
        for place, size in known.extents:
            if begin - size < addresses[place] < end:
                check_shared(out, **{op.signature.tensors[place].name: tensors[place]})
    lse = first.new_empty(known.lse_shape, dtype=torch.float32) if want_lse else None
    device_index = known.device_index
    if known.launch is None or device_index < 0:
        _finish(known, (*tensors, out, lse, *extra), (out,), lse)
        return out, lse
    addresses.append(0 if lse is None else lse.data_ptr())
    if extra:
        addresses += [t.data_ptr() for t in extra]
    if torch._C._cuda_getDevice() == device_index:
        known.launch(_current_stream(device_index), addresses)
    else:
        _launch_there(known.device_index, known.launch, addresses)
    return out, lse


def _launch_there(device_index: int, launch: Callable[[int, list[int]], None], addresses: list[int]) -> None:
    """A launch on a device that is not the current one."""
    with torch.cuda.device(device_index):
        launch(_current_stream(device_index), addresses)


def _several(known: _Call, tensors: Tensors, extra: tuple[Tensor, ...], addresses: list[int]) -> Results:
    """The rest of a call that has several results, each allocated here."""
    first = tensors[0]
    results = tuple([first.new_empty(shape) for shape in known.shapes])
    if known.launch is None or known.device_index < 0:
        _finish(known, (*tensors, *results, *extra), results)
        return *results, None
    addresses[-1:] = [t.data_ptr() for t in (*results, *extra)]
    if torch._C._cuda_getDevice() == known.device_index:
        known.launch(_current_stream(known.device_index), addresses)
    else:
        _launch_there(known.device_index, known.launch, addresses)
    return *results, None


def _plain(op: Operation, given: Arguments) -> tuple[Arguments, bool]:
    """The call with plain values and defaults in its options; whether all values were plain, so that its key is the
    call's own. UnsupportedError for what is no tensor, or no value that an option can have."""
    _require(op.signature, given.tensors, given.extra, given.out)
    op.check(given.tensors)
    filled = _with_defaults(op.signature, given.tensors, given.options)
    found, want_lse = op.read(filled), flag("return_lse", given.want_lse)
    return given._replace(options=found, want_lse=want_lse), same((*found, want_lse), (*filled, given.want_lse))


def _with_defaults(signature: Signature, tensors: Tensors, options: Options) -> Options:
    return tuple([option.default(tensors) if value is None and option.default is not None else value
                  for option, value in zip(signature.options, options, strict=True)])


def _require(signature: Signature, tensors: Tensors, extra: tuple[Tensor, ...], out: Tensor | None) -> None:
    """UnsupportedError for an argument that is no plain tensor, or None where one has to be."""
    names = [arg.name for arg in signature.tensors]
    count = signature.required
    require_tensors(False, **dict(zip(names[:count], tensors[:count], strict=True)))
    require_tensors(True, **dict(zip(names[count:], tensors[count:], strict=True)), out=out)
    require_tensors(False, **_named(extra))


def _named(extra: tuple[Tensor, ...]) -> dict[str, Tensor]:
    return {f"tensor {place} of params": t for place, t in enumerate(extra, 1)}


def _prepare(op: Operation, given: Arguments, key: tuple[Any, ...]) -> _Call:
    known = _Call(op.signature, given, op.prepare(given))
    if known.device_index >= 0:  # an emulated launch takes so long that preparing it anew costs nothing
        if len(_memo.calls) >= MEMO_LIMIT:
            _memo.calls.clear()
        _memo.calls[key] = known
    return known


def _copied(signature: Signature, tensors: Tensors, places: tuple[int, ...]) -> Tensors:
    logger().log(CHATTER, "copied first, since kernels cannot read them as they lie: %s",
                 ", ".join(signature.tensors[place].name for place in places))
    return tuple(t.clone(memory_format=torch.contiguous_format) if place in places else t
                 for place, t in enumerate(tensors))


def _finish(known: _Call, everything: Tensors, results: Tensors, lse: Tensor | None = None) -> None:
    """A call on the emulator, or one that launches nothing. `everything`: as `known.names` has it."""
    if known.launch is not None:
        known.launch(dict(zip(known.names, everything, strict=True)))
        return
    for result in results:
        result.zero_()
    if lse is not None and known.lse is not None:
        lse.copy_(everything[known.lse][:, None].expand_as(lse))
    elif lse is not None:
        lse.fill_(-math.inf)
