"""The GPU side of `flashgen bench`: inputs, peers, timers, host overhead."""
from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor

import flashgen
from flashgen.codegen.dtype import DTYPES
from flashgen.codegen.spec import Spec
from flashgen.errors import EnvironmentError_, UnsupportedError, VerifyError
from flashgen.runtime.bench import Call, Case, Refused, Run
from flashgen.runtime.doctor import driver_version
from flashgen.runtime.lookup import archs_for
from flashgen.runtime.nvrtc import version_text

TIMING_MS = 5.0      # of one timing at least: far above what an event resolves
FA3_MODULES = ("flash_attn_interface", "fa3_fwd_interface")  # built from source; the wheel fa3-fwd
PACKAGES = ("flashgen", "torch", "triton", "cuda-bindings", "nvidia-cuda-nvrtc", "fa3-fwd", "flash-attn-3")


@dataclass(frozen=True)
class Inputs:
    """[batch, seqlen, num_heads, head_dim], as flashgen takes them, and a place for the result."""

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor

    @property
    def heads_first(self) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v as views [batch, num_heads, seqlen, head_dim], as torch takes them."""
        return self.q.transpose(1, 2), self.k.transpose(1, 2), self.v.transpose(1, 2)


Prepare = Callable[[Case], Callable[[Inputs], object]]


class CudaDevice:
    """The current CUDA device. EnvironmentError_ if there is none."""

    def __init__(self, timer: str = "graph") -> None:
        """`timer`: "graph" replays CUDA graphs, "events" times plain calls, host overhead included where it shows."""
        if not torch.cuda.is_available():
            raise EnvironmentError_(
                "bench times kernels, and torch sees no CUDA device", where="torch.cuda.is_available()",
                allowed="a CUDA device with its driver, and a torch built with CUDA",
                nearest="flashgen explain gives the roofline without a GPU", next="flashgen doctor")
        if timer not in TIMERS:
            raise UnsupportedError(f"timer {timer}", where="--timer", allowed=", ".join(TIMERS))
        self._timer, self.properties = TIMERS[timer], torch.cuda.get_device_properties()
        self.l2_bytes = self.properties.L2_cache_size
        self.timer_name = timer

    def facts(self) -> dict[str, Any]:
        versions: dict[str, Any] = {name: found for name in PACKAGES if (found := _version(name)) is not None}
        versions |= {"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version(), "nvrtc": version_text()}
        return {"gpu": self.properties.name, "driver": driver_version(), "versions": versions}

    def archs(self) -> Sequence[str]:
        return archs_for(10 * self.properties.major + self.properties.minor)

    def absent(self, peer: str) -> str | None:
        return PEERS[peer][0]()

    def inputs(self, case: Case, sets: int) -> Sequence[Inputs]:
        """`sets` independent draws from N(0, 1); out is poisoned."""
        dtype, generator = getattr(torch, DTYPES[case.dtype].torch_name), torch.Generator("cuda").manual_seed(0)

        def normal(seqlen: int, num_heads: int, head_dim: int) -> Tensor:
            return torch.randn(case.batch, seqlen, num_heads, head_dim, device="cuda", dtype=dtype, generator=generator)

        q_shape, kv_shape = (case.seqlen_q, case.num_heads_q), (case.seqlen_kv, case.num_heads_kv)
        made = []
        for _ in range(sets):
            q, k, v = normal(*q_shape, case.head_dim_qk), normal(*kv_shape, case.head_dim_qk), normal(
                *kv_shape, case.head_dim_v)
            made.append(Inputs(q, k, v, q.new_full((*q.shape[:-1], case.head_dim_v), math.nan)))
        return made

    def ours(self, case: Case, spec: Spec, inputs: Sequence[Inputs]) -> Sequence[Call]:
        def call(x: Inputs) -> Call:
            return lambda: flashgen.attention(x.q, x.k, x.v, causal=case.causal, window=case.window, spec=spec,
                                              out=x.out)

        calls = [call(x) for x in inputs]
        calls[0]()
        if not inputs[0].out.isfinite().all():  # a kernel that writes nothing would be fast
            raise VerifyError("out is not finite", where=f"{spec.variant}.{spec.arch}", next="flashgen verify")
        return calls

    def peer(self, name: str, case: Case, inputs: Sequence[Inputs]) -> Sequence[Call]:
        """Refused, with the peer's own words, if it does not serve the case."""
        try:
            attend = PEERS[name][1](case)
            attend(inputs[0])
            torch.cuda.synchronize()
        except Refused:
            raise
        except Exception as err:  # whatever a library raises for a shape it does not take
            raise Refused(f"{type(err).__name__}: {str(err).strip().partition(chr(10))[0]}") from err
        return [functools.partial(attend, x) for x in inputs]

    def timer(self, calls: Sequence[Call]) -> Run:
        return self._timer(calls)

    def release(self) -> None:
        torch.cuda.empty_cache()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


# -- timers


