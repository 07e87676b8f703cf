"""The torch ops of flashgen: schemas, fakes, and where the code behind each lies.

`import flashgen` registers them, so that exported programs, AOTInductor packages and pickled graphs find them by name.
So this module imports torch alone; what runs an op is imported when the op first runs.

They are defined through torch.library.Library, whose dispatch costs a tenth of custom_op's. Each op keeps one fixed
signature, because optional outputs would need a fake implementation that depends on values.

Windows and int parameters are SymInts: a compiled graph serves every value. No schema type does that for floats, which
torch.compile makes constants of the graph wherever an op takes them. Floats that change from call to call therefore
travel in `numbers`, a float64 tensor on the CPU (the scale, then float parameters), through ops of their own, whose
names end in `_dynamic`. A CUDA graph would freeze those numbers, so these ops carry the tag that keeps them out of one.
"""
from __future__ import annotations

import functools
import importlib
from typing import Any, NamedTuple

import torch
from torch import Tensor

_library = torch.library.Library("flashgen", "DEF")  # kept alive: its ops go with it
_NUMBERS_TAGS = tuple(getattr(torch.Tag, name) for name in ("cudagraph_unsafe",) if hasattr(torch.Tag, name))


@functools.cache
def _function(module: str, name: str):  # type: ignore[no-untyped-def]
    return getattr(importlib.import_module(f"flashgen.runtime.ops.{module}.call"), name)


def _define(name, schema, run, fake, tags=()):  # type: ignore[no-untyped-def]
    """flashgen::<name>, which runs `run` on both kinds of device."""
    _library.define(name + schema, tags=tags)
    _library.impl(name, run, "CUDA")
    _library.impl(name, run, "CPU")
    torch.library.register_fake(f"flashgen::{name}", fake, lib=_library)
    return getattr(torch.ops.flashgen, name).default


class OpSet(NamedTuple):
    """The four ops of one function: with and without lse, each with and without `out`."""

    plain: Any
    lse: Any
    out: Any
    out_lse: Any

    def call(self, arguments, out, want_lse):  # type: ignore[no-untyped-def]
        """out, or (out, lse). `out` None: the op allocates it."""
        if out is None:
            return self.lse(*arguments) if want_lse else self.plain(*arguments)
        if want_lse:
            return out, self.out_lse(*arguments, out=out)
        self.out(*arguments, out=out)
        return out


def _op_set(name, arguments, module, fake_out, fake_lse, suffix="", tags=()):  # type: ignore[no-untyped-def]
    """The ops <name>, <name>_lse, <name>_out and <name>_out_lse, each with `suffix`. `run_op` of `module` takes
    `out`, whether lse is wanted, and the arguments, of which torch leaves out the last if they are defaults; it returns
    (out, lse or None). The fakes take the arguments."""
    def run(*x):  # type: ignore[no-untyped-def]
        return _function(module, "run_op")(*x)
    return OpSet(
        _define(f"{name}{suffix}", f"({arguments}) -> Tensor", lambda *x: run(None, False, *x)[0], fake_out, tags),
        _define(f"{name}_lse{suffix}", f"({arguments}) -> (Tensor, Tensor)", lambda *x: run(None, True, *x),
                lambda *x: (fake_out(*x), fake_lse(*x)), tags),
        _define(f"{name}_out{suffix}", f"({arguments}, *, Tensor(a!) out) -> ()",
                lambda *x, out: (run(out, False, *x), None)[1], lambda *_, out: None, tags),
        _define(f"{name}_out_lse{suffix}", f"({arguments}, *, Tensor(a!) out) -> Tensor",
                lambda *x, out: run(out, True, *x)[1], lambda *x, out: fake_lse(*x), tags))


def _op_sets(name, arguments, *rest):  # type: ignore[no-untyped-def]
    """The ops with numbers as constants, and those with a tensor of numbers in the place of softmax_scale."""
    dynamic = arguments.replace("float softmax_scale", "Tensor numbers")
    return _op_set(name, arguments, *rest), _op_set(name, dynamic, *rest, "_dynamic", _NUMBERS_TAGS)


def all_static(*values: float) -> bool:
    """Whether a graph that torch.compile traces may hold the numbers as constants. Only for code that it traces."""
    shapes = torch.fx.experimental.symbolic_shapes
    if not hasattr(shapes, "has_static_value"):
        return True  # an older torch, which then makes a graph for each value
    return all([shapes.has_static_value(value) for value in values])


def as_numbers(*values: float) -> Tensor:
    """A float64 tensor on the CPU. Products of a tensor and a float are what torch.compile can keep dynamic."""
    one = torch.ones((), dtype=torch.float64, device="cpu")
    return torch.stack([one * value for value in values])


# ---- flashgen.attention

def _attention_out(q, k, v, *_):  # type: ignore[no-untyped-def]
    return q.new_empty((*q.shape[:-1], v.shape[-1]))


def _attention_lse(q, k, v, cu_q, *_):  # type: ignore[no-untyped-def]
    shape = (q.shape[-2], q.shape[0]) if cu_q is not None else (q.shape[0], q.shape[2], q.shape[1])
    return q.new_empty(shape, dtype=torch.float32)


ATTENTION_ARGUMENTS = (
    "Tensor q, Tensor k, Tensor v, Tensor? cu_seqlens_q, Tensor? cu_seqlens_kv, int causal, SymInt window_left, "
    "SymInt window_right, float softmax_scale, str spec, SymInt[] ints=[], float[] floats=[], Tensor[]? tensors=None")
ATTENTION, ATTENTION_DYNAMIC = _op_sets("attention", ATTENTION_ARGUMENTS, "attention", _attention_out, _attention_lse)


# ---- flashgen.mla_decode, flashgen.mla_schedule

def _decode_out(q, *_):  # type: ignore[no-untyped-def]
    return q.new_empty((*q.shape[:-1], _function("mla_decode", "HEAD_DIM_V")))


def _decode_lse(q, *_):  # type: ignore[no-untyped-def]
    return q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32)


_DECODE = ("Tensor q, Tensor kv_cache, Tensor seqlens_kv, Tensor? page_table, Tensor? sink, Tensor? schedule, "
           "bool causal, float softmax_scale, bool lse_counts_sink, str spec")
DECODE, DECODE_DYNAMIC = _op_sets("mla_decode", _DECODE, "mla_decode", _decode_out, _decode_lse)
SCHEDULE = _define("mla_schedule", "(Tensor seqlens_kv, int num_heads_q, int seqlen_q) -> Tensor",
                   lambda *x: _function("mla_decode", "run_schedule")(*x),
                   lambda *x: _function("mla_decode", "fake_schedule")(*x))
