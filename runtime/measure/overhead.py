"""Host time of warm calls of each operation and family, beside that of an empty torch op."""
from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from importlib import import_module

import torch

from flashgen.runtime.measure.bench import Call
from flashgen.runtime.measure.device import host_us
from flashgen.runtime.ops.registry import OPS, SIGNATURES


def measure_overhead() -> dict[str, float]:
    """Microseconds per warm call on tiny problems, medians. The empty op was defined as the first operation's is, and
    takes the same arguments."""
    device = torch.device("cuda", torch.cuda.current_device())
    q, k, v, out = (torch.zeros(1, 16, 2, 64, dtype=torch.bfloat16, device=device) for _ in range(4))
    with _empty_op() as empty:
        calls: dict[str, Call] = {"empty_op": lambda: empty(q, k, v, None, None, 0, -1, -1, 0.125, "", out=out)}
        for folder in dict.fromkeys(OPS.values()):
            calls |= import_module(f"flashgen.runtime.ops.{folder}.overhead").overhead_calls(device)
        return {f"{name}_us": us for name, us in host_us(calls, torch.cuda.synchronize).items()}


@contextlib.contextmanager
def _empty_op() -> Iterator[Callable[..., object]]:
    library = torch.library.Library("flashgen_bench", "DEF")
    library.define(f"empty({SIGNATURES[0].schema()}, *, Tensor(a!) out) -> ()")
    library.impl("empty", lambda *_, out: None, "CUDA")
    torch.library.register_fake("flashgen_bench::empty", lambda *_, out: None, lib=library)
    try:
        yield torch.ops.flashgen_bench.empty
    finally:
        library._destroy()