def graph_timer(calls: Sequence[Call]) -> Run:
    """Replays of a CUDA graph that holds every call once: no host in between."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls[:2]:
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            for call in calls:
                call()
    except Exception as err:  # whatever a library raises where it waits for the device or allocates by itself
        raise Refused(f"cannot be captured in a CUDA graph: {err}", next="--timer events") from err
    return _long_enough(graph.replay, len(calls))


def event_timer(calls: Sequence[Call]) -> Run:
    """Plain calls, one after the other."""
    def run_all() -> None:
        for call in calls:
            call()
    return _long_enough(run_all, len(calls))


TIMERS: dict[str, Callable[[Sequence[Call]], Run]] = {"graph": graph_timer, "events": event_timer}


def _long_enough(work: Callable[[], object], calls: int) -> Run:
    """Times `work` as often in a row as fills TIMING_MS."""
    _elapsed_ms(work, 1)
    repeats = max(1, math.ceil(TIMING_MS / max(_elapsed_ms(work, 1), 1e-3)))
    return lambda: _elapsed_ms(work, repeats) / (repeats * calls)


def _elapsed_ms(work: Callable[[], object], repeats: int) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    for _ in range(repeats):
        work()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


# -- peers: (why it is absent or None, preparation for a case)


def _present() -> str | None:
    return None


def _square_only(case: Case) -> None:
    if case.causal and case.seqlen_q != case.seqlen_kv:
        raise Refused("its causal mask is aligned top-left, ours bottom-right: they differ unless seqlen_q = seqlen_kv")
    if case.window != (-1, -1):
        raise Refused("it has no window")


def _sdpa(backend: str) -> Prepare:
    def prepare(case: Case) -> Callable[[Inputs], object]:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        _square_only(case)
        chosen, gqa = getattr(SDPBackend, backend), case.num_heads_q != case.num_heads_kv

        def attend(x: Inputs) -> Tensor:
            with sdpa_kernel(chosen):
                return torch.nn.functional.scaled_dot_product_attention(
                    *x.heads_first, is_causal=case.causal, enable_gqa=gqa)
        return attend
    return prepare


def _flex(case: Case, device: str = "cuda") -> Callable[[Inputs], object]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    shift, (left, right) = case.seqlen_kv - case.seqlen_q, case.window

    def visible(b: Tensor, h: Tensor, q_pos: Tensor, kv_pos: Tensor) -> Tensor:
        seen = kv_pos <= q_pos + shift if case.causal else kv_pos >= 0
        if left >= 0:
            seen = seen & (kv_pos >= q_pos + shift - left)
        return seen & (kv_pos <= q_pos + shift + right) if right >= 0 else seen

    torch.compiler.reset()  # past its limit of recompilations it would turn to an eager path without a word
    masked = case.causal or case.window != (-1, -1)
    mask = create_block_mask(visible, None, None, case.seqlen_q, case.seqlen_kv, device=device) if masked else None
    compiled = torch.compile(flex_attention, fullgraph=True, dynamic=False)
    return lambda x: compiled(*x.heads_first, block_mask=mask, enable_gqa=case.num_heads_q != case.num_heads_kv)


def _fa3_module() -> str | None:
    return next((name for name in FA3_MODULES if importlib.util.find_spec(name) is not None), None)


def _fa3(case: Case) -> Callable[[Inputs], object]:
    attend = importlib.import_module(_fa3_module() or "").flash_attn_func
    options = {} if case.window == (-1, -1) else {"window_size": case.window}
    return lambda x: attend(x.q, x.k, x.v, causal=case.causal, **options)


PEERS: dict[str, tuple[Callable[[], str | None], Prepare]] = {
    "sdpa-fa2": (_present, _sdpa("FLASH_ATTENTION")),
    "sdpa-cudnn": (_present, _sdpa("CUDNN_ATTENTION")),
    "flex": (lambda: None if importlib.util.find_spec("triton") else "triton is not installed", _flex),
    "fa3": (lambda: None if _fa3_module() else f"none of {', '.join(FA3_MODULES)} can be imported; pip install fa3-fwd",
            _fa3),
}


# -- host overhead

OVERHEAD_CALLS = 200   # between two waits: fewer than a stream queues before the host must wait
OVERHEAD_ROUNDS = 25


def measure_overhead() -> dict[str, float]:
    """Microseconds of host time per warm call on a tiny problem, medians: our call with and without `out`, and an empty
    torch op that was defined in the same way and takes the same arguments."""
    inputs = CudaDevice().inputs(Case(1, 16, 16, 1, 1, 64, 64), 1)[0]
    q, k, v, out = inputs.q, inputs.k, inputs.v, inputs.out
    with _empty_op() as empty:
        calls: dict[str, Call] = {
            "attention_us": lambda: flashgen.attention(q, k, v),
            "attention_out_us": lambda: flashgen.attention(q, k, v, out=out),
            "empty_op_us": lambda: empty(q, k, v, None, None, 0, -1, -1, 0.125, "", out=out),
        }
        return host_us(calls, torch.cuda.synchronize)


def host_us(calls: dict[str, Call], wait: Callable[[], object], clock: Callable[[], float] = time.perf_counter
            ) -> dict[str, float]:
    """Median microseconds per call of each, interleaved. `wait` empties the queue outside the time."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(OVERHEAD_ROUNDS + 1):
        for name, call in calls.items():
            wait()
            start = clock()
            for _ in range(OVERHEAD_CALLS):
                call()
            elapsed = clock() - start
            if number:  # the first round compiles and fills the memo
                times[name].append(1e6 * elapsed / OVERHEAD_CALLS)
    wait()
    return {name: round(statistics.median(values), 3) for name, values in times.items()}


@contextlib.contextmanager
def _empty_op() -> Iterator[Callable[..., object]]:
    library = torch.library.Library("flashgen_bench", "DEF")
    library.define("empty(Tensor q, Tensor k, Tensor v, Tensor? cu_seqlens_q, Tensor? cu_seqlens_kv, int causal, "
                   "int window_left, int window_right, float softmax_scale, str spec, *, Tensor(a!) out) -> ()")
    library.impl("empty", lambda *_, out: None, "CUDA")
    torch.library.register_fake("flashgen_bench::empty", lambda *_, out: None, lib=library)
    try:
        yield torch.ops.flashgen_bench.empty
    finally:
        library._destroy()
