"""Host time of a warm call of attention, beside that of an empty torch op."""
from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch

import flashgen
from flashgen.runtime.measure.bench import Call
from flashgen.runtime.measure.device import host_us
from flashgen.runtime.ops.attention.problem import Problem
from flashgen.runtime.ops.torch_ops import ATTENTION_ARGUMENTS


def measure_overhead() -> dict[str, float]:
    """Microseconds of host time per warm call on a tiny problem, medians: our call with and without `out`, and an empty
    torch op that was defined in the same way and takes the same arguments."""
    inputs = Problem(1, 16, 16).make_inputs("cuda")
    q, k, v, out = inputs.q, inputs.k, inputs.v, torch.empty_like(inputs.q)
    with _empty_op() as empty:
        calls: dict[str, Call] = {
            "attention_us": lambda: flashgen.attention(q, k, v),
            "attention_out_us": lambda: flashgen.attention(q, k, v, out=out),
            "empty_op_us": lambda: empty(q, k, v, None, None, 0, -1, -1, 0.125, "", out=out),
        }
        return host_us(calls, torch.cuda.synchronize)


@contextlib.contextmanager
def _empty_op() -> Iterator[Callable[..., object]]:
    library = torch.library.Library("flashgen_bench", "DEF")
    library.define(f"empty({ATTENTION_ARGUMENTS}, *, Tensor(a!) out) -> ()")
    library.impl("empty", lambda *_, out: None, "CUDA")
    torch.library.register_fake("flashgen_bench::empty", lambda *_, out: None, lib=library)
    try:
        yield torch.ops.flashgen_bench.empty
    finally:
        library._destroy()
